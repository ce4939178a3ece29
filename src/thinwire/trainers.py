"""Callbacks for trainers that wrap the model themselves, which compress the wrapped model.

A trainer's library is imported when its callback is made, not with thinwire.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.api import compress, compress_ddp, compress_fsdp, explained, is_sharded
from thinwire.compat import uncompiled
from thinwire.integrations.ddp import Options, is_alone, resolve_rules
from thinwire.runtime import Wire

_FILE = "thinwire.pt"


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


def trainer_callback(compressor: Any = None, **options: Any) -> Any:
    """Return a ``transformers.TrainerCallback`` that compresses what the ``Trainer`` wraps in DDP or shards with FSDP2.

        callback = thinwire.trainer_callback("4bit")
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])

    ``compressor`` and ``options`` are the arguments of `thinwire.compress` for the model as it is wrapped, and from the
    first step on ``callback.wire`` is what that returns. The states of all ranks are saved as ``thinwire.pt`` in the
    trainer's checkpoints; a run of any number of ranks that resumes from one in ``args.output_dir`` loads it.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: an argument is not one of `thinwire.compress`, or is wrong; or, after the first step, the
            trainer has not wrapped its model.
        FileNotFoundError: when training resumes, the checkpoint has no such file.
    """
    from transformers import TrainerCallback

    _check(compressor, options)

    class Compress(TrainerCallback):
        wire: Wire | None = None
        _waits: RemovableHandle | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
            folder = _checkpoint(args.output_dir, state.global_step) if state.global_step > 0 else None

            if self.wire is not None:  # of a training before
                self.wire.detach()
                self.wire = None

            def attach(wrapped: Any) -> None:
                self.wire = compress(wrapped, compressor, **options)
                if folder is not None:
                    self.wire.load_state_dict(torch.load(folder / _FILE, weights_only=True))

            # The trainer wraps a model in DDP after this call, and hands callbacks the one inside. A sharded model is
            # wrapped by now, and an evaluation before training would leave parameters of FSDP2's root gathered.
            if is_alone() or is_sharded(model):
                attach(model)
            else:
                self._waits = on_first_forward(attach)

        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
            if self.wire is None:
                raise TypeError(
                    f"the trainer left its model a {type(model).__name__} that neither DistributedDataParallel nor "
                    "fully_shard (FSDP2) wraps: start it with torchrun, and with FSDP leave fsdp_config's version at 2"
                )

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.wire is None:
                return
            gathered = self.wire.gather_state_dict()
            if args.should_save:
                folder = _checkpoint(args.output_dir, state.global_step)
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(gathered, folder / _FILE)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self._waits is not None:
                self._waits.remove()

    return Compress()


def lightning_callback(compressor: Any = None, **options: Any) -> Any:
    """Return a Lightning ``Callback`` that compresses what the strategy wraps in DDP or the module shards with FSDP2.

        callback = thinwire.lightning_callback("4bit")
        trainer = Trainer(strategy="ddp", callbacks=[callback])

    ``compressor`` and ``options`` are the arguments of `thinwire.compress` for the model as it is wrapped, and once
    training begins ``callback.wire`` is what that returns. The states of all ranks are saved in Lightning's checkpoint,
    from which a run of any number of ranks resumes.

    Raises:
        ImportError: ``pytorch_lightning`` is not installed, and ``lightning.pytorch`` was not imported before.
        TypeError, ValueError: an argument is not one of `thinwire.compress`, or is wrong.
    """
    # Both packages have these classes, and a trainer takes those of its own package: the one that the script imports.
    package = "lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
    _check(compressor, options)
    Callback: Any = importlib.import_module(f"{package}.callbacks").Callback

    class Compress(Callback):
        wire: Wire | None = None
        state_key = "thinwire"
        _loaded: Mapping[str, Any] | None = None

        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            if stage == "fit" and self.wire is not None:  # of a training before
                self.wire.detach()
                self.wire = None

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            # Lightning calls this before it wraps a model in DDP, but after it has sharded one.
            if self.wire is None:
                self._loaded = state_dict
            else:
                self.wire.load_state_dict(state_dict)

        def on_fit_start(self, trainer: Any, *_: Any) -> None:
            # The first validation, which comes later, would leave parameters of FSDP2's root gathered.
            self.wire = compress(trainer.strategy.model, compressor, **options)
            loaded, self._loaded = self._loaded, None
            if loaded is not None:
                self.wire.load_state_dict(loaded)

        def state_dict(self) -> dict[str, Any]:
            # Lightning calls this on every rank, and rank 0 writes.
            return {} if self.wire is None else self.wire.gather_state_dict()

    return Compress()


def _check(compressor: Any, options: Mapping[str, Any]) -> None:
    """Check the arguments where the user writes them, rather than where the trainer wraps its model."""
    ddp, fsdp = (inspect.signature(function).parameters for function in (compress_ddp, compress_fsdp))
    for name, value in options.items():
        if name not in ddp and name not in fsdp:
            raise TypeError(explained(name, value, compress_ddp, "DistributedDataParallel"))
    resolve_rules(Options(compressor=compressor, **{name: value for name, value in options.items() if name in ddp}))


def _checkpoint(folder: str, step: int) -> Path:
    return Path(folder) / f"checkpoint-{step}"
