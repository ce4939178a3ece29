"""A user's training script, run in this process as python would run it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from thinwire_tools.exits import check_script, without_python


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
