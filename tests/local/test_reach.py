"""Workers of a quorum that cannot connect to each other are told so, and whose fault it is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from thinwire.local import members as reach
from thinwire.local.members import UnreachableError, check_connections, judge

ADDRESSES = {0: "a:1", 1: "b:2", 2: "c:3"}


def _outcomes(check: Callable[[int], None], *ranks: int) -> dict[int, UnreachableError | None]:
    """What ``check`` raised on each rank, all of which run at once."""
    raised: dict[int, UnreachableError | None] = {}

    def run(rank: int) -> None:
        try:
            check(rank)
            raised[rank] = None
        except UnreachableError as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(raised) == len(ranks), "a rank did not end"
    return raised


@pytest.fixture
def meeting() -> Iterator[str]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{store.port}/torchft/7/0"
    del store


def test_workers_that_reach_each_other_go_on(meeting: str) -> None:
    assert _outcomes(lambda rank: check_connections(meeting, rank, 4), *range(4)) == dict.fromkeys(range(4))


def test_one_that_nobody_reaches_is_told_so_and_the_others_are_excused(
    meeting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = reach.own_host

    def host_of(host: str, port: int) -> str:
        # Nothing listens on this address, which stands for one behind NAT.
        return "127.1.2.3" if threading.current_thread().name == "behind NAT" else real(host, port)

    monkeypatch.setattr(reach, "own_host", host_of)
    monkeypatch.setattr(reach, "listening", lambda: socket.create_server(("127.0.0.1", 0)))

    def check(rank: int) -> None:
        if rank == 1:
            threading.current_thread().name = "behind NAT"
        check_connections(meeting, rank, 3)

    raised = _outcomes(check, 0, 1, 2)
    assert "no other worker can connect to this one" in str(raised[1])
    assert not raised[1].excused
    for rank in (0, 2):
        assert "no worker can connect to the one at 127.1.2.3" in str(raised[rank])
        assert raised[rank].excused


def test_silent_workers_are_not_waited_for_for_long(meeting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "ANSWER_S", 0.5)
    raised = _outcomes(lambda rank: check_connections(meeting, rank, 3), 0, 1)
    assert all("rank 2, which is silent" in str(raised[rank]) and raised[rank].excused for rank in (0, 1))
    alone = _outcomes(lambda rank: check_connections(f"{meeting}/other", rank, 3), 0)
    assert "no other worker has come" in str(alone[0])
    assert not alone[0].excused


def test_a_meeting_place_without_a_connection_is_another_ones_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UnreachableError, match="where the others meet") as raised:
        check_connections(f"127.0.0.1:{port}/torchft/7/0", 1, 2)
    assert raised.value.excused


def test_whose_fault_it_is() -> None:
    cases: list[tuple[dict[int, set[int]], set[int]]] = [
        ({0: {1}, 1: set()}, {1}),
        ({0: {1}, 1: set(), 2: {1}}, {1}),
        ({0: {1, 2}, 1: {2}, 2: {1}}, {1, 2}),
        ({0: {2}, 1: {2}}, {2}),
        ({0: {1}, 1: set(), 2: set()}, {0, 1}),  # one connection that fails blames its two ends
    ]
    for unreached, faulty in cases:
        size = max(2, len(unreached), *(max(found, default=0) + 1 for found in unreached.values()))
        raised = _outcomes(lambda rank, u=unreached, n=size: judge(rank, n, u, ADDRESSES), *unreached)
        assert {rank for rank, error in raised.items() if not error.excused} == faulty & unreached.keys()


def test_what_is_no_address_is_not_connected_to() -> None:
    for address in ("", "host", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1:" + "9" * 5000):
        assert not reach.accepts(address)
