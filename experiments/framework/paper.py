"""A paper as data, and the one command that repeats any of them: measure part by part, judge, draw, write."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro
from rich.console import Console

from experiments.framework.claims import Claim, Row, judge, recorded
from experiments.framework.findings import Finding
from experiments.framework.parts import announce, chosen_parts, finish, make_parts, write_again
from experiments.framework.progress import Screen
from experiments.framework.run_cache import RunCache
from experiments.framework.study import Scale, Study
from experiments.framework.verdicts import JUDGED
from thinwire_tools import plots
from thinwire_tools.compare.statistics import need_scipy
from thinwire_tools.exits import ends_command
from thinwire_tools.results import OutputFile

ScaleT = TypeVar("ScaleT", bound=Scale)


@dataclass(frozen=True)
class Part:
    """The measurements of one figure or table, by the paper's study and at its scale. They take ``steps`` training
    steps, of ``step_s`` seconds each on two cores of a 2020s server, after ``start_s``."""

    title: str
    measure: Callable[[Any], list[Row]]
    steps: Callable[[Any], int]
    step_s: float = 0.0
    start_s: float = 3.0

    def seconds(self, scale: Scale) -> float:
        """Return about how many seconds the part takes."""
        return self.start_s + self.steps(scale) * self.step_s


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
    study: Callable[[ScaleT, Path, Screen, bool, RunCache], Study[ScaleT]]
    source: Literal["paper", "thesis"] = "paper"

    @property
    def rules(self) -> str:
        """Rules by which claims are judged."""
        return f"{JUDGED}. {self.judged}"

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
        path = json or out / f"repro-{paper.name}.json"
        shown: dict[str, Any] = {"command": f"python -m experiments {paper.name}", "title": paper.title}
        shown |= {"out": out, "path": path}
        if record is not None:
            write_again(console, paper.judge(record), record, paper.rules, path, paper.title)
            return 0
        emulated = announce(console, sum(paper.parts[part].seconds(scale) for part in chosen))
        phases = {
            part: (paper.parts[part].title, max(1, paper.parts[part].steps(scale)), paper.parts[part].seconds(scale))
            for part in chosen
        }
        cache = RunCache(None if smoke else out / "runs")
        study = paper.study(scale, out, Screen(console, phases), emulated, cache)
        study.measured |= _by_name(recorded(timed) if timed else ())

        def measure(part: str) -> Callable[[Study[Any]], list[Finding]]:
            def made(study: Study[Any]) -> list[Finding]:
                rows = paper.parts[part].measure(study)
                study.measured |= _by_name(rows)
                return judge(paper.claims, rows, emulated=emulated)

            return made

        findings, failures = make_parts(console, study, {part: measure(part) for part in chosen})
        about |= study.about() | {
            "emulated": emulated,
            "smoke": smoke,
            "times": None if times is None else times.name,
            f"differs_from_the_{paper.source}": paper.differs,
            "judged": paper.rules,
        }
        return finish(console, findings, failures, about, **shown)

    run.__doc__ = f"""{summary}

    Examples:
      python -m experiments {paper.name}
      python -m experiments {paper.name} --parts {" ".join(list(paper.parts)[:2])} --seeds 5
      python -m experiments {paper.name} --smoke
      python -m experiments {paper.name} --from repro-{paper.name}/repro-{paper.name}.json   # judge a recorded run
      again

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
        json: write the figures to this file instead of OUT/repro-{paper.name}.json.
    """
    return run


def _by_name(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    return {(row.figure, row.name): row for row in rows}
