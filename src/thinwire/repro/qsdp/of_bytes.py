"""Bytes on the interfaces beside what the formats' formulas say."""

from __future__ import annotations

from thinwire.repro.findings import Finding
from thinwire.repro.qsdp.contest import FULL_PACKET, FULL_PAYLOAD, Counted
from thinwire.repro.qsdp.study import NUM_RANKS, Scale, Study, Work
from thinwire.repro.qsdp.ways import RAW, W4G4, W8G8, Way

_WAYS = (W8G8, W4G4, RAW)
_MARGIN = 0.03


def bytes_work(scale: Scale) -> Work:
    """Steps that are counted."""
    return Work(steps=len(_WAYS) * scale.count_steps)


def wire_bytes(study: Study) -> list[Finding]:
    """What some steps of each way put on the links, by the kernel's counters."""
    if not study.emulated:
        return [_not_counted()]
    rows = []
    for way in _WAYS:
        counted = study.contest().count(
            study.model, way, steps=study.scale.count_steps, num_modules=study.num_modules, on_turn=study.advance
        )
        rows.append(_row(study, way, counted))
    return rows


def _row(study: Study, way: Way, counted: Counted) -> Finding:
    ratio = counted.without_headers / counted.formula_bytes
    exchanges = f"{counted.gathers:g} gathers and {counted.reductions:g} reduction a step"
    return Finding(
        "section 5.6",
        f"interface_bytes/{way.name}",
        ratio,
        "",
        f"{way.title}: bytes on the interface are within {_MARGIN:.0%} of the formula's",
        f"{ratio - 1:+.2%} without the headers of full packets: {counted.interface_bytes / counted.steps / 1e6:.2f} MB "
        f"a step on {NUM_RANKS} interfaces, formula {counted.formula_bytes / counted.steps / 1e6:.2f} MB, handed over "
        f"{counted.payload_bytes / counted.steps / 1e6:.2f} MB, in {exchanges}",
        abs(ratio - 1) <= _MARGIN and counted.payload_bytes == counted.formula_bytes,
        {
            "interface_bytes": counted.interface_bytes,
            "formula_bytes": counted.formula_bytes,
            "payload_bytes": counted.payload_bytes,
            "gathers": counted.gathers,
            "reductions": counted.reductions,
            "num_micro": study.scale.num_micro,
            "headers": FULL_PACKET / FULL_PAYLOAD - 1,
        },
    )


def _not_counted() -> Finding:
    claim = f"bytes on the interface are within {_MARGIN:.0%} of the formula's"
    found = "no slow network can be made here, so that nothing is counted"
    return Finding("section 5.6", "interface_bytes", float("nan"), "", claim, found, None)
