"""Every call of the golden tests into the library: when an interface changes, this file is all that follows it.

Inputs are made of integers and powers of two, so that they are the same on any machine.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from harness import run_threads
from thinwire import Plan, Wire, parse
from thinwire.collectives import (
    Buffers,
    CollectiveCall,
    Layer,
    Layout,
    LoopbackTransport,
    World,
    all_gather,
    all_reduce,
    complete,
    gather_buffers,
    gather_mean,
    parse_algorithm,
    part_layout,
    reduce_scatter,
    sum_buffers,
    summed_all_reduce,
)
from thinwire.compressors import (
    CodecCall,
    Coded,
    ColdStart,
    Compressor,
    Delta,
    Key,
    Parts,
    Piece,
    Segments,
    State,
    SumCall,
    Summed,
    find_mixin,
    first_state,
    used_bytes,
)
from thinwire.plan import Filter, Speeds
from thinwire.plan.forecast import Bucket, Curve, Links, Pace
from thinwire.policies import Evidence, StepTime, Sync, choose_by_link, family, parse_policy
from thinwire.runtime import BucketEngine, WireSettings

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (48, 70)
"""Of the layer whose messages are frozen."""
_STEPS = 3
_LAST_RANKS = 3


def digest(*parts: Tensor | bytes | str) -> str:
    """16 hex digits over the bytes of all parts and their sizes."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            part = part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(part, str):
            part = part.encode()
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:16]


@cache
def values(numel: int, seed: int) -> Tensor:
    """About normal, in runs of unlike magnitudes; exact in fp32. Callers must not write to it."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.randint(-(1 << 18), 1 << 18, (8, numel), generator=generator).sum(0)
    magnitude = torch.tensor([1.0, 0.25, 4.0, 0.0625])[(torch.arange(numel) // 777) % 4]
    return total.float() / (1 << 18) * magnitude


def spec_of(text: str) -> str:
    return str(parse(text))


def messages(spec: str, dtype: torch.dtype) -> dict[str, Any]:
    """What a compressor makes of one layer over some steps: as worker, as owner, as one who gathers."""
    compressor = _fitted(spec)
    if isinstance(compressor, Coded):
        found = _coded(compressor, dtype)
    else:
        assert isinstance(compressor, Summed)
        found = _summed(compressor, dtype)
    # FFT, SVD and matrix products have other bits on other machines.
    if compressor.traits.exact_bits:
        return {name: digest(*parts) for name, parts in found.items()}
    return {name: _statistics(parts) for name, parts in found.items() if name in ("decoded", "state")} | {
        "bytes": [part.nbytes for part in found["sent"]]
    }


def _fitted(spec: str) -> Compressor:
    compressor = parse(spec)
    # Of a delta of activations only the code of the change is a message of its own.
    return (compressor.inner if isinstance(compressor, Delta) else compressor).fit(SHAPE)


def _inputs(dtype: torch.dtype, step: int, rank: int = 0) -> Tensor:
    return values(math.prod(SHAPE), 100 * step + rank).to(dtype, copy=True)


def _piece(name: str = "layer") -> Piece:
    return Piece(name, 0, math.prod(SHAPE), 0, 0, SHAPE)


def _coded(compressor: Coded, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {"sent": [], "decoded": [], "state": [], "owner": [], "mean": []}
    segments, numel = Segments.build([_piece()]), math.prod(SHAPE)
    states = [first_state(compressor, _inputs(dtype, 0), segments) for _ in range(_LAST_RANKS)]
    for step in range(_STEPS):
        sent = []
        for rank in range(_LAST_RANKS):
            message = torch.zeros(compressor.payload_bytes(numel, dtype), dtype=torch.uint8)
            compressor.encode(
                _inputs(dtype, step, rank), message, CodecCall(segments, Key.derive(step, rank), state=states[rank])
            )
            sent.append(message)
        used = used_bytes(compressor, sent[0], segments.pieces[0])
        found["sent"].append(sent[0][:used])
        # Raw values are decoded in the dtype that they were sent in.
        decoded = torch.zeros(numel, dtype=dtype if compressor.spec_name == "raw" else torch.float32)
        compressor.decode(sent[0], decoded, CodecCall(segments))
        found["decoded"].append(decoded)
        found["state"] += _slots(states[0])
        mean = torch.zeros(numel, dtype=dtype)
        compressor.mean(sent, mean, CodecCall(segments, scale=1 / _LAST_RANKS))
        found["mean"].append(mean)
        if not compressor.gathered:
            own, out, result = _inputs(dtype, step), torch.zeros_like(sent[0]), torch.zeros(numel, dtype=dtype)
            state = first_state(compressor, _inputs(dtype, 0), segments)
            compressor.reduce(
                sent[1:], own, out, result, CodecCall(segments, Key.derive(step), state=state, scale=1 / 3)
            )
            found["owner"] += [out[: used_bytes(compressor, out, segments.pieces[0])], result, *_slots(state)]
        states = [state.swapped() if state else None for state in states]
    return found


def _summed(compressor: Summed, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Two ranks' contributions to each round, and what their sum becomes."""
    found: dict[str, list[Tensor]] = {"sent": [], "decoded": [], "state": []}
    segments = Segments.build([_piece()])
    states = [first_state(compressor, _inputs(dtype, 0), segments) for _ in range(2)]
    for step in range(_STEPS):
        xs = [_inputs(dtype, step, rank) for rank in range(2)]
        sums = compressor.sums(SHAPE, dtype)
        parts = tuple(Parts.build([(_piece(), part.numel)]) for part in sums)
        buffers = [[torch.zeros(part.numel, dtype=part.dtype) for part in sums] for _ in range(2)]
        running = []
        for rank in range(2):
            key = Key(Key.derive(step, rank).own, Key.derive(step).shared)
            call = SumCall(parts, tuple(buffers[rank]), key, states[rank], 0.5)
            running.append(compressor.rounds(xs[rank], xs[rank], call))
        for number, part in enumerate(sums):
            for rounds in running:
                next(rounds)
            found["sent"].append(buffers[0][number].clone())
            stacked = torch.stack([buffers[rank][number] for rank in range(2)])
            total = stacked.amax(0) if part.op == "max" else stacked[0] + stacked[1]
            for rank in range(2):
                buffers[rank][number].copy_(total)
        for rounds in running:
            next(rounds, None)
        found["decoded"].append(xs[0])
        found["state"] += _slots(states[0])
        states = [state.swapped() if state else None for state in states]
    return found


def _slots(state: State | None) -> list[Tensor]:
    """Copies of all that a step left for the next one."""
    if state is None:
        return []
    found = [state.next[name] for name in sorted(state.next)]
    found += [layer.next[name] for layer in state.layers.values() for name in sorted(layer.next)]
    return [tensor.clone() for tensor in found]


def _statistics(parts: Iterable[Tensor]) -> list[float]:
    return [float(f"{float(part.double().norm()):.5g}") for part in parts if part.is_floating_point()]


ALGORITHMS = (
    *("sra", "sra(rates=(4, 1, 2, 1))", "ring", "tree", "tree(root=0)", "allgather", "parameter_server(server=1)"),
    *("hierarchical(inside=dense, across=slices)", "hierarchical(inside=dense, across=leaders)"),
    *("hierarchical(inside=minmax(bits=8, bucket=128), across=leaders)", "hierarchical(inside=same, across=slices)"),
)
LAYERS = (
    ("first.weight", (90, 70), "minmax(bits=4, bucket=128)"),
    ("first.bias", (90,), "raw"),
    ("second.weight", (64, 100), "ef(minmax(bits=2, bucket=128))"),
    ("third.weight", (50, 50), "ef(topk(density=0.1) | minmax(bits=8))"),
    ("fourth.weight", (40, 40), "threshold(lam=1.0, capacity=0.5)"),
    ("fifth.weight", (33, 47), "cast(bf16)"),
    ("sixth.weight", (64, 64), "intsgd(bits=8)"),
    ("seventh.weight", (61, 31), "ef(qsgd(bits=4, bucket=64))"),
    ("scalar", (), "raw"),
)


class _Recorder:
    """Keeps the bytes that a rank puts on its transport."""

    def __init__(self, transport: LoopbackTransport) -> None:
        self.sent: dict[tuple[int, int], str] = {}
        new_tag, begin = transport.new_tag, transport.begin
        send, start_all_reduce = transport.send, transport.start_all_reduce
        sums = itertools.count()
        # Phases are counted from exchange to exchange: those with the same buffers have the same tags.
        first_phase = next_phase = first_tag = 0
        num_phases: dict[int, int] = {}

        def record_tag(num: int) -> int:
            tag = new_tag(num)
            num_phases[tag] = num
            return tag

        def record_begin(buffers: Buffers) -> None:
            nonlocal first_phase, next_phase, first_tag
            first_phase, next_phase, first_tag = next_phase, next_phase + num_phases[buffers.tag], buffers.tag
            begin(buffers)

        def record_send(message: Tensor, peer: int, tag: int) -> Any:
            self.sent[first_phase + tag - first_tag, peer] = digest(message)
            return send(message, peer, tag)

        def record_sum(x: Tensor, **options: Any) -> Any:
            self.sent[next(sums), -1] = digest(x)
            return start_all_reduce(x, **options)

        transport.new_tag, transport.begin = record_tag, record_begin
        transport.send, transport.start_all_reduce = record_send, record_sum

    def digest(self) -> str:
        return digest(*(f"{key} {self.sent[key]}" for key in sorted(self.sent)))


def _layout(algorithm: str, num_ranks: int, dtype: torch.dtype) -> Layout:
    if "rates" in algorithm:
        algorithm = f"sra(rates={(4, 1, 2, 1)[:num_ranks]})"
    layers, start = [], 0
    for name, shape, spec in LAYERS:
        compressor = parse(spec).fit(shape)
        assert isinstance(compressor, Coded | Summed)
        layers.append(Layer(name, start, shape, compressor))
        start += math.prod(shape)
    world = World(num_ranks, tuple(rank // 2 for rank in range(num_ranks)))
    return Layout.build(layers, world, dtype, parse_algorithm(algorithm))


def layout(algorithm: str, num_ranks: int, dtype: torch.dtype) -> str:
    """Digest of who owns what, and of every message's size and contents."""
    of = _layout(algorithm, num_ranks, dtype)
    chunks = [
        (
            chunk.owner,
            chunk.message_bytes,
            [(str(g.compressor), [tuple(p) for p in g.segments.pieces]) for g in chunk.groups],
        )
        for chunk in (*of.chunks, *of.gathered)
    ]
    sums = [(s.round, s.op, s.dtype, s.numel) for s in of.sums]
    return digest(f"{of.digest} {chunks} {sums} {[of.sent_bytes(rank) for rank in range(num_ranks)]}")


def reduced(algorithm: str, num_ranks: int, dtype: torch.dtype) -> dict[str, Any]:
    """Two all-reduces of all layers: the result, the same on every rank, and what each rank sent."""
    of = _layout(algorithm, num_ranks, dtype)

    def run(transport: LoopbackTransport) -> tuple[str, str, str]:
        recorder = _Recorder(transport)
        owned = transport.open(of.reduction_traffic()) if of.chunks else None
        gathered = gather_buffers(of, transport) if of.gathered else None
        sums, results = sum_buffers(of), []
        state = State.fresh(of.slots, of.numel, layers={layer.name: layer.shape for layer in of.layers})
        for step in range(2):
            x = values(of.numel, 10 * step + transport.rank).to(dtype, copy=True)
            call = CollectiveCall(seed=3, step=step, state=state)
            if owned:
                complete(all_reduce(x, of, transport, owned, call))
            if gathered:
                complete(gather_mean(x, of, transport, gathered, call))
            complete(summed_all_reduce(x, of, transport, sums, call))
            results.append(x)
            for name, shape, spec in LAYERS:
                start = next(layer.start for layer in of.layers if layer.name == name)
                if (cold := find_mixin(parse(spec).fit(shape), ColdStart)) is not None:
                    cold.follow(x[start : start + math.prod(shape)], name, state)
            state = state.swapped()
        kept = [state.now[name] for name in sorted(state.now)]
        return digest(*results), recorder.digest(), digest(*kept)

    answers = run_threads(run, num_ranks)
    results = {result for result, _, _ in answers}
    assert len(results) == 1, "ranks ended with different means"
    return {"result": results.pop(), "sent": [sent for _, sent, _ in answers], "kept": [kept for *_, kept in answers]}


def halves(spec: str, num_ranks: int, dtype: torch.dtype) -> dict[str, Any]:
    """A reduce-scatter and an all-gather of a buffer with one part for each rank."""
    compressor = parse(spec)
    assert isinstance(compressor, Coded)
    of = part_layout([Layer("weight", 0, (3000,), compressor)], num_ranks, dtype)

    def run(transport: LoopbackTransport) -> list[str]:
        recorder, rank = _Recorder(transport), transport.rank
        x, out = values(3000 * num_ranks, rank).to(dtype, copy=True), torch.zeros(3000, dtype=dtype)
        buffers = transport.open(of.reduction_traffic(down=False))
        complete(reduce_scatter(x, of, transport, buffers, CollectiveCall(seed=1, step=0), out=out))
        whole = torch.zeros(3000 * num_ranks, dtype=dtype)
        whole[3000 * rank : 3000 * (rank + 1)] = out
        buffers = transport.open(of.reduction_traffic(up=False))
        complete(all_gather(whole, of, transport, buffers, CollectiveCall(seed=1, step=1)))
        return [digest(out), digest(whole), recorder.digest()]

    answers = run_threads(run, num_ranks)
    return dict(zip(("scattered", "gathered", "sent"), map(list, zip(*answers, strict=True)), strict=True))


SHAPES = {"a.weight": (40, 100), "a.bias": (40,), "b.weight": (64, 64), "c.weight": (30, 70), "scalar": ()}
_BUCKETS = (("scalar", "c.weight"), ("b.weight", "a.bias", "a.weight"))


def trained(spec: str, algorithm: str, num_ranks: int) -> dict[str, Any]:
    """A Wire of some steps, among them one that is not finite: means, bytes and each rank's checkpoint."""
    exact = parse(spec).traits.exact_bits

    def run(transport: LoopbackTransport) -> tuple[list[Tensor], int, dict[str, Tensor]]:
        plan = Plan.build(SHAPES, spec, Filter())
        wire = Wire(BucketEngine(plan, SHAPES, transport, WireSettings(seed=5, algorithm=parse_algorithm(algorithm))))
        means: list[Tensor] = []
        for step in range(_STEPS + 1):
            wire.engine.begin_step()
            futures = []
            for number, names in enumerate(_BUCKETS):
                sizes = [math.prod(SHAPES[name]) for name in names]
                flat = values(sum(sizes), 100 * step + 10 * number + transport.rank).clone()
                if step == 1:
                    flat[-1] = math.nan
                futures.append(wire.engine.reduce(flat, tuple((name, SHAPES[name]) for name in names)))
            found = [future.wait() for future in futures]
            means += found if step != 1 else []
        sent, state = wire.sent_bytes(), wire.state_dict()
        wire.detach()
        return means, sent, state

    answers = run_threads(run, num_ranks)
    checkpoints: dict[str, str] = {}
    for _, _, state in answers:
        for key, tensor in state.items():
            shown = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            checkpoints[key] = f"{shown} {digest(tensor)}" if exact or "/" not in key else shown
    means = [digest(*means) if exact else _statistics(means) for means, _, _ in answers]
    assert all(mean == means[0] for mean in means), "ranks ended with different means"
    return {"means": means[0], "bytes": [sent for _, sent, _ in answers], "state": checkpoints}


PLAN_SHAPES = {"embed": (400, 64), "up": (128, 64), "down": (64, 128), "query": (64, 64), "out": (96, 64)}


def default_plan(rules: Any) -> dict[str, str]:
    shapes = {"embed.weight": (400, 64), "block.0.weight": (128, 64), "block.0.bias": (128,), "norm.weight": (64,)}
    return {name: str(compressor) for name, compressor in Plan.build(shapes, rules, Filter()).layers.items()}


def members(spec: str) -> list[str]:
    return [str(member) for member in family(parse(spec))]


def proposals(policy: str, spec: str) -> list[dict[str, str]]:
    """What a policy proposes at two decisions, the second with what it kept of the first."""
    chooser, seen = parse_policy(policy), _evidence(spec)
    found = []
    for step in range(2):
        to_time = chooser.to_time(seen.reference)
        speeds = Speeds(dict.fromkeys(to_time, 1e-9), 1e7, 1e-4, num_ranks=4) if to_time else None
        codec_s = dict.fromkeys(chooser.to_measure(seen.reference), 2e-9)
        proposal = chooser.propose(replace(seen, speeds=speeds, codec_s=codec_s, step=step))
        found.append({name: str(compressor) for name, compressor in proposal.layers.items()})
        seen = replace(seen, memory=proposal.memory)
    return found


def _evidence(spec: str) -> Evidence:
    gradients = {}
    for at, (name, shape) in enumerate(PLAN_SHAPES.items()):
        noise = values(math.prod(shape), at).view(shape) ** 3
        low_rank = values(shape[0], 50 + at).view(-1, 1) * values(shape[1], 90 + at)
        gradients[name] = (low_rank * (at % 3) + noise) * 4.0 ** (at % 4 - 2)
    reference = {name: parse(spec) for name in PLAN_SHAPES}
    bucket_of = {name: int(at >= 2) for at, name in enumerate(PLAN_SHAPES)}
    syncs = [Sync((10_000 + 7919 * i, 90_000 - 104_729 * i % 70_000), 0.01 + 0.002 * i) for i in range(36)]
    pace = Pace((Bucket(0.0, tuple(PLAN_SHAPES.items())),), 0.02)
    curve = Curve(((0.0, 1e-4), (1e7, 1.0001)))
    return Evidence(
        reference,
        reference,
        gradients,
        num_ranks=4,
        learning_rate=0.1,
        bucket_of=bucket_of,
        syncs=syncs,
        links=Links(curve, curve, 4),
        steps=(StepTime(pace, 0.125, True),) * 3,
    )


def by_link(sizes: Sequence[Sequence[float]], rates: Sequence[float], compute_s: float) -> list[int]:
    return list(choose_by_link(sizes, rates, compute_s))


def policy_text(text: str) -> str:
    return str(parse_policy(text))


def algorithm_text(text: str) -> str:
    return str(parse_algorithm(text))


def claims(folder: Any) -> dict[str, list[tuple[str, str, str, bool | None]]]:
    """By paper: figure, what the paper claims, what was found here, and whether it holds."""
    from experiments.framework.results_page import read

    return {
        paper.entry.name: [tuple(row[key] for key in ("figure", "claim", "found", "holds")) for row in paper.claims]
        for paper in read(folder)
    }


def figure_sections() -> dict[str, str]:
    """The generated sections of README.md and docs/, by page and name."""
    from experiments.framework import pages

    return {f"{page}: {name}": pages.section(name) for page, name in pages.sections()}
