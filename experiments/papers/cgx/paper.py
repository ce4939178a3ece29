"""The claims of the thesis's chapter on CGX, the parts that measure for them, and its command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from experiments.framework.claims import Claim, Rows, ratios, times_faster
from experiments.framework.methods import CGX, FP32, GRACE, NOTHING, THINWIRE, Method
from experiments.framework.paper import Paper, Part, command
from experiments.framework.timing import NUM_RANKS, RANKS_PER_NODE
from experiments.framework.verdicts import Judgment, all_hold, faster_in_runs, if_seen, larger, matches
from experiments.papers.cgx import measurements
from experiments.papers.cgx.measurements import (
    BLOB,
    FLAT,
    GRACE_STYLE,
    GROUP,
    IDEAL,
    METRICS,
    QUALITY_RANKS,
    RING,
    SHARED,
    SPECS,
    SRA,
    TREE,
    CGXScale,
    CGXStudy,
)
from experiments.tasks.images import TIMED, TIMED_SMOKE, TRAINED_SMOKE, Model
from thinwire_tools.compare.statistics import estimate

_NEAR = 0.88
"""Share of the ideal that the thesis's least ideal network reaches once bandwidth costs nothing (table 3.7)."""
_MOST_OF_IT = 0.5
_SCALING, _CLOSE = 0.8, 0.85
"""Of linear scaling ("80-90 %", section 3.7.2), and of the ideal's speed, which is BERT's in table 3.7, the least."""
_GPT = TIMED[0]
_WHOLE, _ORDER, _TWO_ORDERS, _LEAST = (measurements.truncated(gamma) for gamma in (1, 10, 100, measurements.GAMMAS[-1]))
_THESIS_QUALITY = {"gpt": "perplexity 22.9 against 22.8, Transformer-XL", "cnn": "75.9 % against 75.8 %, ResNet-50"}


def _row(model: Model, method: Method) -> str:
    return f"items_per_s/{model.name}/{method.name}"


def _faster(
    figure: str,
    row: str,
    model: Model,
    fast: Method,
    slow: Method,
    statement: str,
    *,
    bound: float = 1.0,
    over_link: bool = True,
    unit: str = "x",
) -> Claim:
    """``fast`` has more than ``bound`` times the throughput of ``slow``."""
    rows = {"fast": _row(model, fast), "slow": _row(model, slow)}

    def rule(measured: Rows) -> Judgment:
        return faster_in_runs(ratios(measured, **rows), bound)

    return Claim(figure, row, statement, rule, over_link, partial(times_faster, **rows), unit)


# --- figure 3.1: bandwidth


def _bandwidth(model: Model) -> Iterator[Claim]:
    whole, order, least, ideal = (_row(model, method) for method in (_WHOLE, _ORDER, _LEAST, NOTHING))

    def nears(rows: Rows) -> Judgment:
        # With everything sent it is below that share, so that the rest of the way is the bandwidth's.
        below = [1 / ratio for ratio in ratios(rows, whole, ideal)]
        return all_hold([faster_in_runs(ratios(rows, least, ideal), _NEAR), faster_in_runs(below, 1 / _NEAR)])

    def closed(rows: Rows) -> list[float]:
        """Of what sending next to nothing gains, the share that an order of magnitude does, by run."""
        seconds = (rows[name]["step_s"] for name in (whole, order, least))
        return [(slow - at) / (slow - fast) for slow, at, fast in zip(*seconds, strict=True)]

    def gained(rows: Rows) -> float:
        return sorted(closed(rows))[len(closed(rows)) // 2]

    yield Claim(
        "3.1",
        f"share_of_ideal/{model.name}",
        f"{model.title}: throughput nears the ideal as transmission shrinks, so bandwidth is the bottleneck",
        nears,
        over_link=True,
        value=partial(times_faster, fast=least, slow=ideal),
    )
    yield Claim(
        "3.1",
        f"gained_by_an_order/{model.name}",
        f"{model.title}: an order of magnitude is enough for most of it (section 3.3.1)",
        lambda rows: faster_in_runs(closed(rows), _MOST_OF_IT),
        over_link=True,
        value=gained,
    )
    if model is _GPT:
        yield _faster(
            "3.1",
            "gained_by_two_orders/gpt",
            model,
            _TWO_ORDERS,
            _ORDER,
            "transformers still benefit from up to two orders of magnitude (section 3.3.1)",
        )


# --- tables 3.4 and 3.6 and QNCCL: methods beside each other


def _thesis_ratio(timed: measurements.Timed, model: Model, fast: Method, slow: Method) -> float:
    thesis = timed.thesis[model.name]
    return thesis[fast.name] / thesis[slow.name]


def _schemes(model: Model) -> Iterator[Claim]:
    sra, others = _row(model, SRA), [_row(model, method) for method in (RING, TREE)]
    over_ring, over_tree, ring = (
        _thesis_ratio(measurements.TABLE_3_4, model, *pair) for pair in ((SRA, RING), (SRA, TREE), (RING, TREE))
    )

    yield Claim(
        "3.4",
        f"sra_fastest/{model.name}",
        f"{model.title}: SRA is faster than ring ({over_ring:.2f}x) and tree ({over_tree:.2f}x; {model.thesis})",
        lambda rows: all_hold(faster_in_runs(ratios(rows, sra, other)) for other in others),
        over_link=True,
        value=lambda rows: min(times_faster(rows, sra, other) for other in others),
        unit="x",
    )
    yield _faster(
        "3.4",
        f"ring_over_tree/{model.name}",
        model,
        RING,
        TREE,
        f"{model.title}: ring is faster than tree ({ring:.2f}x, {model.thesis})",
    )


def _error_ratios(rows: Rows, model: str, more: Method, less: Method) -> list[float]:
    errors = rows[f"error/{model}"]["by_step"]
    return [theirs / own for theirs, own in zip(errors[more.name], errors[less.name], strict=True)]


def _systems(model: Model) -> Iterator[Claim]:
    torch_powersgd, powersgd = measurements.torch_powersgd(model), measurements.powersgd(model)
    rank = f"at rank {model.powersgd_rank}"
    for fast, slow, statement in (
        (THINWIRE, FP32, "4 bits are faster than the baseline ({:.1f}x, {})"),
        (THINWIRE, torch_powersgd, f"4 bits are faster than PowerSGD {rank} ({{:.1f}}x, {{}})"),
        (THINWIRE, powersgd, f"4 bits are faster than PowerSGD {rank}: against thinwire's own"),
        (THINWIRE, GRACE_STYLE, "CGX is faster than GRACE ({:.1f}x, {})"),
        (FP32, GRACE_STYLE, "GRACE is slower than the baseline ({:.1f}x, {})"),
    ):
        ratio = _thesis_ratio(measurements.TABLE_3_6, model, fast, slow) if slow is not powersgd else 0.0
        said = f"{model.title}: {statement.format(ratio, model.thesis)}"
        yield _faster("3.6", f"faster/{model.name}/{fast.name}/{slow.name}", model, fast, slow, said)


def _shares(model: Model) -> Iterator[Claim]:
    thesis = measurements.THESIS_SHARE[model.name]

    for row, slow, bound, statement in (
        (
            "share_of_linear",
            NOTHING,
            _SCALING,
            f"CGX reaches 80 to 90 % of linear scaling ({thesis['thinwire']:.0%}, {model.thesis})",
        ),
        (
            "share_of_ideal",
            IDEAL,
            _CLOSE,
            f"CGX is close to the ideal ({thesis['thinwire']:.0%} of linear scaling against {thesis['ideal']:.0%}, "
            f"{model.thesis})",
        ),
    ):
        said = f"{model.title}: {statement}"
        yield _faster("3.7", f"{row}/{model.name}", model, THINWIRE, slow, said, bound=bound, unit="")


def _nodes(model: Model) -> Iterator[Claim]:
    wanted = _thesis_ratio(measurements.TABLE_3_9, model, FLAT, FP32)
    statement = (
        f"{model.title} on several nodes: CGX has {wanted:.1f}x the baseline's throughput ({model.thesis}; up to 10x)"
    )
    yield _faster("3.9", f"speedup/{model.name}/thinwire", model, FLAT, FP32, statement, bound=wanted)


def _qnccl(model: Model) -> Iterator[Claim]:
    name = model.name
    statement = f"{model.title}: compression without layers is faster than fp32, by a limited margin (section 3.7.2)"
    yield _faster("blob", f"blob_over_fp32/{name}", model, BLOB, FP32, statement)
    statement = f"{model.title}: CGX is faster than compression without layers (section 3.7.2)"
    yield _faster("blob", f"layers_over_blob/{name}", model, THINWIRE, BLOB, statement)
    yield Claim(
        "blob",
        f"error/{name}",
        f"{model.title}: without layers the error is higher (section 3.5.1)",
        lambda rows: larger(_error_ratios(rows, name, measurements.BLOB_1024, measurements.THINWIRE_1024)),
    )


# --- table 3.5: quality


def _quality(model: Model, spec: str) -> Claim:
    name, row = model.name, f"lost/{model.name}/{spec}"

    def rule(rows: Rows) -> Judgment:
        lost = estimate(measurements.lost_quality(name, rows[row]["own"], rows[row]["fp32"]))
        return if_seen(bool(rows[f"control/{name}"]["value"]), matches(lost, measurements.MARGIN))

    statement = f"{model.title}, {spec}: {METRICS[name]} within 1 % of fp32's ({_THESIS_QUALITY[name]})"
    return Claim("3.5", row, statement, rule)


# --- the paper

_EACH: tuple[Callable[[Model], Iterator[Claim]], ...] = (_bandwidth, _schemes, _systems, _shares, _nodes, _qnccl)

CLAIMS = (
    *(claim for make, model in product(_EACH, TIMED) for claim in make(model)),
    *(
        _faster(
            "3.3",
            f"shared_over_gloo/{model.name}",
            model,
            SHARED,
            GROUP,
            f"{model.title}: steps over shared memory are faster than over other backends, by up to 33 %",
            over_link=False,
        )
        for model in TIMED
    ),
    Claim(
        "3.4",
        "error/gpt",
        "SRA has the lowest compression error, for it compresses the fewest times (section 3.5.1)",
        lambda rows: all_hold(larger(_error_ratios(rows, "gpt", method, SRA)) for method in (RING, TREE)),
    ),
    *(_quality(model, spec) for model in TIMED for spec in SPECS[model.name]),
)


def _timed(title: str, timed: measurements.Timed) -> Part:
    return Part(title, partial(measurements.measure, timed))


PAPER = Paper(
    "cgx",
    "CGX, chapter 3 of the thesis, as found here",
    {
        "3.1": _timed("figure 3.1: bandwidth", measurements.FIGURE_3_1),
        "3.3": _timed("figure 3.3: transports", measurements.FIGURE_3_3),
        "3.4": _timed("table 3.4: reduction schemes", measurements.TABLE_3_4),
        "3.5": Part("table 3.5: quality", measurements.table_3_5),
        "3.6": _timed("table 3.6: systems", measurements.TABLE_3_6),
        "3.7": _timed("table 3.7: share of ideal", measurements.TABLE_3_7),
        "3.9": _timed("table 3.9: two nodes", measurements.TABLE_3_9),
        "blob": _timed("QNCCL: without layers", measurements.QNCCL),
    },
    CLAIMS,
    judged=(
        "A factor of the thesis is required only where links are calibrated to its multi-node baseline (3.9) and "
        "where it gives shares (3.1, 3.7); elsewhere, any speed-up is enough. At most 1 % of perplexity or accuracy "
        "may be lost."
    ),
    differs=(
        f"{NUM_RANKS} ranks are processes on this machine, on emulated links or in its memory, instead of 8 GPUs on a "
        "PCIe bus: linear scaling is the speed of the same ranks with nothing sent",
        "computation is [replayed](docs/results.md#how-steps-are-timed)",
        "a byte-level GPT stands for Transformer-XL, a small residual network for ResNet-50; gradients are fp32",
        "rates of links are chosen at the start so that fp32 reaches the share of linear scaling that it has in the "
        "thesis",
        f"CGX is thinwire's default, {CGX}, layer by layer, biases and norms raw; the baseline is DDP over gloo, not "
        "NCCL",
        f"GRACE-style is {GRACE} by all-gather, which is what the thesis says that GRACE sends (section 3.7.2): the "
        "library itself was not run",
        "QNCCL is thinwire's process group over gloo, without the shapes of the layers in DDP's buckets",
        f"several nodes are {NUM_RANKS // RANKS_PER_NODE} of {RANKS_PER_NODE} ranks, without a limit inside; the "
        "thesis has 4 of 4, with 10 Gbit/s inside and 5 Gbit/s between",
        f"quality is that of {QUALITY_RANKS} ranks and short trainings",
    ),
    scale=CGXScale(),
    smoke=CGXScale(
        models=TIMED_SMOKE,
        trained=TRAINED_SMOKE,
        gammas=(1, 10, 100, 400),
        runs=1,
        rounds=1,
        steps_a_turn=1,
        error_steps=2,
        seeds=1,
        rate="100mbit",
    ),
    study=CGXStudy,
    source="thesis",
)

cgx = command(
    PAPER,
    """Repeat chapter 3 (CGX) of Markov's thesis on this machine, claim by claim.

    A small GPT and a small residual network train on four ranks that slow links join. Each figure and table becomes an
    SVG, and each of the thesis's claims a row: what it says, what was found here, and whether it holds, also where it
    does not. Takes about a quarter of an hour on two cores.""",
)
