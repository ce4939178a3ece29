"""Memory that ranks of a node share, as a transport: who shares, what is held, what happens when a rank dies."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from itertools import cycle, pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from test_algorithms import laid_out
from test_collectives import gradient, layers_of

from harness import LoopbackTransport, run_ranks, run_threads
from thinwire import SharedMemoryError, TransportError
from thinwire.collectives import (
    Arena,
    CollectiveCall,
    ProcessGroupTransport,
    all_reduce,
    complete,
    shared_transport,
    with_shared_memory,
)
from thinwire.collectives.shared_memory import Segment, unavailable
from thinwire.collectives.shared_transport import message_places
from thinwire.collectives.transport import OutgoingMessage
from thinwire.kernels import LINE_BYTES

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

ONE_NODE, PAIRS, TURNS = (lambda rank: 0), (lambda rank: rank // 2), (lambda rank: rank % 2)
TIMEOUT = timedelta(seconds=20)
LAYERS = layers_of((40_000, "minmax"), (100, "raw"), (3000, "minmax(bits=2, bucket=64)"))


@settings(max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 500), st.sets(st.integers(1, 4), min_size=1)), max_size=9),
    node=st.sets(st.integers(1, 4)),
)
def test_messages_and_words_have_lines_of_their_own(sizes, node) -> None:
    messages = [OutgoingMessage(phase, size, tuple(sorted(of))) for phase, (size, of) in enumerate(sizes)]
    places, *sizes = message_places(messages, frozenset(node))
    assert set(places) == {m.phase for m in messages if node & set(m.receivers)}
    words, payloads = [], []
    for phase, place in places.items():
        assert set(place.consumed) == node & set(messages[phase].receivers)
        words += [(at, at + LINE_BYTES) for at in (place.published, *place.consumed.values())]
        payloads.append((place.payload, place.payload + messages[phase].num_bytes))
    for spans, num_bytes in zip((sorted(words), sorted(payloads)), sizes, strict=True):
        assert all(begin % LINE_BYTES == 0 for begin, _ in spans)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert max((end for _, end in spans), default=0) <= num_bytes


def _layout(spec: str, num_ranks: int):
    return laid_out(spec, num_ranks, LAYERS)


def _reduce(transport, layout, buffers=None, step: int = 0) -> torch.Tensor:
    x, buffers = gradient(transport.rank, layout.numel) + step, buffers or transport.open(layout.reduction_traffic())
    complete(all_reduce(x, layout, transport, buffers, CollectiveCall(seed=0, step=step)))
    return x


LEADERS = "hierarchical(across=leaders)"


@pytest.mark.parametrize(
    ("spec", "node_of"),
    [("sra", ONE_NODE), ("ring", PAIRS), ("tree", TURNS), ("hierarchical", PAIRS), (LEADERS, TURNS)],
)
def test_bytes_are_those_of_messages_inside_the_node(spec: str, node_of) -> None:
    """Messages are where their receivers read them: nobody holds room for one that a neighbor sends."""
    layout = _layout(spec, 4)
    traffic = layout.reduction_traffic()

    def run(transport):
        buffers = transport.open(traffic)
        _reduce(transport, layout, buffers)
        return transport.sent_bytes, transport.shared_bytes, buffers.num_bytes

    for rank, (sent, shared, held) in enumerate(run_threads(run, 4, node_of=node_of)):
        pairs = [(m, receiver) for m in traffic[rank] for receiver in m.receivers]
        inside = [m.num_bytes for m, receiver in pairs if node_of(receiver) == node_of(rank)]
        assert (sent, shared) == (layout.sent_bytes(rank), sum(inside))
        outside = [m for p, of in enumerate(traffic) for m in of if rank in m.receivers and node_of(p) != node_of(rank)]
        most = sum(m.num_bytes for m in (*traffic[rank], *outside)) + LINE_BYTES * (len(traffic[rank]) + len(inside))
        assert held == most if node_of is ONE_NODE else held <= most


def test_tags_are_different_from_those_of_the_transport_between_nodes() -> None:
    """A message between nodes would otherwise be taken for one of a small all-reduce."""

    def run(transport) -> list[int]:
        return [transport.new_tag(2), transport.inner.new_tag(1), transport.new_tag(1)]

    assert run_threads(run, 4, node_of=PAIRS) == [[0, 2, 3]] * 4


@pytest.mark.parametrize("sizes", [(64,), (64, 128, 1 << 13)])
def test_a_message_is_not_overwritten_before_it_was_read(sizes: tuple[int, ...]) -> None:
    """The sender goes on when the receiver has ended the exchange before in the same arena, and not sooner."""
    order, lock = [], threading.Lock()

    def note(*what: object) -> None:
        with lock:
            order.append(what)

    def run(transport):
        arena = Arena()
        turns = [transport.open([[OutgoingMessage(0, size, (1,))], []], arena) for size in sizes]
        for step, buffers in zip(range(4), cycle(turns), strict=False):
            transport.begin(buffers)
            if transport.rank == 0:
                note("writes", step)
                buffers.outbox[0].fill_(step + 1)
                transport.send_from(buffers, 0, buffers.outbox[0].numel())
            else:
                transport.receive_into(buffers, 0, 0).wait()
                for _ in range(10):
                    time.sleep(0.005)
                    assert bool((buffers.inbox[0, 0] == step + 1).all())
                note("ends", step)
            transport.end(buffers)

    run_threads(run, 2, node_of=ONE_NODE)
    assert order == [(what, step) for step in range(4) for what in ("writes", "ends")]


def _transport(choice: str = "shared", timeout: timedelta = TIMEOUT):
    group = dist.new_group(timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return with_shared_memory(ProcessGroupTransport(group, timeout), timeout, choice)


def _reduces(rank: int) -> None:
    expected, shares = {}, []
    for nodes in ("group", "aaaa", "aabb", "abca"):
        os.environ["THINWIRE_NODE"] = "group" if nodes == "group" else nodes[rank]
        transport = _transport("group" if nodes == "group" else "shared")
        neighbors = 0 if nodes == "group" else nodes.count(nodes[rank]) - 1
        for spec in ("sra", "ring", "hierarchical"):
            sent, received, shared = transport.sent_bytes, transport.received_bytes, transport.shared_bytes
            layout = _layout(spec, 4)
            buffers = transport.open(layout.reduction_traffic())
            results = torch.stack([_reduce(transport, layout, buffers, step) for step in range(10)])
            counted = transport.sent_bytes - sent, transport.received_bytes - received
            wanted, as_many = expected.setdefault(spec, (results, counted))
            assert torch.equal(results, wanted)
            assert counted == as_many
            shares.append((transport.shared_bytes - shared) / counted[0])
            assert shares[-1] == {0: 0, 3: 1}.get(neighbors, shares[-1])
    assert any(0 < share < 1 for share in shares)


def test_processes_on_several_nodes() -> None:
    """The same bits and the same bytes as over gloo alone, whoever shares a node."""
    run_ranks(_reduces, 4)


def _dies(rank: int, spec: str, nodes: str, how: str) -> tuple[str, float]:
    if nodes:
        os.environ["THINWIRE_NODE"] = nodes[rank]
    transport, layout = _transport(), _layout(spec, 4)
    buffers = transport.open(layout.reduction_traffic())
    _reduce(transport, layout, buffers)
    running = all_reduce(gradient(rank, layout.numel), layout, transport, buffers, CollectiveCall(seed=0, step=1))
    if rank == 2:
        if how == "amid":
            next(running)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(TransportError) as raised:
        complete(running)
    took = time.monotonic() - start
    # Over and done: nothing is waited for any more, and the next one does not hang either.
    assert transport.broken
    # The others may still wait for this rank's word.
    time.sleep(1.0)
    return str(raised.value), took


@pytest.mark.parametrize(
    ("spec", "nodes", "how"),
    [("sra", "", "before"), ("ring", "", "amid"), ("tree", "", "amid"), ("sra", "aabb", "amid")],
)
def test_survivors_leave_at_once(spec: str, nodes: str, how: str) -> None:
    """Whoever waits for the dead rank, and whoever waits for who does, long before the timeout of 20 s. Over gloo, who
    waits for one that has given up hears of it when that one's process ends."""
    answers = run_ranks(_dies, 4, spec, nodes, how, may_die=True, timeout_s=40.0)
    assert answers.pop(2) is None
    assert all(isinstance(answer, tuple) for answer in answers), answers
    assert all(took < (10.0 if nodes else 5.0) for _, took in answers)
    texts = [text for text, _ in answers]
    assert any("rank 2 has died" in text or (nodes and "rank 2" in text) for text in texts), texts
    assert nodes or all("rank 2 has died" in text or "has given up" in text for text in texts), texts


SHARES, NOT_SHARES, GROUP = "SharedMemoryTransport True", "SharedMemoryTransport False", "ProcessGroupTransport False"
CHOICES = {
    ("auto", "", ""): [SHARES] * 4,
    ("shared", "", ""): [SHARES] * 4,
    ("group", "", ""): [GROUP] * 4,
    ("auto", "abcd", ""): [GROUP] * 4,
    ("auto", "abbc", ""): [NOT_SHARES, SHARES, SHARES, NOT_SHARES],
    ("auto", "", "unavailable"): [SHARES, NOT_SHARES, SHARES, SHARES],
    ("auto", "abbc", "unavailable"): [GROUP] * 4,
    ("shared", "abcd", ""): ["no two ranks are on one node, so none can share memory"] * 4,
    ("shared", "", "unavailable"): [
        f"no shared memory on ranks 1: {'there is no such thing here' if rank == 1 else 'they know why'}"
        for rank in range(4)
    ],
}
"""What ranks end with, or their error, by what is asked for, their nodes, and what rank 1 cannot do."""


def _refuse(*_: object) -> Segment:
    raise SharedMemoryError("refused")


def _chooses(rank: int, choice: str, nodes: str, breaks: str) -> tuple[str, list[str]]:
    """What a rank ends with, or its error; and the warnings."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        if nodes:
            patch.setenv("THINWIRE_NODE", nodes[rank])
        if breaks and rank == 1:
            if breaks == "unavailable":
                patch.setattr(shared_transport, "unavailable", lambda: "there is no such thing here")
            else:
                patch.setattr(Segment, "from_ticket", _refuse)
        warnings.simplefilter("always")
        try:
            transport = _transport(choice)
        except SharedMemoryError as error:
            return str(error), []
    texts = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    _reduce(transport, _layout("sra", 4))
    return f"{type(transport).__name__} {transport.shared_bytes > 0}", texts


def _chooses_each(rank: int) -> None:
    for choice, answers in CHOICES.items():
        assert _chooses(rank, *choice) == (answers[rank], [])
    auto, (text,) = _chooses(rank, "auto", "", "mapping")
    assert auto == GROUP
    refused = "ranks 1 could not share memory"
    assert text.startswith(f"{refused} with the other ranks of their node{': refused' if rank == 1 else ''}")
    assert 'Network(transport="group") accepts that' in text
    assert _chooses(rank, "shared", "", "mapping")[0].startswith(refused)


def test_ranks_choose_alike() -> None:
    run_ranks(_chooses_each, 4)


def test_memory_that_runs_out_is_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    make_segment = Segment.__init__

    def refuse(self: Segment, num_bytes: int) -> None:
        if threading.current_thread().name == "poor" and num_bytes > LINE_BYTES:
            raise SharedMemoryError("the system gives none")
        make_segment(self, num_bytes)

    monkeypatch.setattr(Segment, "__init__", refuse)

    def run(transport):
        if transport.rank == 2:
            threading.current_thread().name = "poor"
        with pytest.raises(SharedMemoryError, match="ranks 2 could not share memory") as raised:
            transport.open(_layout("sra", 3).reduction_traffic())
        return str(raised.value)

    texts = run_threads(run, 3, node_of=ONE_NODE)
    assert [text.endswith("the system gives none") for text in texts] == [False, False, True]


def test_a_rank_alone_keeps_its_transport() -> None:
    alone = LoopbackTransport.world(1)[0]
    assert with_shared_memory(alone, TIMEOUT, "shared") is alone
