"""Who may take part in a sum: workers with the token, over TLS if asked for, whatever hundreds of others send."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aggregation import clients, greeted, reduced, serving, wait_until, works
from thinwire import AggregatorAddress, TransportError
from thinwire.aggregator import AggregatorClient, parse_address, server as server_module
from thinwire.aggregator.protocol import HELLO, Greeting, Header, Kind
from thinwire.integrations.options import Network

TOKEN = "not known to everybody"


def test_a_worker_without_the_token_is_refused_and_the_others_are_served() -> None:
    with serving(token=TOKEN) as (aggregator, told):
        for token in ("", "wrong", TOKEN + "x"):
            address = AggregatorAddress(aggregator.address, token=token)
            with pytest.raises(TransportError, match="its token is not the aggregator's"):
                AggregatorClient(address, rank=0, world_size=1, session=1, timeout_s=20.0)
        assert aggregator.counters.refused == 3
        assert aggregator.num_workers == 0
        works(AggregatorAddress(aggregator.address, token=TOKEN))
        assert not any(TOKEN in line for line in told)
    with serving() as (aggregator, _):
        address = AggregatorAddress(aggregator.address, token=TOKEN)
        with pytest.raises(TransportError, match="both need the same one, or none"):
            AggregatorClient(address, rank=0, world_size=1, session=1, timeout_s=20.0)


def test_a_proof_is_good_for_one_connection() -> None:
    """What somebody recorded of a worker's greeting opens no other connection."""
    greeting = Greeting(0, 1, 1, 0, 1000, 77)
    with serving(token=TOKEN) as (aggregator, told):
        host, port, _ = parse_address(aggregator.address)
        with socket.create_connection((host, port), timeout=20.0) as first:
            recorded = greeted(first, greeting, TOKEN)
            first.sendall(recorded)
            assert Header.unpack(first.recv(24), 64).kind == Kind.WELCOME
        with socket.create_connection((host, port), timeout=20.0) as second:
            greeted(second, greeting, TOKEN)
            second.sendall(recorded)
            assert Header.unpack(second.recv(24), 64).kind == Kind.ENDED
        assert "its token is not the aggregator's" in told[-1]


def test_a_token_is_not_shown() -> None:
    address = AggregatorAddress("host:80", token=TOKEN)
    assert TOKEN not in f"{address} {address!r} {Network(aggregator=address)}"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_sums_over_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    make = "req -x509 -days 2 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=aggregator"
    name = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *make.split(), *name], check=True, timeout=100)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with serving(slots=8, slot_elements=4096, token=TOKEN, tls=context) as (aggregator, _):
        address = AggregatorAddress(aggregator.address, token=TOKEN, tls=trusting)
        works(address)
        pair = clients(address, 2)
        xs = [torch.full((1 << 20,), 1 + rank, dtype=torch.int8) for rank in range(2)]
        reduced(pair, xs)
        assert all(bool((x == 3).all()) for x in xs)
        for client in pair:
            client.close()
        wait_until(lambda: aggregator.num_workers == 0)
        # Whom this rank does not know, it does not talk to.
        strange = AggregatorAddress(aggregator.address, token=TOKEN, tls=ssl.create_default_context())
        with pytest.raises(TransportError, match="found no TLS"):
            AggregatorClient(strange, rank=0, world_size=1, session=3, timeout_s=20.0)


def _frames_at_once(sock: socket.socket) -> None:
    sock.recv(HELLO.size)
    sock.sendall((Header(Kind.CONTRIBUTE, elements=64).pack() + bytes(64)) * 100)


def _never_reads(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    sock.sendall(b"\0" * (1 << 16))


HOSTILE: list[Callable[[socket.socket], None]] = [
    lambda sock: None,
    lambda sock: sock.sendall(Greeting(0, 2, 1, 0, 1000, 5).pack()[:11]),
    lambda sock: sock.sendall(secrets.token_bytes(1 << 16)),
    lambda sock: sock.sendall(greeted(sock, Greeting(0, 2, 1, 0, 1000, 7), "guessed")),
    lambda sock: sock.sendall(greeted(sock, Greeting(1, 2, 2, 0, 20_000, 1), "")),
    _frames_at_once,
    _never_reads,
]


def test_an_honest_job_stays_exact_beside_hundreds_of_hostile_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers add up while eight threads open 300 connections that break every rule, and keep them open."""
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 64)
    with serving(slots=16, slot_elements=256, shares=2, token=TOKEN) as (aggregator, _):
        host, port, _ = parse_address(aggregator.address)
        address = AggregatorAddress(aggregator.address, token=TOKEN)
        most = [0]

        def attack(first: int) -> None:
            kept: list[socket.socket] = []
            for number in range(first, 300, 8):
                with contextlib.suppress(OSError):
                    sock = socket.create_connection((host, port), timeout=20.0)
                    kept.append(sock)
                    if len(kept) > 32:
                        kept.pop(0).close()
                    HOSTILE[number % len(HOSTILE)](sock)
                most[0] = max(most[0], aggregator.num_strangers)
            for sock in kept:
                sock.close()

        attackers = [threading.Thread(target=attack, args=(first,), daemon=True) for first in range(8)]
        for thread in attackers:
            thread.start()
        generator = torch.Generator().manual_seed(0)
        rounds = 0
        jobs = [clients(address, 2, session=number, timeout_s=20.0) for number in (1, 2)]
        while any(thread.is_alive() for thread in attackers) or rounds < 10:
            for job in jobs:
                xs = [torch.randint(-(2**20), 2**20, (5000,), dtype=torch.int32, generator=generator) for _ in job]
                exact = xs[0] + xs[1]
                reduced(job, xs)
                assert all(torch.equal(x, exact) for x in xs)
            rounds += 1
        assert most[0] <= 65
        assert aggregator.counters.sessions == 2
        assert aggregator.counters.failed_sessions == 0
        wait_until(lambda: aggregator.counters.refused > 90)
        for job in jobs:
            for client in job:
                client.close()
        wait_until(lambda: aggregator.num_workers == 0)
