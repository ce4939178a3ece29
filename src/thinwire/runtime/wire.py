"""The `Wire` that ``thinwire.compress()`` returns."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from thinwire.arguments import warn_caller
from thinwire.collectives import Algorithm
from thinwire.compressors import Raw
from thinwire.plan import Plan, Site
from thinwire.runtime import checkpoint
from thinwire.runtime.adapt import Decision
from thinwire.runtime.consistency import agree_on_state, raise_together
from thinwire.runtime.engine import Engine
from thinwire.runtime.executor import CLOSED, on_the_host
from thinwire.runtime.stats import Stats

E = TypeVar("E", bound=Engine)


class Checkpointable:
    """A Wire for libraries that call ``state_dict()`` on every rank and write what rank 0 returns, and load that on
    every rank: ``Accelerator.register_for_checkpointing``."""

    def __init__(self, wire: Wire[Any]) -> None:
        self._wire = wire

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states of all ranks. A collective call."""
        return self._wire.gather_state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state, on every rank."""
        self._wire.load_state_dict(state)


class Wire(Generic[E]):
    """Compressed communication of one model: its plan, its state, its statistics.

    ``state_dict()`` holds tensors only and belongs into every checkpoint: random draws depend on the step, and error
    feedback keeps a residual, so a run that resumes with it continues bit for bit.
    """

    def __init__(self, engine: E) -> None:
        self.engine = engine
        """Engine that attachments call."""
        self._loaded: tuple[Plan, frozenset[str]] | None = None
        """Plan that was loaded, and the layers that are raw in it and were not before."""
        self._at_detach = ExitStack()
        self._between_steps: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.moments: checkpoint.Moments | None = None
        """Moments of an optimizer that differ between ranks, which checkpoints hold; None if there are none."""
        # A model that is dropped takes its Wire along. When the interpreter ends, the operating system closes
        # connections.
        self.at_detach(engine.close)
        weakref.finalize(self, engine.close).atexit = False

    def __repr__(self) -> str:
        """Return a table of the layers, with specs or reasons why raw, and bytes; and what this rank takes: `memory`,
        and the threads and open files of its process."""
        table = self.engine.table(self.declined, self._raw_in_checkpoint())
        threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
        held = f"{self.engine.planned_bytes:,} bytes of compressors' state"
        if under_way := self.engine.planned_exchange_bytes:
            held += f", at most {under_way:,} while gradients are exchanged"
        return f"{table}\n  on this rank: {held}; its process has {threads} threads and {files} open files"

    @property
    def rank(self) -> int:
        """Index of this process in checkpoints."""
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that have a part of a checkpoint."""
        return self.engine.world_size

    @property
    def plan(self) -> Plan:
        """The compressor of each layer. Those of a sharded model are called ``weights/<name>``, ``gradients/<name>``
        and ``across/<name>``."""
        return self.engine.plan

    @property
    def declined(self) -> dict[str, str]:
        """Layers that stay raw because compressing them would have been slower, here or where the checkpoint that was
        loaded was written, and the compressor they would have."""
        asked = self.engine.asked.layers
        return {
            name: str(asked[name])
            for name, compressor in self.plan.layers.items()
            if isinstance(compressor, Raw) and not isinstance(asked.get(name, compressor), Raw)
        }

    @property
    def unsuited(self) -> dict[str, str]:
        """Layers that stay raw because their compressor cannot take layers of their shape, or none can take their dtype
        or sparse gradients, and why."""
        return dict(self.plan.unsuited)

    @property
    def decisions(self) -> Sequence[Decision]:
        """The decisions of the policy so far (``adapt=``)."""
        return tuple(self.engine.adapter.decisions) if self.engine.adapter else ()

    @property
    def seed(self) -> int:
        """Seed of the random draws."""
        return self.engine.seed

    @property
    def start(self) -> int:
        """Number of steps at the beginning that stay uncompressed."""
        return self.engine.start

    @property
    def attached(self) -> bool:
        """Whether the Wire is attached: True until `detach` is called."""
        return self.engine.attached

    @property
    def step(self) -> int:
        """Index of the last backward pass that communicated; −1 before the first."""
        return self.engine.step

    @property
    def algorithm(self) -> Algorithm:
        """The collective algorithm of the coded messages."""
        return self.engine.algorithm

    @property
    def memory(self) -> int:
        """Bytes that the compressors' state takes on this rank and, under DistributedDataParallel, what is needed while
        gradients are exchanged, at most, by formula: known before training.

        Error feedback keeps two values for each element of the model, 8 bytes, or about 2 with ``ef(..., bits=8)``. At
        most two buckets are under way at a time: their messages, and residuals of 8 bits as fp32.
        """
        return self.engine.planned_bytes + self.engine.planned_exchange_bytes

    @property
    def stats(self) -> Stats:
        """Totals so far, as a copy: what is under way may be partly in it."""
        counts = {"declined_layers": len(self.declined), "unsuited_layers": len(self.unsuited)}
        return replace(self.engine.present_stats(), **counts)

    def reset_stats(self) -> None:
        """Start counting from zero."""
        self.engine.reset_stats()

    def sent_bytes(self, site: Site = "gradients") -> int:
        """Return the bytes that this rank sends, by formula, headers included.

        Under DistributedDataParallel, those of a compressed step, by the buckets that the last step had. Under FSDP2,
        those of gathering all ``"weights"`` once, or of reducing all ``"gradients"`` once, as fp32.
        """
        return self.engine.sent_bytes(site)

    def state_dict(self) -> dict[str, Tensor]:
        """Return step, seed, plan and this rank's slots, as tensors, which ``weights_only=True`` loads. All ranks call
        it, between steps.

        It is meant for checkpoints to which every rank writes: ``torch.distributed.checkpoint``, where the keys of
        slots, which carry the rank, merge, or one file for each rank. Where one rank writes, save `gather_state_dict`.
        """
        self._check_attached()
        for held in self._between_steps:
            if (check := held()) is not None:
                check()
        with on_the_host():
            state = self.engine.alone(self.engine.collect)
            if self.moments is not None:
                state |= self.moments.state(self.rank)
            return state | self.engine.adapter.state() if self.engine.adapter else state

    def state_dict_template(self, world_size: int, saved: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return a template of the merged states of a world of ``world_size`` ranks, to load its checkpoint into.

            state = {"wire": wire.state_dict_template(8)}  # it was written by 8 ranks; this is another number
            torch.distributed.checkpoint.load(state, checkpoint_id=folder)
            wire.load_state_dict(state["wire"])

        Where a policy changes plans (``adapt=``), slots have the shapes that the saved plan's compressors want: load
        ``"plan"`` alone first, ``{"wire": {"plan": wire.state_dict()["plan"]}}``, and pass it as ``saved``.
        """
        with on_the_host():
            plan = self.plan if saved is None else checkpoint.saved_plan(saved, self.plan)
            state = self.engine.template(plan, world_size)
            if self.moments is not None:
                state |= self.moments.template(world_size)
            return state | self.engine.adapter.state() if self.engine.adapter else state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a gathered state, or from this rank's own `state_dict`. All ranks call it, between steps.

        A state of `gather_state_dict` loads into a world of any size: with another number of ranks the mean residual is
        preserved (`thinwire.runtime.slots.reshard`). A `state_dict` loads on the rank that saved it, in a world of the
        same size. The plan is the state's, whose residuals are those of its compressors; a warning says which layers
        were to have another compressor.

        Raises:
            ValueError: the state is of another wire format or of a model with other layers, or lacks the slots of some
                ranks.
            PeerFailedError: another rank has met such an error.
            DisagreementError: ranks loaded different states: of other steps, or of runs that differ in what must be
                equal on all ranks. Where it is raised, nothing was taken of them.
        """
        with on_the_host():
            self._continue_from(state)

    def _continue_from(self, state: Mapping[str, Tensor]) -> None:
        self._check_attached()
        with self.fail_together("load_state_dict()"):
            checked = self.engine.read(state)
            moments = self.moments.read(state, self.rank, self.world_size) if self.moments is not None else None
        self.check_alike(checked.record, checked.shared)
        before, known = self.plan, self._raw_in_checkpoint()
        checked.adopt()
        self._note_loaded(before, known)
        self._warn_about_other_compressors(before)
        if self.moments is not None and moments is not None:
            self.moments.load(moments)

    def _raw_in_checkpoint(self) -> frozenset[str]:
        """Return the `declined` layers that were not measured to be slower here, but raw in the checkpoint."""
        if self._loaded is None or (self.engine.adapter is not None and self._loaded[0] is not self.plan):
            return frozenset()  # nothing was loaded, or a policy has changed the plan since
        return self._loaded[1] & self.declined.keys()

    def _note_loaded(self, before: Plan, known: frozenset[str]) -> None:
        """Note the layers that the plan that was just loaded leaves raw. ``known``: those of an earlier one."""
        raw = {name for name, compressor in self.plan.layers.items() if isinstance(compressor, Raw)}
        chosen_here = {name for name in raw - known if isinstance(before.layers.get(name), Raw)}
        self._loaded = self.plan, frozenset(raw - chosen_here)

    def _warn_about_other_compressors(self, before: Plan) -> None:
        """Warn of layers of a loaded plan with another compressor than was asked for, unless a policy chooses it."""
        other = [
            f"{name}: {loaded}, not {before.layers.get(name)}"
            for name, loaded in self.plan.layers.items()
            if loaded not in (before.layers.get(name), self.engine.asked.layers.get(name))
        ]
        if other and self.engine.adapter is None:
            warn_caller(
                "load_state_dict() continues with the compressors of the checkpoint, which differ from those that "
                f"were asked for here in {len(other)} layers ({other[0]}). To train with these, start without this "
                "state: residuals then begin at zero"
            )

    @contextmanager
    def fail_together(self, doing: str) -> Iterator[None]:
        """Let all ranks fail where the body fails on one of them; ``doing`` names the call. Every rank runs the body,
        between steps.

        Raises:
            PeerFailedError: the body has failed on another rank.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as met:  # noqa: BLE001 - raised on every rank below
            error = met
        self.engine.alone(lambda: raise_together(error, self.engine.whole_world(), doing))

    def check_alike(self, record: Mapping[str, str], shared: Mapping[str, Tensor]) -> None:
        """Check, on all ranks and between steps, that they have loaded the same record and shared tensors.

        Raises:
            DisagreementError: they have not; the message names the first difference.
        """
        self.engine.alone(lambda: agree_on_state(record, shared, self.engine.whole_world()))

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Return all ranks' states in one dictionary, the same on every rank, for checkpoints that one rank writes.

            state = {"model": model.state_dict(), "wire": wire.gather_state_dict()}  # on every rank
            if rank == 0:
                torch.save(state, path)

        A collective call of all ranks, between steps. `load_state_dict` takes it on every rank of a world of any size.
        """
        self._check_attached()
        with on_the_host():
            with self.fail_together("gather_state_dict()"):
                state = self.state_dict()
                if self.engine.adapter is not None:
                    state |= self.engine.adapter.state(on_every_rank=True)
            return self.engine.alone(lambda: checkpoint.gather(state, self.engine.whole_world()))

    def checkpointable(self) -> Checkpointable:
        """Return an object whose ``state_dict()`` is `gather_state_dict`, for libraries that write what rank 0 returns.

        ::

            accelerator.register_for_checkpointing(wire.checkpointable())
        """
        return Checkpointable(self)

    def discard_step(self) -> None:
        """Leave error feedback as it was before the last backward pass, whose gradients the loop drops.

        Call it on every rank in place of the optimizer's step, as where a gradient is too long. A step that a
        `GradScaler` skips needs no call.
        """
        self._check_attached()
        self.engine.discard_step()

    def detach(self) -> None:
        """Stop compressing, between steps and on every rank: gradients go through PyTorch's own collectives from now
        on.

        PyTorch cannot unregister a communication hook of DDP: the one that is there passes gradients through. The model
        may be compressed again; residuals are dropped. Afterwards whatever needs the other ranks, as `state_dict` and
        `load_state_dict` do, raises ``RuntimeError``; statistics and the plan can still be read.
        """
        if self.attached:
            self._at_detach.close()
            self.engine.attached = False

    def at_detach(self, call: Callable[[], object]) -> None:
        """Have `detach` call this, before the callbacks that were registered earlier."""
        self._at_detach.callback(call)

    def between_steps(self, check: Callable[[], None]) -> None:
        """Have `state_dict` call this method first, which raises where the present moment is not between two steps.
        Its object is not kept alive."""
        self._between_steps.append(weakref.WeakMethod(check))

    def _check_attached(self) -> None:
        if not self.attached:
            raise RuntimeError(CLOSED)
