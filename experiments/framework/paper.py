"""A paper as data, and the one command that repeats any of them: measure part by part, judge, draw, write."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro
from rich.console import Console

from experiments.framework.claims import Claim, Finding, Row, judge, recorded, results_of, table_of_claims
from experiments.framework.ranks import RunCache
from experiments.framework.study import Scale, Study
from thinwire.runtime import ParityError
from thinwire_tools import lab, plots
from thinwire_tools.compare.statistics import need_scipy
from thinwire_tools.exits import ends_command
from thinwire_tools.ranks import RankFailedError
from thinwire_tools.results import OutputFile


def chosen_parts(asked: Sequence[str], known: Mapping[str, object]) -> list[str]:
    """Return the names in ``--parts``, which may have several each, with commas or spaces.

    Raises:
        ValueError: one of them is not ``known``, or there is none.
    """
    chosen = list(dict.fromkeys(name for part in asked for name in part.replace(",", " ").split()))
    if not chosen or set(chosen) - set(known):
        raise ValueError(f"--parts {' '.join(asked)!r}: choose among {' '.join(known)}")
    return chosen


def write_again(
    console: Console, findings: Sequence[Finding], before: Mapping[str, Any], judged: str, path: Path, title: str
) -> None:
    """Write the present judgment of a recorded run; its machine, versions and measured rows stay.

    A row whose verdict is another one than when it was measured keeps the first one under ``judged_before``.
    """
    console.print(table_of_claims(findings, title))
    rows = results_of(findings, "", {}).results
    old = {row["name"]: row for row in before["results"]}
    for row in rows:
        # A new claim makes its value of rows that were measured.
        then = old.get(row["name"], {})
        first = then.get("judged_before") or {key: then.get(key) for key in ("claim", "holds")}
        if first["claim"] and (not row["claim"] or row["holds"] is not first["holds"]):
            row["judged_before"] = first
    again = {**before, "about": {**before["about"], "judged": judged}, "results": rows}
    path.write_text(json_module.dumps(again, indent=1) + "\n")
    console.print(f"Figures: {path}", soft_wrap=True, markup=False)


ScaleT = TypeVar("ScaleT", bound=Scale)


@dataclass(frozen=True)
class Part:
    """The measurements of one figure or table, by the paper's study and at its scale."""

    title: str
    measure: Callable[[Any], list[Row]]


@dataclass(frozen=True)
class Paper(Generic[ScaleT]):
    """A paper. ``judged``: its rules for claims, in addition to those of all papers; ``differs``: differences from the
    experiment of the ``source``; both are for the paper's page. ``study``: measures its parts."""

    name: str
    title: str
    parts: Mapping[str, Part]
    claims: tuple[Claim, ...]
    judged: str
    differs: tuple[str, ...]
    scale: ScaleT
    smoke: ScaleT
    study: Callable[[ScaleT, Path, Console, bool, RunCache], Study[ScaleT]]
    source: Literal["paper", "thesis"] = "paper"

    def make(self, study: Study[ScaleT], chosen: Sequence[str]) -> tuple[list[Finding], dict[str, str]]:
        """Return the findings of the ``chosen`` parts, and reasons of failed ones. A failure costs its part, not the
        others."""
        console, findings, failures = study.console, [], {}
        with study:
            for name in chosen:
                title, measure = self.parts[name].title, self.parts[name].measure
                try:
                    with study.part(title):
                        rows = measure(study)
                except (RankFailedError, ParityError) as failure:
                    # After a rank's failure the others are useless: later parts start new ones.
                    study.close()
                    failures[name] = str(failure)
                    console.print(f"{title}: failed: {failure}", style="bold red", markup=False)
                    if isinstance(failure, RankFailedError):
                        console.print(failure.log, style="dim", markup=False)
                    continue
                study.measured |= _by_name(rows)
                findings += (found := judge(self.claims, rows, emulated=study.emulated))
                judged = [row.holds for row in found if row.claim and row.holds is not None]
                console.print(f"{title}: {f'{sum(judged)} of {len(judged)} claims hold' if judged else 'none judged'}")
        return findings, failures

    def judge(self, record: Mapping[str, Any]) -> list[Finding]:
        """Return the claims, judged again by the rows of a JSON file that this paper's command wrote."""
        return judge(self.claims, recorded(record), emulated=record["about"]["emulated"])


def command(paper: Paper[Any], summary: str) -> Callable[..., int]:
    """Return the command ``python -m experiments <paper>``; ``summary`` is the first part of its help."""

    def run(
        *,
        parts: tuple[str, ...] = tuple(paper.parts),
        seeds: int | None = None,
        rounds: int | None = None,
        rate: str | None = None,
        data: Path | None = None,
        steps: int | None = None,
        smoke: bool = False,
        times: Path | None = None,
        from_: Annotated[Path | None, tyro.conf.arg(name="from", metavar="PATH")] = None,
        out: Path = Path(f"repro-{paper.name}"),
        json: OutputFile = None,
    ) -> int:
        console = Console(highlight=False)
        with ends_command(ValueError, ImportError, OSError, RuntimeError):
            chosen = chosen_parts(parts, paper.parts)
            need_scipy()
            plots.need_matplotlib()
            base = paper.smoke if smoke else paper.scale
            folder = None if data is None else str(data.resolve())
            scale = base.adapted(seeds=seeds, rounds=rounds, rate=rate, data=folder, steps=steps)
            about = dataclasses.asdict(scale) | scale.about()
            record, timed = (None if file is None else json_module.loads(file.read_text()) for file in (from_, times))
        out.mkdir(parents=True, exist_ok=True)
        path = json or out / "all.json"
        if record is not None:
            write_again(console, paper.judge(record), record, paper.judged, path, paper.title)
            return 0
        missing = lab.unavailable()
        if missing:
            console.print(
                f"No slow network can be made here, so times over links are not judged: {missing}", markup=False
            )
        emulated = missing is None
        cache = RunCache(None if smoke else out / "runs")
        study = paper.study(scale, out, console, emulated, cache)
        study.measured |= _by_name(recorded(timed) if timed else ())
        findings, failures = paper.make(study, chosen)
        about |= study.about() | {
            "emulated": emulated,
            "smoke": smoke,
            "times": None if times is None else times.name,
            f"differs_from_the_{paper.source}": paper.differs,
            "judged": paper.judged,
        }
        if failures:
            about["failures"] = failures
        console.print(table_of_claims(findings, paper.title))
        results_of(findings, f"python -m experiments {paper.name}", about).write(path)
        console.print(f"Pictures: {out}  Figures: {path}", soft_wrap=True, markup=False)
        return 1 if failures else 0

    run.__doc__ = f"""{summary}

    Examples:
      python -m experiments {paper.name}
      python -m experiments {paper.name} --parts {" ".join(list(paper.parts)[:2])} --seeds 5
      python -m experiments {paper.name} --smoke
      python -m experiments {paper.name} --from repro-{paper.name}/all.json   # judge a recorded run again

    Args:
        parts: which of {", ".join(paper.parts)}.
        seeds: paired runs of every method whose quality is compared; a verdict takes at least 2.
        rounds: turns of every method that is timed in turns; a verdict takes at least 5.
        rate: of each rank's link (100mbit, 1gbit ...), emulated, instead of the paper's own choice.
        data: folder of CIFAR-10's binary version, for papers that train on images; without it scikit-learn's digits.
        steps: training steps of each run, for papers that train one network.
        smoke: a tiny network and few steps, about a minute: the same path, no figures worth keeping.
        times: JSON file of an earlier run, whose step times are taken where times to a loss need some.
        from_: measure nothing: judge the claims by the rows of this JSON file.
        out: folder for the pictures, the figures, and finished runs, which are not made again.
        json: write the figures to this file instead of OUT/all.json.
    """
    return run


def _by_name(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    return {(row.figure, row.name): row for row in rows}
