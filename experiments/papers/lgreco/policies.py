"""Tables 3.8, 4.4 and 4.5 with figures 3.7, 3.8 and 4.5a: L-GreCo beside other policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.framework.claims import Row
from experiments.papers.lgreco import methods
from experiments.papers.lgreco.gradients import Chosen, choose
from experiments.papers.lgreco.judging import gains, lost
from experiments.papers.lgreco.methods import BITS, POWERSGD, RANK, TOPK, with_policy
from experiments.papers.lgreco.quality import plan_gains
from experiments.papers.lgreco.study import LGrecoScale, LGrecoStudy
from experiments.papers.lgreco.tasks import Name
from experiments.policies.baselines import Bayes, Linear
from thinwire.policies import parse_policy
from thinwire_tools import plots
from thinwire_tools.compare.comparison import Run

UNIFORM = "uniform"
FP32 = "fp32"
THRESHOLD = 0.05
"""λ of Rethink-GS, tuned by hand, as its authors do, until it sends about what L-GreCo does and training survives."""
GLOBAL_DENSITY = 0.0025
"""Of the global top-k (section 4.6.3)."""
_WEAK_DENSITY, _STRONG_DENSITY = 0.02, 0.001
_CHOOSING = {"bayes": Bayes(), "linear": Linear()}
"""Policies of table 3.8 that choose on snapshots, and that nothing is trained by."""
_COLORS = ("#555555", "#0a7d4f", "#c0392b", "#d98a00", "#1f6fb2", "#8250c4", "#888888", "#e377c2")


@dataclass(frozen=True)
class Method:
    """A row of a table: a variant, and what the thesis's table says of it, relative to uniform compression."""

    name: str
    title: str
    variant: str | None
    thesis: float | None = None


def bit_methods(scale: LGrecoScale) -> list[Method]:
    """Table 3.8: all with four bits for reference."""
    every, spec = scale.every("gpt"), BITS.spec("gpt")
    policies = {
        "kmeans": ("k-means", methods.kmeans(every), 1.47),
        "accordion": ("Accordion", methods.accordion(every, spec, spec.replace("bits=4", "bits=3")), 1.21),
        "lgreco": ("L-GreCo", methods.lgreco(every), None),
    }
    rows = [Method(name, title, with_policy(spec, text), theirs) for name, (title, text, theirs) in policies.items()]
    return [Method(UNIFORM, "uniform", spec, 1.0), *rows]


def rank_methods(scale: LGrecoScale) -> list[Method]:
    """Table 4.5: PowerSGD; as there Accordion has half of uniform's rank and twice it, L-GreCo a quarter of it to twice
    it, with Accordion to four times."""
    every, spec, rank = scale.every("gpt"), POWERSGD.spec("gpt"), RANK
    wide, wider = f"bounds=({rank // 4}, {2 * rank})", f"bounds=({rank // 4}, {4 * rank})"
    critical = methods.accordion(every, f"powersgd(rank={2 * rank})", f"powersgd(rank={rank // 2})")
    policies = {
        "lgreco": ("L-GreCo", methods.lgreco(every, wide), 23.5 / 14.1),
        "accordion": ("Accordion", critical, 23.9 / 14.1),
        "kmeans": ("k-means", methods.kmeans(every, wide), 21.6 / 14.1),
        "both": ("L-GreCo + Accordion", methods.lgreco(every, f"reference={critical}, {wider}"), 36.9 / 14.1),
    }
    rows = [Method(name, title, with_policy(spec, text), theirs) for name, (title, text, theirs) in policies.items()]
    return [Method(UNIFORM, "uniform", spec, 1.0), *rows]


def density_methods(scale: LGrecoScale) -> list[Method]:
    """Table 4.4: top-k on the CNN. Ratios there are relative to a density of 2 %."""
    every = scale.every("cnn")
    weak, strong = f"topk(density={_WEAK_DENSITY})", f"topk(density={_STRONG_DENSITY})"
    return [
        Method(UNIFORM, "uniform, 2 %", weak, 1.0),
        Method("strong", "uniform, 0.1 %", strong, 20.0),
        Method("accordion", "Accordion", with_policy(weak, methods.accordion(every, weak, strong)), 3.5),
        Method("threshold", "Rethink-GS", f"threshold(lam={THRESHOLD})", 5.7),
        Method("global", "global top-k", f"globaltopk(density={GLOBAL_DENSITY})"),
        Method("lgreco", "L-GreCo", TOPK.adapted("cnn", every), 6.7),
    ]


def hybrid_methods(scale: LGrecoScale) -> list[Method]:
    """One plan of several families, within the error of uniform top-k."""
    every, spec = scale.every("gpt"), TOPK.spec("gpt")
    return [
        Method(UNIFORM, "uniform top-k", spec),
        Method("lgreco", "L-GreCo, top-k", TOPK.adapted("gpt", every)),
        Method("hybrid", "L-GreCo, any family", with_policy(spec, methods.hybrid(every, "gpt"))),
    ]


TABLES: dict[str, tuple[Name, Callable[[LGrecoScale], list[Method]]]] = {
    "table 3.8": ("gpt", bit_methods),
    "table 4.5": ("gpt", rank_methods),
    "table 4.4": ("cnn", density_methods),
    "future work": ("gpt", hybrid_methods),
}
"""The network that each is of, and its rows."""

Runs = dict[str, list[Run]]


def seeds(scale: LGrecoScale, name: Name) -> range:
    """The GPT is trained from one seed, the CNN from all."""
    return range(1 if name == "gpt" else scale.seeds)


def steps(scale: LGrecoScale) -> int:
    """Of all trainings, and of the snapshots'."""
    runs = sum(
        scale.task(name).steps * len(seeds(scale, name)) * (1 + len(rows(scale))) for name, rows in TABLES.values()
    )
    return runs + scale.gpt.steps


def policies(study: LGrecoStudy) -> list[Row]:
    """Trainings under every policy, and what policies choose on the same gradients."""
    scale, trained = study.scale, {}
    for figure, (name, rows) in TABLES.items():
        variants = {FP32: None} | {method.name: method.variant for method in rows(scale)}
        trained[figure] = {
            key: [study.train(name, variant, seed) for seed in seeds(scale, name)] for key, variant in variants.items()
        }
    chosen = choices(study)
    curves = {
        name: {
            "steps": [at.step for at in rows],
            "error": [at.relative_error for at in rows],
            "gain": [at.gain for at in rows],
        }
        for name, rows in chosen.items()
    }
    _draw_3_7(study, bit_methods(scale), trained["table 3.8"])
    _draw_3_8(study, curves)
    _draw_4_5a(study, rank_methods(scale), trained["table 4.5"])
    made = []
    for figure, (name, rows) in TABLES.items():
        made += [ratio_row(figure, name, method, trained[figure], scale.margin) for method in rows(scale)]
    error, saved = ({name: fmean(curve[key]) for name, curve in curves.items()} for key in ("error", "gain"))
    densities = trained["table 4.4"]
    beside = lost(densities["lgreco"], densities["threshold"], scale.margin)
    return [
        *made,
        Row("figure 3.8a", "kmeans_errs_least", error["kmeans"], "", {"mean": error, "curves": curves}),
        Row("figure 3.8b", "lgreco_compresses_most", saved["lgreco"], "x", {"mean": saved}),
        Row("table 4.4", "lgreco_no_worse_than_threshold", beside["lost"], "", beside),
    ]


def choices(study: LGrecoStudy) -> dict[str, list[Chosen]]:
    """What each policy of table 3.8 makes of the same gradients."""
    snapshots, spec = study.snapshots("gpt"), BITS.spec("gpt")
    by_method = {}
    for method in bit_methods(study.scale):
        if method.variant is not None and " with " in method.variant:
            by_method[method.name] = choose(parse_policy(method.variant.partition(" with ")[2]), spec, snapshots)
    return by_method | {name: choose(policy, spec, snapshots) for name, policy in _CHOOSING.items()}


def ratio_row(figure: str, name: Name, method: Method, trained: Runs, margin: float) -> Row:
    """How many times fewer bytes than uniform's a method sends, as measured once plans are chosen, and its quality."""
    data = {
        "variant": method.variant,
        "thesis": method.thesis,
        "title": method.title,
        **lost(trained[method.name], trained[FP32], margin),
        "plans": [run.plans for run in trained[method.name]],
        "probe_steps": trained[method.name][0].probe_steps,
        "probe_losses": [run.losses for run in trained[method.name]],
    }
    return Row(figure, f"ratio/{name}/{method.name}", fmean(gains(trained[method.name], trained[UNIFORM])), "x", data)


def _draw_3_7(study: LGrecoStudy, rows: Sequence[Method], trained: Runs) -> None:
    titles = ["GPT, against steps", "against what is sent"]
    figure, panels = plots.canvas(2, titles=titles, x="step", y="held-out loss (nats a word)")
    panels[1].set(xlabel="MB sent by a rank")
    for color, method in zip(_COLORS, rows, strict=False):
        run = trained[method.name][0]
        panels[0].plot(run.probe_steps, run.losses[1:], color=color, label=method.title)
        panels[1].plot([sent / 1e6 for sent in run.payload_bytes[1:]], run.losses[1:], color=color)
    plots.save(figure, study.picture("3.7"))


def _draw_3_8(study: LGrecoStudy, curves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    titles = ["(a) compression error of each policy's plan", "(b) compression ratio of each policy's plan"]
    y = ["error, relative to 4 bits for every layer", "times fewer bytes than 4 bits for every layer"]
    figure, panels = plots.canvas(2, titles=titles, x="step of the training", y=y)
    named = {method.name: method.title for method in bit_methods(study.scale)} | {n: n.title() for n in _CHOOSING}
    for color, (name, curve) in zip(_COLORS[1:], curves.items(), strict=False):
        panels[0].plot(curve["steps"], curve["error"], color=color, marker="o", label=named[name])
        panels[1].plot(curve["steps"], curve["gain"], color=color, marker="o")
    plots.save(figure, study.picture("3.8"))


def _draw_4_5a(study: LGrecoStudy, rows: Sequence[Method], trained: Runs) -> None:
    figure, (axes,) = plots.canvas(1, titles=["PowerSGD, GPT"], x="step", y="ratio to uniform")
    for color, method in zip(_COLORS, rows, strict=False):
        plans = trained[method.name][0].plans
        if plans:
            axes.plot([plan["step"] for plan in plans], plan_gains(plans), color=color, marker="o", label=method.title)
    axes.axhline(1.0, color="#888888", linewidth=1, linestyle=":")
    plots.save(figure, study.picture("4.5a"))
