"""Golden files: digests of what the library produced when they were written. ``--regenerate`` rewrites them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
_MOST_SHOWN = 20

Check = Callable[[str, Mapping[str, Any]], None]


@pytest.fixture
def golden(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Check:
    """``golden(name, found)`` compares ``found``, a tree of dictionaries, with ``<name>.json`` beside this file."""
    regenerate = request.config.getoption("--regenerate")

    def check(name: str, found: Mapping[str, Any]) -> None:
        path = FOLDER / f"{name}.json"
        expected = _leaves(json.loads(path.read_text())) if path.exists() else {}
        actual = _leaves(json.loads(json.dumps(found)))
        changes = [_change(key, expected, actual) for key in sorted(expected.keys() | actual.keys())]
        changes = [change for change in changes if change]
        if regenerate:
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
            with capsys.disabled():
                summary = f"{path.name}: {len(changes)} of {len(actual)} values changed"
                sys.stdout.write("\n" + "\n  ".join([summary, *changes]) + "\n")
            return
        more = f"\n  and {len(changes) - _MOST_SHOWN} more" if len(changes) > _MOST_SHOWN else ""
        assert not changes, (
            f"{len(changes)} of {len(actual)} values differ from {path.name}:\n  "
            + "\n  ".join(changes[:_MOST_SHOWN])
            + f"{more}\nIf that is intended, say so in the commit and run: python -m pytest tests/golden --regenerate"
        )

    return check


def _leaves(tree: Any, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(tree, dict):
        return {at: tree}
    return {key: leaf for name, part in tree.items() for key, leaf in _leaves(part, (*at, name)).items()}


def _change(key: tuple[str, ...], expected: dict[tuple[str, ...], Any], actual: dict[tuple[str, ...], Any]) -> str:
    where = " / ".join(key)
    if key not in expected:
        return f"{where}: not in the file"
    if key not in actual:
        return f"{where}: only in the file"
    was, now = expected[key], actual[key]
    return "" if now == was or _close(was, now) else f"{where}: {was} became {now}"


def _close(was: Any, now: Any) -> bool:
    """Whether two lists of statistics are close: of what no two machines compute alike to the bit."""
    lists = isinstance(was, list) and isinstance(now, list) and len(was) == len(now)
    return lists and all(isinstance(x, float) for x in (*was, *now)) and now == pytest.approx(was, rel=1e-3)
