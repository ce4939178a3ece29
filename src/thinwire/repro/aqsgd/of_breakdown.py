"""Table 3: what a micro-batch takes to compute and to send, forward and backward."""

from __future__ import annotations

from thinwire import parse
from thinwire.repro.aqsgd.study import Scale, Study, Work
from thinwire.repro.aqsgd.tasks import FineTuning
from thinwire.repro.findings import Finding

_FORWARD, _BACKWARD = "maxabs(bits=4)", "maxabs(bits=8)"
_HEADER_BYTES = 64
PAPER_S = {
    "500mbit": (0.013, 0.025),
    "300mbit": (0.021, 0.042),
    "200mbit": (0.031, 0.063),
    "100mbit": (0.063, 0.125),
}
"""Table 3: communication of a micro-batch, forward and backward, of AQ-SGD fw4 bw8."""
PAPER_FORWARD_S, PAPER_BACKWARD_S = 0.045, 0.135
_CLOSE = 0.25
"""What the proportion of wire to compute may be off by: scales and headers are some percent of so small a message."""


def breakdown_work(scale: Scale) -> Work:
    """A step for each time that is taken."""
    return Work(steps=1 + 2 * len(scale.breakdown_rates))


def message_bytes(task: FineTuning, spec: str) -> int:
    """Of a micro-batch's activation, or of its gradient."""
    return _HEADER_BYTES + task.micro_batch * parse(spec).wire_bytes((task.model.context, task.model.width))


def table_3(study: Study) -> list[Finding]:
    """Compute of the stages in a step without a wire, wire of the messages alone."""
    computed, contest, task = study.computed(), study.contest(), study.scale.timed
    study.advance(1, "compute")
    rows = [
        Finding(
            "table 3",
            "compute",
            computed.seconds,
            "s",
            "",
            f"forward {1e3 * computed.forward_s:.0f} ms, backward {1e3 * computed.backward_s:.0f} ms (in the paper "
            f"{1e3 * PAPER_FORWARD_S:.0f} and {1e3 * PAPER_BACKWARD_S:.0f})",
            None,
            {"forward_s": computed.forward_s, "backward_s": computed.backward_s},
            aside="compute of a micro-batch",
        )
    ]
    for rate in study.scale.breakdown_rates:
        seconds = []
        for name, spec in (("forward", _FORWARD), ("backward", _BACKWARD)):
            seconds.append(contest.wire(message_bytes(task, spec), study.scaled(rate)))
            study.advance(1, f"{name} over {rate}")
        rows.append(_row(study, rate, *seconds))
    return rows


def _row(study: Study, rate: str, forward_s: float, backward_s: float) -> Finding:
    theirs, computed = PAPER_S[rate], study.computed()
    ours = (forward_s + backward_s) / computed.seconds
    paper = sum(theirs) / (PAPER_FORWARD_S + PAPER_BACKWARD_S)
    return Finding(
        "table 3",
        f"wire/{rate}",
        ours,
        "",
        f"fw4 bw8 over {study.where(rate)}: communication to computation as in the paper, {paper:.2f}, within "
        f"{_CLOSE:.0%}",
        f"{ours:.2f}: forward {1e3 * forward_s:.0f} ms, backward {1e3 * backward_s:.0f} ms (in the paper "
        f"{1e3 * theirs[0]:.0f} and {1e3 * theirs[1]:.0f})",
        study.verdict(abs(ours / paper - 1) <= _CLOSE),
        {
            "rate": rate,
            "link": study.scaled(rate),
            "forward_s": forward_s,
            "backward_s": backward_s,
            "forward_compute_s": computed.forward_s,
            "backward_compute_s": computed.backward_s,
            "paper": {"forward_s": theirs[0], "backward_s": theirs[1]},
        },
    )
