"""What each rank sends under `CompressedAdamW`: its own preconditioned gradient; and its own moments in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.integrations.optimizer_pairing import check_holds_all
from thinwire.optim import CompressedAdamW
from thinwire.runtime.channel import BucketLayers
from thinwire.runtime.checkpoint import check_sealed, sealed

_CHECKSUMS = "moment_checksums"


class Preconditioned:
    """Turns a DDP bucket of gradients into what `CompressedAdamW` sends, before it is reduced."""

    def __init__(self, optimizer: CompressedAdamW, parameters: Mapping[str, Tensor]) -> None:
        """``parameters``: those of the model, by name.

        Raises:
            ValueError: the optimizer has not all of them that are trained.
        """
        check_holds_all(optimizer, parameters)
        self._optimizer = optimizer
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}

    def make(self, flat: Tensor, layers: BucketLayers, loss_scale: float) -> None:
        """Replace the gradients of ``layers``, end to end in ``flat`` and ``loss_scale`` times their size, in place."""
        start = 0
        for name, shape in layers:
            numel = torch.Size(shape).numel()
            self._optimizer.outgoing(self._parameters[name], flat[start : start + numel], loss_scale)
            start += numel

    def release(self, group: dist.ProcessGroup) -> None:
        """Leave gradients to the optimizer from now on. All ranks call it: they go on with their mean moments, since
        replicas that normalise the same gradient by different moments would part."""
        self._optimizer.forget_sent()
        for parameter in self._parameters.values():
            moments = self._optimizer.local_state(parameter)
            for moment in moments.values():
                dist.all_reduce(moment, group=group)
                moment.div_(group.size())
            self._optimizer.load_local_state(parameter, moments)

    def state(self, rank: int) -> dict[str, Tensor]:
        """This rank's moments, with checksums."""
        entries = {
            f"rank{rank}/{moment}/{name}": value.cpu()
            for name, parameter in self._parameters.items()
            for moment, value in self._optimizer.local_state(parameter).items()
        }
        return sealed(entries, f"rank{rank}/{_CHECKSUMS}")

    def read(self, state: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
        """The moments of ``rank`` in a state, by parameter: its own; from a world of another size, the mean of all.

        Empty if the state was saved with another optimizer.

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
        """Continue with what `read` has found."""
        for name, held in moments.items():
            self._optimizer.load_local_state(self._parameters[name], held)
