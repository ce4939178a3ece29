"""How a command ends without a result: errors that the command line shows as one line, and their exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

FAILED = 1
# As sysexits.h numbers them.
USAGE = 64
UNAVAILABLE = 69


class CommandError(Exception):
    """Ends a command: `thinwire_cli` prints its text behind the command's name, and returns ``exit_code``.

    Of several ranks that a launcher started one prints it where the code is `USAGE`, as all have the same arguments.
    """

    exit_code = FAILED
    details = ""
    """What is printed below the text, such as the end of a log."""


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
