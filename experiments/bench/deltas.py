"""``python -m experiments bench deltas``: sharded weights sent as changes (SDP4Bit), beside weights in as many bits."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from statistics import fmean, median

from rich.console import Console

from experiments.framework.pages import show
from experiments.papers.qsdp.methods import SIZES, SIZES_SMOKE, Method
from experiments.papers.qsdp.trainings import Trained, Trainings
from thinwire_tools.compare.statistics import estimate, relative_differences
from thinwire_tools.results import OutputFile, Results


def _method(name: str, weights: str = "raw", gradients: str = "raw", algorithm: str = "sra") -> Method:
    return Method(name, name, "", weights=weights, gradients=gradients, algorithm=algorithm, keeps=True)


FP32, ALONE = _method("fp32"), _method("alone")
_G8 = "minmax(bits=8, bucket=1024)"
METHODS = (
    FP32,
    _method("W8 G8", "minmax(bits=8, bucket=1024)", _G8),
    _method("W4 G8", "minmax(bits=4, bucket=1024)", _G8),
    _method("W4 as changes, G8", "delta(minmax(bits=4, bucket=1024))", _G8),
    _method("W4 as changes, G4", "delta(minmax(bits=4, bucket=1024))", "minmax(bits=4, bucket=128)"),
    _method("W2 as changes, G8", "delta(minmax(bits=2, bucket=1024))", _G8),
    _method("W1 as changes, G8", "delta(onebit(bucket=1024))", _G8),
    _method("W2 G8", "minmax(bits=2, bucket=1024)", _G8),
    ALONE,
)
"""All gather weights once a step. The last two must be worse."""
NODES = (
    FP32,
    _method("W8 G8", "minmax(bits=8, bucket=1024)", _G8, "hierarchical(inside=same)"),
    _method(
        "W4 as changes, G4, 8 bits inside",
        "delta(minmax(bits=4, bucket=1024))",
        "minmax(bits=4, bucket=128)",
        "hierarchical(inside=minmax(bits=8, bucket=512))",
    ),
    ALONE,
)
"""Of several ranks a node: SDP4Bit's recipe, its rotation left out."""


def deltas(
    *,
    ranks: int = 2,
    ranks_per_node: int = 1,
    steps: int = 300,
    seeds: int = 3,
    smoke: bool = False,
    json: OutputFile = None,
) -> int:
    """Train a small GPT under FSDP2 whose weights are gathered in few bits, as they are and as changes.

    A change is what weights differ by from what has arrived of them before (SDP4Bit, Jia et al. 2024). Held-out losses
    are of the network that ranks compute with, and compared with fp32's, seed by seed.

    Examples:
      python -m experiments bench deltas
      python -m experiments bench deltas --seeds 5 --json benchmarks/fsdp/deltas.json
      python -m experiments bench deltas --ranks 4 --ranks-per-node 2   # gradients have 8 bits inside nodes

    Args:
        ranks: processes of this machine, over gloo.
        ranks_per_node: how many of them take each other to be on one node.
        steps: training steps of each run.
        seeds: runs of each method: initial weights and batches.
        smoke: a tiny model and few steps: the same path, no figures worth keeping.
        json: write the figures to this file.
    """
    size = (SIZES_SMOKE if smoke else SIZES)[1]
    task = size.task if smoke else replace(size.task, steps=steps)
    methods = METHODS if ranks_per_node == 1 else [replace(m, ranks_per_node=ranks_per_node) for m in NODES]
    about = {"ranks": ranks, "ranks_per_node": ranks_per_node, "seeds": seeds, "smoke": smoke}
    about |= {"task": asdict(task), "parameters": size.num_parameters}
    results = Results("python -m experiments bench deltas", about=about)
    console, losses = Console(highlight=False), dict[str, list[float]]()
    with Trainings(ranks) as together, Trainings(1) as alone, console.status("training ...") as status:
        for method in methods:
            runs: list[Trained] = []
            trainings = alone if method.name == ALONE.name else together
            for seed in range(seeds):
                status.update(f"training: {method.title}, seed {seed + 1} of {seeds}", spinner=None)
                runs.append(trainings.train(task, method, seed, lambda *_: None))
            losses[method.name] = [math.log(run.perplexity) for run in runs]
            sent = median(runs[0].step_bytes[1:])
            results.add(f"loss/{method.name}", fmean(losses[method.name]), "nats/byte", losses=losses[method.name])
            results.add(f"sent_bytes/{method.name}", sent, "B/step")
            if method.name != FP32.name and seeds > 1:
                both = estimate(relative_differences(losses[method.name], losses[FP32.name]))
                results.add(f"difference/{method.name}", both.mean, "", lower=both.lower, upper=both.upper)
    show("deltas", results, json)
    return 0
