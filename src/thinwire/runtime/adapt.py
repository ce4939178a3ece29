"""Changes of the plan during training: one rank decides while all train on, and all change between the same two steps.

Ranks communicate only in the step in which a decision takes effect. Sums of gradients and the policy's memory are in
the checkpoint, so that a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.collectives import Algorithm, ScatterReduceAllGather, Transport, World, parse_algorithm
from thinwire.compressors import Compressor, Raw, UnsuitedError, parse
from thinwire.plan import Plan, Speeds
from thinwire.plan.cost import codec_seconds
from thinwire.plan.forecast import Bucket, Links, Pace
from thinwire.policies import Evidence, Policy, Proposal, StepTime, Sync
from thinwire.policies.families import members_that_fit
from thinwire.runtime.bucket import BucketLayers, bucket_parts
from thinwire.runtime.checkpoint import check_sealed, integers, sealed
from thinwire.runtime.consistency import DisagreementError, exchange_texts
from thinwire.runtime.executor import Mark, mark
from thinwire.runtime.probe import measure_codecs, measure_cores, measure_links, shared_part

_DROP = 0.5
_ABRUPT = 2.0


class LearningRates:
    """Watches the learning rate from step to step.

    The rate *drops* where it falls to half or less in one step, and by at least twice what it fell by in the step
    before. So a schedule in steps drops, and a cosine or a line does not, even at its end: their last steps halve the
    rate, too, but each falls by about as much as the one before it.
    """

    def __init__(self, rate: float = math.nan, fall: float = 0.0, *, dropped: bool = False) -> None:
        self._rate, self._fall = rate, fall
        self.dropped = dropped
        """Whether the rate dropped since this was last set to False."""

    def observe(self, rate: float | None) -> None:
        """Observe the rate of the next step; None where it is not known."""
        if rate is None:
            return
        fall = max(0.0, self._rate - rate) if math.isfinite(self._rate) else 0.0
        if fall and rate <= _DROP * self._rate and fall >= _ABRUPT * self._fall:
            self.dropped = True
        self._rate, self._fall = rate, fall

    def to_tensor(self) -> Tensor:
        """Return the entry of a checkpoint: three float64 values."""
        return torch.tensor([self._rate, self._fall, float(self.dropped)], dtype=torch.float64, device="cpu")

    @staticmethod
    def from_tensor(state: Tensor | None) -> LearningRates:
        """Return the instance that `to_tensor` saved, or a new one if there is none.

        Raises:
            ValueError: the state is not three float64 values.
        """
        if state is None:
            return LearningRates()
        if not isinstance(state, Tensor) or state.dtype != torch.float64 or state.numel() != 3:
            raise ValueError("adapt/rates in the state is not three float64 values")
        rate, fall, dropped = state.reshape(-1).tolist()
        return LearningRates(rate, max(0.0, fall) if math.isfinite(fall) else 0.0, dropped=bool(dropped))


_KEPT = 32


class _MarkedStep(NamedTuple):
    began: Mark
    ready: list[tuple[Mark, BucketLayers, int]]
    """Mark of each bucket when it is complete, with its layers and the bytes of an element."""
    arrived: Mark | None
    """Mark of the last bucket when it arrives; None if none has yet."""
    ended: Mark
    compressed: bool

    def time(self, shared: float) -> StepTime:
        buckets = tuple(Bucket(at.since(self.began), layers, itemsize) for at, layers, itemsize in self.ready)
        last, seconds = buckets[-1].ready_s, self.ended.since(self.began)
        exposed = 0.0 if self.arrived is None else max(0.0, self.arrived.since(self.began) - last)
        return StepTime(Pace(buckets, max(seconds - exposed, last), shared), seconds, self.compressed)


class StepClock:
    """Times the steps of one rank, from first bucket to first bucket."""

    def __init__(self, shared: float, mark: Callable[[], Mark]) -> None:
        """``shared`` is the fraction (0 to 1) of communication's processor time that slows backward, as in `Pace`;
        ``mark`` returns a mark of now on the clock that computing and communication go by."""
        self._steps: deque[_MarkedStep] = deque(maxlen=_KEPT)
        self._shared, self._mark = shared, mark
        self._began, self._arrived = mark(), None
        self._compressed = False
        self._ready: list[tuple[Mark, BucketLayers, int]] = []

    @property
    def steps(self) -> tuple[StepTime, ...]:
        """The last steps. Waits until a device has ended them."""
        return tuple(step.time(self._shared) for step in self._steps)

    def end(self) -> None:
        """End the step before the backward pass that has begun."""
        if self._ready:
            self._steps.append(_MarkedStep(self._began, self._ready, self._arrived, self._mark(), self._compressed))
        self._ready = []

    def begin(self, *, compressed: bool) -> None:
        """Start the clock. Time since `end` does not count."""
        if self._steps and self._steps[-1].compressed != compressed:
            # Dense steps do not predict compressed ones, or the reverse.
            self._steps.clear()
        self._began, self._arrived, self._compressed = self._mark(), None, compressed

    def ready(self, flat: Tensor, layers: BucketLayers) -> None:
        """Note that the gradients of a bucket are complete."""
        self._ready.append((self._mark(), layers, flat.element_size()))

    def arriving(self, future: torch.futures.Future[Tensor]) -> torch.futures.Future[Tensor]:
        """Note when this future's bucket arrives, and return the future."""
        future.add_done_callback(self._note)
        return future

    def _note(self, _future: object) -> None:
        self._arrived = self._mark()


# One thread for all Wires, and one core at most: the others belong to training. A thread for each decision would leave
# its share of the mathematical libraries' buffers behind.
_beside_training = ThreadPoolExecutor(1, "thinwire plan", initializer=torch.set_num_threads, initargs=(1,))
_log = logging.getLogger("thinwire.adapt")
_PLANS, _STEPS_OF_A_PLAN = 256, 32
"""Numbers of plans, and of steps of each plan, whose communication is remembered."""
_PROBE_S = 0.05
_SUM, _SEEN, _MEMORY, _ALGORITHM = "adapt/sum/", "adapt/seen", "adapt/memory", "adapt/algorithm"
_RATES, _CHECKSUMS = "adapt/rates", "adapt/checksums"
_ALGORITHM_ROOM = 4096
"""Bytes of the algorithm's entry, a constant: checkpoints are loaded into tensors of the size that was saved."""


@dataclass(frozen=True)
class Decision:
    """A plan that a policy chose, and the step in which it takes effect."""

    step: int
    """The first backward pass with this plan."""
    plan: Plan
    algorithm: Algorithm
    """The collective algorithm from that step on."""
    changed: int
    """Number of layers whose compressor changed."""
    note: str = ""
    """The policy's explanation."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Squared L2 error of each layer on its summed gradients. This and the fields below are set on rank 0 only."""
    reference_errors: Mapping[str, float] = field(default_factory=dict)
    errors_s: float = 0.0
    """Seconds of computing errors, concurrently with training."""
    solve_s: float = 0.0
    """Seconds of choosing the plan, concurrently with training."""
    waited_s: float = 0.0
    """Seconds that training waited for the decision."""


class Adapter:
    """Collects what a policy needs, on every rank, and applies its decisions."""

    def __init__(
        self,
        policy: Policy,
        plan: Plan,
        shapes: Mapping[str, Sequence[int]],
        transport: Transport,
        *,
        algorithm: Algorithm,
        world: World,
        start: int,
        speeds: Speeds | None = None,
        prepare: Callable[[Evidence], Evidence] | None = None,
    ) -> None:
        """``prepare`` completes the evidence before a decision, in the thread that runs concurrently with training."""
        self.policy, self.speeds = policy, speeds
        self._prepare = prepare or (lambda evidence: evidence)
        self.reference = {name: c for name, c in plan.layers.items() if not isinstance(c, Raw)}
        policy.check(self.reference, shapes)
        self.unsuited = {
            name: compressor
            for name, compressor in ((name, plan.named(name, shapes[name])) for name in plan.unsuited if name in shapes)
            if name not in plan.keep.unfit and members_that_fit(compressor, shapes[name])
        }
        """Layers that are raw because their shape suits only other compressors of the rule's family."""
        self._adaptable = (*self.reference, *self.unsuited)
        self._rates = LearningRates()
        self.decisions: list[Decision] = []
        self._syncs: dict[tuple[int, ...], deque[Sync]] = {}
        self._trials, self._trial_end = 0, -1
        self.adapt_s = 0.0
        self._asked_algorithm, self._world = algorithm, world
        self.algorithm = algorithm
        """The collective algorithm of the last decision."""
        self._shapes, self._transport, self._start = shapes, transport, start
        self._sums: dict[str, Tensor] = {}
        self._buckets: dict[BucketLayers, Tensor] = {}
        self._seen = 0
        self._order: list[tuple[str, ...]] = []
        self._observed_step = -1
        self._memory: Mapping[str, tuple[float, ...]] = {}
        self._links: Links | None = None
        self._codec_s: Mapping[Compressor, float] = {}
        self._measured = policy.to_measure(self.reference)
        self.clock: StepClock | None = None
        """Clock of steps, for policies that want one."""
        if self._measured:
            cores = measure_cores(transport)
            # Kernels on a device take no core from backward.
            shared = shared_part(cores, torch.get_num_threads()) if transport.device.type == "cpu" else 0.0
            self.clock = StepClock(shared, partial(mark, transport.device))
        self._asked: Future[Proposal] | None = None
        self._asked_for = -1

    @property
    def decides(self) -> bool:
        """Whether this rank decides."""
        return self._transport.rank == 0

    @property
    def syncs(self) -> tuple[Sync, ...]:
        """Communication of the last steps with each plan; that of the latest step is the last one."""
        return tuple(chain.from_iterable(self._syncs.values()))

    def note_sync(self, sync: Sync) -> None:
        """Keep a step's communication, with that of other steps with the same plan."""
        # Moved to the end, so that the plan that was not used for longest is the one dropped.
        alike = self._syncs[sync.bucket_bytes] = self._syncs.pop(sync.bucket_bytes, deque(maxlen=_STEPS_OF_A_PLAN))
        alike.append(sync)
        if len(self._syncs) > _PLANS:
            del self._syncs[next(iter(self._syncs))]

    def _next_change(self, step: int) -> int:
        """Return the first step from ``step`` on in which a decision takes effect."""
        if step <= self._trial_end:
            return self._trial_end
        every, lag = self.policy.every, self.policy.lag_steps
        # A decision may take effect in the first compressed step if dense steps before it were observed.
        first = self._start if self._start > lag else self._start + every
        return first if step <= first else first + -(-(step - first) // every) * every

    def watches(self, step: int) -> bool:
        """Whether this rank sums up the gradients of ``step``."""
        away = self._next_change(step + 1) - self.policy.lag_steps - step
        return self.decides and 0 < away <= self.policy.window_steps

    def observe(self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float) -> None:
        """Add a bucket of this rank's gradients to the sums, before compression."""
        if not self.watches(step):
            return
        started = time.perf_counter()
        if step != self._observed_step:
            self._observed_step, self._order = step, []
            self._seen += 1
        self._order.append(tuple(name for name, _ in layers))
        # On a device the host would have to wait for the sum: values that are not finite are left out later.
        if flat.is_cuda or math.isfinite(float(flat.sum(dtype=torch.float32))):
            self._add(flat, layers, 1.0 / loss_scale)
        self.adapt_s += time.perf_counter() - started

    def _add(self, flat: Tensor, layers: BucketLayers, scale: float) -> None:
        # One call for a bucket: a call for each layer would take longer than the sum.
        if layers not in self._buckets:
            names = {name for name, _ in layers}
            if any(name in names for others in self._buckets for name, _ in others):
                # DDP has rebuilt its buckets.
                self._by_layer()
            bucket = self._buckets[layers] = torch.zeros_like(flat, dtype=torch.float32)
            for name, values in bucket_parts(bucket, layers):
                if name in self._sums:
                    values.copy_(self._sums.pop(name))
        self._buckets[layers].add_(flat, alpha=scale)

    def _by_layer(self) -> dict[str, Tensor]:
        """Return the sums in their layers' shapes, in the same order for any DDP buckets."""
        for layers, bucket in self._buckets.items():
            self._sums |= {name: values for name, values in bucket_parts(bucket, layers) if name in self._adaptable}
        self._buckets = {}
        self._sums = {name: self._sums[name] for name in self._adaptable if name in self._sums}
        return self._sums

    def begin_step(self, step: int, plan: Plan, learning_rate: float | None) -> Plan:
        """Return the plan of ``step``; every rank calls it between two steps.

        Ranks communicate if a decision takes effect in ``step``.

        Raises:
            DisagreementError: rank 0 sent an invalid plan for this model.
            TransportError: a rank has failed or does not answer.
        """
        started = time.perf_counter()
        self._rates.observe(learning_rate)
        if self._next_change(step) == step + self.policy.lag_steps:
            self._measure()
            if self.decides:
                self._ask(plan, step + self.policy.lag_steps, learning_rate)
        if self._next_change(step) == step:
            if self.decides and self._asked is None and self._measured:
                # The run was resumed after the request: steps are timed again.
                self._ask(plan, step, learning_rate)
            plan = self._change(plan, step)
        self.adapt_s += time.perf_counter() - started
        return plan

    def _measure(self) -> None:
        """Measure links and codecs between two steps, on every rank, for policies that use them."""
        if not self._measured or self._transport.world_size == 1:
            return
        with self._transport.uncounted():
            world = self._world if self._chooses or self._asked_algorithm.needs_nodes else None
            self._links = measure_links(self._transport, long_s=_PROBE_S, world=world)
            passes = measure_codecs(self._measured, self._transport)
        n = self._transport.world_size
        self._codec_s = {c: codec_seconds(c, n, {"encode": e, "decode": d}) for c, (e, d) in passes.items()}

    def _ask(self, plan: Plan, step: int, learning_rate: float | None) -> None:
        """Start a decision for ``step`` in the background thread."""
        if not self._seen:
            return
        evidence = Evidence(
            self.reference,
            {name: plan[name] for name in self._adaptable},
            self._by_layer(),
            num_ranks=self._transport.world_size,
            step=step - self._start,
            learning_rate=learning_rate,
            learning_rate_dropped=self._rates.dropped,
            unsuited=self.unsuited,
            crossings=self.algorithm.crossings(self._world),
            bucket_of={name: i for i, names in enumerate(self._order) for name in names},
            syncs=self.syncs,
            trials=self._trials,
            speeds=self.speeds,
            memory=self._memory,
            links=self._links,
            codec_s=self._codec_s,
            asked=self._asked_algorithm,
            algorithm=self.algorithm,
            steps=self.clock.steps if self.clock else (),
        )
        self._asked = _beside_training.submit(lambda: self.policy.propose(self._prepare(evidence)))
        self._asked_for = step
        self._rates.dropped = False

    def _change(self, plan: Plan, step: int) -> Plan:
        started = time.perf_counter()
        proposal, answer = self._answer(step)
        waited_s = time.perf_counter() - started
        text = exchange_texts(json.dumps(answer).encode(), self._transport)[0]
        changes, note, self.algorithm, trial = self._read(text)
        self._trial_end = step + self.policy.trial_steps if trial else -1
        changes = {name: compressor for name, compressor in changes.items() if plan[name] != compressor}
        changed = plan.changed(changes)
        if proposal is not None:
            self._memory = proposal.memory
            self._trials += proposal.trial
        proposed = proposal or Proposal({})
        times = (proposed.errors_s, proposed.solve_s, waited_s)
        if self.decides and note:
            _log.info("step %d: %s", step, note)
        errors = proposed.errors, proposed.reference_errors
        self.decisions.append(Decision(step, changed, self.algorithm, len(changes), note, *errors, *times))
        return changed

    def _answer(self, step: int) -> tuple[Proposal | None, dict[str, object]]:
        """Return the proposal and the message for the other ranks; on these, None and an empty message."""
        asked, self._asked = self._asked, None
        if not self.decides:
            return None, {}
        try:
            if asked is None or self._asked_for != step:
                return None, {"note": "no gradients were seen: the plan stays", "layers": {}}
            proposal = asked.result()
            layers = {name: str(c) for name, c in proposal.layers.items() if name in self._adaptable}
            chosen = {} if proposal.algorithm in (None, self.algorithm) else {"algorithm": str(proposal.algorithm)}
            return proposal, {"note": str(proposal.note), "layers": layers, "trial": proposal.trial, **chosen}
        except Exception as error:  # noqa: BLE001 - a policy may come from anywhere, and training goes on without it
            return None, {"note": f"the policy failed ({type(error).__name__}: {error}): the plan stays", "layers": {}}
        finally:
            self._sums, self._buckets, self._seen = {}, {}, 0

    def _read(self, text: str) -> tuple[dict[str, Compressor], str, Algorithm, bool]:
        """Parse rank 0's decision and check it against the model: rank 0 is a peer like any other."""
        try:
            record = json.loads(text)
            layers = {str(name): parse(str(spec)) for name, spec in record["layers"].items()}
            for name, compressor in layers.items():
                if name not in self._adaptable:
                    raise ValueError(f"{name} is not compressed")
                compressor.fit(self._shapes[name])
            algorithm = parse_algorithm(str(record["algorithm"])) if "algorithm" in record else self.algorithm
            self._check(algorithm)
            return layers, str(record["note"]), algorithm, record.get("trial") is True
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UnsuitedError) as error:
            raise DisagreementError(f"rank 0 sent a plan that is none for this model: {error}") from error

    def state(self, *, on_every_rank: bool = False) -> dict[str, Tensor]:
        """Return the entries of a checkpoint: the collective algorithm, and the rest from the rank that decides.

        With ``on_every_rank`` the other ranks return zeros of the same shapes: a gathered state takes the entries of
        the rank that decides.
        """
        state: dict[str, Tensor] = {}
        if self._chooses:
            text = str(self.algorithm).encode().ljust(_ALGORITHM_ROOM)
            state[_ALGORITHM] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if not self.decides and not on_every_rank:
            return state
        state[_SEEN] = torch.tensor(
            [self._seen, self._asked_for if self._asked else -1], dtype=torch.int64, device="cpu"
        )
        if self.policy.memory_size:
            nothing = (math.nan,) * self.policy.memory_size
            rows = [self._memory.get(name, nothing) for name in self.reference]
            state[_MEMORY] = torch.tensor(rows, dtype=torch.float64, device="cpu").reshape(
                len(rows), self.policy.memory_size
            )
        sums = self._by_layer()
        state[_RATES] = self._rates.to_tensor()
        for name in self._adaptable:
            gradient_sum = sums.get(name)
            state[_SUM + name] = (
                torch.zeros(tuple(self._shapes[name]), dtype=torch.float32, device="cpu")
                if gradient_sum is None
                else gradient_sum.cpu().clone()
            )
        return sealed(state, _CHECKSUMS)

    def saved_algorithm(self, state: Mapping[str, Tensor]) -> Algorithm:
        """Return the collective algorithm of a saved `state`.

        It is the requested one if that is not the default, if the state has none, or if the world size has changed.
        """
        if self.decides and _SEEN in state:
            self._check_saved(state)
        shares = state.get("shares")
        if not self._chooses or _ALGORITHM not in state or not isinstance(shares, Tensor):
            return self._asked_algorithm
        try:
            algorithm = parse_algorithm(bytes(integers(state, _ALGORITHM, None)).decode())
        except ValueError as error:
            raise ValueError(f"{_ALGORITHM} in the state is no collective algorithm: {error}") from None
        if shares.numel() != self._world.size:
            return self._asked_algorithm
        self._check(algorithm)
        return algorithm

    def _check_saved(self, state: Mapping[str, Tensor]) -> None:
        """Raise ``ValueError`` if a state belongs to another model, or was damaged."""
        for name in self._adaptable:
            gradient_sum = state.get(_SUM + name)
            if not isinstance(gradient_sum, Tensor) or gradient_sum.numel() != math.prod(self._shapes[name]):
                raise ValueError(f"{_SUM + name} is missing in the state, or is of a layer of another shape")
        check_sealed(state, [key for key in state if key.startswith("adapt/") and key != _CHECKSUMS], _CHECKSUMS)

    @property
    def _chooses(self) -> bool:
        """Whether the policy chooses the collective algorithm, which requires that none was requested."""
        return bool(self.policy.considers) and self._asked_algorithm == ScatterReduceAllGather()

    def _check(self, algorithm: Algorithm) -> None:
        """Raise ``ValueError`` if this world cannot use ``algorithm``."""
        if algorithm.needs_nodes and not self._world.nodes:
            raise ValueError(f"{algorithm} needs to know nodes, and nobody asked for them")
        algorithm.shares(self._world)

    def load(self, state: Mapping[str, Tensor], plan: Plan, learning_rate: float | None) -> None:
        """Continue from a `state`, or start over if it has no entries of a policy."""
        self._sums, self._buckets, self._memory, self._seen, self._asked = {}, {}, {}, 0, None
        # Times are no part of a checkpoint, because another run has other links: plans are tried again.
        self._syncs, self._trials, self._trial_end = {}, 0, -1
        self.algorithm = self.saved_algorithm(state)
        self._measure()
        if not self.decides or _SEEN not in state:
            return
        self._seen, asked_for = integers(state, _SEEN, 2)
        self._rates = LearningRates.from_tensor(state.get(_RATES))
        for name in self._adaptable:
            gradient_sum = state[_SUM + name]
            if self._seen and bool(gradient_sum.any()):
                self._sums[name] = gradient_sum.detach().to(torch.float32, copy=True).view(tuple(self._shapes[name]))
        if self.policy.memory_size and _MEMORY in state:
            table, width = state[_MEMORY], self.policy.memory_size
            if not isinstance(table, Tensor) or not table.is_floating_point() or table.numel() % width:
                raise ValueError(f"{_MEMORY} in the state is not a table of {width} columns")
            rows = table.reshape(-1, width).tolist()
            pairs = zip(self.reference, rows, strict=False)
            self._memory = {name: tuple(row) for name, row in pairs if not any(map(math.isnan, row))}
        if asked_for >= 0 and not self._measured:
            self._ask(plan, asked_for, learning_rate)
