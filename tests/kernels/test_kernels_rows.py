"""Values without a code: the native core against PyTorch's operations, bit for bit."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernel_cases import DTYPES, same, special, values
from kernel_levels import LEVELS, at, needs_native
from thinwire import kernels
from thinwire.kernels import Table, raw_decode, raw_encode, raw_sum, reference, rows_add, rows_scale

pytestmark = [needs_native, pytest.mark.usefixtures("one_thread")]


def _table(sizes: list[int], itemsize: int, gap: int = 1) -> tuple[Table, int]:
    """Segments with gaps, and the bytes of a message with room behind it."""
    rows, start, payload = [], gap, 64
    for i, numel in enumerate(sizes):
        rows.append((start, numel, 0, payload, i))
        start, payload = start + numel + gap, payload + kernels.align(numel * itemsize)
    return Table(torch.tensor(rows)), payload + 64


def _all(run: ModuleType, spans: Table, num_bytes: int, x: Tensor, others: list[Tensor], wide: Tensor) -> list[Tensor]:
    """What every operation makes of the same values."""
    sent = [torch.full((num_bytes,), 9, dtype=torch.uint8) for _ in range(len(others) + 1)]
    for message, other in zip(sent, (*others, x), strict=True):
        run.raw_encode(other, spans, message)
    stored, added, scaled = (torch.full_like(x, 7.0) for _ in range(3))
    run.raw_decode(sent[0], spans, stored, add=False, scale=1.0)
    run.raw_decode(sent[0], spans, added, add=True, scale=0.3)
    run.raw_decode(sent[0], spans, scaled, add=False, scale=1 / 3)
    made = [*sent, stored, added, scaled]
    in_place = x.clone()
    for own, scale in ((x, 1 / 3), (wide, 0.25), (x, 1.0), (in_place, 2.0)):
        y = own if own is in_place else torch.full_like(x, 7.0)
        out = torch.full((num_bytes,), 5, dtype=torch.uint8)
        run.raw_sum(sent, own, spans, y, scale=scale, out_message=out)
        run.raw_sum(sent[1:], x, spans, again := torch.full_like(x, 7.0), scale=scale, out_message=None)
        made += [y, out, again]
    for alpha in (1.0, 3.0, 1 / 3):
        summed, mine, its = torch.full_like(wide, 7.0), wide.clone(), wide.clone()
        run.rows_add(x, wide, spans, summed, alpha=alpha)
        run.rows_add(mine, x, spans, mine, alpha=alpha)
        run.rows_add(x, its, spans, its, alpha=alpha)
        made += [summed, mine, its]
    for by, over in ((1 / 3, 1.0), (1.0, 3.0), (1.0, 1.0)):
        scaled, mine, narrow = torch.full_like(wide, 7.0), wide.clone(), torch.full_like(x, 7.0)
        if over == 1.0:
            run.rows_scale(x, spans, scaled, by=by, over=over)
        run.rows_scale(mine, spans, mine, by=by, over=over)
        run.rows_scale(wide, spans, narrow, by=by, over=over)
        made += [scaled, mine, narrow]
    return made


def _check(
    sizes: list[int], dtype: torch.dtype, make, seed: int, gap: int = 1, levels=LEVELS, threads: int = 1
) -> None:
    spans, num_bytes = _table(sizes, dtype.itemsize, gap)
    x, *others = (make(spans.num_elements + 3, seed + i, dtype) for i in range(3))
    wide = make(spans.num_elements, seed + 9, torch.float32)
    wanted = _all(reference, spans, num_bytes, x, others, wide)
    for level in levels:
        with at(level, threads):
            got = _all(kernels, spans, num_bytes, x, others, wide)
        for number, (mine, its) in enumerate(zip(got, wanted, strict=True)):
            assert same(mine, its), f"{number}: {dtype}, {level}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_as_pytorch(dtype: torch.dtype) -> None:
    _check([0, 1, 3, 17, 128, 2047, 2048, 5000, 1], dtype, values, 1)
    _check([300_000, 7], dtype, values, 2, levels=LEVELS[:1], threads=3)


def test_values_that_are_not_finite_arrive() -> None:
    spans, num_bytes = _table([4000], 4)
    x = special(spans.num_elements, 3, torch.float32)
    raw_encode(x, spans, message := torch.zeros(num_bytes, dtype=torch.uint8))
    raw_decode(message, spans, y := torch.zeros_like(x))
    assert same(x[1:4001], y[1:4001])
    raw_sum([message], x, spans, y, scale=0.5)
    assert torch.equal(y[1:4001].isnan(), x[1:4001].isnan())


def test_a_message_at_an_odd_address() -> None:
    spans, num_bytes = _table([100], 2)
    x = values(spans.num_elements, 1, torch.bfloat16)
    message = torch.zeros(num_bytes + 1, dtype=torch.uint8)[1:]
    for level in LEVELS:
        with at(level, 1):
            raw_encode(x, spans, message)
            raw_decode(message, spans, y := torch.zeros_like(x), scale=2.0)
            raw_sum([message], x, spans, total := torch.zeros_like(x), scale=1.0)
        assert torch.equal(y[1:], 2 * x[1:])
        assert torch.equal(total[1:], 2 * x[1:])


def test_what_the_core_does_not_take_is_done_all_the_same() -> None:
    """fp64, and values that are not contiguous."""
    spans, num_bytes = _table([50], 8)
    x = torch.randn(60, dtype=torch.float64)
    raw_encode(x, spans, message := torch.zeros(num_bytes, dtype=torch.uint8))
    raw_sum([message], x, spans, y := torch.zeros_like(x), scale=0.5, out_message=torch.zeros_like(message))
    assert torch.equal(y[1:51], x[1:51])
    strided = torch.randn(120)[::2]
    raw_encode(strided, spans, message)
    raw_decode(message, spans, z := torch.zeros(60))
    assert torch.equal(z[1:51], strided[1:51])


def test_sizes_are_checked() -> None:
    spans, num_bytes = _table([50], 4)
    x, message = torch.zeros(60), torch.zeros(num_bytes, dtype=torch.uint8)
    for call in (
        lambda: raw_encode(x[:20], spans, message),
        lambda: raw_encode(x, spans, message[:100]),
        lambda: raw_decode(message[:100], spans, x),
        lambda: raw_sum([message], x[:20], spans, x, scale=1.0),
        lambda: raw_sum([message, message[:100]], x, spans, x, scale=1.0),
        lambda: raw_sum([message], x, spans, x, scale=1.0, out_message=message[:100]),
        lambda: rows_add(x, x[:20], spans, x),
        lambda: rows_scale(x, spans, x[:20], by=2.0),
    ):
        with pytest.raises(ValueError, match=r"elements|bytes|segments"):
            call()
