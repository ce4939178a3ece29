"""Pipelines: stages whose messages to their neighbors are compressed, under PyTorch's own schedules."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from thinwire.arguments import warn_caller
from thinwire.collectives import PeerFailedError
from thinwire.compat import stage_tensors, tells_stage_tensors
from thinwire.compressors import Compressor
from thinwire.integrations.transports import fail_before_meeting
from thinwire.pipeline.boundary import BoundarySide
from thinwire.pipeline.links import LinkChoices
from thinwire.pipeline.message import DIRECTIONS, Batch, BoundaryTensors, Corners, Direction, Ids, ScheduleStep, Spec
from thinwire.pipeline.options import PipelineOptions, Specs, read_state, write_state
from thinwire.pipeline.pipeline import Pipeline, report
from thinwire.pipeline.stats import PipelineStats
from thinwire.policies import ByLink, LinkChoice
from thinwire.runtime import group_seed
from thinwire.runtime.checkpoint import integers
from thinwire.store import Memory, Place, Store, StoreError

_BEGIN = "clear_runtime_states"
"""Method of a stage with which schedules begin a run."""


_TIMED = 64
"""Number of micro-batches whose computation is remembered."""
_LARGE_CHANGE = 0.3
"""Share of an activation. Dropout of 0.1 leaves changes at half of it: in 3 bits their error is then three quarters of
that of activations that are sent directly."""


class _ReplacedMethod:
    """Substitute for the method with which a plain stage begins a run. It warns of a mistake: the stage trains, and the
    compressed stage that was made of it has never run."""

    def __init__(self, stage: PipelineStage) -> None:
        self._stage = weakref.ref(stage)
        self.needs_warning = True

    def __call__(self) -> None:
        stage = self._stage()
        assert stage is not None, "its own method was called"
        if self.needs_warning and stage.has_backward:
            self.needs_warning = False
            warnings.warn(
                f"stage {stage.stage_index} trains without compression: thinwire.compress_stage() leaves the stage "
                "that it is given as it is, and the stage that it returned has not run. Give that one to the schedule: "
                "stage = thinwire.compress_stage(stage, ...)",
                stacklevel=3,
            )
        type(stage).clear_runtime_states(stage)


class CompressedStage(PipelineStage):
    """A stage of a pipeline whose messages to its neighbors are compressed: made by `thinwire.compress_stage`.

    Schedules ask a stage for its sends and receives, and then for its work on the received tensors. They get no sends
    and receives: a thread of its own compresses all tensors into one message and sends it, and receives of such
    messages are posted when the step begins; other threads wait for them and decode them. Gloo moves nothing before its
    receive is posted, and schedules ask for each only when it is needed: the link would rest while a stage computes.
    And they wait for a send before they continue with other work: the stage would rest while its link carries.
    """

    def __init__(self, stage: PipelineStage, options: PipelineOptions) -> None:
        backends = dist.get_backend_config(stage.group)
        if "cpu:" not in backends:
            raise NotImplementedError(
                f"compressed activations are sent from the host over gloo, but the pipeline's group has {backends}: "
                "call init_process_group('cpu:gloo,cuda:nccl')"
            )
        options.check(stage.num_stages)
        self.options = options
        self.pipeline: Pipeline | None = None
        """Pipeline in which the stage has begun steps."""
        self.training_step = 0
        """Number of training steps so far."""
        self.run = 0
        """Number that identifies the training through all restarts; 0 before the first step that keeps messages."""
        self.totals = PipelineStats()
        """Statistics without the contents of the stores."""
        self.sides: list[BoundarySide] = []
        """Sides of the boundaries to neighbors on other ranks."""
        self.choices = LinkChoices()
        self.links: tuple[Mapping[Direction, LinkChoice], ...] = ()
        """Choices of ``adapt=ByLink()`` with their measurements, by boundary, the first stage's first; empty before,
        and where the choice was read from a checkpoint."""
        self._batch: Batch | None = None
        self._loaded: dict[str, dict[str, Tensor]] = {}
        """Records of a state, by side, until the side's store is opened."""
        self._computed: dict[Direction, deque[float]] = {name: deque(maxlen=_TIMED) for name in DIRECTIONS}
        self._is_warned = False
        own = {*vars(self), *vars(CompressedStage)} - {*dir(PipelineStage)}
        if taken := own & {*dir(stage)}:
            raise TypeError(
                f"{type(stage).__name__} has {', '.join(sorted(taken))}, which a compressed stage has for itself: give "
                "its attributes other names"
            )
        # It takes the place of a stage that was set up already, with any arguments.
        vars(self).update(vars(stage))
        if isinstance(vars(self).get(_BEGIN), _ReplacedMethod):  # compressed before, by a stage that this one replaces
            del vars(self)[_BEGIN]
        self._replaced = _ReplacedMethod(stage)
        setattr(stage, _BEGIN, self._replaced)

    def set_sample_ids(
        self,
        ids: Ids,
        *,
        length: int | None = None,
        lengths: Ids | None = None,
        upcoming: Ids = (),
        corners: Corners | None = None,
    ) -> None:
        """Set the samples of the next ``schedule.step()``, in their order in the batch. Needed on the first stage.

        It is broadcast to the other ranks; if they set ids, too, these must be the same. Before ``schedule.eval()`` it
        is needed only where the batch has another size or length than the pipeline was set up with.

        Args:
            ids: a number of 0 to 2^62 for each sample, its own in every epoch: its index in the data set.
                `thinwire.data.Indexed` yields them. No number occurs twice in a batch.
            length: positions to which the batch is padded, the second dimension of activations (batch, length, ...);
                only where it is not that of the first step. All micro-batches have it.
            lengths: lengths of the samples, whose padding (at the end) need not be sent: in it, activations and
                gradients are received as zeros.
            upcoming: ids of the batch after this one, whose messages are then read ahead.
            corners: (samples, 2), the place of each image's crop, for ``store=thinwire.store.Crops(...)``: pixels from
                the padded image's upper left corner to that of the crop, down and to the right.

        Raises:
            TypeError, ValueError: these are no ids, lengths or corners.
        """
        # Once the ranks have met, they learn only of an error that ends this rank's program.
        met = self.pipeline is not None and not self.pipeline.closed
        with nullcontext() if met else fail_before_meeting(self.group):
            self._batch = Batch.from_ids(ids, length, lengths, upcoming, corners)

    @property
    def stats(self) -> PipelineStats:
        """Totals of what this stage sent, saved and kept so far."""
        if self.pipeline is not None:
            self.pipeline.worker.wait()
        return self.totals.holding(self.stores.values())

    @property
    def stores(self) -> dict[str, Store]:
        """Stores of messages by boundary and side, as ``"boundary0-earlier"``; none before the first step."""
        return {side.name: side.store for side in self.sides if side.store is not None}

    def _rest(self) -> None:
        if self.pipeline is not None:
            self.pipeline.rest()

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors from which an equal stage of the same rank continues bit by bit; save them with the model.

        Call it on every rank between two steps. It contains the records in memory; of those on disk it lists which
        they are, and they are kept until ``snapshots`` newer states were made (`thinwire.store.Disk`).
        """
        self._rest()
        own = {
            "step": torch.tensor(self.training_step, dtype=torch.int64, device="cpu"),
            "run": torch.tensor(self.run, dtype=torch.int64, device="cpu"),
        }
        if self.options.adapt is not None:
            own["choices"] = self.choices.to_tensor(self.num_stages - 1)
        stores = {name: store.state_dict() for name, store in self.stores.items()}
        return write_state(self.options.seed, {"": own, **stores, **self._loaded})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state, on every rank from the one it saved, before the first step of a new process or later.

        Raises:
            ValueError: it is not the state of a stage, or one of another seed or wire format.
            StoreError: its messages are not of this stage.
        """
        self._rest()
        parts = read_state(state, self.options.seed, "pipeline stage", "step", "run")
        own = parts.pop("")
        (step,), (run,) = integers(own, "step"), integers(own, "run")
        if step < 0 or run < 0:
            raise ValueError(f"the state is of step {step} of run {run}, which cannot be")
        others = parts.keys() - {f"boundary{self.stage_index}-earlier", f"boundary{self.stage_index - 1}-later"}
        if others:
            raise StoreError(f"the state has messages of {', '.join(sorted(others))}: it is another stage's")
        if self.options.adapt is not None and "choices" in own:
            counts: dict[Direction, int] = {name: len(self.options.choices(name)) for name in DIRECTIONS}
            self.choices = LinkChoices.from_tensor(own["choices"], self.num_stages - 1, counts)
        for name, store in self.stores.items():
            store.open()
            if name in parts:
                store.load_state_dict(parts.pop(name))
            else:
                store.clear()
        self._loaded, self.training_step, self.run = parts, step, run

    def close(self) -> None:
        """Write what waits to be written, and close files and the connections between ranks, at the end of a training.

        Records in memory stay. A later step opens everything again, which all ranks must take.

        Raises:
            StoreError: a record could not be written. A later step opens its store as it was last written.
        """
        if self.pipeline is not None:
            self.pipeline.close()
        errors = []
        for side in self.sides:
            try:
                if side.store is not None:
                    side.store.close()
            except StoreError as error:
                side.store = None
                errors.append(error)
        if errors:
            raise errors[0]

    # What the pipeline asks of its stages before each step.

    @property
    def num_chunks(self) -> int:
        """Number of micro-batches of a step."""
        return self.chunks or len(self.args_recv_info)

    def take_batch(self) -> Batch | None:
        """Return the batch that was set for this step. It is used once."""
        batch, self._batch = self._batch, None
        return batch

    def set_up(self, step: ScheduleStep, pipeline: Pipeline) -> None:
        """Prepare the sides for a step. Neighbors on the same rank pass tensors directly and have no boundary."""
        index, ranks = self.stage_index, self.stage_index_to_group_rank
        wanted = {
            boundary: earlier
            for boundary, earlier, other in ((index - 1, False, index - 1), (index, True, index + 1))
            if 0 <= other < self.num_stages and ranks[other] != self.group_rank
        }
        if {side.boundary for side in self.sides} != set(wanted):
            seed = group_seed(self.options.seed, tuple(pipeline.ranks))
            device = self.device if self.device.type == "cuda" else torch.device("cpu")
            self.sides = [BoundarySide(*of, self.options, self.totals, seed, device) for of in wanted.items()]
        tensors = stage_tensors(self)
        for side in self.sides:
            names = ("outputs", "output_grads") if side.earlier else ("inputs", "input_grads")
            crossings: dict[Direction, BoundaryTensors] = {
                direction: BoundaryTensors(tuple(Spec(*spec) for spec in tensors[name]))
                for direction, name in zip(DIRECTIONS, names, strict=True)
                if direction == "forward" or step.training
            }
            chosen = self.choices.rows.get(side.boundary, {})
            side.set_up(step, self.num_chunks, pipeline.worker, crossings, chosen)
            if side.earlier and side.keeps:
                self._warn_about_large_changes(side.boundary)

    def _warn_about_large_changes(self, boundary: int) -> None:
        """Warn once where `delta` gains little, because activations never settle."""
        change = self.totals.lasting_change()
        if change < _LARGE_CHANGE or self._is_warned:
            return
        self._is_warned = True
        warn_caller(
            f"boundary {boundary}: activations still change by {change:.0%} between two visits of a sample, and by no "
            "less from visit to visit, so that delta(...) gains little over sending them directly. Dropout, and "
            "augmentation at random, do that: turn them off before this boundary, in stages 0 to "
            f"{boundary} (dropout: p=0), or do without the memory of delta(...): forward='gaussian(bits=4)'"
        )

    def existing_run(self) -> int | None:
        """Return the run of the stores on disk that this training continues, if there are any."""
        return self.options.store.find_run(self._folder(f"boundary{self.stage_index}-earlier"))

    def open_stores(self) -> None:
        """Open the store of each side, a new one as it was when a state was saved, if one was loaded."""
        for side in self.sides:
            if side.store is not None:
                side.store.open()
            elif side.keeps:
                side.store = self.options.store.open(side.record_format(), self._folder(side.name), run=self.run)
                if side.name in self._loaded:
                    side.store.load_state_dict(self._loaded.pop(side.name))

    def _folder(self, name: str) -> str:
        return f"rank{dist.get_rank()}-{name}"

    @contextmanager
    def computing(self, direction: Direction) -> Iterator[None]:
        """Time the computation of the stage for a micro-batch, if compressors are chosen by link."""
        started = time.perf_counter()
        yield
        if self.options.adapt is not None and self.has_backward:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._computed[direction].append(time.perf_counter() - started)

    def compute_s(self, direction: Direction) -> float:
        """Return the median seconds of computation for a micro-batch; 0 if there was none."""
        return median(self._computed[direction] or [0.0])

    # What schedules call.

    def clear_runtime_states(self) -> None:
        # A schedule begins each run with this method, of all its stages before any moves.
        super().clear_runtime_states()
        self._replaced.needs_warning = False
        self.pipeline = Pipeline.note(self)

    @property
    def _begun(self) -> Pipeline:
        assert self.pipeline is not None, "a run has begun"
        return self.pipeline

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:  # it receives nothing, and begins when its samples are there
            self._begun.begin()
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sends(self.stage_index, fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sends(self.stage_index - 1, bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, args: tuple[Any, ...], *rest: Any, **options: Any) -> Any:
        first = next((arg.shape[0] for arg in args if isinstance(arg, Tensor) and arg.dim()), None)
        self._begun.begin(first if self.is_first else None)
        with self._or_give_up():
            self._take_in("forward", fwd_chunk_id, self.args_recv_info.get(fwd_chunk_id, ()))
            with self.computing("forward"):
                return super().forward_one_chunk(fwd_chunk_id, args, *rest, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *rest: Any, **options: Any) -> None:
        with self._or_give_up():
            self._take_in("backward", bwd_chunk_id, self.grad_recv_info.get(bwd_chunk_id, ()))
            with self.computing("backward"):
                super().backward_one_chunk(bwd_chunk_id, *rest, **options)
            if bwd_chunk_id == self.num_chunks - 1:
                self._begun.check(wait=True)  # the first stage sends nothing back, where it would wait

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """An error ends the step on the neighbors, too, which would wait for messages until their time is over."""
        pipeline = self._begun
        try:
            pipeline.check()
            yield
        except Exception as error:
            # Neighbors answer a failed message with failed ones: this rank's own error counts first.
            first = pipeline.failure() or error
            if not isinstance(first, PeerFailedError):
                report(first, pipeline.transport)
            pipeline.give_up()
            if isinstance(first, PeerFailedError):
                raise pipeline.attribute(first) from None
            if first is error:
                raise
            raise first from None

    def _sends(self, boundary: int, chunk: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Hand over the tensors of ``ops``, which are to be sent. The schedule has nothing left to send."""
        if ops:
            with self._or_give_up():
                side = next(side for side in self.sides if side.boundary == boundary)
                self._begun.send(side, chunk, [op.tensor for op in ops])
        return []

    def _take_in(self, direction: Direction, chunk: int, infos: Sequence[Any]) -> None:
        """Put the tensors that were received for a micro-batch where PyTorch's stage looks for them."""
        boundary = self.stage_index - (direction == "forward")
        with self.totals.timed("wait"):
            tensors = self._begun.take(boundary, direction, chunk)
        if tensors is None:
            return
        infos = [info for info in infos if not info.is_root_arg and info.tensor_meta is not None]
        with torch.no_grad():
            for info, tensor in zip(infos, tensors, strict=True):
                if tensor.is_cuda:  # its memory is that of the stream on which it was decoded
                    tensor.record_stream(torch.cuda.current_stream(self.device))
                shape, stride = info.tensor_meta.shape, info.tensor_meta.stride
                if tensor.shape == shape and tensor.stride() != stride:
                    info.buffer = tensor.new_empty_strided(shape, stride, device=self.device).copy_(tensor)
                else:
                    info.buffer = tensor.to(self.device)


def compress_stage(
    stage: PipelineStage,
    *,
    forward: Specs = "delta(maxabs(bits=4))",
    backward: Specs = "maxabs(bits=8)",
    store: Place | None = None,
    precision: int = 32,
    seed: int = 0,
    warmup_epochs: int = 0,
    check_every: int = 100,
    evaluation: str | Compressor = "raw",
    max_length: int | None = None,
    adapt: ByLink | None = None,
) -> CompressedStage:
    """Compress the activations and gradients that a stage of a pipeline sends to its neighbors (AQ-SGD).

        stage = PipelineStage(module, stage_index, num_stages, device)   # of torch.distributed.pipelining
        stage = thinwire.compress_stage(stage, forward="delta(maxabs(bits=4))", backward="maxabs(bits=8)")
        schedule = ScheduleGPipe(stage, n_microbatches=8, loss_fn=loss_fn)
        for ids, (x, y) in loader:                       # of thinwire.data.Indexed(dataset)
            stage.set_sample_ids(ids)                    # on the first stage
            schedule.step(x) if stage.is_first else schedule.step(target=y)

    Call it for every stage of the pipeline on every rank, with the same options, before a schedule is made of them.
    PyTorch's schedules run the stage that it returns unmodified: GPipe, 1F1B, interleaved, zero-bubble. Activations are
    batch first; a second dimension, if there is a third, is the length. Stages that are neighbors on one rank hand
    tensors over, and nothing is kept between them.

    Args:
        stage: a stage by PyTorch, or a framework. It is left unchanged, and the stage that is returned takes its place:
            a warning says so where a schedule trains this one, and the one that is returned has not run.
        forward: ``delta(...)`` sends the change of each sample's activation since its last visit (Algorithm 1); any
            other compressor, or ``direct(...)`` of one, sends the activation itself (DirectQ); ``raw`` as it is.
            A list has one for each boundary, the first stage's first.
        backward: for the gradients of activations; ``topk(density=0.2) | maxabs(bits=8)`` sends a fifth of them.
            A list as above.
        store: where the messages of ``delta(...)`` are kept: ``thinwire.store.Memory()``,
            ``thinwire.store.Disk(path, ...)``, ``thinwire.store.Crops(...)`` for images that are cropped at random;
            ``thinwire.store.Centers()`` keeps cluster centers in their place.
        precision: bits of a kept value: 32, 16, or 2 to 8. The next stage computes on received values, a first visit
            whole, and later m(ξ) with its change, before that is rounded to be kept.
        seed: the seed of stochastic rounding, which differ between replicas of a pipeline.
        warmup_epochs: visits of each sample, from its first, in which it is sent uncompressed both ways (AQ-SGD,
            appendix D, has one; Algorithm 1 none: the first activation is whole, its gradient compressed). Samples for
            which the store has no room are not warmed up.
        check_every: steps after which both sides compare checksums of the messages that they use; a difference makes
            these samples unseen on both, and is counted. What they compare in every step is when each was written.
        evaluation: the compressor of activations of ``schedule.eval()``, which leaves the messages alone.
        max_length: positions of the longest sample; None for those of the first step.
        adapt: ``thinwire.policies.ByLink()`` measures the links after some steps and gives each boundary as many bits
            as cost no time; until then, ``forward`` and ``backward`` apply.

    Raises:
        TypeError: it is not a ``torch.distributed.pipelining.PipelineStage``, or a subclass with attributes that a
            `CompressedStage` has for itself, or an option is of the wrong type.
        ValueError: an option is invalid.
        RuntimeError: it is compressed already.
        NotImplementedError: the process group cannot send tensors on the host.
        DisagreementError: in the first step, ranks were given different options.
    """
    # Ranks meet in the first step.
    with fail_before_meeting(getattr(stage, "group", None)):
        if not isinstance(stage, PipelineStage):
            raise TypeError(
                f"compress_stage() takes a torch.distributed.pipelining.PipelineStage, not {type(stage).__name__}"
            )
        if isinstance(stage, CompressedStage):
            raise RuntimeError("this stage is compressed already")
        if not tells_stage_tensors():
            raise RuntimeError(
                f"this PyTorch ({torch.__version__}) does not tell what crosses a stage boundary: pipelines need "
                "PyTorch 2.12 or newer"
            )
        options = PipelineOptions(
            forward=forward,
            backward=backward,
            store=Memory() if store is None else store,
            precision=precision,
            seed=seed,
            warmup_epochs=warmup_epochs,
            check_every=check_every,
            evaluation=evaluation,
            max_length=max_length,
            adapt=adapt,
        )
        return _compressed(type(stage))(stage, options)


@lru_cache
def _compressed(kind: type[PipelineStage]) -> type[CompressedStage]:
    """Return `CompressedStage` with the methods that a subclass of PyTorch's stage overrides."""
    if kind is PipelineStage:
        return CompressedStage
    return type(f"Compressed{kind.__name__}", (CompressedStage, kind), {})
