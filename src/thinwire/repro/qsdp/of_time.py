"""Figure 5.2: perplexity against time over one slow link, of the baseline and of W8G8."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from thinwire.repro import plots
from thinwire.repro.findings import Finding
from thinwire.repro.qsdp.judged import facts, lost
from thinwire.repro.qsdp.study import NUM_RANKS, Scale, Study, Work, where
from thinwire.repro.qsdp.trainings import Trained, Trainings
from thinwire.repro.qsdp.ways import FP16, W8G8

_THESIS = 2.2
"""Times faster that QSDP trains GPT 1.3B at 10 Gbit/s, to essentially the same perplexity."""
_WAYS = (FP16, W8G8)


def time_work(scale: Scale) -> Work:
    """A training of each, from one seed."""
    return Work(steps=len(_WAYS) * scale.size("small").task.steps)


def figure_5_2(study: Study) -> list[Finding]:
    """Both trainings over the same link, of steps of several micro-batches."""
    size, rate = study.scale.size("small"), study.rate_or(study.scale.slow_rate)
    with Trainings(NUM_RANKS, rate) as trainings:
        found = {
            way.name: trainings.train(
                size.task, way, 0, study.shower(f"{size.title}, {way.title}"), num_micro=study.scale.num_micro
            )
            for way in _WAYS
        }
    _draw(study, found)
    return [_sooner(study, found[FP16.name], found[W8G8.name])]


def _sooner(study: Study, base: Trained, ours: Trained) -> Finding:
    """Times sooner at the worse of the two ends, which both reach."""
    size, rate = study.scale.size("small"), study.rate_or(study.scale.slow_rate)
    reached = max(base.probes[-1], ours.probes[-1])
    times = [run.seconds_to(reached) for run in (base, ours)]
    sooner = times[0] / times[1] if times[0] is not None and times[1] else float("nan")
    step_ms = [1e3 * median(run.step_s) for run in (base, ours)]
    told = lost([ours], [base], study.scale.margin)
    return Finding(
        "figure 5.2",
        "sooner",
        sooner,
        "x",
        f"QSDP reaches the baseline's perplexity up to {_THESIS}x sooner (GPT 1.3B at 10 Gbit/s)",
        f"{size.title} {where(rate)}: {sooner:.2f}x sooner at {reached:.2f}; in the end {told.text.split(': ')[0]}; "
        f"steps of {step_ms[1]:.0f} ms against {step_ms[0]:.0f}",
        study.verdict(sooner >= _THESIS),
        {
            "seconds": {"baseline": base.seconds, "qsdp": ours.seconds},
            "probes": {"baseline": base.probes, "qsdp": ours.probes},
            **facts([ours]),
            "baseline_perplexities": [base.perplexity],
            "num_micro": study.scale.num_micro,
        },
    )


def _draw(study: Study, found: dict[str, Trained]) -> None:
    title = f"{study.scale.size('small').title} {where(study.rate_or(study.scale.slow_rate))}"
    figure, (axes,) = plots.canvas(1, titles=[title], x="seconds of training", y="perplexity")
    for way in _WAYS:
        run = found[way.name]
        axes.plot(*_learnt(run), color=way.colour, marker=".", label=way.title)
    axes.set_yscale("log")
    plots.save(figure, study.picture("5.2-time"))


def _learnt(run: Trained) -> tuple[Sequence[float], Sequence[float]]:
    """Seconds and perplexities, without the start."""
    return run.seconds[1:], run.probes[1:]
