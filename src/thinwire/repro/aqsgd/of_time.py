"""Figure 4: loss against time over two slow links, of FP32 and of AQ-SGD with its first, uncompressed epoch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import median

from thinwire.repro import plots
from thinwire.repro.aqsgd.rank import Asked
from thinwire.repro.aqsgd.study import NUM_STAGES, Scale, Study, Work
from thinwire.repro.aqsgd.trainings import Trained, Trainings
from thinwire.repro.aqsgd.ways import FP32, Way, aqsgd
from thinwire.repro.findings import Finding

WARM = aqsgd(4, 8, warmup_epochs=1)
"""As in appendix D: the first epoch is uncompressed both ways."""
_FIRST_VISITS = aqsgd(4, 8)
_WAYS = (FP32, WARM)
_PAPER = 4.3


def time_work(scale: Scale) -> Work:
    """A training of each over each link, and one without a warm-up epoch over the slowest."""
    steps = (len(_WAYS) * len(scale.slow_rates) + 1) * scale.to_loss.steps
    return Work(steps=steps, own=frozenset({scale.to_loss}))


def figure_4(study: Study) -> list[Finding]:
    """Both trainings over the same link, for each link."""
    found: dict[str, dict[str, Trained]] = {}
    beside: Trained | None = None
    for rate in study.scale.slow_rates:
        with Trainings(NUM_STAGES, study.first(), study.scaled(rate)) as trainings:
            found[rate] = {}
            for key, way in (("fp32", FP32), ("aqsgd", WARM)):
                found[rate][key] = _train(study, trainings, way, rate)
            if rate == study.scale.slow_rates[0]:
                beside = _train(study, trainings, _FIRST_VISITS, rate)
    _draw(study, found)
    rows = [_sooner(study, rate, runs["fp32"], runs["aqsgd"]) for rate, runs in found.items()]
    assert beside is not None, "there is a slowest link"
    slowest = study.scale.slow_rates[0]
    return [*rows, _without(study, slowest, found[slowest]["fp32"], beside)]


def _train(study: Study, trainings: Trainings, way: Way, rate: str) -> Trained:
    title = f"{way.title} over {rate}"
    return trainings.train(study.scale.to_loss, way, 0, study.shower(title), Asked(held_out=False))


def seconds_to(run: Trained, loss: float) -> float | None:
    """Seconds of training until an epoch's loss first is there, between epochs by a straight line; None if never."""
    ends = list(zip(run.seconds, run.epoch_losses, strict=True))
    if ends and ends[0][1] <= loss:
        return ends[0][0]
    for (before_s, before), (after_s, after) in pairwise(ends):
        if after <= loss:
            return before_s + (before - loss) / (before - after) * (after_s - before_s)
    return None


def sooner(base: Trained, ours: Trained) -> tuple[float, float]:
    """How many times sooner ours is at the worse of the two ends, which both reach; and that loss."""
    reached = max(base.loss, ours.loss)
    times = [seconds_to(run, reached) for run in (base, ours)]
    return (times[0] / times[1] if times[0] is not None and times[1] else float("nan")), reached


def _sooner(study: Study, rate: str, base: Trained, ours: Trained) -> Finding:
    gained, reached = sooner(base, ours)
    step_ms = [1e3 * median(run.step_s) for run in (base, ours)]
    return Finding(
        "figure 4",
        f"sooner/{rate}",
        gained,
        "x",
        f"AQ-SGD fw4 bw8, warm-up epoch included, is at FP32's loss up to {_PAPER}x sooner",
        f"over {study.where(rate)}: {gained:.2f}x sooner at {reached:.3f}; in the end {ours.loss:.3f} against "
        f"{base.loss:.3f}; steps of {step_ms[1]:.0f} ms against {step_ms[0]:.0f}",
        study.verdict(gained >= _PAPER) if rate == study.scale.slow_rates[0] else None,
        {
            "seconds": {"fp32": base.seconds, "aqsgd": ours.seconds},
            "losses": {"fp32": base.epoch_losses, "aqsgd": ours.epoch_losses},
            "epochs": study.scale.to_loss.epochs,
        },
    )


def _without(study: Study, rate: str, base: Trained, ours: Trained) -> Finding:
    gained, reached = sooner(base, ours)
    return Finding(
        "figure 4",
        f"first_visits/{rate}",
        gained,
        "x",
        "",
        f"over {study.where(rate)}: {gained:.2f}x sooner at {reached:.3f}; in the end {ours.loss:.3f} against "
        f"{base.loss:.3f}",
        None,
        {"seconds": ours.seconds, "losses": ours.epoch_losses},
        aside="only first activations whole (algorithm 1)",
    )


def _draw(study: Study, found: Mapping[str, Mapping[str, Trained]]) -> None:
    titles = [f"over {study.where(rate)}" for rate in found]
    figure, all_axes = plots.canvas(len(found), titles=titles, x="seconds of training", y="loss")
    for axes, runs in zip(all_axes, found.values(), strict=True):
        for key, way in (("fp32", FP32), ("aqsgd", WARM)):
            axes.plot(runs[key].seconds, runs[key].epoch_losses, color=way.colour, marker=".", label=way.title)
    plots.save(figure, study.picture("4-time"))
