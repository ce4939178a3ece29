"""Tables 2 and 3 and figure 4: times over links that stand for the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from experiments.framework.claims import Row
from experiments.framework.timing import Times, joined
from experiments.framework.verdicts import Course, courses, sooner
from experiments.papers.aqsgd.methods import FP32, Method, aqsgd, direct
from experiments.papers.aqsgd.study import NUM_STAGES, AQSGDStudy, course
from experiments.papers.aqsgd.tasks import FineTuning
from experiments.papers.aqsgd.timing import PipelineTiming, draw_rates, where
from thinwire import parse
from thinwire_tools import plots

# --- table 3: what a micro-batch takes to compute and to send, forward and backward

_FORWARD, _BACKWARD = "maxabs(bits=4)", "maxabs(bits=8)"
_HEADER_BYTES = 64
PAPER_S = {"500mbit": (0.013, 0.025), "300mbit": (0.021, 0.042), "200mbit": (0.031, 0.063), "100mbit": (0.063, 0.125)}
"""Table 3: communication of a micro-batch, forward and backward, of AQ-SGD fw4 bw8."""


def message_bytes(task: FineTuning, spec: str) -> int:
    """Of a micro-batch's activation, or of its gradient."""
    return _HEADER_BYTES + task.micro_batch * parse(spec).wire_bytes((task.model.context, task.model.width))


def table_3(study: AQSGDStudy) -> list[Row]:
    """Compute of the stages in a step without a wire, wire of the messages alone."""
    computed, timing, task = study.computed(), study.timing(), study.scale.timed
    study.advance(1, "compute")
    passes = {"forward_s": computed.forward_s, "backward_s": computed.backward_s}
    rows = [Row("table 3", "compute", computed.seconds, "s", passes)]
    for rate in study.scale.breakdown_rates:
        seconds = {}
        for name, spec in (("forward_s", _FORWARD), ("backward_s", _BACKWARD)):
            seconds[name] = timing.wire(message_bytes(task, spec), study.scaled(rate))
            study.advance(1, f"{name.removesuffix('_s')} over {rate}")
        data = {
            "rate": rate,
            "link": study.scaled(rate),
            **seconds,
            "forward_compute_s": computed.forward_s,
            "backward_compute_s": computed.backward_s,
            "paper": dict(zip(("forward_s", "backward_s"), PAPER_S[rate], strict=True)),
        }
        rows.append(Row("table 3", f"wire/{rate}", sum(seconds.values()) / computed.seconds, "", data))
    return rows


# --- table 2: throughput of FP32, DirectQ and AQ-SGD; GPipe, and 1F1B beside it

DIRECT: dict[tuple[int, int], Method] = {bits: direct(*bits) for bits in ((3, 6), (4, 8))}
AQSGD: dict[tuple[int, int], Method] = {bits: aqsgd(*bits) for bits in ((3, 6), (4, 8))}
DISK: dict[tuple[int, int], Method] = {bits: aqsgd(*bits, store="disk") for bits in ((3, 6), (4, 8))}
METHODS = (FP32, *DIRECT.values(), *AQSGD.values(), *DISK.values())
_OTHER = tuple(
    replace(method, name=f"{method.name} 1f1b", title=f"{method.title}, 1F1B", schedule="1f1b")
    for method in (FP32, AQSGD[3, 6])
)
PAPER = {
    "fp32": (0.5, 1.8, 2.7, 3.2, 3.8),
    DIRECT[3, 6].name: (3.5, 3.9, 3.9, 4.0, 4.0),
    DIRECT[4, 8].name: (3.0, 3.8, 3.9, 4.0, 4.1),
    AQSGD[3, 6].name: (3.4, 3.8, 3.9, 4.0, 4.0),
    AQSGD[4, 8].name: (3.0, 3.8, 3.9, 3.9, 4.0),
}
"""Table 2, sequences a second, over 100, 300 and 500 Mbit/s, 1 and 10 Gbit/s."""
_PAPER_RATES = ("100mbit", "300mbit", "500mbit", "1gbit", "10gbit")

AllTimes = Mapping[str, Times]


def table_2(study: AQSGDStudy) -> list[Row]:
    """All methods in turns over links of each rate, in separate runs; then 1F1B over the slowest and the fastest."""
    rates, task, computed = study.scale.rates, study.scale.timed, study.computed()
    slow, fast = rates[0], rates[-1]
    by_rate, other = _measure(study, METHODS, rates), _measure(study, _OTHER, (slow, fast))
    per_s = {
        method.name: {rate: task.batch / by_rate[rate].step_s(method.name) for rate in rates} for method in METHODS
    }
    title = f"2 stages, {task.num_micro} micro-batches, GPipe"
    draw_rates(study, "2-throughput", title, METHODS, per_s)
    for method in _OTHER:
        per_s[method.name] = {rate: task.batch / times.step_s(method.name) for rate, times in other.items()}
    data = {
        "per_s": per_s,
        "titles": {method.name: method.title for method in (*METHODS, *_OTHER)},
        "paper": {name: dict(zip(_PAPER_RATES, values, strict=True)) for name, values in PAPER.items()},
        "links": {rate: study.scaled(rate) for rate in rates},
        "by_round": {rate: times.rounds for rate, times in by_rate.items()},
        "runs": study.scale.runs,
        "stages_s": {rate: times.stages for rate, times in by_rate.items()},
        "step_bytes": by_rate[slow].payload_bytes,
        "slowdown": study.slowdown,
        "num_micro": task.num_micro,
        "message_values": task.message_values,
        "compute_s": computed.seconds,
    }
    base, ours = (method.name for method in _OTHER)
    kept = [least / most for least, most in zip(other[fast].rounds[ours], other[slow].rounds[ours], strict=True)]
    beside = {
        "over_gpipe": by_rate[slow].step_s(AQSGD[3, 6].name) / other[slow].step_s(ours),
        "over_fp32": other[slow].times_faster(ours, base),
    }
    return [
        Row("table 2", "throughput", per_s[AQSGD[3, 6].name][slow], "sequences/s", data),
        Row("table 2", "1f1b", median(kept), "", beside),
    ]


def _measure(study: AQSGDStudy, methods: Sequence[Method], rates: Sequence[str]) -> AllTimes:
    """Each run has new ranks and links, and counts as its median round."""
    turns: dict[str, Any] = {"rounds": study.scale.rounds, "steps": 1, "on_turn": study.advance}
    turns["rates"], runs = [study.scaled(rate) for rate in rates], []
    for _ in range(study.scale.runs):
        with PipelineTiming(emulated=study.emulated, num_ranks=NUM_STAGES) as timing:
            runs.append(timing.times(study.model, methods, **turns))
    return {rate: joined(at_rate) for rate, at_rate in zip(rates, zip(*runs, strict=True), strict=True)}


# --- figure 4: loss against time, of FP32, of DirectQ, and of AQ-SGD with its first, uncompressed epoch

WARM = aqsgd(4, 8, warmup_epochs=1)
"""As in appendix D: the first epoch is uncompressed both ways, and takes as long as FP32's; other steps are those of
`AQSGD`, of the same name."""
IN_TIME = {"fp32": FP32, "direct": DIRECT[4, 8], "aqsgd": WARM}


def figure_4(study: AQSGDStudy) -> list[Row]:
    """Steps to a loss are those of trainings over loopback, the times of steps those of table 2."""
    task = study.scale.to_loss
    found = {}
    for key, method in IN_TIME.items():
        first = [(method.warmup_epochs * task.steps_per_epoch, FP32.name)] if method.warmup_epochs else []
        found[key] = course(study.train("to_loss", method), *first, (task.steps, method.name))
    timed = (study.measured.get(("table 2", "throughput")) or table_2(study)[0]).data
    rows = []
    for rate in study.scale.slow_rates:
        rounds = {method.name: timed["by_round"][rate][method.name] for method in IN_TIME.values()}
        gained = sooner(found["aqsgd"], found["fp32"], rounds).times
        data = {"courses": courses(**found), "rounds": rounds, "link": timed["links"][rate], "epochs": task.epochs}
        rows.append(Row("figure 4", f"sooner/{rate}", gained, "x", data))
    _draw_4(study, found, rows)
    return rows


# --- pictures


def _draw_4(study: AQSGDStudy, found: Mapping[str, Course], rows: Sequence[Row]) -> None:
    links = zip(study.scale.slow_rates, (row.data["link"] for row in rows), strict=True)
    titles = [f"over {where(rate, link)}" for rate, link in links]
    figure, all_axes = plots.canvas(len(rows), titles=titles, x="seconds of training", y="loss")
    for axes, row in zip(all_axes, rows, strict=True):
        for key, method in IN_TIME.items():
            found[key].draw(axes, row.data["rounds"], color=method.color, label=method.title)
    plots.save(figure, study.picture("4-time"))
