"""Tables 3.6 and 3.7: CGX beside other ways of compressing, and beside what is ideal."""

from __future__ import annotations

from thinwire.repro import plots
from thinwire.repro.cgx.contest import Times
from thinwire.repro.cgx.judging import above
from thinwire.repro.cgx.models import Model
from thinwire.repro.cgx.study import Scale, Study
from thinwire.repro.cgx.throughput import chart, throughput
from thinwire.repro.cgx.ways import ALMOST_NOTHING_GAMMA, FP32, GRACE, NOTHING, THINWIRE, Way
from thinwire.repro.findings import Finding

IDEAL = Way("ideal", "almost nothing sent", "#888888", spec=f"truncate(gamma={ALMOST_NOTHING_GAMMA:g})")
_GRACE = Way("grace", "GRACE-style", "#c0392b", spec=GRACE, topology="allgather")
_SCALING, _CLOSE = 0.8, 0.85
"""Of linear scaling ("80-90 %", section 3.7.2), and of the ideal's speed, which is BERT's in table 3.7, the least."""

_THESIS = {
    "gpt": {"fp32": 170_000.0, "thinwire": 260_000.0, "torch powersgd": 220_000.0, "grace": 30_000.0},
    "cnn": {"fp32": 1900.0, "thinwire": 2900.0, "torch powersgd": 2600.0, "grace": 1000.0},
}
_THESIS_SHARE = {"gpt": {"ideal": 0.95, "thinwire": 0.87}, "cnn": {"ideal": 0.92, "thinwire": 0.90}}


def _powersgd(model: Model) -> tuple[Way, Way]:
    rank = model.powersgd_rank
    return (
        Way("torch powersgd", "PyTorch's PowerSGD", "#1f6fb2", kind="torch powersgd", rank=rank),
        Way("powersgd", "thinwire's PowerSGD", "#8250c4", spec=f"powersgd(rank={rank})"),
    )


def systems(model: Model) -> list[Way]:
    """Of table 3.6."""
    return [FP32, THINWIRE, *_powersgd(model), _GRACE, NOTHING]


def shares(scale: Scale) -> list[Way]:
    """Of table 3.7."""
    return [FP32, THINWIRE, IDEAL, NOTHING]


def table_3_6(study: Study) -> list[Finding]:
    """Throughput of thinwire's default, PowerSGD, a GRACE-style exchange and fp32."""
    found = {model.name: study.times(model, systems(model)) for model in study.scale.models}
    chart(study, "3.6", found, {model.name: systems(model) for model in study.scale.models})
    return [row for model in study.scale.models for row in _system_rows(study, model, found[model.name])]


def _system_rows(study: Study, model: Model, times: Times) -> list[Finding]:
    thesis, where = _THESIS[model.name], study.where(model)
    base = thesis["thinwire"]
    torch_powersgd, powersgd = _powersgd(model)
    rank = f"at rank {model.powersgd_rank}"
    ratio = {name: base / value for name, value in thesis.items()}
    claims = [
        (THINWIRE, FP32, f"4 bits are faster than the baseline ({ratio['fp32']:.1f}x, {model.thesis})"),
        (
            THINWIRE,
            torch_powersgd,
            f"4 bits are faster than PowerSGD {rank} ({ratio['torch powersgd']:.1f}x, {model.thesis})",
        ),
        (THINWIRE, powersgd, f"4 bits are faster than PowerSGD {rank}: against thinwire's own"),
        (THINWIRE, _GRACE, f"CGX is faster than GRACE ({ratio['grace']:.1f}x, {model.thesis})"),
        (
            FP32,
            _GRACE,
            f"GRACE is slower than the baseline ({thesis['fp32'] / thesis['grace']:.1f}x, {model.thesis})",
        ),
    ]
    rows = [
        Finding(
            "3.6",
            f"faster/{model.name}/{fast.name}/{slow.name}",
            times.times_faster(fast.name, slow.name),
            "x",
            f"{model.title}: {claim}",
            f"{times.times_faster(fast.name, slow.name):.2f}x {slow.title}'s throughput, {where}",
            study.verdict(above(times.over(fast.name, slow.name))),
        )
        for fast, slow, claim in claims
    ]
    return [
        *rows,
        *throughput("3.6", model, times, systems(model), reference=FP32, thesis=thesis, where=where),
    ]


def table_3_7(study: Study) -> list[Finding]:
    """Share of the speed without communication that is reached by thinwire, and by sending almost nothing."""
    found = {model.name: study.times(model, shares(study.scale)) for model in study.scale.models}
    _draw_3_7(study, found)
    return [row for model in study.scale.models for row in _share_rows(study, model, found[model.name])]


def _share_rows(study: Study, model: Model, times: Times) -> list[Finding]:
    thesis = _THESIS_SHARE[model.name]
    share = {way.name: times.times_faster(way.name, NOTHING.name) for way in shares(study.scale)}
    of_ideal = times.times_faster(THINWIRE.name, IDEAL.name)
    return [
        Finding(
            "3.7",
            f"share_of_linear/{model.name}",
            share["thinwire"],
            "",
            f"{model.title}: CGX reaches 80 to 90 % of linear scaling ({thesis['thinwire']:.0%}, {model.thesis})",
            f"{share['thinwire']:.0%}; fp32 {share['fp32']:.0%}, {study.where(model)}",
            study.verdict(above(times.over(THINWIRE.name, NOTHING.name), _SCALING)),
            {
                "shares": share,
                "thesis": thesis,
                "step_s": times.rounds,
                "payload_bytes": times.payload_bytes,
            },
        ),
        Finding(
            "3.7",
            f"share_of_ideal/{model.name}",
            of_ideal,
            "",
            f"{model.title}: CGX is close to the ideal ({thesis['thinwire']:.0%} of linear scaling against "
            f"{thesis['ideal']:.0%}, {model.thesis})",
            f"{share['thinwire']:.0%} of linear scaling against {share['ideal']:.0%} with almost nothing sent",
            study.verdict(above(times.over(THINWIRE.name, IDEAL.name), _CLOSE)),
        ),
    ]


def _draw_3_7(study: Study, found: dict[str, Times]) -> None:
    models = study.scale.models
    titles = [f"{model.title} {study.where(model)}" for model in models]
    figure, panels = plots.canvas(len(models), titles=titles, x="", y="share of the speed with nothing sent")
    for axes, model in zip(panels, models, strict=True):
        shown = [FP32, THINWIRE, IDEAL]
        share = [found[model.name].times_faster(way.name, NOTHING.name) for way in shown]
        plots.bars(axes, [(way.title, way.colour, value) for way, value in zip(shown, share, strict=True)])
        axes.axvline(1.0, color="#222222", linewidth=1, linestyle=":")
    plots.save(figure, study.picture("3.7"))
