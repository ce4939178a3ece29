"""Table 2: throughput over links of several rates, of FP32, DirectQ and AQ-SGD; GPipe, and 1F1B beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from thinwire.lab import parse_rate
from thinwire.repro import plots
from thinwire.repro.aqsgd.study import Scale, Study, Work
from thinwire.repro.aqsgd.ways import FP32, Way, aqsgd, direct
from thinwire.repro.cgx.contest import Times, shown_rate
from thinwire.repro.cgx.judging import above
from thinwire.repro.findings import Finding

DIRECT = {bits: direct(*bits) for bits in ((3, 6), (4, 8))}
AQSGD = {bits: aqsgd(*bits) for bits in ((3, 6), (4, 8))}
DISK = {bits: aqsgd(*bits, store="disk") for bits in ((3, 6), (4, 8))}
WAYS = (FP32, *DIRECT.values(), *AQSGD.values(), *DISK.values())
KEPT = {(3, 6): 0.85, (4, 8): 0.75}
"""Of the throughput over the fastest link, over the slowest."""
FASTER = 6.0
"""Times faster than FP32 over the slowest."""
_CLOSE = 0.03
_OTHER = tuple(
    replace(way, name=f"{way.name} 1f1b", title=f"{way.title}, 1F1B", schedule="1f1b") for way in (FP32, AQSGD[3, 6])
)
PAPER = {
    "fp32": (0.5, 1.8, 2.7, 3.2, 3.8),
    DIRECT[3, 6].name: (3.5, 3.9, 3.9, 4.0, 4.0),
    DIRECT[4, 8].name: (3.0, 3.8, 3.9, 4.0, 4.1),
    AQSGD[3, 6].name: (3.4, 3.8, 3.9, 4.0, 4.0),
    AQSGD[4, 8].name: (3.0, 3.8, 3.9, 3.9, 4.0),
}
"""Table 2, sequences a second, over 100, 300 and 500 Mbit/s, 1 and 10 Gbit/s."""
_PAPER_RATES = ("100mbit", "300mbit", "500mbit", "1gbit", "10gbit")

AllTimes = Mapping[str, Times]


def throughput_work(scale: Scale) -> Work:
    """Steps of all turns."""
    turns = len(WAYS) * len(scale.rates) + len(_OTHER) * 2
    return Work(steps=turns * (1 + scale.rounds))


def table_2(study: Study) -> list[Finding]:
    """All ways in turns over links of each rate; then 1F1B over the slowest and the fastest."""
    scale = study.scale
    found = _measure(study, WAYS, scale.rates)
    ends = (scale.rates[0], scale.rates[-1])
    other = _measure(study, _OTHER, ends)
    _draw(study, found)
    rows = [_table(study, found, other)]
    rows += [_kept(study, found, bits) for bits in KEPT]
    rows.append(_faster(study, found))
    rows += [_as_direct(study, found, bits, way) for bits in KEPT for way in (AQSGD[bits], DISK[bits])]
    rows.append(_one_f_one_b(study, found, other))
    return rows


def _measure(study: Study, ways: Sequence[Way], rates: Sequence[str]) -> AllTimes:
    links = [study.scaled(rate) for rate in rates]
    times = study.contest().times_by_rate(
        study.model, ways, rounds=study.scale.rounds, steps=1, rates=links, on_turn=study.advance
    )
    return dict(zip(rates, times, strict=True))


def kept(found: AllTimes, slow: str, fast: str, name: str) -> list[float]:
    """What is left of the throughput over the fast link, by round."""
    both = zip(found[fast].rounds[name], found[slow].rounds[name], strict=True)
    return [least / most for least, most in both]


def _kept(study: Study, found: AllTimes, bits: tuple[int, int]) -> Finding:
    slow, fast, way = study.scale.rates[0], study.scale.rates[-1], AQSGD[bits]
    rounds = kept(found, slow, fast, way.name)
    left, paper = median(rounds), PAPER[way.name]
    return Finding(
        "table 2",
        f"kept/{way.name}",
        left,
        "",
        f"{way.title} over 100 Mbit/s keeps {paper[0] / paper[-1]:.0%} of its throughput over 10 Gbit/s; asked here: "
        f"at least {KEPT[bits]:.0%}",
        f"{left:.1%}, over {study.where(slow)} against {study.where(fast)}",
        study.verdict(above(rounds, KEPT[bits])),
        {"rounds": rounds},
    )


def _faster(study: Study, found: AllTimes) -> Finding:
    slow, way = study.scale.rates[0], AQSGD[3, 6]
    gained = {rate: times.times_faster(way.name, FP32.name) for rate, times in found.items()}
    paper, most = PAPER[way.name][0] / PAPER["fp32"][0], study.wire_s(slow) / study.computed().seconds
    return Finding(
        "table 2",
        f"faster/{way.name}",
        gained[slow],
        "x",
        f"over 100 Mbit/s {way.title} has {paper:.1f}x FP32's throughput; asked here: at least {FASTER:g}x",
        f"{', '.join(f'{value:.2f}x over {study.where(rate)}' for rate, value in gained.items())}; where FP32's values "
        f"travel for {most:.1f} times as long as they compute, no compression has more than {most:.1f}x",
        study.verdict(above(found[slow].over(way.name, FP32.name), FASTER)),
        {"gained": gained},
    )


def _as_direct(study: Study, found: AllTimes, bits: tuple[int, int], way: Way) -> Finding:
    """Over the slowest and the fastest link: loads and saves of messages are hidden or they are not."""
    ends = (study.scale.rates[0], study.scale.rates[-1])
    relative = {rate: found[rate].times_faster(way.name, DIRECT[bits].name) for rate in ends}
    rounds = [value for rate in ends for value in found[rate].over(way.name, DIRECT[bits].name)]
    return Finding(
        "table 2",
        f"as_direct/{way.name}",
        min(relative.values()),
        "x",
        f"AQ-SGD is as fast as DirectQ: {way.title}, within {_CLOSE:.0%}",
        ", ".join(f"{value:.3f}x over {study.where(rate)}" for rate, value in relative.items()),
        study.verdict(above(rounds, 1 - _CLOSE)),
        {"rounds": rounds, "stages_s": {rate: found[rate].stages[way.name] for rate in ends}},
    )


def _one_f_one_b(study: Study, found: AllTimes, other: AllTimes) -> Finding:
    slow, fast = study.scale.rates[0], study.scale.rates[-1]
    way, base = _OTHER[1], _OTHER[0]
    left = median(kept(other, slow, fast, way.name))
    against = found[slow].step_s(AQSGD[3, 6].name) / other[slow].step_s(way.name)
    return Finding(
        "table 2",
        "1f1b",
        left,
        "",
        "",
        f"{AQSGD[3, 6].title} keeps {left:.1%} over {study.where(slow)}, {against:.2f}x GPipe's throughput there and "
        f"{other[slow].times_faster(way.name, base.name):.2f}x FP32's in 1F1B",
        None,
        aside="PyTorch's 1F1B, which waits for each send with its receive",
    )


def _table(study: Study, found: AllTimes, other: AllTimes) -> Finding:
    """Every throughput, and both proportions."""
    task, computed = study.scale.timed, study.computed()
    rates = study.scale.rates
    per_s = {way.name: {rate: task.batch / found[rate].step_s(way.name) for rate in rates} for way in WAYS}
    per_s |= {way.name: {rate: task.batch / times.step_s(way.name) for rate, times in other.items()} for way in _OTHER}
    return Finding(
        "table 2",
        "throughput",
        per_s[AQSGD[3, 6].name][rates[0]],
        "sequences/s",
        "",
        f"a micro-batch computes for {1e3 * computed.seconds:.0f} ms and its activation has {task.message_values} "
        f"values: rates are the paper's divided by {study.slowdown:.1f}, so that values travel as many times "
        f"longer than they compute ({', '.join(study.where(rate) for rate in rates)})",
        None,
        {
            "per_s": per_s,
            "titles": {way.name: way.title for way in (*WAYS, *_OTHER)},
            "paper": {name: dict(zip(_PAPER_RATES, values, strict=True)) for name, values in PAPER.items()},
            "links": {rate: study.scaled(rate) for rate in rates},
            "by_round": {rate: times.rounds for rate, times in found.items()},
            "stages_s": {rate: times.stages for rate, times in found.items()},
            "step_bytes": found[rates[0]].payload_bytes,
            "slowdown": study.slowdown,
            "num_micro": task.num_micro,
        },
        aside="compute to wire as in the paper",
    )


def _draw(study: Study, found: AllTimes) -> None:
    task = study.scale.timed
    title = f"2 stages, {task.num_micro} micro-batches, GPipe"
    figure, (axes,) = plots.canvas(1, titles=[title], x="the paper's rate", y="sequences/s")
    rates = [parse_rate(rate) / 1e9 for rate in found]
    for way in WAYS:
        per_s = [task.batch / times.step_s(way.name) for times in found.values()]
        style = "--" if way.store == "disk" else "-"
        axes.plot(rates, per_s, style, color=way.colour, marker="o", label=way.title)
    axes.set(xscale="log")
    axes.set_xticks(rates, [shown_rate(rate) for rate in found], rotation=30)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    plots.save(figure, study.picture("2-throughput"))
