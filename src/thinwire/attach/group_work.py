"""The handle of a collective under way in a process group of backend ``thinwire``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire.wire import Follower

Future = torch.futures.Future


class Work(dist.Work):
    """Ends when our worker's futures have, and gloo's own works with which part of it travels.

    Its future completes by itself, as DistributedDataParallel needs it; what goes wrong is raised by `wait`, and by
    whoever waits for the future.
    """

    def __init__(
        self,
        futures: Sequence[Future],
        outputs: Any,
        works: Sequence[dist.Work] = (),
        follower: Follower | None = None,
    ) -> None:
        """``follower``: of the group that ``works`` are of."""
        super().__init__()
        self._futures, self._outputs, self._works = futures, outputs, works
        self._follower = follower or Follower("thinwire exact")

    def wait(self, timeout: object = None) -> bool:
        """Block until it is done. Every message has the process group's own timeout."""
        for future in self._futures:
            future.wait()
        for work in self._works:
            work.wait()
        return True

    def get_future(self) -> Future:
        outputs = self._outputs
        parts = [*self._futures, *(self._follower.follow(work, lambda: None) for work in self._works)]
        if len(parts) == 1:
            return parts[0].then(lambda ended: _after(ended, outputs))
        # An exception set from Python is one only to who waits from Python. One raised in a callback is one to DDP's
        # reducer, too, which would read a result out of the other kind.
        return torch.futures.collect_all(parts).then(lambda ended: _after_all(ended, outputs))

    def result(self) -> Any:
        return self._outputs

    def is_completed(self) -> bool:
        return all(future.done() for future in self._futures) and all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong, once it is done."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - it is the answer
            return error
        return None


def _after(ended: Future, outputs: Any) -> Any:
    ended.value()
    return outputs


def _after_all(ended: Future, outputs: Any) -> Any:
    for future in ended.value():
        future.value()
    return outputs
