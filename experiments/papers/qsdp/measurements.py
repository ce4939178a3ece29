"""What is measured and drawn for the thesis's chapter 5: perplexity by bits and buckets, steps over links, bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from experiments.framework.claims import Row
from experiments.framework.study import Scale, Study, draw_bars
from experiments.framework.timing import RANKS_PER_NODE, Place, Times, Timing, where
from experiments.framework.verdicts import Course, Rounds, courses, sooner
from experiments.papers.qsdp.methods import (
    BITS,
    BLOCKWISE,
    BUCKET,
    BUCKETED,
    CONTROL,
    FLAT,
    FP16,
    FP32,
    HIERARCHICAL,
    LARGE,
    LARGE_BUCKET,
    LGRECO,
    NAIVE,
    NOTHING,
    PAIRS,
    RATIOS,
    RAW,
    SIZES,
    THESIS_BASELINE,
    THESIS_GRID,
    THESIS_RATIOS,
    TIMED,
    W2G2,
    W4G4,
    W8G8,
    WORDS,
    Method,
    Pair,
    Size,
    SizeName,
    learned,
    shortened,
    timed,
    uniform,
)
from experiments.papers.qsdp.trainings import Trained
from experiments.tasks.images import Model
from thinwire_tools import plots
from thinwire_tools.compare.data import standard_library
from thinwire_tools.compare.statistics import estimate, relative_differences
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.lab import parse_rate

NUM_RANKS = 2
"""Each with a core of its own; tables and figures are of so many unless they say more."""
MORE_RANKS = 4
MARGIN = 0.01
"""Up to such a share of the perplexity may be lost, and a training still ends at the same."""
BUCKETS_OF: SizeName = "medium"
"""Layers of the smallest network are smaller than the larger bucket."""
ROUNDED = ("W5G4", "W4G4")
"""Of which uniform levels are also tried with rounding to the nearest, as learned ones are."""
LEAST_BITS_KEPT = "W5G4"
"""The highest compression "without substantial accuracy impact" (section 5.7.1)."""
THESIS_STEPS, THESIS_LEARNINGS = 4800, 3
METHODS = (FP32, FP16, RAW, W8G8, replace(W4G4, color="#1f6fb2"), NOTHING)
"""Of figure 5.3."""
NODE_METHODS = (FP32, FLAT, HIERARCHICAL, NOTHING)
_FAST_BPS = 10**9
_COLORS = {6: "#0a7d4f", 5: "#1f6fb2", 4: "#c0392b"}


@dataclass(frozen=True, kw_only=True)
class QSDPScale(Scale):
    """``seeds`` trainings of what quality is judged of, ``rounds`` turns of every method that is timed; a ``rate``
    takes the place of ``rates``."""

    sizes: tuple[Size, ...] = SIZES
    words: Size = WORDS
    timed: GPTTask = TIMED
    num_micro: int = 4
    """Micro-batches of a step that is timed: 5 weight exchanges to one gradient exchange."""
    rounds: int = 8
    ratio_rounds: int = 5
    """Of figure C.1 and table C.2, which have many methods; a verdict takes 5."""
    rates: tuple[str, ...] = ("100mbit", "300mbit", "1gbit", "10gbit")
    fast_steps: int = 2
    """Steps of a turn over links of 1 Gbit/s and more."""
    slow_rate: str = "100mbit"
    """Of figure 5.2, and between nodes."""
    ratio_rate: str = "300mbit"
    """Of figure C.1 and table C.2."""

    def adapted(self, **options: Any) -> QSDPScale:
        made = super().adapted(**options)
        return made if options.get("rounds") is None else replace(made, ratio_rounds=made.rounds)

    def about(self) -> dict[str, Any]:
        standard_library()
        sizes = {
            size.name: {"parameters": size.num_parameters, "learn_at": size.learn_at}
            for size in (*self.sizes, self.words)
        }
        return {"trained": sizes, "num_ranks": NUM_RANKS, "margin": MARGIN, "control": CONTROL.weights}

    def size(self, name: SizeName) -> Size:
        return next(size for size in (*self.sizes, self.words) if size.name == name)


@dataclass
class QSDPStudy(Study[QSDPScale]):
    @property
    def rates(self) -> tuple[str | None, ...]:
        """Of the links that times are taken over, the slowest first; None for loopback."""
        if not self.emulated:
            return (None,)
        return (self.rate,) if self.rate else self.scale.rates

    def rate_or(self, usual: str) -> str | None:
        """Of the links of a part that takes one rate, ``usual`` unless another was asked for."""
        return (self.rate or usual) if self.emulated else None

    @property
    def model(self) -> Model:
        """What is timed."""
        return timed(self.scale.timed)

    def train(self, name: SizeName, method: Method, num_ranks: int = NUM_RANKS, num_micro: int = 1) -> list[Trained]:
        """A training from every seed, in steps of so many micro-batches, unless it has been.

        Raises:
            RankFailedError: a rank did not make it.
        """
        size = self.scale.size(name)
        options: dict[str, Any] = {"on_step": self.reporter(f"{size.title}, {method.title}"), "num_micro": num_micro}
        trainings = self.trainings(num_ranks)
        answers = (trainings.train(size.task, method, seed, **options) for seed in self.seeds)
        return [Trained.of(size.task, one) for one in answers]

    def timing(self, place: Place = "links", num_ranks: int = NUM_RANKS) -> Timing:
        """Ranks that are timed."""
        options: dict[str, Any] = {"num_ranks": num_ranks, "num_micro": self.scale.num_micro}
        return self.kept(("timing", place, num_ranks), lambda: Timing(place, emulated=self.emulated, **options))


# --- perplexity


def lost_row(figure: str, name: str, runs: Sequence[Trained], others: Sequence[Trained], **data: Any) -> Row:
    """How much higher the perplexity is than the others', as a share of it, by seed: mean and bounds at 95 %."""
    ours, theirs = _perplexities(runs), _perplexities(others)
    difference = estimate(relative_differences(ours, theirs))
    bounds = {"mean": fmean(ours), "against": fmean(theirs), "lower": difference.lower, "upper": difference.upper}
    return Row(figure, name, difference.mean, "", {**facts(runs), **bounds, **data})


def facts(runs: Sequence[Trained]) -> dict[str, list[float]]:
    """What a row keeps of trainings, by seed."""
    return {"perplexities": _perplexities(runs), "of_weights_as_kept": [run.master_perplexity for run in runs]}


def _perplexities(runs: Sequence[Trained]) -> list[float]:
    return [run.perplexity for run in runs]


def mean_perplexity(runs: Sequence[Trained]) -> float:
    """On all held-out text, of weights as they are gathered."""
    return fmean(_perplexities(runs))


def curve(runs: Sequence[Trained]) -> tuple[list[int], list[float]]:
    """Steps, and the mean over seeds of the probe's perplexity there; what diverged is left out."""
    steps = [0, *runs[0].probe_steps]
    means = [fmean(values) for values in zip(*(run.probes for run in runs), strict=True)]
    shown = [(step, mean) for step, mean in zip(steps, means, strict=True) if math.isfinite(mean)]
    return [step for step, _ in shown], [mean for _, mean in shown]


_IN_WORDS = {
    FP16.name: "FSDP2: weights in fp32, gradients in fp16",
    W8G8.name: "QSDP: weights and gradients in 8 bits (W8G8)",
}
"""Of pictures; tables have the names of methods."""


def _millions(size: Size) -> str:
    return f"{size.num_parameters / 1e6:.1f} million"


def _log_scale(axes: Any) -> None:
    """Perplexities on a log scale, with plain numbers and lines at its ticks."""
    axes.set_yscale("log")
    for of_ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        of_ticks("{x:g}")
    axes.grid(which="both", axis="y", alpha=0.25)


def _line(axes: Any, runs: Sequence[Trained], color: str, title: str, style: str = "-") -> None:
    # Without the start, where nothing is learned.
    steps, means = curve(runs)
    axes.plot(steps[1:], means[1:], style, color=color, label=title)
    _log_scale(axes)


def table_5_1(study: QSDPStudy) -> list[Row]:
    """Baseline against W8G8 at three sizes, beside quantization without buckets."""
    sizes, rows = study.scale.sizes, []
    titles = [f"GPT of {_millions(size)} parameters" for size in sizes]
    figure, panels = plots.canvas(len(sizes), titles=titles, x="step", y="held-out perplexity")
    for axes, size in zip(panels, sizes, strict=True):
        base, ours = study.train(size.name, FP16), study.train(size.name, W8G8)
        rows += [
            recovered_row(size, NUM_RANKS, ours, base),
            lost_row("table 5.1", f"fp32/{size.name}", study.train(size.name, FP32), base, num_ranks=NUM_RANKS),
        ]
        for method, runs in ((FP16, base), (W8G8, ours)):
            _line(axes, runs, method.color, _IN_WORDS[method.name])
    plots.save(figure, study.picture("5.1"))
    small = [study.train("small", method, MORE_RANKS) for method in (W8G8, FP16)]
    rows.append(recovered_row(study.scale.size("small"), MORE_RANKS, *small))
    base, naive = study.train(BUCKETS_OF, FP16), {bits: study.train(BUCKETS_OF, NAIVE[bits]) for bits in NAIVE}
    bucketed = {bits: study.train(BUCKETS_OF, BUCKETED[bits]) for bits in NAIVE}
    specs = {bits: method.weights for bits, method in NAIVE.items()}
    return [
        *rows,
        lost_row("section 5.7.1", "unbucketed/8", naive[8], base, spec=specs[8], beside=mean_perplexity(bucketed[8])),
        lost_row("section 5.7.1", "unbucketed/4", naive[4], bucketed[4], spec=specs[4], beside=mean_perplexity(base)),
        lost_row("table 5.1", "control", naive[4], base, spec=specs[4]),
    ]


def of_words(study: QSDPStudy) -> list[Row]:
    """8 bits of words, with buckets and without: a scale for each layer, or for each block."""
    base, bucketed, naive, blockwise = (study.train("words", method) for method in (FP16, W8G8, NAIVE[8], BLOCKWISE))
    title = f"GPT of words, {_millions(study.scale.words)} parameters"
    figure, panels = plots.canvas(1, titles=[title], x="step", y="held-out perplexity")
    _line(panels[0], base, FP16.color, _IN_WORDS[FP16.name])
    _line(panels[0], bucketed, W8G8.color, f"8 bits, a scale for each {BUCKET} values")
    _line(panels[0], naive, "#1f6fb2", "8 bits, a scale for each layer", "--")
    _line(panels[0], blockwise, BLOCKWISE.color, "8 bits, a scale for each block of layers")
    plots.save(figure, study.picture("5.7.1"))
    beside = mean_perplexity(bucketed)
    return [
        lost_row("section 5.7.1", "blockwise/words", blockwise, base, beside=beside),
        lost_row("section 5.7.1", "unbucketed/words", naive, base, beside=beside),
        lost_row("section 5.7.1", "bucketed/words", bucketed, base),
    ]


def recovered_row(size: Size, num_ranks: int, runs: Sequence[Trained], base: Sequence[Trained]) -> Row:
    """W8G8 beside the baseline."""
    return lost_row(
        "table 5.1",
        f"lost/{size.name}/{num_ranks} ranks",
        runs,
        base,
        baseline_perplexities=_perplexities(base),
        num_ranks=num_ranks,
        title=size.title,
        thesis={"model": size.thesis, "baseline": size.baseline, "qsdp": size.qsdp},
    )


def table_5_2(study: QSDPStudy) -> list[Row]:
    """Bits of weights and of gradients, uniform, on the smallest network."""
    base, figure = study.train("small", FP16), "table 5.2"
    trained = {key: study.train("small", uniform(*key)) for key in THESIS_GRID}
    _draw_5_2(study, base, trained)
    steps = {g: lost_row(figure, "", trained[4, g], trained[5, g]) for g in BITS}
    by_gradients = {
        g: {"mean": row.value, "lower": row.data["lower"], "upper": row.data["upper"]} for g, row in steps.items()
    }
    mean_step = fmean(row.value for row in steps.values())
    rows = [
        lost_row(figure, "lost/W6G6", trained[6, 6], base),
        lost_row(figure, "weights_over_gradients", trained[4, 6], trained[6, 4]),
        Row(figure, "fewer_bits_of_weights", mean_step, "", {"by_gradients": by_gradients}),
    ]
    for (w, g), runs in trained.items():
        lost = lost_row(figure, "", runs, base).value
        cell = {"weights": w, "gradients": g, "lost": lost, "baseline": mean_perplexity(base)}
        data = {**facts(runs), **cell, "thesis": THESIS_GRID[w, g]}
        rows.append(Row(figure, f"perplexity/W{w}G{g}", mean_perplexity(runs), "", data))
    return rows


def _draw_5_2(study: QSDPStudy, base: Sequence[Trained], trained: Mapping[tuple[int, int], Sequence[Trained]]) -> None:
    title = f"{study.scale.size('small').title}, uniform"
    figure, (axes,) = plots.canvas(1, titles=[title], x="bits of gradients", y="perplexity")
    for w in BITS:
        means = [mean_perplexity(trained[w, g]) for g in BITS]
        axes.plot(BITS, means, color=_COLORS[w], marker="o", label=f"weights of {w} bits")
    axes.axhline(mean_perplexity(base), color=FP16.color, linewidth=1, linestyle=":", label=FP16.title)
    axes.set_xticks(BITS)
    plots.save(figure, study.picture("5.2"))


def lgreco_over_qsdp(study: QSDPStudy) -> list[Row]:
    """L-GreCo beside its reference, and 2 bits, which must end worse, on the smallest network."""
    every = max(2, study.scale.size("small").task.steps // 7)
    methods = (FP32, W4G4, W2G2, replace(LGRECO, adapt=f"lgreco(every={every})"))
    base, plain, fewest, ours = (study.train("small", method) for method in methods)
    sent = {"reference_bytes": _sent(plain)["step_bytes"], "plans": [dict(run.plan) for run in ours]}
    return [
        lost_row("L-GreCo", "lost/reference", ours, plain, **_sent(ours), **sent),
        *(
            lost_row("L-GreCo", f"lost/{method.name}", runs, base, title=method.title, **_sent(runs))
            for method, runs in ((W4G4, plain), (LGRECO, ours), (W2G2, fewest))
        ),
        lost_row("L-GreCo", "control", fewest, plain, spec=W2G2.weights),
    ]


def _sent(runs: Sequence[Trained]) -> dict[str, list[float]]:
    """Bytes that rank 0 sends, by seed: the mean step's, and the last one's."""
    return {
        "step_bytes": [fmean(run.step_bytes) for run in runs],
        "last_step_bytes": [run.step_bytes[-1] for run in runs],
    }


def figure_c_4(study: QSDPStudy) -> list[Row]:
    """Buckets of the default size against larger ones."""
    base = study.train(BUCKETS_OF, FP16)
    small = {bits: study.train(BUCKETS_OF, method) for bits, method in BUCKETED.items()}
    large = {bits: study.train(BUCKETS_OF, method) for bits, method in LARGE.items()}
    titles = [f"{study.scale.size(BUCKETS_OF).title}, {bits} bits" for bits in small]
    figure, panels = plots.canvas(len(titles), titles=titles, x="step", y="perplexity")
    for axes, bits in zip(panels, small, strict=True):
        _line(axes, base, FP16.color, FP16.title, ":")
        _line(axes, small[bits], "#0a7d4f", f"buckets of {BUCKET}")
        _line(axes, large[bits], "#c0392b", f"buckets of {LARGE_BUCKET}")
    plots.save(figure, study.picture("C.4"))
    return [
        lost_row("figure C.4", "gap/8", large[8], small[8]),
        lost_row("figure C.4", "unrecovered/8", large[8], base),
        lost_row("figure C.4", "gap/4", large[4], small[4]),
    ]


# --- learned levels


def of_levels(table: str, study: QSDPStudy) -> list[Row]:
    """Uniform and learned levels on the smallest network, and what learning costs."""
    size, pairs = study.scale.size("small"), [pair for pair in PAIRS if pair.table == table]
    base = study.train("small", FP16)
    plain = {pair.name: study.train("small", uniform(pair.weights, pair.gradients)) for pair in pairs}
    by_levels = {
        pair.name: study.train("small", learned(pair.weights, pair.gradients, size.learn_at)) for pair in pairs
    }
    rows = [levels_row(pair, by_levels[pair.name], plain[pair.name], base) for pair in pairs]
    if LEAST_BITS_KEPT not in plain:
        return rows
    nearest = {
        pair.name: study.train("small", uniform(pair.weights, pair.gradients, rounding="nearest"))
        for pair in pairs
        if pair.name in ROUNDED
    }
    _draw_5_3(study, base, plain, by_levels, nearest)
    for name, runs in nearest.items():
        beside, data = f"learned_beside_nearest/{name}", facts(runs)
        rows.append(lost_row("table 5.3", beside, by_levels[name], runs, pair=name, **data))
    kept = by_levels[LEAST_BITS_KEPT]
    rows.append(lost_row("table 5.3", f"lost/{LEAST_BITS_KEPT} learned", kept, base))
    return [*rows, cost_row(size, kept)]


def levels_row(pair: Pair, runs: Sequence[Trained], plain: Sequence[Trained], base: Sequence[Trained]) -> Row:
    """Learned levels beside uniform ones."""
    return lost_row(
        pair.table,
        f"learned/{pair.name}",
        runs,
        plain,
        uniform_perplexities=_perplexities(plain),
        baseline=mean_perplexity(base),
        thesis={"uniform": pair.uniform, "learned": pair.learned, "baseline": THESIS_BASELINE},
        pair=pair.name,
    )


def cost_row(size: Size, runs: Sequence[Trained]) -> Row:
    """Seconds of learning as a share of training, at the thesis's pace: three times in a training of its length."""
    each_s = fmean(run.learn_s for run in runs) / len(size.learn_at)
    step_s = fmean(median(run.step_s) for run in runs)
    data = {"learn_s": [run.learn_s for run in runs], "share_here": fmean(run.learn_share for run in runs)}
    data |= {"learn_at": list(size.learn_at), "step_s": step_s, "steps": size.task.steps}
    return Row("section C.3", "learning_cost", THESIS_LEARNINGS * each_s / (THESIS_STEPS * step_s), "", data)


def _draw_5_3(
    study: QSDPStudy,
    base: Sequence[Trained],
    plain: Mapping[str, Sequence[Trained]],
    by_levels: Mapping[str, Sequence[Trained]],
    nearest: Mapping[str, Sequence[Trained]],
) -> None:
    title = f"{study.scale.size('small').title}, buckets of {BUCKET}"
    figure, (axes,) = plots.canvas(1, titles=[title], x="", y="perplexity")
    bars = [("baseline", FP16.color, mean_perplexity(base))]
    for name, runs in plain.items():
        bars.append((f"{name} uniform", "#0a7d4f80", mean_perplexity(runs)))
        if name in nearest:
            bars.append((f"{name} uniform, nearest", "#0a7d4f", mean_perplexity(nearest[name])))
        bars.append((f"{name} learned", "#1f6fb2", mean_perplexity(by_levels[name])))
    draw_bars(axes, bars)
    plots.save(figure, study.picture("5.3"))


# --- figure 5.3: steps over links, and between nodes


def _turn(scale: QSDPScale, rate: str | None) -> int:
    """Steps of a turn: over fast links single ones are too short to tell apart."""
    return scale.fast_steps if rate is None or parse_rate(rate) >= _FAST_BPS else 1


def figure_5_3(study: QSDPStudy) -> list[Row]:
    """All methods in turns, over links of each rate; then two nodes of two ranks."""
    scale, times_by_rate = study.scale, {}
    for steps in sorted({_turn(scale, rate) for rate in study.rates}):
        rates = [rate for rate in study.rates if _turn(scale, rate) == steps]
        times = study.timing().times(
            study.model, METHODS, rounds=scale.rounds, steps=steps, rates=rates, on_turn=study.advance
        )
        times_by_rate |= dict(zip(rates, times, strict=True))
    by_rate = {rate: times_by_rate[rate] for rate in study.rates}
    _draw_5_3_bandwidth(study, by_rate)
    rate = study.rate_or(scale.slow_rate)
    (nodes,) = study.timing("nodes", MORE_RANKS).times(
        study.model, NODE_METHODS, rounds=scale.rounds, steps=1, rates=(rate,), on_turn=study.advance
    )
    data = {
        "step_s": {method.name: nodes.step_s(method.name) for method in NODE_METHODS},
        "by_round": nodes.rounds,
        "titles": {method.name: method.title for method in NODE_METHODS},
        "payload_bytes": nodes.payload_bytes,
        "num_ranks": MORE_RANKS,
        "num_nodes": MORE_RANKS // RANKS_PER_NODE,
        "where": where(rate),
    }
    gained = nodes.times_faster(HIERARCHICAL.name, FLAT.name)
    return [steps_row(by_rate), Row("section 5.6.1", "hierarchical_over_flat", gained, "x", data)]


def steps_row(times_by_rate: Mapping[str | None, Times]) -> Row:
    """Every step time, and what the link makes of the baseline; links are the slowest first."""
    by_rate = {str(rate): times for rate, times in times_by_rate.items()}
    first = next(iter(by_rate.values()))
    data = {
        "step_s": {m.name: {rate: times.step_s(m.name) for rate, times in by_rate.items()} for m in METHODS},
        "by_round": {rate: times.rounds for rate, times in by_rate.items()},
        "titles": {method.name: method.title for method in METHODS},
        "payload_bytes": first.payload_bytes,
        "stages_s": {rate: times.stages for rate, times in by_rate.items()},
        "slowdown_of_the_baseline": {
            rate: times.step_s(FP16.name) / times.step_s(NOTHING.name) for rate, times in by_rate.items()
        },
        "num_ranks": NUM_RANKS,
    }
    return Row("figure 5.3", "step_s", first.step_s(W8G8.name), "s", data)


def _draw_5_3_bandwidth(study: QSDPStudy, times_by_rate: Mapping[str | None, Times]) -> None:
    title = f"{study.model.title} on {NUM_RANKS} ranks, {study.scale.num_micro} accumulations"
    figure, (axes,) = plots.canvas(1, titles=[title], x="Gbit/s of each link", y="seconds a step")
    rates: Sequence[float] = [parse_rate(rate) / 1e9 if rate else 1.0 for rate in times_by_rate]
    for method in METHODS:
        seconds = [times.step_s(method.name) for times in times_by_rate.values()]
        style = ":" if method is NOTHING else "-"
        axes.plot(rates, seconds, style, color=method.color, marker="o", label=method.title)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    plots.save(figure, study.picture("5.3-bandwidth"))


# --- figure C.1 and table C.2: only the first of so many weights and gradients are sent


def table_c_2(study: QSDPStudy) -> list[Row]:
    """All pairs of ratios in turns."""
    methods, rate = {key: shortened(*key) for key in THESIS_RATIOS}, study.rate_or(study.scale.ratio_rate)
    chosen = [*methods.values(), NOTHING]
    (times,) = study.timing().times(
        study.model, chosen, rounds=study.scale.ratio_rounds, steps=1, rates=(rate,), on_turn=study.advance
    )
    _draw_c_1(study, times, methods, rate)
    return ratio_rows(times, where(rate))


def ratio_rows(times: Times, over: str) -> list[Row]:
    """A row for each cell of the table, and how near to nothing sent the least one comes."""
    whole = times.step_s(shortened(1, 1).name)
    rows = []
    for (w, g), theirs in THESIS_RATIOS.items():
        name = shortened(w, g).name
        cell = {"weights": w, "gradients": g, "by_round": times.rounds[name], "relative": times.step_s(name) / whole}
        data = {**cell, "thesis_relative": theirs / THESIS_RATIOS[1, 1], "where": over}
        rows.append(Row("table C.2", f"step_s/{w}/{g}", times.step_s(name), "s", data))
    both = shortened(RATIOS[-1], RATIOS[-1]).name
    steps = {"both": times.step_s(both), "nothing": times.step_s(NOTHING.name), "whole": whole}
    data = {"step_s": steps, "ratios": times.over(both, NOTHING.name), "where": over}
    return [*rows, Row("figure C.1", "near_ideal", times.times_faster(both, NOTHING.name), "", data)]


def _draw_c_1(study: QSDPStudy, times: Times, methods: Mapping[tuple[int, int], Method], rate: str | None) -> None:
    titles = [f"{study.model.title} {where(rate)}"]
    figure, (axes,) = plots.canvas(1, titles=titles, x="compression ratio", y="seconds a step")
    lines: dict[str, tuple[Callable[[int], tuple[int, int]], str]] = {
        "of weights": (lambda ratio: (ratio, 1), "#0a7d4f"),
        "of gradients": (lambda ratio: (1, ratio), "#1f6fb2"),
        "of both": (lambda ratio: (ratio, ratio), "#8250c4"),
    }
    for label, (key, color) in lines.items():
        seconds = [times.step_s(methods[key(ratio)].name) for ratio in RATIOS]
        axes.plot(RATIOS, seconds, color=color, marker="o", label=label)
    axes.axhline(times.step_s(NOTHING.name), color="#222222", linewidth=1, linestyle=":", label=NOTHING.title)
    axes.set_xscale("log")
    axes.set_xticks(RATIOS, [str(ratio) for ratio in RATIOS])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    plots.save(figure, study.picture("C.1"))


# --- figure 5.2: perplexity against time over one slow link


_TIME_STEPS = 10
"""Of a turn."""
IN_TIME = {"baseline": FP16, "qsdp": W8G8}


def figure_5_2(study: QSDPStudy) -> list[Row]:
    """Steps to a perplexity are those of trainings over loopback, of several micro-batches a step, their times those of
    turns over the slow link."""
    scale, size, rate = study.scale, study.scale.size("small"), study.rate_or(study.scale.slow_rate)
    trained = {name: study.train("small", method, num_micro=scale.num_micro) for name, method in IN_TIME.items()}
    (times,) = study.timing().times(
        timed(size.task), (FP16, W8G8), rounds=scale.rounds, steps=_TIME_STEPS, rates=(rate,), on_turn=study.advance
    )
    found = {name: course(runs, IN_TIME[name]) for name, runs in trained.items()}
    _draw_5_2_time(study, found, times.rounds, rate)
    data = {"title": f"{size.title} {where(rate)}", "courses": courses(**found), "rounds": times.rounds}
    data |= {"baseline_perplexities": _perplexities(trained["baseline"]), "num_micro": scale.num_micro}
    data |= facts(trained["qsdp"])
    gained = sooner(found["qsdp"], found["baseline"], times.rounds).times
    return [Row("figure 5.2", "sooner", gained, "x", data)]


def _draw_5_2_time(study: QSDPStudy, found: Mapping[str, Course], rounds: Rounds, rate: str | None) -> None:
    title = f"GPT of {_millions(study.scale.size('small'))} parameters, trained {where(rate)}"
    figure, (axes,) = plots.canvas(1, titles=[title], x="seconds of training", y="held-out perplexity")
    for name, method in IN_TIME.items():
        found[name].draw(axes, rounds, color=method.color, label=_IN_WORDS[method.name])
    _log_scale(axes)
    plots.save(figure, study.picture("5.2-time"))


def course(runs: Sequence[Trained], method: Method) -> Course:
    """Of the probe's perplexity, without the start, where nothing is learned."""
    return Course(runs[0].probe_steps, [run.probes[1:] for run in runs], [(runs[0].probe_steps[-1], method.name)])
