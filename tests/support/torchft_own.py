"""Run torchft's own tests of local SGD with all-reduces that thinwire compresses: ``torchft_own.py PREFIX BITS``.

All variants whose names begin with ``PREFIX``, in a process of their own, because these tests initialize the default
process group. A line for each says how it ended and what it sent.
"""

from __future__ import annotations

import json
import sys
import unittest
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft.local_sgd_integ_test as own
from torchft._test import diloco_trainer

from thinwire.collectives import ProcessGroupTransport, parse_algorithm
from thinwire.plan import Plan
from thinwire.runtime import BucketEngine, Wire, WireSettings, on_the_host

BITS = int(sys.argv[2])
counts = {"tensors": 0, "bytes": 0, "inexact": 0}


class Done(dist._Work):  # what torchft takes for a Work that has ended
    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Compressed(own.ProcessGroupGloo):
    """torchft's reconfigurable group, whose sums of floats are means of thinwire's messages times the workers."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if any(not tensor.is_floating_point() for tensor in tensors):
            return super().allreduce(tensors, opts)
        transport = ProcessGroupTransport(self.parent, timedelta(seconds=10), owned=False)
        shapes = {f"tensor{i}": tuple(tensor.shape) for i, tensor in enumerate(tensors)}
        plan = Plan.build(shapes, dict.fromkeys(shapes, f"minmax(bits={BITS})"))
        with on_the_host():
            wire = Wire(BucketEngine(plan, shapes, transport, WireSettings(seed=0, algorithm=parse_algorithm("sra"))))
        flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
        exact = flat.clone()
        super().allreduce([exact], opts).wait()
        wire.engine.begin_step()
        wire.engine.reduce(flat, tuple(shapes.items())).wait()
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(mean.view(tensor.shape) * transport.world_size)
        counts["tensors"] += len(tensors)
        counts["bytes"] += wire.stats.payload_sent_bytes
        counts["inexact"] += not torch.allclose(flat * transport.world_size, exact)
        return Done(tensors)


own.ProcessGroupGloo = diloco_trainer.ProcessGroupGloo = Compressed
names = [name for name in unittest.TestLoader().getTestCaseNames(own.LocalSGDIntegTest) if name.startswith(sys.argv[1])]
failed = False
for name in names:
    counts.update(dict.fromkeys(counts, 0))
    result = unittest.TextTestRunner(stream=sys.stdout).run(own.LocalSGDIntegTest(name))
    passed = result.wasSuccessful() and not result.skipped
    failed |= not passed
    sys.stdout.write(f"{'passed' if passed else 'failed'} {name} {json.dumps(counts)}\n")
    sys.stdout.flush()
sys.exit(failed)
