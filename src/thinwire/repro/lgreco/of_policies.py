"""Tables 3.8, 4.4 and 4.5 with figures 3.7, 3.8 and 4.5a: L-GreCo beside other policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from thinwire.plan import parse_policy
from thinwire.repro import plots
from thinwire.repro.findings import Finding
from thinwire.repro.lgreco import methods
from thinwire.repro.lgreco.gradients import Chosen, choose
from thinwire.repro.lgreco.judged import bytes_from, first_plan, kept_within, lost
from thinwire.repro.lgreco.methods import BITS, POWERSGD, RANK, TOPK, with_policy
from thinwire.repro.lgreco.study import TITLES, Scale, Study, Training, Work
from thinwire.repro.lgreco.tasks import Name
from thinwire.repro.report import Run

UNIFORM = "uniform"
FP32 = "fp32"
THRESHOLD = 0.05
"""λ of Rethink-GS, tuned by hand, as its authors do, until it sends about what L-GreCo does and training survives."""
GLOBAL_DENSITY = 0.0025
"""Of the global top-k (section 4.6.3)."""
_WEAK_DENSITY, _STRONG_DENSITY = 0.02, 0.001
_STABLE = 0.1
_COLOURS = ("#555555", "#0a7d4f", "#c0392b", "#d98a00", "#1f6fb2", "#8250c4", "#888888", "#e377c2")


@dataclass(frozen=True)
class Method:
    """A row of a table: a variant, and what the thesis's table says of it, relative to uniform compression."""

    name: str
    title: str
    variant: str | None
    thesis: float | None = None


def of_bits(scale: Scale) -> list[Method]:
    """Table 3.8: all with four bits for reference."""
    every, spec = scale.every("gpt"), BITS.spec("gpt")
    policies = {
        "kmeans": ("k-means", methods.kmeans(every), 1.47),
        "bayes": ("Bayes", methods.bayes(every), 1.34),
        "linear": ("Linear", methods.linear(every), 1.15),
        "accordion": ("Accordion", methods.accordion(every, spec, spec.replace("bits=4", "bits=3")), 1.21),
        "lgreco": ("L-GreCo", methods.lgreco(every), None),
    }
    rows = [Method(name, title, with_policy(spec, text), theirs) for name, (title, text, theirs) in policies.items()]
    return [Method(UNIFORM, "uniform", spec, 1.0), *rows]


def of_ranks(scale: Scale) -> list[Method]:
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


def of_densities(scale: Scale) -> list[Method]:
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


def of_hybrid(scale: Scale) -> list[Method]:
    """One plan of several families, within the error of uniform top-k."""
    every, spec = scale.every("gpt"), TOPK.spec("gpt")
    return [
        Method(UNIFORM, "uniform top-k", spec),
        Method("lgreco", "L-GreCo, top-k", TOPK.adapted("gpt", every)),
        Method("hybrid", "L-GreCo, any family", with_policy(spec, methods.hybrid(every, "gpt"))),
    ]


def work(scale: Scale) -> Work:
    """Trainings of the GPT from one seed, of the CNN from all."""
    of_gpt = [method.variant for rows in (of_bits(scale), of_ranks(scale), of_hybrid(scale)) for method in rows]
    of_cnn = [method.variant for method in of_densities(scale)]
    trained: set[Training] = {("gpt", variant, 0) for variant in (None, *of_gpt)}
    trained |= {("cnn", variant, seed) for variant in (None, *of_cnn) for seed in range(scale.seeds)}
    return Work(frozenset(trained), frozenset({"gpt"}))


def policies(study: Study) -> list[Finding]:
    """Trainings under every policy, on the GPT from one seed; and what policies choose on the same gradients."""
    scale = study.scale
    bits = _trained(study, "gpt", of_bits(scale), range(1))
    ranks = _trained(study, "gpt", of_ranks(scale), range(1))
    mixed = _trained(study, "gpt", of_hybrid(scale), range(1))
    densities = _trained(study, "cnn", of_densities(scale), study.seeds)
    chosen = choices(study)
    _draw_3_7(study, of_bits(scale), bits)
    _draw_3_8(study, chosen)
    _draw_4_5a(study, of_ranks(scale), ranks)
    return [
        *_asides("table 3.8", "gpt", of_bits(scale), bits, scale.margin),
        *bits_claims(bits, chosen),
        *_asides("table 4.5", "gpt", of_ranks(scale), ranks, scale.margin),
        *ranks_claims(ranks),
        *_asides("table 4.4", "cnn", of_densities(scale), densities, scale.margin),
        *densities_claims(densities, scale.margin),
        *_asides("future work", "gpt", of_hybrid(scale), mixed, scale.margin),
        _within([*bits.values(), *ranks.values(), *mixed.values()]),
    ]


Runs = dict[str, list[Run]]


def _trained(study: Study, name: Name, rows: Sequence[Method], seeds: Sequence[int]) -> Runs:
    found: Runs = {method.name: [] for method in (Method(FP32, "fp32", None), *rows)}
    for seed in seeds:
        for method in (Method(FP32, "fp32", None), *rows):
            found[method.name].append(study.train(name, method.variant, seed))
    return found


def choices(study: Study) -> dict[str, list[Chosen]]:
    """What each policy of table 3.8 makes of the same gradients."""
    snapshots, spec = study.snapshots("gpt"), BITS.spec("gpt")
    found = {}
    for method in of_bits(study.scale):
        if method.variant is not None and " with " in method.variant:
            found[method.name] = choose(parse_policy(method.variant.partition(" with ")[2]), spec, snapshots)
    return found


def ratio(found: Runs, name: str, reference: str = UNIFORM) -> float:
    """How many times fewer bytes than ``reference`` are sent, as measured, once plans are chosen."""
    step = max(first_plan(found[name]), first_plan(found[reference]))
    pairs = zip(found[name], found[reference], strict=True)
    return fmean(bytes_from(other, step) / bytes_from(run, step) for run, other in pairs)


def _asides(figure: str, name: Name, rows: Sequence[Method], found: Runs, margin: float) -> list[Finding]:
    """A row for each method: bytes relative to uniform, beside the thesis's, and quality."""
    shown = []
    for method in rows:
        told = lost(found[method.name], found[FP32], margin)
        times = ratio(found, method.name)
        theirs = "" if method.thesis is None else f" (thesis {method.thesis:.2f}x)"
        shown.append(
            Finding(
                figure,
                f"ratio/{name}/{method.name}",
                times,
                "x",
                "",
                f"{times:.2f}x{theirs}; {told.text}",
                None,
                {
                    "variant": method.variant,
                    "thesis": method.thesis,
                    "title": method.title,
                    "lost": told.estimate.mean,
                    "plans": [run.plans for run in found[method.name]],
                    "probe_steps": found[method.name][0].probe_steps,
                    "probe_losses": [run.losses for run in found[method.name]],
                },
                aside=f"{TITLES[name]}, {method.title}: compression relative to uniform",
            )
        )
    return shown


def bits_claims(found: Runs, chosen: dict[str, list[Chosen]]) -> list[Finding]:
    """Of table 3.8 and figure 3.8."""
    times = {name: ratio(found, name) for name in found if name != FP32}
    others = {name: value for name, value in times.items() if name in ("bayes", "linear", "accordion")}
    error = {name: fmean(at.relative_error for at in rows) for name, rows in chosen.items()}
    saved = {name: fmean(at.gain for at in rows) for name, rows in chosen.items()}
    rest = {name: value for name, value in error.items() if name not in ("kmeans", "lgreco")}
    curves = {
        name: {
            "steps": [a.step for a in rows],
            "error": [a.relative_error for a in rows],
            "gain": [a.gain for a in rows],
        }
        for name, rows in chosen.items()
    }
    return [
        Finding(
            "table 3.8",
            "kmeans_compresses_most",
            times["kmeans"],
            "x",
            "k-means compresses more than Bayes, Linear and Accordion (1.47x against 1.34x, 1.15x and 1.21x)",
            f"k-means {times['kmeans']:.2f}x, " + _listed(others),
            times["kmeans"] >= max(others.values()),
        ),
        Finding(
            "figure 3.8a",
            "kmeans_errs_least",
            error["kmeans"],
            "",
            "k-means has the lowest compression error of the policies of chapter 3 (section 3.7.3)",
            f"on the same gradients, for uniform's: k-means {error['kmeans']:.3f}, " + _listed(rest, 3),
            error["kmeans"] <= min(rest.values()),
            {"curves": curves},
        ),
        Finding(
            "figure 3.8b",
            "lgreco_compresses_most",
            saved["lgreco"],
            "x",
            "L-GreCo compresses more than k-means, within the same error (section 4.6.3: up to 33 %)",
            f"on the same gradients L-GreCo {saved['lgreco']:.2f}x, "
            + _listed({name: value for name, value in saved.items() if name != "lgreco"}),
            saved["lgreco"] >= saved["kmeans"],
        ),
    ]


def ranks_claims(found: Runs) -> list[Finding]:
    """Of table 4.5."""
    times = {name: ratio(found, name) for name in found if name != FP32}
    return [
        Finding(
            "table 4.5",
            "lgreco_over_kmeans",
            times["lgreco"] / times["kmeans"],
            "x",
            "L-GreCo compresses more than k-means (23.5x against 21.6x)",
            f"{times['lgreco']:.2f}x uniform's ratio against {times['kmeans']:.2f}x",
            times["lgreco"] > times["kmeans"],
        ),
        Finding(
            "table 4.5",
            "lgreco_accordion_most",
            times["both"],
            "x",
            "L-GreCo + Accordion compresses more than either (36.9x against 23.5x and 23.9x)",
            f"{times['both']:.2f}x uniform's ratio, " + _listed({k: times[k] for k in ("lgreco", "accordion")}),
            times["both"] > max(times["lgreco"], times["accordion"]),
        ),
        _stable([plan["reference_wire_bytes"] / plan["wire_bytes"] for run in found["lgreco"] for plan in run.plans]),
    ]


def _stable(gains: Sequence[float]) -> Finding:
    """How much the ratios of L-GreCo's plans differ from each other."""
    variation = pstdev(gains) / fmean(gains) if gains else float("nan")
    return Finding(
        "figure 4.5a",
        "lgreco_is_stable",
        variation,
        "",
        "the ratio that L-GreCo finds is relatively stable: it needs no frequent re-adjustment (section 4.6.1)",
        f"over {len(gains)} decisions it varies by {variation:.1%} of its mean (standard deviation)",
        variation <= _STABLE if len(gains) > 1 else None,
        {"gains": list(gains)},
    )


def densities_claims(found: Runs, margin: float) -> list[Finding]:
    """Of table 4.4: L-GreCo beside Rethink-GS and Accordion, by bytes and by quality."""
    times = {name: ratio(found, name) for name in found if name != FP32}
    rows = []
    for name, title in (("threshold", "Rethink-GS (5.7x)"), ("accordion", "Accordion (3.5x)")):
        rows.append(
            Finding(
                "table 4.4",
                f"lgreco_over_{name}",
                times["lgreco"] / times[name],
                "x",
                f"L-GreCo (6.7x) compresses more than {title}, relative to 2 %",
                f"{times['lgreco']:.2f}x against {times[name]:.2f}x",
                times["lgreco"] > times[name],
            )
        )
    told = lost(found["lgreco"], found["threshold"], margin)
    return [
        *rows,
        Finding(
            "table 4.4",
            "lgreco_no_worse_than_threshold",
            told.estimate.mean,
            "",
            "L-GreCo ends at no worse an accuracy than Rethink-GS (71.7 against 71.4 %)",
            told.text,
            told.within,
        ),
    ]


def _within(runs: Sequence[Sequence[Run]]) -> Finding:
    known, kept, largest = kept_within([run for side in runs for run in side])
    return Finding(
        "section 4.4",
        "error_within_reference/policies",
        largest,
        "",
        "every policy that takes errors keeps within its reference's",
        f"in {kept} of {known} decisions; the largest error is {largest:.2%} of the reference's",
        kept == known if known else None,
    )


def _listed(values: dict[str, float], digits: int = 2) -> str:
    return ", ".join(f"{name} {value:.{digits}f}{'x' if digits == 2 else ''}" for name, value in values.items())


def _draw_3_7(study: Study, rows: Sequence[Method], found: Runs) -> None:
    titles = ["GPT, against steps", "against what is sent"]
    figure, panels = plots.canvas(2, titles=titles, x="step", y="held-out loss (nats a word)")
    panels[1].set(xlabel="MB sent by a rank")
    for colour, method in zip(_COLOURS, rows, strict=False):
        run = found[method.name][0]
        panels[0].plot(run.probe_steps, run.losses[1:], color=colour, label=method.title)
        panels[1].plot([sent / 1e6 for sent in run.payload_bytes[1:]], run.losses[1:], color=colour)
    plots.save(figure, study.picture("3.7"))


def _draw_3_8(study: Study, chosen: dict[str, list[Chosen]]) -> None:
    titles = ["(a) compression error", "(b) compression ratio"]
    figure, panels = plots.canvas(2, titles=titles, x="step", y="relative to uniform 4 bits")
    for colour, (name, rows) in zip(_COLOURS[1:], chosen.items(), strict=False):
        steps = [at.step for at in rows]
        panels[0].plot(steps, [at.relative_error for at in rows], color=colour, marker="o", label=name)
        panels[1].plot(steps, [at.gain for at in rows], color=colour, marker="o", label=name)
    plots.save(figure, study.picture("3.8"))


def _draw_4_5a(study: Study, rows: Sequence[Method], found: Runs) -> None:
    figure, (axes,) = plots.canvas(1, titles=["PowerSGD, GPT"], x="step", y="ratio to uniform")
    for colour, method in zip(_COLOURS, rows, strict=False):
        plans = found[method.name][0].plans
        if plans:
            gain = [plan["reference_wire_bytes"] / plan["wire_bytes"] for plan in plans]
            axes.plot([plan["step"] for plan in plans], gain, color=colour, marker="o", label=method.title)
    axes.axhline(1.0, color="#888888", linewidth=1, linestyle=":")
    plots.save(figure, study.picture("4.5a"))
