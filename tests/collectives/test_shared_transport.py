"""Memory that ranks of a node share, as a transport: who shares, what is held, what happens when a rank dies."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from test_algorithms import laid_out
from test_collectives import gradient, layers_of

import thinwire
from harness import LoopbackTransport, run_ranks, run_threads
from nets import make, train
from thinwire import SharedMemoryError, TransportError
from thinwire.collectives import (
    CollectiveCall,
    ProcessGroupTransport,
    all_reduce,
    complete,
    shared_transport,
    with_shared_memory,
)
from thinwire.collectives.shared_memory import Segment, unavailable
from thinwire.collectives.shared_transport import places_of
from thinwire.collectives.traffic import Outgoing
from thinwire.kernels import LINE_BYTES

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

ONE_NODE, PAIRS, TURNS = (lambda rank: 0), (lambda rank: rank // 2), (lambda rank: rank % 2)
TIMEOUT = timedelta(seconds=20)
LAYERS = layers_of((40_000, "minmax"), (100, "raw"), (3000, "minmax(bits=2, bucket=64)"))


# ---- Memory -------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 500), st.sets(st.integers(1, 4), min_size=1)), max_size=9),
    node=st.sets(st.integers(1, 4)),
)
def test_messages_and_words_have_lines_of_their_own(sizes, node) -> None:
    messages = [Outgoing(phase, size, tuple(sorted(of))) for phase, (size, of) in enumerate(sizes)]
    places, num_bytes = places_of(messages, frozenset(node))
    assert set(places) == {m.phase for m in messages if node & set(m.receivers)}
    spans = []
    for phase, place in places.items():
        assert set(place.consumed) == node & set(messages[phase].receivers)
        spans += [(at, at + LINE_BYTES) for at in (place.published, *place.consumed.values())]
        spans.append((place.payload, place.payload + messages[phase].num_bytes))
    spans.sort()
    assert all(begin % LINE_BYTES == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert max((end for _, end in spans), default=0) <= num_bytes


def _layout(spec: str, num_ranks: int):
    return laid_out(spec, num_ranks, LAYERS)


def _reduce(transport, layout, buffers=None, step: int = 0) -> torch.Tensor:
    x, buffers = gradient(transport.rank, layout.numel) + step, buffers or transport.open(layout.reduction_traffic())
    complete(all_reduce(x, layout, transport, buffers, CollectiveCall(seed=0, step=step)))
    return x


@pytest.mark.parametrize(
    ("spec", "node_of"),
    [
        ("sra", ONE_NODE),
        ("ring", PAIRS),
        ("tree", TURNS),
        ("hierarchical", PAIRS),
        ("hierarchical(across=leaders)", TURNS),
    ],
)
def test_bytes_are_those_of_messages_inside_the_node(spec: str, node_of) -> None:
    """Messages are where their receivers read them: nobody holds room for one that a neighbour sends."""
    layout = _layout(spec, 4)
    traffic = layout.reduction_traffic()

    def run(transport):
        buffers = transport.open(traffic)
        _reduce(transport, layout, buffers)
        return transport.sent_bytes, transport.shared_bytes, buffers.num_bytes

    for rank, (sent, shared, held) in enumerate(run_threads(run, 4, node_of=node_of)):
        pairs = [(m, receiver) for m in traffic[rank] for receiver in m.receivers]
        inside = [m.num_bytes for m, receiver in pairs if node_of(receiver) == node_of(rank)]
        assert sent == layout.sent_bytes(rank)
        assert shared == sum(inside)
        arriving = [m for peer, of in enumerate(traffic) for m in of if rank in m.receivers]
        outside = [m for p, of in enumerate(traffic) for m in of if rank in m.receivers and node_of(p) != node_of(rank)]
        most = sum(m.num_bytes for m in (*traffic[rank], *outside))
        words = LINE_BYTES * (len(traffic[rank]) + len(inside))
        assert held <= most + words
        if node_of is ONE_NODE:
            assert arriving
            assert held == sum(m.num_bytes for m in traffic[rank]) + words


def test_a_message_is_not_copied() -> None:
    """What one rank has in its outbox is what the other finds in its inbox, at once and at another address."""

    def run(transport):
        buffers = transport.open([[Outgoing(0, 256, (1,))], []])
        if transport.rank == 0:
            buffers.outbox[0].copy_(torch.arange(256))
            transport.all_gather(torch.zeros(1))
            return buffers.outbox[0].data_ptr()
        transport.all_gather(torch.zeros(1))
        assert torch.equal(buffers.inbox[0, 0], torch.arange(256).to(torch.uint8))
        return buffers.inbox[0, 0].data_ptr()

    one, other = run_threads(run, 2, node_of=ONE_NODE)
    assert one != other


def test_a_message_is_not_overwritten_before_it_was_read() -> None:
    """The sender goes on when the receiver has ended the exchange before, and not sooner."""
    order, lock = [], threading.Lock()

    def note(*what: object) -> None:
        with lock:
            order.append(what)

    def run(transport):
        buffers = transport.open([[Outgoing(0, 64, (1,))], []])
        for step in range(4):
            transport.begin(buffers)
            if transport.rank == 0:
                note("writes", step)
                buffers.outbox[0].fill_(step + 1)
                transport.send_from(buffers, 0, 64)
            else:
                transport.receive_into(buffers, 0, 0).wait()
                for _ in range(10):
                    time.sleep(0.005)
                    assert bool((buffers.inbox[0, 0] == step + 1).all())
                note("ends", step)
            transport.end(buffers)

    run_threads(run, 2, node_of=ONE_NODE)
    assert order == [(what, step) for step in range(4) for what in ("writes", "ends")]


# ---- Processes ----------------------------------------------------------------------------------------------------


def _transport(choice: str = "shared", timeout: timedelta = TIMEOUT):
    group = dist.new_group(timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return with_shared_memory(ProcessGroupTransport(group, timeout), timeout, choice)


def _on_node(rank: int, nodes: str) -> None:
    if nodes:
        os.environ["THINWIRE_NODE"] = nodes[rank]


WORLDS = ("group", "aaaa", "aabb", "abca")


def _reduces(rank: int) -> dict[tuple[str, str], tuple[list[torch.Tensor], tuple[int, int, int]]]:
    """By nodes and collective algorithm: results, and bytes sent, received and shared."""
    found = {}
    for nodes in WORLDS:
        os.environ["THINWIRE_NODE"] = "group" if nodes == "group" else nodes[rank]
        transport = _transport("group" if nodes == "group" else "shared")
        for spec in ("sra", "ring", "hierarchical"):
            before = transport.sent_bytes, transport.received_bytes, transport.shared_bytes
            layout = _layout(spec, 4)
            buffers = transport.open(layout.reduction_traffic())
            results = [_reduce(transport, layout, buffers, step) for step in range(10)]
            after = transport.sent_bytes, transport.received_bytes, transport.shared_bytes
            found[nodes, spec] = results, tuple(now - then for now, then in zip(after, before, strict=True))
    return found


def test_processes_on_several_nodes() -> None:
    """The same bits and the same bytes as over gloo alone, whoever shares a node."""
    for rank, found in enumerate(run_ranks(_reduces, 4)):
        for (nodes, spec), (results, (sent, received, shared)) in found.items():
            expected, counted = found["group", spec]
            assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
            assert (sent, received) == counted[:2]
            neighbours = 0 if nodes == "group" else nodes.count(nodes[rank]) - 1
            assert shared == {0: 0, 3: sent}.get(neighbours, shared)
        assert any(0 < shared < sent for _, (sent, _, shared) in found.values())


def _opens(rank: int) -> tuple[int, int, list[int]]:
    """Buffers come and go: files and mappings do not add up."""

    def mapped() -> int:
        return sum("memfd:thinwire" in line for line in Path("/proc/self/maps").read_text().splitlines())

    transport, layout = _transport(), _layout("sra", 2)
    files, held, maps = [], [transport.open(layout.reduction_traffic())], mapped()
    files = len(os.listdir("/proc/self/fd"))
    held = [transport.open(layout.reduction_traffic()) for _ in range(50)]
    grown = len(os.listdir("/proc/self/fd")) - files, mapped() - maps
    for buffers in held[::10]:
        _reduce(transport, layout, buffers)
    del held, buffers
    gc.collect()
    left = [mapped()]
    del transport
    gc.collect()
    return *grown, [*left, mapped()]


def test_buffers_hold_no_files_and_give_their_memory_back() -> None:
    for files, maps, left in run_ranks(_opens, 2):
        assert files == 0
        assert maps == 2 * 49
        assert left == [2, 0]


def _dies(rank: int, spec: str, nodes: str, how: str) -> tuple[str, float]:
    _on_node(rank, nodes)
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


@pytest.mark.parametrize(("spec", "how"), [("sra", "before"), ("ring", "amid"), ("tree", "amid")])
def test_survivors_of_one_node_leave_at_once(spec: str, how: str) -> None:
    """Whoever waits for the dead rank, and whoever waits for who does, long before the timeout of 20 s."""
    answers = run_ranks(_dies, 4, spec, "", how, may_die=True, timeout_s=30.0)
    assert answers[2] is None
    texts = []
    for answer in (answers[0], answers[1], answers[3]):
        assert isinstance(answer, tuple), answer
        text, took = answer
        assert "rank 2 has died" in text or "has given up" in text
        assert took < 5.0
        texts.append(text)
    assert any("rank 2 has died" in text for text in texts)


def test_survivors_of_two_nodes_leave_at_once() -> None:
    """Who waits over gloo, for one that has given up, hears of it when that one's process ends."""
    answers = run_ranks(_dies, 4, "sra", "aabb", "amid", may_die=True, timeout_s=40.0)
    assert answers[2] is None
    for answer in (answers[0], answers[1], answers[3]):
        assert isinstance(answer, tuple), answer
        assert "rank" in answer[0]
        assert answer[1] < 10.0
    assert any("rank 2" in answer[0] for answer in (answers[0], answers[1], answers[3]))


def _is_silent(rank: int) -> tuple[str, float]:
    transport, layout = _transport(timeout=timedelta(seconds=1)), _layout("sra", 2)
    buffers = transport.open(layout.reduction_traffic())
    if rank == 1:
        time.sleep(3.0)
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(TransportError) as raised:
        _reduce(transport, layout, buffers)
    return str(raised.value), time.monotonic() - start


def test_a_silent_rank_is_an_error_within_the_timeout() -> None:
    text, took = run_ranks(_is_silent, 2)[0]
    assert "receiving from rank 1 failed: nothing came within 1 s" in text
    assert took < 2.8


# ---- Who shares ---------------------------------------------------------------------------------------------------


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


def _chooses_each(rank: int) -> tuple[dict[tuple[str, str, str], tuple[str, list[str]]], tuple[str, list[str]], str]:
    found = {choice: _chooses(rank, *choice) for choice in CHOICES}
    return found, _chooses(rank, "auto", "", "mapping"), _chooses(rank, "shared", "", "mapping")[0]


def test_ranks_choose_alike() -> None:
    for rank, (found, (auto, texts), shared) in enumerate(run_ranks(_chooses_each, 4)):
        assert found == {choice: (answers[rank], []) for choice, answers in CHOICES.items()}
        refused = "ranks 1 could not share memory"
        assert auto == GROUP
        (text,) = texts
        assert text.startswith(f"{refused} with the other ranks of their node{': refused' if rank == 1 else ''}")
        assert 'Network(transport="group") accepts that' in text
        assert shared.startswith(refused)


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


# ---- Training -----------------------------------------------------------------------------------------------------


RULES = ["ef(minmax(bits=4))", "topk(density=0.1)", "threshold(lam=0.01)", "powersgd(rank=2)"]


def _trained(rank: int, transport: str, rules: str):
    model = make(rank)
    network = thinwire.Network(transport=transport)  # pyright: ignore[reportArgumentType]
    wire = thinwire.compress(model, rules, network=network, skip_if_slower=False)
    losses = train(model, rank, 4)
    parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return losses, parameters, wire.stats.payload_sent_bytes, wire.stats.payload_shared_bytes


def _trains(rank: int):
    return {(rules, way): _trained(rank, way, rules) for rules in RULES for way in ("shared", "group")}


def test_training_is_the_same_bit_for_bit() -> None:
    for found in run_ranks(_trains, 2, timeout_s=60.0):
        for rules in RULES:
            losses, parameters, sent, inside = found[rules, "shared"]
            other_losses, other, as_many, outside = found[rules, "group"]
            assert losses == other_losses
            assert torch.equal(parameters, other)
            assert sent == as_many > 0
            assert outside == 0
            # What is summed goes over the process group.
            assert inside == (0 if "powersgd" in rules else sent)
