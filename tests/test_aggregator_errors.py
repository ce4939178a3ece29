"""An aggregator and its workers when something goes wrong: errors that say who, and the next session is served."""

from __future__ import annotations

import contextlib
import socket
import time

import numpy as np
import pytest
import torch

import thinwire
from aggregation import clients, serving, together, wait_until, works
from harness import run_ranks
from nets import make, train
from thinwire import TransportError
from thinwire.aggregator import server as server_module
from thinwire.collectives import AggregatorClient, parse_address
from thinwire.collectives.aggregation import HEADER, Greeting, Header, Kind, Op


def test_a_worker_that_dies_ends_the_session_for_the_others_at_once() -> None:
    with serving() as (aggregator, told):
        three = clients(aggregator.address, 3)
        xs = [torch.ones(1000, dtype=torch.int8) for _ in three]
        started = time.monotonic()

        def dies() -> None:
            time.sleep(0.2)
            three[2]._link._sock.shutdown(socket.SHUT_RDWR)

        answers = together([lambda: three[0].all_reduce(xs[0]), lambda: three[1].all_reduce(xs[1]), dies])
        assert time.monotonic() - started < 5.0
        for error in answers[:2]:
            assert isinstance(error, TransportError)
            assert "rank 2 is gone" in str(error)
        assert "rank 2 is gone" in told[-1]
        assert aggregator.counters.failed_sessions == 1
        assert aggregator.slots_in_use == 0
        works(aggregator.address)


def test_a_worker_that_hangs_is_named_after_the_timeout() -> None:
    with serving() as (aggregator, _):
        three = clients(aggregator.address, 3, timeout_s=1.0)
        xs = [torch.ones(1000, dtype=torch.int8) for _ in three]
        started = time.monotonic()
        answers = together([lambda c=c, x=x: c.all_reduce(x) for c, x in zip(three[:2], xs, strict=False)])
        assert 1.0 <= time.monotonic() - started < 4.0
        for error in answers:
            assert isinstance(error, TransportError)
            assert "nothing came from rank 2 within 1 s" in str(error)
        # The one that hung learns it, too.
        with pytest.raises(TransportError, match=r"nothing came from rank 2|broke earlier"):
            three[2].all_reduce(xs[2])
        works(aggregator.address)


def test_a_late_worker_is_waited_for() -> None:
    with serving() as (aggregator, _):
        pair = clients(aggregator.address, 2, timeout_s=5.0)
        xs = [torch.ones(1000, dtype=torch.int8) for _ in pair]
        together([lambda: pair[0].all_reduce(xs[0]), lambda: time.sleep(1.0) or pair[1].all_reduce(xs[1])])
        assert all(bool((x == 2).all()) for x in xs)


def test_workers_that_never_come_are_named() -> None:
    with serving(join_timeout_s=0.5) as (aggregator, _):
        options = {"world_size": 4, "session": 7, "timeout_s": 5.0}
        answers = together(
            [lambda rank=rank: AggregatorClient(aggregator.address, rank=rank, **options) for rank in (0, 2)]
        )
        for error in answers:
            assert isinstance(error, TransportError)
            assert "ranks 1, 3 did not join within 0.5 s" in str(error)
        works(aggregator.address)


def test_ranks_that_see_another_world_are_told() -> None:
    with serving() as (aggregator, _):
        answers = together(
            [
                lambda: AggregatorClient(aggregator.address, rank=0, world_size=2, session=3, timeout_s=2.0),
                lambda: (
                    time.sleep(0.2)
                    or AggregatorClient(aggregator.address, rank=1, world_size=3, session=3, timeout_s=2.0)
                ),
            ]
        )
        for error in answers:
            assert isinstance(error, TransportError)
            assert "world_size is 3 for rank 1 and 2 for rank 0" in str(error)
        works(aggregator.address)


def test_a_second_worker_of_the_same_rank_is_refused_and_the_first_goes_on() -> None:
    with serving() as (aggregator, _):
        pair = clients(aggregator.address, 2)
        with pytest.raises(TransportError, match="rank 1 of this session is here already"):
            AggregatorClient(aggregator.address, rank=1, world_size=2, session=1, timeout_s=2.0)
        xs = [torch.ones(100, dtype=torch.int8) for _ in pair]
        together([lambda c=c, x=x: c.all_reduce(x) for c, x in zip(pair, xs, strict=True)])
        assert all(bool((x == 2).all()) for x in xs)


def test_two_trainings_share_the_slots_if_they_ask_for_a_part() -> None:
    with serving(slots=8) as (aggregator, _):
        part = f"{aggregator.address}?slots=4"
        first, second = clients(part, 2, session=1), clients(part, 2, session=2)
        xs = [torch.full((500,), 1, dtype=torch.int8) for _ in range(4)]
        together([lambda c=c, x=x: c.all_reduce(x) for c, x in zip((*first, *second), xs, strict=True)])
        assert all(bool((x == 2).all()) for x in xs)
        with pytest.raises(TransportError, match=r"wants 8 slots, and 0 of 8 are free"):
            AggregatorClient(aggregator.address, rank=0, world_size=2, session=3, timeout_s=2.0)
        for client in (*first, *second):
            client.close()
        wait_until(lambda: aggregator.num_workers == 0)
        works(aggregator.address)


def test_ranks_whose_tensors_differ_are_told() -> None:
    with serving() as (aggregator, _):
        pair = clients(aggregator.address, 2)
        xs = [torch.ones(60, dtype=torch.int8), torch.ones(61, dtype=torch.int8)]
        answers = together([lambda c=c, x=x: c.all_reduce(x) for c, x in zip(pair, xs, strict=True)])
        for error in answers:
            assert isinstance(error, TransportError)
            assert "ranks disagree on chunk 0 of lane 0" in str(error)
        works(aggregator.address)


def _raw(address: str, *data: bytes) -> bytes:
    """What an aggregator answers to these bytes before it hangs up."""
    host, port, _ = parse_address(address)
    with socket.create_connection((host, port), timeout=5.0) as sock:
        for part in data:
            sock.sendall(part)
            time.sleep(0.05)
        answer = b""
        with contextlib.suppress(OSError):
            while more := sock.recv(4096):
                answer += more
        return answer


GREETED = Greeting(0, 1, 1, 0, 1000, 77).pack()
WELCOMED = HEADER.size


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([b"GET / HTTP/1.1\r\nHost: aggregator\r\n\r\n"], "does not speak the aggregator's protocol"),
        ([b"\x00" * 4096], "does not speak the aggregator's protocol"),
        ([Greeting(0, 1, 1, 0, 1000, 77).pack().replace(b"twag\x01", b"twag\x09")], "speaks version 9"),
        ([Greeting(3, 2, 1, 0, 1000, 77).pack()], "rank 3 of 2"),
        ([Greeting(0, 60000, 1, 0, 1000, 77).pack()], "rank 0 of 60000"),
        ([Greeting(0, 1, 200, 0, 1000, 77).pack()], "200 lanes"),
        ([Greeting(0, 1, 1, 4_000_000_000, 1000, 77).pack()], "4000000000 slots"),
        ([Greeting(0, 1, 1, 0, 0, 77).pack()], "timeout of 0 ms"),
        ([Greeting(0, 1, 1, 9, 1000, 77).pack()], "wants 9 slots"),
        ([GREETED, b"garbage!" * 8], "is no frame"),
        ([GREETED, Header(Kind.CONTRIBUTE, elements=2**32 - 1).pack()], "4294967295 elements, and 64 is the most"),
        ([GREETED, Header(Kind.CONTRIBUTE, elements=65).pack()], "65 elements, and 64 is the most"),
        ([GREETED, Header(Kind.CONTRIBUTE, elements=4, width=8).pack()], "integers of 8 bytes"),
        ([GREETED, Header(Kind.RESULT, elements=4).pack() + b"1234"], "of kind RESULT"),
        ([GREETED, Header(Kind.CONTRIBUTE, elements=4, slot=8).pack() + b"1234"], "slot 8 of lane 0"),
        ([GREETED, Header(Kind.CONTRIBUTE, elements=4, lane=1).pack() + b"1234"], "of lane 1"),
        ([GREETED, Header(Kind.CONTRIBUTE, elements=0).pack()], "sent 0 integers"),
        ([GREETED, Header(Kind.CONTRIBUTE, elements=4, chunk=8).pack() + b"1234"], "serves chunk 0"),
        ([GREETED, Header(Kind.LEAVE).pack().replace(b"\x04", b"\x63", 1)], "99 is not a valid Kind"),
        ([GREETED, Header(Kind.CONTRIBUTE, op=7).pack()], "7 is not a valid Op"),  # type: ignore[arg-type]
    ],
)
def test_what_breaks_the_protocol_is_dropped_with_a_reason(data: list[bytes], message: str) -> None:
    with serving() as (aggregator, told):
        answer = _raw(aggregator.address, *data)
        answer = answer[WELCOMED:] if len(data) > 1 else answer
        header = Header.unpack(answer[: HEADER.size], 64)
        assert header.kind == Kind.ERROR
        assert message in answer[HEADER.size : HEADER.size + header.elements].decode()
        assert any(message in line for line in told)
        assert aggregator.counters.refused == 1
        works(aggregator.address)


def test_garbage_from_one_worker_ends_its_session_for_the_others() -> None:
    with serving() as (aggregator, _):
        pair = clients(aggregator.address, 2)

        def garbage() -> None:
            time.sleep(0.2)
            pair[1]._link._sock.send(b"\xff" * 100)

        answers = together([lambda: pair[0].all_reduce(torch.ones(9, dtype=torch.int8)), garbage])
        assert "rank 1 was dropped" in str(answers[0])
        works(aggregator.address)


def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_GREETING_TIMEOUT_S", 0.3)
    with serving() as (aggregator, told):
        assert b"it said nothing" in _raw(aggregator.address, b"twag")
        assert "it said nothing" in told[-1]


def test_frames_in_pieces_are_put_together() -> None:
    with serving() as (aggregator, _):
        frame = Header(Kind.CONTRIBUTE, Op.SUM, 4, elements=3).pack() + np.array([1, -2, 3], dtype="<i4").tobytes()
        data = GREETED + frame + Header(Kind.LEAVE).pack()
        answer = _raw(aggregator.address, *(data[i : i + 7] for i in range(0, len(data), 7)))
        header = Header.unpack(answer[WELCOMED : 2 * HEADER.size], 64)
        assert header.kind == Kind.RESULT
        assert np.frombuffer(answer[2 * HEADER.size :], dtype="<i4").tolist() == [1, -2, 3]


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
        with pytest.raises(TransportError, match="the aggregator was stopped"):
            pending.wait()


def _loses_it(rank: int, address: str) -> str:
    model = make(rank)
    thinwire.compress(model, "intsgd(bits=8)", decline=False, aggregator=address)
    train(model, rank, 3)
    if rank == 1:
        time.sleep(0.5)
        return "left"
    try:
        train(model, rank, 3)
    except TransportError as error:
        return str(error)
    return "nothing happened"


def test_a_training_whose_rank_dies_says_so() -> None:
    with serving(slots=16, slot_elements=1000) as (aggregator, _):
        answers = run_ranks(_loses_it, 2, aggregator.address, group_timeout_s=10.0, may_die=True)
        assert answers[1] == "left"
        assert "rank 1" in str(answers[0])
        works(aggregator.address)
