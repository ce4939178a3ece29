"""``python -m experiments conformance``: PyTorch's own tests of its process groups, on thinwire in place of gloo.

They run three times: on gloo, which says which of them can run on this machine at all; on thinwire's process group as
it is; and on one that sends every float, down to a single element, through thinwire's compressed collectives, with a
compressor that loses nothing, because these tests compare results exactly.
"""

from __future__ import annotations

import json as json_
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.framework.pages import show
from thinwire_tools.results import OutputFile, Results

RUNS = {"gloo": "", "thinwire": "default", "thinwire, every float": "minmax(bits=8, bucket=1)"}
"""Who is tested, and the compressor, as `experiments.validation.suite.SPEC` takes it. A bucket of one element is a
minimum, a maximum and a code between the two, which are equal."""
BY_NAME = {
    "test_get_backend": "asks for the name of the backend",
    "test_ddp_logging_data_cpu": "asks for the name of the backend",
    "test_monitored_barrier_gloo": "torch.distributed refuses monitored_barrier to other names than gloo",
    "test_monitored_barrier_gloo_subgroup": "torch.distributed refuses monitored_barrier to other names than gloo",
}
"""Tests that no backend of another name than gloo can pass, and why."""


def conformance(*, folder: Path | None = None, only: tuple[str, ...] = (), json: OutputFile = None) -> int:
    """Run PyTorch's tests of its process groups on gloo and on thinwire, two ranks each: about half an hour.

    Needs the extra ``conformance``, which PyTorch's tests import.

    Examples:
      make conformance
      python -m experiments conformance --folder build/conformance --json benchmarks/validation/conformance.json
      python -m experiments conformance --only test_ddp_hook_parity_powerSGD test_ddp_comm_hook_logging

    Args:
        folder: where results are kept: tests that have one there are not run again.
        only: names of tests, if not all are to be run.
        json: write them to this file.
    """
    if find_spec("expecttest") is None:
        raise ModuleNotFoundError("PyTorch's tests import expecttest: pip install '.[conformance]'")
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        outcomes = {
            name: _run(place / name.replace(", ", "-").replace(" ", "-"), spec, only) for name, spec in RUNS.items()
        }
    failed = {(who, test) for who, rows in outcomes.items() for test, row in rows.items() if row["result"] == "failed"}
    show("conformance", _results(outcomes), json)
    for who, test in sorted(failed):
        Console(highlight=False).print(f"{who}: {test}: {outcomes[who][test]['why']}", markup=False)
    # Most tensors of these tests are too small for the defaults: without this, nothing of ours might have run.
    compressed = _counts(outcomes, list(RUNS)[-1])["compressed collectives"]
    return int(any(test not in BY_NAME for _, test in failed) or not compressed)


def _run(place: Path, spec: str, only: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Results by test."""
    stats = place.with_suffix(".stats")
    stats.mkdir(exist_ok=True)
    settings = {"BACKEND": "gloo", "WORLD_SIZE": "2", "THINWIRE_CONFORMANCE_STATS": str(stats)}
    settings |= {"THINWIRE_CONFORMANCE_SPEC": spec} if spec else {}
    lines = place.with_suffix(".jsonl")
    with place.with_suffix(".log").open("a") as log:
        command = [sys.executable, "-m", "experiments.validation.suite", str(lines), *only]
        subprocess.run(command, env={**os.environ, **settings}, stdout=log, stderr=log, check=True)
    rows = [json_.loads(line) for line in lines.read_text().splitlines()]
    return {row["test"]: row for row in rows}


def _counts(outcomes: dict[str, dict[str, dict[str, Any]]], who: str) -> dict[str, int]:
    """Of the tests that gloo passes, how many this one passes, and through how many collectives."""
    able = [test for test, row in outcomes["gloo"].items() if row["result"] == "passed"]
    rows = [outcomes[who][test] for test in able]
    results = Counter(row["result"] for row in rows)
    failed = [row["test"] for row in rows if row["result"] == "failed"]
    return {
        "passed": results["passed"],
        "skipped": results["skipped"],
        "failed by name": sum(test in BY_NAME for test in failed),
        "failed": sum(test not in BY_NAME for test in failed),
        "compressed collectives": sum(row["compressed"] for row in rows),
        "passed with compressed collectives": sum(row["compressed"] > 0 and row["result"] == "passed" for row in rows),
    }


def _results(outcomes: dict[str, dict[str, dict[str, Any]]]) -> Results:
    skipped = Counter(row["why"] for row in outcomes["gloo"].values() if row["result"] == "skipped")
    fails = {
        who: {
            test: BY_NAME.get(test) or row["why"].strip().splitlines()[-1]
            for test, row in rows.items()
            if row["result"] == "failed"
        }
        for who, rows in outcomes.items()
    }
    about = {"ranks": 2, "compressors": RUNS, "failed": fails, "skipped on gloo": dict(skipped.most_common())}
    results = Results("python -m experiments conformance", about=about)
    results.add("tests", len(outcomes["gloo"]), "")
    results.add("skipped on gloo", skipped.total(), "")
    for who in outcomes:
        for name, value in _counts(outcomes, who).items():
            results.add(f"{name}/{who}", value, "")
    return results
