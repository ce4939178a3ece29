"""The outer optimizer: the change of the shared weights by the mean pseudo-gradient of a round."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.arguments import check_number, check_type, warn_caller

_FEW_EXCHANGES = 20
_FEW_FOR_A_HIGH_GAIN = 100
_HIGH_GAIN = 2.0


@dataclass(frozen=True)
class Nesterov:
    """SGD with Nesterov momentum on the shared weights: ``u = μ·u + d;  A = A − η·(d + μ·u)``.

    ``d`` is the mean over workers of ``A − w``, so ``Nesterov(lr=1, momentum=0)`` averages weights (local SGD). In the
    long run a round moves the shared weights by `gain` times the mean progress of the workers. Gains of 1 to 1.5 suit
    tens to hundreds of rounds; DiLoCo's published 0.7 and 0.9 (a gain of 7) are meant for thousands.

    Args:
        lr: η, above 0.
        momentum: μ, at least 0 and below 1.

    Raises:
        ValueError: a value is outside its range.
    """

    lr: float = 0.7
    momentum: float = 0.5

    def __post_init__(self) -> None:
        check_number("lr", self.lr, above=0)
        check_number("momentum", self.momentum, low=0, below=1)

    @property
    def gain(self) -> float:
        """Factor ``η / (1 − μ)`` by which repeated equal pseudo-gradients move the shared weights, a round."""
        return self.lr / (1 - self.momentum)

    def update(self, anchor: Tensor, momentum: Tensor, mean: Tensor) -> None:
        """Apply one round's mean pseudo-gradient to the shared weights, in place.

        Args:
            anchor: A, the shared weights (fp32).
            momentum: u, of the same shape; zeros before the first round.
            mean: d, of the same shape.
        """
        anchor.sub_(mean, alpha=self.lr)
        if self.momentum:
            momentum.mul_(self.momentum).add_(mean)
            anchor.sub_(momentum, alpha=self.lr * self.momentum)


def chosen_outer(outer: Nesterov | None, every: int, total_steps: int | None) -> Nesterov:
    """Return the outer optimizer as given, or the default for an exchange ``every`` so many of ``total_steps``.

    A momentum needs exchanges to build up, and its value after the last one is lost: below 20 exchanges plain
    averages of the weights, ``Nesterov(lr=1, momentum=0)``, end at a lower loss. Warns where exchanges
    are too few for the optimizer, or for learning at all.

    Raises:
        TypeError: ``outer`` is another optimizer.
    """
    exchanges = None if total_steps is None else total_steps / every
    if outer is None:
        few = exchanges is not None and exchanges < _FEW_EXCHANGES
        outer = Nesterov(lr=1.0, momentum=0.0) if few else Nesterov()
    check_type("outer", outer, Nesterov, "a thinwire.local.Nesterov(lr=..., momentum=...)")
    if outer.gain > _HIGH_GAIN and (exchanges is None or exchanges < _FEW_FOR_A_HIGH_GAIN):
        warn_caller(
            f"outer={outer} has a gain lr / (1 - momentum) of {outer.gain:.1f}, which suits thousands of rounds; with "
            f"fewer than about {_FEW_FOR_A_HIGH_GAIN}, Nesterov(lr=0.7, momentum=0.5) ends at a lower loss"
        )
    if exchanges is not None and exchanges < 2:
        warn_caller(
            f"every={every} leaves {exchanges:.1f} exchanges in {total_steps} steps: workers hardly learn "
            "from each other; exchange more often"
        )
    return outer
