"""Figure 4.2: quality against step time over ranks of PowerSGD, uniform and by L-GreCo."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from thinwire.repro import plots
from thinwire.repro.cgx.contest import Times
from thinwire.repro.cgx.judging import above, all_hold
from thinwire.repro.cgx.ways import Way
from thinwire.repro.findings import Finding
from thinwire.repro.lgreco.methods import POWERSGD, lgreco, settled, with_policy
from thinwire.repro.lgreco.study import NUM_RANKS, Scale, Study, Training, Work, where
from thinwire.repro.report import Run


@dataclass(frozen=True)
class Point:
    """One rank: its trainings' losses and its step's time, uniform and by L-GreCo."""

    rank: int
    uniform_loss: float
    lgreco_loss: float
    uniform_s: float
    lgreco_s: float


def _spec(rank: int) -> str:
    return f"powersgd(rank={rank})"


def _ways(scale: Scale) -> list[Way]:
    found = []
    for rank in scale.ranks:
        found.append(Way(f"rank {rank}", f"rank {rank}", f"{POWERSGD.colour}80", spec=_spec(rank)))
        adapt = settled("lgreco", scale.warm_up)
        found.append(Way(f"rank {rank} lgreco", f"L-GreCo from {rank}", POWERSGD.colour, spec=_spec(rank), adapt=adapt))
    return found


def work(scale: Scale) -> Work:
    """Trainings from one seed, and all turns."""
    trained: set[Training] = {("gpt", variant, 0) for rank in scale.ranks for variant in _variants(scale, rank)}
    return Work(frozenset(trained), steps=2 * len(scale.ranks) * (1 + scale.rounds) * scale.steps)


def _variants(scale: Scale, rank: int) -> tuple[str, str]:
    return _spec(rank), with_policy(_spec(rank), lgreco(scale.every("gpt")))


def figure_4_2(study: Study) -> list[Finding]:
    """Train with every rank, and time every rank over the slower link."""
    scale, rate = study.scale, study.rates[0]
    runs = {rank: [study.train("gpt", variant, 0) for variant in _variants(scale, rank)] for rank in scale.ranks}
    times = study.contest(NUM_RANKS).times(
        study.model, _ways(scale), rounds=scale.rounds, steps=scale.steps, rate=rate, on_turn=study.advance
    )
    points = [point(rank, runs[rank][0], runs[rank][1], times) for rank in scale.ranks]
    _draw(study, points, rate)
    return rows(points, times, where(rate), timed=study.emulated)


def point(rank: int, uniform: Run, adapted: Run, times: Times) -> Point:
    name = f"rank {rank}"
    seconds = times.step_s(name), times.step_s(f"{name} lgreco")
    return Point(rank, uniform.val_loss, adapted.val_loss, *seconds)


def rows(points: list[Point], times: Times, place: str, *, timed: bool) -> list[Finding]:
    """The frontier: at each rank L-GreCo sends less and takes less time, at a loss as low."""
    shown = "; ".join(
        f"rank {p.rank}: {p.uniform_loss:.4f} at {1e3 * p.uniform_s:.1f} ms, L-GreCo {p.lgreco_loss:.4f} at "
        f"{1e3 * p.lgreco_s:.1f} ms"
        for p in points
    )
    faster = all_hold(above(times.over(f"rank {p.rank} lgreco", f"rank {p.rank}")) for p in points)
    excess = [p.lgreco_loss / p.uniform_loss - 1 for p in points]
    sent = [times.payload_bytes[f"rank {p.rank}"] / times.payload_bytes[f"rank {p.rank} lgreco"] for p in points]
    more = {"points": [vars(p) for p in points], "payload_bytes": times.payload_bytes, "step_s": times.rounds}
    return [
        Finding(
            "figure 4.2",
            "frontier",
            fmean(p.uniform_s / p.lgreco_s for p in points),
            "x",
            "at every rank L-GreCo takes less time a step than uniform PowerSGD",
            f"{shown}, {place}",
            faster if timed else None,
            more,
        ),
        Finding(
            "figure 4.2",
            "loss_over_ranks",
            fmean(excess),
            "",
            "",
            f"loss of one seed beyond uniform's, by rank: {', '.join(f'{value:+.2%}' for value in excess)}; bytes "
            f"{', '.join(f'{value:.2f}x' for value in sent)} less",
            None,
            aside="L-GreCo's loss against that of uniform compression",
        ),
    ]


def _draw(study: Study, points: list[Point], rate: str | None) -> None:
    figure, (axes,) = plots.canvas(1, titles=[f"PowerSGD, GPT {where(rate)}"], x="ms a step", y="held-out loss")
    for title, colour, xs, ys in (
        ("uniform", "#555555", [p.uniform_s for p in points], [p.uniform_loss for p in points]),
        ("L-GreCo", POWERSGD.colour, [p.lgreco_s for p in points], [p.lgreco_loss for p in points]),
    ):
        axes.plot([1e3 * x for x in xs], ys, color=colour, marker="o", label=title)
        for p, x, y in zip(points, xs, ys, strict=True):
            axes.annotate(f"{p.rank}", (1e3 * x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
    plots.save(figure, study.picture("4.2"))
