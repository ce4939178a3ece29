"""Commands of ``thinwire`` called in this process: starting Python and loading PyTorch for each would take longer."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import pytest

from thinwire_tools.cli import main


def shown_by(argv: Sequence[str]) -> str:
    """What a command that ends well shows on a terminal of 80 columns."""
    shown, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
        patch.setenv("COLUMNS", "80")
        code = main(argv)
    assert code == 0, shown.getvalue() + errors.getvalue()
    return shown.getvalue()
