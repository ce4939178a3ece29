"""Errors that end a command without a result, which the command line shows as one line, and their exit codes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

FAILED = 1
# The numbers are those of sysexits.h.
USAGE = 64
UNAVAILABLE = 69


class CommandError(Exception):
    """Ends a command: `thinwire_tools.cli` prints its text behind the command's name, and returns ``exit_code``.

    Of several ranks that a launcher started one prints it where the code is `USAGE`, as all have the same arguments.
    """

    exit_code = FAILED
    details = ""
    """Text that is printed below the message, such as the end of a log."""


@contextmanager
def ends_command(*kinds: type[Exception], code: int = USAGE) -> Iterator[None]:
    """End the command with ``code`` where the body raises one of ``kinds``, by default a ``ValueError``."""
    kinds = kinds or (ValueError,)
    try:
        yield
    except CommandError:
        raise
    except kinds as error:
        ended = CommandError(str(error))
        ended.exit_code = code
        raise ended from error


class ScriptNotFound(CommandError):
    """There is no such script; the message says what to give."""

    exit_code = USAGE


def check_script(command: Sequence[str]) -> None:
    """Raise `ScriptNotFound` unless ``python`` finds something to run for ``train.py args`` or ``-m module args``."""
    if command[0] == "-m" and len(command) > 1:
        package = command[1].split(".")[0]
        if PathFinder.find_spec(package, [os.getcwd()]) is None and find_spec(package) is None:
            raise ScriptNotFound(f"there is no module {package!r}: give what python would run, -- -m package.module")
    elif not Path(command[0]).is_file():
        raise ScriptNotFound(f"there is no script {command[0]!r}: give what python would run, -- train.py --epochs 1")


def without_python(command: Sequence[str]) -> list[str]:
    """Return a command without the interpreter that it begins with, as that of ``thinwire lab`` does."""
    return list(command[1:] if Path(command[0]).name.startswith("python") and len(command) > 1 else command)
