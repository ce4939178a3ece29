"""Collective algorithms: their trees, their bytes, their errors, and that all ranks end with the same mean."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_collectives import MIXED, gradient, layers_of

import thinwire
from harness import run_ranks, run_threads
from nets import assert_replicas_identical, make, train
from thinwire import MessageError, PeerFailedError
from thinwire.collectives import (
    Algorithm,
    CollectiveCall,
    Layout,
    World,
    all_gather,
    all_reduce,
    complete,
    layout,
    parse_algorithm,
    reduce_scatter,
)
from thinwire.collectives.algorithms import balanced_shares
from thinwire.compressors import RESIDUAL, State

SPECS = [
    *("sra", "sra(rates=(4, 1, 2, 1, 8))", "ring", "tree", "tree(root=0)", "parameter_server(server=1)"),
    *("hierarchical(inside=dense, across=slices)", "hierarchical(inside=dense, across=leaders)"),
    *("hierarchical(inside=minmax(bits=8, bucket=128), across=leaders)", "hierarchical(inside=same, across=slices)"),
    "hierarchical(inside=minmax(bits=8, bucket=2048), across=slices)",
]


def world_of(num_ranks: int) -> World:
    """Two ranks a node; the last node of an odd world has one."""
    return World(num_ranks, tuple(rank // 2 for rank in range(num_ranks)))


def algorithm_of(spec: str, num_ranks: int) -> Algorithm:
    if "rates" in spec:
        spec = f"sra(rates={(4, 1, 2, 1, 8, 3, 3, 3)[:num_ranks]})"
    return parse_algorithm(spec)


def laid_out(spec: str, num_ranks: int, layers=MIXED, dtype=torch.float32) -> Layout:
    return Layout.build(layers, world_of(num_ranks), dtype, algorithm_of(spec, num_ranks))


def run_all(layout: Layout, inputs, *, steps: int = 1, state_of=lambda rank: None):
    """All ranks' results of the last step, with the bytes that each sent."""

    def run(transport):
        buffers, state = transport.open(layout.reduction_traffic()), state_of(transport.rank)
        results = []
        for step in range(steps):
            x = inputs[transport.rank].clone()
            complete(all_reduce(x, layout, transport, buffers, CollectiveCall(seed=0, step=step, state=state)))
            state = state and state.swapped()
            results.append(x)
        return results, transport.sent_bytes, state

    return run_threads(run, layout.world_size)


@pytest.mark.parametrize("spec", SPECS)
def test_all_ranks_end_with_the_same_bytes_and_the_mean(spec: str) -> None:
    for num_ranks, dtype in ((2, torch.float32), (3, torch.bfloat16), (5, torch.float32)):
        layout = laid_out(spec, num_ranks, dtype=dtype)
        inputs = [gradient(rank, layout.numel, dtype) for rank in range(num_ranks)]
        answers = run_all(layout, inputs, steps=2)
        for rank, (results, sent, _) in enumerate(answers):
            assert sent == 2 * layout.sent_bytes(rank)
            assert all(torch.equal(mine, first) for mine, first in zip(results, answers[0][0], strict=True))
        mean = torch.stack([x.float() for x in inputs]).mean(0)
        for layer in MIXED:
            part = slice(layer.start, layer.start + layer.numel)
            off = (answers[0][0][1][part].float() - mean[part]).norm() / mean[part].norm().clamp(min=1e-9)
            bound = 1e-6 if dtype == torch.float32 else 0.02
            if str(layer.compressor) != "raw":
                bound = 0.35 if "bits=4" in str(layer.compressor) else 1.3
            assert float(off) <= bound, (layer, float(off))


def test_bytes_are_the_formulas() -> None:
    """S: bytes of one encoded bucket. Frames are left out of the formulas, and counted apart."""
    numel, n = 1 << 18, 4
    layers = layers_of((numel, "minmax(bits=4)"))
    s = numel * 4.5 / 8

    def sent(spec: str, between_nodes: bool = False) -> list[float]:
        of = laid_out(spec, n, layers)
        found = []
        for rank, messages in enumerate(of.reduction_traffic()):
            pairs = [(m, r) for m in messages for r in m.receivers]
            if between_nodes:
                pairs = [(m, r) for m, r in pairs if of.world.nodes[r] != of.world.nodes[rank]]
            found.append(sum(m.num_bytes - 64 for m, _ in pairs) / s)
        return found

    assert sent("sra") == sent("ring") == [2 * (n - 1) / n] * n
    assert sent("tree") == [2 * (n - 1) / n] * n
    # The root sends its mean to ranks 1 and 2, and rank 2 sends a sum up and the mean down to rank 3.
    assert sent("tree(root=0)") == [2, 1, 2, 1]
    assert max(sent("tree(root=0)")) == parse_algorithm("tree(root=0)").crossings(world_of(n))
    assert sent("parameter_server(server=1)") == [1, n - 1, 1, 1]
    assert sum(sent("sra(rates=(4, 1, 2, 1))")) == pytest.approx(2 * (n - 1))
    gathering = Layout.build(layers, n, torch.float32, parse_algorithm("allgather")).gather_traffic()
    assert [sum((m.num_bytes - 64) * len(m.receivers) for m in of) / s for of in gathering] == [n - 1] * n
    # Two nodes of two ranks: a node sends 2 (N-1)/N = 1 bucket to the other, instead of a flat exchange's 2.
    assert sent("hierarchical(across=slices)", between_nodes=True) == [0.5] * n
    assert sent("hierarchical(across=leaders)", between_nodes=True) == [1, 0, 1, 0]
    assert sent("sra", between_nodes=True) == [1] * n


@pytest.mark.parametrize("spec", SPECS)
def test_the_residual_is_kept(spec: str) -> None:
    """Law 7 along every tree: inputs = n · outputs + residuals, on workers and owners, over several steps."""
    num_ranks, steps = 5, 4
    layers = layers_of((4096, "ef(minmax(bits=2))"), (1500, "ef(minmax(bits=1, bucket=512))"), (300, "raw"))
    layout = laid_out(spec, num_ranks, layers)
    inputs = [gradient(rank, layout.numel) for rank in range(num_ranks)]
    answers = run_all(
        layout, inputs, steps=steps, state_of=lambda rank: State.fresh((RESIDUAL,), layout.numel, layers={})
    )
    put_in = steps * torch.stack(inputs).double().sum(0)
    came_out = num_ranks * sum(x.double() for x in answers[0][0])
    unsent = torch.stack([state.now[RESIDUAL.name] for *_, state in answers]).double()
    for chunk in layout.chunks:
        for group in chunk.groups:
            for piece in group.segments.pieces:
                unsent[chunk.owner, piece.elements] *= num_ranks
    assert torch.allclose(put_in, came_out + unsent.sum(0), atol=2e-4)
    assert float(unsent[:, :4096].abs().max()) > 0.01


@pytest.mark.parametrize(
    ("spec", "failing"),
    [("sra", 0), ("ring", 3), ("tree", 0), ("hierarchical", 3), ("hierarchical(across=leaders)", 0)],
)
def test_all_ranks_hear_of_a_failure_and_the_next_step_works(spec: str, failing: int) -> None:
    of = laid_out(spec, 5, layers_of((40_000, "minmax"), (100, "raw")))

    def run(transport):
        buffers = transport.open(of.reduction_traffic())
        x, error = gradient(transport.rank, of.numel), None
        bad = x.double() if transport.rank == failing else x.clone()
        try:
            complete(all_reduce(bad, of, transport, buffers, CollectiveCall(seed=0, step=0)))
        except (TypeError, ValueError, MessageError, PeerFailedError) as raised:
            error = raised
        complete(all_reduce(x, of, transport, buffers, CollectiveCall(seed=0, step=1)))
        return error, x

    answers = run_threads(run, 5)
    for rank, (error, x) in enumerate(answers):
        assert isinstance(error, TypeError if rank == failing else PeerFailedError), (rank, error)
        assert torch.equal(x, answers[0][1])


def test_votes_need_an_owner_who_counts_them() -> None:
    layers = layers_of((4096, "sign(majority=True, bucket=128)"))
    for spec in ("ring", "tree", "hierarchical"):
        with pytest.raises(ValueError, match="use the collective algorithm sra or parameter_server"):
            laid_out(spec, 4, layers)
    # An odd number of ranks: otherwise the owner breaks ties, and the two have other owners.
    inputs = [gradient(rank, 4096) for rank in range(5)]
    by_sra, by_server = (
        run_all(laid_out(spec, 5, layers), inputs)[0][0][0] for spec in ("sra", "parameter_server(server=1)")
    )
    assert torch.equal(by_sra.sign(), by_server.sign())


@settings(max_examples=50)
@given(rates=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=9))
def test_shares_keep_all_links_busy_alike(rates: list[float]) -> None:
    shares = balanced_shares(rates)
    n = len(rates)
    assert math.isclose(sum(shares), 1.0, rel_tol=1e-9)
    assert min(shares) >= -1e-12
    took = [(1 + (n - 2) * share) / rate for share, rate in zip(shares, rates, strict=True)]
    if n > 2:
        # Owners end together, and nobody who owns nothing could have helped.
        busy = [t for t, share in zip(took, shares, strict=True) if share > 0]
        assert max(busy) <= min(busy) * (1 + 1e-9)
        assert all(t >= max(busy) * (1 - 1e-9) for t, share in zip(took, shares, strict=True) if share <= 0)
        assert max(took) <= max((1 + (n - 2) / n) / rate for rate in rates) * (1 + 1e-9)


def test_slices_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of((100_000, "minmax"), (999, "minmax(bits=3, bucket=100)"), (5000, "raw"))
    inputs = [gradient(rank, 105_999) for rank in range(3)]
    whole = laid_out("sra", 3, layers)
    expected = run_all(whole, inputs)[0][0][0]
    monkeypatch.setattr(layout, "SLICE", 8192)
    for spec in ("sra", "ring"):
        sliced = laid_out(spec, 3, layers)
        assert len(sliced.chunks) > 10 > len(whole.chunks)
        sizes = [sum(p.numel for g in chunk.groups for p in g.segments.pieces) for chunk in sliced.chunks]
        assert max(sizes) < 2 * 8192
        got = run_all(sliced, inputs)
        assert all(torch.equal(results[0], got[0][0][0]) for results, *_ in got)
        if spec == "sra":
            assert torch.equal(got[0][0][0], expected)


@pytest.mark.parametrize("spec", ["sra", "ring", "hierarchical"])
def test_the_halves_of_an_all_reduce(spec: str) -> None:
    """A reduce-scatter leaves exact sums with the owners; an all-gather gives all what the owners' messages say."""
    of = laid_out(spec, 4, layers_of((9000, "minmax(bits=8)"), (2000, "raw")))
    inputs = [gradient(rank, of.numel) for rank in range(4)]

    def run(transport):
        x = inputs[transport.rank].clone()
        buffers = transport.open(of.reduction_traffic(down=False))
        complete(reduce_scatter(x, of, transport, buffers, CollectiveCall(seed=0, step=0, scale=1.0)))
        summed = x.clone()
        buffers = transport.open(of.reduction_traffic(up=False))
        complete(all_gather(x, of, transport, buffers, CollectiveCall(seed=0, step=1)))
        return summed, x

    answers = run_threads(run, 4)
    total = torch.stack(inputs).sum(0)
    for chunk in of.chunks:
        for compressor, segments in chunk.groups:
            for piece in segments.pieces:
                mine = answers[chunk.owner][0][piece.elements]
                atol = 1e-5 if str(compressor) == "raw" else 0.12
                assert torch.allclose(mine, total[piece.elements], atol=atol)
                assert torch.allclose(answers[0][1][piece.elements], mine, atol=atol)
    assert all(torch.equal(gathered, answers[0][1]) for _, gathered in answers)


ALGORITHMS = ("tree", "allgather", "parameter_server", "sra(rates=measured)")
TWO_NODES = ("left", "left", "right", "right")


def _train(rank: int, spec: str, nodes: Sequence[str] = ()):
    """Some steps of DDP over gloo."""
    if nodes:
        os.environ["THINWIRE_NODE"] = nodes[rank]
    model, network = make(rank), thinwire.Network(algorithm=spec)
    wire = thinwire.compress(model, "ef(minmax(bits=4))", network=network, skip_if_slower=False)
    losses = train(model, rank, 3)
    assert losses[-1] < losses[0]
    assert_replicas_identical(model)
    assert wire.stats.payload_sent_bytes > 2 * wire.sent_bytes() > 0
    return str(wire.algorithm), wire.sent_bytes()


def _train_each(rank: int):
    trained = [_train(rank, spec)[0] for spec in ALGORITHMS]
    # Inside one node fp32 would go everywhere; across two, one of two hops is compressed.
    bytes_sent = []
    for across in ("slices", "leaders"):
        spec = f"hierarchical(across={across})"
        bytes_sent.append((_train(rank, spec)[1], _train(rank, spec, TWO_NODES)[1]))
        del os.environ["THINWIRE_NODE"]
    return trained, torch.tensor(bytes_sent)


def test_training_over_each_algorithm_finds_nodes_and_rates() -> None:
    answers = run_ranks(_train_each, 4)
    for trained, _ in answers:
        assert trained == answers[0][0]
        assert ["rates=(" in text for text in trained] == ["measured" in spec for spec in ALGORITHMS]
    one_node, two_nodes = torch.stack([of_rank for _, of_rank in answers]).sum(0).T
    assert bool((one_node > 1.2 * two_nodes).all())
