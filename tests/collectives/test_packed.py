"""Sums of integers of few bits: exact on every way, with the bits that their bounds need, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_algorithms import SPECS as ALGORITHMS, algorithm_of, world_of

from harness import run_threads
from thinwire.collectives import CollectiveCall, Layout, complete, packed_sums
from thinwire.collectives.layout import Sum
from thinwire.compressors import Packed, for_world, parse
from thinwire.compressors._core.integers import Integers

NUMEL = 100_003


def integers(limit: int, rank: int, numel: int = NUMEL) -> torch.Tensor:
    """Of every magnitude up to the limit; the first hundred are the limit itself on all ranks."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(-limit, limit + 1, (numel,), generator=generator, dtype=torch.int8)
    values[:50], values[50:100] = limit, -limit
    return values


def layout_of(limit: int, algorithm: str, num_ranks: int, numel: int = NUMEL) -> tuple[Layout, Sum]:
    """A layout with one packed sum of integers."""
    whole = Layout.build([], world_of(num_ranks), torch.float32, algorithm_of(algorithm, num_ranks))
    s = Sum(0, "sum", torch.int8, (), numel, Packed(limit))
    return replace(whole, sums=(s,)), s


def test_a_bound_that_8_bits_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="sums of 19 integers up to 7 do not fit into 8 bits"):
        Packed(7, 19)
    for spec, most in (("intsgd(bits=2)", 127), ("intsgd(bits=4)", 18), ("intdiana(bits=2)", 127)):
        fitted = for_world(parse(spec), most, 1000)
        assert isinstance(fitted, Integers)
        assert fitted.clip * most <= 127
        name, most_of = spec.partition("(")[0], f"from each of {most}, and no more"
        with pytest.raises(ValueError, match=rf"cannot serve {most + 1} ranks.*{most_of}.*Take {name}\(bits=32\)"):
            for_world(parse(spec), most + 1, 1000)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "allgather"])
def test_sums_are_exact_by_every_algorithm(algorithm: str) -> None:
    for num_ranks, limit in ((2, 1), (2, 63), (3, 7), (5, 1)):
        _check_sums(algorithm, num_ranks, limit)


def _check_sums(algorithm: str, num_ranks: int, limit: int) -> None:
    layout, _ = layout_of(limit, algorithm, num_ranks)
    wanted = torch.stack([integers(limit, rank) for rank in range(num_ranks)]).sum(0).to(torch.int8)
    assert int(wanted.abs().max()) == limit * num_ranks

    def run(transport):
        (packed,) = packed_sums(layout, transport).values()
        found = []
        for step in range(2):
            buffer = integers(limit, transport.rank)
            complete(packed.run(buffer, transport, CollectiveCall(0, step)))
            found.append(torch.equal(buffer, wanted))
        return found, transport.sent_bytes

    for rank, (found, sent) in enumerate(run_threads(run, num_ranks)):
        assert found == [True, True]
        assert sent == 2 * layout.sent_bytes(rank)


def test_partial_sums_widen_by_hop() -> None:
    """Bits an integer of every message, by the ranks in it: of a ring of four, and of four that send to owners."""
    widths = {}
    for algorithm in ("ring", "sra"):
        layout, s = layout_of(1, algorithm, 4, numel=1023 * 1024)
        of = layout.packed_layout(s)
        chunk = of.chunks[0]
        numel = sum(piece.numel for _, segments in chunk.groups for piece in segments.pieces)
        tree = of.trees[chunk.owner]
        sent = {4: chunk}
        for rank, parent in enumerate(tree.parents):
            if parent is not None:
                sent[tree.sizes[rank]] = of.sent_chunk(0, rank, parent)
        widths[algorithm] = {terms: int(8 * message.message_bytes / numel) for terms, message in sent.items()}
    assert widths["ring"] == {1: 2, 2: 3, 3: 3, 4: 4}
    assert widths["sra"] == {1: 2, 4: 4}


def test_two_bits_take_three_on_the_wire_at_most() -> None:
    """Counted as all-reduces are: what a rank sends, over 2(n−1)/n of the integers. The scales take 1.6 % more."""
    for num_ranks, bits in ((2, 2.5), (3, 2.5), (4, 3.0), (5, 3.0)):
        layout, s = layout_of(1, "sra", num_ranks, numel=1 << 20)
        of = layout.packed_layout(s)
        for rank in range(num_ranks):
            sent = 8 * of.sent_bytes(rank) / (2 * (num_ranks - 1) / num_ranks * s.numel)
            assert bits < sent < 1.03 * bits
