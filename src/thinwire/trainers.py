"""Trainers that wrap the model themselves: a callback for each, which compresses the model that it wraps.

Their libraries are imported when a callback is asked for, not with thinwire.
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

from thinwire.api import compress, compress_ddp, compress_fsdp, explained
from thinwire.integrations.alone import is_alone
from thinwire.integrations.ddp import Options, rules_of
from thinwire.integrations.first_forward import is_sharded, on_first_forward
from thinwire.runtime import Wire

_FILE = "thinwire.pt"


def trainer_callback(compressor: Any = None, **options: Any) -> Any:
    """A ``transformers.TrainerCallback`` that compresses what the ``Trainer`` wraps in DDP or shards by FSDP2.

        callback = thinwire.trainer_callback("4bit")
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])

    ``compressor`` and ``options`` are those of `thinwire.compress` for the model as it is wrapped; ``callback.wire`` is
    what that returns, from the first step on. The states of all ranks go into ``thinwire.pt`` beside the trainer's
    checkpoints; a run of any number of ranks that goes on from one of ``args.output_dir`` reads it.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: an argument is none of `thinwire.compress`, or is wrong; or, after the first step, the
            trainer did not wrap its model.
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

            # The trainer wraps a model in DDP after this, and hands callbacks the one inside. A sharded one is there
            # already, and an evaluation that comes first would leave parameters of FSDP2's root gathered.
            if is_alone() or is_sharded(model):
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


def lightning_callback(compressor: Any = None, **options: Any) -> Any:
    """A Lightning ``Callback`` that compresses what the trainer's strategy wraps in DDP or the module shards by FSDP2.

        callback = thinwire.lightning_callback("4bit")
        trainer = Trainer(strategy="ddp", callbacks=[callback])

    ``compressor`` and ``options`` are those of `thinwire.compress` for the model as it is wrapped; ``callback.wire`` is
    what that returns, once training begins. The states of all ranks go into Lightning's checkpoint, from which a run of
    any number of ranks goes on.

    Raises:
        ImportError: ``pytorch_lightning`` is not installed, and ``lightning.pytorch`` was not imported before.
        TypeError, ValueError: an argument is none of `thinwire.compress`, or is wrong.
    """
    # The same classes are there twice, and a trainer takes its own: those that the script has imported.
    package = "lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
    _check(compressor, options)
    Callback: Any = importlib.import_module(f"{package}.callbacks").Callback

    class Compress(Callback):
        wire: Wire | None = None
        state_key = "thinwire"
        _loaded: Mapping[str, Any] | None = None

        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            if stage == "fit":
                self.wire = self._loaded = None

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            # Lightning calls it before it wraps a model in DDP, and once one is sharded.
            if self.wire is None:
                self._loaded = state_dict
            else:
                self.wire.load_state_dict(state_dict)

        def on_fit_start(self, trainer: Any, *_: Any) -> None:
            # Before a first validation, which would leave parameters of FSDP2's root gathered.
            self.wire = compress(trainer.strategy.model, compressor, **options)
            if self._loaded is not None:
                self.wire.load_state_dict(self._loaded)

        def state_dict(self) -> dict[str, Any]:
            # Lightning calls it on every rank, and rank 0 writes.
            return {} if self.wire is None else self.wire.gather_state_dict()

    return Compress()


def _unwrapped(model: Any) -> TypeError:
    return TypeError(
        f"the trainer left its model a {type(model).__name__} that neither DistributedDataParallel nor fully_shard "
        "(FSDP2) wraps: start it with torchrun, and with FSDP leave fsdp_config's version at 2"
    )


def _check(compressor: Any, options: Mapping[str, Any]) -> None:
    """Raise where the user writes a wrong argument, not where the trainer wraps its model."""
    ddp, fsdp = (inspect.signature(function).parameters for function in (compress_ddp, compress_fsdp))
    for name, value in options.items():
        if name not in ddp and name not in fsdp:
            raise TypeError(explained(name, value, compress_ddp, "DistributedDataParallel"))
    rules_of(Options(compressor=compressor, **{name: value for name, value in options.items() if name in ddp}))


def _checkpoint(folder: str, step: int) -> Path:
    return Path(folder) / f"checkpoint-{step}"
