"""A training script's model that is compressed as its first step begins, and a report of what was sent."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from thinwire.api import compress as compress_model, compress_fsdp
from thinwire.collectives import MessageError, PeerFailedError, SharedMemoryError, TransportError
from thinwire.runtime import DisagreementError, ParityError, Wire
from thinwire.trainers import on_first_forward
from thinwire_tools.results import Results

ON_EVERY_RANK = (DisagreementError, MessageError, ParityError, PeerFailedError, SharedMemoryError, TransportError)
"""Errors that every living rank raises: one of them is enough to know all of it."""


class UsageError(SystemExit):
    """An error of arguments that do not fit the model. Scripts do not catch `SystemExit`."""


@dataclass
class Attachment:
    """Compresses the first model that trains within it; a context manager.

    Args:
        spec: the compressor of gradients; None for the default.
        options: arguments of `thinwire.compress`.
        state: file of the compressors' state; None for no file.
        save_every: steps between two writes of it.
    """

    spec: str | None
    options: dict[str, Any]
    state: Path | None
    save_every: int
    wire: Wire | None = None
    _handles: list[RemovableHandle] = field(default_factory=list)
    _saved: int = 0

    def __enter__(self) -> Attachment:
        self._handles.append(on_first_forward(self._attach))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        # Process groups that only end with the interpreter may abort it. After an error, messages may be under way.
        if self.wire is not None and kind in (None, SystemExit):
            self.wire.detach()

    def _attach(self, model: nn.Module) -> None:
        try:
            if isinstance(model, DistributedDataParallel):
                self.wire = compress_model(model, self.spec, **self.options)
            else:
                self.wire = compress_fsdp(model, gradients=self.spec, **self.options)
            if self.state is not None and _on_every_rank(self.state, next(model.parameters()).device):
                self.wire.load_state_dict(torch.load(self.state, weights_only=True))
        except (NotImplementedError, TypeError, ValueError) as error:
            raise UsageError(str(error)) from error
        if self.state is not None:
            self._saved = (self.wire.step + 1) // self.save_every
            # The optimizer's step is over, so that the script saves weights of the same step, and on every rank alike.
            self._handles.append(register_optimizer_step_post_hook(self._after_step))

    def _after_step(self, *_: object) -> None:
        wire, path = self.wire, self.state
        if wire is None or path is None or (wire.step + 1) // self.save_every <= self._saved:
            return
        self._saved = (wire.step + 1) // self.save_every
        state = wire.gather_state_dict()
        if wire.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Write to a temporary file, so that a process killed meanwhile leaves the old one.
            part = path.with_name(path.name + ".part")
            torch.save(state, part)
            part.replace(path)

    def report(self, json: Path | None) -> None:
        """Print on rank 0 what was sent."""
        if int(os.environ.get("RANK") or 0) != 0:
            return
        if self.wire is None:
            say(
                "no DistributedDataParallel or FSDP2 model was trained in the script's own process, so nothing was "
                "compressed. Ranks that a script starts itself, as with torch.multiprocessing.spawn, are processes of "
                "their own, which are not seen: start them with torchrun, or call thinwire.compress(model) in them"
            )
            return
        stats = self.wire.stats
        say(str(stats))
        if json is not None:
            results = Results("thinwire run", about={"plan": str(self.wire)})
            for name, value in stats.to_dict().items():
                results.add(name, value, "s" if name.endswith("_s") else "B" if name.endswith("_bytes") else "")
            results.write(json)


def _on_every_rank(path: Path, device: torch.device) -> bool:
    """Return whether the file exists.

    Raises:
        ValueError: it exists on some ranks only, which would wait for the others when they load it.
    """
    count = torch.tensor([float(path.exists())], dtype=torch.float32, device=device)
    dist.all_reduce(count)
    if 0 < count.item() < dist.get_world_size():
        raise ValueError(
            f"{path} is there on {int(count.item())} of {dist.get_world_size()} ranks: put it where all can read it"
        )
    return count.item() > 0


def say(text: str) -> None:
    """Write a line of ``thinwire run`` to standard error."""
    sys.stderr.write(f"thinwire run: {text}\n")
    sys.stderr.flush()
