"""Figure 5: everything compressed. Loss by step, throughput with either part switched off, time to the same loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from thinwire.lab import parse_rate
from thinwire.repro import plots
from thinwire.repro.aqsgd.judged import draw_runs, facts, held_out, lost
from thinwire.repro.aqsgd.of_time import sooner
from thinwire.repro.aqsgd.rank import Asked
from thinwire.repro.aqsgd.trainings import Trained
from thinwire.repro.cgx.contest import Times, shown_rate
from thinwire.repro.cgx.judging import above, all_hold
from thinwire.repro.findings import Finding
from thinwire.repro.fullstack.study import Scale, StackTrainings, Study
from thinwire.repro.fullstack.ways import ACTIVATIONS, FP32, ONLY_GRADIENTS, Way, aqsgd, direct

AQSGD, DIRECT = aqsgd(3, 6), direct(3, 6)
CONTROL = direct(2, 4)
"""Must fail: where it does not, a training forgives everything."""
CURVES = (FP32, AQSGD, DIRECT, CONTROL)
TIMED = (FP32, ACTIVATIONS, ONLY_GRADIENTS, AQSGD)
FASTER, SOONER = 8.5, 4.9
"""Times FP32's throughput, and times sooner at the same loss (section 4.3; the blog post)."""
_FIGURE = "figure 5"

AllTimes = Mapping[str, Times]


def figure_5_steps(scale: Scale) -> int:
    """Of all trainings, and of all turns."""
    curves = len(CURVES) * scale.seeds * scale.small.steps
    turns = len(TIMED) * len(scale.rates) * (1 + scale.rounds)
    return curves + turns + 2 * scale.to_loss.steps


def figure_5(study: Study) -> list[Finding]:
    """Curves over loopback, then throughput over all links, then time over the slowest."""
    return [*_curves(study), *_throughput(study), _time(study)]


# --- loss by step


def _curves(study: Study) -> list[Finding]:
    margin = study.scale.margin
    found = {way.name: study.train(way) for way in CURVES}
    base = found[FP32.name]
    _draw_curves(study, found)
    sensitive = lost(found[CONTROL.name], base, margin).beyond is True
    unsure = "" if sensitive else "; the control did not surely fail, so that this says nothing"
    rows = []
    for way in CURVES[1:]:
        runs = found[way.name]
        told = lost(runs, base, margin)
        beside = lost(runs, base, margin, held_out).text.rsplit(": ", 1)[-1]
        text = f"{told.text}; held out {beside}"
        ours = way is AQSGD
        claim = f"{way.title} ends within {margin:.0%} of FP32's loss" if ours else f"{way.title} ends at a worse loss"
        rows.append(
            Finding(
                _FIGURE,
                f"loss/{way.name}",
                told.estimate.mean,
                "",
                claim if way is not CONTROL else "",
                text + (unsure if ours else ""),
                (told.within if sensitive else None) if ours else told.beyond,
                {"title": way.title, **facts(runs), "baseline": facts(base), "differences": told.differences},
                aside=f"the control, {way.title}" if way is CONTROL else "",
            )
        )
    return [*rows, _against_direct(found), _alike(found)]


def _against_direct(found: Mapping[str, Sequence[Trained]]) -> Finding:
    """Seed by seed: what DirectQ loses to AQ-SGD where gradients are compressed, too."""
    told = lost(found[DIRECT.name], found[AQSGD.name], 0.0)
    return Finding(
        _FIGURE,
        "loss/direct against aqsgd",
        told.estimate.mean,
        "",
        "with compressed gradients, DirectQ converges to a worse model than AQ-SGD of as many bits",
        told.text,
        told.beyond,
        {"differences": told.differences},
    )


def _alike(found: Mapping[str, Sequence[Trained]]) -> Finding:
    runs = [run for of in found.values() for run in of]
    alike = sum(run.alike for run in runs)
    return Finding(
        _FIGURE,
        "alike",
        float(alike),
        "",
        "replicas hold the same parameters, both sides of a boundary the same messages",
        f"the same bytes at the end of {alike} of {len(runs)} trainings",
        alike == len(runs),
    )


# --- throughput


def _throughput(study: Study) -> list[Finding]:
    scale = study.scale
    links = [study.scaled(rate) for rate in scale.rates]
    times = study.contest().times_by_rate(
        study.model, TIMED, rounds=scale.rounds, steps=1, rates=links, on_turn=study.advance
    )
    found = dict(zip(scale.rates, times, strict=True))
    _draw_throughput(study, found)
    return [_faster(study, found), _both_count(study, found), _table(study, found)]


def ceiling(found: AllTimes, slow: str) -> float:
    """Times FP32's throughput over the slowest link that no compression surpasses: steps that send hardly anything,
    over the fastest link, against FP32's over the slowest."""
    fastest = min(times.step_s(way.name) for times in found.values() for way in TIMED)
    return found[slow].step_s(FP32.name) / fastest


def _faster(study: Study, found: AllTimes) -> Finding:
    slow = study.scale.rates[0]
    gained = {rate: times.times_faster(AQSGD.name, FP32.name) for rate, times in found.items()}
    bound, sent = ceiling(found, slow), found[slow].payload_bytes
    fewer = sent[FP32.name] / sent[AQSGD.name]
    why = "" if bound >= FASTER else ", so that the paper's figure is out of reach in these proportions"
    return Finding(
        _FIGURE,
        "faster",
        gained[slow],
        "x",
        f"over 100 Mbit/s both compressed have up to {FASTER}x FP32's throughput",
        ", ".join(f"{value:.2f}x over {study.where(rate)}" for rate, value in gained.items())
        + f"; bounds: {bound:.1f}x if nothing had to be sent, {fewer:.1f}x fewer bytes{why}",
        study.verdict(above(found[slow].over(AQSGD.name, FP32.name), FASTER)),
        {"gained": gained, "ceiling": bound, "fewer_bytes": fewer},
    )


def _both_count(study: Study, found: AllTimes) -> Finding:
    """Over the slowest link."""
    slow = found[study.scale.rates[0]]
    gained = {way.name: slow.times_faster(AQSGD.name, way.name) for way in (ACTIVATIONS, ONLY_GRADIENTS)}
    holds = all_hold(above(slow.over(AQSGD.name, way.name)) for way in (ACTIVATIONS, ONLY_GRADIENTS))
    return Finding(
        _FIGURE,
        "both_count",
        min(gained.values()),
        "x",
        "switching off either part costs throughput",
        f"over {study.where(study.scale.rates[0])} both compressed have {gained[ACTIVATIONS.name]:.2f}x the throughput "
        f"of activations only, {gained[ONLY_GRADIENTS.name]:.2f}x that of gradients only",
        study.verdict(holds),
        gained,
    )


def _table(study: Study, found: AllTimes) -> Finding:
    task, rates = study.scale.timed, study.scale.rates
    items = task.batch * task.replicas
    per_s = {way.name: {rate: items / found[rate].step_s(way.name) for rate in rates} for way in TIMED}
    computed = study.computed()
    return Finding(
        _FIGURE,
        "throughput",
        per_s[AQSGD.name][rates[0]],
        "sequences/s",
        "",
        f"a micro-batch computes for {1e3 * computed.seconds:.0f} ms on a stage while all {task.replicas} replicas do: "
        f"rates are the paper's divided by {study.slowdown:.1f} "
        f"({', '.join(study.where(rate) for rate in rates)})",
        None,
        {
            "per_s": per_s,
            "titles": {way.name: way.title for way in TIMED},
            "links": {rate: study.scaled(rate) for rate in rates},
            "by_round": {rate: times.rounds for rate, times in found.items()},
            "step_bytes": found[rates[0]].payload_bytes,
            "slowdown": study.slowdown,
        },
        aside="compute to wire as in the paper",
    )


# --- time


def _time(study: Study) -> Finding:
    """One training each over the slowest link, warm-up and first visits included."""
    slow, task = study.scale.rates[0], study.scale.to_loss
    trainings = study.trainings(study.scaled(slow))
    base, ours = (_train(study, trainings, way) for way in (FP32, AQSGD))
    gained, reached = sooner(base, ours)
    step_ms = [1e3 * median(run.step_s) for run in (base, ours)]
    warm_ms = 1e3 * median(ours.step_s[: task.exact_steps])
    bound = step_ms[0] / step_ms[1]
    _draw_time(study, slow, {"fp32": base, "aqsgd": ours})
    return Finding(
        _FIGURE,
        "sooner",
        gained,
        "x",
        f"both compressed are at FP32's loss {SOONER}x sooner, end to end",
        f"over {study.where(slow)}: {gained:.2f}x sooner at {reached:.3f}; in the end {ours.loss:.3f} against "
        f"{base.loss:.3f}; steps of {step_ms[1]:.0f} ms against {step_ms[0]:.0f} ({bound:.2f}x), in QuantizedAdam's "
        f"warm-up, {task.exact_steps} of {task.steps} steps, of {warm_ms:.0f} ms",
        study.verdict(gained >= SOONER),
        {
            "seconds": {"fp32": base.seconds, "aqsgd": ours.seconds},
            "losses": {"fp32": base.epoch_losses, "aqsgd": ours.epoch_losses},
            "step_s": {"fp32": base.step_s, "aqsgd": ours.step_s},
            "exact_steps": task.exact_steps,
        },
    )


def _train(study: Study, trainings: StackTrainings, way: Way) -> Trained:
    title = f"{way.title} over {study.scale.rates[0]}"
    return trainings.train(study.scale.to_loss, way, 0, study.shower(title), Asked(held_out=False))


# --- pictures


def _draw_curves(study: Study, found: Mapping[str, Sequence[Trained]]) -> None:
    titles = ["2 stages in 2 replicas: training", "held out, at the end"]
    figure, (axes, ends) = plots.canvas(2, titles=titles, x="step", y="loss")
    for way in CURVES:
        draw_runs(axes, way, found[way.name])
    shown = [(way.title, way.colour, median(run.held_out[-1] for run in found[way.name])) for way in CURVES]
    plots.bars(ends, shown)
    least = min(value for _, _, value in shown)
    ends.set_xlim(left=0.95 * least)
    plots.save(figure, study.picture("5-curves"))


def _draw_throughput(study: Study, found: AllTimes) -> None:
    task = study.scale.timed
    title = f"2 stages in 2 replicas, {task.num_micro} micro-batches"
    figure, (axes,) = plots.canvas(1, titles=[title], x="the paper's rate", y="sequences/s")
    rates = [parse_rate(rate) / 1e9 for rate in found]
    for way in TIMED:
        per_s = [task.batch * task.replicas / times.step_s(way.name) for times in found.values()]
        axes.plot(rates, per_s, color=way.colour, marker="o", label=way.title)
    axes.set(xscale="log")
    axes.set_xticks(rates, [shown_rate(rate) for rate in found], rotation=30)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    plots.save(figure, study.picture("5-throughput"))


def _draw_time(study: Study, rate: str, runs: Mapping[str, Trained]) -> None:
    titles = [f"over {study.where(rate)}"]
    figure, (axes,) = plots.canvas(1, titles=titles, x="seconds of training", y="loss")
    for key, way in (("fp32", FP32), ("aqsgd", AQSGD)):
        axes.plot(runs[key].seconds, runs[key].epoch_losses, color=way.colour, marker=".", label=way.title)
    plots.save(figure, study.picture("5-time"))
