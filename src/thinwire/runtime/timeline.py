"""Traces of communication during backward, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.futures import Future

from thinwire.runtime.executor import Job
from thinwire.runtime.stats import Stats

_Event = dict[str, Any]
_Args = Mapping[str, object]
_BACKWARD, _SENDING, _COMMUNICATION, _EXPOSED = 1, 2, 3, 4
_TRACKS = {
    _BACKWARD: "backward",
    _SENDING: "sending",
    _COMMUNICATION: "communication",
    _EXPOSED: "communication after backward",
}


@dataclass
class _Pass:
    """One backward pass, in ns: when its first and its last DDP bucket were ready, and when all were reduced."""

    step: int
    first_ready_ns: int
    last_ready_ns: int = 0
    reduced_ns: int = 0
    num_buckets: int = 0


class Timeline:
    """Records the first ``steps`` backward passes. Collectives use it as their clock in place of `Stats`.

    Four tracks: *backward*, from the first DDP bucket handed over to the last, with an instant for each; *sending*,
    each bucket as it is encoded and sent off; *communication*, each as it is received, summed and decoded;
    *communication after backward*, the part that backward did not hide.

    ``stats`` returns the statistics in which stages are counted as well. At most ``max_events`` events are kept, and
    the trace contains the number of dropped ones. The thread that runs backward calls `bucket` and `dense`; the
    executor's threads call `stage` and run the job that `bucket` returns.

    Raises:
        ValueError: ``steps`` or ``max_events`` is less than 1.
    """

    def __init__(self, stats: Callable[[], Stats], rank: int, *, steps: int = 5, max_events: int = 50_000) -> None:
        if steps < 1 or max_events < 1:
            raise ValueError(f"steps and max_events must be at least 1, not {steps} and {max_events}")
        self.rank = rank
        self._stats = stats
        self._num_steps, self._max_events = steps, max_events
        self._events: list[_Event] = []
        self._passes: list[_Pass] = []
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._here = threading.local()  # the bucket that a thread is at, and its track
        self._origin_ns, self._origin_unix_ns = time.perf_counter_ns(), time.time_ns()

    def bucket(self, job: Job, step: int, layers: Sequence[str], num_bytes: int) -> Job:
        """Note that a DDP bucket is ready; returns ``job``, recorded in whichever thread runs it."""
        ready_ns = time.perf_counter_ns()
        if not (backward := self._ready(step, ready_ns)):
            return job
        place = {"step": step, "bucket": backward.num_buckets - 1}
        return self._recorded(job, backward, place, {"layers": layers, "bytes": num_bytes}, ready_ns)

    def dense(self, step: int, num_bytes: int, future: Future[Any]) -> Future[Any]:
        """Record a DDP bucket's native all-reduce until ``future`` is done; returns a future that follows it."""
        ready_ns = time.perf_counter_ns()
        if not (backward := self._ready(step, ready_ns)):
            return future
        bucket = backward.num_buckets - 1

        def record(done: Future[Any]) -> Any:
            ended_ns = time.perf_counter_ns()
            args = {"step": step, "bucket": bucket, "bytes": num_bytes}
            # Native all-reduces overlap one another, which only asynchronous events may.
            own, name = {"local": f"{step}.{bucket}"}, "native all-reduce"
            begin, end = (self._event("b", name, _COMMUNICATION, ns, args, id2=own) for ns in (ready_ns, ended_ns))
            self._add(begin, {**end, "ph": "e"})
            with self._lock:
                backward.reduced_ns = max(backward.reduced_ns, ended_ns)
            return done.value()

        return future.then(record)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time that the body takes to ``<name>_s`` of the statistics, and record it within its bucket."""
        started_ns = time.perf_counter_ns()
        try:
            with self._stats().stage(name):
                yield
        finally:
            at = getattr(self._here, "at", None)
            if at is not None:
                place, track = at
                self._add(self._span(name, track, started_ns, time.perf_counter_ns(), place))

    def to_dict(self) -> dict[str, Any]:
        """Return the trace in the JSON object format of Chrome's trace events, in µs since the recording began."""
        with self._lock:
            events, num_dropped = list(self._events), self._num_dropped
        for backward in self._passes:
            args, last_ns = {"step": backward.step}, backward.last_ready_ns
            events.append(self._span("backward", _BACKWARD, backward.first_ready_ns, last_ns, args))
            if backward.reduced_ns > last_ns:
                events.append(self._span("not hidden", _EXPOSED, last_ns, backward.reduced_ns, args))
        # A viewer nests spans that begin together by their order.
        events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
        names = [
            self._event("M", kind, track, self._origin_ns, {"name": name})
            for track, track_name in _TRACKS.items()
            for kind, name in (("process_name", f"rank {self.rank}"), ("thread_name", track_name))
        ]
        # The origin as a string: numbers lose digits in JavaScript.
        about = {"rank": self.rank, "origin_unix_ns": str(self._origin_unix_ns)}
        about |= {"steps": len(self._passes), "dropped_events": num_dropped}
        return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": about}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to ``path``, a file of this rank (`rank_path`); `merge_timelines` joins all ranks' files."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n")

    def _ready(self, step: int, ready_ns: int) -> _Pass | None:
        """Note that a bucket is ready; returns its backward pass, or None if enough passes are recorded."""
        if not self._passes or self._passes[-1].step != step:
            if len(self._passes) == self._num_steps:
                return None
            self._passes.append(_Pass(step, ready_ns))
        backward = self._passes[-1]
        args = {"step": step, "bucket": backward.num_buckets}
        self._add(self._event("i", f"bucket {backward.num_buckets} ready", _BACKWARD, ready_ns, args, s="t"))
        backward.num_buckets, backward.last_ready_ns = backward.num_buckets + 1, ready_ns
        return backward

    def _recorded(self, job: Job, backward: _Pass, place: _Args, about: _Args, ready_ns: int) -> Job:
        name, track = f"bucket {place['bucket']}", _SENDING
        while True:
            started_ns, self._here.at = time.perf_counter_ns(), (place, track)
            try:
                then = next(job)
            except StopIteration as end:
                return end.value
            finally:
                self._here.at = None
                ended_ns = backward.reduced_ns = time.perf_counter_ns()
                args = {**place, **about, "waited_us": (started_ns - ready_ns) / 1000}
                self._add(self._span(name, track, started_ns, ended_ns, args))
            track = _COMMUNICATION
            yield then

    def _add(self, *events: _Event) -> None:
        with self._lock:
            if len(self._events) + len(events) <= self._max_events:
                self._events += events
            else:
                self._num_dropped += len(events)

    def _span(self, name: str, track: int, start_ns: int, end_ns: int, args: _Args) -> _Event:
        return self._event("X", name, track, start_ns, args, dur=(end_ns - start_ns) / 1000)

    def _event(self, phase: str, name: str, track: int, ns: int, args: _Args, **more: object) -> _Event:
        # From 1, since Perfetto takes process 0 for the kernel's; and no thread number twice in a merged trace.
        where = {"ts": (ns - self._origin_ns) / 1000, "pid": self.rank + 1, "tid": 10 * (self.rank + 1) + track}
        return {"name": name, "cat": "thinwire", "ph": phase, **where, "args": args, **more}


def rank_path(path: str | os.PathLike[str], rank: int) -> Path:
    """Return the file of one rank: ``trace.json`` becomes ``trace.rank3.json``."""
    path = Path(path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def merge_timelines(paths: Sequence[str | os.PathLike[str]], merged: str | os.PathLike[str]) -> None:
    """Join the timelines of all ranks in one file, on one clock, as exactly as the clocks of their hosts agree.

    Raises:
        ValueError: A file is not a timeline, or two have the same rank.
    """
    traces = [_read(path) for path in paths]
    ranks = [int(about["rank"]) for about, _ in traces]
    if not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(f"pass the files that wire.timeline() wrote, one for each rank: these are of ranks {ranks}")
    first_ns = min(int(about["origin_unix_ns"]) for about, _ in traces)
    events = []
    for about, own in traces:
        shift_us = (int(about["origin_unix_ns"]) - first_ns) / 1000
        events += [{**event, "ts": event["ts"] + shift_us} for event in own]
    about = {"ranks": [about for about, _ in traces], "origin_unix_ns": str(first_ns)}
    Path(merged).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}) + "\n")


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[_Event]]:
    """Return the metadata of a rank's timeline and its events."""
    try:
        trace = json.loads(Path(path).read_text())
        about = dict(trace["otherData"])
        about["rank"], about["origin_unix_ns"] = int(about["rank"]), str(int(about["origin_unix_ns"]))
        return about, [{**event, "ts": float(event["ts"])} for event in trace["traceEvents"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not the timeline of a rank: give files that wire.timeline() wrote") from error
