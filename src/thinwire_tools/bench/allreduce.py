"""The command ``thinwire bench allreduce``: one all-reduce over a slow link, compared to fp32 and to its own limit."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from thinwire.collectives import (
    CollectiveCall,
    Layer,
    Layout,
    ProcessGroupTransport,
    Transport,
    all_reduce,
    complete,
    gather_buffers,
    gather_mean,
    ring_bytes,
    with_shared_memory,
)
from thinwire.collectives.algorithms import parse_algorithm
from thinwire.collectives.transport import SMALL_BYTES, Pending
from thinwire.compressors import Coded, parse
from thinwire.runtime.probe import settle
from thinwire_tools import lab
from thinwire_tools.lab.network import INTERFACE
from thinwire_tools.ranks import TIMEOUT, run_ranks
from thinwire_tools.results import Results, figures_table

_COUNTERS = Path("/proc/self/net/dev")
_SENT_BYTES = 8


def measure(
    methods: Sequence[tuple[str, str]],
    sizes_mb: Sequence[float],
    *,
    ranks: int,
    rate: str,
    compressor: str,
    repeats: int,
    ranks_per_node: int = 1,
    rtt: str | None = None,
    budget_s: float = 600.0,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the benchmark. Returns the figures of each size, from rank 0, and a description of the link.

    ``methods`` are pairs of algorithm and transport. After ``budget_s`` seconds a size gets no further round.
    """
    config = {
        "methods": list(methods),
        "numels": [int(size * 1e6 / 4) for size in sizes_mb],
        "compressor": compressor,
        "ranks_per_node": ranks_per_node,
        "repeats": repeats,
        "budget_s": budget_s,
    }
    shaped = None if rate == "none" else rate
    with lab.Network(ranks, rate=shaped, rtt=rtt, ranks_per_node=ranks_per_node) as network:
        about = network.describe()
        answer: Any = run_ranks(time_all, config, ranks, network)
    return answer, about


def add(results: Results, answer: dict[str, Any], prefix: str = "") -> None:
    """Add the figures of one size: seconds, speed-ups and bytes of each method."""
    seconds = answer["seconds"]
    for name, value in seconds.items():
        results.add(f"{prefix}seconds/{name}", value, "s", all=answer["all"][name])
    results.add(f"{prefix}payload_bytes/gloo", answer["gloo_bytes"], "B")
    if "fp32" in seconds:
        results.add(f"{prefix}speedup_over_gloo/fp32", seconds["gloo"] / seconds["fp32"], "x")
    for name, about in answer["about"].items():
        results.add(f"{prefix}speedup_over_gloo/{name}", seconds["gloo"] / seconds[name], "x")
        if (bare := seconds.get(f"bare/{name}")) is not None:
            results.add(f"{prefix}times_bare/{name}", seconds[name] / bare, "x")
        results.add(f"{prefix}formula_bytes/{name}", sum(about["formula_bytes"]), "B", by_rank=about["formula_bytes"])
        for what in ("crossing_bytes", "interface_bytes"):
            results.add(f"{prefix}{what}/{name}", sum(about[what]), "B", by_node=about[what])
        results.add(f"{prefix}relative_error/{name}", about["relative_error"], "")
        results.add(f"{prefix}variance/{name}", about["variance"], "")
        results.add(f"{prefix}replicas_identical/{name}", float(about["replicas_identical"]), "")


def make_table(answer: dict[str, Any]) -> Table:
    table = figures_table("method", ("ms", "min .. max", "MB", "gloo", "bare, ms", "bare", "error"))
    seconds, times = answer["seconds"], answer["all"]
    gloo = seconds["gloo"]
    table.add_row("gloo, fp32", *_times(gloo, times["gloo"]), f"{answer['gloo_bytes'] / 1e6:.2f}", "1.00x")
    if (fp32 := seconds.get("fp32")) is not None:
        size = f"{answer['gloo_bytes'] / 1e6:.2f}"
        table.add_row("thinwire, fp32", *_times(fp32, times["fp32"]), size, f"{gloo / fp32:.2f}x")
    for name, about in answer["about"].items():
        bare = seconds.get(f"bare/{name}")
        table.add_row(
            name,
            *_times(seconds[name], times[name]),
            f"{max(about['formula_bytes']) / 1e6:.2f}",
            f"{gloo / seconds[name]:.2f}x",
            *((f"{bare * 1e3:.1f}", f"{seconds[name] / bare:.2f}x") if bare is not None else ("", "")),
            f"{about['relative_error']:.4f}",
        )
        if not about["replicas_identical"]:
            table.add_row("[red]  ranks got DIFFERENT results[/]")
    return table


def _times(seconds: float, every: Sequence[float]) -> tuple[str, str]:
    return f"{seconds * 1e3:.1f}", f"{min(every) * 1e3:.1f} .. {max(every) * 1e3:.1f}"


# --- on a rank


class Method:
    """A collective algorithm over a transport: its all-reduce of one gradient, and its bare messages."""

    def __init__(self, numel: int, spec: str, algorithm: str, transport: Transport) -> None:
        compressor = parse(spec)
        if not isinstance(compressor, Coded):
            raise TypeError(f"{spec} is not a compressor whose messages this benchmark can send")
        chosen, world = settle(parse_algorithm(algorithm), transport)
        self.transport = transport
        layer = Layer("gradient", 0, (numel,), compressor)
        self.layout = Layout.build([layer], world, torch.float32, chosen)
        self.gathers = bool(self.layout.gathered)
        self.buffers = (
            gather_buffers(self.layout, transport) if self.gathers else transport.open(self.layout.reduction_traffic())
        )
        self.step = 0

    def run(self, x: Tensor) -> None:
        """Replace ``x`` by its mean over all ranks."""
        self.step += 1
        collective = gather_mean if self.gathers else all_reduce
        complete(collective(x, self.layout, self.transport, self.buffers, CollectiveCall(seed=0, step=self.step)))

    @property
    def has_bare(self) -> bool:
        """Whether the sizes of its messages are known without its data."""
        return not any(message.late for message in self.buffers.outgoing.values())

    def bare(self) -> None:
        """Send the same messages in the same order, each when those are received that it is made of, without encoding
        or decoding anything."""
        transport, buffers = self.transport, self.buffers
        transport.begin(buffers)
        arriving = {address: transport.receive_into(buffers, *address) for address in buffers.inbox}
        leaving: list[Pending] = []

        def send(phase: int) -> None:
            leaving.extend(transport.send_from(buffers, phase, buffers.outbox[phase].numel()))

        if self.gathers:
            for phase in buffers.outbox:
                send(phase)
        else:
            self._reduce_bare(send, arriving)
        for pending in (*arriving.values(), *leaving):
            pending.wait()
        transport.end(buffers)

    def _reduce_bare(self, send: Callable[[int], None], arriving: dict[tuple[int, int], Pending]) -> None:
        layout, rank, num_chunks = self.layout, self.transport.rank, len(self.layout.chunks)
        schedule = layout.schedule(rank)
        for k, _ in schedule.sends:
            send(k)
        for k in schedule.reductions:
            tree = layout.trees[layout.chunks[k].owner]
            for child in tree.children[rank]:
                arriving.pop((k, child)).wait()
            send(k if tree.parents[rank] is not None else num_chunks + k)
        for k, parent in schedule.means:
            arriving.pop((num_chunks + k, parent)).wait()
            if layout.trees[layout.chunks[k].owner].children[rank]:
                send(num_chunks + k)


class Stopwatch:
    """Times what all ranks run, by the clock that the processes of a machine share.

    Ranks start together, at a moment that they agree on: out of a barrier they would start up to a round trip apart,
    and the first of them would wait for the last. They have run the same just before, as in a training: how much TCP
    sends at once depends on what its connections have carried in the last fraction of a second.
    """

    def __init__(self) -> None:
        _greatest(0.0)
        began = time.perf_counter()
        _greatest(began)
        self._ahead_s = 0.002 + 2 * _greatest(time.perf_counter() - began)

    def time(self, run: Callable[[], object], pause_s: float = 0.0) -> float:
        """Return the seconds from the start until the slowest rank has ended: then an all-reduce has.

        ``pause_s``: seconds for which the link is idle after the run before, as while gradients are computed.
        """
        run()
        time.sleep(pause_s)
        start = _greatest(time.perf_counter() + self._ahead_s)
        time.sleep(max(0.0, start - time.perf_counter()))
        run()
        return _greatest(time.perf_counter()) - start


def _greatest(value: float) -> float:
    """Return the greatest of all ranks' values, after one round trip."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    values = [torch.tensor([value], dtype=torch.float64, device="cpu") for _ in range(num_ranks)]
    peers = [peer for peer in range(num_ranks) if peer != rank]
    works = [dist.irecv(values[peer], peer) for peer in peers] + [dist.isend(values[rank], peer) for peer in peers]
    for work in works:
        if work is not None:
            work.wait()
    return max(map(float, values))


def sent_on_interface() -> int:
    """Return the bytes that this rank's node has sent so far; 0 where it has no interface of the lab."""
    for line in _COUNTERS.read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[_SENT_BYTES])
    return 0


def _gather(value: float) -> list[float]:
    out = [torch.zeros(1, dtype=torch.float64, device="cpu") for _ in range(dist.get_world_size())]
    dist.all_gather(out, torch.tensor([value], dtype=torch.float64, device="cpu"))
    return [float(v) for v in out]


def same_everywhere(x: Tensor) -> bool:
    digest = hashlib.blake2b(x.numpy().tobytes(), digest_size=6).digest()
    return len(set(_gather(int.from_bytes(digest, "little")))) == 1


def _gradient(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float32, device="cpu")


def _checked(method: Method, gradient: Tensor, exact: Tensor, ranks_per_node: int) -> dict[str, Any]:
    """Run once, untimed; return its error, its bytes, and whether all ranks got the same."""
    x, ranks = gradient.clone(), range(dist.get_world_size())
    dist.barrier()
    before = sent_on_interface()
    method.run(x)
    # The kernel counts the bytes that it has sent: wait until the last messages are sent.
    time.sleep(0.05)
    on_interface = _gather(sent_on_interface() - before)
    traffic = method.layout.gather_traffic() if method.gathers else method.layout.reduction_traffic()
    crossing = [
        sum(m.num_bytes for m in traffic[rank] for r in m.receivers if r // ranks_per_node != rank // ranks_per_node)
        for rank in ranks
    ]
    return {
        "formula_bytes": [method.layout.sent_bytes(rank) for rank in ranks],
        "crossing_bytes": [sum(crossing[n : n + ranks_per_node]) for n in ranks[::ranks_per_node]],
        "interface_bytes": on_interface[::ranks_per_node],
        "variance": float((x - exact).double().square().mean()),
        "relative_error": float((x - exact).norm() / exact.norm()),
        "replicas_identical": same_everywhere(x),
    }


def contest(numel: int, config: dict[str, Any], transports: dict[str, Transport]) -> dict[str, Any]:
    """Time all methods on one gradient, in turns, so that a noisy machine is noisy for all alike."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    gradient = _gradient(rank, numel)
    # Every rank computes all gradients itself, so that checks send nothing over the link.
    exact = torch.zeros(numel, dtype=torch.float64, device="cpu")
    for other in range(num_ranks):
        exact += _gradient(other, numel)
    exact = (exact / num_ranks).float()
    x = gradient.clone()
    methods = {
        f"{algorithm}/{transport}": Method(numel, config["compressor"], algorithm, transports[transport])
        for algorithm, transport in config["methods"]
    }
    about: dict[str, Any] = {}
    runs: dict[str, Callable[[], object]] = {"gloo": lambda: dist.all_reduce(x)}
    if x.nbytes <= SMALL_BYTES:
        # Summed values that are not compressed, such as factors and layers next to them, are sent like this.
        runs["fp32"] = partial(next(iter(transports.values())).all_reduce, x)
    runs |= {name: partial(method.run, x) for name, method in methods.items()}
    runs |= {f"bare/{name}": method.bare for name, method in methods.items() if method.has_bare}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, method in methods.items():
        about[name] = _checked(method, gradient, exact, config["ranks_per_node"])
    del exact
    stopwatch, started = Stopwatch(), time.perf_counter()
    for done in range(config["repeats"]):
        # The run after a long transfer finds the link's queues full: it must not always be the same one.
        for name in random.Random(done).sample(list(runs), len(runs)):
            x.copy_(gradient)
            times[name].append(stopwatch.time(runs[name]))
        # All ranks must agree on when it is enough: a slow link gets fewer rounds.
        took = _greatest(time.perf_counter() - started)
        if took * (done + 2) / (done + 1) > config["budget_s"]:
            break
    return {
        "seconds": {name: median(values) for name, values in times.items()},
        "all": times,
        "about": about,
        "gloo_bytes": ring_bytes(numel * 4, num_ranks),
    }


def time_all(**config: Any) -> list[dict[str, Any]]:
    """Return the figures of each size, on a rank."""
    transports: dict[str, Transport] = {}
    for kind in dict.fromkeys(transport for _, transport in config["methods"]):
        group = dist.new_group(timeout=TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        transports[kind] = with_shared_memory(ProcessGroupTransport(group, TIMEOUT), TIMEOUT, kind)
    return [contest(numel, config, transports) for numel in config["numels"]]
