"""What a comparison varies: a compressor for all layers, or one with a policy that adapts it while training goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from thinwire.compressors import parse
from thinwire.policies import parse_policy

_WITH = " with "
ALONE = "alone"
"""The variant that sends nothing: each rank trains on its own batches. What ends above it is worse than no network."""


@dataclass(frozen=True)
class Variant:
    """A compression of gradients: ``spec`` for all layers, and the ``policy`` that adapts it, as canonical text.

    `ALONE` stands for no communication.
    """

    spec: str
    policy: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """The variant of ``"topk(density=0.01)"``, ``"topk(density=0.01) with lgreco(every=25)"`` or ``"alone"``.

        Raises:
            ValueError: the spec or the policy is wrong.
        """
        if text.strip() == ALONE:
            return cls(ALONE)
        # Neither side can hold the word: it is Python's.
        spec, separator, policy = text.partition(_WITH)
        if separator and not policy.strip():
            raise ValueError(f"{text!r} names no policy: write SPEC with lgreco(every=25)")
        return cls(str(parse(spec)), str(parse_policy(policy)) if separator else None)

    def __str__(self) -> str:
        return self.spec if self.policy is None else f"{self.spec}{_WITH}{self.policy}"
