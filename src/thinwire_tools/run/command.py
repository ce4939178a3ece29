"""``thinwire run``: compress what a training script sends, without a change to the script."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from thinwire.api import compress as compress_model, compress_fsdp
from thinwire.collectives import MessageError, PeerFailedError, SharedMemoryError, TransportError
from thinwire.integrations.ddp import Options, rules_of
from thinwire.integrations.first_forward import on_first_forward
from thinwire.runtime import DisagreementError, ParityError, Wire
from thinwire_tools.exits import FAILED, USAGE, ends_command
from thinwire_tools.results import OutputFile, Results
from thinwire_tools.run.script import run_script

COMPRESS_VARIABLE = "THINWIRE_COMPRESS"
_ON_EVERY_RANK = (DisagreementError, MessageError, ParityError, PeerFailedError, SharedMemoryError, TransportError)
"""Errors that every living rank raises: one of them is enough to know all of it."""


class Misused(SystemExit):
    """The arguments do not fit the model. No script catches what ends an interpreter."""


def run(
    script: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    compress: Annotated[str | None, tyro.conf.arg(metavar="SPEC")] = None,
    exclude: tuple[str, ...] = (),
    start: int = 0,
    always: bool = False,
    state: Path | None = None,
    save_every: int = 100,
    json: OutputFile = None,
) -> int:
    """Run a training script with compressed communication, without a change to it.

    Under torchrun, on every rank: as the first training step of a DistributedDataParallel or FSDP2 model begins,
    thinwire.compress is called on that model. A line on standard error says at the end what was sent.

    The state of compressors (residuals, the index of the step) is kept beside the script's checkpoints: --state names
    the file, which is read if it exists when training begins, and written by rank 0 after every --save-every steps.
    Give the interval at which the script saves, so that both are of the same step.

    Examples:
      torchrun --nproc-per-node 2 -m thinwire run --compress 4bit -- train.py --batch 32
      torchrun --nproc-per-node 2 -m thinwire run --state out/thinwire.pt --save-every 500 -- train.py
      THINWIRE_COMPRESS=8bit torchrun --nproc-per-node 2 -m thinwire run -- train.py

    Args:
        script: What python would run, after two dashes: train.py and its arguments, or -m and a module.
        compress: Compressor of gradients: a preset (8bit, 4bit, 2bit, bf16, powersgd), a spec or auto. By default what
            the environment variable THINWIRE_COMPRESS says, or 4bit.
        exclude: Patterns of layers that stay raw.
        start: Steps at the beginning that stay uncompressed.
        always: Compress also where it would be slower than sending as it is.
        state: File of the compressors' state.
        save_every: Steps between two writes of the state.
        json: Write the statistics to this file.
    """
    chief = int(os.environ.get("LOCAL_RANK") or 0) == 0
    options: dict[str, Any] = {"exclude": exclude, "start": start, "skip_if_slower": not always}
    spec = compress or os.environ.get(COMPRESS_VARIABLE) or None
    with ends_command(TypeError, ValueError):
        if not script:
            raise ValueError("what is to be run? thinwire run -- train.py")
        if save_every < 1:
            raise ValueError(f"--save-every {save_every}: at least 1")
        rules_of(Options(compressor=spec, **options))  # before the script is started, which may take long to begin
    attached = Attachment(spec, options, state, save_every)
    try:
        with attached:
            run_script(script)
    except Misused as error:
        _say(str(error.args[0]) if chief else f"rank {os.environ.get('RANK')} ended, too")
        return USAGE
    except SystemExit:
        attached.report(json)
        raise
    except _ON_EVERY_RANK as error:
        if chief:
            traceback.print_exc()
        else:
            _say(f"rank {os.environ.get('RANK')}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return FAILED
    attached.report(json)
    return 0


@dataclass
class Attachment:
    """Compresses the first model that trains within it; a context manager.

    Args:
        spec: of gradients; None for the default.
        options: of `thinwire.compress`.
        state: where the compressors' state is kept; None if nowhere.
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
            raise Misused(str(error)) from error
        if self.state is not None:
            self._saved = (self.wire.step + 1) // self.save_every
            # After the optimizer's step, so that the script saves weights of the same step, and on every rank alike.
            self._handles.append(register_optimizer_step_post_hook(self._after_step))

    def _after_step(self, *_: object) -> None:
        wire, path = self.wire, self.state
        if wire is None or path is None or (wire.step + 1) // self.save_every <= self._saved:
            return
        self._saved = (wire.step + 1) // self.save_every
        state = wire.gather_state_dict()
        if wire.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Whoever is killed while it writes leaves the former file.
            part = path.with_name(path.name + ".part")
            torch.save(state, part)
            part.replace(path)

    def report(self, json: Path | None) -> None:
        """Say on rank 0 what was sent."""
        if int(os.environ.get("RANK") or 0) != 0:
            return
        if self.wire is None:
            _say(
                "no DistributedDataParallel or FSDP2 model was trained in the script's own process, so nothing was "
                "compressed. Ranks that a script starts itself, as with torch.multiprocessing.spawn, are processes of "
                "their own, which are not seen: start them with torchrun, or call thinwire.compress(model) in them"
            )
            return
        stats = self.wire.stats
        _say(str(stats))
        if json is not None:
            results = Results("thinwire run", about={"plan": str(self.wire)})
            for name, value in stats.to_dict().items():
                results.add(name, value, "s" if name.endswith("_s") else "B" if name.endswith("_bytes") else "")
            results.write(json)


def _on_every_rank(path: Path, device: torch.device) -> bool:
    """Whether the file is there.

    Raises:
        ValueError: it is, on some ranks only, who would wait for the others when they load it.
    """
    count = torch.tensor([float(path.exists())], dtype=torch.float32, device=device)
    dist.all_reduce(count)
    if 0 < count.item() < dist.get_world_size():
        raise ValueError(
            f"{path} is there on {int(count.item())} of {dist.get_world_size()} ranks: put it where all can read it"
        )
    return count.item() > 0


def _say(text: str) -> None:
    sys.stderr.write(f"thinwire run: {text}\n")
    sys.stderr.flush()
