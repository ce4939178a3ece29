"""What a rank's worker does while backward runs, as a trace for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.wire.stats import Stats

_BACKWARD, _COMMUNICATION, _EXPOSED = 1, 2, 3
_TRACKS = {_BACKWARD: "backward", _COMMUNICATION: "communication", _EXPOSED: "communication after backward"}


class _Event(NamedTuple):
    """A span, or an instant if it has no end. Times are of `time.perf_counter_ns`."""

    name: str
    track: int
    start_ns: int
    end_ns: int | None
    args: Mapping[str, object]


class Timeline:
    """Records the first ``steps`` backward passes that it sees: a clock for the collectives, in place of `Stats`.

    Three tracks: *backward*, from the first DDP bucket handed over to the last, with an instant for each;
    *communication*, each bucket with its stages; *communication after backward*, the part that backward did not hide.

    ``stats`` says where stages are counted as well. Keeps at most ``max_events`` events; `write` tells how many more
    there were. `bucket` is for the thread that runs backward, what it returns and `stage` for the worker.

    Raises:
        ValueError: ``steps`` or ``max_events`` is less than 1.
    """

    def __init__(self, stats: Callable[[], Stats], rank: int, *, steps: int = 5, max_events: int = 100_000) -> None:
        if steps < 1 or max_events < 1:
            raise ValueError(f"steps and max_events must be at least 1, not {steps} and {max_events}")
        self.rank = rank
        self._stats = stats
        self._steps, self._max_events = steps, max_events
        self._events: list[_Event] = []
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._origin_ns, self._origin_unix_ns = _now()
        # The pass under way, in the thread that runs backward.
        self._step: int | None = None
        self._num_steps = self._num_buckets = self._first_ready_ns = 0
        # The bucket being reduced, in the worker.
        self._reducing: Mapping[str, object] | None = None

    @property
    def num_steps(self) -> int:
        """Backward passes recorded so far."""
        return min(self._num_steps, self._steps)

    def bucket(
        self, step: int, layers: Sequence[str], num_bytes: int, *, last: bool = True
    ) -> AbstractContextManager[None]:
        """Note that a DDP bucket with the gradients of ``layers`` is handed over now.

        The worker enters what this returns for as long as it reduces the bucket. ``last`` ends the backward pass.
        """
        ready_ns = time.perf_counter_ns()
        if step != self._step:
            self._step, self._num_buckets, self._first_ready_ns = step, 0, ready_ns
            self._num_steps += 1
        if self._num_steps > self._steps:
            return nullcontext()
        args = {"step": step, "bucket": self._num_buckets, "layers": layers, "bytes": num_bytes}
        self._num_buckets += 1
        self._add(f"bucket {args['bucket']} ready", _BACKWARD, ready_ns, None, args)
        if last:
            self._add(f"backward of step {step}", _BACKWARD, self._first_ready_ns, ready_ns, {"step": step})
        return self._reduce(args, ready_ns, last)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time that the body takes to ``<name>_s`` of the statistics, and record it within its bucket."""
        started_ns = time.perf_counter_ns()
        try:
            with self._stats().stage(name):
                yield
        finally:
            if self._reducing is not None:
                self._add(name, _COMMUNICATION, started_ns, time.perf_counter_ns(), self._reducing)

    def to_dict(self) -> dict[str, Any]:
        """The trace in the JSON object format of Chrome's trace events. Times in µs since the recording began."""
        with self._lock:
            events, num_dropped = list(self._events), self._num_dropped
        # A viewer nests spans that begin together by their order.
        events.sort(key=lambda event: (event.start_ns, -(event.end_ns or 0)))
        return {
            "traceEvents": [*self._names(), *map(self._trace_event, events)],
            "displayTimeUnit": "ms",
            "otherData": {
                "rank": self.rank,
                "steps": self.num_steps,
                "dropped_events": num_dropped,
                # A string: JSON numbers lose digits of it in JavaScript.
                "origin_unix_ns": str(self._origin_unix_ns),
            },
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to ``path``, this rank's own file (`rank_path`); `merge_timelines` joins those of all."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n")

    @contextmanager
    def _reduce(self, args: Mapping[str, object], ready_ns: int, last: bool) -> Iterator[None]:
        started_ns = time.perf_counter_ns()
        step, bucket = args["step"], args["bucket"]
        self._reducing = {"step": step, "bucket": bucket}
        try:
            yield
        finally:
            self._reducing = None
            ended_ns = time.perf_counter_ns()
            waited_us = (started_ns - ready_ns) / 1000
            self._add(f"bucket {bucket}", _COMMUNICATION, started_ns, ended_ns, {**args, "waited_us": waited_us})
            if last:
                self._add("not hidden by backward", _EXPOSED, ready_ns, ended_ns, {"step": step})

    def _add(self, name: str, track: int, start_ns: int, end_ns: int | None, args: Mapping[str, object]) -> None:
        with self._lock:
            if len(self._events) < self._max_events:
                self._events.append(_Event(name, track, start_ns, end_ns, args))
            else:
                self._num_dropped += 1

    def _place(self, track: int) -> dict[str, int]:
        # From 1, since Perfetto takes process 0 for the kernel's; and no thread number twice in a merged trace.
        return {"pid": self.rank + 1, "tid": (self.rank + 1) * 10 + track}

    def _names(self) -> Iterator[dict[str, Any]]:
        yield {"ph": "M", "name": "process_name", **self._place(_BACKWARD), "args": {"name": f"rank {self.rank}"}}
        yield {"ph": "M", "name": "process_sort_index", **self._place(_BACKWARD), "args": {"sort_index": self.rank}}
        for track, name in _TRACKS.items():
            yield {"ph": "M", "name": "thread_name", **self._place(track), "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", **self._place(track), "args": {"sort_index": track}}

    def _trace_event(self, event: _Event) -> dict[str, Any]:
        begin = {"name": event.name, "cat": "thinwire", "ts": (event.start_ns - self._origin_ns) / 1000}
        if event.end_ns is None:
            return {"ph": "i", "s": "t", **begin, **self._place(event.track), "args": event.args}
        duration_us = (event.end_ns - event.start_ns) / 1000
        return {"ph": "X", **begin, "dur": duration_us, **self._place(event.track), "args": event.args}


def rank_path(path: str | os.PathLike[str], rank: int) -> Path:
    """``trace.json`` as ``trace.rank3.json``: where a rank writes, when all of them are given one path."""
    path = Path(path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def merge_timelines(paths: Sequence[str | os.PathLike[str]], merged: str | os.PathLike[str]) -> None:
    """Join the timelines that the ranks wrote into one file, on one clock: as exact as that of their hosts agree.

    Raises:
        ValueError: a file is not a timeline, or two are of the same rank.
    """
    traces = [_read(path) for path in paths]
    if not traces:
        raise ValueError("no timeline given: pass the files that wire.timeline() wrote, one for each rank")
    twice = [rank for rank, times in Counter(int(about["rank"]) for about, _ in traces).items() if times > 1]
    if twice:
        raise ValueError(f"rank {twice[0]} comes twice: give one file for each rank, of one recording")
    first_ns = min(int(about["origin_unix_ns"]) for about, _ in traces)
    events = []
    for about, own in traces:
        shift_us = (int(about["origin_unix_ns"]) - first_ns) / 1000
        events += [{**event, "ts": event["ts"] + shift_us} if "ts" in event else event for event in own]
    about = {"ranks": [about for about, _ in traces], "origin_unix_ns": str(first_ns)}
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    Path(merged).write_text(json.dumps(whole) + "\n")


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a rank's timeline says of itself, and its events."""
    try:
        trace = json.loads(Path(path).read_text())
        about = dict(trace["otherData"])
        about["rank"], about["origin_unix_ns"] = int(about["rank"]), str(int(about["origin_unix_ns"]))
        return about, [{**e, "ts": float(e["ts"])} if "ts" in e else dict(e) for e in trace["traceEvents"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not the timeline of a rank: give files that wire.timeline() wrote") from error


def _now() -> tuple[int, int]:
    """One moment on both clocks: `time.perf_counter_ns`, and ns since 1970. The least disturbed of a few readings."""
    readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(5)]
    before, unix_ns, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return (before + after) // 2, unix_ns
