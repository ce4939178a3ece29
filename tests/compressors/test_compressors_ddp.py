"""Every compressor through compress() on a DDP model: it trains, replicas agree, it is measured."""

from __future__ import annotations

import pytest
import torch

import thinwire
from harness import run_ranks
from nets import assert_replicas_identical, make, train, trained

SPECS = (
    *("qsgd(bits=4)", "maxabs(bits=4, scale=row)", "terngrad", "shared_terngrad(deviations=2.5)", "atomo(rank=2)"),
    *("natural", "onebit", "sign", "sign(majority=True)", "lattice(bits=4, bucket=128)"),
    *("levels(bits=4, bucket=128, learn_at=(0, 2), min_numel=0)", "rangefloat(bits=8)", "truncate(gamma=4)"),
    *("topk(density=0.1)", "topk(density=0.1, feedback=False)"),
    *("topk(density=0.1, select=sampled) | minmax(bits=8)", "threshold(lam=0.001, capacity=0.5)"),
    *("threshold(lam=0.001, capacity=0.5) | qsgd(bits=8)", "globaltopk(density=0.1)", "fft(theta=0.8)"),
    *("fft(theta=((0, 0.9), (3, 0.0)), feedback=False)", "powersgd(rank=2)"),
    *("dgc(topk(density=((0, 0.25), (2, 0.1))), nesterov=True)", "intsgd(bits=8)", "intdiana(bits=2)"),
    *("heuristic_intsgd(bits=8, rounding=random)", "ef(intsgd(bits=8, rounding=determ))"),
)
_STEPS = 4


def _train(rank: int, specs: tuple[str, ...]) -> None:
    for spec in specs:
        model = make(rank)
        wire = thinwire.compress(model, spec, skip_if_slower=False, checks=thinwire.Checks(1, measure_every=2))
        train(model, rank, _STEPS, optimizer=torch.optim.SGD(trained(model), lr=0.02))
        assert_replicas_identical(model)
        stats = wire.stats
        assert stats.steps == stats.compressed_steps == stats.parity_checks == _STEPS, spec
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters()), spec
        assert [step for step, _ in stats.alpha] == [0, 2], (spec, stats.alpha)
        assert stats.to_dict()["alpha"] == stats.alpha[-1][1]
        assert all(isinstance(value, int | float) for value in stats.to_dict().values())
        # An unbiased choice of few terms errs by more than the gradient itself.
        assert all(0.0 <= alpha < 4.0 for _, alpha in stats.alpha), (spec, stats.alpha)


@pytest.mark.filterwarnings("ignore:.*values were clipped")
@pytest.mark.parametrize(("num_ranks", "specs"), [(2, SPECS[::2]), (3, SPECS[1::2])])
def test_it_trains(num_ranks: int, specs: tuple[str, ...]) -> None:
    run_ranks(_train, num_ranks, specs, timeout_s=110.0, group_timeout_s=60.0)
