"""Means of values whose sum is beyond fp32: finite where stock DDP, which divides first, is finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_levels import check, needs_native
from thinwire import kernels
from thinwire.compressors import CodecCall, Coded, Key, Piece, Segments, first_state, parse
from thinwire.kernels import Format, Table, bucketed_bytes, bucketed_encode, bucketed_reduce, bucketed_sum, raw_sum

pytestmark = pytest.mark.usefixtures("one_thread")

LARGE = 1.2e38
RANKS = 4
SPECS = (
    *("raw", "minmax(bits=4)", "maxabs(bits=8)", "topk(density=0.5)", "gaussian(bits=2)", "ef(maxabs(bits=8))"),
    *("sign", "sign(majority=True)"),
)


def _large(seed: int = 0) -> Tensor:
    """512 values of which four add up to more than fp32 holds."""
    return LARGE * (1.0 + 0.2 * torch.rand(512, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("spec", SPECS)
def test_a_mean_is_finite_where_its_terms_are(spec: str) -> None:
    compressor = parse(spec)
    assert isinstance(compressor, Coded)
    segments = Segments.build([Piece("layer", 0, 512, 0, 0)])
    x, y, gathered = _large(), torch.empty(512), torch.empty(512)
    message, out = (torch.zeros(compressor.payload_bytes(512, x.dtype), dtype=torch.uint8) for _ in range(2))
    calls = [
        CodecCall(segments, Key.derive(rank), state=first_state(compressor, x, segments), scale=1 / RANKS)
        for rank in range(2)
    ]
    compressor.encode(x, message, calls[0])
    compressor.decode(message, sent := torch.empty(512), calls[0]._replace(scale=1.0))
    if not bool(sent.isfinite().all()):
        pytest.skip(f"{spec} has no format for values of this size")
    compressor.mean([message] * RANKS, gathered, calls[0])
    torch.testing.assert_close(gathered, sent)
    total = torch.empty(512)
    compressor.add_up([message] * (RANKS - 1), sent, total, calls[1])
    torch.testing.assert_close(total, sent)
    if compressor.traits.plain_sum:
        compressor.reduce([message] * (RANKS - 1), sent.clone(), out, y, calls[1])
        assert bool(y.isfinite().all())
        assert float(y.mean()) == pytest.approx(float(sent.mean()), rel=0.1)


@needs_native
@pytest.mark.parametrize(
    ("form", "ranks"), [(Format(4, 128), 3), (Format(8, 100), 8), (Format(8, 128, "maxabs"), 5)], ids=str
)
def test_large_means_have_the_same_bits_everywhere(form: Format, ranks: int) -> None:
    spans = Table(torch.tensor([[0, 512, 0, 0, 7]]))

    def run() -> dict[str, Tensor]:
        sent = [torch.zeros(bucketed_bytes(512, form), dtype=torch.uint8) for _ in range(ranks)]
        for rank, message in enumerate(sent):
            bucketed_encode(_large(rank), spans, message, form, key=rank)
        y, z = torch.empty(512), torch.empty(512)
        bucketed_sum(sent[1:], _large(), spans, y, form, scale=1 / ranks)
        bucketed_reduce(sent[1:], _large(), spans, sent[0], z, form, scale=1 / ranks, key=9)
        assert bool(y.isfinite().all()), "the mean is finite"
        return {"sum": y, "reduced": z, "message": sent[0]}

    check(run)


def test_a_sum_that_is_no_mean_still_overflows() -> None:
    spans, x = Table(torch.tensor([[0, 512, 0, 0, 7]])), _large()
    raw_sum([x.view(torch.uint8)] * 3, x, spans, y := torch.empty(512), scale=1.0)
    assert bool(y.isinf().all())


def test_the_factor_of_a_mean_is_the_power_of_two_below_it() -> None:
    for scale in (1 / 2, 1 / 3, 1 / 4, 1 / 7, 0.9, 1.0, 2.0, 2.0**-127, 0.0):
        before = kernels.before_sum(scale)
        assert before in (1.0, 0.5, 0.25, 0.125)
        assert (before <= scale < 2 * before) if 2.0**-126 <= scale < 1 else before == 1.0
        values = torch.randn(1000)
        assert torch.equal(values * before * (scale / before), values * scale)
