"""``auto``: compresses what pays on the links as they are now, within an error, and leaves it when it does not pay."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from thinwire.collectives import Hierarchical, ScatterReduceAllGather, Topology, parse_topology
from thinwire.compressors import Coded, Compressor, Raw, bare, parse
from thinwire.plan import allocate
from thinwire.plan.choices import Choices, dressed, with_gradient
from thinwire.plan.forecast import Bucket, Links, Pace, coded_transfer, native_step, planned_step
from thinwire.plan.policy import Evidence, Policy, Proposal, StepTime

_ALIKE = 0.25
"""By how much a link may have changed for what was measured on it to hold still."""
_AHEAD = 0.97
"""Another topology's step must be shorter by this factor than the present one's, and than that of one named before
it."""


@dataclass(frozen=True, kw_only=True)
class Auto(Policy):
    """What `thinwire doctor` does, while a model trains.

        wire = thinwire.compress(model, "auto")
        wire = thinwire.compress(model, thinwire.Auto(error=0.1, every=200))

    The first ``warmup`` steps are exact, as without thinwire, and are watched: when buckets become ready, how long
    steps take. Then, and before each later decision, all ranks measure their links and codecs; of all plans that err
    no more than ``error`` the one with the shortest foretold step is taken, if that is shorter than an uncompressed
    one by ``gain``. If not, or if steps turn out no faster, gradients travel as they are until the next decision.

    What travels over which link is part of it: exact or in 8 bits inside a node and in fewer bits between nodes, less
    by slow links than by fast ones.
    """

    every: int = 500
    """Steps between two decisions."""
    warmup: int = 20
    window: int | None = 10
    lag: int | None = 5
    error: float = 0.15
    """Of all gradients together: the L2 norm of what is lost of them, over theirs. Min-max in 4 bits loses 0.14 of
    those of a GPT."""
    gain: float = 0.05
    """By how much of an uncompressed step a compressed one must be faster."""
    candidates: tuple[str, ...] = (*(f"minmax(bits={bits}, bucket=128)" for bits in (2, 3, 4, 5, 6, 8)), "cast(bf16)")
    """What a layer may become, beside raw. If one of them wants error feedback, all get it."""
    topologies: tuple[str, ...] = (
        "sra",
        "sra(rates=measured)",
        "hierarchical(inside=dense)",
        "hierarchical(inside=minmax(bits=8, bucket=128))",
        "hierarchical(inside=same)",
    )
    """How messages may meet, where `thinwire.compress` was not told; of two that take about as long, the first.
    Hierarchies count where several ranks share a node, measured rates where links differ by a quarter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.error < 1:
            raise ValueError(f"error must be above 0 and below 1, not {self.error}: a share of the gradients' norm")
        if not 0 <= self.gain < 1:
            raise ValueError(f"gain must be at least 0 and below 1, not {self.gain}: a share of a step")
        if not isinstance(self.candidates, tuple) or not self.candidates:
            raise ValueError(f"candidates must be a tuple of specs, not {self.candidates!r}")
        if self.warmup <= self.lag_steps:
            raise ValueError(
                f"warmup={self.warmup} must be more than lag={self.lag_steps}: the first decision is made within it"
            )
        self._compressors()
        if not isinstance(self.topologies, tuple) or not self.topologies:
            raise ValueError(f"topologies must be a tuple of specs, not {self.topologies!r}")
        for topology in self.considers:
            star = isinstance(topology, ScatterReduceAllGather) and topology.rates in ("", "measured")
            if not star and not (isinstance(topology, Hierarchical) and topology.across == "slices"):
                raise ValueError(
                    f"{topology} among topologies: steps are foretold for sra, sra(rates=measured) and "
                    "hierarchical(inside=...); give another one to thinwire.compress as topology="
                )

    @property
    def considers(self) -> tuple[Topology, ...]:
        return tuple(map(parse_topology, self.topologies))

    @property
    def memory_size(self) -> int:
        return 4

    def to_measure(self, reference: Mapping[str, Compressor]) -> frozenset[Compressor]:
        compressors = self._compressors()
        coded = [c for c in compressors if isinstance(c, Coded)]
        inner = [t.inner(c) for t in self.considers if isinstance(t, Hierarchical) for c in coded]
        return frozenset({*compressors, *inner, Raw()})

    def _compressors(self) -> tuple[Compressor, ...]:
        return dressed([parse(spec) for spec in self.candidates])

    def _ways(self, evidence: Evidence, links: Links) -> list[Topology]:
        """How messages may meet in this world, over these links."""
        if evidence.asked != ScatterReduceAllGather():
            return [evidence.topology]
        plain = all(c.plain_sum for c in self._compressors() if isinstance(c, Coded))
        found: list[Topology] = []
        for topology in self.considers:
            way = links.way(topology)
            if way is not None and (way.is_star or plain):
                found.append(_settled(way, evidence.topology))
        return found or [evidence.topology]

    def propose(self, evidence: Evidence) -> Proposal:
        started = time.perf_counter()
        off: dict[str, Compressor] = dict.fromkeys(evidence.reference, Raw())
        if evidence.links is None or evidence.num_ranks < 2:
            return Proposal(off, note="off: there are no links to measure")
        if not evidence.steps:
            return Proposal(dict(evidence.present), note="no step was timed: the plan stays", memory=evidence.memory)
        # On both sides of the comparison traffic costs what it costs; only codecs come on top.
        links = replace(evidence.links, native_cpu=0.0, exchange_cpu=0.0)
        now = _Foretold(middle_pace(evidence.steps), links, evidence.codec_s, evidence.topology)
        table = self._table(evidence)
        errors_s = time.perf_counter() - started
        ways = [replace(now, topology=topology) for topology in self._ways(evidence, links)]
        found = [(of, self._best(of, off, table)) for of in sorted(ways, key=lambda of: of.topology != now.topology)]
        steps = [of.step_s(plan) for of, plan in found]
        (of, best), step = next(pair for pair in zip(found, steps, strict=True) if _AHEAD * pair[1] <= min(steps))
        note, on, memory = self._decide(evidence, now, step)
        chosen = best if on else off
        if on and of.topology != ScatterReduceAllGather():
            note += f", by {of.topology}"
        rows = [row for row, _ in table]
        errors = {c.name: float(c.errors[c.candidates.index(chosen[c.name])]) for c in rows}
        note += f"; {_summary(chosen)}, error {_relative(errors, rows):.3f} of {self.error:g}" if on else ""
        solve_s = time.perf_counter() - started - errors_s
        everything = dict.fromkeys(evidence.reference, memory)
        return Proposal(chosen, errors, {}, note, everything, errors_s, solve_s, of.topology if on else None)

    def _best(
        self, of: _Foretold, off: Mapping[str, Compressor], table: Sequence[tuple[Choices, tuple[int, ...]]]
    ) -> dict[str, Compressor]:
        """The plan with the shortest step."""
        priced = [
            replace(row, costs=np.array([of.layer_s(c, shape) for c in row.candidates], dtype=np.float64))
            for row, shape in table
        ]
        return min((dict(off) | plan for plan in self._plans(priced)), key=of.step_s)

    def _table(self, evidence: Evidence) -> list[tuple[Choices, tuple[int, ...]]]:
        """What each layer may become and errs then, not yet priced, and its shape."""
        gradients = with_gradient(evidence.reference, evidence.gradients)
        candidates = self._compressors()
        return [
            (Choices.of(name, gradient, candidates, Raw(), lambda name, c, shape: 0.0), tuple(gradient.shape))
            for name, gradient in gradients.items()
        ]

    def _plans(self, table: Sequence[Choices]) -> list[dict[str, Compressor]]:
        """Plans within the error: the cheapest of all candidates, and of each kind alone, which has fewer messages."""
        kinds = dict.fromkeys(type(bare(c)) for of in table for c in of.candidates if not isinstance(c, Raw))
        found = []
        for kind in (None, *kinds):
            kept = [
                [k for k, c in enumerate(of.candidates) if kind is None or isinstance(bare(c), kind | Raw)]
                for of in table
            ]
            errors = [of.errors[ks] for of, ks in zip(table, kept, strict=True)]
            costs = [of.costs[ks] for of, ks in zip(table, kept, strict=True)]
            budget = self.error**2 * sum(of.norm**2 for of in table)
            picked = allocate.dynamic_programme(errors, costs, budget) if table else []
            found.append(
                {of.name: of.candidates[ks[k]] for of, ks, k in zip(table, kept, picked, strict=True)},
            )
        return found

    def _decide(self, evidence: Evidence, of: _Foretold, foretold: float) -> tuple[str, bool, tuple[float, ...]]:
        """What is to be said, whether to compress, and what to remember: steps measured raw and compressed, each with
        the seconds a byte of an all-reduce took then. ``of``: as messages meet now."""
        raw_s, raw_link, compressed_s, compressed_link = next(iter(evidence.memory.values()), (0.0,) * 4)
        link = of.links.native.per_byte
        now = median(step.seconds for step in evidence.steps)
        if all(isinstance(c, Raw) for c in evidence.present.values()) or not evidence.steps[-1].compressed:
            raw_s, raw_link = now, link
            if _alike(link, compressed_link):
                # It was tried on such a link: what was measured then is better than what is foretold.
                foretold = max(foretold, compressed_s)
        else:
            compressed_s, compressed_link = now, link
            # What the model gets wrong of the present plan it gets wrong of others, too.
            foretold *= now / of.step_s(evidence.present)
        uncompressed = raw_s if _alike(link, raw_link) else native_step(of.pace, of.links)
        on = foretold < (1 - self.gain) * uncompressed
        told = (
            f"{'on' if on else 'off'}: a step takes {1e3 * uncompressed:.0f} ms uncompressed and would take "
            f"{1e3 * foretold:.0f} ms compressed, links carry {8e-6 / max(link, 1e-12):.0f} Mbit/s"
        )
        return told, on, (raw_s, raw_link, compressed_s, compressed_link)


@dataclass(frozen=True)
class _Foretold:
    """Steps at one pace, over links as they were measured last."""

    pace: Pace
    links: Links
    codec_s: Mapping[Compressor, float]
    topology: Topology

    def step_s(self, plan: Mapping[str, Compressor]) -> float:
        """Seconds of a step with a plan of the layers that may be compressed."""
        if all(isinstance(c, Raw) for c in plan.values()):
            return native_step(self.pace, self.links)
        names = [name for bucket in self.pace.buckets for name, _ in bucket.layers]
        layers = {name: plan.get(name, Raw()) for name in names}
        return planned_step(self.pace, self.links, layers, self.codec_s, self.topology)

    def layer_s(self, compressor: Compressor, shape: Sequence[int]) -> float:
        """What a layer adds to the time of its bucket; latencies are the bucket's."""
        alone = Bucket(0.0, (("", tuple(shape)),))
        transfer = coded_transfer(alone, {"": compressor}, self.links, self.codec_s, self.topology)
        if self.pace.shared:
            return transfer.after_s + self.pace.shared * transfer.codec_s
        return transfer.after_s


def middle_pace(steps: Sequence[StepTime]) -> Pace:
    """The median of steps whose buckets are those of the last one."""
    last = steps[-1].pace
    alike = [s.pace for s in steps if [b.layers for b in s.pace.buckets] == [b.layers for b in last.buckets]]
    buckets = tuple(
        replace(bucket, ready_s=median(pace.buckets[i].ready_s for pace in alike))
        for i, bucket in enumerate(last.buckets)
    )
    return replace(last, buckets=buckets, compute_s=median(pace.compute_s for pace in alike))


def _settled(topology: Topology, present: Topology) -> Topology:
    """The topology; the present one, if that has about the same rates."""
    if not isinstance(topology, ScatterReduceAllGather) or not isinstance(present, ScatterReduceAllGather):
        return topology
    now, then = topology.rates, present.rates
    if isinstance(now, str) or isinstance(then, str):
        return topology
    return present if all(_alike(*pair) for pair in zip(now, then, strict=True)) else topology


def _alike(link: float, then: float) -> bool:
    return then > 0 and abs(link / then - 1) <= _ALIKE


def _summary(plan: Mapping[str, Compressor]) -> str:
    counts: dict[str, int] = {}
    for compressor in plan.values():
        counts[str(compressor)] = counts.get(str(compressor), 0) + 1
    return ", ".join(f"{count} x {spec}" for spec, count in sorted(counts.items()))


def _relative(errors: Mapping[str, float], table: Sequence[Choices]) -> float:
    norm = sum(of.norm**2 for of in table)
    return float(np.sqrt(sum(errors.values()) / norm)) if norm else 0.0
