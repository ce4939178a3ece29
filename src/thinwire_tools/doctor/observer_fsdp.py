"""Observation of the communication of a model that ``fully_shard`` has sharded (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.compat import FSDPGroup, all_gather_single, fsdp_groups, reduce_scatter_single, unwrapped
from thinwire.plan import named_parameters
from thinwire.runtime.executor import mark
from thinwire_tools.doctor.forecast import Collective, Event, Move, ShardedPace
from thinwire_tools.doctor.watched import DoctorError, Step, check_size

if TYPE_CHECKING:
    from thinwire_tools.doctor.observer import Observer


class ShardedObserver:
    """Custom collectives like FSDP2's own that also record when they were requested, how long they took and where their
    results were needed. On a CPU FSDP2 computes nothing while its own collectives are under way, so every step shows
    both the unchanged training and the time of computing. On a device it does, on other streams, so in every other step
    streams take turns; a collective counts as requested when its stream has come to it, but not before the request or
    need before it."""

    def __init__(self, watcher: Observer, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        sharded = [
            (unwrapped(path), module) for path, module in model.named_modules() if isinstance(module, FSDPModule)
        ]
        self.watcher, self.device = watcher, next(model.parameters()).device
        self._computing = current_stream(self.device)
        self._names = {id(p): name for name, p in named_parameters(model).items()}
        groups: dict[int, tuple[str, Any, FSDPGroup]] = {}
        for path, module in sharded:
            for group in fsdp_groups(module):
                if group.parameters:
                    groups.setdefault(id(group.identity), (path, module, group))
        among = {tuple(dist.get_process_group_ranks(group.process_group)) for _, _, group in groups.values()}
        if len(among) != 1 or len({id(module) for _, module, _ in groups.values()}) != len(groups):
            raise DoctorError("doctor looks at models all of whose modules are sharded over the same ranks")
        self.group: dist.ProcessGroup = next(iter(groups.values()))[2].process_group
        check_size(self.group)
        for path, module, group in groups.values():
            self._attach(path, module, group)

    def _attach(self, path: str, module: Any, group: FSDPGroup) -> None:
        where = f"module {path}" if path else "the root module"
        if group.other_comm:
            raise DoctorError(
                f"the bytes of {where} are moved by {group.other_comm}, and doctor looks at training without it: take "
                "thinwire.compress() and other custom collectives out of the script for now"
            )
        if group.offloads:
            raise DoctorError(f"{where} has its shards on the host: take CPUOffloadPolicy out of the script for now")
        if group.replicate_group is not None or group.all_reduce_hook is not None or group.post_forward_size:
            raise DoctorError(
                f"{where} is sharded and replicated, or gathers among fewer ranks in backward: doctor looks at models "
                "whose shards are spread over all ranks once"
            )
        names = tuple(self._names[id(p.now())] for p in group.parameters)
        module.set_custom_all_gather(_Gather(self, where, group, names))
        module.set_custom_reduce_scatter(_Reduce(self, where, group, names))

    def timed(self, run: Callable[[], object], step: Step | None, move: Move) -> int:
        """Run a collective, record how long it takes where it is waited for, and return its number in the step."""
        if step is None:
            run()
            return -1
        number, computing, stream = len(step.buckets), self._computing, current_stream(self.device)
        step.events.append((mark(self.device), number, False))
        step.buckets.append(move)
        if computing is None or stream is None:
            began = mark(self.device)
            run()
            step.moves.append((began, mark(self.device)))
        elif step.serial:
            stream.wait_stream(computing)
            began = mark(self.device)
            run()
            step.moves.append((began, mark(self.device)))
            computing.wait_stream(stream)
        else:
            run()
        return number

    def watched(self, steps: Sequence[Step]) -> tuple[tuple[ShardedPace, ...], list[float], list[list[float]]]:
        """Return paces of steps, their seconds, and those of each collective: the same everywhere.

        Raises:
            DoctorError: the steps are not alike.
        """
        if any(_order(step) != _order(steps[-1]) for step in steps):
            raise DoctorError("this model uses its modules in another order from step to step: it cannot be predicted")
        overlaps = self._computing is not None
        serial = [step for step in steps if step.serial or not overlaps]
        plain = [step.seconds for step in steps if not (step.serial and overlaps)]
        computed = [[*(step.computed(at) for at, _, _ in step.events), step.compute_s] for step in serial]
        ends, took, times = (
            torch.tensor(values, dtype=torch.float64, device=self.device)
            for values in (computed, [step.took for step in serial], plain)
        )
        parts = ends.cummax(1).values.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
        alone = parts.sum(1)
        dist.all_reduce(parts, op=dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(alone, op=dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self.group)
        # The last rank waited only for the others' bytes.
        dist.all_reduce(took, op=dist.ReduceOp.MIN, group=self.group)
        rows = zip(parts.cumsum(1).tolist(), alone.tolist(), strict=True)
        paces = tuple(replace(_pace(steps[-1], row, alone_s), overlaps=overlaps) for row, alone_s in rows)
        return paces, times.tolist(), took.tolist()


def _order(step: Step) -> list[tuple[int, bool]]:
    return [(move, needed) for _, move, needed in step.events]


def _pace(step: Step, row: Sequence[float], alone_s: float) -> ShardedPace:
    events = tuple(Event(at_s, *which) for which, at_s in zip(_order(step), row[:-1], strict=True))
    asked = {event.move: event.at_s for event in events if not event.needed}
    moves = tuple(replace(_move(move), ready_s=asked[i]) for i, move in enumerate(step.buckets))
    return ShardedPace(moves, events, row[-1], alone_s, batches=step.batches)


def _move(move: object) -> Move:
    assert isinstance(move, Move)
    return move


class _Comm:
    """The base of both collectives."""

    def __init__(self, eyes: ShardedObserver, module: str, group: FSDPGroup, names: tuple[str, ...]) -> None:
        self._observer, self._module, self._group, self._names = eyes, module, group, names

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _move(self, kind: Collective, x: Tensor, *, late: bool = True) -> Move:
        pairs = zip(self._names, self._group.parameters, strict=True)
        # Gradients are sent for trained parameters only.
        layers = tuple((n, p.shape) for n, p in pairs if kind == "all_gather" or p.now().requires_grad)
        return Move(0.0, layers, x.element_size(), kind, self._module, late)


class _Gather(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        step = self._observer.watcher.present
        run = partial(all_gather_single, output_tensor, input_tensor, group)
        number = self._observer.timed(run, step, self._move("all_gather", input_tensor))
        return None if step is None else _Needed(step, number, self._observer.device)


class _Reduce(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        late = op != dist.ReduceOp.SUM and not self._group.reads_at_once()
        for parameter in self._group.parameters if late else ():
            late &= parameter.now().dtype == output_tensor.dtype
        run = partial(reduce_scatter_single, output_tensor, input_tensor, group, op)
        self._observer.timed(run, self._observer.watcher.present, self._move("reduce_scatter", input_tensor, late=late))
        self._observer.watcher.synced()
        return None


class _Needed(dist.Work):
    """The work of a gather. FSDP2 waits for it where it first needs the weights, which is recorded; a device's streams
    wait for each other by an event of FSDP2's own."""

    def __init__(self, step: Step, number: int, device: torch.device) -> None:
        super().__init__()
        self._step, self._number, self._device = step, number, device

    def wait(self, timeout: object = None) -> bool:
        self._step.events.append((mark(self._device), self._number, True))
        return True


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream of a device that is current now; None on a CPU, which has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
