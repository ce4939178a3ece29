"""``python -m experiments lgreco``: how bytes are counted."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.papers.lgreco.quality import bytes_from, first_plan, gains
from thinwire_tools.compare.comparison import Run


def _run(name: str, payload: Sequence[float] = (0, 1000, 2000, 3000, 4000), plans: Sequence[int] = ()) -> Run:
    return Run(
        name,
        step_s=[0.1] * 40,
        probe_steps=[10, 20, 30, 40],
        losses=[5.0, 4.0, 3.0, 2.5, 2.0],
        payload_bytes=list(payload),
        plans=[{"step": step} for step in plans],
    )


def test_bytes_count_from_the_first_plan_on() -> None:
    adapted = _run("adapted", payload=(0, 1000, 1500, 2000, 2500), plans=[10, 20])
    assert first_plan([adapted]) == 10
    assert first_plan([_run("uniform")]) == 0
    assert bytes_from(adapted, 10) == 50
    assert bytes_from(adapted, 0) == 62.5
    # A plan after the last probe but one: what is left is that probe's stretch.
    assert bytes_from(adapted, 35) == 50
    assert gains([adapted, adapted], [_run("uniform")] * 2) == [2.0, 2.0]
