"""``python -m experiments bench algorithms``: all-reduces by every collective algorithm, over many links."""

from __future__ import annotations

import itertools

from rich.console import Console

from experiments.framework.pages import show
from thinwire_tools import lab
from thinwire_tools.bench.allreduce import add, measure
from thinwire_tools.results import OutputFile, Results

FLAT = ("sra", "ring", "tree", "allgather", "parameter_server")
NESTED = ("sra", "hierarchical(inside=dense, across=slices)", "hierarchical(inside=dense, across=leaders)")
NESTED += ("hierarchical(inside=same, across=slices)",)


def algorithms(
    *,
    ranks: tuple[int, ...] = (2, 4),
    sizes_mb: tuple[float, ...] = (25.0, 100.0),
    rates: tuple[str, ...] = ("100mbit", "1gbit", "10gbit"),
    rtts: tuple[str, ...] = ("0ms", "20ms"),
    compressor: str = "minmax(bits=4, bucket=128)",
    repeats: int = 5,
    budget_s: float = 14.0,
    json: OutputFile = None,
) -> int:
    """Time all-reduces by every collective algorithm and transport, over links of several rates and round-trip times.

    Ranks have a node each; then two nodes of two ranks, for hierarchies and shared memory; then all ranks on one node
    without a limit, where shared memory is set against gloo. Each method is set against gloo and against its own bare
    messages. Figures also have the bytes that the kernel counted on the interfaces, in multiples of the formula's,
    and the variance of the mean, in multiples of the first method's.

    Examples:
      python -m experiments bench algorithms --json algorithms.json
      python -m experiments bench algorithms --ranks 4 --sizes-mb 25 --rates 1gbit --rtts 0ms

    Args:
        ranks: numbers of ranks.
        sizes_mb: sizes of the gradient in fp32, in MB (10^6 bytes).
        rates: of each node's link, in both directions.
        rtts: round-trip times added between nodes.
        compressor: its spec.
        repeats: measurements of each method, of which the median counts.
        budget_s: seconds for the rounds of a cell; slow links get fewer rounds, but always one.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    lab.need_network()
    worlds = [(n, 1, rate, rtt) for n, rate, rtt in itertools.product(ranks, rates, rtts)]
    worlds += [(4, 2, rate, rtts[0]) for rate in rates if 4 in ranks]
    worlds += [(n, n, "none", "0ms") for n in ranks]
    results = Results(
        "python -m experiments bench algorithms", about={"compressor": compressor, "sizes_mb": list(sizes_mb)}
    )
    with console.status("") as status:
        for number, (num_ranks, each_node, rate, rtt) in enumerate(worlds, 1):
            where = _where(num_ranks, each_node, rate, rtt)
            status.update(f"{number} of {len(worlds)}: {where}")
            if each_node == 1:
                methods = [(algorithm, "group") for algorithm in FLAT]
            elif num_ranks == each_node:
                methods = [
                    (algorithm, kind) for algorithm in ("sra", "ring", "allgather") for kind in ("group", "shared")
                ]
            else:
                methods = [(algorithm, kind) for algorithm in NESTED for kind in ("group", "auto")]
            try:
                answers, link = measure(
                    methods,
                    sizes_mb,
                    ranks=num_ranks,
                    ranks_per_node=each_node,
                    rate=rate,
                    rtt=None if rtt == "0ms" else rtt,
                    compressor=compressor,
                    repeats=repeats,
                    budget_s=budget_s,
                )
            except ValueError as error:
                # What adds the latency cannot carry every rate.
                console.print(f"{where}: left out: {error}")
                continue
            for size, answer in zip(sizes_mb, answers, strict=True):
                prefix = f"{num_ranks} ranks/{each_node} a node/{rate}/{rtt}/{size:g} MB/"
                add(results, answer, prefix)
            results.about[where] = link
            if json:
                results.write(json)
    show("algorithms", results, json)
    return 0


def _where(num_ranks: int, each_node: int, rate: str, rtt: str) -> str:
    nodes = "a node each" if each_node == 1 else "one node" if each_node == num_ranks else f"{each_node} to a node"
    delay = "" if rtt == "0ms" else f", round trip +{rtt}"
    return f"{num_ranks} ranks, {nodes}, {'no limit' if rate == 'none' else rate}{delay}"
