"""What a rank of an emulated network measures of its links."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from thinwire.collectives import ProcessGroupTransport
from thinwire.runtime.probe import measure_pairs
from thinwire_tools.ranks import TIMEOUT


def probe() -> list[dict[str, Any]]:
    group = dist.group.WORLD
    assert group is not None
    return [asdict(pair) for pair in measure_pairs(ProcessGroupTransport(group, TIMEOUT))]
