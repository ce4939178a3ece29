"""Accordion: less compression where a layer's gradient changes fast (Agarwal et al. 2021; thesis, section 4.6.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.arguments import check_number
from thinwire.compressors import Compressor, UnsuitedError, Wrapper, parse
from thinwire.policies.candidates import fed_like, usable_gradients
from thinwire.policies.families import check_contracting, contracts, parameter_name, with_parameter, with_share
from thinwire.policies.policy import Evidence, Policy, Proposal, gradient_norm

_HIGH_COMPRESSION = {"bits": 3 / 4, "rank": 1 / 4, "density": 1 / 20, "kept": 1 / 20}
"""Ratio of high to low compression of each parameter: the thesis's pairs of 3 and 4 bits, ranks 16 and 64, densities of
0.1 % and 2 %."""


@dataclass(frozen=True, kw_only=True)
class Accordion(Policy):
    """A policy of two compressors for each layer: low compression in critical regimes, else high compression.

        adapt="accordion(pair=(2, 4))"                 # bits, as the thesis's first pair (section 3.7.3)
        adapt="accordion(pair=(16, 64))"               # ranks of PowerSGD (table 4.5)

    A regime is critical in the first interval, in one after the learning rate dropped (if ``compress(optimizer=...)``
    shows it), and in one in which the norm of the summed gradient changed by a share of at least ``eta``. A drop is a
    step of a schedule; a rate that falls a little in every step, as a cosine's, does not drop.
    """

    every: int = 1000
    pair: tuple[float, float] | tuple[str, str] | None = None
    """High and low compression: two numbers of bits, ranks or densities for the compressor that the rules name, or two
    specs. If None, low is what the rules name, and high has 3/4 of its bits, 1/4 of its rank or 1/20 of its density, as
    in the thesis."""
    eta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eta", self.eta, low=0)
        if self.pair is None:
            return
        alike = {type(value) is str for value in self.pair} if isinstance(self.pair, tuple) else set()
        if len(alike) != 1 or len(self.pair) != 2:
            raise ValueError(
                f"pair must be two numbers, high compression first, such as (2, 4), or two specs, not {self.pair!r}"
            )
        for value in self.pair:
            if isinstance(value, str):
                parse(value)
            elif type(value) not in (int, float) or not value > 0:
                raise ValueError(f"pair must be numbers above 0, not {self.pair!r}")

    @property
    def memory_size(self) -> int:
        return 1

    def check(self, reference: Mapping[str, Compressor], shapes: Mapping[str, Sequence[int]]) -> None:
        for name, compressor in reference.items():
            for high in (False, True):
                self._choice(compressor, shapes[name], high=high)

    def propose(self, evidence: Evidence) -> Proposal:
        layers, memory = dict(evidence.reference), dict(evidence.memory)
        for name, gradient in usable_gradients(evidence.reference, evidence.gradients).items():
            norm = gradient_norm(gradient)
            critical = name not in memory or evidence.learning_rate_dropped
            if name in memory:
                (before,) = memory[name]
                critical |= abs(before - norm) >= self.eta * before
            layers[name] = self._choice(evidence.reference[name], tuple(gradient.shape), high=not critical)
            memory[name] = (norm,)
        return Proposal(layers, memory=memory)

    def _choice(self, reference: Compressor, shape: Sequence[int], *, high: bool) -> Compressor:
        try:
            chosen = self._asked(reference, high=high).fit(shape)
        except UnsuitedError:
            return reference
        # Residuals must survive the change.
        pair = (self._asked(reference, high=side) for side in (False, True))
        feedback = any(isinstance(c, Wrapper) or c.traits.wants_feedback for c in (reference, *pair))
        chosen = fed_like(reference, chosen) if feedback and not isinstance(chosen, Wrapper) else chosen
        if self.pair is not None:
            check_contracting(f"pair={self.pair}", [chosen])
        return chosen if contracts(chosen) else reference

    def _asked(self, reference: Compressor, *, high: bool) -> Compressor:
        if self.pair is None:
            return with_share(reference, _HIGH_COMPRESSION[parameter_name(reference)]) if high else reference
        value = self.pair[0 if high else 1]
        return parse(value) if isinstance(value, str) else with_parameter(reference, value)
