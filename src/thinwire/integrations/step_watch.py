"""Warnings of optimizer steps whose gradients were not exchanged, and of gradients that no step takes: a training loop
otherwise leaves out both silently."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from thinwire.arguments import warn_caller
from thinwire.runtime.wire import Wire

_PATIENCE = 3
"""Number of steps in a row without an exchange before a warning: gradients made before ``compress()`` explain one."""

_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()
_hooks: tuple[RemovableHandle, ...] = ()
"""The hooks that all watches share, which are registered once and for all."""


class StepWatch:
    """Compares the optimizer steps of a compressed model with its backward passes, and warns once of missing exchanges.

    PyTorch calls the same function before the step of every optimizer; optimizers that hold none of the model's
    parameters are ignored.
    """

    def __init__(
        self, handle: Wire, parameters: Mapping[str, Tensor], *, before_step: Callable[[], None] | None = None
    ) -> None:
        """Call ``before_step``, a method, before each step of an optimizer of these parameters. Neither they nor the
        method's object are kept alive."""
        self._handle = weakref.ref(handle)
        self._parameters = {id(p): (weakref.ref(p), name) for name, p in parameters.items()}
        self._before_step = weakref.WeakMethod(before_step) if before_step is not None else lambda: None
        self._last_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._missed = 0
        self._exchanged: set[int] = set()
        """Parameters whose gradients were exchanged so far, which under DDP are the same in every backward pass."""
        self._told = False
        self._stepped = self._stepping = False
        self.taken = True
        """Whether an optimizer's step has taken the gradients of the last exchange; attachments reset it."""
        self.accumulates = False
        """Whether a forward pass whose gradients stay on this rank came after the last exchange."""
        global _hooks
        # None can be removed while a step goes through them, and a handle may end at any time.
        _hooks = _hooks or (register_optimizer_step_pre_hook(_look), register_optimizer_step_post_hook(_look_after))
        _watches.add(self)
        # The handle holds the watch, which ends with it.
        handle.at_detach(self.stop)

    def stop(self) -> None:
        """Stop watching."""
        _watches.discard(self)

    def note_exchange(self, parameters: Iterable[Tensor]) -> None:
        """Note that the gradients of ``parameters`` are exchanged, in this backward pass."""
        self.accumulates = False
        self._exchanged.update(id(parameter) for parameter in parameters)

    def lost(self) -> bool:
        """Whether the gradients of the last exchange are gone although no step of an optimizer has taken them."""
        if self.taken or self._stepping or not self._stepped:
            return False
        held = [p for key, (of, _) in self._parameters.items() if key in self._exchanged and (p := of()) is not None]
        # Zeros on a device are not looked for: the host would wait.
        return not any(p.grad is not None and (not p.grad.is_cpu or bool(p.grad.any())) for p in held)

    def _find_name(self, parameter: Tensor) -> str | None:
        held, name = self._parameters.get(id(parameter), (None, None))
        return name if held is not None and held() is parameter else None

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the gradients that a step of ``optimizer`` is about to take."""
        handle = self._handle()
        held = [p for group in optimizer.param_groups for p in group["params"] if self._find_name(p) is not None]
        if handle is None or not held:
            return
        self._stepped = self._stepping = self.taken = True
        if (act := self._before_step()) is not None:
            act()
        if self._told or handle.world_size == 1:
            return
        exchanged = self._last_steps.get(optimizer, -1) != handle.step and not self.accumulates
        self._last_steps[optimizer] = handle.step
        self._missed = 0 if exchanged else self._missed + 1
        late = [
            self._find_name(p) for p in held if self._exchanged and p.grad is not None and id(p) not in self._exchanged
        ]
        if self._missed >= _PATIENCE:
            self._told = True
            warn_caller(
                f"{type(optimizer).__name__} has taken {_PATIENCE} steps whose gradients were not exchanged between "
                "the ranks, so that each trains by itself. Call the wrapped model (model(x), not model.module(x)), let "
                "the last backward pass before each step run outside of no_sync() (under FSDP2, with "
                "set_requires_gradient_sync(True)), and call model.to() before the model is wrapped"
            )
        elif late:
            self._told = True
            warn_caller(
                f"the gradients of {late[0]} ({len(late)} such) are not exchanged between the ranks, which drift "
                "apart: it was frozen when DistributedDataParallel was built, which takes only what is trained then. "
                "Unfreeze layers first, build DistributedDataParallel again, and call thinwire.compress() on it"
            )

    def after_step(self) -> None:
        """Note the end of a step, whose closure may have computed gradients that it has taken."""
        if self._stepping:
            self._stepping, self.taken = False, True


def _look(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    if torch.compiler.is_compiling():  # a step that is compiled as a whole stays one graph
        return
    for watch in list(_watches):
        watch.before_step(optimizer)


def _look_after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    if not torch.compiler.is_compiling():
        for watch in list(_watches):
            watch.after_step()
