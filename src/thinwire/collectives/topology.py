"""Topologies: along which tree the parts of a chunk are added on their way to its owner, and its mean comes back.

A topology is a pure function: for a chunk of rank ``owner``, to whom does ``rank`` hand what it has (`parent`)? Stars
are a scatter-reduce-all-gather or a parameter server, chains a ring, binomial trees a tree, stars of stars a hierarchy.
One collective (`thinwire.collectives.all_reduce`) runs them all.
"""

from __future__ import annotations

import ast
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from thinwire.compressors import RESIDUAL, Coded, Raw, ef, expression, parse

_FINEST = 1000
"""Shares of owners are whole numbers of about this size: the same on every rank, whatever rounds how."""


@dataclass(frozen=True)
class World:
    """How many ranks there are, and on which node each of them is."""

    size: int
    nodes: tuple[int, ...] = ()
    """By rank, numbered from 0 in the order of their first ranks; empty where nobody asked."""

    def __post_init__(self) -> None:
        if self.nodes and len(self.nodes) != self.size:
            raise ValueError(f"{self.size} ranks, but nodes of {len(self.nodes)}")

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        return tuple(tuple(r for r in range(self.size) if self.nodes[r] == node) for node in sorted(set(self.nodes)))


class Tree:
    """The tree of one owner's chunks: parents, children, and when whose turn is."""

    def __init__(self, owner: int, parents: Sequence[int | None]) -> None:
        self.owner = owner
        self.parents = tuple(parents)
        children: list[list[int]] = [[] for _ in parents]
        for rank, parent in enumerate(parents):
            if (parent is None) != (rank == owner):
                raise ValueError(f"in the tree of owner {owner}, the parent of rank {rank} is {parent}")
            if parent is not None:
                children[parent].append(rank)
        self.children = tuple(tuple(ranks) for ranks in children)
        self.depth = self._depths()
        self.height = self._heights()

    def _depths(self) -> tuple[int, ...]:
        """Hops of a mean on its way from the owner to each rank."""
        depth = [-1] * len(self.parents)
        depth[self.owner], reached = 0, [self.owner]
        for rank in reached:
            for child in self.children[rank]:
                depth[child] = depth[rank] + 1
                reached.append(child)
        if len(reached) != len(self.parents):
            raise ValueError(f"not every rank reaches owner {self.owner}: {self.parents}")
        return tuple(depth)

    def _heights(self) -> tuple[int, ...]:
        """Hops of the parts that each rank waits for, at most; 0 for one that waits for none."""
        height = [0] * len(self.parents)
        for rank in sorted(range(len(self.parents)), key=lambda r: -self.depth[r]):
            parent = self.parents[rank]
            if parent is not None:
                height[parent] = max(height[parent], height[rank] + 1)
        return tuple(height)


@dataclass(frozen=True)
class Topology(ABC):
    """How the coded messages of a bucket meet. ``str(t)`` is its spec, and `parse_topology` gives it back."""

    spec_name: ClassVar[str]

    @property
    def gathers(self) -> bool:
        """Whether every rank decodes what every other one encoded, so that nobody owns anything."""
        return False

    @property
    def needs_nodes(self) -> bool:
        """Whether it must know which ranks share a node."""
        return False

    @property
    def is_star(self) -> bool:
        """Whether an owner gets every rank's message itself, as a majority vote needs."""
        return False

    def shares(self, world: World) -> tuple[int, ...]:
        """How much of every layer each rank owns, in proportion."""
        return (1,) * world.size

    def crossings(self, world: World) -> float:
        """How many times the bytes of an encoded bucket the busiest rank sends, about."""
        return 2 * (world.size - 1) / world.size

    @abstractmethod
    def parent(self, rank: int, owner: int, world: World) -> int:
        """To whom ``rank``, which is not the owner, sends its part of a chunk, and who sends it the mean."""

    def tree(self, owner: int, world: World) -> Tree:
        parents = [None if rank == owner else self.parent(rank, owner, world) for rank in range(world.size)]
        return Tree(owner, parents)

    def form(self, compressor: Coded, rank: int, parent: int, world: World) -> Coded:
        """What ``rank`` encodes a part with that it sends to ``parent``."""
        return compressor

    def __str__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        shown = [f"{name}={value}" for name, value in given if value]
        return f"{self.spec_name}({', '.join(shown)})" if shown else self.spec_name


@dataclass(frozen=True)
class _Star(Topology):
    """Everybody speaks to each owner directly."""

    @property
    def is_star(self) -> bool:
        return True

    def parent(self, rank: int, owner: int, world: World) -> int:
        return owner


@dataclass(frozen=True)
class ScatterReduceAllGather(_Star):
    """Everybody sends each owner its chunk, the owners send everybody the means (thesis, section 3.5.1). The default.

    Two hops, and every value is quantised twice, whatever the number of ranks. Each rank sends ``2(n−1)/n`` of the
    bytes. ``rates``: how fast each rank's link is, in any unit, or ``measured``. A rank sends all chunks but its own
    once and its own n−1 times, so owners with faster links take larger chunks, such that all links are busy alike
    (of two ranks each sends the same whatever it owns).
    """

    spec_name: ClassVar[str] = "sra"

    rates: tuple[float, ...] | Literal["measured", ""] = ""

    def __post_init__(self) -> None:
        if isinstance(self.rates, str):
            if self.rates not in ("", "measured"):
                raise ValueError(f"rates is {self.rates!r}: give one for each rank, as (10, 10, 1), or measured")
        elif not isinstance(self.rates, tuple) or not all(map(_is_rate, self.rates)) or not self.rates:
            raise ValueError(f"rates {self.rates}: every rank needs a number above zero, of 1e-15 to 1e15")

    def shares(self, world: World) -> tuple[int, ...]:
        if isinstance(self.rates, str):
            return (1,) * world.size
        if len(self.rates) != world.size:
            raise ValueError(f"{self} names {len(self.rates)} rates, and there are {world.size} ranks")
        return tuple(round(_FINEST * share) for share in balanced_shares(self.rates))


@dataclass(frozen=True)
class ParameterServer(_Star):
    """One rank owns everything: it gets all messages, and sends all means. For the only rank with a fast link."""

    spec_name: ClassVar[str] = "parameter_server"

    server: int = 0

    def crossings(self, world: World) -> float:
        return world.size - 1

    def shares(self, world: World) -> tuple[int, ...]:
        if not 0 <= self.server < world.size:
            raise ValueError(f"the server is rank {self.server}, and there are {world.size} ranks")
        return tuple(int(rank == self.server) for rank in range(world.size))


@dataclass(frozen=True)
class Ring(Topology):
    """Each chunk goes from neighbour to neighbour, who adds and quantises anew; the mean goes back the other way.

    ``2(n−1)`` hops and n quantisations a value, of sums that grow on the way: at two ranks the same as
    `ScatterReduceAllGather`, beyond that about (n−1)/2 times its variance. Every rank speaks to its neighbours only.
    """

    spec_name: ClassVar[str] = "ring"

    def parent(self, rank: int, owner: int, world: World) -> int:
        return (rank + 1) % world.size


@dataclass(frozen=True)
class Binomial(Topology):
    """A binomial tree for each owner, rooted at it: ``2·log2(n)`` hops, ``1 + log2(n)`` quantisations a value at most.

    The thesis's tree has one root for all, whose link carries ``log2(n)`` times the bytes; here every rank is the root
    of its own chunks, and all send ``2(n−1)/n`` of them.
    """

    spec_name: ClassVar[str] = "tree"

    def parent(self, rank: int, owner: int, world: World) -> int:
        place = (rank - owner) % world.size
        return (owner + (place & (place - 1))) % world.size


@dataclass(frozen=True)
class AllGather(Topology):
    """Everybody sends everybody everything: one hop and one quantisation a value, but ``n−1`` times the bytes."""

    spec_name: ClassVar[str] = "allgather"

    @property
    def gathers(self) -> bool:
        return True

    def crossings(self, world: World) -> float:
        return world.size - 1

    def parent(self, rank: int, owner: int, world: World) -> int:
        return owner


@dataclass(frozen=True)
class Hierarchical(Topology):
    """Add up inside each node first, so that what crosses between nodes does so once a node and not once a rank.

    ``across``: "slices" (every rank speaks for its node about a part of its own, and all of a node's ranks use its
    link) or "leaders" (the node's first rank speaks for it about everything). ``inside``: the spec of the compressor
    inside a node; "dense" sends fp32 there, "same" what the plan says. Means travel compressed everywhere, verbatim.
    A value is quantised twice, or three times if it is inside, too.
    """

    spec_name: ClassVar[str] = "hierarchical"

    inside: str = "dense"
    across: Literal["slices", "leaders"] = "slices"

    def __post_init__(self) -> None:
        if not isinstance(self.inside, str):
            raise ValueError(f"inside={self.inside!r}: give dense, same, or the spec of a quantiser")
        if self.across not in ("slices", "leaders"):
            raise ValueError(f"across is {self.across!r}: slices or leaders")
        if self.inside not in ("dense", "same"):
            inner = parse(self.inside)
            if not isinstance(inner, Coded) or inner.gathered or inner.slots or not inner.plain_sum:
                raise ValueError(f"inside={self.inside}: give dense, same, or a quantiser without a state of its own")

    @property
    def needs_nodes(self) -> bool:
        return True

    def shares(self, world: World) -> tuple[int, ...]:
        if self.across == "slices":
            return (1,) * world.size
        leaders = {members[0] for members in world.members}
        return tuple(int(rank in leaders) for rank in range(world.size))

    def parent(self, rank: int, owner: int, world: World) -> int:
        mine, its = world.members[world.nodes[rank]], world.members[world.nodes[owner]]
        speaker = mine[its.index(owner) % len(mine)]
        return owner if world.nodes[rank] == world.nodes[owner] or rank == speaker else speaker

    def form(self, compressor: Coded, rank: int, parent: int, world: World) -> Coded:
        return self.inner(compressor) if world.nodes[rank] == world.nodes[parent] else compressor

    def inner(self, compressor: Coded) -> Coded:
        """What a part is encoded with that stays on its node, where ``compressor`` is for those between nodes."""
        return compressor if self.inside == "same" else _inside(self.inside, compressor)

    def __str__(self) -> str:
        return f"hierarchical(inside={self.inside}, across={self.across})"


def _is_rate(rate: object) -> bool:
    return isinstance(rate, int | float) and not isinstance(rate, bool) and 1e-15 <= rate <= 1e15


def _inside(spec: str, compressor: Coded) -> Coded:
    """What stands for ``compressor`` inside a node; with error feedback it must hand on what is owed, too."""
    inner = parse("raw" if spec == "dense" or isinstance(compressor, Raw) else spec)
    chosen = ef(inner) if RESIDUAL in compressor.slots else inner
    assert isinstance(chosen, Coded)
    return chosen


def balanced_shares(rates: Sequence[float]) -> tuple[float, ...]:
    """Shares of a tensor that owners with links of these rates should own, so that the slowest link ends first.

    In a scatter-reduce-all-gather of n ranks, who owns a share s sends ``1 + (n−2)·s`` of the tensor. The least time T
    has ``s_r = max(0, (T·rate_r − 1)/(n−2))`` with ``Σ s_r = 1``.
    """
    num_ranks = len(rates)
    if num_ranks <= 2:
        return (1 / num_ranks,) * num_ranks
    # Leave out owners from the slowest link up, until there is a share for all that remain.
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


_TOPOLOGIES: dict[str, type[Topology]] = {
    t.spec_name: t for t in (ScatterReduceAllGather, Ring, Binomial, AllGather, Hierarchical, ParameterServer)
}


def parse_topology(spec: str | Topology) -> Topology:
    """The topology of a spec: ``sra``, ``ring``, ``tree``, ``allgather``, ``parameter_server(server=2)``,
    ``hierarchical(inside=dense, across=leaders)``. Nothing in it is evaluated.

    Raises:
        ValueError: the text is none of these, or an option is wrong.
    """
    if isinstance(spec, Topology):
        return spec
    known = ", ".join(_TOPOLOGIES)
    try:
        node = expression(spec)
    except SyntaxError:
        raise ValueError(f"{spec!r} is not a topology: there are {known}") from None
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name) or name.id not in _TOPOLOGIES or (isinstance(node, ast.Call) and node.args):
        raise ValueError(f"{spec!r} is not a topology: there are {known}, with options as in sra(rates=(10, 10, 1))")
    kind = _TOPOLOGIES[name.id]
    options = {}
    for keyword in node.keywords if isinstance(node, ast.Call) else ():
        names = [f.name for f in dataclasses.fields(kind)]
        if keyword.arg not in names:
            takes = ", ".join(names) or "no options"
            raise ValueError(f"{spec!r}: {name.id} has no option {keyword.arg!r}; it takes {takes}")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            options[keyword.arg] = ast.unparse(keyword.value)
        except (TypeError, RecursionError, MemoryError):
            raise ValueError(f"{spec[:80]!r}: {keyword.arg} is not a plain value") from None
    try:
        return kind(**options)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{spec!r} is not a topology: {error}") from None
