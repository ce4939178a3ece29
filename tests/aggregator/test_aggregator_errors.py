"""An aggregator and its workers when something goes wrong: errors that say who, and the next session is served."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import tracemalloc

import pytest
import torch

import thinwire
from aggregation import clients, cut, greeted, reduced, serving, together, wait_until, works
from harness import run_ranks
from nets import make, train
from thinwire import TransportError
from thinwire.aggregator import AggregatorClient, parse_address, server as server_module
from thinwire.aggregator.protocol import HEADER, HELLO, PROOF_BYTES, Greeting, Header, Kind


def test_a_worker_that_dies_ends_the_session_for_the_others_at_once() -> None:
    with serving() as (aggregator, told):
        three = clients(aggregator.address, 3)
        started = time.monotonic()
        dies = threading.Timer(0.2, cut, (three[2],))
        dies.start()
        reduced(three[:2], [torch.ones(1000, dtype=torch.int8) for _ in range(2)], "rank 2 is gone")
        assert time.monotonic() - started < 5.0
        dies.join()
        assert "rank 2 is gone" in told[-1]
        assert aggregator.counters.failed_sessions == 1
        assert aggregator.slots_in_use == 0
        works(aggregator.address)


def test_a_worker_that_hangs_is_named_after_the_timeout() -> None:
    with serving() as (aggregator, _):
        three = clients(aggregator.address, 3, timeout_s=1.0)
        xs = [torch.ones(1000, dtype=torch.int8) for _ in three]
        started = time.monotonic()
        reduced(three[:2], xs[:2], "nothing came from rank 2 within 1 s")
        assert 1.0 <= time.monotonic() - started < 15.0
        # The one that hung learns it, too.
        with pytest.raises(TransportError, match=r"nothing came from rank 2|broke earlier"):
            three[2].start_all_reduce(xs[2]).wait()
        works(aggregator.address)


def test_a_worker_that_closes_while_its_session_is_ended_does_not_end_the_aggregator() -> None:
    """Its socket answers the last frame with a reset: what is done to the connection after that fails."""
    with socket.socket() as sock:

        def close_when_ended(line: str) -> None:
            if line.startswith("session ended"):
                sock.close()

        with serving(join_timeout_s=0.3, log=close_when_ended) as (aggregator, _):
            host, port, _ = parse_address(aggregator.address)
            sock.connect((host, port))
            sock.sendall(greeted(sock, Greeting(rank=0, world_size=2, session=5, lanes=1, slots=1, timeout_ms=5000)))
            wait_until(lambda: aggregator.counters.failed_sessions == 1)
            works(aggregator.address)


def test_workers_that_never_come_are_named() -> None:
    with serving(join_timeout_s=0.5) as (aggregator, _):
        options = {"world_size": 4, "session": 7, "timeout_s": 20.0}
        answers = together(
            [lambda rank=rank: AggregatorClient(aggregator.address, rank=rank, **options) for rank in (0, 2)]
        )
        for error in answers:
            assert isinstance(error, TransportError)
            assert "ranks 1, 3 did not join within 0.5 s" in str(error)
            assert error.host is None, "workers are the cause, not the aggregator's machine"
        works(aggregator.address)


def test_ranks_that_see_another_world_are_reported() -> None:
    with serving() as (aggregator, _):

        def join(rank: int) -> None:
            wait_until(lambda: aggregator.num_workers == rank)
            AggregatorClient(aggregator.address, rank=rank, world_size=2 + rank, session=3, timeout_s=20.0)

        for error in together([lambda: join(0), lambda: join(1)]):
            assert isinstance(error, TransportError)
            assert "world_size is 3 for rank 1 and 2 for rank 0" in str(error)
        works(aggregator.address)


def test_a_second_worker_of_the_same_rank_is_refused_and_the_first_goes_on() -> None:
    with serving() as (aggregator, _):
        pair = clients(aggregator.address, 2)
        with pytest.raises(TransportError, match="rank 1 of this session is here already"):
            AggregatorClient(aggregator.address, rank=1, world_size=2, session=1, timeout_s=20.0)
        xs = [torch.ones(100, dtype=torch.int8) for _ in pair]
        reduced(pair, xs)
        assert all(bool((x == 2).all()) for x in xs)


def test_a_training_that_asks_for_no_slots_leaves_some_for_others() -> None:
    with serving(slots=128, shares=4) as (aggregator, _):
        trainings = [clients(aggregator.address, 2, session=number) for number in range(4)]
        assert [client.slots_per_lane for pair in trainings for client in pair] == [16] * 8
        with pytest.raises(TransportError, match=r"0 of 128 are free"):
            AggregatorClient(aggregator.address, rank=0, world_size=2, session=9, timeout_s=20.0)


def test_a_session_that_sends_nothing_ends_and_its_slots_are_free() -> None:
    with serving(slots=8, idle_timeout_s=0.5) as (aggregator, told):
        pair = clients(aggregator.address, 2)
        xs = [torch.ones(9, dtype=torch.int8) for _ in pair]
        reduced(pair, xs)
        wait_until(lambda: aggregator.num_workers == 0)
        assert "no worker sent anything within 0.5 s" in told[-1]
        for client, x in zip(pair, xs, strict=True):
            with pytest.raises(TransportError, match=r"no worker sent anything within 0\.5 s"):
                client.start_all_reduce(x).wait()
        works(aggregator.address)


def test_a_client_that_sends_and_never_reads_is_dropped_and_ends_its_session() -> None:
    """The memory of an aggregator does not grow with what it has to send to one who does not read."""
    elements = 1 << 18
    with serving(slots=4, slot_elements=elements) as (aggregator, told), socket.socket() as greedy:
        host, port, _ = parse_address(aggregator.address)
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.settimeout(10.0)
        greedy.connect((host, port))
        greedy.sendall(greeted(greedy, Greeting(0, 2, 1, 0, 10_000, 1)))
        honest = AggregatorClient(aggregator.address, rank=1, world_size=2, session=1, timeout_s=10.0, lanes=1)
        x = torch.ones(elements, dtype=torch.int8)

        def send_without_reading() -> None:
            for number in range(1000):
                pending = honest.start_all_reduce(x)
                header = Header(Kind.CONTRIBUTE, slot=number % 4, elements=elements, chunk=number)
                greedy.sendall(header.pack() + bytes(elements))
                pending.wait()

        with pytest.raises(TransportError, match="rank 0 was dropped: it sends integers and reads no sums"):
            send_without_reading()
        assert any("(rank 0): it sends integers and reads no sums" in line for line in told)
        assert aggregator.counters.failed_sessions == 1
        works(aggregator.address)


def test_a_connection_that_says_nothing_costs_no_buffer() -> None:
    with serving(slots=8, slot_elements=1 << 15) as (aggregator, _):
        host, port, _ = parse_address(aggregator.address)
        works(aggregator.address)
        silent: list[socket.socket] = []
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            silent.extend(socket.create_connection((host, port)) for _ in range(50))
            works(aggregator.address)
            # The session that has just worked lets go of its buffers a little after its last worker is gone.
            wait_until(lambda: aggregator.num_workers == 0)
            wait_until(lambda: tracemalloc.get_traced_memory()[0] - before < 50 * 32_768)
        finally:
            tracemalloc.stop()
            for sock in silent:
                sock.close()


def test_ranks_whose_tensors_differ_are_reported() -> None:
    with serving() as (aggregator, _):
        pair = clients(aggregator.address, 2)
        xs = [torch.ones(60, dtype=torch.int8), torch.ones(61, dtype=torch.int8)]
        reduced(pair, xs, "ranks disagree on chunk 0 of lane 0")
        works(aggregator.address)


def _raw(address: str, *data: bytes | Greeting) -> bytes:
    """What an aggregator answers to these bytes, after its hello, before it hangs up."""
    host, port, _ = parse_address(address)
    with socket.create_connection((host, port), timeout=20.0) as sock:
        for part in data:
            sock.sendall(greeted(sock, part) if isinstance(part, Greeting) else part)
            time.sleep(0.01)
        answer = b""
        with contextlib.suppress(OSError):
            while more := sock.recv(4096):
                answer += more
        return answer if isinstance(data[0], Greeting) else answer[HELLO.size :]


GREETED = Greeting(0, 1, 1, 0, 1000, 77)
WELCOMED = HEADER.size


BROKEN = [
    ([b"GET / HTTP/1.1\r\nHost: aggregator\r\n\r\n"], "does not speak the aggregator's protocol"),
    ([GREETED.pack().replace(b"twag\x04", b"twag\x09") + bytes(PROOF_BYTES)], "speaks version 9"),
    ([GREETED.pack() + bytes(PROOF_BYTES)], "its token is not the aggregator's"),
    ([Greeting(3, 2, 1, 0, 1000, 77)], "rank 3 of 2"),
    ([Greeting(0, 1, 200, 0, 1000, 77)], "200 lanes"),
    ([Greeting(0, 1, 1, 4_000_000_000, 1000, 77)], "4000000000 slots"),
    ([Greeting(0, 1, 1, 0, 0, 77)], "timeout of 0 ms"),
    ([Greeting(0, 1, 1, 9, 1000, 77)], "wants 9 slots"),
    ([GREETED, b"garbage!" * 8], "is no frame"),
    ([GREETED, Header(Kind.CONTRIBUTE, elements=65).pack()], "65 elements, and 64 is the most"),
    ([GREETED, Header(Kind.CONTRIBUTE, elements=4, width=8).pack()], "integers of 8 bytes"),
    ([GREETED, Header(Kind.CONTRIBUTE, elements=4, limit=128).pack()], "packed integers up to 128"),
    ([GREETED, Header(Kind.CONTRIBUTE, elements=4, limit=1, width=4).pack()], "packed integers up to 1"),
    ([GREETED, Header(Kind.CONTRIBUTE, elements=4, limit=1).pack() + b"\xff" * 32], "integers up to 2 as such of"),
    ([GREETED, Header(Kind.RESULT, elements=4).pack() + b"1234"], "of kind RESULT"),
    ([GREETED, Header(Kind.CONTRIBUTE, elements=4, slot=8).pack() + b"1234"], "slot 8 of lane 0"),
    ([GREETED, Header(Kind.CONTRIBUTE, elements=4, lane=1).pack() + b"1234"], "of lane 1"),
    ([GREETED, Header(Kind.CONTRIBUTE, elements=0).pack()], "sent 0 integers"),
    ([GREETED, Header(Kind.CONTRIBUTE, elements=4, chunk=8).pack() + b"1234"], "serves chunk 0"),
    ([GREETED, Header(Kind.LEAVE).pack().replace(b"\x04", b"\x63", 1)], "99 is not a valid Kind"),
    ([GREETED, Header(Kind.CONTRIBUTE, op=7).pack()], "7 is not a valid Op"),  # type: ignore[arg-type]
]


def test_what_breaks_the_protocol_is_dropped_with_a_reason() -> None:
    with serving() as (aggregator, told):
        for number, (data, message) in enumerate(BROKEN, 1):
            answer = _raw(aggregator.address, *data)
            answer = answer[WELCOMED:] if len(data) > 1 else answer
            header = Header.unpack(answer[: HEADER.size], 64)
            assert header.kind in (Kind.ERROR, Kind.ENDED)
            assert message in answer[HEADER.size : HEADER.size + header.elements].decode()
            assert any(message in line for line in told)
            assert aggregator.counters.refused == number
            told.clear()
            wait_until(lambda: aggregator.num_workers == 0)
        works(aggregator.address)


def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "GREETING_TIMEOUT_S", 0.3)
    with serving() as (aggregator, told):
        assert b"it said nothing" in _raw(aggregator.address, b"twag")
        assert "it said nothing" in told[-1]


def test_no_aggregator_and_one_that_stops() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(TransportError, match=r"no aggregator answers.*start one there with thinwire aggregator"):
            AggregatorClient(address, rank=0, world_size=1, session=1, timeout_s=1.0)
    with serving() as (aggregator, _):
        pair = clients(aggregator.address, 2)
        pending = pair[0].start_all_reduce(torch.ones(9, dtype=torch.int8))
        wait_until(lambda: aggregator.slots_in_use == 1)
        aggregator.stop()
        with pytest.raises(TransportError, match="the aggregator was stopped") as error:
            pending.wait()
        assert (error.value.rank, error.value.host) == (None, "127.0.0.1")


def _loses_it(rank: int, address: str) -> None:
    model = make(rank)
    thinwire.compress(model, "intsgd(bits=8)", skip_if_slower=False, network=thinwire.Network(aggregator=address))
    train(model, rank, 3)
    if rank == 1:
        time.sleep(0.5)
        return
    with pytest.raises(TransportError, match="the aggregator at") as error:
        train(model, rank, 3)
    assert error.value.rank == 1


def test_a_training_whose_rank_dies_says_so() -> None:
    with serving(slots=16, slot_elements=1000) as (aggregator, _):
        run_ranks(_loses_it, 2, aggregator.address, group_timeout_s=10.0)
        works(aggregator.address)
