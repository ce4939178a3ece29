"""In-network aggregation: exact sums in few slots, nothing but integers on the wire, the same training."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import thinwire
from aggregation import Recorder, clients, reduced, serving, together, wait_until, works
from harness import run_ranks
from nets import fingerprint, make, train
from thinwire import TransportError
from thinwire.aggregator import parse_address
from thinwire.aggregator.protocol import GREETING, HEADER, HELLO, PROOF_BYTES, Greeting, Header, Kind


@pytest.mark.parametrize(("num_ranks", "slots"), [(1, 64), (2, 7), (3, 2), (5, 2)])
def test_sums_are_those_of_big_integers_in_few_slots(num_ranks: int, slots: int) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    numels = [1, 63, 64, 65, 1000, 4097, 0, 300]
    jobs = []
    for at, numel in enumerate(numels):
        dtype = torch.int8 if at % 2 else torch.int32
        limit = torch.iinfo(dtype).max // num_ranks
        of_ranks = [torch.randint(-limit, limit + 1, (numel,), generator=generator) for _ in range(num_ranks)]
        jobs.append(([x.to(dtype) for x in of_ranks], "max" if at == 4 else "sum", at % 3 == 0))
    exact = []
    for xs, op, _ in jobs:
        rows = [[int(v) for v in x.tolist()] for x in xs]
        exact.append([max(column) if op == "max" else sum(column) for column in zip(*rows, strict=True)])
    with serving(slots=slots) as (aggregator, _):
        ranks = clients(aggregator.address, num_ranks)

        def lane(rank: int, number: int) -> None:
            mine = [(xs[rank], op) for xs, op, second in jobs if second == bool(number)]
            for pending in [ranks[rank].start_all_reduce(x, lane=number, op=op) for x, op in mine]:
                pending.wait()

        together(
            [lambda rank=rank, number=number: lane(rank, number) for rank in range(num_ranks) for number in (0, 1)]
        )
        for (xs, _, _), want in zip(jobs, exact, strict=True):
            assert all(x.tolist() == want for x in xs)
        assert aggregator.slots_in_use == 0
        assert aggregator.counters.chunks == sum(-(-numel // 64) for numel in numels)
        for client in ranks:
            client.close()
        wait_until(lambda: aggregator.num_workers == 0)


def test_extremes_fit_and_what_does_not_is_an_error_for_all() -> None:
    with serving() as (aggregator, told):
        pair = clients(aggregator.address, 2)
        for dtype in (torch.int8, torch.int32):
            limits = torch.iinfo(dtype)
            xs = [torch.tensor([limits.max, limits.min, -1], dtype=dtype), torch.tensor([0, 0, 1], dtype=dtype)]
            reduced(pair, xs)
            assert [x.tolist() for x in xs] == [[limits.max, limits.min, 0]] * 2
        reduced(pair, [torch.full((100,), 64, dtype=torch.int8) for _ in pair], "does not fit into int8")
        assert "does not fit into int8" in told[-1]
        for client in pair:
            with pytest.raises(TransportError, match="broke earlier"):
                client.start_all_reduce(torch.zeros(4, dtype=torch.int8)).wait()
        works(aggregator.address)


@pytest.mark.parametrize(("num_ranks", "limit"), [(1, 127), (2, 63), (3, 7), (5, 1)])
def test_packed_sums_are_exact_and_as_wide_as_their_bounds(num_ranks: int, limit: int) -> None:
    numels = [1, 63, 128, 129, 1000, 0]
    with serving(slots=4, slot_elements=200) as (aggregator, _), Recorder(aggregator.address) as recorder:
        ranks = clients(recorder.address, num_ranks)
        for numel in numels:
            generator = torch.Generator().manual_seed(numel)
            xs = [torch.randint(-limit, limit + 1, (numel,), generator=generator).to(torch.int8) for _ in ranks]
            for x in xs:
                x[:1] = limit
            wanted = torch.stack(xs).sum(0).to(torch.int8)
            together(
                [lambda c=c, x=x: c.start_all_reduce(x, limit=limit).wait() for c, x in zip(ranks, xs, strict=True)]
            )
            assert all(torch.equal(x, wanted) for x in xs)
        sent, received = (
            sum(ranks[0].wire_bytes(numel, 1, most) for numel in numels) for most in (limit, limit * num_ranks)
        )
        for client in ranks:
            client.close()
        wait_until(lambda: aggregator.num_workers == 0)
        wait_until(lambda: all(len(up) == GREETING.size + PROOF_BYTES + sent + HEADER.size for up in recorder.up))
    assert {len(down) for down in recorder.down} == {HELLO.size + HEADER.size + received}
    groups, chunks = 1 + 1 + 1 + 2 + 5 * 2, 1 + 1 + 1 + 1 + 5
    assert sent == 16 * (2 * limit).bit_length() * groups + 24 * chunks
    assert received == 16 * (2 * limit * num_ranks).bit_length() * groups + 24 * chunks


def test_only_integers_are_taken() -> None:
    assert parse_address("[::1]:80?slots=16") == ("::1", 80, 16)
    with serving() as (aggregator, _):
        (client,) = clients(aggregator.address, 1)
        for wrong in (torch.zeros(4), torch.zeros(4, dtype=torch.int16), torch.zeros(4, 4, dtype=torch.int8).T[1:]):
            with pytest.raises(TypeError, match="int8 or int32"):
                client.start_all_reduce(wrong)
        client.close()


def frames(data: bytes) -> Iterator[tuple[Header, bytes]]:
    while data:
        header = Header.unpack(data[: HEADER.size], 64)
        yield header, data[HEADER.size : HEADER.size + header.payload_bytes]
        data = data[HEADER.size + header.payload_bytes :]


def test_every_byte_both_ways_is_a_header_or_an_integer() -> None:
    """The integers that went in and came out are rebuilt from the captured bytes, and no byte is left over."""
    xs = [torch.randint(-40, 41, (1000,), dtype=torch.int8, generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
    ys = [torch.randint(-(2**30), 2**30, (130,), dtype=torch.int32) for _ in (0, 1)]
    sent = [[x.clone(), y.clone()] for x, y in zip(xs, ys, strict=True)]
    with serving(slots=4) as (aggregator, _), Recorder(aggregator.address) as recorder:
        pair = clients(recorder.address, 2)
        reduced(pair, xs)
        together([lambda c=c, y=y: c.start_all_reduce(y, lane=1).wait() for c, y in zip(pair, ys, strict=True)])
        expected = pair[0].wire_bytes(1000, 1) + pair[0].wire_bytes(130, 4)
        for client in pair:
            client.close()
        wait_until(lambda: aggregator.num_workers == 0)
        wait_until(lambda: all(len(up) == GREETING.size + PROOF_BYTES + expected + HEADER.size for up in recorder.up))
    assert expected == 16 * 24 + 1000 + 3 * 24 + 4 * 130
    for up, down in zip(recorder.up, recorder.down, strict=True):
        greeting = Greeting.unpack(up[: GREETING.size])
        for way, kind, tensors in (
            (up[GREETING.size + PROOF_BYTES :], Kind.CONTRIBUTE, sent[greeting.rank]),
            (down[HELLO.size :], Kind.RESULT, [xs[0], ys[0]]),
        ):
            seen: dict[int, list[int]] = {0: [], 1: []}
            other = []
            for header, payload in frames(bytes(way)):
                if header.kind != kind:
                    other.append((header.kind, len(payload)))
                    continue
                seen[header.lane] += np.frombuffer(payload, dtype=f"<i{header.width}").tolist()
            assert seen == {0: tensors[0].tolist(), 1: tensors[1].tolist()}
            assert other == [(Kind.LEAVE if kind == Kind.CONTRIBUTE else Kind.WELCOME, 0)]
        assert len(down) == HELLO.size + HEADER.size + expected


NUMEL = 43584
SPECS = ("intsgd(bits=8)", "intsgd(bits=32, block=global)", "heuristic_intsgd(bits=8)", "intdiana(bits=2)")


def _trains(rank: int, address: str) -> None:
    for spec in SPECS:
        ends = []
        for through in (None, address):
            model = make(rank)
            wire = thinwire.compress(model, spec, skip_if_slower=False, network=thinwire.Network(aggregator=through))
            train(model, rank, 3, lr=0.03)
            wire.reset_stats()
            train(model, rank, 2, first=3, lr=0.03)
            ends.append(fingerprint(model))
            per_step, stats = wire.sent_bytes(), wire.stats
            wire.detach()
        assert ends[0] == ends[1], spec
        assert stats.payload_sent_bytes == 2 * per_step
        if spec == "intdiana(bits=2)":
            # Two bits up, and three down: sums of 3 integers of magnitude 1 are at most 3.
            assert per_step < 2.5 * NUMEL / 8 + 24 * 60
            assert 1.4 < stats.payload_received_bytes / stats.payload_sent_bytes < 1.5
        else:
            assert stats.payload_received_bytes == 2 * per_step


def test_training_through_it_is_bit_identical_to_native_all_reduces() -> None:
    with serving(slots=16, slot_elements=1000) as (aggregator, _):
        run_ranks(_trains, 3, aggregator.address)
        wait_until(lambda: aggregator.num_workers == 0)
        counters = aggregator.counters
    assert counters.sessions == len(SPECS)
    assert counters.failed_sessions == counters.refused == 0
    assert counters.received_bytes > 3 * 4 * NUMEL * (8 + 32 + 8 + 2) / 8


def _refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"no layer has a compressor that makes any: intsgd\(bits=8\) does"):
        thinwire.compress(make(rank), "minmax(bits=4)", network=thinwire.Network(aggregator="127.0.0.1:9"))


def test_it_takes_integers() -> None:
    run_ranks(_refused, 2)


def test_the_command_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "thinwire", "aggregator", "--port", "0", "--slots", "4"]
    command += ["--shares", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        works(line.split()[2].rstrip(","))
        process.send_signal(signal.SIGINT)
        assert "served 1 sessions, 1 chunks" in process.stdout.read()
        assert process.wait(60.0) == 0
