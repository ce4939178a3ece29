"""``thinwire compare`` with policies: their text, paired runs in which plans change, and what is kept of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import thinwire
from thinwire_tools.compare import paired, tasks
from thinwire_tools.compare.paired import plan_bytes
from thinwire_tools.results import Results

TOPK = "topk(density=0.1)"
ADAPTED = f"{TOPK} with lgreco(every=3)"
# Never a change of the norm that large: what is critical is so for the learning rate, which falls from the second step
# on.
ACCORDION = f"{TOPK} with accordion(every=3, eta=1000.0)"
TASK = replace(tasks.SIZES["smoke"], steps=8, probe_every=4, held_out_windows=16, probe_windows=8)


class _Counted(paired.Watcher):
    """Counts runs."""

    made = 0

    def begin(self, title: str) -> None:
        self.made += 1


def test_plans_change_while_training_goes_on_and_send_what_they_say() -> None:
    watcher, options = _Counted(), {"seeds": [0], "margin": 0.5, "control": None}
    with paired.Runs(TASK, 2, None, watcher) as runs:
        first, second = (paired.compare_runs(runs, [TOPK, ADAPTED, ACCORDION], **options) for _ in range(2))
    # Processes that live on train nothing twice.
    assert watcher.made == 4
    assert [side.runs for side in first.sides()] == [side.runs for side in second.sides()]
    uniform, adapted, critical = (side.runs[0] for side in first.variants)
    assert uniform.plans == []
    assert [plan["step"] for plan in adapted.plans] == [3, 6]
    for plan in adapted.plans:
        assert plan["error"] <= plan["reference_error"] * (1 + 1e-9)
        assert plan["wire_bytes"] < plan["reference_wire_bytes"]
    assert adapted.adapt_s > 0 == uniform.adapt_s
    # What was sent until the first plan is what uniform compression sends; less from then on.
    assert adapted.payload_bytes[-1] < uniform.payload_bytes[-1]
    assert adapted.replicas_identical
    shapes = {name: tuple(p.shape) for name, p in TASK.build(0).named_parameters()}
    reference = plan_bytes(thinwire.Plan.build(shapes, TOPK), shapes, 2)
    assert {plan["reference_wire_bytes"] for plan in adapted.plans} == {reference}
    # Without messages' headers.
    assert uniform.formula_bytes == pytest.approx(reference, rel=0.02)
    assert adapted.formula_bytes == pytest.approx(adapted.plans[-1]["wire_bytes"], rel=0.02)
    # The first interval of Accordion is a critical one. A learning rate that falls step by step is no drop.
    one, other = critical.plans
    assert one["wire_bytes"] == one["reference_wire_bytes"]
    assert other["wire_bytes"] < 0.5 * other["reference_wire_bytes"]
    results = Results("thinwire compare")
    first.record(results)
    rows = {row["name"]: row for row in json.loads(json.dumps(results.results, allow_nan=False))}
    assert rows[f"plan_gain/{ADAPTED}"]["value"] > 1
    assert f"plan_gain/{TOPK}" not in rows
