"""``thinwire compare`` with policies: their text, paired runs in which plans change, and what is kept of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from thinwire_tools.compare import paired, tasks
from thinwire_tools.compare.compare_rank import plan_bytes
from thinwire_tools.compare.comparison import Comparison
from thinwire_tools.compare.variants import Variant
from thinwire_tools.results import Results

TOPK = "topk(density=0.1)"
ADAPTED = f"{TOPK} with lgreco(every=3)"
# Never a change of the norm that large: what is critical is so for the learning rate, which falls from the second step
# on.
ACCORDION = f"{TOPK} with accordion(every=3, eta=1000.0)"
TASK = replace(tasks.SIZES["smoke"], steps=8, probe_every=4, held_out_windows=16, probe_windows=8)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("topk(0.1)", Variant(TOPK)),
        ("topk(0.1) with lgreco( every = 3 )", Variant(TOPK, "lgreco(every=3)")),
        ("minmax(bits=4, bucket=128) with kmeans", Variant("minmax(bits=4, bucket=128)", "kmeans()")),
        (
            "powersgd(rank=8) with lgreco(reference=accordion(every=20, pair=(2, 8)), bounds=(2, 32))",
            Variant("powersgd(rank=8)", "lgreco(bounds=(2, 32), reference=accordion(every=20, pair=(2, 8)))"),
        ),
    ],
)
def test_a_variant_has_one_text(text: str, canonical: Variant) -> None:
    found = Variant.parse(text)
    assert found == canonical
    assert Variant.parse(str(found)) == found


class _Counted(paired.Watcher):
    """Counts runs."""

    made = 0

    def begin(self, title: str) -> None:
        self.made += 1


@pytest.fixture(scope="module")
def found() -> tuple[Comparison, Comparison, list[int]]:
    """A comparison, the same again by the same processes, and how many runs had been made after each."""
    watcher, made, comparisons = _Counted(), [], []
    with paired.Runs(TASK, 2, None, watcher) as runs:
        for _ in range(2):
            comparisons.append(
                paired.compare_runs(runs, [TOPK, ADAPTED, ACCORDION], seeds=[0], margin=0.5, control=None)
            )
            made.append(watcher.made)
    return comparisons[0], comparisons[1], made


def test_processes_that_live_on_train_nothing_twice(found: tuple[Comparison, Comparison, list[int]]) -> None:
    first, second, made = found
    assert made == [4, 4]
    assert [side.runs for side in first.sides()] == [side.runs for side in second.sides()]


def test_plans_change_while_training_goes_on(found: tuple[Comparison, Comparison, list[int]]) -> None:
    uniform, adapted, _ = (side.runs[0] for side in found[0].variants)
    assert uniform.plans == []
    assert [plan["step"] for plan in adapted.plans] == [3, 6]
    for plan in adapted.plans:
        assert plan["error"] <= plan["reference_error"] * (1 + 1e-9)
        assert plan["wire_bytes"] < plan["reference_wire_bytes"]
        assert min(plan["errors_s"], plan["solve_s"]) > 0
        assert plan["waited_s"] >= 0
    assert adapted.adapt_s > 0
    assert uniform.adapt_s == 0
    # What was sent until the first plan is what uniform compression sends; less from then on.
    assert adapted.payload_bytes[-1] < uniform.payload_bytes[-1]
    assert adapted.replicas_identical


def test_the_bytes_of_a_plan_are_those_that_are_sent(found: tuple[Comparison, Comparison, list[int]]) -> None:
    import thinwire

    uniform, adapted, _ = (side.runs[0] for side in found[0].variants)
    shapes = {name: tuple(p.shape) for name, p in TASK.build(0).named_parameters()}
    reference = plan_bytes(thinwire.Plan.build(shapes, TOPK), shapes, 2)
    assert {plan["reference_wire_bytes"] for plan in adapted.plans} == {reference}
    # Without messages' headers.
    assert uniform.formula_bytes == pytest.approx(reference, rel=0.02)
    assert adapted.formula_bytes == pytest.approx(adapted.plans[-1]["wire_bytes"], rel=0.02)


def test_accordion_compresses_less_in_the_first_interval_only(found: tuple[Comparison, Comparison, list[int]]) -> None:
    run = found[0].variants[2].runs[0]
    assert [plan["step"] for plan in run.plans] == [3, 6]
    # The first interval is a critical one. A learning rate that falls step by step is no drop.
    first, second = run.plans
    assert first["wire_bytes"] == first["reference_wire_bytes"]
    assert second["wire_bytes"] < 0.5 * second["reference_wire_bytes"]
    assert all(plan["error"] is None for plan in run.plans)


def test_decisions_are_in_the_figures(found: tuple[Comparison, Comparison, list[int]]) -> None:
    results = Results("thinwire compare")
    found[0].record(results)
    rows = {row["name"]: row for row in json.loads(json.dumps(results.results, allow_nan=False))}
    row = rows[f"plan_gain/{ADAPTED}"]
    assert row["value"] > 1
    assert [plan["step"] for plan in row["plans"][0]] == [3, 6]
    assert len(row["adapt_s"]) == 1
    assert f"plan_gain/{TOPK}" not in rows
    assert f"accuracy/{TOPK}" not in rows
