"""Accordion: less compression where a layer's gradient changes fast (Agarwal et al. 2021; thesis, section 4.6.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.compressors import Chain, Compressor, PowerSGD, TopK, Unsuited, Wrapper, bare, ef, parse
from thinwire.plan.choices import with_gradient
from thinwire.plan.family import weaker
from thinwire.plan.policy import Evidence, Policy, Proposal, norm_of


@dataclass(frozen=True, kw_only=True)
class Accordion(Policy):
    """Two compressors a layer: the weak one while it is in a critical regime, else the strong one.

    Critical is the first interval, one after the learning rate dropped (if ``compress(optimizer=...)`` tells it), and
    one in which the norm of the summed gradient changed by a share of at least ``eta``.
    """

    every: int = 1000
    weak: str | None = None
    """Spec of less compression; None: what the rules name."""
    strong: str | None = None
    """Spec of more compression; None: as in the thesis, of 4 bits 3, of rank 64 rank 16, of a density of 2 % 0.1 %."""
    eta: float = 0.5
    drop: float = 0.5
    """The learning rate drops where it falls to at most this share since the last decision: steps of a schedule are
    meant, not what a cosine loses from one decision to the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eta >= 0:
            raise ValueError(f"eta must be at least 0, not {self.eta}: a relative change")
        if not 0 < self.drop < 1:
            raise ValueError(f"drop must be between 0 and 1, not {self.drop}: a share of the learning rate")
        for spec in (self.weak, self.strong):
            if spec is not None:
                parse(spec)

    @property
    def memory_size(self) -> int:
        return 2

    def check(self, reference: Mapping[str, Compressor], shapes: Mapping[str, Sequence[int]]) -> None:
        for name, compressor in reference.items():
            for strong in (False, True):
                self._choice(compressor, shapes[name], strong=strong)

    def propose(self, evidence: Evidence) -> Proposal:
        layers, memory = dict(evidence.reference), dict(evidence.memory)
        rate = evidence.learning_rate if evidence.learning_rate is not None else 0.0
        for name, gradient in with_gradient(evidence.reference, evidence.gradients).items():
            norm = norm_of(gradient)
            before, rate_before = memory.get(name, (0.0, 0.0))
            changed = abs(before - norm) >= self.eta * before
            critical = name not in memory or changed or rate <= self.drop * rate_before < rate_before
            layers[name] = self._choice(evidence.reference[name], tuple(gradient.shape), strong=not critical)
            memory[name] = (norm, rate)
        return Proposal(layers, memory=memory)

    def _choice(self, reference: Compressor, shape: Sequence[int], *, strong: bool) -> Compressor:
        asked = self.strong if strong else self.weak
        if asked is not None:
            chosen = parse(asked)
        else:
            chosen = weaker(reference, _factor(reference)) if strong else reference
        try:
            chosen = chosen.fit(shape)
        except Unsuited:
            return reference
        # What is owed must survive the change.
        owes = any(isinstance(c, Wrapper) or c.wants_feedback for c in (reference, chosen, *self._asked()))
        return ef(chosen) if owes and not isinstance(chosen, Wrapper) else chosen

    def _asked(self) -> tuple[Compressor, ...]:
        return tuple(parse(spec) for spec in (self.weak, self.strong) if spec is not None)


def _factor(compressor: Compressor) -> float:
    inner = bare(compressor)
    inner = inner.first if isinstance(inner, Chain) else inner
    return 1 / 4 if isinstance(inner, PowerSGD) else 1 / 20 if isinstance(inner, TopK) else 3 / 4
