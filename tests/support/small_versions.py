"""The small version of a repetition, run from end to end, and what it leaves behind."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from experiments.__main__ import main as experiments_main


@dataclass
class Small:
    """What the small version left behind."""

    code: int
    seconds: float
    out: Path
    record: dict[str, Any]
    shown: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = {row["name"]: row for row in self.record["results"]}


def small_version(name: str, out: Path) -> Small:
    """Run ``python -m experiments name --smoke``."""
    path = out / f"{name}.json"
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rich.console.Console.print", lambda self, *what, **_: lines.extend(str(part) for part in what))
        started = time.monotonic()
        code = experiments_main([name, "--smoke", "--out", str(out), "--json", str(path)])
        seconds = time.monotonic() - started
    record = json.loads(path.read_text(), parse_constant=_no_constant)
    return Small(code, seconds, out, record, "\n".join(lines))


def _no_constant(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")
