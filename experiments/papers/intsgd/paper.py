"""The IntSGD paper's claims, the parts that measure for them, and its command."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

from experiments.framework.claims import Claim, Rows, Rule, estimated
from experiments.framework.methods import Method
from experiments.framework.paper import Paper, Part, command
from experiments.framework.study import Scale, Study
from experiments.framework.training import Trained
from experiments.framework.verdicts import Judgment, all_hold, counted, exceeds, faster_in_runs, matches, unsound
from experiments.papers.intsgd import convex, datasets, networks
from experiments.papers.intsgd.convex import Source
from experiments.papers.intsgd.networks import (
    DEFAULT,
    DETERM,
    HEURISTIC,
    HEURISTIC_32,
    NATSGD,
    NETWORKS,
    ONE_SCALE,
    POWERSGD,
    QSGD,
    RANDOM,
    RANDOM_32,
    SGD,
    SGD_GATHERED,
    TABLES,
    Network,
)
from experiments.papers.rates import untuned
from experiments.tasks.words import LanguageTask, Pictures
from thinwire_tools.compare.data import standard_library
from thinwire_tools.compare.statistics import Estimate


@dataclass(frozen=True, kw_only=True)
class IntSGDScale(Scale):
    """``sources`` are minimized in part (a), ``pictures`` and ``words`` trained in (b) and (c). What is timed is larger
    than what is trained, so that its bytes outweigh a link's delays: ``runs`` separate runs of ``rounds`` turns of
    ``turn_steps`` replayed steps of every method. ``betas`` and ``epss`` are beside the default ones. ``data``:
    CIFAR-10's folder, or a LibSVM file."""

    rate: str | None = "200mbit"
    data: str | None = None
    sources: tuple[Source, ...] = convex.SOURCES
    pictures: Pictures = field(
        default_factory=lambda: Pictures(steps=160, batch=8, learning_rate=0.2, warm_up=40, probe_every=16, noise=1.0)
    )
    words: LanguageTask = field(default_factory=lambda: LanguageTask(clip_each_rank=True, learning_rate=8.0))
    timed_pictures: Pictures = field(default_factory=lambda: Pictures(width=64, batch=4))
    timed_words: LanguageTask = field(default_factory=lambda: LanguageTask(words=4096, width=192, batch=1))
    num_ranks: int = 4
    runs: int = 5
    rounds: int = 3
    turn_steps: int = 2
    betas: tuple[float, ...] = (0.0, 0.5, 0.99)
    epss: tuple[float, ...] = (1e-4, 1e-6)

    def adapted(self, **options: Any) -> Self:
        made = super().adapted(**options)
        if made.data is None:
            return made
        path = Path(made.data)
        if path.is_file():
            datasets.libsvm(path)
            return replace(made, sources=(*made.sources, convex.file_source(path, made.sources)))
        tasks = {name: replace(getattr(made, name), data=made.data) for name in ("pictures", "timed_pictures")}
        return replace(made, **tasks)

    def about(self) -> dict[str, Any]:
        standard_library()
        return {"images": self.pictures.images.name}


SMOKE = IntSGDScale(
    sources=convex.SMOKE_SOURCES,
    pictures=Pictures(width=8, steps=6, batch=4, warm_up=2, probe_every=3, probe_images=40),
    words=LanguageTask(
        words=64, width=16, context=8, steps=6, warm_up=2, probe_every=3, held_out_windows=32, probe_windows=16
    ),
    timed_pictures=Pictures(width=8, batch=4),
    timed_words=LanguageTask(words=64, width=16, context=8, batch=1),
    num_ranks=2,
    seeds=1,
    runs=1,
    rounds=1,
    turn_steps=1,
    betas=(0.0,),
    epss=(1e-4,),
)


@dataclass
class IntSGDStudy(Study[IntSGDScale]):
    """``datasets``: what is known of those that part (a) has minimized."""

    datasets: dict[str, Any] = field(default_factory=dict)

    def train(self, network: Network, method: Method, seed: int) -> Trained:
        """Over loopback."""
        task = self.scale.pictures if network == "pictures" else self.scale.words
        return self.train_task(task, method, seed, num_ranks=self.scale.num_ranks)

    def about(self) -> dict[str, Any]:
        return {"datasets": self.datasets}


# --- part (a): what holds does so on every data set

_FEW_BITS, _BLOWN_UP, _LINEAR = 3.0, 10.0, 0.99
_AS_FAST = 1.5
"""Theorem 4's rate is full precision's up to a constant."""


def _all(holds: Callable[[Rows, str], bool]) -> Rule:
    def rule(rows: Rows) -> Judgment:
        found = [holds(rows, name) for name in convex.gone_over(rows)]
        return counted(all(found), f"on {sum(found)} of {len(found)} data sets")

    return rule


def _most(value: Callable[[Rows, str], float]) -> Callable[[Rows], float]:
    return lambda rows: max(value(rows, name) for name in convex.gone_over(rows))


def _by_dataset(row: str, key: str = "by_dataset") -> Callable[[Rows, str], float]:
    # JSON keeps infinity, a gap that was never reached, as null.
    return lambda rows, name: math.inf if rows[row][key][name] is None else rows[row][key][name]


def _blown_up(rows: Rows, name: str) -> bool:
    first, last, other = convex.growth(rows, name)
    return last >= _BLOWN_UP * max(1.0, other) and last > max(1.0, first)


def _fewer_gradients(rows: Rows, name: str) -> float:
    own, other, _ = convex.gradients_taken(rows, name)
    return own / other


def _as_fast(method: str) -> Rule:
    steps = _by_dataset(f"steps/{method}")
    return _all(lambda rows, name: steps(rows, name) <= _AS_FAST and convex.straightness(rows, name, method) >= _LINEAR)


def _claims_of_a() -> Iterator[Claim]:
    bits, bound = _by_dataset("bits/intdiana"), _by_dataset("bound/intdiana", "bound")
    yield Claim(
        "6",
        "bits/intdiana",
        f"IntDIANA needs fewer than {_FEW_BITS:.0f} bits per coordinate (C.5)",
        _all(lambda rows, name: bits(rows, name) < _FEW_BITS),
    )
    yield Claim(
        "6",
        "largest/intgd",
        "IntGD's integers grow very large as it converges; IntDIANA's do not (C.5, A.2)",
        _all(_blown_up),
        value=_most(lambda rows, name: convex.growth(rows, name)[1]),
    )
    for method, title, twin in (("intdiana", "IntDIANA", "GD"), ("vr-intdiana", "VR-IntDIANA", "L-SVRG")):
        statement = f"{title} converges linearly, like {twin} in full precision (theorem 4)"
        yield Claim("6", f"steps/{method}", statement, _as_fast(method))
    yield Claim(
        "6",
        "gradients/vr-intdiana",
        "VR-IntDIANA takes fewer gradient evaluations than IntDIANA (C.5)",
        _all(lambda rows, name: _fewer_gradients(rows, name) < 1),
        value=_most(_fewer_gradients),
        unit="x",
    )
    yield Claim(
        "6",
        "bound/intdiana",
        "1 + log2 √(d/2n) bits per coordinate are enough for IntDIANA, on average over its steps (4.2)",
        _all(lambda rows, name: bits(rows, name) <= bound(rows, name)),
    )


# --- part (b): quality

_QUALITY: dict[Network, tuple[tuple[Method, bool, float | None, str], ...]] = {
    "pictures": (
        (RANDOM, True, None, "94.55 against 94.67 %, table 2"),
        (RANDOM_32, True, None, "figure 1"),
        (ONE_SCALE, True, None, "94.55 against 94.67 %, table 2"),
        (DETERM, True, None, "94.43 against 94.67 %, table 2"),
        (HEURISTIC, False, None, "figure 1, section 5.2"),
        (HEURISTIC_32, False, None, "figure 1, section 5.2"),
        (QSGD, False, 0.0098, "93.69 against 94.67 %, table 2"),
        (NATSGD, True, None, "94.57 against 94.67 %, table 2"),
        (POWERSGD, False, 0.0034, "94.33 against 94.67 %, table 2"),
    ),
    "words": (
        (RANDOM, True, None, "4.54 against 4.54, table 3"),
        (RANDOM_32, True, None, "figure 1"),
        (ONE_SCALE, True, None, "4.54 against 4.54, table 3"),
        (DETERM, False, 0.16, "4.70 against 4.54, table 3"),
        (HEURISTIC, False, None, "figure 1, section 5.2"),
        (HEURISTIC_32, False, None, "figure 1, section 5.2"),
        (QSGD, False, 0.09, "4.63 against 4.54, table 3"),
        (NATSGD, True, None, "4.52 against 4.54, table 3"),
        (POWERSGD, True, None, "4.52 against 4.54, table 3"),
    ),
}
"""Whether a method matches SGD's quality, by how much it falls short in the paper, and the paper's figures."""
_LOST = {
    network: min(effect for _, _, effect, _ in methods if effect and effect > 0.005)
    for network, methods in _QUALITY.items()
}
"""What QSGD loses in the paper: those that match SGD may lose half of it, and those that fall short lose more."""
_PAPER_ERRORS = 0.0533
"""Of SGD in table 2. A share of pictures that is lost counts by the share that SGD itself gets wrong."""

_UNITS: dict[Network, str] = {"pictures": "points", "words": "hundredths of a nat"}


def _quality_rule(network: Network, name: str, matching: bool, effect: float | None) -> Rule:
    def rule(rows: Rows) -> Judgment:
        lost, unit = estimated(rows[name], "lost"), _UNITS[network]
        size = (1 - rows[f"quality/{SGD.name}"]["value"]) / _PAPER_ERRORS if network == "pictures" else 1.0
        least, theirs = size * _LOST[network], size * (effect or _LOST[network])
        judgment = matches(lost, least / 2, unit) if matching else exceeds(lost, theirs, unit)
        why = untuned(rows)
        return unsound(why, judgment) if why else judgment

    return rule


def _claims_of_quality(network: Network) -> Iterator[Claim]:
    for method, matching, effect, theirs in _QUALITY[network]:
        row = f"quality/{method.name}"
        statement = f"{NETWORKS[network]}: {method.title} {'ends at' if matching else 'falls short of'} SGD's quality"
        rule = _quality_rule(network, row, matching, effect)
        yield Claim(TABLES[network], row, f"{statement} ({theirs})", rule)


# --- part (b): times

_INT8_SHARE = 0.27
_TIMES: tuple[tuple[str, Method, Method, str, float, bool], ...] = (
    ("communication", RANDOM, SGD, f"int8 communicates in {_INT8_SHARE} of fp32's time at most", _INT8_SHARE, False),
    ("total", RANDOM, SGD, "IntSGD (random) is faster than SGD by all-reduce (5.3)", 1.0, False),
    ("total", DETERM, SGD, "IntSGD (determ.) is faster than SGD by all-reduce (5.3)", 1.0, False),
    ("total", POWERSGD, SGD, "PowerSGD is faster than SGD by all-reduce (5.3)", 1.0, False),
    ("total", QSGD, SGD_GATHERED, "QSGD is faster than SGD by all-gather (5.3)", 1.0, False),
    ("total", NATSGD, SGD_GATHERED, "NatSGD is faster than SGD by all-gather (5.3)", 1.0, False),
    ("overhead", RANDOM, DETERM, "random rounding takes more computation than determ. (5.3)", 1.0, True),
)
"""Part of a step, method, what it is compared with, the paper's words, the ratio that is asked about, and whether it is
to be above that."""


def _ratios(part: str, method: Method, other: Method) -> Callable[[Rows], list[float]]:
    """Run by run."""

    def ratios(rows: Rows) -> list[float]:
        mine, theirs = (rows[f"step_s/{one.name}"]["by_run"][part] for one in (method, other))
        return [a / b for a, b in zip(mine, theirs, strict=True)]

    return ratios


def _ratio_rule(ratios: Callable[[Rows], list[float]], bound: float, *, slower: bool) -> Rule:
    def rule(rows: Rows) -> Judgment:
        measured = ratios(rows)
        if slower:
            return faster_in_runs(measured, bound)
        return faster_in_runs([1 / ratio for ratio in measured], 1 / bound)

    return rule


def _claims_of_times(network: Network) -> Iterator[Claim]:
    for part, method, other, text, bound, slower in _TIMES:
        ratios = _ratios(part, method, other)
        yield Claim(
            TABLES[network],
            f"{part}/{method.name} over {other.name}",
            f"{NETWORKS[network]}: {text}",
            _ratio_rule(ratios, bound, slower=slower),
            over_link=True,
            value=lambda rows, ratios=ratios: median(ratios(rows)),
            unit="x",
        )
    for method in (QSGD, NATSGD):
        yield Claim(
            TABLES[network],
            f"sent/{method.name}",
            f"{NETWORKS[network]}: on 16 ranks {method.title} sends more than SGD by all-reduce, which slows it (5.3)",
            _sends_more(f"sent/{method.name}"),
        )


def _sends_more(name: str) -> Rule:
    # An all-gather sends (n - 1)d bytes and fp32's all-reduce 8(n - 1)d/n: the same on 8 ranks, and fewer on 4.
    why = "counted; on the 4 ranks that are timed it sends half as many"
    return lambda rows: counted(rows[name]["value"] > 1, f"{rows[name]['value']:.2f}x, {why}")


# --- part (c)


def _stability(network: Network) -> Claim:
    row = f"sensitivity/{network}"

    def lost_by(rows: Rows) -> dict[str, Estimate]:
        """What each other choice loses; infinite where a training diverged."""
        by_choice = rows[row]["lost"]
        return {name: estimated(by_choice, name) for name in by_choice if name != networks.title(*DEFAULT)}

    return Claim(
        "5",
        row,
        f"{NETWORKS[network]}: IntSGD is quite stable across beta and eps (C.4)",
        lambda rows: all_hold(matches(lost, rows[row]["margin"], _UNITS[network]) for lost in lost_by(rows).values()),
    )


CLAIMS = (
    *_claims_of_a(),
    *(claim for network in NETWORKS for claim in _claims_of_quality(network)),
    *(claim for network in NETWORKS for claim in _claims_of_times(network)),
    *map(_stability, NETWORKS),
)

# --- the paper

PAPER = Paper(
    "intsgd",
    "IntSGD's experiments, as found here",
    {
        "a": Part("a: logistic regression", convex.part_a),
        "2": Part("b: the ResNet", networks.table_2),
        "3": Part("b: the LSTM", networks.table_3),
        "sent": Part("b: bytes on 16 ranks", networks.sent),
        "times": Part("b: times of steps", networks.times),
        "c": Part("c: beta and eps", networks.part_c),
    },
    CLAIMS,
    judged=(
        "Logistic regression: a claim holds if it holds on every data set, and convergence for every seed. It is "
        "linear if a line fits the logarithm of the gap with an R² of at least 0.99, and like that in full "
        "precision if it takes at most 1.5 times the steps. Networks: a method that ends at SGD's quality may lose "
        "at most half of what QSGD loses in the paper, and one that falls short loses more; accuracy is lost as a "
        "share of SGD's errors. Where half or twice SGD's learning rate is better, nothing is judged."
    ),
    differs=(
        "logistic regression: the 12 workers are computed in one process, in fp64; integers are neither clipped nor "
        "limited in size",
        "logistic regression: a5a, mushrooms, w8a and real-sim are generated data with the shapes of these LibSVM "
        "sets; `--data` reads the sets themselves; lambda is 0.3/m, about the paper's, learning rates are 1/L and, of "
        "L-SVRG, 0.5/L; mini-batches are 5% of a worker's data, drawn with replacement",
        "logistic regression: 20 seeds, but 5 on w8a's and 3 on real-sim's shape; f* is found by gradient "
        "descent and then L-BFGS",
        "networks: 4 ranks are processes on this machine, on emulated links, instead of 16 GPUs on InfiniBand; "
        "where steps are timed, computation is [replayed](docs/results.md#how-steps-are-timed)",
        "networks: on 4 ranks an all-gather of 8 bits sends half of what fp32's all-reduce does, on 16 twice as much: "
        "which is slower is judged by bytes; what is timed is larger than what is trained",
        "networks: a ResNet of three blocks with group norm on small images, 20 epochs, instead of ResNet18 on "
        "CIFAR-10, 300",
        "networks: a 3-layer LSTM of 96 units on the words of Python's standard library, 360 steps with momentum "
        "and each rank's gradient clipped to 0.5 before it is sent, as the authors' code does, instead of 650 units "
        "on Wikitext-2 for 90 epochs; the hidden state is not carried on",
        "networks: all methods have the learning rate that suits SGD; IntSGD's scales are by layer, from the "
        "aggregated gradient",
        "networks: noise is added to the ResNet's images in each batch, so that it does not learn them by heart; the "
        "LSTM was recorded earlier, with a heuristic of a scale for each layer, which is stronger than the authors' "
        "one for a buffer, and without Algorithm 1's own scale",
        "beta and eps: three seeds",
    ),
    scale=IntSGDScale(),
    smoke=SMOKE,
    study=IntSGDStudy,
)

intsgd = command(
    PAPER,
    """Repeat the experiments of "IntSGD: Adaptive Floatless Compression of Stochastic Gradients" (ICLR 2022) here.

    Part a minimizes logistic regression over twelve workers whose data differ, by IntGD, IntDIANA, VR-IntDIANA and
    their twins in full precision: figure 6; --data adds a set, a file in LibSVM's format, plain, gzip or bzip2. Parts 2
    and 3 train a small ResNet and an LSTM on four ranks with every method of tables 2 and 3, whose curves are figures
    1, 3 and 4; part times takes their steps over slow links: figure 2. Part c changes beta and eps: figure 5. Takes
    about twenty minutes on two cores.""",
)
