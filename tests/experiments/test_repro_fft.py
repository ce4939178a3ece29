"""``python -m experiments fft``: what receivers see, the methods, the sizes of messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thinwire
from experiments.framework.training import Gradients
from experiments.papers.fft import methods, reconstruct
from thinwire.compressors import MinMax, at_step


def _gradients(ranks: int = 2) -> Gradients:
    generator = torch.Generator().manual_seed(0)
    layers = tuple(tuple(torch.randn(8, 16, generator=generator) for _ in range(2)) for _ in range(ranks))
    return Gradients((0,), ("one", "two"), (layers,))


def test_a_reconstruction_is_the_mean_of_what_each_rank_sends() -> None:
    gradients = _gradients()
    exact = [torch.stack([rank[i].flatten() for rank in gradients.layers[0]]).mean(0) for i in range(2)]
    codec = MinMax(bits=4, bucket=128, rounding="nearest")
    found = reconstruct.reconstruct(gradients, 0, codec)
    assert torch.allclose(found.exact, torch.cat(exact))
    # Nearest rounding: within half a unit of each rank's range over fifteen steps.
    widest = max(float(layer.max() - layer.min()) for rank in gradients.layers[0] for layer in rank)
    assert 0 < float(found.errors.max()) <= widest / 30 * 1.001
    assert found.relative_error == pytest.approx(float(found.errors.norm() / found.exact.norm()))


def test_histograms_and_shares() -> None:
    edges = np.array([-1.0, 0.0, 1.0])
    same = reconstruct.Reconstruction(torch.tensor([-0.5, 0.5, -3.0, 3.0]), torch.tensor([-0.1, 0.9, -0.2, 7.0]))
    assert reconstruct.histogram(same.exact, edges).tolist() == [0.5, 0.5]
    assert reconstruct.distance(same, edges) == 0
    other = reconstruct.Reconstruction(torch.tensor([-0.5, -0.5]), torch.tensor([0.5, 0.5]))
    assert reconstruct.distance(other, edges) == 1
    errors = {"a": torch.zeros(10), "b": torch.ones(10), "c": torch.full((10,), 2.0)}
    found = {name: reconstruct.quantiles(values) for name, values in errors.items()}
    assert [reconstruct.share_with_least_error(found, name) for name in "ab"] == [1, 0]


def test_messages_are_as_long_as_the_paper_counts() -> None:
    numel = 1 << 20
    bits = {m.name: 8 * thinwire.parse(m.spec).wire_bytes((numel,)) / numel for m in methods.LOSSY}
    # 15 % of half as many complex numbers of twice 10 bits, and a bitmap of theirs; 15 % of 32 bits, and a bitmap.
    assert bits["fft"] == pytest.approx(32 / 21.3 + 0.5, rel=0.01)
    assert bits["topk"] == pytest.approx(32 / 6.67 + 1, rel=0.01)
    assert bits["qsgd"] == pytest.approx(32 / 10.6, rel=0.01)
    assert bits["terngrad"] == pytest.approx(32 / 16.0, rel=0.01)


def test_theta_follows_the_learning_rate_or_drops_to_0_at_its_step() -> None:
    codec = thinwire.parse(methods.diminishing(0.99, 0.02).spec)
    thetas = [at_step(codec, 0, rate).theta for rate in (0.02, 0.002)]
    # In steps of a 64th, rounded down: θ² falls to a tenth with the learning rate.
    assert thetas == [pytest.approx(0.99, abs=1 / 64), pytest.approx(0.99 / 10**0.5, abs=1 / 64)]
    codec, numel = thinwire.parse(methods.dropped(0.9, 288).spec), 1 << 16
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    before, after = (at_step(codec, step, None) for step in (287, 288))
    assert float((before.roundtrip(x) - x).norm() / x.norm()) > 0.5
    # Nothing is dropped, and nothing is rounded to few bits.
    assert torch.allclose(after.roundtrip(x), x, atol=1e-5)
    assert before.wire_bytes((numel,)) < after.wire_bytes((numel,))
