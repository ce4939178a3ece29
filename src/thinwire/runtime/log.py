"""A Wire's statistics over time: to a JSON Lines file, TensorBoard or Weights & Biases."""

from __future__ import annotations

import errno
import json
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol, Self

from thinwire.runtime.sharded_wire import ShardedWire
from thinwire.runtime.stats import HandleStats, Stats
from thinwire.runtime.timeline import rank_path
from thinwire.runtime.wire import Wire

_LEVELS = ("buffer_bytes", "slot_bytes", "declined_layers", "unsuited_layers")
"""Statistics that are present values, not totals."""
_SERIES = ("alpha",)
"""Statistics with one value for each measured step: the last one is logged."""

_Writer = Callable[[int, dict[str, float]], None]
"""Writes the statistics of one step."""


class ScalarWriter(Protocol):
    """The method of `torch.utils.tensorboard.SummaryWriter` that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class DictLogger(Protocol):
    """The method of a Weights & Biases run, and of the ``wandb`` module, that is used here."""

    def log(self, data: dict[str, Any], *, step: int) -> Any: ...


class StatsLogger:
    """Writes the statistics of a handle after every ``every``-th optimizer step.

    Call `log` after each step. `close`, or the end of a ``with`` block, writes a record of the remaining steps.
    ``target`` is a path that ends in ``.jsonl`` (one JSON object a line, flushed, appended to an existing file), or an
    object with TensorBoard's ``add_scalar`` or Weights & Biases' ``log``, which the caller closes.

    Names: ``total/…`` are ``wire.stats`` since the handle was made, ``interval/…`` the change since the last record,
    ``per_step/…`` that change divided by the number of backward passes (bytes, seconds of each stage), and ``now/…``
    present values. Files contain them beside ``step``, ``rank`` and ``unix_time_s``; elsewhere they are prefixed with
    ``thinwire/``.

    Only rank 0 writes, and ``target`` may be None on other ranks. With ``all_ranks`` every rank writes a file of its
    own: ``stats.jsonl`` becomes ``stats.rank3.jsonl``.

    Raises:
        ValueError: ``every`` is less than 1, or the path does not end in ``.jsonl``.
        TypeError: ``target`` is none of these.
        OSError: The file cannot be opened, or, while logging, written.
    """

    def __init__(
        self,
        wire: Wire | ShardedWire,
        target: str | os.PathLike[str] | ScalarWriter | DictLogger | None,
        *,
        every: int = 1,
        all_ranks: bool = False,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}: it is the number of steps between two records")
        self._wire, self._every = wire, every
        self._num_waiting, self._step = 0, 0
        self._before, self._before_s = wire.stats, time.perf_counter()
        writes = all_ranks or wire.rank == 0
        if target is not None or writes:
            # A wrong argument must be an error on all ranks, not only on the one that writes.
            _check(target)
        self._write = _writer(target, wire.rank, all_ranks) if writes else None
        self._closed = False

    def log(self, step: int | None = None) -> None:
        """Count one optimizer step, and write a record if one is due.

        ``step`` is its index, by default that of the last backward pass. Pass the index that other values are logged
        with: Weights & Biases drops values whose step is lower than that of earlier ones.
        """
        if self._closed:
            raise RuntimeError("this StatsLogger is closed: make a new one, it appends to the same file")
        self._num_waiting += 1
        self._step = self._wire.step if step is None else step
        if self._num_waiting == self._every:
            self._record()

    def close(self) -> None:
        """Write a record of the remaining steps, if there are any. Closing a closed logger does nothing."""
        if self._num_waiting:
            self._record()
        self._closed, self._write = True, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self) -> None:
        self._num_waiting = 0
        if self._write is None:
            return
        now, now_s = self._wire.stats, time.perf_counter()
        self._write(self._step, _figures(now, self._before, now_s - self._before_s))
        self._before, self._before_s = now, now_s


def _figures(now: HandleStats, before: HandleStats, elapsed_s: float) -> dict[str, float]:
    if now.steps < before.steps or now.dense_bytes < before.dense_bytes:
        # reset_stats() was called in between.
        before = type(now)()
    totals = [field.name for field in fields(now) if field.name not in (*_LEVELS, *_SERIES)]
    stages = [name for name in totals if name.endswith("_s")]
    interval = replace(now, **{name: getattr(now, name) - getattr(before, name) for name in totals})
    num_steps = max(1, interval.steps)
    of_steps = (
        {"interval/compressed_share": interval.compressed_steps / num_steps} if isinstance(interval, Stats) else {}
    )
    return {
        **{f"total/{name}": value for name, value in now.to_dict().items() if name not in (*_LEVELS, *_SERIES)},
        "interval/steps": interval.steps,
        "interval/elapsed_s": elapsed_s,
        "interval/payload_sent_bytes": interval.payload_sent_bytes,
        "interval/sent_bytes_per_s": interval.payload_sent_bytes / elapsed_s,
        "interval/ratio": interval.ratio,
        **of_steps,
        "interval/nonfinite_steps": interval.nonfinite_steps,
        **{f"per_step/{name}": getattr(interval, name) / num_steps for name in ("payload_sent_bytes", *stages)},
        **{f"now/{name}": getattr(now, name) for name in _LEVELS if hasattr(now, name)},
        **{f"now/{name}": getattr(now, name)[-1][1] for name in _SERIES if getattr(now, name, None)},
    }


def _check(target: Any) -> None:
    if isinstance(target, str | os.PathLike):
        if Path(target).suffix != ".jsonl":
            raise ValueError(f"{target} must end in .jsonl: one JSON object a line is what will be in it")
    elif not callable(getattr(target, "add_scalar", None)) and not callable(getattr(target, "log", None)):
        raise TypeError(
            f"cannot write statistics to {target!r}: pass a path that ends in .jsonl, a "
            "torch.utils.tensorboard.SummaryWriter (it has add_scalar), or a wandb run (it has log)"
        )


def _writer(target: Any, rank: int, all_ranks: bool) -> _Writer:
    if isinstance(target, str | os.PathLike):
        return _json_lines(rank_path(target, rank) if all_ranks else Path(target), rank)
    if hasattr(target, "add_scalar"):
        return lambda step, figures: _scalars(target, step, figures)
    return lambda step, figures: target.log(_prefixed(figures), step=step)


def _scalars(target: ScalarWriter, step: int, figures: dict[str, float]) -> None:
    for name, value in _prefixed(figures).items():
        target.add_scalar(name, value, step)


def _prefixed(figures: dict[str, float]) -> dict[str, float]:
    return {f"thinwire/{name}": value for name, value in figures.items()}


def _json_lines(path: Path, rank: int) -> _Writer:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unbuffered: a run that is killed leaves whole lines.
    file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed with the function below
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            # A full disk or a power cut tore the last line: the next record must not continue it.
            file.write(b"\n")

    def write(step: int, figures: dict[str, float]) -> None:
        record = {"step": step, "rank": rank, "unix_time_s": time.time(), **figures}
        line = json.dumps(record).encode() + b"\n"
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "the disk filled up while a record was written: free some space", str(path))

    weakref.finalize(write, file.close)
    return write
