"""Ranks find out which of them has caused a failure, from what they write into PyTorch's store."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire
from harness import run_ranks
from nets import make
from thinwire import CommunicationError, PeerFailedError, TransportError
from thinwire.collectives import FailureDetector, announce_error, failures
from thinwire.integrations.transports import bare_transport

ERROR = TransportError("the all-reduce failed")


def everywhere(num_ranks: int, call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(call, range(num_ranks)))


def connected(ranks: Sequence[int], store: dist.Store | None = None) -> list[FailureDetector]:
    store = store or dist.HashStore()
    return everywhere(len(ranks), lambda r: FailureDetector.connect(store, "test", ranks, r, timedelta(seconds=20)))


@pytest.fixture
def detectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FailureDetector]]:
    monkeypatch.setattr(failures, "GRACE_S", 1.2)
    made = connected((0, 2, 4, 6))
    yield made
    for one in made:
        one.close()


def test_the_rank_that_is_behind_is_named_by_its_number_in_the_default_group(detectors: list[FailureDetector]) -> None:
    for one in (detectors[0], detectors[1], detectors[3]):
        one.advance()
    errors = everywhere(4, lambda rank: detectors[rank].explain(ERROR))
    for error in errors:
        assert error.rank == 4, error
        assert error.host == socket.gethostname()
        assert "has begun 0 collectives where others have begun 1" in error.reason
        assert str(error).endswith("so the all-reduce failed")


@pytest.mark.parametrize("gone_on", [True, False])
def test_a_call_that_only_one_rank_has_made_is_named_unless_the_others_are_late(
    detectors: list[FailureDetector], gone_on: bool
) -> None:
    """Those that have ended, also by an error, are not."""
    with detectors[2].calling("a call that ends"):
        pass
    with pytest.raises(KeyError), detectors[1].calling("another one"):
        raise KeyError
    detectors[2].calling("load_state_dict()").__enter__()
    detectors[2].advance()
    for one in detectors:
        if one is not detectors[2] and (gone_on or one is not detectors[1]):
            one.advance()
    for error in everywhere(4, lambda rank: detectors[rank].explain(ERROR)):
        assert error.rank == (4 if gone_on else 2), error
        wanted = "it is in load_state_dict(), which all ranks must call, and rank 0, 2, 6 has not"
        assert not gone_on or error.reason == wanted


def test_what_waits_for_all_ranks_ends_when_one_of_them_leaves(detectors: list[FailureDetector]) -> None:
    assert detectors[0].waiting(lambda: 3, "a call") == 3
    never = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(detectors[0].waiting, lambda: never.wait(100.0), "a call")
        detectors[1].close(OSError("no more files"))
        error = waiting.exception(20.0)
    never.set()
    assert isinstance(error, TransportError)
    assert (error.rank, error.reason) == (2, "it communicates no more: OSError: no more files")


def test_a_rank_that_fails_before_it_comes_or_is_short_of_files_stops_the_others() -> None:
    store = dist.HashStore()
    with pytest.raises(OSError, match="Too many open files"):
        FailureDetector.connect(_Short(store), "test", (3, 7), 1, timedelta(seconds=20))
    announce_error(store, "other", 1, TypeError("no model"))
    for key, names in (("test", "OSError: .* Too many open files"), ("other", "TypeError: no model")):
        with pytest.raises(PeerFailedError, match=rf"rank 7 on .* failed: {names}") as error:
            FailureDetector.connect(store, key, (3, 7), 0, timedelta(seconds=20))
        assert error.value.rank == 7


class _Short:
    """A store that no further client can be made of."""

    def __init__(self, store: dist.Store) -> None:
        self.check, self.set = store.check, store.set

    def clone(self) -> dist.Store:
        raise OSError(24, "Too many open files")


def test_the_first_to_fail_is_named_and_not_the_one_that_failed_because_of_it(detectors: list[FailureDetector]) -> None:
    """Rank 2 ends; rank 0 fails because of it, and ends before the others look."""
    first, second, *others = detectors
    second.close(ValueError("bad batch"))
    assert first.explain(ERROR).rank == 2
    first.close(ERROR)
    for error in everywhere(2, lambda place: others[place].explain(ERROR)):
        assert (error.rank, error.reason) == (2, "it communicates no more: ValueError: bad batch")


def test_what_one_rank_has_found_is_what_all_of_them_say(detectors: list[FailureDetector]) -> None:
    assert detectors[1].explain(ERROR, 3).rank == 6
    for error in everywhere(4, lambda rank: detectors[rank].explain(ERROR, 2)):
        assert (error.rank, error.reason) == (6, "it is alive, and its connections are broken")


@pytest.mark.parametrize(
    ("silent_s", "error", "reason"),
    [
        (0.6, "Connection closed by peer", "its process has ended"),
        (1.5, "Timed out waiting 8000ms for recv operation", "no heartbeat has come from it for"),
    ],
)
def test_a_rank_that_has_stopped_is_told_from_one_that_has_ended_by_its_connections(
    detectors: list[FailureDetector], monkeypatch: pytest.MonkeyPatch, silent_s: float, error: str, reason: str
) -> None:
    monkeypatch.setattr(failures, "GRACE_S", 2.5)
    exchange, over = failures.Board.exchange, threading.Event()
    monkeypatch.setattr(
        failures.Board, "exchange", lambda board: over.wait(5.0) if board.rank == 2 else exchange(board)
    )
    time.sleep(silent_s)
    found = detectors[1].explain(TransportError(f"receiving failed: {error}"), 2)
    over.set()
    assert found.rank == 4
    assert reason in str(found)


def test_of_ranks_that_stop_within_a_heartbeat_the_one_that_has_ended_is_named(
    detectors: list[FailureDetector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 6 stops a moment before rank 4, whose connection is closed."""
    monkeypatch.setattr(failures, "GRACE_S", 2.5)
    exchange, over, stopped = failures.Board.exchange, threading.Event(), set[int]()
    monkeypatch.setattr(
        failures.Board, "exchange", lambda board: over.wait(20.0) if board.rank in stopped else exchange(board)
    )
    for place in (3, 2):
        for writer in (place, 1):
            detectors[writer].board.tell()
            time.sleep(0.06)
        stopped.add(place)
    found = detectors[1].explain(TransportError("receiving failed: Connection closed by peer"), 2)
    over.set()
    assert (found.rank, found.reason) == (4, "its process has ended")


def test_the_rank_that_has_the_store_stays_until_its_last_words_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "store_rank", lambda store: 4)
    made = connected((2, 4, 6))
    made[1].close(ValueError("tired"))
    for place in (0, 2):
        assert made[place].board.records[1].ended == "it communicates no more: ValueError: tired"
    made[0].close()
    made[2].close()


def test_a_store_that_is_gone_names_the_rank_or_the_host_that_had_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "GRACE_S", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "node3")
    for launched, ranks in ((False, (0, 1)), (True, (0, 1)), (False, (1, 2))):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(launched))
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        clients = [dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(2)]
        made = everywhere(
            2, lambda r, to=clients, of=ranks: FailureDetector.connect(to[r], "test", of, r, timedelta(seconds=20))
        )
        del server
        error = made[1].explain(ERROR)
        within = not launched and 0 in ranks
        assert (error.rank, error.host) == (None if launched else 0, socket.gethostname() if within else "node3")
        assert error.reason == ("its process has ended" if within else "PyTorch's store, which lives there, is gone")
        for one in made:
            one.close()


@pytest.mark.parametrize("gone_on", [True, False])
def test_a_rank_that_ends_because_of_an_error_on_another_one_is_not_the_cause(
    detectors: list[FailureDetector], gone_on: bool
) -> None:
    first, second, *others = detectors
    second.report(ValueError("bad batch"))
    assert first.attribute(PeerFailedError("rank 2 failed")).rank == 2
    if gone_on:
        first.advance()
    else:
        second.close()
    first.close()
    for error in everywhere(2, lambda place: others[place].explain(ERROR)):
        assert error.rank == (0 if gone_on else 2), error


BAD = [b"", b"{", b"[]", b"3", b"\xff", b"[" * 9000, b'{"host": "' + b"x" * 40000 + b'"}', b'{"beat": 1}']
BAD += [b'{"host": 3}', b'{"host": "x", "more": 1}', b'{"host": "x", "beat": true}', b'{"host": "x", "call": ["y"]}']
BAD += [b'{"host": "x", "failed": [%d, "y"]}' % rank for rank in (9, -1)]
BAD += [b'{"host": "x", "error": [1, "y"]}']


def test_a_record_that_is_damaged_is_none_and_others_come_back_within_bounds() -> None:
    for data in BAD:
        for read in (lambda data: failures.Record.read(data, 4), failures.Cause.read):
            with pytest.raises(ValueError):
                read(data)
    told = failures.Record("node\n1", beat=3, call=("state_dict()", 2), failed=(3, "y" * 3000))
    record = failures.Record.read(str(told).encode(), 4)
    assert record == failures.Record("node 1", beat=3, call=("state_dict()", 2), failed=(3, "y" * 1000))


def test_what_a_stranger_writes_into_the_store_ends_no_detector() -> None:
    store = dist.HashStore()
    made = connected((0, 1, 2), store)
    for key in ("test/1", "test/cause"):
        store.set(key, "{")
    time.sleep(1.2)
    made[2].close(ValueError("tired"))
    assert made[0].explain(ERROR).rank == 2
    for one in made[:2]:
        one.close()


def test_an_error_that_another_rank_has_met_comes_with_its_text(detectors: list[FailureDetector]) -> None:
    detectors[3].report(ArithmeticError("broken"))
    error = detectors[1].attribute(PeerFailedError("rank 0 failed", rank=0))
    assert (error.rank, error.reason) == (6, "ArithmeticError: broken")
    for _ in range(5):
        detectors[1].advance()
    later = detectors[1].attribute(PeerFailedError("rank 0 failed", rank=0))
    assert later.rank == 0, "that error was of earlier collectives"


@pytest.mark.parametrize("announced", [True, False], ids=["failed", "did not come"])
def test_rank_0_stays_until_the_others_know_which_rank_failed(announced: bool) -> None:
    """The store lives there, and whoever finds it gone would blame rank 0."""
    store = dist.HashStore()
    if announced:
        announce_error(store, "test", 1, TypeError("no model"))

    def meet(rank: int) -> CommunicationError:
        with pytest.raises(CommunicationError) as failed:
            FailureDetector.connect(store, "test", range(3), rank, timedelta(seconds=20 if announced else 0.2))
        return failed.value

    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, 0)
        # Rank 2 is late: rank 0 waits for it, for 3 s at most.
        with pytest.raises(FutureTimeoutError):
            first.result(0.9)
        last = meet(2)
        assert [last.rank, first.result(20).rank] == [1, 1]
        assert re.search("TypeError: no model" if announced else r"rank 1 did not come within 0\.2 s", str(last))


def _dies(rank: int) -> tuple[int | None, str | None]:
    world = dist.group.WORLD
    assert world is not None
    transport = bare_transport(world, timedelta(seconds=20))
    transport.all_reduce(torch.ones(4))
    time.sleep(0.6)
    if rank < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError) as error:
        transport.all_reduce(torch.ones(4))
    return error.value.rank, error.value.reason


@pytest.mark.alone  # Heartbeats tell what became of a rank: on a starved machine, a dead one may be called late.
def test_killed_ranks_are_named_by_all_others() -> None:
    for rank, reason in run_ranks(_dies, 4, may_die=True)[2:]:
        assert rank in (0, 1)
        assert "has ended" in reason


def _never_calls(rank: int) -> None:
    model = make(rank)
    if rank == 1:
        time.sleep(1.5)
        return
    with pytest.raises(TransportError, match="every rank must make this call") as error:
        thinwire.compress(model, network=thinwire.Network(timeout=timedelta(seconds=0.5)))
    assert error.value.rank == 1


def test_a_rank_that_never_calls_compress_is_named() -> None:
    run_ranks(_never_calls, 2)
