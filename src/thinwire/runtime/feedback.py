"""The warning of error feedback around what does not contract."""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.compressors import Compressor, Wrapper
from thinwire.runtime.warning import warn_caller


def check_feedback(compressors: Iterable[Compressor]) -> None:
    """Warn of each of ``compressors`` that has error feedback and can err by more than its input."""
    for compressor in dict.fromkeys(compressors):
        if isinstance(compressor, Wrapper) and not compressor.coder.traits.contracts:
            warn_caller(
                f"{compressor}: {compressor.inner} can err by more than its input, so that the residual of ef() "
                "grows from step to step and training diverges: give it more bits, or smaller buckets, or no ef()"
            )
