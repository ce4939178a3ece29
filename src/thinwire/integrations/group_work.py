"""The handle of a collective under way in a process group of backend ``thinwire``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Future = torch.futures.Future


class Work(dist.Work):
    """Completes when all ``futures`` have: thinwire's, and gloo's for tensors that are not compressed.

    Its own future completes without a call of `wait`, as DistributedDataParallel needs. Errors are raised by `wait` and
    by waiting for the future.
    """

    def __init__(self, futures: Sequence[Future], outputs: Any) -> None:
        super().__init__()
        self._futures, self._outputs = futures, outputs

    def wait(self, timeout: object = None) -> bool:
        """Block until it is done. ``timeout`` is ignored: every message has the timeout of the process group."""
        for future in self._futures:
            future.wait()
        return True

    def get_future(self) -> Future:
        outputs = self._outputs
        if len(self._futures) == 1:
            return self._futures[0].then(lambda ended: _after([ended], outputs))
        # DDP's reducer sees exceptions that a callback raises, but not those that Python sets on a future: it would
        # read a result out of the latter.
        return torch.futures.collect_all(list(self._futures)).then(lambda _: _after(self._futures, outputs))

    def result(self) -> Any:
        return self._outputs

    def is_completed(self) -> bool:
        return all(future.done() for future in self._futures)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a collective that is done; None if it has none or is not done."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - returned
            return error
        return None


def _after(ended: Sequence[Future], outputs: Any) -> Any:
    for future in ended:
        future.value()
    return outputs
