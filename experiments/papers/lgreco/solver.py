"""Sections 4.4 and 4.5: the dynamic programme against the exact solver, the bound, and families mixed in one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.framework.claims import Row
from experiments.papers.lgreco.gradients import Chosen, Snapshot, choose
from experiments.papers.lgreco.methods import FAMILIES, Family
from experiments.papers.lgreco.study import NAMES, TITLES, LGrecoScale, LGrecoStudy
from experiments.papers.lgreco.tasks import Name
from thinwire.compare import plots
from thinwire.plan.policies import LGreco

ROUNDING = 1e-9


@dataclass(frozen=True)
class Case:
    """One reference on the snapshots of one network: plans by the dynamic programme, by the exact solver, of any family
    (by both), and of the other families alone within the same error."""

    name: Name
    family: Family
    dp: Sequence[Chosen]
    exact: Sequence[Chosen]
    hybrid: Sequence[Chosen]
    hybrid_exact: Sequence[Chosen]
    others: dict[str, Sequence[Chosen]]

    @property
    def dp_excess(self) -> list[float]:
        """How many more bytes than the optimum's, as a share."""
        return [a.sent_bytes / b.sent_bytes - 1 for a, b in zip(self.dp, self.exact, strict=True)]

    def best_single(self, at: int) -> float:
        """Bytes of the best plan of one family that keeps the budget."""
        singles = [self.dp[at], self.exact[at], *(rows[at] for rows in self.others.values())]
        return min(one.sent_bytes for one in singles if _kept(one))

    def hybrid_gain(self, at: int) -> float:
        """How many times fewer bytes than the best single family's."""
        return self.best_single(at) / min(self.hybrid[at].sent_bytes, self.hybrid_exact[at].sent_bytes)


def steps(scale: LGrecoScale) -> int:
    """Of the snapshots' trainings, and one for each case."""
    return sum(scale.task(name).steps for name in NAMES) + len(NAMES) * len(FAMILIES)


def solver(study: LGrecoStudy) -> list[Row]:
    """Every network and every reference."""
    cases = [_case(study, name, family, study.snapshots(name)) for name in NAMES for family in FAMILIES]
    _draw(study, cases)
    return rows(cases)


def _case(study: LGrecoStudy, name: Name, family: Family, snapshots: Sequence[Snapshot]) -> Case:
    spec = family.spec(name)
    every = tuple(f.spec(name) for f in FAMILIES)
    study.advance(1, f"{TITLES[name]}, {family.title}: solving")
    return Case(
        name,
        family,
        choose(LGreco(), spec, snapshots),
        choose(LGreco(solver="exact"), spec, snapshots),
        choose(LGreco(families=every), spec, snapshots),
        choose(LGreco(families=every, solver="exact"), spec, snapshots),
        {
            other.name: choose(LGreco(families=(other.spec(name),)), spec, snapshots)
            for other in FAMILIES
            if other is not family
        },
    )


def rows(cases: Sequence[Case]) -> list[Row]:
    """Over all cases: distance from the optimum, errors, gains of mixed plans, seconds."""
    excess = [value for case in cases for value in case.dp_excess]
    plans = [one for case in cases for one in (*case.dp, *case.exact, *case.hybrid, *case.hybrid_exact)]
    counts = {"decisions": len(plans), "within": sum(_kept(one) for one in plans)}
    gains = {f"{case.name}/{case.family.name}": _gains(case) for case in cases}
    every = [gain for values in gains.values() for gain in values]
    seconds = {
        "dp": fmean(one.proposal.solve_s for case in cases for one in case.dp),
        "exact": fmean(one.proposal.solve_s for case in cases for one in case.exact),
    }
    errors_s = fmean(one.proposal.errors_s for case in cases for one in case.dp)
    worst = max(one.relative_error for one in plans)
    return [
        Row("section 4.5", "dp_within_optimum", max(excess), "", {"excess": excess}),
        Row("section 4.4", "error_within_reference/solver", worst, "", counts),
        Row("future work", "hybrid_over_single", min(every), "x", {"gain_by_reference": gains}),
        Row("section 4.5", "seconds", seconds["dp"], "s", {"solve_s": seconds, "errors_s": errors_s}),
    ]


def _gains(case: Case) -> list[float]:
    return [case.hybrid_gain(at) for at in range(len(case.dp))]


def _kept(one: Chosen) -> bool:
    return one.error <= one.reference_error * (1 + ROUNDING)


def _draw(study: LGrecoStudy, cases: Sequence[Case]) -> None:
    titles = [f"{TITLES[name]}: bytes for uniform's, within its error" for name in NAMES]
    figure, panels = plots.canvas(len(NAMES), titles=titles, x="", y="share of uniform's bytes")
    for axes, name in zip(panels, NAMES, strict=True):
        bars = []
        for case in (c for c in cases if c.name == name):
            title, colour = case.family.title, case.family.colour
            bars.append((f"{title}: L-GreCo", colour, fmean(1 / one.gain for one in case.dp)))
            bars.append((f"{title}: any family", "#222222", fmean(1 / one.gain for one in case.hybrid)))
        plots.bars(axes, bars)
    plots.save(figure, study.picture("solver"))
