"""One function per law. Each takes a compressor and raises AssertionError where it breaks the law."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.compressors import GRADIENT_DTYPES, Coded, Compressor, Piece, Segments, State, Summed, parse
from thinwire.kernels import derive_key

_SIZES = (1, 2, 63, 64, 127, 128, 129, 1000, 4097)


def encode_one(
    compressor: Coded, x: Tensor, *, key: int = 0, name: str = "layer", index0: int = 0
) -> tuple[Tensor, Segments]:
    """The message of one flat tensor as one piece of a layer, and its segments."""
    segments = Segments.build([Piece(name, 0, x.numel(), index0, 0)])
    message = torch.full((compressor.payload_bytes(x.numel(), x.dtype),), 0xAB, dtype=torch.uint8)
    compressor.encode(x, segments, message, key=derive_key(key), state=new_state(compressor, x.numel()))
    return message, segments


def new_state(compressor: Compressor, numel: int, loss_scale: float = 1.0) -> State | None:
    """The state of a first step of a flat tensor of ``numel`` elements; None if the compressor asks for none."""
    if not compressor.slots:
        return None
    now, after = ({slot.name: torch.zeros(numel, dtype=slot.dtype) for slot in compressor.slots} for _ in range(2))
    return State(now, after, loss_scale)


def decode_one(compressor: Coded, message: Tensor, segments: Segments, dtype: torch.dtype) -> Tensor:
    """What the message of one piece decodes to, in ``dtype``."""
    y = torch.empty(segments.pieces[0].numel, dtype=dtype)
    compressor.decode(message, segments, y)
    return y


def _sample(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def spec_gives_it_back(compressor: Compressor) -> None:
    """``parse(str(c)) == c``."""
    again = parse(str(compressor))
    assert again == compressor, f"parse({str(compressor)!r}) is {again!r}"
    assert hash(again) == hash(compressor)


def size_is_known_beforehand(compressor: Compressor) -> None:
    """Law 2: bytes are a function of the shape, and encoding writes every one of them."""
    if not isinstance(compressor, Coded):
        return
    for dtype in GRADIENT_DTYPES:
        for numel in (0, *_SIZES):
            size = compressor.payload_bytes(numel, dtype)
            assert size == compressor.wire_bytes((numel,), dtype)
            assert (size == 0) == (numel == 0)
            x = _sample(numel).to(dtype)
            first, _ = encode_one(compressor, x)
            other = torch.zeros_like(first)
            segments = Segments.build([Piece("layer", 0, numel, 0, 0)])
            compressor.encode(x, segments, other, key=derive_key(0), state=new_state(compressor, numel))
            assert torch.equal(_meaningful(compressor, first, x), _meaningful(compressor, other, x))


def _meaningful(compressor: Coded, message: Tensor, x: Tensor) -> Tensor:
    """Raw payloads are padded to 64 bytes; what stands in the padding means nothing."""
    return message[: x.numel() * x.element_size()] if compressor.spec_name == "raw" else message


def draws_are_counter_based(compressor: Compressor) -> None:
    """Law 3: the same key gives the same bytes, and no global generator is read or moved."""
    x = _sample(4097)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = compressor.roundtrip(x, key=5)
    assert torch.equal(torch.get_rng_state(), before), "the global generator moved"
    torch.manual_seed(2)
    assert torch.equal(compressor.roundtrip(x, key=5), first), "the result depends on more than the key"


def cutting_changes_no_bit(compressor: Compressor) -> None:
    """Law 3: a layer cut at the grain decodes to the same values as the whole layer."""
    if not isinstance(compressor, Coded) or compressor.grain is None:
        return
    grain = compressor.grain
    x = _sample(3 * grain + 17)
    whole = decode_one(compressor, *encode_one(compressor, x, key=3), torch.float32)
    for cut in (grain, 2 * grain):
        parts = []
        for start, stop in ((0, cut), (cut, x.numel())):
            message, segments = encode_one(compressor, x[start:stop].contiguous(), key=3, index0=start)
            parts.append(decode_one(compressor, message, segments, torch.float32))
        assert torch.equal(torch.cat(parts), whole)


def layers_draw_apart(compressor: Compressor) -> None:
    """Law 3: two layers with the same values do not share their draws."""
    if not isinstance(compressor, Coded) or not _is_random(compressor):
        return
    x = _sample(4096)
    one, segments = encode_one(compressor, x, name="one")
    two, _ = encode_one(compressor, x, name="two")
    a, b = (decode_one(compressor, m, segments, torch.float32) for m in (one, two))
    assert not torch.equal(a, b)


def _is_random(compressor: Compressor) -> bool:
    x = _sample(4096)
    return not torch.equal(compressor.roundtrip(x, key=1), compressor.roundtrip(x, key=2))


def non_finite_is_not_laundered(compressor: Compressor) -> None:
    """Law 5: where NaN or Inf went in, something that is not finite comes out."""
    for poison in (math.nan, math.inf, -math.inf):
        for at in (0, 100, 999):
            x = _sample(1000)
            x[at] = poison
            y = compressor.roundtrip(x)
            assert not bool(torch.isfinite(y[at])), f"{poison} at {at} came out as {float(y[at])}"


def dtypes_are_taken_or_refused(compressor: Compressor) -> None:
    """Law 6: fp32, bf16 and fp16 work and are handled in fp32; complex and integer tensors raise TypeError."""
    x = _sample(1000).to(torch.bfloat16)
    wide = compressor.roundtrip(x.float(), key=1)
    assert wide.dtype == torch.float32
    assert torch.equal(compressor.roundtrip(x, key=1), wide)
    half = x.to(torch.float16)
    assert torch.equal(compressor.roundtrip(half, key=1), compressor.roundtrip(half.float(), key=1))
    for dtype in (torch.complex64, torch.int32):
        try:
            compressor.roundtrip(torch.ones(1000, dtype=dtype))
        except TypeError:
            continue
        raise AssertionError(f"{dtype} was taken")


def odd_tensors_work(compressor: Compressor) -> None:
    """Law 9: zeros, constants, single elements, empty tensors, subnormals and 1e30."""
    assert torch.equal(compressor.roundtrip(torch.zeros(1000)), torch.zeros(1000))
    assert compressor.roundtrip(torch.zeros(0)).numel() == 0
    assert compressor.roundtrip(torch.zeros(3, 0)).shape == (3, 0)
    for value in (1.0, -3.5, 1e30, -1e30):
        for numel in _SIZES:
            y = compressor.roundtrip(torch.full((numel,), value))
            if abs(value) <= compressor.largest:
                assert bool(torch.isfinite(y).all())
                assert bool(((y - value).abs() <= 0.01 * abs(value)).all()) or not compressor.dense
    tiny = torch.tensor([1e-45, 1e-40, -1e-39, 0.0]).repeat(64)
    assert float(compressor.roundtrip(tiny).abs().max()) <= 1e-37
    huge = _sample(1000) * min(1e30, compressor.largest / 10)
    assert bool(torch.isfinite(compressor.roundtrip(huge)).all())
    assert compressor.roundtrip(_sample(24).view(2, 3, 4)).shape == (2, 3, 4)


def unbiased_if_it_says_so(compressor: Compressor) -> None:
    """The mean over many keys is the input: for every element, on average, and in proportion to the input."""
    if not compressor.unbiased:
        return
    numel, runs = 2048, 400
    x = _sample(numel).double()
    outcomes = torch.stack([compressor.roundtrip(x.float(), key=key) for key in range(runs)]).double()
    off = outcomes.mean(0) - x
    largest = float((outcomes - x).abs().max())
    # An outcome rarer than one in `runs` may not have been seen at all: its share is allowed for.
    per_element = 5 * outcomes.std(0) / math.sqrt(runs) + 12 * largest / runs
    assert bool((off.abs() <= per_element).all()), "an element's mean is off"
    overall = 5 * largest / math.sqrt(numel * runs) + 2.0**-16 * largest
    assert abs(float(off.mean())) <= overall, "the mean over all elements is off"
    slope = float((off * x).mean() / (x * x).mean())
    assert abs(slope) <= overall, "values are shrunk or stretched"


def short_messages_raise(compressor: Compressor) -> None:
    """A truncated message raises ValueError and is never read past its end."""
    if not isinstance(compressor, Coded):
        return
    x = _sample(1000)
    message, segments = encode_one(compressor, x)
    needed = x.numel() * x.element_size() if compressor.spec_name == "raw" else message.numel()
    for size in (0, 1, 64, needed // 2, needed - 1):
        try:
            compressor.decode(message[:size].clone(), segments, torch.empty(1000))
        except ValueError:
            continue
        raise AssertionError(f"a message of {size} bytes instead of {needed} was decoded")


def random_bytes_decode_to_something(compressor: Compressor) -> None:
    """Any bytes of the right size decode, to whatever values, and change nothing but the segment."""
    if not isinstance(compressor, Coded):
        return
    generator = torch.Generator().manual_seed(0)
    segments = Segments.build([Piece("layer", 128, 1000, 0, 0)])
    for _ in range(20):
        size = compressor.payload_bytes(1000, torch.float32)
        message = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        y = torch.full((2000,), 7.0)
        compressor.decode(message, segments, y)
        assert bool((y[:128] == 7).all())
        assert bool((y[1128:] == 7).all())


def reduce_is_the_encoded_mean(compressor: Compressor) -> None:
    """Laws 1 and 8: the owner ends with what its message decodes to, and that is the mean up to one coding."""
    if not isinstance(compressor, Coded):
        return
    numel, num_ranks = 3000, 4
    inputs = [_sample(numel, seed) for seed in range(num_ranks)]
    coded = [encode_one(compressor, x, key=rank) for rank, x in enumerate(inputs[1:])]
    messages, segments = [message for message, _ in coded], coded[0][1]
    own = inputs[0].clone()
    out = torch.zeros_like(messages[0])
    expected = own.clone()
    for message in messages:
        compressor.decode(message, segments, expected, add=True)
    expected *= 1 / num_ranks
    state = new_state(compressor, numel)
    compressor.reduce(messages, own, segments, out, own, key=derive_key(99), scale=1 / num_ranks, state=state)
    assert torch.equal(decode_one(compressor, out, segments, torch.float32), own)
    again = torch.zeros_like(out)
    compressor.encode(expected, segments, again, key=derive_key(99), state=new_state(compressor, numel))
    assert torch.equal(decode_one(compressor, again, segments, torch.float32), own)


def what_is_not_sent_is_kept(compressor: Compressor) -> None:
    """Law 7: with error feedback, inputs and residuals before equal outputs and residuals after, summed over steps."""
    if not compressor.slots:
        return
    numel, scale = 2000, 64.0
    state = new_state(compressor, numel, loss_scale=scale)
    assert state is not None
    sent, given = torch.zeros(numel), torch.zeros(numel)
    for step in range(5):
        x = _sample(numel, step) * scale
        given += x / scale
        if isinstance(compressor, Coded):
            segments = Segments.build([Piece("layer", 0, numel, 0, 0)])
            message = torch.zeros(compressor.payload_bytes(numel, x.dtype), dtype=torch.uint8)
            compressor.encode(x, segments, message, key=derive_key(step), state=state)
            sent += decode_one(compressor, message, segments, torch.float32) / scale
        elif isinstance(compressor, Summed):
            piece = Piece("layer", 0, numel, 0, 0)
            for round in range(compressor.rounds):
                part = torch.empty(compressor.part_numel(round, numel), dtype=compressor.part_dtype(x.dtype))
                compressor.part(round, x, piece, part, key=derive_key(step), scale=1.0, state=state)
                compressor.absorb(round, part, x, piece, key=derive_key(step), state=state)
            sent += x / scale
        state = State(state.next, state.now, scale)
    kept = state.now["residual"]
    assert float((given - sent - kept).abs().max()) <= 1e-4 * float(given.abs().max() + kept.abs().max())


LAWS: tuple[Callable[[Compressor], None], ...] = (
    spec_gives_it_back,
    size_is_known_beforehand,
    draws_are_counter_based,
    cutting_changes_no_bit,
    layers_draw_apart,
    non_finite_is_not_laundered,
    dtypes_are_taken_or_refused,
    odd_tensors_work,
    unbiased_if_it_says_so,
    short_messages_raise,
    random_bytes_decode_to_something,
    reduce_is_the_encoded_mean,
    what_is_not_sent_is_kept,
)
