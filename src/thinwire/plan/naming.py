"""The names of a model's parameters: those of the module as it was before anything wrapped it or a part of it."""

from __future__ import annotations

from torch import nn

from thinwire.compat import unwrapped
from thinwire.plan.filters import Names


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``module`` by name, each once."""
    return {unwrapped(name): p for name, p in module.named_parameters()}


def names_of(module: nn.Module) -> Names:
    """All names of its parameters, those that wrappers give them too, and for each the one of `named_parameters`."""
    own = {id(p): name for name, p in named_parameters(module).items()}
    listed = list(module.named_parameters(remove_duplicate=False))
    return {spelled: own[id(p)] for name, p in listed for spelled in (name, unwrapped(name))}
