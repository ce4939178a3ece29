"""Break the source in known ways, one at a time, and see that the test named for each notices.

    python tools/mutants.py --json benchmarks/validation/mutants.json

An entry of tests/mutants.json says what is wrong, where, and which test must find it. Files are changed in place and
put back: the working tree must be clean. A test that fails without the fault, or passes with it, is an error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

from rich.console import Console

from thinwire_tools.results import Results

ROOT = Path(__file__).resolve().parents[1]


@cache
def passes(test: str) -> bool:
    return outcome(test) == 0


def outcome(test: str) -> int:
    """Pytest's exit code: 0 if the test passes, 1 if it fails, others where it could not run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=600).returncode


def is_found(mutant: dict[str, str]) -> bool:
    """Whether the mutant's test passes without the fault and fails with it."""
    path = ROOT / mutant["file"]
    source = path.read_text()
    if source.count(mutant["old"]) != 1:
        sys.exit(f"{mutant['file']} has {mutant['old']!r} {source.count(mutant['old'])} times, not once")
    if not passes(mutant["test"]):
        return False
    try:
        path.write_text(source.replace(mutant["old"], mutant["new"]))
        return outcome(mutant["test"]) == 1
    finally:
        path.write_text(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what was found")
    options = parser.parse_args()
    console = Console(highlight=False)
    if subprocess.run(["git", "diff", "--quiet"], cwd=ROOT, check=False).returncode:
        sys.exit("the working tree is not clean: commit or stash first")
    mutants = json.loads((ROOT / "tests/mutants.json").read_text())
    results = Results("tools/mutants.py")
    for mutant in mutants:
        found = is_found(mutant)
        results.add(mutant["fault"], int(found), "found", **{key: mutant[key] for key in ("room", "file", "test")})
        console.print(f"{'found' if found else 'NOT FOUND':10} {mutant['room']:12} {mutant['fault']}")
    if options.json:
        results.write(options.json)
    missed = sum(1 - row["value"] for row in results.results)
    console.print(f"{len(mutants) - missed} of {len(mutants)} faults are found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
