"""Whatever bytes a peer or a file hands us: decoders stay inside their buffers, and a clear error is the worst."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, note, settings, strategies as st
from test_laws import SPECS
from test_pipeline_sides import Pair
from torch import Tensor

import thinwire
from guarded import guarded, guarded_copy
from kernel_cases import same
from kernel_levels import LEVELS, at
from thinwire import kernels
from thinwire.collectives import MessageError, PeerFailedError
from thinwire.collectives.message import HEADER_BYTES, seal, verify
from thinwire.compressors import GRADIENT_DTYPES, CodecCall, Coded, Piece, Segments, registered
from thinwire.kernels import native
from thinwire.pipeline.message import Batch
from thinwire.testing.laws import encode_one

pytestmark = pytest.mark.usefixtures("one_thread")

CODED = [spec for spec in SPECS if isinstance(thinwire.parse(spec), Coded)]
WAYS = [native.REFERENCE, *LEVELS[:1]] if native.CORE else [native.REFERENCE]
HOSTILE_WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 0x7FC00000, 0x7F800000, 0xFF7FFFFF)
TIMES = int(os.environ.get("THINWIRE_FUZZ", "1"))
"""How many times the usual number of examples: for a search of some hours."""
PARTS = 8
"""Of all specs, each with tests of its own, which may run side by side."""
TOO_LONG_S = 20.0
"""Reading takes milliseconds; a quadratic or exponential reader takes minutes."""
BEFORE = 64
"""Elements before a decoded segment that must stay as they are."""


@st.composite
def damages(draw: st.DrawFn) -> Callable[[Tensor], Tensor]:
    """What becomes of a message on its way: bits flipped, words replaced, cut off, or bytes from nowhere."""
    kind = draw(st.sampled_from(["flip", "words", "noise", "cut", "longer"]))
    places = draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=6))
    what = draw(st.lists(st.sampled_from(HOSTILE_WORDS), min_size=6, max_size=6))
    head = draw(st.booleans())

    def damage(message: Tensor) -> Tensor:
        size, found = message.numel(), message.clone()
        if kind == "noise":
            noise = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(int(places[0] * 2**31)))
            return noise.to(torch.uint8)
        if kind == "cut":
            return found[: int(places[0] * size)]
        if kind == "longer":
            return torch.cat([found, found[: int(places[0] * 65)]])
        for place, word in zip(places, what, strict=False):
            # Counts and flags stand at the front, where damage must do most.
            offset = int(place * (min(size, 64) if head else size))
            if kind == "flip":
                found[offset : offset + 1] ^= 1 << (word % 8)
            elif size >= 4:
                start = min(offset // 4 * 4, size // 4 * 4 - 4)
                found[start : start + 4] = torch.tensor(list(word.to_bytes(4, "little")), dtype=torch.uint8)
        return found

    return damage


def tried(call: Callable[[], object], *errors: type[Exception]) -> tuple[object, str]:
    """What a call gives, or what the error says that it raises: none but these (ValueError)."""
    kinds = errors or (ValueError,)
    try:
        return call(), ""
    except kinds as error:
        said = str(error)
    if not said:
        raise AssertionError("an error without a word")
    return None, said


def decoded(compressor: Coded, message: Tensor, numel: int, dtype: torch.dtype, run: str) -> Tensor | str:
    """What a message sets of guarded memory, or the error."""
    room, canary = guarded((BEFORE + numel) * dtype.itemsize)
    y = room.view(dtype)
    y.fill_(7)
    if run == "add":
        y[BEFORE:] = 1
    segments = Segments.build([Piece("layer", BEFORE, numel, 0, 0)])
    into = guarded_copy(torch.full((BEFORE + numel,), 7.0)) if run == "add up" else y
    calls = {
        "mean": lambda: compressor.mean([message, message], y, CodecCall(segments, scale=0.5)),
        "add up": lambda: compressor.add_up([message, message], y, into, CodecCall(segments, scale=0.5)),
    }
    _, why = tried(
        calls.get(run, lambda: compressor.decode(message, y, CodecCall(segments, scale=0.5), add=run == "add"))
    )
    assert bool((into[:BEFORE] == 7).all()), "it wrote before its segment"
    assert bool((canary == 0xA5).all()), "it wrote before its tensor"
    return why or into[BEFORE:].clone()


def close_blocks(first: Tensor, second: Tensor, block: int = 512) -> bool:
    """Whether signals are equal but for how transforms round: in each block by its largest magnitude.

    Where components are so large that sums on the way may overflow, both signals must have such values.
    """
    eps, limit = torch.finfo(first.dtype).eps, torch.finfo(first.dtype).max / 1024
    for a, b in zip(first.float().split(block), second.float().split(block), strict=True):
        extreme = [not bool((values.abs() < limit).all()) for values in (a, b)]
        if extreme[0] != extreme[1]:
            return False
        if not extreme[0] and float((a - b).abs().max()) > 4 * (eps + 1e-6) * float(a.abs().max()):
            return False
    return True


@pytest.mark.parametrize("part", range(PARTS))
@settings(max_examples=5 * TIMES)
@given(
    numel=st.sampled_from([1, 63, 64, 129, 700]),
    dtype=st.sampled_from(GRADIENT_DTYPES),
    run=st.sampled_from(["set", "add", "mean", "add up"]),
    damage=damages(),
)
def test_damaged_messages_decode_inside_their_buffers(
    part: int, numel: int, dtype: torch.dtype, run: str, damage: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    for spec in CODED[part::PARTS]:
        note(spec)
        compressor = thinwire.parse(spec)
        assert isinstance(compressor, Coded)
        whole, _ = encode_one(compressor, x)
        message = guarded_copy(damage(whole))
        results = []
        for way in WAYS:
            with at(way):
                results.append(decoded(compressor, message, numel, dtype, run))
        needed = numel * dtype.itemsize if compressor.spec_name == "raw" else whole.numel()
        if message.numel() < needed:
            assert all(isinstance(result, str) for result in results), "a message that was cut off was decoded"
        first = results[0]
        for other in results[1:]:
            if isinstance(first, Tensor) and isinstance(other, Tensor):
                agree = close_blocks if "fft(" in spec else same
                assert agree(first, other), "the native core and the reference differ"
            else:
                assert type(first) is type(other)


EXPECTED = {"source": 1, "phase": 2, "step": 77, "digest": 2**63 + 5}


@settings(deadline=None, max_examples=80 * TIMES)
@given(words=st.integers(0, 40), failed=st.booleans(), damage=damages())
def test_a_damaged_frame_is_named_as_such(words: int, failed: bool, damage: Callable[[Tensor], Tensor]) -> None:
    message = torch.zeros(HEADER_BYTES + 4 * words, dtype=torch.uint8)
    message[HEADER_BYTES:] = torch.arange(4 * words, dtype=torch.int64).to(torch.uint8)
    seal(message, **EXPECTED, failed=failed)
    found = guarded_copy(damage(message))
    # Behind the header's fields come bytes that say nothing.
    unsaid = found.numel() == message.numel() and torch.equal(found[:36], message[:36])
    unsaid = unsaid and (failed or torch.equal(found[HEADER_BYTES:], message[HEADER_BYTES:]))
    if unsaid and not failed:
        verify(found, peer=1, **EXPECTED)
        return
    with pytest.raises((MessageError, PeerFailedError)):
        verify(found, peer=1, **EXPECTED)


@pytest.mark.parametrize("forward", ["maxabs(bits=3)", "delta(topk(density=0.2) | maxabs(bits=8))"])
@settings(deadline=None, max_examples=8 * TIMES)
@given(damage=damages())
def test_a_damaged_activation_is_an_error_and_a_hostile_one_stays_inside(
    forward: str, damage: Callable[[Tensor], Tensor]
) -> None:
    pair = Pair(forward=forward)
    for visit in range(2):
        pair.begin(Batch((3, 4), 5), 1)
        tensors = pair.tensors(0, 1, visit)
        message = pair.earlier.message("forward", 0)
        pair.earlier.pack(0, tensors, message, lambda: None)
        arrived = guarded_copy(damage(message))
        if not (arrived.numel() == message.numel() and torch.equal(arrived[:36], message[:36])):
            with pytest.raises((MessageError, PeerFailedError)):
                pair.later.unpack(0, arrived, 0)
        # A peer that wants to can make the checksum right, but no message longer or shorter than is expected.
        hostile = guarded_copy(message)
        payload = damage(message[HEADER_BYTES:])[: message.numel() - HEADER_BYTES]
        hostile[HEADER_BYTES : HEADER_BYTES + payload.numel()] = payload
        total = kernels.checksum(hostile[HEADER_BYTES:])
        hostile[28:36] = torch.tensor(list(total.to_bytes(8, "little")), dtype=torch.uint8)
        pair.later.unpack(0, hostile, 0)


LITERALS = st.recursive(
    st.one_of(
        *(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=8), st.binary(max_size=4)),
        st.sampled_from([2**70, 10**400, -1, 0, 1, 1e308, 5e-324]),
    ),
    lambda inner: st.one_of(
        st.tuples(inner), st.tuples(inner, inner), st.lists(inner, max_size=2), st.sets(st.integers(), max_size=2)
    ),
    max_leaves=3,
).map(repr)
NAMES = sorted(registered())
PARAMETERS = sorted({name for make in registered().values() for name in inspect.signature(make).parameters})
CALLS = st.recursive(
    st.one_of(LITERALS, st.sampled_from(NAMES), st.sampled_from(["nearest", "layer", "bf16", "global", "whole"])),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(" | ".join),
        st.tuples(
            st.sampled_from(NAMES), st.lists(st.tuples(st.sampled_from(["", *PARAMETERS]), inner), max_size=3)
        ).map(lambda call: f"{call[0]}({', '.join(f'{n}={v}' if n else v for n, v in call[1])})"),
    ),
    max_leaves=4,
)


@st.composite
def edited_specs(draw: st.DrawFn) -> str:
    """A spec with something cut out, doubled or put in."""
    text = draw(st.sampled_from(SPECS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 6)))
        middle = draw(st.sampled_from(["", text[start:end] * 2, *"(),=|*-.[{#\\'\n\0", "ef(", "∞", "9" * 30, "**x"]))
        text = text[:start] + middle + text[end:]
    return text


def read_or_refused(read: Callable[[str], object], text: str) -> None:
    """A text is read, soon, or refused in words and with the error that is promised."""
    started = time.perf_counter()
    found, why = tried(lambda: read(text), ValueError, TypeError)
    assert len(why) < 2 * len(text) + 2000
    assert why or read(str(found)) == found, "what was read does not say what it is"
    assert time.perf_counter() - started < TOO_LONG_S


@settings(deadline=None, max_examples=150 * TIMES)
@given(text=st.one_of(st.text(max_size=60), edited_specs(), CALLS))
def test_any_text_is_a_spec_or_refused(text: str) -> None:
    read_or_refused(thinwire.parse, text)


@settings(deadline=None, max_examples=40 * TIMES)
@given(text=st.one_of(st.text(max_size=40), CALLS, st.sampled_from(["lgreco", "kmeans"])), tail=LITERALS)
def test_any_text_is_a_policy_or_refused(text: str, tail: str) -> None:
    read_or_refused(thinwire.policies.parse_policy, text)
    read_or_refused(thinwire.policies.parse_policy, f"lgreco(every={tail}, families={text})")


DEEP = {
    "calls": "ef(" * 90 + "minmax" + ")" * 90,
    "too many calls": "ef(" * 5000,
    "bars": "minmax" + " | minmax" * 3000,
    "signs": "minmax(bits=" + "-" * 20_000 + "1)",
    "brackets": "fft(theta=" + "(" * 150 + "1" + ",)" * 150 + ")",
    "many brackets": "[" * 50_000,
    "a long number": "minmax(bits=" + "9" * 20_000 + ")",
    "a long name": "m" * 200_000,
    "many names": "(".join(["minmx"] * 300) + ")" * 299,
    "many words": "topkk " * 20_000,
    "attributes": "minmax" + ".x" * 5000,
}


def test_no_text_takes_long_or_breaks_the_interpreter() -> None:
    for name, text in DEEP.items():
        for read in (thinwire.parse, thinwire.policies.parse_policy):
            started = time.perf_counter()
            with pytest.raises((ValueError, TypeError)) as refused:
                read(text)
            assert time.perf_counter() - started < TOO_LONG_S, name
            assert len(str(refused.value)) < 30_000, name


def test_nothing_in_a_spec_is_evaluated(tmp_path: Path) -> None:
    witness = tmp_path / "seen"
    for text in (f"__import__('pathlib').Path({str(witness)!r}).touch()", f"minmax(bits=open({str(witness)!r}, 'w'))"):
        for read in (thinwire.parse, thinwire.policies.parse_policy):
            with pytest.raises(ValueError):
                read(text)
    assert not witness.exists()
