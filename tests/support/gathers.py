"""What a sharded model computes with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from thinwire.integrations.fsdp import QuantizedAllGather


@contextmanager
def gathered() -> Iterator[dict[str, list[Tensor]]]:
    """By unit, all weights as they arrived in each gather so far."""
    found: dict[str, list[Tensor]] = {}
    original = QuantizedAllGather.__call__

    def gather(self: Any, output_tensor: Tensor, *args: Any, **rest: Any) -> Any:
        work = original(self, output_tensor, *args, **rest)
        work.wait()
        found.setdefault(self.attached.unit.name, []).append(output_tensor.clone())
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantizedAllGather, "__call__", gather)
        yield found
