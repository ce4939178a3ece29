"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings


def warn_caller(text: str) -> None:
    """Warn at the line that called thinwire, however many of its own functions lie between.

    A fixed ``stacklevel`` is wrong as soon as a second public function leads to the same warning.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "thinwire":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
