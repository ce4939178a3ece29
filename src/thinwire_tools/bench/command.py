"""The command ``thinwire bench``: options and help of its measurements, which wait for no import of PyTorch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

from rich.console import Console

from thinwire_tools import lab
from thinwire_tools.exits import ends_command
from thinwire_tools.results import OutputFile, Results


def kernels(*, size_mb: float = 25.0, threads: int | None = None, repeats: int = 15, json: OutputFile = None) -> None:
    """Time the CPU kernels, and torch's copy_ on as many bytes.

    All operations take turns, so a noisy machine is noisy for all alike; figures are medians. GB/s counts the fp32
    bytes that the values take, whatever is read or written. The break-even bandwidth is that of a link on which
    sending fp32 takes as long as encoding, sending the message and decoding, one after the other.

    Examples:
      thinwire bench kernels
      thinwire bench kernels --threads 1 --json kernels.json

    Args:
        size_mb: fp32 megabytes (2^20 bytes) of each operation; DDP's buckets have 25.
        threads: CPU threads; by default torch's number.
        repeats: turns of each operation.
        json: write the figures to this file.
    """
    with ends_command():
        if size_mb <= 0 or repeats < 1:
            raise ValueError("--size-mb must be above 0 and --repeats at least 1")
    from thinwire_tools.bench.kernels import show_speeds

    results = show_speeds(size_mb, threads, repeats)
    if json:
        results.write(json)


def allreduce(
    *,
    rate: str = "1gbit",
    rtt: str | None = None,
    ranks: int = 2,
    ranks_per_node: int = 1,
    size_mb: float = 25.0,
    compressor: str = "minmax(bits=4, bucket=128)",
    algorithm: tuple[str, ...] = ("sra",),
    transport: Literal["group", "shared", "auto"] = "group",
    repeats: int = 7,
    json: OutputFile = None,
) -> int:
    """Time an all-reduce of one gradient over an emulated link.

    Several methods take turns in one run: gloo's fp32 all-reduce, thinwire by each collective algorithm, and the bare
    messages of each: the same in the same order, without encoding and decoding, which is the limit that the link sets.

    Examples:
      thinwire bench allreduce --rate 100mbit
      thinwire bench allreduce --ranks 4 --compressor 'minmax(bits=8, bucket=1024)'
      thinwire bench allreduce --rate 1gbit --ranks 4 --algorithm sra ring tree
      thinwire bench allreduce --ranks 4 --ranks-per-node 2 --transport auto

    Args:
        rate: of each node's link, both ways (100mbit, 1gbit ...), or none.
        rtt: round-trip time added between nodes, as 20ms.
        ranks: number of ranks.
        ranks_per_node: how many of them share a node: its network namespace, its link, its memory.
        size_mb: size of the gradient in fp32, in MB (10^6 bytes).
        compressor: its spec.
        algorithm: the collective algorithms to time: sra, ring, tree, allgather, parameter_server, hierarchical ...
        transport: inside a node, by gloo (group) or through shared memory (shared, or auto where there is any).
        repeats: measurements of each method; the median counts.
        json: write the figures to this file.
    """
    from thinwire.collectives.algorithms import parse_algorithm
    from thinwire.compressors import parse
    from thinwire_tools.bench.allreduce import add, make_table, measure

    console = Console(highlight=False)
    with ends_command():
        methods = [(str(parse_algorithm(spec)), transport) for spec in algorithm]
        parse(compressor)
        if not 0 < size_mb <= 1e6 or repeats < 1:
            raise ValueError(f"--size-mb {size_mb:g} --repeats {repeats}: both must be above 0")
        shaped = None if rate == "none" else rate
        lab.Network(ranks, rate=shaped, rtt=rtt, ranks_per_node=ranks_per_node).close()
    with console.status(f"{ranks} ranks, {rate}: {repeats} rounds of {size_mb:g} MB ..."):
        [answer], about = measure(
            methods, [size_mb], ranks=ranks, ranks_per_node=ranks_per_node, rate=rate, rtt=rtt, compressor=compressor,
            repeats=repeats,
        )  # fmt: skip
    parameters = {"rate": rate, "rtt": rtt, "ranks": ranks, "ranks_per_node": ranks_per_node, "size_mb": size_mb}
    results = Results("thinwire bench allreduce", about={"link": about, **parameters, "compressor": compressor})
    add(results, answer)
    console.print(f"All-reduce of {size_mb:g} MB, {ranks} ranks, {rate}, {compressor}")
    console.print(make_table(answer))
    console.print(
        "ms: median; MB: what the busiest rank sends; gloo: in multiples of gloo's speed; bare: the method's messages "
        "without encoding and decoding, and its time in multiples of theirs; error: relative, of the mean."
    )
    if json:
        results.write(json)
    return 0


def step(
    *,
    rate: str | None = "1gbit",
    ranks: int = 2,
    compressor: str = "minmax(bits=4, bucket=128)",
    bucket_cap_mb: float = 5.0,
    skip_if_slower: bool = False,
    target: float = 0.6,
    batches: str = "2,4,6,8,12,16,24,32",
    rounds: int = 7,
    steps: int = 3,
    json: OutputFile = None,
) -> int:
    """Time a training step of a 4.8 M parameter GPT: stock DDP, thinwire, and a hook that sends nothing.

    The batch grows until stock DDP reaches --target of the ceiling. The three take turns, so a noisy machine is
    noisy for all alike; shares are medians over rounds.

    Examples:
      thinwire bench step --rate 1gbit
      thinwire bench step --rate none --skip-if-slower --target 0

    Args:
        rate: of each rank's link, both ways; none measures over loopback.
        ranks: number of ranks.
        compressor: its spec.
        bucket_cap_mb: DDP's bucket size, for all three.
        skip_if_slower: let thinwire leave raw what would be slower compressed, as it does by default.
        target: share of the ceiling that stock DDP must reach; 0 stops after the first batch.
        batches: sizes to try, in windows of 64 tokens a rank.
        rounds: turns of each.
        steps: steps a turn.
        json: write the figures to this file.
    """
    from thinwire.compressors import parse
    from thinwire_tools.bench.step import make_results, make_table, measure, remarks
    from thinwire_tools.ranks import run_ranks

    console = Console(highlight=False)
    shaped = rate not in (None, "none")
    with ends_command():
        parse(compressor)
        sizes = [int(batch) for batch in batches.split(",")]
        if min(sizes) < 1 or rounds < 1 or steps < 1:
            raise ValueError(f"--batches {batches} --rounds {rounds} --steps {steps}: all must be above 0")
        if shaped:
            lab.Network(ranks, rate=rate).close()
    config = {
        "spec": compressor,
        "cap_mb": bucket_cap_mb,
        "skip_if_slower": skip_if_slower,
        "rounds": rounds,
        "steps": steps,
        "target": target,
        "batches": sizes,
    }
    with ExitStack() as stack:
        network = stack.enter_context(lab.Network(ranks, rate=rate)) if shaped else None
        about = network.describe() if network else {"rate": "loopback"}
        where = rate if shaped else "loopback"
        stack.enter_context(console.status(f"{ranks} ranks, {where}: {rounds} turns for each batch size ..."))
        answer = run_ranks(measure, config, ranks, network)
    console.print(f"A training step, {ranks} ranks, {where}, {compressor}")
    console.print(make_table(answer["measured"]))
    for line in remarks(answer):
        console.print(line, soft_wrap=True)
    if json:
        about = {"link": about, "compressor": compressor, "ranks": ranks}
        make_results(answer, about).write(json)
    return 0


def cuda(*, size_mb: float = 25.0, repeats: int = 20, ranks: int = 4, json: OutputFile = None) -> int:
    """Time compressors on a GPU, a copy of as many bytes there, and an all-reduce of ranks that share the GPU.

    A bucket of 40 layers is compressed as one. GB/s counts the fp32 bytes of the values, by the GPU's own clock;
    launches are kernels, copies and fills that one call started. The ranks of the all-reduce are threads with a stream
    each; what they share is the GPU, so it shows the arithmetic of all of them and no network.

    Examples:
      thinwire bench cuda
      thinwire bench cuda --size-mb 100 --ranks 2 --json cuda.json

    Args:
        size_mb: fp32 megabytes (2^20 bytes) of the bucket; DDP's buckets have 25.
        repeats: times that each figure is measured; the median counts.
        ranks: number of ranks of the all-reduce.
        json: write the figures to this file.
    """
    with ends_command():
        if size_mb <= 0 or repeats < 1 or ranks < 1:
            raise ValueError("--size-mb must be above 0, --repeats and --ranks at least 1")
    from thinwire_tools.bench.cuda import missing, show_speeds

    if what := missing():
        Console(stderr=True, highlight=False).print(f"thinwire bench cuda: {what}")
        return 1
    results = show_speeds(size_mb, repeats, ranks)
    if json:
        results.write(json)
    return 0
