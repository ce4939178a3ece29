"""Figure 3.3 and table 3.9: transports between ranks of one host, and two nodes with a slow link between them."""

from __future__ import annotations

from thinwire.repro.cgx.contest import Times
from thinwire.repro.cgx.judging import above
from thinwire.repro.cgx.models import Model
from thinwire.repro.cgx.study import Scale, Study
from thinwire.repro.cgx.throughput import chart, throughput
from thinwire.repro.cgx.ways import FP32, NOTHING, Way
from thinwire.repro.findings import Finding

SHARED = Way("shared", "shared memory", "#0a7d4f", transport="shared")
GROUP = Way("group", "gloo", "#c0392b", transport="group")

FLAT = Way("thinwire", "thinwire, SRA", "#0a7d4f", transport="auto")
HIERARCHICAL = Way("hierarchical", "thinwire, hierarchical", "#1f6fb2", topology="hierarchical", transport="auto")
_GLOO_ONLY = Way("thinwire gloo", "thinwire, SRA, gloo only", "#8250c4", transport="group")
_THESIS_3_9 = {"gpt": {"fp32": 32_000.0, "thinwire": 85_000.0}, "cnn": {"fp32": 564.0, "thinwire": 2300.0}}


def transports(scale: Scale) -> list[Way]:
    """Of figure 3.3."""
    return [FP32, GROUP, SHARED, NOTHING]


def nodes(scale: Scale) -> list[Way]:
    """Of table 3.9."""
    return [FP32, FLAT, HIERARCHICAL, _GLOO_ONLY, NOTHING]


def figure_3_3(study: Study) -> list[Finding]:
    """Step time over shared memory and over gloo, all ranks on this host."""
    ways = transports(study.scale)
    found = {model.name: study.times(model, ways, "host") for model in study.scale.models}
    chart(study, "3.3", found, {model.name: ways for model in study.scale.models}, place="host", seconds=True)
    rows = []
    for model in study.scale.models:
        times = found[model.name]
        gained = times.times_faster(SHARED.name, GROUP.name)
        rows += [
            Finding(
                "3.3",
                f"shared_over_gloo/{model.name}",
                gained,
                "x",
                f"{model.title}: steps over shared memory are faster than over other backends, by up to 33 %",
                f"{gained - 1:+.1%} throughput against gloo on one host",
                above(times.over(SHARED.name, GROUP.name)),
            ),
            *throughput("3.3", model, times, ways, reference=GROUP, thesis={}, where=study.where(model, "host")),
        ]
    return rows


def table_3_9(study: Study) -> list[Finding]:
    """Throughput on two nodes of two ranks."""
    ways = nodes(study.scale)
    found = {model.name: study.times(model, ways, "nodes") for model in study.scale.models}
    chart(study, "3.9", found, {model.name: ways for model in study.scale.models}, place="nodes")
    return [row for model in study.scale.models for row in _node_rows(study, model, found[model.name])]


def _node_rows(study: Study, model: Model, times: Times) -> list[Finding]:
    thesis, where = _THESIS_3_9[model.name], study.where(model, "nodes")
    wanted = thesis["thinwire"] / thesis["fp32"]
    rows = [
        Finding(
            "3.9",
            f"speedup/{model.name}/{way.name}",
            times.times_faster(way.name, FP32.name),
            "x",
            f"{model.title} on several nodes: CGX has {wanted:.1f}x the baseline's throughput ({model.thesis}; "
            f"up to 10x)"
            if way is FLAT
            else "",
            f"{times.times_faster(way.name, FP32.name):.1f}x between two nodes, {where} each",
            study.verdict(above(times.over(way.name, FP32.name), wanted), "nodes") if way is FLAT else None,
            aside="" if way is FLAT else f"{model.title}, hierarchical",
        )
        for way in (FLAT, HIERARCHICAL)
    ]
    return [
        *rows,
        *throughput("3.9", model, times, nodes(study.scale), reference=FP32, thesis=thesis, where=where),
    ]
