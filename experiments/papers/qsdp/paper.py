"""The claims of the thesis's chapter on QSDP, the parts that measure for them, and its command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean, median
from typing import Any

from experiments.framework.claims import Claim, Rows, bounded, over, ratios, times_faster
from experiments.framework.paper import Paper, Part, command
from experiments.framework.timing import where
from experiments.framework.verdicts import (
    Course,
    Judgment,
    Sooner,
    all_hold,
    exceeds,
    faster,
    if_seen,
    larger,
    matches,
    shown_difference,
    sooner,
    unsound,
)
from experiments.papers.qsdp import measurements
from experiments.papers.qsdp.measurements import (
    BUCKETS_OF,
    LEAST_BITS_KEPT,
    MARGIN,
    MORE_RANKS,
    NUM_RANKS,
    ROUNDED,
    QSDPScale,
    QSDPStudy,
)
from experiments.papers.qsdp.methods import (
    BUCKET,
    FP16,
    LARGE_BUCKET,
    LGRECO,
    PAIRS,
    RATIOS,
    SIZES,
    SIZES_SMOKE,
    THESIS_BASELINE,
    THESIS_GRID,
    THESIS_RATIOS,
    TIMED_SMOKE,
    W8G8,
    WORDS,
    WORDS_SMOKE,
    Size,
)
from thinwire_tools.compare.statistics import Estimate, estimate, relative_differences

_UNBUCKETED = 2 / THESIS_BASELINE
"""What 8 bits without buckets lose of GPT 125M's perplexity."""
_ASKED = 2.2
"""How many times faster than the baseline's W8G8's step is to be over the slowest link."""
_SLOWEST, _FAST, _FASTEST = "100mbit", "1gbit", "10gbit"
_CONSTANT = 0.15
"""What a step of W8G8 may be longer over a link that is ten times slower."""
_SOONER = 2.2
"""Times faster that QSDP trains GPT 1.3B at 10 Gbit/s, to essentially the same perplexity."""
_MOST = RATIOS[-1]
_NEAR = 0.85
"""Of the speed with nothing sent."""


# --- perplexity: a row has the mean of what is lost, and its bounds


def _lost(figure: str, row: str, statement: str, *, within: float | None = None, effect: float | None = None) -> Claim:
    """What is lost is at most ``within``; where that is None, it is worse than nothing, by ``effect`` in the thesis."""

    def rule(rows: Rows) -> Judgment:
        difference = bounded(rows[row], rows[row]["value"])
        return exceeds(difference, effect) if within is None else matches(difference, within)

    return Claim(figure, row, statement, rule)


def _not_within(row: str, statement: str) -> Claim:
    """Of figure C.4: more is lost than what may be."""
    claim = _lost("figure C.4", row, statement, within=MARGIN)

    def rule(rows: Rows) -> Judgment:
        judgment = claim.rule(rows)
        return judgment if judgment.holds is None else replace(judgment, holds=not judgment.holds)

    return replace(claim, rule=rule)


def _recovered(size: Size, num_ranks: int) -> Claim:
    """Judged where the control shows that this training sees damage."""
    statement = (
        f"{size.title} on {num_ranks} ranks: W8G8's perplexity is within {MARGIN:.0%} of the baseline's ({size.qsdp} "
        f"against {size.baseline}, {size.thesis})"
    )
    claim = _lost("table 5.1", f"lost/{size.name}/{num_ranks} ranks", statement, within=MARGIN)

    def rule(rows: Rows) -> Judgment:
        return if_seen(_sensitive(rows), claim.rule(rows))

    return replace(claim, rule=rule)


def _sensitive(rows: Rows) -> bool:
    return matches(bounded(rows["control"], rows["control"]["value"]), MARGIN).holds is False


def _quality() -> Iterator[Claim]:
    """Tables 5.1 and 5.2, section 5.7.1 and figure C.4."""
    small, title = SIZES[0], next(size.title for size in SIZES if size.name == BUCKETS_OF)
    for size in SIZES:
        yield _recovered(size, NUM_RANKS)
    yield _recovered(small, MORE_RANKS)
    yield _lost(
        "section 5.7.1",
        "unbucketed/8",
        f"{title}: without buckets 8 bits are clearly worse than the baseline (more than 2 units of perplexity, GPT "
        "125M)",
        effect=_UNBUCKETED,
    )
    yield _lost(
        "section 5.7.1",
        "blockwise/words",
        f"{WORDS.title}, a scale for each block of layers, as FSDP flattened them: without buckets 8 bits are clearly "
        "worse than the baseline (more than 2 units of perplexity, GPT 125M)",
        effect=_UNBUCKETED,
    )
    yield _lost(
        "section 5.7.1",
        "unbucketed/words",
        f"{WORDS.title}, a scale for each layer: without buckets 8 bits are clearly worse than the baseline",
        effect=_UNBUCKETED,
    )
    yield _lost(
        "section 5.7.1",
        "bucketed/words",
        f"{WORDS.title}, buckets of {BUCKET}: W8G8's perplexity is within {MARGIN:.0%} of the baseline's ({WORDS.qsdp} "
        f"against {WORDS.baseline}, {WORDS.thesis})",
        within=MARGIN,
    )
    yield _lost(
        "section 5.7.1",
        "unbucketed/4",
        f"the same with 4 bits, asked of this training: clearly worse than in buckets of {BUCKET}",
    )
    yield _lost(
        "table 5.2",
        "lost/W6G6",
        f"W6G6's perplexity is within {MARGIN:.0%} of the baseline's (35.74 against 35.81, GPT 125M)",
        within=MARGIN,
    )
    yield _lost(
        "table 5.2",
        "weights_over_gradients",
        "4 bits cost more of weights than of gradients: W4G6 is worse than W6G4 (37.11 against 35.84)",
        effect=THESIS_GRID[4, 6] / THESIS_GRID[6, 4] - 1,
    )
    yield Claim(
        "table 5.2",
        "fewer_bits_of_weights",
        "weights of 4 bits lose more than those of 5, whatever gradients have (37.11 to 37.61 against 35.94 to 36.36)",
        lambda rows: all_hold(exceeds(bounded(step, step["mean"]), _fewer_bits_lose(g)) for g, step in _steps(rows)),
    )
    gap = f"{title}: 8 bits in buckets of {LARGE_BUCKET} are worse than in those of {BUCKET} (more than {MARGIN:.0%})"
    yield _not_within("gap/8", gap)
    statement = f"{title}: 8 bits in buckets of {LARGE_BUCKET} do not recover the baseline (within {MARGIN:.0%})"
    yield _not_within("unrecovered/8", statement)
    yield _lost("figure C.4", "gap/4", f"{title}: the same with 4 bits, which the thesis did not try")


def _fewer_bits_lose(gradients: str) -> float:
    """What the thesis's perplexity grows by from 5 bits of weights to 4."""
    return THESIS_GRID[4, int(gradients)] / THESIS_GRID[5, int(gradients)] - 1


def _steps(rows: Rows) -> list[tuple[Any, Mapping[str, Any]]]:
    """From 5 bits of weights to 4, by bits of gradients."""
    return list(rows["fewer_bits_of_weights"]["by_gradients"].items())


# --- L-GreCo


def _lgreco() -> Iterator[Claim]:
    """The thesis has L-GreCo under data parallelism alone."""
    statement = (
        f"not in the thesis; asked here of {SIZES[0].title}: {LGRECO.title}, sends fewer bytes than W4G4 at a "
        f"perplexity that is at most {MARGIN:.0%} higher"
    )
    quality = _lost("L-GreCo", "lost/reference", statement, within=MARGIN)

    def fewer(rows: Rows) -> Estimate:
        row = rows["lost/reference"]
        return estimate(relative_differences(row["reference_bytes"], row["step_bytes"]))

    def rule(rows: Rows) -> Judgment:
        return if_seen(_sensitive(rows), all_hold((exceeds(fewer(rows)), quality.rule(rows))))

    yield replace(quality, rule=rule)


# --- learned levels


def _levels() -> Iterator[Claim]:
    """Tables 5.3 and C.3."""
    for pair in PAIRS:
        statement = (
            f"{pair.name}: learned levels end at a lower perplexity than uniform ones ({pair.learned} against "
            f"{pair.uniform})"
        )
        yield _better(pair.table, f"learned/{pair.name}", statement, 1 - pair.learned / pair.uniform)
    for name in ROUNDED:
        pair = next(pair for pair in PAIRS if pair.name == name)
        statement = (
            f"{name}: learned levels end at a lower perplexity than uniform ones ({pair.learned} against "
            f"{pair.uniform}), both rounded to the nearest"
        )
        yield _better("table 5.3", f"learned_beside_nearest/{name}", statement, 1 - pair.learned / pair.uniform)
    yield _lost(
        "table 5.3",
        f"lost/{LEAST_BITS_KEPT} learned",
        f"{LEAST_BITS_KEPT} learned is within {MARGIN:.0%} of the baseline (36.01 against {THESIS_BASELINE}: no "
        "substantial impact)",
        within=MARGIN,
    )


def _better(figure: str, row: str, statement: str, effect: float) -> Claim:
    """Perplexity is lower, by the share ``effect`` in the thesis."""

    def rule(rows: Rows) -> Judgment:
        lost = bounded(rows[row], rows[row]["value"])
        gained = Estimate(-lost.mean, lost.deviation, -lost.upper, -lost.lower, lost.num_pairs)
        # Lower is lower, however little: what the thesis gains decides only where nothing is seen.
        return exceeds(gained) if gained.lower > 0 else exceeds(gained, effect)

    return Claim(figure, row, statement, rule)


# --- figures C.2 and C.3, of which there is the record: errors of learned levels along a training

_LAYERS = {"blocks.0.attention.weight": ("C.2", "an attention layer"), "embedding.weight": ("C.3", "the LM head")}
_CURVES = ("weights", "gradients")


def _errors(layer: str) -> Iterator[Claim]:
    number, title = _LAYERS[layer]
    figure, row = f"figure {number}", f"gain/{layer}"

    def over_learned(rows: Rows, learning: int, key: str) -> dict[str, list[list[float]]]:
        """That curve over that of learned levels, of weights and of gradients, by seed, from that learning on."""
        since, by_seed = rows[row]["learn_at"][learning], rows[row]["curves"]

        def ratios(curve: Mapping[str, Any]) -> list[float]:
            looks = zip(curve[key], curve["learned"], curve["steps"], strict=True)
            return [own / learned for own, learned, at in looks if at >= since]

        return {what: [ratios(curves[what]) for curves in by_seed] for what in _CURVES}

    def constantly_lower(rows: Rows) -> Judgment:
        gained = over_learned(rows, 0, "uniform").values()
        return all_hold(larger([min(looks) for looks in by_seed]) for by_seed in gained)

    def gained_by_bits(rows: Rows) -> list[float]:
        gained = over_learned(rows, 0, "uniform")
        pairs = zip(gained["gradients"], gained["weights"], strict=True)
        return [fmean(gradients) / fmean(weights) for gradients, weights in pairs]

    def enough(rows: Rows) -> Judgment:
        """Levels that were learned once keep at least half of what learning again gains in the end."""
        gained, aged = (over_learned(rows, -1, key) for key in ("uniform", "once"))
        return all_hold(
            matches(estimate([fmean(looks) - 1 for looks in aged[what]]), (_mean(gained[what]) - 1) / 2)
            for what in aged
        )

    yield Claim(figure, row, f"{title}: the error of learned levels is constantly lower, W5G4", constantly_lower)
    yield Claim(
        figure,
        f"gain_by_bits/{layer}",
        f"{title}: the fewer bits, the larger the gap: gradients of 4 bits gain more than weights of 5",
        lambda rows: larger(gained_by_bits(rows)),
        value=lambda rows: fmean(gained_by_bits(rows)),
        unit="x",
    )
    yield Claim(
        figure,
        f"once/{layer}",
        f"{title}: learning once, at the start, is enough (section C.3); asked here: half of what learning gains in "
        "the end is kept",
        enough,
        value=lambda rows: max(map(_mean, over_learned(rows, -1, "once").values())),
        unit="x",
    )


def _mean(by_seed: Sequence[Sequence[float]]) -> float:
    """Of every seed's looks."""
    return fmean(x for looks in by_seed for x in looks)


# --- figure C.5, of which there is the record: random shift

_PROBLEMS = {"diabetes": "diabetes", "made": "made, 90 features"}


def _shift(problem: str, batches: bool) -> Iterator[Claim]:
    name = f"{problem}/{'batches' if batches else 'whole'}"
    row, kind = f"shift_over_qsgd/{name}", "batches of 64" if batches else "whole gradients"
    title = f"{_PROBLEMS[problem]}, {kind}"

    def gained(rows: Rows, other: str) -> list[float]:
        ends = rows[row]["ends"]
        return relative_differences(ends[other], ends["shift"])

    def kept(rows: Rows) -> Judgment:
        gains = zip(gained(rows, "grid"), gained(rows, "qsgd"), strict=True)
        return exceeds(estimate([on_the_same - on_another / 2 for on_the_same, on_another in gains]))

    def found(rows: Rows) -> str:
        same, other = (shown_difference(estimate(gained(rows, name))) for name in ("grid", "qsgd"))
        return f"{same} beside the same grid, {other} beside QSGD's"

    yield Claim(
        "figure C.5",
        f"shift_over_grid/{name}",
        f"{title}: random shift converges better than QSGD; asked here, as their grids differ: beside rounding one by "
        "one to the same grid it gains at least half as much",
        kept,
        value=lambda rows: fmean(gained(rows, "grid")),
        text=found,
    )


# --- steps over links


def _gained(rows: Rows, rate: str) -> list[float]:
    """How many times faster than the baseline W8G8 is, by round."""
    return over(rows["step_s"]["by_round"][rate], W8G8.name, FP16.name)


def _on_fast_links(rows: Rows) -> list[list[float]]:
    """Seconds of W8G8's steps over the second fastest link and over the fastest, by round."""
    return [rows["step_s"]["by_round"][rate][W8G8.name] for rate in (_FAST, _FASTEST)]


def _speeds() -> Iterator[Claim]:
    yield Claim(
        "figure 5.3",
        f"faster/{FP16.name}",
        "QSDP's steps are up to 2.25x as fast as the baseline's (GPT 1.3B at 10 Gbit/s); asked here: W8G8 at least "
        f"{_ASKED}x as fast as {FP16.title}, {where(_SLOWEST)}",
        lambda rows: (
            faster(_gained(rows, _SLOWEST), _ASKED)
            if _SLOWEST in rows["step_s"]["by_round"]
            else unsound("timed over another link")
        ),
        over_link=True,
        value=lambda rows: median(_gained(rows, next(iter(rows["step_s"]["by_round"])))),
        unit="x",
    )
    yield Claim(
        "figure 5.3",
        "constant",
        f"QSDP's step time is essentially constant: {where(_FAST)} within {_CONSTANT:.0%} of {where(_FASTEST)}",
        lambda rows: faster(
            [fast / slow for slow, fast in zip(*_on_fast_links(rows), strict=True)], 1 / (1 + _CONSTANT)
        ),
        over_link=True,
        value=lambda rows: median(_on_fast_links(rows)[0]) / median(_on_fast_links(rows)[1]) - 1,
    )
    yield Claim(
        "section 5.6.1",
        "hierarchical_over_flat",
        "between nodes, hierarchical gathers and reductions are faster than flat ones, for they send less",
        lambda rows: faster(over(rows["hierarchical_over_flat"]["by_round"], "hierarchical", "flat")),
        over_link=True,
    )
    yield Claim(
        "figure 5.2",
        "sooner",
        f"QSDP reaches the baseline's perplexity up to {_SOONER}x sooner (GPT 1.3B at 10 Gbit/s)",
        lambda rows: _in_time(rows).above(_SOONER),
        over_link=True,
    )
    weights, gradients, whole = f"step_s/{_MOST}/1", f"step_s/1/{_MOST}", "step_s/1/1"

    def gained(rows: Rows) -> list[float]:
        return [times_faster(rows, name, whole, "by_round") for name in (weights, gradients)]

    yield Claim(
        "table C.2",
        "weights_over_gradients",
        f"compressing weights gains more than compressing gradients: {_MOST} times makes steps "
        f"{THESIS_RATIOS[1, 1] / THESIS_RATIOS[_MOST, 1]:.2f}x as fast against "
        f"{THESIS_RATIOS[1, 1] / THESIS_RATIOS[1, _MOST]:.2f}x",
        lambda rows: faster(ratios(rows, weights, gradients, "by_round")),
        over_link=True,
        value=lambda rows: gained(rows)[0] / gained(rows)[1],
        unit="x",
    )
    yield Claim(
        "figure C.1",
        "near_ideal",
        f"{_MOST} times less of both almost reaches the ideal of a large model (section C.2)",
        lambda rows: faster(rows["near_ideal"]["ratios"], _NEAR),
        over_link=True,
    )


def _in_time(rows: Rows) -> Sooner:
    row = rows["sooner"]
    return sooner(Course.of(row, "qsdp"), Course.of(row, "baseline"), row["rounds"])


# --- the paper

CLAIMS = (
    *_quality(),
    *_levels(),
    *(claim for layer in _LAYERS for claim in _errors(layer)),
    *_lgreco(),
    *(claim for problem, batches in product(_PROBLEMS, (True, False)) for claim in _shift(problem, batches)),
    *_speeds(),
)

_DIFFERS = (
    "byte-level GPTs of 0.1 to 0.9 million parameters on the source of Python's standard library stand for GPTs of "
    "125M to 1.3B on C4; they train for 140 steps, on 2 ranks unless more are named, and perplexity is that of a byte",
    "ranks are processes that share this machine's cores, on emulated links, over gloo; the thesis has 4 servers of 8 "
    "GPUs with NVLink inside, over NCCL",
    "links of 0.1 to 10 Gbit/s stand for the thesis's of 10 to 100: smaller networks compute for less time; figure "
    "5.3 has the baseline's step time over each link",
    "FSDP2 prefetches the next block with all methods; on a CPU this speeds up thinwire's collectives, but not "
    "PyTorch's own",
    "perplexity is that of the quantized weights, as they are gathered; the JSON files also have that of the "
    "optimizer's weights",
    "levels are learned of all layers that are compressed, since none has 100000 parameters, at the thesis's shares of "
    "a training; values take the nearest of them, where uniform ones are rounded as thinwire does, weights of up "
    "to 6 bits to the nearest and all else stochastically, unless it is said otherwise; bits above 6 stay uniform",
    "figures C.2 and C.3 take weights and gradients along a training that is not compressed itself, with uniform "
    "levels rounded to the nearest, so that only levels differ; the LM head is tied to the embedding; the code of that "
    "is in commit 49d2f0841aff",
    "8 bits without buckets have one scale for each layer, which FSDP2 keeps apart, or for each block, of which FSDP "
    "made one flat parameter, norms and biases included",
    "figure C.4 is of a network whose layers are larger than its buckets, and 4 bits are added",
    "figure C.5 is of scikit-learn's diabetes set and of data generated with the 90 features of YearPredictionMSD; "
    "gradients have QSGD in all methods; its code is in commit 2b98f1205236",
    "L-GreCo decides every seventh of a training; bytes are those of training steps, those before its first plan "
    "included, and its policy counts the gathers of evaluations, too, as often as weights are sent",
    "figure C.1 shortens the messages of gloo's own collectives",
)
_JUDGED = (
    "At most 1 % of the baseline's perplexity may be lost. A speed-up must reach a factor only where the claim says "
    "which."
)

PAPER = Paper(
    "qsdp",
    "QSDP, chapter 5 and appendix C of the thesis, as found here",
    {
        "5.1": Part("table 5.1: baseline and W8G8", measurements.table_5_1),
        "words": Part("section 5.7.1: buckets, of words", measurements.of_words),
        "5.2": Part("table 5.2: bits", measurements.table_5_2),
        "lgreco": Part("L-GreCo over W4G4", measurements.lgreco_over_qsdp),
        "5.3": Part("table 5.3: learned levels", partial(measurements.of_levels, "table 5.3")),
        "C.3": Part("table C.3: learned levels, fewer bits", partial(measurements.of_levels, "table C.3")),
        "C.4": Part("figure C.4: buckets", measurements.figure_c_4),
        "bandwidth": Part("figure 5.3: bandwidth", measurements.figure_5_3),
        "5.2fig": Part("figure 5.2: perplexity and time", measurements.figure_5_2),
        "C.1": Part("figure C.1, table C.2: ratios", measurements.table_c_2),
    },
    CLAIMS,
    judged=_JUDGED,
    differs=_DIFFERS,
    scale=QSDPScale(),
    smoke=QSDPScale(
        sizes=SIZES_SMOKE,
        words=WORDS_SMOKE,
        timed=TIMED_SMOKE,
        num_micro=2,
        seeds=1,
        rounds=1,
        ratio_rounds=1,
        rates=(_SLOWEST, _FAST, _FASTEST),
        fast_steps=1,
    ),
    study=QSDPStudy,
    source="thesis",
)

qsdp = command(
    PAPER,
    """Repeat chapter 5 (QSDP) of Markov's thesis on this machine, claim by claim.

    Small GPTs train under FSDP2 with weights and gradients that are sent quantized, to 8 bits and fewer, also with
    levels that are learned, and their steps are timed over slow links. Figures and tables become SVGs, and each of the
    thesis's claims a row: what it says, what was found here, and whether it holds, also where it does not. Takes about
    20 minutes on two cores.""",
)
