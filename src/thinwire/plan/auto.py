"""``auto``: compresses what pays on the links as they are now, within an error, and leaves it when it does not pay."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from thinwire.compressors import Compressor, Raw, bare, parse
from thinwire.plan import allocate
from thinwire.plan.choices import Choices, dressed, with_gradient
from thinwire.plan.forecast import Bucket, Links, Pace, coded_transfer, native_step, planned_step
from thinwire.plan.policy import Evidence, Policy, Proposal, StepTime

_ALIKE = 0.25
"""By how much a link may have changed for what was measured on it to hold still."""


@dataclass(frozen=True, kw_only=True)
class Auto(Policy):
    """What `thinwire doctor` does, while a model trains.

        wire = thinwire.compress(model, "auto")
        wire = thinwire.compress(model, thinwire.Auto(error=0.1, every=200))

    The first ``warmup`` steps are exact, as without thinwire, and are watched: when buckets become ready, how long
    steps take. Then, and before each later decision, all ranks measure their links and codecs; of all plans that err
    no more than ``error`` the one with the shortest foretold step is taken, if that is shorter than an uncompressed
    one by ``gain``. If not, or if steps turn out no faster, gradients travel as they are until the next decision.
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

    @property
    def memory_size(self) -> int:
        return 4

    def to_measure(self, reference: Mapping[str, Compressor]) -> frozenset[Compressor]:
        return frozenset({*self._compressors(), Raw()})

    def _compressors(self) -> tuple[Compressor, ...]:
        return dressed([parse(spec) for spec in self.candidates])

    def propose(self, evidence: Evidence) -> Proposal:
        started = time.perf_counter()
        off: dict[str, Compressor] = dict.fromkeys(evidence.reference, Raw())
        if evidence.links is None or evidence.num_ranks < 2:
            return Proposal(off, note="off: there are no links to measure")
        if not evidence.steps:
            return Proposal(dict(evidence.present), note="no step was timed: the plan stays", memory=evidence.memory)
        # On both sides of the comparison traffic costs what it costs; only codecs come on top.
        links = replace(evidence.links, native_cpu=0.0, exchange_cpu=0.0)
        of = _Foretold(middle_pace(evidence.steps), links, evidence.codec_s)
        table = self._table(evidence, of)
        errors_s = time.perf_counter() - started
        plans = [dict(off) | plan for plan in self._plans(table)]
        best = min(plans, key=of.step_s)
        note, on, memory = self._decide(evidence, of, best)
        chosen = best if on else off
        errors = {c.name: float(c.errors[c.candidates.index(chosen[c.name])]) for c in table}
        note += f"; {_summary(chosen)}, error {_relative(errors, table):.3f} of {self.error:g}" if on else ""
        solve_s = time.perf_counter() - started - errors_s
        everything = dict.fromkeys(evidence.reference, memory)
        return Proposal(chosen, errors, {}, note, everything, errors_s, solve_s)

    def _table(self, evidence: Evidence, of: _Foretold) -> list[Choices]:
        gradients = with_gradient(evidence.reference, evidence.gradients)
        candidates = self._compressors()
        return [
            Choices.of(name, gradient, candidates, Raw(), lambda name, c, shape: of.layer_s(c, shape))
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

    def _decide(
        self, evidence: Evidence, of: _Foretold, best: Mapping[str, Compressor]
    ) -> tuple[str, bool, tuple[float, ...]]:
        """What is to be said, whether to compress, and what to remember: steps measured raw and compressed, each with
        the seconds a byte of an all-reduce took then."""
        raw_s, raw_link, compressed_s, compressed_link = next(iter(evidence.memory.values()), (0.0,) * 4)
        link = of.links.native.per_byte
        now = median(step.seconds for step in evidence.steps)
        foretold = of.step_s(best)
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

    def step_s(self, plan: Mapping[str, Compressor]) -> float:
        """Seconds of a step with a plan of the layers that may be compressed."""
        if all(isinstance(c, Raw) for c in plan.values()):
            return native_step(self.pace, self.links)
        names = [name for bucket in self.pace.buckets for name, _ in bucket.layers]
        return planned_step(self.pace, self.links, {name: plan.get(name, Raw()) for name in names}, self.codec_s)

    def layer_s(self, compressor: Compressor, shape: Sequence[int]) -> float:
        """What a layer adds to the time of its bucket; latencies are the bucket's."""
        transfer = coded_transfer(Bucket(0.0, (("", tuple(shape)),)), {"": compressor}, self.links, self.codec_s)
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
