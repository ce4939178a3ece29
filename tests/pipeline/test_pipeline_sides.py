"""The two sides of one boundary in one process: whatever the samples, lengths and mishaps, they keep the same."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_laws import SPECS
from torch import Tensor

import thinwire
from pretend import DEVICE, Pretend, Pretended
from thinwire.pipeline.boundary import UNSEEN, BoundarySide
from thinwire.pipeline.message import Batch, BoundaryTensors, ScheduleStep, Spec
from thinwire.pipeline.options import PipelineOptions
from thinwire.pipeline.stats import PipelineStats
from thinwire.threads import Worker

LENGTH, WIDTH = 5, 9
CPU = torch.device("cpu")


class Pair:
    """Both sides of a boundary, and what goes from one to the other."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, device: torch.device = CPU, **options: Any) -> None:
        self.options, self.device = PipelineOptions(**options), device
        self.beside, self.pretend = Worker("thinwire pipeline"), Pretend()
        self.earlier, self.later = (
            BoundarySide(0, earlier, self.options, PipelineStats(), self.options.seed, device)
            for earlier in (True, False)
        )
        specs = (Spec((2, LENGTH, WIDTH), dtype), Spec((2, LENGTH), torch.int64), Spec((2, 3), dtype))
        self.forward, self.backward = BoundaryTensors(specs), BoundaryTensors((specs[0], specs[2]))
        self.step = 0
        self.plan = ScheduleStep(0, 0, True, 1)

    def begin(self, batch: Batch, chunks: int, *, compare: bool = True, training: bool = True) -> None:
        self.plan = ScheduleStep(self.step, self.step, training, 1, batch)
        self.step += 1
        self.beside.wait()
        for side in (self.earlier, self.later):
            crossings = {"forward": self.forward} | ({"backward": self.backward} if training else {})
            side.set_up(self.plan, chunks, self.beside, crossings, {})
            if side.store is None and side.keeps:
                side.store = self.options.store.open(side.record_format(), "side", run=1)
        if training and self.earlier.keeps:
            views = [side.local_view(batch.samples, compare=compare) for side in (self.earlier, self.later)]
            same = [a == b != UNSEEN for a, b in zip(*views, strict=True)]
            for side in (self.earlier, self.later):
                side.decide_encodings(batch.samples, same)

    def send(self, direction: Any, chunk: int, tensors: list[Tensor]) -> list[Tensor]:
        source, target = (self.earlier, self.later) if direction == "forward" else (self.later, self.earlier)
        message = source.message(direction, chunk)
        arrived = target.message(direction, chunk)
        assert arrived.numel() == message.numel()
        given = [Pretended(x) if self.device == DEVICE else x.to(self.device) for x in tensors]
        source.prepare(chunk, given)
        send = partial(arrived.copy_, message)

        def pack() -> None:
            with self.on_device():
                source.pack(chunk, given, message, send)

        self.beside.submit(pack).result()
        with self.on_device():
            received = target.unpack(chunk, arrived, 0)
        self.beside.wait()
        assert all(x.device == self.device for x in received)
        return [x.held if isinstance(x, Pretended) else x.cpu() for x in received]

    def on_device(self) -> AbstractContextManager[object]:
        return self.pretend if self.device == DEVICE else nullcontext()

    def tensors(self, chunk: int, chunks: int, seed: int) -> list[Tensor]:
        rows = self.plan.rows(chunk, chunks, 2, LENGTH)
        generator = torch.Generator().manual_seed(seed)
        found = []
        for (_, dtype), shape in zip(
            self.forward.specs, self.forward.shapes(len(rows.samples), rows.padded), strict=True
        ):
            values = torch.randn(shape, generator=generator) * 3
            found.append(values.to(dtype))
        return found

    def same(self) -> bool:
        assert self.earlier.store is not None
        assert self.later.store is not None
        return self.earlier.store.digest() == self.later.store.digest()


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[int], int, int, list[int] | None, list[tuple[int, bool]]]]:
    """Steps: samples, micro-batches, padded length, lengths, and samples that one side loses before it."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        samples = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True))
        padded = draw(st.integers(1, LENGTH))
        lengths = draw(st.none() | st.lists(st.integers(0, padded), min_size=len(samples), max_size=len(samples)))
        lost = draw(st.lists(st.tuples(st.sampled_from(samples), st.booleans()), max_size=1))
        found.append((samples, draw(st.integers(1, len(samples))), padded, lengths, lost))
    return found


@settings(max_examples=30, deadline=None)
@given(
    steps=steps(),
    precision=st.sampled_from([32, 16, 8, 3]),
    warmup=st.integers(0, 2),
    budget=st.none() | st.integers(400, 1600),
    evict=st.sampled_from(["newcomers", "oldest"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_both_sides_keep_the_same_whatever_happens(steps, precision, warmup, budget, evict, dtype, seed) -> None:
    pair = Pair(
        dtype,
        forward="delta(maxabs(bits=4))",
        backward="maxabs(bits=6)",
        precision=precision,
        warmup_epochs=warmup,
        max_length=LENGTH,
        store=thinwire.store.Memory(budget_bytes=budget, evict=evict),
    )
    for number, (samples, chunks, padded, lengths, lost) in enumerate(steps):
        for sample, earlier in lost:
            side = pair.earlier if earlier else pair.later
            if side.store is not None:
                side.store.forget(sample)
        pair.begin(Batch.from_ids(samples, padded, lengths, ()), chunks)
        for chunk in range(chunks):
            tensors = pair.tensors(chunk, chunks, seed + 100 * number + chunk)
            arrived = pair.send("forward", chunk, tensors)
            layout = pair.earlier.layout("forward", chunk)
            assert torch.equal(arrived[1], tensors[1]), "integers travel as they are"
            for i, (coded, length) in enumerate(zip(layout.coded, layout.rows.lengths, strict=True)):
                assert not arrived[0][i, length:].any(), "nothing arrives behind a sample's length"
                sent, got = tensors[0][i, :length].float(), arrived[0][i, :length].float()
                if not coded:
                    assert torch.equal(sent, got)
                elif sent.numel():
                    # A change of up to twice the largest value in 7 steps each way, and a step of what is kept.
                    assert float((sent - got).abs().max()) <= 2.4 * 12 / 7 + 12 / (2 ** (min(precision, 8) - 1) - 1)
            gradients = pair.send("backward", chunk, [tensors[0], tensors[2]])
            for i, length in enumerate(layout.rows.lengths):
                assert not gradients[0][i, length:].any()
            assert float((gradients[1].float() - tensors[2].float()).abs().max()) <= 12 / 31 + 0.1
        one, other = pair.earlier.store, pair.later.store
        assert one is not None
        assert other is not None
        for sample in samples:
            # Where a side lost a sample, the two may make room differently, until a sample comes that only one keeps.
            if budget is None or not any(lost for *_, lost in steps):
                assert one.entry(sample) == other.entry(sample)
            if sample in one and sample in other:
                assert one.checksum(sample) == other.checksum(sample)
        if budget is not None:
            assert len(one) <= budget // one.form.record_bytes
    if not any(lost for *_, lost in steps):
        assert pair.same()
        assert pair.earlier.stats.resets == pair.later.stats.resets == 0


@pytest.mark.parametrize("precision", [2, 4])
def test_the_next_stage_computes_on_what_arrived_and_not_on_what_is_kept_of_it(precision: int) -> None:
    def errors(bits: int) -> list[float]:
        """Of the same activation at each visit."""
        pair, found = Pair(forward="delta(maxabs(bits=8))", precision=bits), []
        for _ in range(2):
            pair.begin(Batch.from_ids([1, 2], LENGTH, None, ()), 1)
            tensors = pair.tensors(0, 1, seed=3)
            found.append(float((pair.send("forward", 0, tensors)[0] - tensors[0]).abs().max()))
        return found

    first, second = errors(precision)
    # The first visit is whole, and the second off by an error of the change, which is what rounding had left out.
    assert first == 0
    assert 0 < second < 0.05


def taken(spec: str) -> bool:
    try:
        Pair(forward=spec, backward=spec).begin(Batch.from_ids([1], None, None, ()), 1)
    except (TypeError, ValueError):
        return False
    return True


GPU = pytest.param(torch.device("cuda", 0), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
OPTIONS: list[dict[str, Any]] = [
    *({"forward": spec, "backward": spec} for spec in {type(thinwire.parse(s)): s for s in SPECS if taken(s)}.values()),
    *({"forward": "delta(maxabs(bits=4))", "precision": bits} for bits in (32, 3)),
    {"forward": "delta(maxabs(bits=4))", "precision": 16, "dtype": torch.bfloat16},
    {"forward": "delta(gaussian(bits=3))", "store": thinwire.store.Centers(num=5)},
]


@pytest.mark.parametrize("device", [DEVICE, GPU])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: f"{options['forward']} {options.get('precision', '')}")
def test_a_device_gives_out_the_hosts_messages_and_nothing_else(device, options) -> None:
    if device == DEVICE and options["forward"].startswith(("topk", "fft")):
        pytest.skip("the host counts what is chosen, which a fake device does not know")
    pairs = Pair(**options), Pair(device=device, **options)
    given_out = 0
    for step, training in enumerate((True, True, False) if pairs[0].earlier.keeps else (True, False)):
        for pair in pairs:
            pair.begin(Batch.from_ids([3, 4, 5], LENGTH, [5, 2, 4], ()), 2, training=training)
        for chunk, direction in [(0, "forward"), (1, "forward"), (0, "backward")][: 2 + training]:
            tensors = pairs[0].tensors(chunk, 2, 10 * step + chunk)
            tensors = tensors if direction == "forward" else [tensors[0], tensors[2]]
            here, there = (pair.send(direction, chunk, tensors) for pair in pairs)
            assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
            side = "earlier" if direction == "forward" else "later"
            one, other = (getattr(pair, side).message(direction, chunk) for pair in pairs)
            assert torch.equal(one, other)
            given_out += one.numel()
    if pairs[0].earlier.keeps:
        stores = [side.store for pair in pairs for side in (pair.earlier, pair.later) if side.store is not None]
        assert len(stores) == 4
        assert len({store.digest() for store in stores}) == 1
        # Choices of centers, and two magnitudes of each sample for the statistics.
        given_out += 2 * 3 * 4 * 2 + (2 * 3 * (LENGTH + 1) if "store" in options else 0)
    assert device != DEVICE or pairs[1].pretend.given_out <= given_out


@settings(max_examples=30, deadline=None)
@given(
    steps=steps(),
    num=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_both_sides_have_the_same_centers_whatever_happens(steps, num, dtype, seed) -> None:
    pair = Pair(
        dtype, forward="delta(maxabs(bits=4))", max_length=LENGTH, store=thinwire.store.Centers(num=num, window=20)
    )
    resets = 0
    for number, (samples, chunks, padded, lengths, lost) in enumerate(steps):
        for _, earlier in lost:
            side, other = (pair.earlier, pair.later) if earlier else (pair.later, pair.earlier)
            if side.store is not None and other.store is not None:
                side.store.clear()
                resets += len(samples) if other.store.digest() != side.store.digest() else 0
        pair.begin(Batch.from_ids(samples, padded, lengths, ()), chunks)
        coded = {own for chunk in range(chunks) for own in pair.earlier.layout("forward", chunk).coded}
        assert len(coded) == 1, "all samples have centers, or none has"
        for chunk in range(chunks):
            tensors = pair.tensors(chunk, chunks, seed + 100 * number + chunk)
            arrived = pair.send("forward", chunk, tensors)
            for i, length in enumerate(pair.earlier.layout("forward", chunk).rows.lengths):
                assert not arrived[0][i, length:].any(), "nothing arrives behind a sample's length"
                off = (tensors[0][i, :length].float() - arrived[0][i, :length].float()).abs()
                assert not off.numel() or float(off.max()) <= (30 / 7 if coded == {True} else 0)
        assert pair.same()
        assert pair.earlier.store is not None
        parts = pair.earlier.store.form.parts
        expected = sum(thinwire.store.center_bytes(num, (part.positions, part.width)) for part in parts)
        assert pair.earlier.store.num_bytes == expected
    assert pair.earlier.stats.resets + pair.later.stats.resets == resets


def test_draws_differ_by_step_sample_boundary_and_direction_and_follow_the_seed() -> None:
    x = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1)
    others = [torch.zeros(2, LENGTH, dtype=torch.int64), torch.zeros(2, 3)]

    def received(seed: int, step: int) -> Tensor:
        pair = Pair(forward="maxabs(bits=3)", backward="maxabs(bits=3)", seed=seed)
        pair.step = step
        pair.begin(Batch.from_ids([5, 6], None, None, ()), 1)
        forward = pair.send("forward", 0, [x, *others])[0]
        return torch.stack([forward, pair.send("backward", 0, [x, others[1]])[0]])

    first = received(0, 0)
    assert torch.equal(received(0, 0), first)
    assert not torch.equal(first[0, 0], first[0, 1]), "two samples"
    assert not torch.equal(first[0], first[1]), "two directions"
    assert not torch.equal(received(0, 1), first), "two steps"
    assert not torch.equal(received(1, 0), first), "two seeds"
    state = torch.get_rng_state()
    received(0, 0)
    assert torch.equal(torch.get_rng_state(), state)


def announced(**changes: Any) -> bytes:
    step = ScheduleStep(3, 2, True, 9, Batch.from_ids([4, 9], 5, [5, 3], [1], [(0, 1), (2, 3)]))
    told = json.loads(step.to_json())
    return json.dumps(told | changes).encode()


def test_a_step_is_announced_with_its_batch_or_with_the_error_for_which_it_is_not_taken() -> None:
    batch = Batch.from_ids([2**62 - 1, 9], 5, [5, 3], [1], [(0, 1), (2, 3)])
    for step in (ScheduleStep(3, 2, True, 2**48, batch), ScheduleStep(0, 0, False, 0), ScheduleStep(0, 0, True, 0)):
        assert ScheduleStep.from_json(step.to_json()) == step
    refused = ScheduleStep.from_json(ScheduleStep(0, 0, True, 1, error="ö" * 5000).to_json())
    assert refused.error == "ö" * 1024


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b'{"a": "\xff"}', "UnicodeDecodeError"),
        (b"[" * 100_000, "RecursionError"),
        (b"9" * 10_000, "xceeds the limit"),
        (b"[1, 2]", "Error"),
        (b'"text"', "AttributeError"),
        (b"{}", "KeyError: 'batch'"),
        (announced(more=1), "unexpected keyword argument 'more'"),
        (announced(number=-1), "number must be between 0"),
        (announced(run=2**70), "run must be between 0"),
        (announced(training=1), "training must be true or false"),
        (announced(error=5), "error must be a text"),
        (announced(batch={"samples": "12"}), "missing"),
        (announced(batch=[1]), "must be a mapping"),
        *(
            (announced(batch={"samples": [4, 9], "length": 5, "lengths": None, "upcoming": []} | change), why)
            for change, why in [
                ({"samples": []}, "at least one sample id"),
                ({"samples": [4, 4]}, "sample 4 is in the batch twice"),
                ({"samples": [4, True]}, "must be an integer"),
                ({"samples": "49"}, "must be an integer"),
                ({"samples": [4, 2**62]}, "must be between 0"),
                ({"length": 0}, "length must be at least 1"),
                ({"lengths": [1]}, "1 lengths are given for 2 samples"),
                ({"lengths": [1, 6]}, "a sample has 6 positions"),
                ({"upcoming": [-1]}, "upcoming ids must be between 0"),
                ({"corners": [[1, 2]]}, "corners are 2 pairs"),
                ({"corners": [[1, 2], [1, None]]}, "corners must be an integer"),
            ]
        ),
    ],
)
def test_an_announcement_that_cannot_be_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match="the first stage's rank announced a step that cannot be") as caught:
        ScheduleStep.from_json(data)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 1200
