"""Trainers that wrap the model themselves: what each has a place for, to compress the model that it wraps.

For Hugging Face's ``Trainer`` that is a callback, for accelerate a handler of keyword arguments, for Lightning a
strategy. Their libraries are imported when one of them is asked for, not with thinwire.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from thinwire.api import compress, compress_ddp, explained
from thinwire.integrations.alone import is_alone
from thinwire.integrations.ddp import Options, rules_of
from thinwire.integrations.first_forward import on_first_forward
from thinwire.runtime import Wire

_KEY = "thinwire"
_FILE = "thinwire.pt"


def trainer_callback(compressor: Any = None, **options: Any) -> Any:
    """A ``transformers.TrainerCallback`` that compresses what the ``Trainer`` wraps in DDP.

        callback = thinwire.trainer_callback("4bit")
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])

    ``compressor`` and ``options`` are those of `thinwire.compress_ddp`; ``callback.wire`` is what that returns, from
    the first step on. The states of all ranks go into ``thinwire.pt`` beside the trainer's checkpoints; a run of any
    number of ranks that goes on from one of ``args.output_dir`` reads it.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: an argument is none of `thinwire.compress_ddp`, or is wrong; or, after the first step,
            the trainer did not wrap its model in ``DistributedDataParallel``.
        FileNotFoundError: when training goes on: the checkpoint has no such file.
    """
    from transformers import TrainerCallback

    _check(compressor, options)

    class Compress(TrainerCallback):
        wire: Wire | None = None
        _waits: RemovableHandle | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
            folder = _checkpoint(args.output_dir, state.global_step) if state.global_step > 0 else None

            def attach(wrapped: Any) -> None:
                self.wire = compress(wrapped, compressor, **options)
                if folder is not None:
                    self.wire.load_state_dict(torch.load(folder / _FILE, weights_only=True))

            # The trainer wraps its model after this, and hands callbacks the one inside.
            if is_alone():
                attach(model)
            else:
                self._waits = on_first_forward(attach)

        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
            if self.wire is None:
                raise _unwrapped(model)

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


def accelerate_handler(compressor: Any = None, *, ddp: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """A ``DistributedDataParallelKwargs`` with which accelerate's ``prepare`` compresses the models that it wraps.

        handler = thinwire.accelerate_handler("4bit")
        accelerator = Accelerator(kwargs_handlers=[handler])
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.register_for_checkpointing(handler.wire.checkpointable())

    ``compressor`` and ``options`` are those of `thinwire.compress_ddp`, ``ddp`` the arguments of
    ``DistributedDataParallelKwargs``. ``handler.wire`` is what compressing the last model that was prepared returned;
    None in a world of one, where accelerate wraps none.

    Raises:
        ImportError: accelerate is not installed.
        TypeError, ValueError: an argument is none of `thinwire.compress_ddp`, or is wrong.
    """
    from accelerate import DistributedDataParallelKwargs

    _check(compressor, options)
    handler: Any = DistributedDataParallelKwargs(**(ddp or {}))
    settings = handler.to_kwargs()

    def register(model: Any) -> None:
        handler.wire = compress(model, compressor, **options)

    # accelerate tells handlers apart by their very class, so that it refuses a subclass, and takes all attributes for
    # settings.
    handler.wire, handler.register_comm_hook, handler.to_kwargs = None, register, lambda: settings
    return handler


def lightning_strategy(compressor: Any = None, *, ddp: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """A Lightning ``DDPStrategy`` that compresses the model that it wraps.

        trainer = Trainer(strategy=thinwire.lightning_strategy("4bit"))
        trainer.strategy.wire.stats

    ``compressor`` and ``options`` are those of `thinwire.compress_ddp`, ``ddp`` the arguments of ``DDPStrategy``;
    ``strategy.wire`` is what compressing returned, once training begins. The states of all ranks go into Lightning's
    checkpoint, from which a run of any number of ranks goes on.

    Raises:
        ImportError: ``pytorch_lightning`` is not installed, and ``lightning.pytorch`` was not imported before.
        TypeError, ValueError: an argument is none of `thinwire.compress_ddp`, or is wrong.
    """
    # The same classes are there twice, and a trainer takes its own: those that the script has imported.
    package = "lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
    _check(compressor, options)
    DDPStrategy: Any = importlib.import_module(f"{package}.strategies").DDPStrategy

    class Compressed(DDPStrategy):
        # Not DDPStrategy(ddp_comm_hook=...), which Lightning registers on CUDA only.
        wire: Wire | None = None

        def configure_ddp(self) -> None:
            super().configure_ddp()
            self.wire = compress(self.model, compressor, **options)

        def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            # Lightning calls it on every rank, and rank 0 writes.
            if self.wire is not None:
                checkpoint[_KEY] = self.wire.gather_state_dict()
            super().save_checkpoint(checkpoint, *args, **kwargs)

        def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
            # Called where training goes on, when the model is wrapped; not where a checkpoint is only tested.
            super().load_optimizer_state_dict(checkpoint)
            if self.wire is not None and _KEY in checkpoint:
                self.wire.load_state_dict(checkpoint[_KEY])

    return Compressed(**(ddp or {}))


def _unwrapped(model: Any) -> TypeError:
    return TypeError(
        f"the trainer wrapped its model in {type(model).__name__}, not in DistributedDataParallel: start it with "
        "torchrun, with its DDP strategy; for fully_shard call thinwire.compress(model) in your own loop"
    )


def _check(compressor: Any, options: Mapping[str, Any]) -> None:
    """Raise where the user writes a wrong argument, not where the trainer wraps its model."""
    for name, value in options.items():
        if name not in inspect.signature(compress_ddp).parameters:
            raise TypeError(explained(name, value, compress_ddp, "DistributedDataParallel"))
    rules_of(Options(compressor=compressor, **options))


def _checkpoint(folder: str, step: int) -> Path:
    return Path(folder) / f"checkpoint-{step}"
