"""Try thinwire with other versions of PyTorch and Python: an environment of each, with the fast tests of what attaches.

    python tools/versions.py                   # those of `make versions`; a Python that is not found is left out
    python tools/versions.py 2.11.0 2.13.0/3.12

Writes benchmarks/validation/versions.json, from which `make readme` makes the table of docs/trainers.md. PyTorch is the
build that pip takes: on Linux one for CUDA, of several GB, unless PIP_EXTRA_INDEX_URL names PyTorch's index of builds
for CPUs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from thinwire_tools.results import Results

ROOT = Path(__file__).resolve().parents[1]

TORCH = ("2.9.1", "2.11.0", "2.13.0")
PYTHON = ("3.12", "3.13", "3.14")
TESTS = [f"tests/{name}" for name in ("integrations", "runtime", "pipeline", "local", "optim", "test_attachments.py")]
NEEDED = ["numpy", "rich", "tyro", "scipy", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis"]
BUILD, RECORD = ROOT / "build/versions", ROOT / "benchmarks/validation/versions.json"


def run(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def starts(python: str) -> bool:
    return subprocess.run(f"python{python} --version", shell=True, capture_output=True).returncode == 0


def environment(torch: str, python: str) -> Path:
    """The interpreter of an environment with these versions, which is made once."""
    folder = BUILD / f"{torch}-{python}"
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if not (folder / "ready").exists():
        run(f"python{python}", "-m", "venv", folder)
        run(*pip, "--no-cache-dir", f"torch=={torch}", *NEEDED)
        (folder / "ready").touch()
    run(*pip, "--no-deps", "--force-reinstall", *BUILD.glob("thinwire-*.whl"))
    return folder / "bin" / "python"


def tried(torch: str, python: str) -> tuple[int, dict[str, Any]]:
    """How many of the fast tests passed with these versions, and which did not, and the attachments that work."""
    report = BUILD / f"{torch}-{python}.xml"
    chosen = ("-m", "not slow and not alone", "-n", "2", "--max-worker-restart", "0", "-p", "no:cacheprovider")
    command = [environment(torch, python), "-m", "pytest", "-q", *chosen, f"--junitxml={report}", *TESTS]
    if subprocess.run(command, cwd=ROOT).returncode > 1:  # what fails is counted
        raise SystemExit(f"the tests did not run with PyTorch {torch} and Python {python}")
    counts, supported, failures = {"passed": 0, "failed": 0, "skipped": 0}, [], []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {part.tag for part in case} & {"failure", "error", "skipped"}
        counts[outcome := "skipped" if kinds == {"skipped"} else "failed" if kinds else "passed"] += 1
        law = re.fullmatch(r"test_laws\[(.*)\]", case.get("name", ""))
        supported += [law[1]] if law and outcome == "passed" else []
        failures += [f"{case.get('classname')}.{case.get('name')}"] if outcome == "failed" else []
    return counts.pop("passed"), {**counts, "supported": supported, "failures": failures}


def main() -> None:
    newest, here = run(sys.executable, "-m", "pip", "index", "versions", "torch"), "{}.{}".format(*sys.version_info)
    newest = newest.split("(")[1].split(")")[0]
    asked = sys.argv[1:] or [*TORCH, newest, *(f"{newest}/{python}" for python in PYTHON if starts(python))]
    BUILD.mkdir(parents=True, exist_ok=True)
    # One for every Python and PyTorch: the core has a stable interface, and is built without PyTorch.
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", BUILD, ".")
    known = {row["name"]: row for row in json.loads(RECORD.read_text())["results"]} if RECORD.exists() else {}
    for torch, _, python in (each.partition("/") for each in asked):
        name = f"{torch}/{python or here}"
        passed, more = tried(torch, python or here)
        known[name] = {"name": name, "value": passed, "unit": "tests", **more}
        in_order = sorted(known, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
        Results("make versions", [known[name] for name in in_order]).write(RECORD)


if __name__ == "__main__":
    main()
