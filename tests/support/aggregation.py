"""Aggregators and their workers in threads, and what stands between them. Shared by the tests of both."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from thinwire import TransportError
from thinwire.aggregator import Aggregator, AggregatorClient, Limits, parse_address
from thinwire.aggregator.protocol import HELLO, Greeting, proof, read_nonce


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[tuple[Aggregator, list[str]]]:
    """An aggregator in a thread, and the lines that it logs."""
    lines: list[str] = []
    numbers = {"slots": 8, "slot_elements": 64, "shares": 1}
    numbers |= {name: options.pop(name) for name in list(options) if name in Limits.__dataclass_fields__}
    with Aggregator(limits=Limits(**numbers), **({"log": lines.append} | options)) as aggregator:
        thread = threading.Thread(target=aggregator.serve, daemon=True)
        thread.start()
        try:
            yield aggregator, lines
        finally:
            aggregator.stop()
            thread.join(30.0)
            assert not thread.is_alive()


def together(functions: list[Callable[[], Any]]) -> list[Any]:
    """What functions return, or raise, when they run at once."""
    answers: list[Any] = [None] * len(functions)

    def run(at: int) -> None:
        try:
            answers[at] = functions[at]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            answers[at] = error

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    return answers


def greeted(sock: socket.socket, greeting: Greeting, token: str = "") -> bytes:
    """Read the aggregator's hello, and what a worker answers to it."""
    data = b""
    while len(data) < HELLO.size:
        more = sock.recv(HELLO.size - len(data))
        assert more, "the aggregator hung up"
        data += more
    packed = greeting.pack()
    return packed + proof(token, read_nonce(data), packed)


def connection(client: AggregatorClient) -> Any:
    """A worker's socket, to break what it sends, or the connection, behind its back."""
    assert client._link.transport is not None
    return client._link.transport.get_extra_info("socket")


def cut(client: AggregatorClient) -> None:
    """Break a worker's connection, as when its process dies."""
    connection(client).shutdown(socket.SHUT_RDWR)


def clients(address: Any, num_ranks: int, *, session: int = 1, timeout_s: float = 10.0, lanes: int = 2) -> list[Any]:
    options = {"world_size": num_ranks, "session": session, "timeout_s": timeout_s, "lanes": lanes}
    return together([lambda rank=rank: AggregatorClient(address, rank=rank, **options) for rank in range(num_ranks)])


def reduced(ranks: list[Any], xs: list[torch.Tensor], error: str = "") -> None:
    """All-reduce a tensor of each rank; ``error`` is what each rank's error must say, if there is to be one."""
    answers = together([lambda c=c, x=x: c.start_all_reduce(x).wait() for c, x in zip(ranks, xs, strict=True)])
    for answer in answers:
        assert (isinstance(answer, TransportError) and error in str(answer)) if error else answer is None, answer


def wait_until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def works(address: Any) -> None:
    """A session of two workers from beginning to end."""
    pair = clients(address, 2, session=999)
    xs = [torch.tensor([1, 2], dtype=torch.int32), torch.tensor([10, 20], dtype=torch.int32)]
    reduced(pair, xs)
    assert [x.tolist() for x in xs] == [[11, 22]] * 2
    for client in pair:
        client.close()


class Recorder:
    """Stands between workers and an aggregator, and keeps every byte."""

    def __init__(self, address: str) -> None:
        host, port, _ = parse_address(address)
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.up: list[bytearray] = []
        self.down: list[bytearray] = []
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                worker, _ = self._listener.accept()
            except OSError:
                return
            onward = socket.create_connection(self._target)
            self._sockets += (worker, onward)
            self.up.append(bytearray())
            self.down.append(bytearray())
            for source, target, record in ((worker, onward, self.up[-1]), (onward, worker, self.down[-1])):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=(source, target, record), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                record += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
