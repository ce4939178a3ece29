"""The `Wire` that ``thinwire.compress()`` returns for a model under DistributedDataParallel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.collectives import Algorithm, DeviceTransport, FailureDetector, Transport, ring_bytes
from thinwire.compressors import Raw
from thinwire.plan import Plan, Speeds, declined, sent_bytes
from thinwire.policies import Policy, Sync
from thinwire.runtime import checkpoint
from thinwire.runtime.adapt import Adapter, StepClock
from thinwire.runtime.bucket import BucketLayers
from thinwire.runtime.channel import Channel
from thinwire.runtime.consistency import agree, resync
from thinwire.runtime.engine import Bucket, BucketEngine
from thinwire.runtime.executor import Alone, StreamExecutor, ThreadExecutor
from thinwire.runtime.handle import Handle
from thinwire.runtime.probe import measure_speeds, settle
from thinwire.runtime.settings import WireSettings
from thinwire.runtime.slots import slot_bytes
from thinwire.runtime.stats import Stats
from thinwire.runtime.table import LayerRow, layer_rows, layer_table

_T = TypeVar("_T")


class Wire(Handle["BucketEngine"]):
    """Compressed communication of one model: its plan, its state, its statistics.

    ``state_dict()`` holds tensors only and belongs into every checkpoint: random draws depend on the step, and error
    feedback keeps a residual, so a run that resumes with it continues bit for bit.
    """

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, Sequence[int]],
        transport: Transport,
        settings: WireSettings = WireSettings(),
        *,
        simulated: bool = False,
        measure: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__(plan, rank=transport.rank, world_size=transport.world_size)
        self._dtypes = dict(dtypes or {})
        self._beside_bytes = 0
        """Bytes that the last step sent beside its buckets: the lengths of momenta (`QuantizedAdam`)."""
        self._optimizer = optimizer
        # Raises here, not in the first step, where a schedule or a compressor lacks something.
        plan.at_step(0, self._learning_rate()).for_world(transport.world_size, shapes)
        # Between devices the same is done on a stream beside backward's, without threads.
        self.device = transport.device if isinstance(transport, DeviceTransport) else None
        """The device on which gradients are compressed and sent; None if they go over the host."""
        adapt, start = settings.adapt, settings.start
        if adapt is not None and adapt.wants_syncs and (simulated or self.device is not None):
            raise ValueError(
                f"{adapt} goes by how long communication takes on the host's clock, which a GPU's does not show, and "
                "simulate=True has none: leave out objective=time"
            )
        nodes_too = adapt is not None and bool(adapt.considers)
        algorithm, world = settle(settings.algorithm, transport, nodes_too=nodes_too)
        self._executor = ThreadExecutor("thinwire") if self.device is None else StreamExecutor(self.device)
        channel = Channel(transport, self._executor, Stats(), algorithm=algorithm, world=world, seed=settings.seed)
        self._engine = BucketEngine(plan, shapes, channel, start=start, simulated=simulated, measure=measure)
        self._close_at_end(channel.close)
        self._step = -1
        self._speeds: Speeds | None = None
        agree(self._engine.record(self._step) | {"adapt": str(adapt)}, transport)
        if not simulated and self.world_size > 1:
            self._measure_speeds(adapt, skip_if_slower=settings.skip_if_slower)
        if adapt is not None:
            options = {"algorithm": algorithm, "world": world, "start": start, "speeds": self._speeds}
            self._adapter = Adapter(adapt, self.plan, shapes, transport, **options)

    def _measure_speeds(self, adapt: Policy | None, *, skip_if_slower: bool) -> None:
        """Measure codecs and links if ``skip_if_slower`` or the policy needs it; leave raw what gets no faster."""
        engine = self._engine
        reference = {name: c for name, c in engine.plan.layers.items() if not isinstance(c, Raw)}
        timed = set(adapt.to_time(reference)) if adapt is not None else set()
        if skip_if_slower:
            timed |= set(reference.values())
        elif not timed:
            return
        self._speeds = measure_speeds(timed, engine.transport, engine.algorithm, engine.world)
        if skip_if_slower:
            engine.plan = declined(engine.plan, self._speeds)
        engine.reset_stats()

    def __repr__(self) -> str:
        """A table of the layers: spec, or the reason why raw, and bytes a step."""
        title = "Wire of one rank, which sends nothing" if self.world_size == 1 else f"Wire of {self.world_size} ranks"
        shapes, dtypes = self._engine.shapes, self._dtypes
        return layer_table(
            title,
            self.plan,
            shapes,
            self.declined,
            self._raw_in_checkpoint(),
            lambda name, c: sent_bytes(c, shapes[name], self.world_size, dtypes.get(name, torch.float32)),
            than="fp32" if set(dtypes.values()) <= {torch.float32} else "uncompressed",
        )

    @property
    def algorithm(self) -> Algorithm:
        """The collective algorithm of the coded messages."""
        return self._engine.algorithm

    @property
    def speeds(self) -> Speeds | None:
        """What declining measured, or what a policy asked for; None if nobody did."""
        return self._speeds

    @property
    def syncs(self) -> Sequence[Sync]:
        """The communication of each plan's last steps, bucket by bucket, where the policy asks for it."""
        return self._adapter.syncs if self._adapter else ()

    def plan_rows(self) -> list[LayerRow]:
        """Return the layers in the order in which they are sent: what each has, and what the rules name for it.

        Errors are those of the last decision; only rank 0, which decides, has them.
        """
        buckets = [[layer.name for layer in route.layout.layers] for route in self._engine.present_routes()]
        last = self.decisions[-1] if self.decisions else None
        errors = (last.errors, last.reference_errors) if last else ({}, {})
        return layer_rows(self.plan.layers, self._asked.layers, self._engine.shapes, buckets, self.world_size, *errors)

    @property
    def memory(self) -> int:
        """Bytes that the compressors' state takes on this rank, by formula: known before training.

        Error feedback keeps two values for each element of the model, 8 bytes, or about 2 with ``ef(..., bits=8)``.
        """
        return slot_bytes(self.plan.layers, self._engine.shapes)

    @property
    def step(self) -> int:
        """Index of the last backward pass that communicated; −1 before the first."""
        return self._step

    @property
    def detector(self) -> FailureDetector | None:
        """What names the rank that caused a failure."""
        return self._engine.transport.detector

    @property
    def simulated(self) -> bool:
        """Whether only the effect of compression is there, not its communication."""
        return self._engine.simulated

    @property
    def stats(self) -> Stats:
        """Totals so far, as a copy: what is under way is not in it."""
        return dataclasses.replace(
            self._engine.present_stats(),
            declined_layers=len(self.declined),
            unsuited_layers=len(self.unsuited),
            adapt_s=self._adapter.adapt_s if self._adapter else 0.0,
        )

    def reset_stats(self) -> None:
        """Start counting anew."""
        if self._attached:
            self._executor.call(self._engine.reset_stats)
        else:
            self._engine.reset_stats()

    def wire_bytes_per_step(self) -> int:
        """Bytes that this rank sends in a compressed step, by the formula of the buckets that the last step had."""
        return self._beside_bytes + sum(route.sent_bytes for route in self._engine.routes_of(self._step))

    @property
    def dense(self) -> bool:
        """Whether the present step is uncompressed: it is before ``start``, or every layer is raw.

        The attachment then leaves gradients to a native all-reduce, as without a Wire, and calls `count_dense`.
        """
        return not self._attached or self._step < self.start or self._engine.plan.all_raw

    def begin_step(self, learning_rates: Mapping[str, float] | None = None) -> None:
        """Count a new backward pass. Attachments call this before its first bucket.

        ``learning_rates`` are those of the layers that follow the optimizer; see `on_optimizer_step`.
        """
        # After an error, buckets of that pass may still be under way: they must not write over this one's gradients.
        self._executor.wait_idle()
        if self._clock is not None:
            self._clock.end()
        self._engine.recorder.clipping.warn()
        self._engine.learning_rate = self._learning_rate()
        self._engine.learning_rates = learning_rates or {}
        self._step += 1
        sync = self._engine.end_step()
        if self._adapter is not None:
            self._adapt(self._adapter, sync)
        if self._clock is not None:
            self._clock.begin(compressed=not self.dense)

    @property
    def _clock(self) -> StepClock | None:
        # On a device the host learns nothing of when anything is done.
        return self._adapter.clock if self._adapter is not None and self.device is None else None

    def _adapt(self, adapter: Adapter, sync: Sync | None) -> None:
        if sync is not None and adapter.policy.wants_syncs:
            adapter.note_sync(sync)
        plan = adapter.begin_step(self._step, self.plan, self._engine.learning_rate)
        if plan is not self.plan or adapter.algorithm != self.algorithm:
            self._executor.call(lambda: self._engine.change(plan, adapter.algorithm, self._step))

    def observe(self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0) -> None:
        """Show a bucket's gradients to the policy, before they are reduced. Attachments call this for each bucket."""
        if self._clock is not None:
            self._clock.ready(flat, layers)
        if self._adapter is not None and self._attached:
            self._adapter.observe(flat, layers, self._step, loss_scale)

    def add_unsent(self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0) -> bool:
        """Add to a bucket's gradients the residuals of layers that keep none from this step on.

        A policy has taken error feedback from them. Attachments call this for each bucket, before it is reduced. If it
        returns True, they call `note_unsent` with the bucket's mean.
        """
        unsent = self._engine.unsent
        if not unsent:
            return False
        unsent.send(flat, layers, loss_scale)
        return True

    def note_unsent(self, mean: Tensor) -> None:
        """See whether a bucket's mean is finite: if one of a step's is not, residuals that it took are sent again."""
        if self._engine.unsent:
            self._engine.unsent.note_mean(mean)

    def on_optimizer_step(self, changes: Mapping[str, float]) -> None:
        """Say what the optimizer did to the layers that follow it: ``‖x^k − x^{k−1}‖²``, the same on all ranks."""
        self._engine.changes = dict(changes)

    def on_partial_use(self, shares: Mapping[str, Tensor]) -> None:
        """Note that only a share (0 to 1) of a layer's last mean was applied, as after clipping; its residual keeps the
        rest."""
        self._engine.used = dict(shares)

    def _learning_rate(self) -> float | None:
        """The highest of the optimizer's groups, which a schedule may follow."""
        if self._optimizer is None:
            return None
        return max(float(group["lr"]) for group in self._optimizer.param_groups)

    def count_dense(self, num_bytes: int, future: torch.futures.Future[Tensor]) -> torch.futures.Future[Tensor]:
        """Count gradients of ``num_bytes`` that go through a native all-reduce; returns its future to pass on."""
        self._engine.count_dense(num_bytes, self._step)
        return self._clock.arriving(future) if self._clock is not None else future

    def count_beside(self, num_bytes: int) -> None:
        """Count ``num_bytes`` that a native all-reduce has moved beside the gradients of a backward pass."""
        self._beside_bytes = ring_bytes(num_bytes, self.world_size)
        self._engine.recorder.beside(self._beside_bytes)

    def reduce(
        self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0, failed: Exception | None = None
    ) -> torch.futures.Future[Tensor]:
        """Start replacing ``flat``, the gradients of ``layers`` end to end, by their mean over all ranks.

        ``loss_scale`` is how many times larger than the gradients its values are (a `GradScaler`'s scale). The future's
        result is ``flat`` itself; whatever goes wrong reaches the caller through it. ``failed`` is what has gone wrong
        on this rank already: the other ranks, which wait for its messages, are told instead, and the future has it.
        """
        if self.world_size == 1:
            kept: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
            if failed is None:
                kept.set_result(flat)
            else:
                kept.set_exception(failed)  # pyright: ignore[reportArgumentType]
            return kept
        bucket = Bucket(
            kind="all_reduce",
            dtype=flat.dtype,
            failed=failed,
            engine=self._engine,
            flat=flat,
            layers=layers,
            step=self._step,
            loss_scale=loss_scale,
        )
        future = self._engine.channel.submit(bucket)
        return self._clock.arriving(future) if self._clock is not None else future

    def simulate(self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0) -> None:
        """Replace ``flat`` by what would arrive of it, here and now, and count the bytes that would have been sent.

        The attachment then takes the mean by a native all-reduce and shows it to `note_result`.
        """
        self._engine.simulate(flat, layers, self._step, loss_scale)

    def note_result(self, flat: Tensor, layers: BucketLayers) -> None:
        """See whether a simulated step's mean is finite: if not, no slot moves in it. Scales follow it."""
        self._engine.note_result(flat)
        self._engine.follow(flat, layers)

    def check_parity(self, names: Sequence[str], sums: Tensor | None, *, now: bool = False) -> None:
        """Compare the checksums of all ranks' parameters (`thinwire.runtime.consistency.checksums`), behind the
        training loop's back; this step's gradients raise a difference. A rank without ``sums`` is not compared.

        In a dense or simulated step nothing else is under way in the worker: it is waited for, and raised here. So it
        is with ``now``: where gradients do not come to the worker, nothing else keeps the optimizer from going on.
        """
        checked = self._executor.submit(Alone(lambda: self._engine.check_parity(names, sums, self._step)))
        if now or self.dense or self.simulated:
            checked.wait()
            self._engine.raise_parity_error()

    def resync(self, parameters: Mapping[str, Tensor]) -> None:
        """Give every rank rank 0's parameters, between steps. All ranks must call it."""
        self._executor.call(lambda: resync(parameters, self._engine.transport))
        self._engine.stats.resyncs += 1

    def _collect(self) -> dict[str, Tensor]:
        return self._engine.collect(self._step)

    def _template(self, plan: Plan, world_size: int) -> dict[str, Tensor]:
        return checkpoint.template(plan, self._engine.shapes, world_size)

    def _read(self, state: Mapping[str, Tensor]) -> checkpoint.Checked:
        algorithm = self._adapter.saved_algorithm(state) if self._adapter is not None else self.algorithm
        shares = self._engine.shares_of(algorithm)
        loaded = checkpoint.read(state, self._engine.plan, self._engine.shapes, self.rank, shares)

        def adopt() -> None:
            self._alone(lambda: self._engine.adopt(loaded, algorithm))
            self._step = loaded.step
            if self._adapter is not None:
                self._adapter.load(state, self.plan, self._learning_rate())

        # In a simulation every rank updates its slots by its own gradients.
        return checkpoint.Checked(loaded.record(), {} if self.simulated else loaded.shared(), adopt)

    def discard_step(self) -> None:
        """Leave residuals as they were before the last step, whose means are not used."""
        self._executor.wait_idle()
        self._engine.discard_step()

    def succeed(self, former: Wire) -> None:
        """Take over the residual of ``former``, a Wire of the same plan among other ranks, which may be broken.

        Other slots, such as factors that all ranks share, start anew on all of them.
        """
        former._executor.wait_idle()
        self._engine.succeed(former._engine)

    def _alone(self, job: Callable[[], _T]) -> _T:
        return self._executor.call(job)

    def _whole_world(self) -> Transport:
        return self._engine.transport
