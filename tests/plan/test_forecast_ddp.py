"""Steps predicted from made-up speeds, against what a pencil says."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from thinwire.compressors import Raw, parse
from thinwire.plan.forecast import (
    Bucket,
    Curve,
    Links,
    Pace,
    Transfer,
    accumulated,
    coded_transfer,
    exposed_seconds,
    finish,
    native_step,
    native_transfer,
    planned_step,
    sent_in_step,
)
from thinwire_tools.doctor.settings import Range

MB = 1_000_000
LINE = Curve(((0.0, 0.01), (10.0 * MB, 1.01)))
"""10 ms and 10 MB a second."""
LINKS = Links(LINE, LINE, 2)
TWO = Pace((Bucket(1.0, (("a", (1000, 500)),)), Bucket(1.5, (("b", (1000, 250)),))), 2.0)
"""Buckets of 2 MB and 1 MB, a step of 2 s of which half a second comes after backward."""


def test_a_curve_is_straight_between_what_was_measured() -> None:
    curve = Curve(((1000.0, 0.1), (3000.0, 0.2), (5000.0, 0.5)))
    assert curve.seconds(0) == 0
    assert curve.seconds(10) == 0.1
    assert curve.seconds(2000) == pytest.approx(0.15)
    assert curve.seconds(4000) == pytest.approx(0.35)
    assert curve.per_byte == pytest.approx(0.4 / 4000)
    assert curve.seconds(9000) == pytest.approx(0.5 + 0.4)
    assert curve.latency_s == 0.1
    assert curve.bandwidth == pytest.approx(10_000)


def test_a_step_of_stock_ddp() -> None:
    # Bucket a: ready at 1, 2 MB: arrives at 1.21. Bucket b: ready at 1.5, 1 MB: 1.61. So 0.11 s are exposed.
    assert native_step(TWO, LINKS) == pytest.approx(2.11)
    # At a tenth of the speed: a takes 2.01 s until 3.01; b's bytes come behind it, 1 s more.
    slow = Curve(((0.0, 0.01), (10.0 * MB, 10.01)))
    assert native_step(TWO, Links(slow, slow, 2)) == pytest.approx(2.0 + 4.01 - 1.5)
    # Four ranks send 2 · 3/4 of each byte instead of once.
    assert native_transfer(TWO.buckets[0], Links(LINE, LINE, 4)).after_s == pytest.approx(0.3)


def test_communication_that_backward_hides_costs_nothing() -> None:
    fast = Curve(((0.0, 0.0), (10.0 * MB, 1e-3)))
    early = Pace((Bucket(0.1, (("a", (1000, 500)),)), Bucket(1.5, (("b", (1,)),))), 2.0)
    assert native_step(early, Links(fast, fast, 2)) == pytest.approx(2.0, abs=1e-6)


def test_a_step_in_4_bits() -> None:
    minmax = parse("minmax(bits=4, bucket=128)")
    layers = {"a": minmax, "b": Raw()}
    # Half a million elements in 4.5 bits and 1 MB raw. 1e-7 s an element of a: 50 ms.
    codec = {minmax: 1e-7}
    a, b = (coded_transfer(bucket, layers, LINKS, codec) for bucket in TWO.buckets)
    sent = minmax.wire_bytes((1000, 500))
    assert sent == pytest.approx(500_000 * 4.5 / 8, rel=0.001)
    assert a.alone_s == pytest.approx(0.05 + 2 * 0.01 + sent / (10 * MB))
    assert a.after_s == pytest.approx(0.05)
    assert (a.cpu_s, a.codec_s) == (pytest.approx(0.05), pytest.approx(0.05))
    assert b.alone_s == pytest.approx(0.02 + 0.1)
    # a is there long before b is ready.
    assert planned_step(TWO, LINKS, layers, codec) == pytest.approx(2.12)
    assert sent_in_step(TWO, LINKS, layers) == pytest.approx(sent + 1_000_000, rel=0.001)
    assert sent_in_step(TWO, LINKS, None) == 3 * MB


def test_sums_and_gathers_share_the_link() -> None:
    bf16, topk = parse("cast(bf16)"), parse("topk(density=0.01)")
    only = coded_transfer(TWO.buckets[0], {"a": bf16}, LINKS, {})
    assert only.alone_s == pytest.approx(0.01 + 0.1)
    whole = coded_transfer(TWO.buckets[0], {"a": topk}, Links(LINE, LINE, 3), {})
    assert whole.alone_s == pytest.approx(0.01 + 2 * topk.wire_bytes((1000, 500)) / (10 * MB))
    both = Bucket(0.0, (("a", (1000, 500)), ("b", (1000, 500))))
    together = coded_transfer(both, {"a": bf16, "b": Raw()}, LINKS, {})
    assert together.alone_s == pytest.approx(2 * 0.01 + 0.1 + 0.2)
    low_rank = coded_transfer(TWO.buckets[0], {"a": parse("powersgd(rank=4)")}, LINKS, {})
    assert low_rank.alone_s == pytest.approx(2 * 0.01 + 4 * 4 * 1500 / (10 * MB))


def test_gradients_of_16_bits_take_half() -> None:
    half = Bucket(0.0, (("a", (1000, 500)),), itemsize=2)
    assert native_transfer(half, LINKS).after_s == pytest.approx(0.1)
    assert coded_transfer(half, {"a": Raw()}, LINKS, {}).after_s == pytest.approx(0.1)


def test_a_core_that_backward_uses_too() -> None:
    # A second of encoding from 1 on, of which backward needs the core until 2: both go at half speed, so it arrives at
    # 3 and backward is a second late. The second bucket, ready at 2 if alone, is ready at 3.
    work = Transfer(1.0, 1.0, cpu_s=1.0, codec_s=1.0)
    nothing = Transfer(0.0, 0.0)
    assert finish([1.0, 2.0], [work, nothing], shared=1.0) == pytest.approx([3.0, 3.0], abs=1e-4)
    assert finish([1.0, 2.0], [work, nothing]) == pytest.approx([2.0, 2.0])
    # What a link's traffic costs is lost to backward, too, but no bucket arrives later for it by itself.
    traffic = Transfer(1.0, 1.0, cpu_s=0.5)
    assert finish([1.0, 4.0], [traffic, nothing], shared=1.0) == pytest.approx([2.0, 4.5], abs=1e-4)
    assert finish([1.0, 4.0], [traffic, nothing], shared=0.5) == pytest.approx([2.0, 4.25], abs=1e-4)


def test_only_so_many_at_once() -> None:
    far = Transfer(1.0, 0.1)
    assert finish([0, 0, 0, 0], [far] * 4) == pytest.approx([1.0, 1.1, 1.2, 1.3])
    assert finish([0, 0, 0, 0], [far] * 4, depth=2) == pytest.approx([1.0, 1.1, 2.0, 2.1])


def test_batches_between_two_exchanges() -> None:
    # Forward and backward take 1.5 s, the exchange 1 s more, what comes after backward half a second.
    assert accumulated(TWO, 3.0, 1) == 3.0
    assert accumulated(TWO, 3.0, 4) == pytest.approx((3.0 + 3 * 1.5) / 4)


def test_a_range_holds_nine_of_ten() -> None:
    found = Range.from_values([float(i) for i in range(101)])
    assert (found.low, found.value, found.high) == (5.0, 50.0, 95.0)
    assert Range.from_values([3.0]) == Range(3.0, 3.0, 3.0)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12),
    st.floats(0, 1),
)
def test_what_holds_for_any_step(rows: list[tuple[float, float, float, float]], shared: float) -> None:
    ready = sorted(at for at, *_ in rows)
    transfers = [Transfer(alone, min(alone, after), cpu * alone, 0.0) for _, alone, after, cpu in rows]
    done = finish(ready, transfers, shared=shared, depth=2)
    assert done == sorted(done)
    assert all(end >= at + t.alone_s - 1e-9 for at, t, end in zip(ready, transfers, done, strict=True))
    assert done[-1] <= ready[-1] + sum(t.alone_s + t.cpu_s for t in transfers) + 1e-3
    assert finish(ready, transfers, depth=2)[-1] <= done[-1] + 1e-9
    pace = Pace(tuple(Bucket(at, (("a", (1,)),)) for at in ready), ready[-1], shared)
    assert exposed_seconds(pace, transfers) == pytest.approx(max(0.0, done[-1] - ready[-1]))
