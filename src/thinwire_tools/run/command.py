"""The command ``thinwire run``: compress the communication of a training script, without a change to the script."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from thinwire_tools.exits import FAILED, USAGE, check_script, ends_command, without_python
from thinwire_tools.results import OutputFile

COMPRESS_VARIABLE = "THINWIRE_COMPRESS"


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

    The state of compressors (residuals, the index of the step) is kept next to the script's checkpoints: --state names
    the file, which is read if it exists when training begins, and written by rank 0 after every --save-every steps.
    Give the interval at which the script saves, so that both are of the same step.

    Examples:
      torchrun --nproc-per-node 2 -m thinwire run --compress 4bit -- train.py
      torchrun --nproc-per-node 2 -m thinwire run --state out/wire.pt -- train.py
      THINWIRE_COMPRESS=8bit torchrun --nproc-per-node 2 -m thinwire run -- train.py

    Args:
        script: arguments for python, after two dashes: train.py and its arguments, or -m and a module.
        compress: compressor of gradients: a preset (8bit, 4bit, 2bit, bf16, powersgd), a spec or auto. By default what
            the environment variable THINWIRE_COMPRESS says, or 4bit.
        exclude: patterns of layers that stay raw.
        start: steps at the beginning that stay uncompressed.
        always: compress also where that would be slower than sending uncompressed.
        state: file of the compressors' state.
        save_every: steps between two writes of the state.
        json: write the statistics to this file.
    """
    chief = int(os.environ.get("LOCAL_RANK") or 0) == 0
    options: dict[str, Any] = {"exclude": exclude, "start": start, "skip_if_slower": not always}
    spec = compress or os.environ.get(COMPRESS_VARIABLE) or None
    with ends_command(TypeError, ValueError):
        if not script:
            raise ValueError("what is to be run? thinwire run -- train.py")
        if save_every < 1:
            raise ValueError(f"--save-every {save_every}: at least 1")
        from thinwire.integrations.ddp import Options, resolve_rules
        from thinwire_tools.run.attachment import ON_EVERY_RANK, Attachment, UsageError, say

        resolve_rules(Options(compressor=spec, **options))  # before the script is started, which may take long to begin
    attached = Attachment(spec, options, state, save_every)
    try:
        with attached:
            run_script(script)
    except UsageError as error:
        say(str(error.args[0]) if chief else f"rank {os.environ.get('RANK')} ended, too")
        return USAGE
    except SystemExit:
        attached.report(json)
        raise
    except ON_EVERY_RANK as error:
        if chief:
            traceback.print_exc()
        else:
            say(f"rank {os.environ.get('RANK')}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return FAILED
    except Exception as error:
        if "RANK" not in os.environ:
            error.add_note("thinwire run starts no ranks: torchrun --nproc-per-node 2 -m thinwire run -- train.py")
        raise
    attached.report(json)
    return 0


def run_script(command: Sequence[str]) -> None:
    """Run ``train.py args`` or ``-m package.module args`` here, as ``python`` would.

    Raises:
        ScriptNotFound: there is no such script.
        SystemExit: the script ended itself, or was ended.
    """
    command = without_python(command)  # this interpreter is the one
    check_script(command)
    before = sys.argv, list(sys.path)
    try:
        if command[0] == "-m" and len(command) > 1:
            sys.argv = command[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            return
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
