"""Preconditioned gradients that each rank sends under `CompressedAdamW`, and checkpoints of its own moments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.integrations.optimizers import check_holds_all
from thinwire.optim import CompressedAdamW
from thinwire.runtime.bucket import BucketLayers, Substitute, bucket_parts, view_layer
from thinwire.runtime.checkpoint import check_sealed, sealed
from thinwire.runtime.placement import Placement

_CHECKSUMS = "moment_checksums"


class Preconditioned(Substitute):
    """Replaces gradients in a DDP bucket, or in a flat buffer of FSDP2, by what `CompressedAdamW` sends, before they
    are reduced."""

    when_dense = True

    def __init__(self, optimizer: CompressedAdamW, parameters: Mapping[str, Tensor]) -> None:
        """Create it with the ``parameters`` of the model, by name.

        Raises:
            ValueError: the optimizer lacks some of those that are trained.
        """
        check_holds_all(optimizer, parameters)
        optimizer.expect_no_wire()
        self._optimizer = optimizer
        self._all = dict(parameters)
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that each rank's own moments take, with those of the step under way."""
        sizes = ((p.numel() * p.itemsize, self._optimizer.local_moments(p)) for p in self._parameters.values())
        return sum(2 * num_bytes * len(moments) for num_bytes, moments in sizes)

    def make(self, flat: Tensor, layers: BucketLayers, loss_scale: float) -> None:
        # Layers that were frozen before, too.
        self._parameters |= {name: self._all[name] for name, _ in layers}
        parts = [(self._parameters[name], gradient) for name, gradient in bucket_parts(flat, layers)]
        self._optimizer.outgoing([(p, view_layer(p, gradient)) for p, gradient in parts], loss_scale)

    def undo(self, mean: Tensor, layers: BucketLayers, loss_scale: float) -> None:
        arrived = ((self._parameters[name], update) for name, update in bucket_parts(mean, layers))
        self._optimizer.note_arrived(arrived, loss_scale)

    def make_sharded(self, flat: Tensor, placement: Placement, loss_scale: float) -> None:
        """Do what `make` does, in a flat buffer that has a part for each rank, with its shards of all layers."""
        for name in placement.by_name:
            gradient = placement.whole(flat, name)
            self._optimizer.outgoing([(self._parameters[name], gradient)], loss_scale)
            placement.write(flat, name, gradient)

    def release(self, groups: Sequence[dist.ProcessGroup], names: Collection[str] | None = None) -> None:
        """Leave gradients (all, or those of ``names``) to the optimizer from now on.

        All ranks must call this. They continue with the mean moments over ``groups``, one after the other, because
        replicas that normalize the same gradient by different moments would diverge.
        """
        self._optimizer.forget_sent()
        for name, parameter in self._parameters.items():
            if names is not None and name not in names:
                continue
            moments = self._optimizer.local_state(parameter)
            for moment in moments.values():
                for group in groups:
                    dist.all_reduce(moment, group=group)
                    moment.div_(group.size())
            self._optimizer.load_local_state(parameter, moments)

    def state(self, rank: int) -> dict[str, Tensor]:
        """Return this rank's moments, with checksums."""
        return self._entries(rank, self._optimizer.local_state)

    def template(self, world_size: int) -> dict[str, Tensor]:
        """Return the results of `state` on all ranks of a world of ``world_size``, with moments of zeros."""

        def zeros(parameter: Tensor) -> dict[str, Tensor]:
            names = self._optimizer.local_moments(parameter)
            return {name: torch.zeros(parameter.numel(), dtype=parameter.dtype, device="cpu") for name in names}

        return {key: value for rank in range(world_size) for key, value in self._entries(rank, zeros).items()}

    def _entries(self, rank: int, moments_of: Callable[[Tensor], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        entries = {
            f"rank{rank}/{moment}/{name}": value.cpu()
            for name, parameter in self._parameters.items()
            for moment, value in moments_of(parameter).items()
        }
        return sealed(entries, f"rank{rank}/{_CHECKSUMS}")

    def read(self, state: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
        """Return the moments of ``rank`` in a state, by parameter: its own or, from a world of another size, the mean.

        The result is empty if the state was saved with another optimizer.

        Raises:
            ValueError: the state has moments of some ranks or layers only, or they are not those that were saved.
        """
        saved = [r for r in range(state["shares"].numel()) if f"rank{r}/{_CHECKSUMS}" in state]
        if not saved:
            return {}
        ranks = [rank] if state["shares"].numel() == world_size else list(range(state["shares"].numel()))
        moments: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            moments[name] = {}
            for moment in self._optimizer.local_moments(parameter):
                keys = [f"rank{r}/{moment}/{name}" for r in ranks]
                if missing := [key for key in keys if key not in state or state[key].numel() != parameter.numel()]:
                    raise ValueError(f"the state lacks {missing[0]}: save wire.gather_state_dict(), on every rank")
                moments[name][moment] = torch.stack([state[key].reshape(-1) for key in keys]).mean(0)
        for r in ranks:
            keys = [f"rank{r}/{moment}/{name}" for name, held in moments.items() for moment in held]
            check_sealed(state, keys, f"rank{r}/{_CHECKSUMS}")
        return moments

    def load(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue with the moments that `read` has returned."""
        for name, held in moments.items():
            self._optimizer.load_local_state(self._parameters[name], held)
