"""Trainers that wrap the model themselves: a callback compresses what they wrapped, and keeps its state in checkpoints.

Their libraries are imported when a callback is asked for, not with thinwire.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.attach.compress import compress
from thinwire.wire import Wire

_LIGHTNING_KEY = "thinwire"


def trainer_callback(trainer: Any, rules: Any = None, **options: Any) -> Any:
    """A ``transformers.TrainerCallback`` that compresses what ``trainer`` (a ``transformers.Trainer``) wraps in DDP.

        callback = thinwire.trainer_callback(trainer)
        trainer.add_callback(callback)

    ``rules`` and ``options`` are those of `thinwire.compress`; ``callback.wire`` is what that returns, once training
    began (None in a world of one). Every rank writes ``thinwire-rank<r>.pt`` beside the trainer's checkpoints, and a
    run that goes on from one of ``args.output_dir`` reads it.

    Raises:
        ImportError: transformers is not installed.
        TypeError: when training begins: the trainer did not wrap its model in ``DistributedDataParallel``.
        FileNotFoundError: when training goes on: the checkpoint has no state of this rank.
    """
    from transformers import TrainerCallback

    class Compress(TrainerCallback):
        wire: Wire | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.wire = _compressed(trainer.model_wrapped, rules, options)
            if self.wire is not None and state.global_step > 0:
                path = _state_path(args.output_dir, state.global_step)
                self.wire.load_state_dict(torch.load(path, weights_only=True))

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.wire is not None:
                path = _state_path(args.output_dir, state.global_step)
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(self.wire.state_dict(), path)

    return Compress()


def lightning_callback(rules: Any = None, **options: Any) -> Any:
    """A Lightning ``Callback`` that compresses what the strategy wraps in DDP.

        callback = thinwire.lightning_callback()
        trainer = Trainer(strategy="ddp", callbacks=[callback])

    ``rules`` and ``options`` are those of `thinwire.compress`; ``callback.wire`` is what that returns, once training
    began (None in a world of one). The state of all ranks goes into Lightning's checkpoint, and comes from there.

    Raises:
        ImportError: ``pytorch_lightning`` is not installed, and ``lightning.pytorch`` was not imported before.
        TypeError: when training begins: the strategy did not wrap the model in ``DistributedDataParallel``.
    """
    # The same classes are there twice, and a trainer takes its own: those that the script has imported.
    package = "lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
    Callback: Any = importlib.import_module(f"{package}.callbacks").Callback

    class Compress(Callback):
        wire: Wire | None = None
        _loaded: Mapping[str, Tensor] | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.wire = _compressed(trainer.strategy.model, rules, options)
            if self.wire is not None and self._loaded is not None:
                self.wire.load_state_dict(self._loaded)
            self._loaded = None

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            if self.wire is not None:
                checkpoint[_LIGHTNING_KEY] = merged(self.wire)

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            self._loaded = checkpoint.get(_LIGHTNING_KEY)

    return Compress()


def merged(wire: Wire) -> dict[str, Tensor]:
    """The states of all ranks in one dictionary, for trainers of which one rank writes. A collective call."""
    state = wire.state_dict()
    mine = f"rank{wire.rank}/"
    device = _device_of_collectives()
    for name in sorted(name for name in state if name.startswith(mine)):
        value = state[name].contiguous().to(device)
        everybody = [torch.empty_like(value) for _ in range(wire.world_size)]
        dist.all_gather(everybody, value)
        for rank, theirs in enumerate(everybody):
            state[f"rank{rank}/{name.removeprefix(mine)}"] = theirs.cpu()
    return state


def _device_of_collectives() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _compressed(model: Any, rules: Any, options: Mapping[str, Any]) -> Wire | None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"the trainer wrapped its model in {type(model).__name__}, not in DistributedDataParallel: start it with "
            "torchrun, with its DDP strategy; for fully_shard call thinwire.compress(model) in your own loop"
        )
    return compress(model, rules, **options)


def _state_path(folder: str, step: int) -> Path:
    return Path(folder) / f"checkpoint-{step}" / f"thinwire-rank{dist.get_rank()}.pt"
