"""Collective algorithms: the ranks through which contributions to a chunk reach its owner, and its mean returns.

A collective algorithm is a pure function: the rank to which ``rank`` sends its partial sum of a chunk that rank
``owner`` reduces (`Algorithm.parent`). In a scatter-reduce-all-gather and with a parameter server that is the owner
itself, in a ring the next rank, in a binomial tree the rank's parent in it, in a hierarchy a rank of the same node.
One implementation (`thinwire.collectives.all_reduce`) runs them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from thinwire.arguments import Calls, check_choice, check_int, check_number, check_type
from thinwire.compressors import RESIDUAL, Coded, Raw, ef, needs_state, parse

_SHARE_UNITS = 1000
"""Resolution of owners' shares, which are rounded to whole numbers so that all ranks compute the same ones."""


@dataclass(frozen=True)
class World:
    """The number of ranks, and the node of each of them."""

    size: int
    nodes: tuple[int, ...] = ()
    """Node of each rank, counted from 0 in the order of first ranks. Empty if nodes are not known."""

    def __post_init__(self) -> None:
        if self.nodes and len(self.nodes) != self.size:
            raise ValueError(f"{self.size} ranks, but nodes of {len(self.nodes)}")

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each node."""
        return tuple(tuple(r for r in range(self.size) if self.nodes[r] == node) for node in sorted(set(self.nodes)))


class Tree:
    """The reduction tree of the chunks of one owner, who is its root.

    Contributions are sent from child to parent and summed on the way; the mean is sent from parent to child.

    Args:
        owner: the root.
        parents: the parent of each rank; None for the owner.

    Raises:
        ValueError: the parents do not form a tree.
    """

    def __init__(self, owner: int, parents: Sequence[int | None]) -> None:
        self.parents = tuple(parents)
        children: list[list[int]] = [[] for _ in parents]
        for rank, parent in enumerate(parents):
            if (parent is None) != (rank == owner):
                raise ValueError(f"in the tree of owner {owner}, the parent of rank {rank} is {parent}")
            if parent is not None:
                children[parent].append(rank)
        self.children = tuple(map(tuple, children))
        self.depth = [0] * len(parents)
        """Number of hops between the owner and each rank."""
        self.height = [0] * len(parents)
        """The most hops of a contribution that each rank waits for; 0 for a rank without children."""
        self.sizes = [1] * len(parents)
        """Number of ranks whose contributions each rank sends toward the owner, its own included."""
        links, reached = list[tuple[int, int]](), [owner]
        for parent in reached:
            links += [(parent, child) for child in children[parent]]
            reached += children[parent]
        if len(reached) != len(parents):
            raise ValueError(f"not every rank reaches owner {owner}: {self.parents}")
        for parent, child in links:
            self.depth[child] = self.depth[parent] + 1
        for parent, child in reversed(links):
            self.height[parent] = max(self.height[parent], self.height[child] + 1)
            self.sizes[parent] += self.sizes[child]


@dataclass(frozen=True)
class Algorithm:
    """A collective algorithm. ``str(algorithm)`` is its spec, which `parse_algorithm` reads."""

    spec_name: ClassVar[str]
    gathers: ClassVar[bool] = False
    """Whether every rank sends its message to every other one, so that chunks have no owners."""
    needs_nodes: ClassVar[bool] = False
    """Whether it depends on which ranks share a node."""
    is_star: ClassVar[bool] = False
    """Whether every rank sends its message to the owner directly, as a majority vote needs."""

    def shares(self, world: World) -> tuple[int, ...]:
        """Return the share of every layer that each rank owns, in proportion.

        Raises:
            ValueError: the algorithm does not fit this world.
        """
        return (1,) * world.size

    def crossings(self, world: World) -> float:
        """Return the bytes that the busiest rank sends, as a multiple of the bytes of the encoded bucket (about)."""
        return 2 * (world.size - 1) / world.size

    def parent(self, rank: int, owner: int, world: World) -> int:
        """Return the rank to which ``rank``, not the owner, sends its contribution, and which sends it the mean."""
        return owner

    def tree(self, owner: int, world: World) -> Tree:
        """Return the reduction tree of the chunks of ``owner``."""
        parents = [None if rank == owner else self.parent(rank, owner, world) for rank in range(world.size)]
        return Tree(owner, parents)

    def compressor_between(self, compressor: Coded, rank: int, parent: int, world: World) -> Coded:
        """Return the compressor of messages from ``rank`` to ``parent``, for chunks with ``compressor`` in the plan."""
        return compressor

    def __str__(self) -> str:
        options = [(f, getattr(self, f.name)) for f in dataclasses.fields(self)]
        shown = [f"{field.name}={value}" for field, value in options if value != field.default]
        return f"{self.spec_name}({', '.join(shown)})" if shown else self.spec_name


@dataclass(frozen=True)
class ScatterReduceAllGather(Algorithm):
    """Every rank sends each owner its chunk; owners send the means to all ranks (thesis, section 3.5.1). The default.

    It takes two hops, and every value is quantized twice, whatever the number of ranks. Each rank sends ``2(n−1)/n``
    times the bytes of the encoded bucket.

    Args:
        rates: the rate of each rank's link, in any unit, or ``measured``. A rank sends all chunks but its own once and
            its own n−1 times, so ranks with faster links own more, such that all links are busy for equally long. Of
            two ranks each sends the same whatever it owns.
    """

    spec_name: ClassVar[str] = "sra"
    is_star: ClassVar[bool] = True

    rates: tuple[float, ...] | Literal["measured", ""] = ""

    def __post_init__(self) -> None:
        if isinstance(self.rates, str):
            if self.rates:
                check_choice("rates", self.rates, ("measured",), "or give one for each rank, as (10, 10, 1)")
        else:
            check_type("rates", self.rates, tuple, "one for each rank, as (10, 10, 1), or measured")
            if not self.rates:
                raise ValueError("rates must be one for each rank, not ()")
            for rate in self.rates:
                check_number("rates", rate, low=1e-15, high=1e15)

    def shares(self, world: World) -> tuple[int, ...]:
        if isinstance(self.rates, str):
            return (1,) * world.size
        if len(self.rates) != world.size:
            raise ValueError(f"{self} names {len(self.rates)} rates, and there are {world.size} ranks")
        return tuple(round(_SHARE_UNITS * share) for share in balanced_shares(self.rates))


@dataclass(frozen=True)
class ParameterServer(Algorithm):
    """One rank, ``server``, owns everything: it reduces all messages and sends all means.

    It is for worlds in which only that rank has a fast link.
    """

    spec_name: ClassVar[str] = "parameter_server"
    is_star: ClassVar[bool] = True

    server: int = 0

    def crossings(self, world: World) -> float:
        return world.size - 1

    def shares(self, world: World) -> tuple[int, ...]:
        return _sole_owner(self.server, world, "the server")


@dataclass(frozen=True)
class Ring(Algorithm):
    """Each rank adds its values to the partial sum of the previous rank, quantizes it again and sends it to the next.

    The mean is sent back the other way. That takes ``2(n−1)`` hops and n quantizations of every value, of sums that
    grow from hop to hop: of two ranks it is the same as `ScatterReduceAllGather`, of more it has about (n−1)/2 times
    the variance. Every rank communicates with its neighbors only.
    """

    spec_name: ClassVar[str] = "ring"

    def parent(self, rank: int, owner: int, world: World) -> int:
        return (rank + 1) % world.size


@dataclass(frozen=True)
class Binomial(Algorithm):
    """A binomial tree for each owner: ``2·log2(n)`` hops and at most ``1 + log2(n)`` quantizations of every value.

    By default every rank is the root of a tree for its own chunks, and ranks send ``2(n−1)/n`` times the bytes of the
    encoded bucket on average.

    Args:
        root: the rank that owns everything: its tree is the only one, as in the thesis (section 3.5.1). It sends and
            receives ``log2(n)`` times the bytes, rounded up.
    """

    spec_name: ClassVar[str] = "tree"

    root: int | None = None

    def __post_init__(self) -> None:
        if self.root is not None:
            check_int("root", self.root, 0, hint="give a rank, or None for a tree of each rank")

    def shares(self, world: World) -> tuple[int, ...]:
        return super().shares(world) if self.root is None else _sole_owner(self.root, world, "the root")

    def crossings(self, world: World) -> float:
        return super().crossings(world) if self.root is None else (world.size - 1).bit_length()

    def parent(self, rank: int, owner: int, world: World) -> int:
        place = (rank - owner) % world.size
        return (owner + (place & (place - 1))) % world.size


@dataclass(frozen=True)
class AllGather(Algorithm):
    """Every rank sends everything to all others: one hop and one quantization, but ``n−1`` times the bytes."""

    spec_name: ClassVar[str] = "allgather"
    gathers: ClassVar[bool] = True

    def crossings(self, world: World) -> float:
        return world.size - 1


@dataclass(frozen=True)
class Hierarchical(Algorithm):
    """Sum inside each node first, so that a value crosses between nodes once for each node and not for each rank.

    Every value is quantized twice, or three times if it is quantized inside nodes, too. Means are sent compressed
    everywhere.

    Args:
        inside: the spec of the compressor inside a node; "dense" sends fp32 there, "same" uses the plan's compressor.
        across: "slices": every rank of a node sends the node's sum of a slice of its own, so that all of them use the
            node's link; "leaders": the first rank of the node sends the node's whole sum.

    Raises:
        ValueError: an option is invalid.
    """

    spec_name: ClassVar[str] = "hierarchical"
    needs_nodes: ClassVar[bool] = True

    inside: str = "dense"
    across: Literal["slices", "leaders"] = "slices"

    def __post_init__(self) -> None:
        check_type("inside", self.inside, str, "dense, same, or the spec of a quantizer")
        check_choice("across", self.across, ("slices", "leaders"))
        if self.inside not in ("dense", "same"):
            inner = parse(self.inside)
            if not isinstance(inner, Coded) or inner.gathered or needs_state(inner) or not inner.traits.plain_sum:
                raise ValueError(f"inside={self.inside}: give dense, same, or a quantizer without a state of its own")

    def shares(self, world: World) -> tuple[int, ...]:
        if self.across == "slices":
            return (1,) * world.size
        leaders = {members[0] for members in world.members}
        return tuple(int(rank in leaders) for rank in range(world.size))

    def parent(self, rank: int, owner: int, world: World) -> int:
        mine, owners = world.members[world.nodes[rank]], world.members[world.nodes[owner]]
        sender = mine[owners.index(owner) % len(mine)]  # the rank that sends its node's sum to the owner
        return owner if world.nodes[rank] == world.nodes[owner] or rank == sender else sender

    def compressor_between(self, compressor: Coded, rank: int, parent: int, world: World) -> Coded:
        return self.inner(compressor) if world.nodes[rank] == world.nodes[parent] else compressor

    def inner(self, compressor: Coded) -> Coded:
        """Return the compressor inside a node, where ``compressor`` is that between nodes."""
        if self.inside == "same":
            return compressor
        inner = parse("raw" if self.inside == "dense" or isinstance(compressor, Raw) else self.inside)
        # It has error feedback if that has: an inner rank's residual must be sent by it, too.
        chosen = ef(inner) if RESIDUAL in compressor.slots else inner
        assert isinstance(chosen, Coded)
        return chosen

    def __str__(self) -> str:
        return f"hierarchical(inside={self.inside}, across={self.across})"


def _sole_owner(owner: int, world: World, called: str) -> tuple[int, ...]:
    """Return shares of which one rank has everything."""
    if not 0 <= owner < world.size:
        raise ValueError(f"{called} is rank {owner}, and there are {world.size} ranks")
    return tuple(int(rank == owner) for rank in range(world.size))


def balanced_shares(rates: Sequence[float]) -> tuple[float, ...]:
    """Return the shares of a tensor that ranks with links of these rates should own, so that the last link ends as soon
    as possible.

    In a scatter-reduce-all-gather of n ranks, the owner of a share s sends ``1 + (n−2)·s`` of the tensor. The least
    time T has ``s_r = max(0, (T·rate_r − 1)/(n−2))`` with ``Σ s_r = 1``.
    """
    num_ranks = len(rates)
    if num_ranks <= 2:
        return (1 / num_ranks,) * num_ranks
    # Remove owners, those with the slowest links first, until all that remain have a positive share.
    owners = sorted(range(num_ranks), key=lambda rank: -rates[rank])
    while True:
        time = (num_ranks - 2 + len(owners)) / sum(rates[rank] for rank in owners)
        if time * rates[owners[-1]] >= 1 or len(owners) == 1:
            break
        owners.pop()
    shares = [0.0] * num_ranks
    for rank in owners:
        shares[rank] = (time * rates[rank] - 1) / (num_ranks - 2)
    return tuple(shares)


_ALL = (ScatterReduceAllGather, Ring, Binomial, AllGather, Hierarchical, ParameterServer)
_ALGORITHMS: dict[str, type[Algorithm]] = {kind.spec_name: kind for kind in _ALL}
_calls = Calls[Algorithm](
    kind="collective algorithm",
    what="collective algorithm",
    example="sra(rates=(10, 10, 1))",
    find=_ALGORITHMS.get,
    names=lambda: _ALGORITHMS,
    nested=("Algorithm",),
)


def parse_algorithm(spec: str | Algorithm) -> Algorithm:
    """Parse the spec of a collective algorithm. Nothing in it is evaluated.

    Specs are ``sra``, ``sra(rates=measured)``, ``ring``, ``tree``, ``tree(root=0)``, ``allgather``,
    ``parameter_server(server=2)`` and ``hierarchical(inside=dense, across=leaders)``.

    Raises:
        ValueError: the spec is invalid: there is no such algorithm, or an option is wrong.
    """
    try:
        return spec if isinstance(spec, Algorithm) else _calls.parse(spec)
    except TypeError as error:
        raise ValueError(f"{spec!r} is not a collective algorithm: {error}") from None
