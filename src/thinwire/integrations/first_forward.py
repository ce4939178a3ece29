"""Search for the model that trains, for callers that did not make it, when its first forward pass begins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.compat import uncompiled


def on_first_forward(act: Callable[[nn.Module], None]) -> RemovableHandle:
    """Call ``act(model)`` once, when the first forward pass for training of a DDP or an FSDP2 model begins.

    Returns the handle of a global hook of ``nn.Module``, which removes itself before that call. An exception of ``act``
    reaches the caller of the model.
    """

    def look(module: nn.Module, inputs: object) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        model = uncompiled(module)
        if isinstance(model, DistributedDataParallel) or is_sharded(model):
            handle.remove()
            act(model)

    handle = register_module_forward_pre_hook(look)
    return handle


def is_sharded(model: object) -> TypeGuard[nn.Module]:
    """Return whether ``fully_shard`` was called on the model, or on a module in it."""
    # Importing it takes a second, and where nobody has imported it no model is sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in modules)
