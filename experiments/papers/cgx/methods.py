"""How gradients are sent in each figure and table of the thesis's chapter 3, and what the thesis measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from experiments.framework.methods import ALMOST_NOTHING_GAMMA, FP32, GRACE, NOTHING, THINWIRE, Method
from experiments.framework.timing import Place
from experiments.tasks.models import Model

GAMMAS = (1, 2, 4, 10, 20, 40, 100, 400)

SRA = Method("sra", "SRA", "#0a7d4f")
RING = Method("ring", "ring", "#c0392b", algorithm="ring")
TREE = Method("tree", "tree", "#d98a00", algorithm="tree")
# The thesis has no figures of these. The hierarchy takes two ranks for a node, whose link is as slow as the others.
_OTHERS = (
    Method("allgather", "all-gather", "#8250c4", algorithm="allgather"),
    Method("parameter_server", "parameter server", "#1f6fb2", algorithm="parameter_server"),
    Method("hierarchical", "hierarchical", "#888888", algorithm="hierarchical(inside=same)", ranks_per_node=2),
)

SHARED = Method("shared", "shared memory", "#0a7d4f", transport="shared")
GROUP = Method("group", "gloo", "#c0392b", transport="group")

FLAT = Method("thinwire", "thinwire, SRA", "#0a7d4f", transport="auto")
HIERARCHICAL = Method("hierarchical", "thinwire, hierarchical", "#1f6fb2", algorithm="hierarchical", transport="auto")
_GLOO_ONLY = Method("thinwire gloo", "thinwire, SRA, gloo only", "#8250c4", transport="group")

IDEAL = Method("ideal", "almost nothing sent", "#888888", spec=f"truncate(gamma={ALMOST_NOTHING_GAMMA:g})")
GRACE_STYLE = Method("grace", "GRACE-style", "#c0392b", spec=GRACE, algorithm="allgather")

BLOB = Method("blob", "blob", "#c0392b", kind="blob")
_SPEC_1024 = "minmax(bits=4, bucket=1024)"
THINWIRE_1024 = Method("thinwire 1024", "thinwire, buckets of 1024", "#0a7d4f", spec=_SPEC_1024)
BLOB_1024 = Method("blob 1024", "blob, buckets of 1024", "#c0392b", kind="blob", spec=_SPEC_1024)
"""Of which the errors are compared: the thesis takes such buckets for CNNs, and without layers only those of 128."""


def truncated(gamma: float) -> Method:
    """The first of every ``gamma`` elements are sent."""
    return Method(f"gamma {gamma:g}", f"1/{gamma:g} sent", "#0a7d4f", spec=f"truncate(gamma={gamma:g})")


def torch_powersgd(model: Model) -> Method:
    return Method("torch powersgd", "PyTorch's PowerSGD", "#1f6fb2", kind="torch powersgd", rank=model.powersgd_rank)


def powersgd(model: Model) -> Method:
    return Method("powersgd", "thinwire's PowerSGD", "#8250c4", spec=f"powersgd(rank={model.powersgd_rank})")


@dataclass(frozen=True)
class Timed:
    """Methods that take turns to train at ``place``. ``thesis``: items per second by model and method, where it has
    them; ``errors``: methods of which the error is taken as well, for the models ``errors_of``; ``drawn``: what is."""

    figure: str
    methods: Callable[[Model, Sequence[float]], Sequence[Method]]
    """Of a model, and of the scale's gammas."""
    reference: Method
    place: Place = "links"
    thesis: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    errors: tuple[Method, ...] = ()
    errors_of: tuple[str, ...] = ()
    drawn: Literal["items", "seconds", "share", "gammas"] = "items"


def _every_model(*methods: Method) -> Callable[[Model, Sequence[float]], Sequence[Method]]:
    return lambda model, gammas: methods


FIGURE_3_1 = Timed("3.1", lambda _, gammas: (FP32, *map(truncated, gammas), NOTHING), FP32, drawn="gammas")
FIGURE_3_3 = Timed("3.3", _every_model(FP32, GROUP, SHARED, NOTHING), GROUP, "host", drawn="seconds")
TABLE_3_4 = Timed(
    "3.4",
    _every_model(SRA, RING, TREE, *_OTHERS, NOTHING),
    SRA,
    thesis={
        "gpt": {"sra": 260_000.0, "ring": 236_000.0, "tree": 202_000.0},
        "cnn": {"sra": 2900.0, "ring": 2830.0, "tree": 2770.0},
    },
    errors=(SRA, RING, TREE),
    errors_of=("gpt",),
)
TABLE_3_6 = Timed(
    "3.6",
    lambda model, _: (FP32, THINWIRE, torch_powersgd(model), powersgd(model), GRACE_STYLE, NOTHING),
    FP32,
    thesis={
        "gpt": {"fp32": 170_000.0, "thinwire": 260_000.0, "torch powersgd": 220_000.0, "grace": 30_000.0},
        "cnn": {"fp32": 1900.0, "thinwire": 2900.0, "torch powersgd": 2600.0, "grace": 1000.0},
    },
)
TABLE_3_7 = Timed("3.7", _every_model(FP32, THINWIRE, IDEAL, NOTHING), NOTHING, drawn="share")
THESIS_SHARE = {"gpt": {"ideal": 0.95, "thinwire": 0.87}, "cnn": {"ideal": 0.92, "thinwire": 0.90}}
"""Table 3.7: of linear scaling."""
TABLE_3_9 = Timed(
    "3.9",
    _every_model(FP32, FLAT, HIERARCHICAL, _GLOO_ONLY, NOTHING),
    FP32,
    "nodes",
    thesis={"gpt": {"fp32": 32_000.0, "thinwire": 85_000.0}, "cnn": {"fp32": 564.0, "thinwire": 2300.0}},
)
QNCCL = Timed(
    "blob",
    _every_model(FP32, THINWIRE, BLOB, NOTHING),
    FP32,
    errors=(THINWIRE, BLOB, THINWIRE_1024, BLOB_1024),
    errors_of=("gpt", "cnn"),
)
