"""Wrappers: compressors around another one, such as error feedback."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.compressors._core.compressor import Compressor
from thinwire.compressors._core.traits import Traits


@dataclass(frozen=True)
class Wrapper(Compressor):
    """A compressor that keeps what ``inner`` does not send, and sends it later."""

    inner: Compressor

    @property
    def coder(self) -> Compressor:
        """What computes the messages: ``inner``, with its rounding set; see `rounded_for`."""
        return self.inner

    @property
    def traits(self) -> Traits:
        return self.inner.traits._replace(unbiased=False, contracts=True, wants_feedback=False)

    def check_rate(self, learning_rate: float | None) -> None:
        """Raise a ValueError if it needs a learning rate, and there is none."""

    @abstractmethod
    def around(self, inner: Compressor) -> Compressor:
        """Return the same wrapper around another compressor."""

    def fit(self, shape: Sequence[int]) -> Compressor:
        return rewrap(self, self.inner.fit(shape))

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        # Nothing is kept before the first step.
        return self.coder.roundtrip(x, key)

    def __str__(self) -> str:
        return f"{self.spec_name}({self.inner})"


def unwrap(compressor: Compressor) -> Compressor:
    """Return the compressor inside a `Wrapper`, or ``compressor`` itself if it is none."""
    return compressor.inner if isinstance(compressor, Wrapper) else compressor


def rewrap(compressor: Compressor, inner: Compressor) -> Compressor:
    """Return ``inner`` in the wrapper that ``compressor`` has, if it has one."""
    if not isinstance(compressor, Wrapper):
        return inner
    return compressor if inner is compressor.inner else compressor.around(inner)
