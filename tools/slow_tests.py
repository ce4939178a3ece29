"""Choose which tests `make test` leaves to `make test-all`, by the durations of a full run.

    PYTEST_ADDOPTS="--durations=0 --durations-min=0.2" make test-all | tee build/tests.log
    python tools/slow_tests.py build/tests.log

The slowest tests go to tests/slow.txt until the rest fits the budget. A file whose tests share a slow fixture is one
unit: without its first test, the next would pay for the fixture.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

SLOW = Path(__file__).resolve().parent.parent / "tests" / "slow.txt"
_LINE = re.compile(r"(\d+\.\d+)s (setup|call|teardown)\s+(tests/[\w/]+\.py)::([\w:]+)")
_SLOW_FIXTURE_S = 3.0
_ALWAYS_RUN = ("tests/compressors/test_laws.py", "tests/golden/", "tests/test_attachments.py::test_laws")
"""What every change must pass, however long it takes."""
_HEADER = """\
# What `make test` leaves to `make test-all`: a file or a test function a line, without parameters.
# tools/slow_tests.py writes this list anew from the durations that a full run prints.
"""


def durations(lines: Iterable[str]) -> dict[str, float]:
    """Seconds of each unit: a test function with all its parameters, or a file with a slow fixture."""
    functions: dict[str, float] = defaultdict(float)
    with_fixture = set()
    for line in lines:
        if match := _LINE.search(line):
            seconds, phase, path, name = float(match[1]), match[2], match[3], match[4]
            functions[f"{path}::{name}"] += seconds
            if phase == "setup" and seconds >= _SLOW_FIXTURE_S:
                with_fixture.add(path)
    units: dict[str, float] = defaultdict(float)
    for function, seconds in functions.items():
        path = function.partition("::")[0]
        units[path if path in with_fixture else function] += seconds
    return dict(units)


def choose(units: dict[str, float], budget_s: float) -> list[str]:
    """The slowest units, until the others take ``budget_s`` together."""
    rest, slow = sum(units.values()), []
    for unit, seconds in sorted(units.items(), key=lambda item: -item[1]):
        if rest <= budget_s:
            break
        if unit.startswith(_ALWAYS_RUN):
            continue
        slow.append(unit)
        rest -= seconds
    return sorted(slow)


def _is_listable(unit: str) -> bool:
    """Whether it is a file, or a function of its own file: not a class, nor a test that another file defines."""
    path, _, function = unit.partition("::")
    return not function or f"def {function}(" in (SLOW.parents[1] / path).read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", nargs="+", type=Path, help="what pytest printed with --durations=0")
    parser.add_argument("--budget", type=float, default=260.0, help="seconds of the other tests, of all workers")
    options = parser.parse_args()
    units = durations(line for log in options.logs for line in log.read_text().splitlines())
    units = {unit: seconds for unit, seconds in units.items() if _is_listable(unit)}
    if not units:
        sys.exit("no durations in these logs: run pytest with --durations=0")
    # Small versions of experiments are on the list, and not in these logs: they run when asked for.
    before = {line for line in SLOW.read_text().splitlines() if not line.startswith("#")}
    slow = {*choose(units, options.budget), *(before - units.keys())}
    SLOW.write_text(_HEADER + "".join(f"{unit}\n" for unit in sorted(slow)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
