"""The handle of a collective under way in a process group of backend ``thinwire``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Future = torch.futures.Future


class Work(dist.Work):
    """Ends when our worker's futures have, and those of gloo's own works with which part of it travels.

    Its future completes by itself, as DistributedDataParallel needs it; what goes wrong is raised by `wait`, and by
    whoever waits for the future.
    """

    def __init__(self, futures: Sequence[Future], outputs: Any) -> None:
        super().__init__()
        self._futures, self._outputs = futures, outputs

    def wait(self, timeout: object = None) -> bool:
        """Block until it is done. Every message has the process group's own timeout."""
        for future in self._futures:
            future.wait()
        return True

    def get_future(self) -> Future:
        outputs = self._outputs
        if len(self._futures) == 1:
            return self._futures[0].then(lambda ended: _after(ended, outputs))
        # An exception set from Python is one only to who waits from Python. One raised in a callback is one to DDP's
        # reducer, too, which would read a result out of the other kind.
        return torch.futures.collect_all(list(self._futures)).then(lambda ended: _after_all(ended, outputs))

    def result(self) -> Any:
        return self._outputs

    def is_completed(self) -> bool:
        return all(future.done() for future in self._futures)

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
