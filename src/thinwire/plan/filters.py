"""Name patterns of layers, and the filter of layers that stay raw whatever the rules are."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from thinwire.arguments import close_names
from thinwire.compat import unwrapped


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of ``module`` by name, each once."""
    return {unwrapped(name): p for name, p in module.named_parameters()}


def parameter_names(module: nn.Module) -> Names:
    """Return all names of the module's parameters, also by wrappers, each with that of `named_parameters`."""
    own = {id(p): name for name, p in named_parameters(module).items()}
    listed = list(module.named_parameters(remove_duplicate=False))
    return {spelled: own[id(p)] for name, p in listed for spelled in (name, unwrapped(name))}


Names = Mapping[str, str]
"""Full names of a model's parameters, each with the name of its layer: a shared parameter has several."""
_NO_NAMES: Names = {}


def matches(pattern: str, name: str, names: Names = _NO_NAMES) -> bool:
    """Whether a parameter's name matches a pattern.

    A pattern that is the full name of one of the model's parameters (``names``) matches that one alone, so that
    ``"0.weight"`` leaves ``10.weight`` out. One with ``*``, ``?`` or ``[…]`` must match the whole name (``"embed.*"``);
    any other word matches every name that contains it (``"bias"``, ``"bn"``).
    """
    if pattern in names:
        return names[pattern] == name
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern in name


def check_pattern(pattern: str, layers: Iterable[str], names: Names, names_are: str) -> None:
    """Raise if a pattern matches none of ``layers``: a rule that does nothing is a mistake.

    ``names_are`` says in the message whose names they are.

    Raises:
        ValueError: with the closest names.
    """
    layers = list(layers)
    if not pattern:
        raise ValueError("a pattern is empty: a part of a name, as 'bias', or '*' for every layer")
    if any(matches(pattern, name, names) for name in layers):
        return
    close = close_names(pattern, layers, most=3, cutoff=0.3) or layers[:3]
    raise ValueError(
        f"the pattern {pattern!r} matches no parameter; close names are {', '.join(close) or '(none)'}. "
        f"Names are those of {names_are}; '*' stands for any characters"
    )


def check_order(patterns: Sequence[str], layers: Collection[str], names: Names) -> None:
    """Raise if a pattern, which matches some layer, is never used, as an earlier one takes all of its layers.

    ``"*"`` may have nothing left, as a rule for whatever layers there are; and a layer's full name counts wherever it
    stands.

    Raises:
        ValueError: with the pattern before it.
    """
    ordered = [pattern for pattern in patterns if pattern not in names]
    for i, pattern in enumerate(ordered):
        own = [name for name in layers if matches(pattern, name)]
        earlier = next((e for e in ordered[:i] if all(matches(e, name) for name in own)), None)
        if pattern != "*" and earlier is not None:
            raise ValueError(
                f"the pattern {pattern!r} is never used: {earlier!r} before it matches all of its layers; put "
                f"{pattern!r} first, or leave it out"
            )


@dataclass(frozen=True)
class Filter:
    """Layers that stay raw: biases, norms and other 1-D ones, tiny ones, and those excluded by name (thesis, 3.6)."""

    min_numel: int = 1024
    min_dim: int = 2
    exclude: tuple[str, ...] = ()
    names: Names = field(default_factory=dict, compare=False)
    """Names of the model's parameters, by which a pattern is known to be a full name."""
    unfit: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Reasons why layers cannot be compressed, by layer."""

    def excludes(self, name: str) -> bool:
        """Whether a layer was excluded by name."""
        return any(matches(pattern, name, self.names) for pattern in self.exclude)

    def keeps_raw(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a layer was excluded, or is too small or of too few dimensions to be compressed."""
        return len(shape) < self.min_dim or math.prod(shape) < self.min_numel or self.excludes(name)
