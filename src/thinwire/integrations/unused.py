"""Parameters of sharded modules that get no gradient in a step, for which FSDP2 sends zeros and no gradient is left."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thinwire.compat import FSDPGroup, fill_unused
from thinwire.runtime import Wire

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class UnitUse:
    """The use of one unit's parameters in a step: those that are used get gradients."""

    def __init__(self, names: Sequence[str], group: FSDPGroup, *, fills: bool) -> None:
        """Create it; ``fills``: whether FSDP2 sent zeros for missing gradients before anything was compressed."""
        self.names, self._group, self.fills = tuple(names), group, fills
        self._watched: dict[str, Tensor] = {}
        self._used: set[str] = set()
        """Parameters that have got a gradient since one was last written for the optimizer."""
        self._fresh: set[str] = set()
        """Parameters that were reduced since then without a gradient from before."""
        self.hooks: list[RemovableHandle] = []

    def watch(self, *, late: bool = False) -> None:
        """Follow the whole parameters, which exist once gathered; ``late``: whether they may have been used since."""
        for name, parameter in zip(self.names, self._group.parameters, strict=True):
            whole = parameter.whole()
            if whole is None or whole is self._watched.get(name):
                continue
            if whole.requires_grad and not whole.is_inference():
                self._watched[name] = whole
                if late:
                    self._used.add(name)
                self.hooks.append(whole.register_post_accumulate_grad_hook(_adding(self._used, name)))

    def reduce(self, trained: Sequence[str]) -> None:
        """Note, before gradients are reduced, that those of the parameters ``trained`` will be."""
        for name, parameter in zip(self.names, self._group.parameters, strict=True):
            if name not in trained:
                continue
            if parameter.now().grad is None:
                self._fresh.add(name)
            if name not in self._watched:
                self._used.add(name)  # assumed, because nothing watched it

    def kept(self) -> list[bool]:
        """Return whether each parameter's gradient stays as it is, as far as this rank knows."""
        return [self.fills or name in self._used or name not in self._fresh for name in self.names]

    def drop(self, kept: Sequence[bool]) -> list[str]:
        """Drop the gradients that no rank has, and return their parameters' names."""
        written = [
            (name, parameter, keep)
            for name, parameter, keep in zip(self.names, self._group.parameters, kept, strict=True)
            if parameter.now().grad is not None
        ]
        dropped = [(name, parameter) for name, parameter, keep in written if not keep]
        for _, parameter in dropped:
            parameter.now().grad = None
        # HSDP may not have written yet what it has reduced among shards (``set_requires_all_reduce``).
        if written:
            self._used.clear()
            self._fresh.clear()
        return [name for name, _ in dropped]


class Uses:
    """The use of the parameters of all units of a model in a step."""

    def __init__(self, any_rank: Callable[[Tensor], Tensor]) -> None:
        """Create it; ``any_rank`` is a collective call that tells which of several conditions hold on any rank."""
        self._any_rank = any_rank
        self._units: list[UnitUse] = []

    def add(
        self, module: FSDPModule, names: Sequence[str], group: FSDPGroup, wire: Wire, begin: Callable[[], object]
    ) -> UnitUse:
        """Follow the parameters of ``module`` until ``wire`` is detached, and let FSDP2 send zeros where ranks have no
        gradient. ``begin`` is called before each of its forward passes."""
        unit = UnitUse(names, group, fills=group.fills_unused)
        self._units.append(unit)
        if not unit.fills and not group.alone:
            # If some had no gradients, the size of the buffer would not determine what it holds. Gradients that no
            # rank has are dropped when the pass ends.
            fill_unused(module, True)
            wire.at_detach(partial(_without_zeros, weakref.ref(module)))

        engine = wire.engine

        def before_forward(_module: nn.Module, _inputs: object) -> None:
            # This runs after FSDP2's own hook, which gathers; in backward, when a reentrant checkpoint computes again.
            # Compiled code leaves it out, and the next gather does it.
            if not torch.compiler.is_compiling() and engine.attached:
                begin()
                unit.watch()

        unit.watch()
        assert isinstance(module, nn.Module)
        wire.at_detach(module.register_forward_pre_hook(before_forward).remove)
        hooks = unit.hooks  # the wire must not hold the model, and these do not
        wire.at_detach(lambda: [hook.remove() for hook in hooks])
        return unit

    def end_pass(self) -> set[str]:
        """Leave no gradient for parameters that got one on no rank, as FSDP2 does, and return their names. All ranks
        must call this at the end of every backward pass."""
        mine = [keep for unit in self._units for keep in unit.kept()]
        kept = self._any_rank(torch.tensor(mine, dtype=torch.bool, device="cpu"))
        parts = iter(kept.split([len(unit.names) for unit in self._units]))
        return {name for unit in self._units for name in unit.drop(next(parts).tolist())}


def _without_zeros(held: weakref.ref[FSDPModule]) -> None:
    module = held()
    if module is not None:
        fill_unused(module, False)


def _adding(names: set[str], name: str) -> Callable[[Tensor], None]:
    # Parameters hold this function, so it holds no more than it needs.
    return lambda _: names.add(name)
