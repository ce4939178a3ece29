"""Run one command on every rank of a slow network, as ``thinwire lab`` does."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from rich.console import Console

from thinwire_tools.lab.network import Network
from thinwire_tools.lab.schedule import Event, check_schedule, late_ranks
from thinwire_tools.lab.units import format_bytes, format_rate

POLL_S = 0.02
KILL_AFTER_S = 2.0
TIMED_OUT = 124
NO_NAMES = "[c10d] The hostname of the client socket cannot be retrieved"
"""Warning by PyTorch on every rank, because an emulated network has no name service. It is not forwarded."""
STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")


@dataclass(frozen=True)
class Outcome:
    """The result of a command that ran on all ranks.

    ``exit_code`` is the exit code of the first rank that failed (128 + n if signal n killed it, as in a shell), 128 + n
    if this process received signal n, 124 after a timeout, otherwise 0. ``seconds`` is the wall time, ``link`` what
    `Network.describe` returns, and ``link_bytes`` the bytes (sent, received) of each node. ``rank_seconds`` is how long
    ranks ran, summed over them; ``counted`` what ``count`` added up, None without it.
    """

    exit_code: int
    seconds: float
    link: dict[str, Any]
    link_bytes: list[tuple[int, int]]
    rank_seconds: float
    counted: float | None = None
    goodput: dict[str, float] = field(default_factory=dict)
    """Ratios of the counted to the possible number: ``"of_all_ranks"`` for all the time, ``"of_present_ranks"`` while
    each ran. Empty without ``possible``."""


def _shorten(values: Sequence[str]) -> str:
    """Return one value if all are equal, otherwise all of them in order of rank."""
    return values[0] if len(set(values)) == 1 else ", ".join(values)


def link_text(link: dict[str, Any]) -> str:
    """Format the result of `Network.describe` as one line; values that differ are in order of rank."""
    parts = ["unshaped"]
    if link["rate_bps"] is not None:
        parts = [f"{_shorten([format_rate(rate) for rate in link['rate_bps']])} each way"]
        parts.append(f"burst {_shorten([format_bytes(size) for size in link['burst_bytes']])}")
        parts.append(f"queue {_shorten([format_bytes(size) for size in link['queue_bytes']])}")
    parts.append(f"round trip +{link['rtt_s'] * 1e3:g} ms" if link["rtt_s"] else "no added latency")
    if link["loss"]:
        parts.append(f"{100 * link['loss']:g} % of packets lost each way")
    if link["nat"]:
        parts.append(f"behind NAT: {', '.join(map(str, link['nat']))}")
    parts.append(f"TCP {link['congestion_control']}, MTU {link['mtu']}")
    parts.append(f"network namespaces ({link['mode']})")
    each_node = f", {link['ranks_per_node']} to a node" if link["ranks_per_node"] > 1 else ""
    return f"{link['num_ranks']} ranks{each_node}: " + " · ".join(parts)


def launch(
    command: Sequence[str],
    *,
    num_ranks: int,
    timeout: float | None = None,
    grace_s: float = 5.0,
    events: Sequence[Event] = (),
    count: str | None = None,
    possible: float | None = None,
    **shape: Any,
) -> Outcome:
    """Run ``command`` on every rank of a new `Network`, of this ``shape`` (its arguments), and wait for all of them.

    Lines that a rank prints are prefixed with its number and keep their stream. The link is described first, and the
    bytes that were sent over it are printed last, both on standard error. When a rank fails, the others have
    ``grace_s`` seconds to end before they are terminated. SIGINT, SIGTERM and SIGHUP are forwarded to all ranks, which
    then have the same time; a second signal kills them at once. Ranks are terminated after ``timeout`` seconds.

    ``events`` happen meanwhile. A rank that one of them kills has not failed, and a rank that joins after all others
    have ended is not started.

    ``count`` is a regular expression with one group, a number: those that ranks print are added up. With ``possible``,
    what an undisturbed rank adds up in a second, the report has the goodput.

    Raises:
        LabUnavailableError: a network cannot be made on this machine.
        ValueError: a rate, a time or another number is out of its range.
        FileNotFoundError: the command does not exist.
    """
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout}")
    if possible is not None and (count is None or not possible > 0):
        raise ValueError(f"possible must be a positive number beside count, not {possible} beside {count!r}")
    tally = Tally(count)
    notes = Console(stderr=True, highlight=False)
    events = check_schedule(events, num_ranks)
    with _signals() as caught, Network(num_ranks, **shape) as network:
        notes.print(link_text(network.describe()), style="bold", soft_wrap=True, markup=False)
        started = time.monotonic()
        late = late_ranks(events)
        starter = _Starter(network, command, caught, tally)
        ranks = {rank: starter.start(rank) for rank in range(num_ranks) if rank not in late}
        turns = _Turns(events, ranks, starter, notes)
        supervision = _Supervision(ranks, caught, timeout, grace_s, notes, turns)
        exit_code = supervision.wait()
        seconds = time.monotonic() - started
        link = network.describe()
        link_bytes = [network.interface_bytes(node * network.ranks_per_node) for node in range(network.num_nodes)]
    for reader in starter.readers:
        reader.join()
    for process in starter.processes:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    _print_bytes(notes, seconds, link, link_bytes)
    if count is None:
        return Outcome(exit_code, seconds, link, link_bytes, supervision.rank_seconds)
    goodput = {}
    if possible is not None:
        most = {"of_all_ranks": num_ranks * seconds, "of_present_ranks": supervision.rank_seconds}
        goodput = {name: tally.total / (possible * rank_seconds) for name, rank_seconds in most.items()}
    _print_counted(notes, tally.total, seconds, goodput)
    return Outcome(exit_code, seconds, link, link_bytes, supervision.rank_seconds, tally.total, goodput)


def _print_bytes(notes: Console, seconds: float, link: dict[str, Any], link_bytes: list[tuple[int, int]]) -> None:
    notes.print(f"after {seconds:.1f} s, with headers and what ranks send at the start:", style="bold")
    whose = "rank" if link["ranks_per_node"] == 1 else "node"
    for number, (sent, received) in enumerate(link_bytes):
        notes.print(f"{whose} {number}: sent {format_bytes(sent)}, received {format_bytes(received)}")
    own_losses = {name: link["relay"][name] for name in ("memory_full", "read_late", "failed")} if link["relay"] else {}
    if any(own_losses.values()):
        notes.print(
            f"the relay that adds the latency lost frames ({own_losses}): this machine is too busy for the rate, and "
            "times are longer than on the link described",
            style="yellow",
        )


def _print_counted(notes: Console, counted: float, seconds: float, goodput: dict[str, float]) -> None:
    notes.print(f"counted {counted:,.0f}, {counted / seconds:,.0f} a second")
    if goodput:
        whole, present = goodput["of_all_ranks"], goodput["of_present_ranks"]
        notes.print(f"goodput {whole:.1%} of what all ranks could, {present:.1%} of what those that ran could")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list. Only the main thread receives signals."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    # Signals that were ignored when this process began (nohup, a shell's background job) stay ignored.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Supervision:
    """Waits for all ranks, and ends the others when one fails or this process receives a signal."""

    def __init__(
        self,
        ranks: dict[int, subprocess.Popen[bytes]],
        caught: list[int],
        timeout: float | None,
        grace_s: float,
        notes: Console,
        turns: _Turns,
    ) -> None:
        self.ranks = ranks
        self.turns = turns
        self.caught = caught
        self.grace_s = grace_s
        self.notes = notes
        self.timeout = timeout
        self.timeout_at = time.monotonic() + timeout if timeout is not None else None
        self.exit_code: int | None = None
        self.rank_seconds = 0.0
        self.terminate_at: float | None = None
        self.kill_at: float | None = None

    def wait(self) -> int:
        """Return the exit code that `Outcome` documents. Ranks that ignore SIGTERM are killed with the network."""
        looked = time.monotonic()
        while running := self._running():
            before, looked = looked, time.monotonic()
            self.rank_seconds += len(running) * (looked - before)
            if self.exit_code is None:
                self.turns.run()
                self._check()
            now = time.monotonic()
            if len(self.caught) > 1 or (self.kill_at is not None and now >= self.kill_at):
                break
            if self.terminate_at is not None and now >= self.terminate_at:
                self._send(signal.SIGTERM)
                self.terminate_at, self.kill_at = None, now + KILL_AFTER_S
            time.sleep(POLL_S)
        if self.exit_code is None:
            self._check()
        return self.exit_code or 0

    def _running(self) -> list[subprocess.Popen[bytes]]:
        """Return the ranks that have not ended. All are polled, so that every `returncode` is set afterwards."""
        return [rank for rank in self.ranks.values() if rank.poll() is None]

    def _check(self) -> None:
        """Set the exit code if a rank failed, a signal was received or the time is over since the last check."""
        now = time.monotonic()
        if self.caught:
            number = signal.Signals(self.caught[0])
            self._print(f"{number.name}: passed on to all ranks")
            self._send(number)
            self._end(128 + number, now + self.grace_s)
            return
        for rank, process in self.ranks.items():
            if process.returncode and process not in self.turns.killed:
                code = process.returncode if process.returncode > 0 else 128 - process.returncode
                self._print(f"rank {rank} failed with exit code {code}; the others end within {self.grace_s:g} s")
                self._end(code, now + self.grace_s)
                return
        if self.timeout_at is not None and now >= self.timeout_at and self._running():
            self._print(f"not done after {self.timeout:g} s: ending all ranks")
            self._end(TIMED_OUT, now)

    def _end(self, exit_code: int, terminate_at: float) -> None:
        self.exit_code, self.terminate_at = exit_code, terminate_at

    def _print(self, text: str) -> None:
        self.notes.print(text, style="bold red")

    def _send(self, number: int) -> None:
        """Send a signal to the process group of every rank that runs, as a terminal does. Paused ones continue."""
        for rank in self._running():
            os.killpg(rank.pid, number)
            os.killpg(rank.pid, signal.SIGCONT)


class _Starter:
    """Starts ranks, and forwards their output."""

    def __init__(self, network: Network, command: Sequence[str], caught: list[int], tally: Tally) -> None:
        self.network, self.command, self.caught, self.tally = network, command, caught, tally
        self.processes: list[subprocess.Popen[bytes]] = []
        self.readers: list[threading.Thread] = []

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        # Python would buffer a rank's lines to a pipe until a block is full.
        environment = {"PYTHONUNBUFFERED": "1", **os.environ}
        options = {"env": environment, "stdin": subprocess.DEVNULL}
        process = self.network.popen(rank, self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        self.processes.append(process)
        for pipe, stderr in ((process.stdout, False), (process.stderr, True)):
            arguments = rank, pipe, Console(stderr=stderr), self.caught, self.tally
            self.readers.append(threading.Thread(target=forward_lines, args=arguments, daemon=True))
            self.readers[-1].start()
        return process


class Tally:
    """Adds up the numbers that ranks print where ``pattern`` says."""

    def __init__(self, pattern: str | None) -> None:
        self._pattern = None if pattern is None else re.compile(pattern)
        if self._pattern is not None and self._pattern.groups != 1:
            raise ValueError(f"count {pattern!r} must have one group, the number to add up, as in: kept (\\d+) tokens")
        self.total = 0.0
        self._lock = threading.Lock()

    def read(self, line: str) -> None:
        """Count the number in ``line``. A match that is no number counts nothing."""
        if self._pattern is not None and (match := self._pattern.search(line)) is not None:
            with self._lock, contextlib.suppress(ValueError):
                self.total += float(match[1])


class _Turns:
    """Events of a schedule, each of which happens at its time."""

    def __init__(
        self, events: Sequence[Event], ranks: dict[int, subprocess.Popen[bytes]], starter: _Starter, notes: Console
    ) -> None:
        self.ranks, self.starter, self.notes = ranks, starter, notes
        self.killed: set[subprocess.Popen[bytes]] = set()
        self.started = time.monotonic()
        begins = [(event.at_s, event, True) for event in events]
        ends = [(event.until_s, event, False) for event in events if event.until_s is not None]
        self.waiting = sorted([*begins, *ends], key=lambda turn: turn[0])

    def run(self) -> None:
        while self.waiting and self.waiting[0][0] <= time.monotonic() - self.started:
            at_s, event, begins = self.waiting.pop(0)
            what = event.kind if begins else f"end of {event.kind}"
            self.notes.print(f"at {at_s:g} s: {what}, rank {event.rank}", style="bold yellow")
            if event.kind == "cut":
                self.starter.network.set_link(event.rank, up=not begins)
            elif event.kind == "join":
                self.ranks[event.rank] = self.starter.start(event.rank)
            elif (process := self.ranks[event.rank]).poll() is None:
                if event.kind == "kill":
                    self.killed.add(process)
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    os.killpg(process.pid, signal.SIGSTOP if begins else signal.SIGCONT)


def forward_lines(rank: int, pipe: IO[bytes], console: Console, caught: list[int], tally: Tally) -> None:
    """Forward ``rank``'s output line by line, each line prefixed with its number."""
    with console.capture() as rendered:
        console.print(f"[{rank}]", style=STYLES[rank % len(STYLES)], end=" ", markup=False, highlight=False)
    prefix, reader_gone = rendered.get(), False
    for line in pipe:
        # A progress bar rewrites its line; the last text is what stays.
        shown = line.decode(errors="replace").rstrip("\r\n").rsplit("\r", 1)[-1]
        tally.read(shown)
        if reader_gone or NO_NAMES in shown:
            continue
        try:
            console.file.write(f"{prefix}{shown}\n")
            console.file.flush()
        except BrokenPipeError:
            # The same as in a shell pipeline: ranks receive SIGPIPE, and their output is read on so that they can end.
            reader_gone = True
            caught.append(signal.SIGPIPE)
