"""Sections 4.4 and 4.5: the dynamic programme against the exact solver, the bound, and families mixed in one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from thinwire.plan import LGreco
from thinwire.repro import plots
from thinwire.repro.findings import Finding
from thinwire.repro.lgreco.gradients import Chosen, Snapshot, choose
from thinwire.repro.lgreco.methods import FAMILIES, Family
from thinwire.repro.lgreco.study import NAMES, TITLES, Scale, Study, Work
from thinwire.repro.lgreco.tasks import Name

_WITHIN = 0.01
_ROUNDING = 1e-9


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


def work(scale: Scale) -> Work:
    """Snapshots, and a step for each case."""
    return Work(snapshots=frozenset(NAMES), steps=len(NAMES) * len(FAMILIES))


def solver(study: Study) -> list[Finding]:
    """Every network and every reference."""
    cases = [_case(study, name, family, study.snapshots(name)) for name in NAMES for family in FAMILIES]
    _draw(study, cases)
    return rows(cases)


def _case(study: Study, name: Name, family: Family, snapshots: Sequence[Snapshot]) -> Case:
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


def rows(cases: Sequence[Case]) -> list[Finding]:
    """The claims over all cases."""
    excess = [value for case in cases for value in case.dp_excess]
    plans = [one for case in cases for one in (*case.dp, *case.exact, *case.hybrid, *case.hybrid_exact)]
    kept = sum(_kept(one) for one in plans)
    gains = {f"{case.name}/{case.family.name}": _gains(case) for case in cases}
    every = [gain for values in gains.values() for gain in values]
    seconds = {
        kind: fmean(one.proposal.solve_s for case in cases for one in of(case))
        for kind, of in (("dp", lambda case: case.dp), ("exact", lambda case: case.exact))
    }
    errors_s = fmean(one.proposal.errors_s for case in cases for one in case.dp)
    shown = ", ".join(f"{key} {fmean(values):.2f}x" for key, values in gains.items())
    return [
        Finding(
            "section 4.5",
            "dp_within_optimum",
            max(excess),
            "",
            "the dynamic programme's plans are within 1 % of the optimum (D = 10000)",
            f"over {len(excess)} problems at most {max(excess):.3%} more bytes than the exact solver's",
            max(excess) <= _WITHIN,
            {"excess": excess},
        ),
        Finding(
            "section 4.4",
            "error_within_reference/solver",
            max(one.relative_error for one in plans),
            "",
            "a plan errs no more than its reference, whoever solves it",
            f"in {kept} of {len(plans)} plans",
            kept == len(plans),
        ),
        Finding(
            "future work",
            "hybrid_over_single",
            min(every),
            "x",
            "plans of any family are never worse than the best of a single one within the same error",
            f"they send {shown} less, by reference; the least gain is {min(every):.4f}x",
            min(every) >= 1 - _ROUNDING,
            {"gain_by_reference": gains, "mean_gain": fmean(every)},
        ),
        Finding(
            "section 4.5",
            "seconds",
            seconds["dp"],
            "s",
            "",
            f"a plan takes {1e3 * seconds['dp']:.0f} ms to solve (exactly {1e3 * seconds['exact']:.0f} ms), its "
            f"errors {1e3 * errors_s:.0f} ms",
            None,
            {"solve_s": seconds, "errors_s": errors_s},
            aside="time to find a plan, on this machine",
        ),
    ]


def _gains(case: Case) -> list[float]:
    return [case.hybrid_gain(at) for at in range(len(case.dp))]


def _kept(one: Chosen) -> bool:
    return one.error <= one.reference_error * (1 + _ROUNDING)


def _draw(study: Study, cases: Sequence[Case]) -> None:
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
