"""What ``auto`` sends over which link: by nodes and by measured rates, changed while training, and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from auto_training import train
from harness import on_threads, run_threads
from states import resealed
from thinwire.collectives import Algorithm, Hierarchical, ScatterReduceAllGather, World, parse_algorithm
from thinwire.plan import Plan
from thinwire.plan.forecast import Bucket, Curve, HierarchyTimes, Links, Pace, coded_transfer
from thinwire.policies import Auto, Evidence, Policy, Proposal, StepTime
from thinwire.runtime import BucketEngine, Wire, WireSettings
from thinwire.runtime.checkpoint import sealed
from thinwire.runtime.probe import measure_links
from thinwire_tools import lab
from thinwire_tools.ranks import run_ranks as run_in

SHAPE = (1024, 512)
LAYERS = {"w": thinwire.parse("minmax(bits=4, bucket=128)")}
PACE = Pace((Bucket(0.02, (("w", SHAPE),)),), 0.02)
PAIRS = World(4, (0, 0, 1, 1))
SRA = ScatterReduceAllGather()


def line(bytes_per_s: float) -> Curve:
    return Curve(((0.0, 1e-4), (1e7, 1e-4 + 1e7 / bytes_per_s)))


def links(slow: float, *, inside: float | None = None, rates: tuple[float, ...] = ()) -> Links:
    """Four ranks whose slowest link carries ``slow`` bytes a second; ``inside`` nodes of two, if there are any."""
    legs = HierarchyTimes(PAIRS, line(inside), line(slow)) if inside else None
    return Links(line(slow), line(slow), 4, legs=legs, rates=rates)


def evidence(of: Links, seconds: float = 0.335, **more: Any) -> Evidence:
    auto = Auto()
    gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    steps = (StepTime(PACE, seconds, False),) * 3
    codec_s = dict.fromkeys(auto.to_measure(LAYERS), 1e-9)
    return Evidence(
        LAYERS, {"w": thinwire.compressors.Raw()}, {"w": gradient}, 4, links=of, codec_s=codec_s, steps=steps, **more
    )


def chosen(of: Links, auto: Auto = Auto(), **more: Any) -> Algorithm | None:  # noqa: B008 - frozen
    return auto.propose(evidence(of, **more)).algorithm


def test_nodes_of_several_ranks_add_up_inside_first() -> None:
    found = Auto().propose(evidence(links(1e7, inside=5e9)))
    assert found.algorithm == Hierarchical("dense")
    assert "by hierarchical(inside=dense, across=slices); " in found.note
    # Where the inside is not much faster than the outside, exact sums would take longer there than they save.
    assert chosen(links(1e7, inside=2e7)) == Hierarchical("same")


def test_ranks_with_slow_links_own_less() -> None:
    slow, now = ScatterReduceAllGather((1.0, 1.0, 1.0, 0.1)), ScatterReduceAllGather((1.0, 1.0, 0.9, 0.11))
    assert chosen(links(1e7, rates=(1.0, 1.0, 1.0, 0.1))) == slow
    assert slow.shares(World(4))[3] == 0
    # About the same rates as now are no reason to change anything.
    assert chosen(links(1e7, rates=(1.0, 1.0, 1.0, 0.1)), algorithm=now) == now
    assert chosen(links(1e7, rates=(1.0, 0.9, 1.0, 0.95))) == SRA


def test_what_was_asked_for_stays() -> None:
    ring, nodes = parse_algorithm("ring"), links(1e7, inside=5e9)
    assert chosen(nodes, asked=ring, algorithm=ring) == ring
    assert chosen(nodes, Auto(algorithms=("sra",))) == SRA
    assert [str(t) for t in Auto(algorithms=("sra",)).considers] == ["sra"]


def test_a_majority_needs_a_star() -> None:
    auto = Auto(candidates=("sign(majority=True)",), error=0.999)
    codec_s = dict.fromkeys(auto.to_measure(LAYERS), 1e-9)
    found = auto.propose(replace(evidence(links(1e7, inside=5e9)), codec_s=codec_s))
    assert found.note.startswith("on")
    assert found.algorithm == SRA


def test_a_hierarchy_is_predicted_leg_by_leg() -> None:
    of = links(1e7, inside=1e9)
    raw, coded = 2**21, LAYERS["w"].wire_bytes(SHAPE)
    hops = coded_transfer(PACE.buckets[0], LAYERS, of, {}, Hierarchical("dense"))
    # Half of the exact bytes and half of the coded ones to the other rank of the node, a quarter between nodes, twice.
    expected = 4e-4 + (raw / 2 + coded / 2) / 1e9 + 2 * coded / 4 / 1e7
    assert hops.alone_s == pytest.approx(expected, rel=1e-6)
    assert hops.after_s == pytest.approx(expected - 4e-4, rel=1e-6)
    star = coded_transfer(PACE.buckets[0], LAYERS, of, {})
    assert star.after_s == pytest.approx(1.5 * coded / 1e7)
    # The slowest rank owns nothing, and sends a whole tensor in place of one and a half.
    rates = (1.0, 1.0, 1.0, 0.1)
    owned = coded_transfer(PACE.buckets[0], LAYERS, replace(of, rates=rates), {}, ScatterReduceAllGather(rates))
    assert owned.after_s == pytest.approx(coded / 1e7)


@dataclass(frozen=True, kw_only=True)
class Wandering(Policy):
    """Another collective algorithm at each decision; the plan stays."""

    algorithms: tuple[str, ...] = ()

    @property
    def considers(self) -> tuple[Algorithm, ...]:
        return tuple(map(parse_algorithm, self.algorithms))

    def propose(self, evidence: Evidence) -> Proposal:
        spec = self.algorithms[(evidence.step // self.every - 1) % len(self.algorithms)]
        return Proposal(evidence.present, algorithm=parse_algorithm(spec))


NUMEL = 96 * 64


def run(
    algorithms: tuple[str, ...], spec: str, steps: int, then: Callable[[Wire], Any], num_ranks: int = 4
) -> list[tuple[Tensor, Tensor, Any]]:
    """By rank: all that arrived, all that was sent, and what ``then`` says of the Wire."""
    shapes, settings = {"w": (96, 64)}, WireSettings(adapt=Wandering(every=3, lag=1, algorithms=algorithms))

    def rank(transport: Any) -> tuple[Tensor, Tensor, Any]:
        wire = Wire(BucketEngine(Plan.build(shapes, spec), shapes, transport, settings))
        arrived, sent = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
        for step in range(steps):
            wire.engine.begin_step()
            flat = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + wire.rank))
            sent += flat
            arrived += wire.engine.reduce(flat, tuple(shapes.items())).wait()
        return arrived, sent, then(wire)

    return run_threads(rank, num_ranks)


WANDERED = ("hierarchical(inside=same)", "sra(rates=(1.0, 1.0, 1.0, 0.1))", "ring", "allgather", "sra")


def test_messages_meet_otherwise_from_one_step_to_the_next() -> None:
    answers = run(WANDERED, "minmax(bits=8)", 17, lambda wire: [str(d.algorithm) for d in wire.decisions])
    mean = sum(sent for _, sent, _ in answers) / 4
    for arrived, _, decided in answers:
        assert decided == [str(parse_algorithm(spec)) for spec in WANDERED]
        assert torch.equal(arrived, answers[0][0])
        assert torch.allclose(arrived, mean, atol=0.3)


def test_the_residual_survives_another_algorithm() -> None:
    """All that was given has arrived or is in the residuals, whoever owns it now: ``(1/n) Σ δ + e``."""

    def unsent(wire: Wire) -> Tensor:
        assert str(wire.algorithm) == "sra(rates=(1.0, 1.0, 1.0, 0.1))"
        residual = wire.state_dict()[f"rank{wire.rank}/residual/w"].double().view(-1)
        mine = torch.full_like(residual, 0.25)
        at = 0
        for rank, share in enumerate(wire.algorithm.shares(World(4))):
            size = round(NUMEL * share / sum(wire.algorithm.shares(World(4))))
            if rank == wire.rank:
                mine[at : at + size] = 1.0
            at += size
        return residual * mine

    answers = run(WANDERED[:2], "ef(minmax(bits=2))", 8, unsent)
    mean = sum(sent for _, sent, _ in answers) / 4
    still = sum(of for _, _, of in answers)
    assert float(still.abs().max()) > 0.01
    lost = (answers[0][0] + still - mean).abs()
    # Owners' parts begin at whole buckets: a few elements lie beside the plain shares that are taken here.
    assert float(lost.quantile(0.95)) < 1e-4


def test_resumes_with_the_algorithm_that_it_had_or_was_asked_for() -> None:
    def resumed(wire: Wire) -> None:
        state, before = wire.state_dict(), str(wire.algorithm)
        # Another decision, and back.
        for _ in range(3):
            wire.engine.begin_step()
        between = str(wire.algorithm)
        wire.load_state_dict(state)
        assert (before, between, str(wire.algorithm)) == (slow, "sra", slow)
        # A state that says nothing, and one of another number of ranks.
        silent = {key: value for key, value in state.items() if not key.startswith("adapt/")}
        for other in (silent, resealed(state | {"shares": torch.ones(3, dtype=torch.int64)})):
            wire.load_state_dict(other)
            assert str(wire.algorithm) == "sra"
            wire.load_state_dict(state)

    slow = "sra(rates=(1.0, 1.0, 1.0, 0.1))"
    run((WANDERED[0], slow, "sra"), "minmax(bits=4)", 8, resumed)


HOSTILE = (b"__import__('os')", b"\xff\xfe", b"sra(rates=(1e999, 1, 1, 1))", b"-" * 3900 + b"1", b"sra(rates=(1, 2))")


def test_a_state_with_another_text_is_refused() -> None:
    def hostile(wire: Wire) -> None:
        state = wire.state_dict()
        for text in HOSTILE:
            entry = torch.frombuffer(bytearray(text.ljust(4096)), dtype=torch.uint8)
            kept = {k: v for k, v in state.items() if k.startswith("adapt/") and k != "adapt/checksums"}
            with pytest.raises(ValueError, match=r"names 2 rates, and there are 4|is no collective algorithm"):
                wire.load_state_dict(state | sealed(kept | {"adapt/algorithm": entry}, "adapt/checksums"))

    run(WANDERED[:1], "minmax(bits=4)", 4, hostile)


@on_threads(4)
def test_links_of_a_world_with_nodes_are_measured_leg_by_leg(transport: Any) -> None:
    worlds = (World(4, (0, 1, 2, 3)), PAIRS, None)
    alone, paired, neither = (measure_links(transport, long_s=0.0, world=of) for of in worlds)
    assert alone.legs is None
    assert paired.legs is not None
    assert paired.legs.world == PAIRS
    # Ranks of one node share its link, and measured one by one each would seem to have it to itself.
    assert paired.rates == neither.rates == ()
    assert len(alone.rates) == 4
    assert max(alone.rates) == 1.0


@pytest.mark.alone
@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_two_ranks_on_each_of_two_nodes() -> None:
    with lab.Network(4, ranks_per_node=2, rate="20mbit") as network:
        answer = run_in(train, {}, 4, network)
    assert all("by hierarchical(inside=" in d["note"] for d in answer["decisions"])
    assert all(plan == answer["plans"][0] for plan in answer["plans"])
    stats = answer["stats"]
    # The first 6 steps are exact; of what the others hand over, two thirds would cross between nodes as sra.
    exact = 6 / 20 * stats["dense_bytes"]
    crossed = stats["payload_sent_bytes"] - exact - stats["payload_shared_bytes"]
    assert 0 < crossed < 0.3 * stats["payload_shared_bytes"]
