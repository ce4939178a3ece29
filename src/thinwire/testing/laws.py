"""Laws, one function each, which takes a compressor and raises AssertionError where it breaks the law."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.compressors import (
    GRADIENT_DTYPES,
    CodecCall,
    Coded,
    Compressor,
    Key,
    Piece,
    Segments,
    State,
    Summed,
    first_state,
    parse,
    sum_alone,
    used_bytes,
)

_SIZES = (1, 2, 63, 64, 127, 128, 129, 1000, 4097)


def encode_one(
    compressor: Coded, x: Tensor, *, key: int = 0, name: str = "layer", index0: int = 0, state: State | None = None
) -> tuple[Tensor, Segments]:
    """Return the message of a flat tensor as a piece of a layer, and its segments; a first step's without ``state``."""
    segments = Segments.build([Piece(name, 0, x.numel(), index0, 0)])
    message = torch.full((compressor.payload_bytes(x.numel(), x.dtype),), 0xAB, dtype=torch.uint8, device="cpu")
    state = state or first_state(compressor, x, segments)
    compressor.encode(x, message, CodecCall(segments, Key.derive(key), state=state))
    return message, segments


def decode_one(compressor: Coded, message: Tensor, segments: Segments, dtype: torch.dtype) -> Tensor:
    y = torch.empty(segments.pieces[0].numel, dtype=dtype, device="cpu")
    compressor.decode(message, y, CodecCall(segments))
    return y


def _sample(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


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
            assert size == compressor.wire_bytes((numel,), dtype) or compressor.fit((numel,)) != compressor
            assert (size == 0) == (numel == 0)
            x = _sample(numel).to(dtype)
            first, _ = encode_one(compressor, x)
            other = torch.zeros_like(first)
            segments = Segments.build([Piece("layer", 0, numel, 0, 0)])
            compressor.encode(x, other, CodecCall(segments, Key.derive(0), state=first_state(compressor, x, segments)))
            assert torch.equal(_meaningful(compressor, first, x), _meaningful(compressor, other, x))


def _meaningful(compressor: Coded, message: Tensor, x: Tensor) -> Tensor:
    """Return the meaningful bytes of a message: without unused ones of a bounded payload, and padding of a raw one."""
    if compressor.spec_name == "raw":
        return message[: x.numel() * x.element_size()]
    return message[: used_bytes(compressor, message, Piece("layer", 0, x.numel(), 0, 0)) if x.numel() else 0]


def draws_are_counter_based(compressor: Compressor) -> None:
    """Law 3: the same key gives the same bytes, and no global generator is read or moved."""
    x = _sample(4100).view(82, 50)
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
    segments = Segments.build([Piece("layer", 0, x.numel(), 0, 0)])
    state = first_state(compressor, x, segments)
    whole = decode_one(compressor, *encode_one(compressor, x, key=3, state=state), torch.float32)
    for cut in (grain, 2 * grain):
        parts = []
        for start, stop in ((0, cut), (cut, x.numel())):
            cut_out = x[start:stop].contiguous()
            message, segments = encode_one(compressor, cut_out, key=3, index0=start, state=state)
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
            y = compressor.roundtrip(x.view(40, 25)).view(-1)
            assert not bool(torch.isfinite(y[at])), f"{poison} at {at} came out as {float(y[at])}"


def dtypes_are_taken_or_refused(compressor: Compressor) -> None:
    """Law 6: fp32, bf16 and fp16 work and are handled in fp32; complex and integer tensors raise TypeError."""
    x = _sample(1000).view(40, 25).to(torch.bfloat16)
    wide = compressor.roundtrip(x.float(), key=1)
    assert wide.dtype == torch.float32
    assert torch.equal(compressor.roundtrip(x, key=1), wide)
    half = x.to(torch.float16)
    assert torch.equal(compressor.roundtrip(half, key=1), compressor.roundtrip(half.float(), key=1))
    for dtype in (torch.complex64, torch.int32):
        try:
            compressor.roundtrip(torch.ones(1000, dtype=dtype, device="cpu"))
        except TypeError:
            continue
        raise AssertionError(f"{dtype} was taken")


def odd_tensors_work(compressor: Compressor) -> None:
    """Law 9: zeros, constants, single elements, empty and transposed tensors, subnormals and 1e30."""
    assert torch.equal(
        compressor.roundtrip(torch.zeros(1000, dtype=torch.float32, device="cpu")),
        torch.zeros(1000, dtype=torch.float32, device="cpu"),
    )
    assert compressor.roundtrip(torch.zeros(0, dtype=torch.float32, device="cpu")).numel() == 0
    assert compressor.roundtrip(torch.zeros(3, 0, dtype=torch.float32, device="cpu")).shape == (3, 0)
    traits = compressor.traits
    keeps_constants = traits.dense and traits.keeps_constants
    for value in (1.0, -3.5, 1e30, -1e30):
        for numel in _SIZES:
            y = compressor.roundtrip(torch.full((numel,), value, dtype=torch.float32, device="cpu"))
            if abs(value) <= traits.largest:
                assert bool(torch.isfinite(y).all())
                assert bool(((y - value).abs() <= 0.01 * abs(value)).all()) or not keeps_constants
    tiny = torch.tensor([1e-45, 1e-40, -1e-39, 0.0], dtype=torch.float32, device="cpu").repeat(64)
    assert float(compressor.roundtrip(tiny).abs().max()) <= 1e-37
    plain = _sample(1000)
    worst = max(1.0, float((compressor.roundtrip(plain) - plain).abs().max() / plain.abs().max()))
    for size in (1e-43, 1e-40, 1e-36, 1e-32, 1e-30, 1e-28) if isinstance(compressor, Coded) else ():
        small = (plain.double() * size).to(torch.float32)
        error, largest = (compressor.roundtrip(small).double() - small).abs().max(), small.abs().max().double()
        assert float(error) <= 1.01 * worst * float(largest), f"values of {size} are worse than zeros"
    huge = _sample(1000).view(40, 25) * min(1e30, traits.largest / 10)
    assert bool(torch.isfinite(compressor.roundtrip(huge)).all())
    assert compressor.roundtrip(_sample(24).view(2, 3, 4)).shape == (2, 3, 4)
    turned = _sample(1000).view(40, 25).T
    assert torch.equal(compressor.roundtrip(turned), compressor.roundtrip(turned.contiguous()))


def unbiased_if_it_says_so(compressor: Compressor) -> None:
    """The mean over many keys is the input: for every element, on average, and in proportion to the input."""
    if not compressor.traits.unbiased:
        return
    numel, runs = 2048, 400
    x = _sample(numel).double()
    outcomes = torch.stack([compressor.roundtrip(x.float(), key=key) for key in range(runs)]).double()
    off = outcomes.mean(0) - x
    largest = float((outcomes - x).abs().max())
    # An outcome rarer than one in `runs` may not have been seen: its share is allowed for.
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
    for size in (0, 1, min(64, needed - 1), needed // 2, needed - 1):
        try:
            compressor.decode(
                message[:size].clone(), torch.empty(1000, dtype=torch.float32, device="cpu"), CodecCall(segments)
            )
        except ValueError:
            continue
        raise AssertionError(f"a message of {size} bytes instead of {needed} was decoded")


def random_bytes_decode_to_something(compressor: Compressor) -> None:
    """Any bytes of the right size decode, to whatever values, and change nothing but the segment."""
    if not isinstance(compressor, Coded):
        return
    generator = torch.Generator().manual_seed(0)
    segments = Segments.build([Piece("layer", 128, 1000, 0, 0)])
    for trial in range(20):
        size = compressor.payload_bytes(1000, torch.float32)
        message = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator, device="cpu")
        if trial % 2:
            message[:4] = 0  # where some formats flag NaN, so that the rest is read
        y = torch.full((2000,), 7.0, dtype=torch.float32, device="cpu")
        compressor.decode(message, y, CodecCall(segments))
        assert bool((y[:128] == 7).all())
        assert bool((y[1128:] == 7).all())


def reduce_is_the_encoded_mean(compressor: Compressor) -> None:
    """Laws 1 and 8: the owner ends with what its message decodes to, and that is the mean up to one coding."""
    if not isinstance(compressor, Coded) or not compressor.traits.plain_sum:
        return
    num_ranks = 4
    inputs, messages, segments = _of_ranks(compressor, 3000, num_ranks)
    own, messages = inputs[0].clone(), messages[1:]
    out = torch.zeros_like(messages[0])
    expected = own.clone()
    for message in messages:
        compressor.decode(message, expected, CodecCall(segments), add=True)
    expected *= 1 / num_ranks
    state = first_state(compressor, expected, segments)
    compressor.reduce(messages, own, out, own, CodecCall(segments, Key.derive(99), state=state, scale=1 / num_ranks))
    assert torch.equal(decode_one(compressor, out, segments, torch.float32), own)
    again = torch.zeros_like(out)
    state = first_state(compressor, expected, segments)
    compressor.encode(expected, again, CodecCall(segments, Key.derive(99), state=state))
    assert torch.equal(decode_one(compressor, again, segments, torch.float32), own)


def mean_is_that_of_what_was_sent(compressor: Compressor) -> None:
    """Law 8: a rank that gathers all messages ends with the mean of their decoded values."""
    if not isinstance(compressor, Coded) or not compressor.traits.plain_mean:
        return
    for dtype in GRADIENT_DTYPES:
        # Raw values are decoded in the dtype that they were sent in.
        sent = dtype if compressor.spec_name == "raw" else torch.float32
        _, messages, segments = _of_ranks(compressor, 3000, 3, sent)
        y = torch.empty(3000, dtype=dtype, device="cpu")
        compressor.mean(messages, y, CodecCall(segments, scale=1 / 3))
        expected = torch.stack([decode_one(compressor, m, segments, sent).float() for m in messages]).sum(0) / 3
        assert torch.allclose(y.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def _of_ranks(
    compressor: Coded, numel: int, num_ranks: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor], Segments]:
    """Return the values of some ranks, and the messages that they send of them in ``dtype``."""
    inputs = [_sample(numel, seed) for seed in range(num_ranks)]
    if compressor.spec_name == "raw":
        # Raw values are decoded in the dtype that they were sent in; three of them add up exactly.
        inputs = [x.bfloat16().float() for x in inputs]
    segments = Segments.build([Piece("layer", 0, numel, 0, 0)])
    state = first_state(compressor, inputs[0], segments)
    coded = [encode_one(compressor, x.to(dtype), key=rank, state=state) for rank, x in enumerate(inputs)]
    return inputs, [message for message, _ in coded], segments


def what_is_not_sent_is_kept(compressor: Compressor) -> None:
    """Law 7: with error feedback, a step's residual is its input and the residual before, less its output, times
    ``decay``. Without a decay inputs and residuals before equal outputs and residuals after, summed over steps."""
    if not any(slot.name == "residual" for slot in compressor.slots):
        return
    shape, scale = (50, 40), 64.0
    piece = Piece("layer", 0, 2000, 0, 0, shape)
    segments = Segments.build([piece])
    state = first_state(compressor, _sample(2000) * scale, segments, scale)
    assert state is not None
    decay = getattr(compressor, "decay", 1.0)
    expected, largest = torch.zeros(2000, dtype=torch.float32, device="cpu"), 0.0
    for step in range(5):
        x = _sample(2000, step) * scale
        expected += x / scale
        largest = max(largest, float(expected.abs().max()))
        if isinstance(compressor, Coded):
            message = torch.zeros(compressor.payload_bytes(2000, x.dtype), dtype=torch.uint8, device="cpu")
            compressor.encode(x, message, CodecCall(segments, Key.derive(step), state=state))
            expected -= decode_one(compressor, message, segments, torch.float32) / scale
        elif isinstance(compressor, Summed):
            sum_alone(compressor, x, piece, x.dtype, key=Key.derive(step), state=state)
            expected -= x / scale
        expected *= decay
        state = state.swapped()
    assert float((expected - state.now["residual"]).abs().max()) <= 1e-4 * largest


def defaults_of_pytorch_change_nothing(compressor: Compressor) -> None:
    """``torch.set_default_dtype`` and ``torch.set_default_device`` are the user's: they change no value and no byte."""
    x = _sample(4100).view(82, 50)
    expected = compressor.roundtrip(x, key=5)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with _defaults(dtype, "meta"):
            assert torch.equal(compressor.roundtrip(x, key=5), expected), f"with {dtype} as the default"
            for law in (reduce_is_the_encoded_mean, mean_is_that_of_what_was_sent, what_is_not_sent_is_kept):
                law(compressor)


@contextmanager
def _defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def the_loss_scale_cancels(compressor: Compressor) -> None:
    """A gradient times the loss scale, decoded and divided by it, is the decoded gradient. Or it overflows to values
    that are not finite, which shows that the scale is too large."""
    if not isinstance(compressor, Coded | Summed):
        return
    numel = 1000
    piece = Piece("layer", 0, numel, 0, 0, (40, 25))
    segments = Segments.build([piece])

    def received(x: Tensor, loss_scale: float) -> Tensor:
        x = x * loss_scale
        state = first_state(compressor, x, segments, loss_scale) or State({}, {}, loss_scale)
        if isinstance(compressor, Coded):
            message = torch.zeros(compressor.payload_bytes(numel, x.dtype), dtype=torch.uint8, device="cpu")
            compressor.encode(x, message, CodecCall(segments, Key.derive(7), state=state))
            return decode_one(compressor, message, segments, torch.float32) / loss_scale
        sum_alone(compressor, x, piece, x.dtype, key=Key.derive(7), state=state)
        return x / loss_scale

    for size in (1e-3, 0.3):
        x = _sample(numel) * size
        once = received(x, 1.0)
        for loss_scale in (2.0**-4, 2.0**10, 2.0**16):
            scaled = received(x, loss_scale)
            if not bool(torch.isfinite(scaled).all()) and float(x.abs().max()) * loss_scale > compressor.traits.largest:
                continue
            assert float((scaled - once).norm()) <= 1e-3 * float(x.norm()), f"at a loss scale of {loss_scale}"


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
    mean_is_that_of_what_was_sent,
    what_is_not_sent_is_kept,
    defaults_of_pytorch_change_nothing,
    the_loss_scale_cancels,
)
