"""Messages, layouts, collectives, checkpoints, plans and verdicts are those that the golden files hold."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import calls
import pytest
import torch
from test_laws import SPECS

WORLDS = (2, 3, 4)
POLICIES = (
    *("lgreco", "lgreco(steps=5000, error='squared', alpha=1.5)", "lgreco(objective='error')"),
    *("lgreco(objective='time')", "lgreco(objective='link', alpha=8.0)", "lgreco(reference=accordion(eta=0.5))"),
    *("accordion", "kmeans", "auto"),
)
REFERENCES = ("minmax(bits=4, bucket=128)", "ef(topk(density=0.02))", "qsgd(bits=4)", "maxabs(bits=4)")
RULES = ("minmax(bits=4)", {"embed*": "topk(density=0.1)"})
TRAININGS = (
    *("minmax(bits=4)", "ef(minmax(bits=2))", "ef(topk(density=0.05))", "ef(powersgd(rank=2))"),
    *("dgc(topk(density=0.05))", "intsgd(bits=8)", "intdiana(bits=2)", "heuristic_intsgd(bits=8)"),
    *("levels(bits=4, min_numel=0)", "lattice(bits=8, bucket=1024)", "sign(majority=True)", "raw"),
)


pytestmark = pytest.mark.usefixtures("one_thread")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def test_messages(golden) -> None:
    golden("messages", {spec: {_name(dtype): calls.messages(spec, dtype) for dtype in calls.DTYPES} for spec in SPECS})


def test_layouts(golden) -> None:
    found = {}
    for algorithm, size in itertools.product(calls.ALGORITHMS, WORLDS):
        found[f"{algorithm}, {size} ranks"] = {_name(d): calls.layout(algorithm, size, d) for d in calls.DTYPES}
    golden("layouts", found)


def test_collectives(golden) -> None:
    found = {}
    for algorithm, size in itertools.product(calls.ALGORITHMS, WORLDS):
        found[f"{algorithm}, {size} ranks"] = {_name(d): calls.reduced(algorithm, size, d) for d in calls.DTYPES}
    for spec, size in itertools.product(("minmax(bits=4, bucket=128)", "raw"), WORLDS):
        found[f"halves of {spec}, {size} ranks"] = {_name(d): calls.halves(spec, size, d) for d in calls.DTYPES}
    golden("collectives", found)


def test_checkpoints(golden) -> None:
    found = {spec: calls.trained(spec, "sra", 2) for spec in TRAININGS}
    found["ef(minmax(bits=2)), ring of 3 ranks"] = calls.trained("ef(minmax(bits=2))", "ring", 3)
    golden("checkpoints", found)


def test_plans(golden) -> None:
    sizes = [[1e5, 2e5, 4e5], [1e5, 3e5, 9e5], [5e4, 6e4, 7e4]]
    found = {
        "proposals": {p: {spec: calls.proposals(p, spec) for spec in REFERENCES} for p in POLICIES},
        "families": {spec: calls.members(spec) for spec in (*REFERENCES, "ef(powersgd(rank=6))")},
        "by link": {
            f"{rates}, {seconds} s": calls.by_link(sizes, rates, seconds)
            for rates, seconds in itertools.product(((1e6, 1e7, 1e8), (1e5, 1e5, 1e5)), (0.0, 0.1, 1.0))
        },
        "rules": {
            str(rules): calls.default_plan(rules) for rules in ("minmax(bits=4)", {"embed*": "topk(density=0.1)"})
        },
    }
    golden("plans", found)


def test_specs(golden) -> None:
    found = {
        "compressors": {spec: calls.spec_of(spec) for spec in SPECS},
        "policies": {policy: calls.policy_text(policy) for policy in POLICIES},
        "collective algorithms": {text: calls.algorithm_text(text) for text in calls.ALGORITHMS},
    }
    golden("specs", found)


def test_verdicts(golden) -> None:
    words = {True: "holds", False: "does not hold", None: "inconclusive"}
    found = {}
    for paper, claims in calls.claims(Path(__file__).parents[2] / "benchmarks").items():
        verdicts = [holds for *_, holds in claims]
        rows = [f"{figure}: {words[holds]} {calls.digest(claim, said)}" for figure, claim, said, holds in claims]
        found[paper] = {"counts": {word: verdicts.count(holds) for holds, word in words.items()}, "claims": rows}
    golden("verdicts", found)


def test_figures_of_pages(golden) -> None:
    """Of every generated section, the cells of its tables that hold figures."""
    found = {}
    for name, text in calls.figure_sections().items():
        rows = [line for line in text.splitlines() if line.startswith("|")]
        cells = [cell.strip() for row in rows for cell in row.split("|")]
        figures = [cell for cell in cells if re.search(r"\d", cell)]
        found[name] = f"{len(figures)} {calls.digest(*figures)}"
    golden("figures", found)
