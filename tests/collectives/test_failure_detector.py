"""Ranks find out which of them has caused a failure, without rank 0 and without trusting what they are sent."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire
from harness import run_ranks
from thinwire import CommunicationError, PeerFailedError, TransportError
from thinwire.collectives import FailureDetector, announce_error
from thinwire.collectives.failures import detector, rendezvous
from thinwire.collectives.failures.evidence import BEAT, ENDED, FAILED, LEFT, Evidence, Report
from thinwire.integrations.transports import bare_transport

ERROR = TransportError("the all-reduce failed")


def everywhere(num_ranks: int, call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(call, range(num_ranks)))


@pytest.fixture
def detectors() -> Iterator[list[FailureDetector]]:
    store = dist.HashStore()
    made = everywhere(4, lambda r: FailureDetector.connect(store, "test", (0, 2, 4, 6), r, timedelta(seconds=20)))
    assert all_hear(made)
    yield made
    for one in made:
        one.close()


def all_hear(detectors: list[FailureDetector]) -> bool:
    """Whether each of them hears all others within 20 s."""
    end = time.monotonic() + 20.0
    while any(len(one.heard) < len(detectors) - 1 for one in detectors):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def heard(rank: int, *reports: tuple[int, int, int, str]) -> Evidence:
    """What one of four ranks makes of reports, by kind, sender, the rank that each is about, and reason."""
    evidence = Evidence(rank, (0, 2, 4, 6), 0.5)
    for other in {0, 1, 2, 3} - {rank}:
        assert evidence.beat(other, 1, 0)
    for sequence, (kind, sender, about, reason) in enumerate(reports, 2):
        report = Report(kind, sender, about, sequence, 0, reason, time.monotonic())
        assert evidence.note(report)
        assert not evidence.note(report), "it comes from both sides of the ring"
    return evidence


def test_the_rank_that_is_behind_is_named_by_its_number_in_the_default_group(
    detectors: list[FailureDetector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detector, "GRACE_S", 1.2)
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
    detectors: list[FailureDetector], monkeypatch: pytest.MonkeyPatch, gone_on: bool
) -> None:
    monkeypatch.setattr(detector, "GRACE_S", 1.2)
    with detectors[2].calling("a call that ends"):
        pass
    detectors[2].calling("load_state_dict()").__enter__()
    detectors[2].advance()
    for one in detectors:
        if one is not detectors[2] and (gone_on or one is not detectors[1]):
            one.advance()
    for error in everywhere(4, lambda rank: detectors[rank].explain(ERROR)):
        assert error.rank == (4 if gone_on else 2), error
        wanted = "it is in load_state_dict(), which all ranks must call, and rank 0, 2, 6 has not"
        assert not gone_on or error.reason == wanted


def test_a_call_that_an_error_has_ended_is_not_the_cause(
    detectors: list[FailureDetector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detector, "GRACE_S", 1.2)
    with pytest.raises(KeyError), detectors[2].calling("load_state_dict()"):
        raise KeyError
    detectors[2].advance()
    for one in detectors:
        one.advance()
    for error in everywhere(4, lambda rank: detectors[rank].explain(ERROR)):
        assert "load_state_dict" not in str(error)


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


def test_a_rank_that_is_short_of_files_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def socketpair() -> None:
        raise OSError(24, "Too many open files")

    store = dist.HashStore()
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", socketpair)
        with pytest.raises(OSError, match="Too many open files"):
            FailureDetector.connect(store, "test", (3, 7), 1, timedelta(seconds=20))
    with pytest.raises(PeerFailedError, match=r"rank 7 on .* failed: OSError: .* Too many open files"):
        FailureDetector.connect(store, "test", (3, 7), 0, timedelta(seconds=20))


def test_a_rank_that_has_left_is_named(detectors: list[FailureDetector]) -> None:
    detectors[1].close()
    for error in everywhere(4, lambda rank: detectors[rank].explain(ERROR) if rank != 1 else None):
        assert error is None or (error.rank == 2 and "detach()" in error.reason)


def test_the_first_to_fail_is_named_and_not_the_one_that_failed_because_of_it() -> None:
    """Rank 2 is killed, which both of its neighbours see; one of them fails and leaves before the others look."""
    ended = [(ENDED, neighbour, 2, "its process has ended") for neighbour in (1, 3)]
    assert heard(1, *ended).cause() == (2, "its process has ended")
    for rank in (0, 3):
        after = heard(rank, *ended, (FAILED, 1, 2, "the all-reduce failed"), (LEFT, 1, 1, "it communicates no more"))
        assert after.cause() == (2, "its process has ended")
        alone = heard(rank, (LEFT, 1, 1, "it communicates no more"))
        assert alone.cause() == (1, "it communicates no more")


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


def test_a_rank_that_only_one_neighbour_takes_to_be_gone_is_not_the_cause_where_another_one_is() -> None:
    """A rank whose connections are cut reports its neighbours before the last of them is."""
    cut = [(ENDED, 1, 0, "its process has ended")]
    for rank in (2, 3):
        assert heard(rank, *cut).cause() is None
        assert heard(rank, *cut).cause(guess=True) == (0, "its process has ended")
        both = [*cut, *((ENDED, neighbour, 1, "its process has ended") for neighbour in (0, 2))]
        assert heard(rank, *both).cause() == (1, "its process has ended")


def test_an_error_that_another_rank_has_met_comes_with_its_text(detectors: list[FailureDetector]) -> None:
    detectors[3].report(ArithmeticError("broken"))
    error = detectors[1].attribute(PeerFailedError("rank 0 failed", rank=0))
    assert (error.rank, error.reason) == (6, "ArithmeticError: broken")
    for _ in range(5):
        detectors[1].advance()
    later = detectors[1].attribute(PeerFailedError("rank 0 failed", rank=0))
    assert later.rank == 0, "that error was of earlier collectives"


def test_the_last_words_of_a_rank_are_heard_where_nothing_can_be_sent_to_it_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They and the end of the connection are found at once, by a thread that has something to send there."""
    store = dist.HashStore()
    go, held = threading.Event(), threading.Event()

    class Gated(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if not go.is_set():
                held.set()
                go.wait(20.0)
            return super().select(timeout)

    def other_rank() -> socket.socket:
        with rendezvous.listen() as listener:
            rendezvous.enter(store, "test", (0, 2), 1, listener, timedelta(seconds=20))
            listener.settimeout(20.0)
            connection, _ = listener.accept()
        return connection

    go.set()
    monkeypatch.setattr(selectors, "DefaultSelector", Gated)
    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(other_rank)
        one = FailureDetector.connect(store, "test", (0, 2), 0, timedelta(seconds=20))
    with peer.result() as connection:
        go.clear()
        one.report(ValueError("is to be sent"))
        assert held.wait(20.0)
        for sequence, (kind, reason) in enumerate([(BEAT, b""), (LEFT, b"tired")]):
            connection.sendall(struct.pack("<BBIIIQ", kind, len(reason), 1, 1, sequence, 0) + reason)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close it by a reset
    go.set()
    error = one.explain(ERROR)
    assert isinstance(error, TransportError)
    assert (error.rank, error.reason) == (2, "tired")
    one.close()


def test_strangers_and_what_is_no_frame_are_turned_away() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(FailureDetector.connect, store, "test", (0, 1), 0, timedelta(seconds=20))
        ip, port = _address(store, "test/0")
        strangers = [socket.create_connection((ip, port), timeout=20.0) for _ in range(12)]
        second = FailureDetector.connect(store, "test", (0, 1), 1, timedelta(seconds=20))
        detectors = [first.result(), second]
    for i, stranger in enumerate(strangers):
        with stranger:
            try:
                stranger.sendall(b"\xff" * (1 << i))
                stranger.settimeout(20.0)
                closed = stranger.recv(1) == b"" if i >= 5 else True
            except OSError:
                closed = True
            assert closed
    assert all_hear(detectors), "the ranks themselves hear each other"
    for one in detectors:
        one.close()


def _address(store: dist.Store, key: str) -> tuple[str, int]:
    store.wait([key], timedelta(seconds=20))
    ip, port = struct.unpack_from("<x16sH", store.get(key))
    return socket.inet_ntoa(ip[:4]), port


def test_a_rank_that_does_not_come_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(TransportError, match=r"rank 5, 7 did not come within 0\.2 s") as error:
        FailureDetector.connect(store, "test", (3, 5, 7), 0, timedelta(seconds=0.2))
    assert error.value.rank == 5


def test_a_rank_that_fails_before_it_comes_stops_the_others() -> None:
    store = dist.HashStore()
    announce_error(store, "test", 1, TypeError("no model"))
    with pytest.raises(PeerFailedError, match=r"rank 7 on .* failed: TypeError: no model") as error:
        FailureDetector.connect(store, "test", (3, 7), 0, timedelta(seconds=20))
    assert (error.value.rank, error.value.reason) == (7, "TypeError: no model")


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
        assert [meet(2).rank, first.result(20).rank] == [1, 1]


def test_what_the_store_holds_is_not_trusted() -> None:
    store = dist.HashStore()
    store.set("test/1", b"\1\2\3")
    with pytest.raises(TransportError, match="3 bytes"):
        FailureDetector.connect(store, "test", (0, 1), 0, timedelta(seconds=20))


def _dies(rank: int, how: str) -> tuple[int | None, str | None]:
    world = dist.group.WORLD
    assert world is not None
    transport = bare_transport(world, timedelta(seconds=20))
    transport.all_reduce(torch.ones(4))
    time.sleep(0.6)
    if rank == 1 or (rank == 0 and how == "two"):
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError) as error:
        transport.all_reduce(torch.ones(4))
    return error.value.rank, error.value.reason


@pytest.mark.parametrize("how", ["one", "two"])
def test_killed_ranks_are_named_by_all_others(how: str) -> None:
    answers = run_ranks(_dies, 4, how, may_die=True)
    for answer in answers[2:]:
        assert answer[0] in ((1,) if how == "one" else (0, 1)), answers
        assert "has ended" in answer[1]


def _never_calls(rank: int) -> tuple[str, int | None]:
    from nets import make

    model = make(rank)
    if rank == 1:
        time.sleep(1.5)
        return "", None
    with pytest.raises(TransportError, match="every rank must make this call") as error:
        thinwire.compress(model, network=thinwire.Network(timeout=timedelta(seconds=0.5)))
    return str(error.value), error.value.rank


def test_a_rank_that_never_calls_compress_is_named() -> None:
    text, rank = run_ranks(_never_calls, 2)[0]
    assert rank == 1, text


def _wrong_model(rank: int) -> tuple[str, int | None]:
    from nets import make

    model = make(rank)
    with pytest.raises((TypeError, PeerFailedError)) as error:
        thinwire.compress(model.module if rank else model)
    return type(error.value).__name__, getattr(error.value, "rank", None)


def test_another_kind_of_model_on_one_rank_stops_all() -> None:
    assert run_ranks(_wrong_model, 2) == [("PeerFailedError", 1), ("TypeError", None)]
