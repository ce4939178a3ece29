"""Tables 5.1 and 5.2 with figure C.4: perplexity with quantised weights and gradients, by bits and by bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from thinwire.repro import plots
from thinwire.repro.cgx.judging import all_hold
from thinwire.repro.findings import Finding, share
from thinwire.repro.qsdp.judged import Lost, curve, facts, lost, mean_perplexity, perplexities
from thinwire.repro.qsdp.sizes import Size, SizeName
from thinwire.repro.qsdp.study import MORE_RANKS, NUM_RANKS, Scale, Study, Training, Work, trainings
from thinwire.repro.qsdp.trainings import Trained
from thinwire.repro.qsdp.ways import BUCKET, FP16, FP32, LARGE_BUCKET, UNBUCKETED, W4G4, W8G8, Way, uniform

NAIVE = {bits: uniform(bits, bits, bucket=UNBUCKETED) for bits in (8, 4)}
CONTROL = NAIVE[4]
"""Must fail: where it does not, a training forgives everything."""
LARGE = {bits: uniform(bits, bits, bucket=LARGE_BUCKET) for bits in (8, 4)}
BUCKETED = {8: W8G8, 4: W4G4}
_BUCKETS_OF: SizeName = "medium"
"""Layers of the smallest network are smaller than the larger bucket."""

BITS = (6, 5, 4)
THESIS_GRID = {
    (6, 6): 35.74,
    (6, 5): 36.08,
    (6, 4): 35.84,
    (5, 6): 36.01,
    (5, 5): 35.94,
    (5, 4): 36.36,
    (4, 6): 37.11,
    (4, 5): 37.38,
    (4, 4): 37.61,
}
"""Table 5.2, by bits of weights and of gradients."""
_COLOURS = {6: "#0a7d4f", 5: "#1f6fb2", 4: "#c0392b"}


def recovery_work(scale: Scale) -> Work:
    """Trainings of table 5.1."""
    found: frozenset[Training] = frozenset()
    for size in scale.sizes:
        found |= trainings(scale, size.name, (FP16, FP32, W8G8))
    found |= trainings(scale, "small", (FP16, W8G8), MORE_RANKS)
    return Work(found | trainings(scale, _BUCKETS_OF, (*NAIVE.values(), W4G4)))


def table_5_1(study: Study) -> list[Finding]:
    """Baseline against W8G8 at three sizes, beside quantisation without buckets."""
    found = {
        size.name: {way.name: study.train(size.name, way) for way in (FP16, FP32, W8G8)} for size in study.scale.sizes
    }
    more = {way.name: study.train("small", way, MORE_RANKS) for way in (FP16, W8G8)}
    naive = {bits: study.train(_BUCKETS_OF, way) for bits, way in NAIVE.items()}
    margin = study.scale.margin
    base = found[_BUCKETS_OF][FP16.name]
    sensitive = lost(naive[4], base, margin).beyond is True
    rows = []
    for size in study.scale.sizes:
        rows.append(_recovered(size, NUM_RANKS, found[size.name], margin, sensitive))
        rows.append(_all_fp32(size, found[size.name], margin))
    small = study.scale.size("small")
    rows.append(_recovered(small, MORE_RANKS, more, margin, sensitive))
    rows += _unbucketed(study, base, found[_BUCKETS_OF][W8G8.name], naive)
    _draw_5_1(study, found)
    return rows


def _recovered(
    size: Size, num_ranks: int, found: Mapping[str, Sequence[Trained]], margin: float, sensitive: bool
) -> Finding:
    told = lost(found[W8G8.name], found[FP16.name], margin)
    text = told.text if sensitive else f"{told.text}; the control did not surely fail, so that this says nothing"
    more: dict[str, Any] = {
        **facts(found[W8G8.name]),
        "baseline_perplexities": perplexities(found[FP16.name]),
        "lower": told.estimate.lower,
        "upper": told.estimate.upper,
        "num_ranks": num_ranks,
        "title": size.title,
        "thesis": {"model": size.thesis, "baseline": size.baseline, "qsdp": size.qsdp},
    }
    return Finding(
        "table 5.1",
        f"lost/{size.name}/{num_ranks} ranks",
        told.estimate.mean,
        "",
        f"{size.title} on {num_ranks} ranks: W8G8's perplexity is within {margin:.0%} of the baseline's ({size.qsdp} "
        f"against {size.baseline}, {size.thesis})",
        text,
        told.within if sensitive else None,
        more,
    )


def _all_fp32(size: Size, found: Mapping[str, Sequence[Trained]], margin: float) -> Finding:
    told = lost(found[FP32.name], found[FP16.name], margin)
    return Finding(
        "table 5.1",
        f"fp32/{size.name}",
        told.estimate.mean,
        "",
        "",
        told.text,
        None,
        {**facts(found[FP32.name]), "num_ranks": NUM_RANKS},
        aside=f"{size.title}, gradients fp32 instead of fp16",
    )


def _unbucketed(
    study: Study, base: Sequence[Trained], w8g8: Sequence[Trained], naive: Mapping[int, Sequence[Trained]]
) -> list[Finding]:
    """One scale for all of a layer that a rank sends: what buckets are for."""
    margin, title = study.scale.margin, study.scale.size(_BUCKETS_OF).title
    eight, four = lost(naive[8], base, margin), lost(naive[4], base, margin)
    bucketed = study.train(_BUCKETS_OF, W4G4)
    beside = lost(naive[4], bucketed, margin)
    return [
        Finding(
            "section 5.7.1",
            "unbucketed/8",
            eight.estimate.mean,
            "",
            f"{title}: without buckets 8 bits are clearly worse than the baseline, by over {margin:.0%} (more than 2 "
            "units of perplexity, GPT 125M)",
            f"{eight.text}; with buckets {mean_perplexity(w8g8):.3f}",
            eight.beyond,
            {**facts(naive[8]), "spec": NAIVE[8].weights},
        ),
        Finding(
            "section 5.7.1",
            "unbucketed/4",
            beside.estimate.mean,
            "",
            f"the same with 4 bits, asked of this training: clearly worse than in buckets of {BUCKET}",
            f"{beside.text}; the baseline's {mean_perplexity(base):.3f}",
            beside.beyond,
            {**facts(naive[4]), "spec": NAIVE[4].weights},
        ),
        Finding(
            "table 5.1",
            "control",
            four.estimate.mean,
            "",
            "",
            f"{four.text}: {'damage is seen' if four.beyond else 'damage is not shown to be seen'}",
            None,
            {"spec": CONTROL.weights},
            aside=f"{title}, a control that must fail, {CONTROL.title}",
        ),
    ]


def grid_work(scale: Scale) -> Work:
    """Trainings of table 5.2."""
    return Work(trainings(scale, "small", (FP16, *_grid().values())))


def table_5_2(study: Study) -> list[Finding]:
    """Bits of weights and of gradients, uniform, on the smallest network."""
    base = study.train("small", FP16)
    found = {key: study.train("small", way) for key, way in _grid().items()}
    _draw_5_2(study, base, found)
    return [*_grid_claims(study, base, found), *_cells(study, base, found)]


def _grid_claims(
    study: Study, base: Sequence[Trained], found: Mapping[tuple[int, int], Sequence[Trained]]
) -> list[Finding]:
    margin = study.scale.margin
    six = lost(found[6, 6], base, margin)
    swapped = lost(found[4, 6], found[6, 4], 0.0)
    steps = {g: lost(found[4, g], found[5, g], 0.0) for g in BITS}
    return [
        Finding(
            "table 5.2",
            "lost/W6G6",
            six.estimate.mean,
            "",
            f"W6G6's perplexity is within {margin:.0%} of the baseline's (35.74 against 35.81, GPT 125M)",
            six.text,
            six.within,
        ),
        Finding(
            "table 5.2",
            "weights_over_gradients",
            swapped.estimate.mean,
            "",
            "4 bits cost more of weights than of gradients: W4G6 is worse than W6G4 (37.11 against 35.84)",
            swapped.text,
            swapped.beyond,
        ),
        Finding(
            "table 5.2",
            "fewer_bits_of_weights",
            fmean(step.estimate.mean for step in steps.values()),
            "",
            "weights of 4 bits lose more than those of 5, whatever gradients have (37.11 to 37.61 against 35.94 to "
            "36.36)",
            "; ".join(f"G{g}: {share(step.estimate)}" for g, step in steps.items()),
            all_hold(step.beyond for step in steps.values()),
        ),
    ]


def _cells(study: Study, base: Sequence[Trained], found: Mapping[tuple[int, int], Sequence[Trained]]) -> list[Finding]:
    """A row for each cell of the table; the first one shows them all."""
    shown = ", ".join(f"W{w}G{g} {mean_perplexity(runs):.3f}" for (w, g), runs in found.items())
    return [
        Finding(
            "table 5.2",
            f"perplexity/W{w}G{g}",
            mean_perplexity(runs),
            "",
            "",
            f"perplexities, baseline {mean_perplexity(base):.3f}: {shown}",
            None,
            {
                **facts(runs),
                "weights": w,
                "gradients": g,
                "lost": lost(runs, base, study.scale.margin).estimate.mean,
                "baseline": mean_perplexity(base),
                "thesis": THESIS_GRID[w, g],
            },
            aside=study.scale.size("small").title if (w, g) == (6, 6) else "",
        )
        for (w, g), runs in found.items()
    ]


def _grid() -> dict[tuple[int, int], Way]:
    return {(w, g): uniform(w, g) for w in BITS for g in BITS}


def bucket_work(scale: Scale) -> Work:
    """Trainings of figure C.4."""
    return Work(trainings(scale, _BUCKETS_OF, (FP16, *BUCKETED.values(), *LARGE.values())))


def figure_c_4(study: Study) -> list[Finding]:
    """Buckets of the default size against larger ones."""
    base = study.train(_BUCKETS_OF, FP16)
    small = {bits: study.train(_BUCKETS_OF, way) for bits, way in BUCKETED.items()}
    large = {bits: study.train(_BUCKETS_OF, way) for bits, way in LARGE.items()}
    _draw_c_4(study, base, small, large)
    margin = study.scale.margin
    told = {bits: lost(large[bits], small[bits], 0.0) for bits in LARGE}
    recovered = lost(large[8], base, margin)
    title = study.scale.size(_BUCKETS_OF).title
    return [
        _gap(title, 8, told[8], f"8 bits in buckets of {LARGE_BUCKET} are worse than in those of {BUCKET}"),
        Finding(
            "figure C.4",
            "unrecovered/8",
            recovered.estimate.mean,
            "",
            f"{title}: 8 bits in buckets of {LARGE_BUCKET} do not recover the baseline: over {margin:.0%} is lost",
            recovered.text,
            recovered.beyond,
            facts(large[8]),
        ),
        _gap(title, 4, told[4], "the same with 4 bits, which the thesis did not try"),
    ]


def _gap(title: str, bits: int, told: Lost, claim: str) -> Finding:
    return Finding(
        "figure C.4",
        f"gap/{bits}",
        told.estimate.mean,
        "",
        f"{title}: {claim}",
        told.text,
        told.beyond,
        {"lower": told.estimate.lower, "upper": told.estimate.upper},
    )


def _draw_5_1(study: Study, found: Mapping[str, Mapping[str, Sequence[Trained]]]) -> None:
    sizes = study.scale.sizes
    figure, panels = plots.canvas(len(sizes), titles=[size.title for size in sizes], x="step", y="perplexity")
    for axes, size in zip(panels, sizes, strict=True):
        for way in (FP16, W8G8):
            _line(axes, found[size.name][way.name], way.colour, way.title, "-")
        axes.set_yscale("log")
    plots.save(figure, study.picture("5.1"))


def _draw_5_2(study: Study, base: Sequence[Trained], found: Mapping[tuple[int, int], Sequence[Trained]]) -> None:
    title = f"{study.scale.size('small').title}, uniform"
    figure, (axes,) = plots.canvas(1, titles=[title], x="bits of gradients", y="perplexity")
    for w in BITS:
        means = [mean_perplexity(found[w, g]) for g in BITS]
        axes.plot(BITS, means, color=_COLOURS[w], marker="o", label=f"weights of {w} bits")
    axes.axhline(mean_perplexity(base), color=FP16.colour, linewidth=1, linestyle=":", label=FP16.title)
    axes.set_xticks(BITS)
    plots.save(figure, study.picture("5.2"))


def _draw_c_4(
    study: Study,
    base: Sequence[Trained],
    small: Mapping[int, Sequence[Trained]],
    large: Mapping[int, Sequence[Trained]],
) -> None:
    titles = [f"{study.scale.size(_BUCKETS_OF).title}, {bits} bits" for bits in small]
    figure, panels = plots.canvas(len(titles), titles=titles, x="step", y="perplexity")
    for axes, bits in zip(panels, small, strict=True):
        _line(axes, base, FP16.colour, FP16.title, ":")
        _line(axes, small[bits], "#0a7d4f", f"buckets of {BUCKET}", "-")
        _line(axes, large[bits], "#c0392b", f"buckets of {LARGE_BUCKET}", "-")
        axes.set_yscale("log")
    plots.save(figure, study.picture("C.4"))


def _line(axes: Any, runs: Sequence[Trained], colour: str, title: str, style: str) -> None:
    # Without the start, where nothing is learnt.
    steps, means = curve(runs)
    axes.plot(steps[1:], means[1:], style, color=colour, label=title)
