"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from thinwire.compressors import Compressor, Wrapper


def warn_caller(text: str) -> None:
    """Warn at the line that called thinwire, however many of its own functions lie between.

    A fixed ``stacklevel`` is wrong as soon as a second public function leads to the same warning.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "thinwire":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def check_feedback(compressors: Iterable[Compressor]) -> None:
    """Warn of each of ``compressors`` that has error feedback and an error that can exceed its input."""
    for compressor in dict.fromkeys(compressors):
        if isinstance(compressor, Wrapper) and not compressor.coder.traits.contracts:
            warn_caller(
                f"{compressor}: {compressor.inner} can err by more than its input, so that the residual of ef() "
                "grows from step to step and training diverges: give it more bits, or smaller buckets, or no ef()"
            )
