"""The native core against the reference, bit for bit, and against threads, forks and hostile bytes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kernel_cases import BUCKETS, DTYPES, SIZES, kinds, message, one, same, special, table, values
from kernel_levels import LEVELS, at, needs_native
from thinwire import compat, kernels
from thinwire.kernels import Format, Residual, Table, native, reference

pytestmark = [needs_native, pytest.mark.usefixtures("one_thread")]


def test_the_core_takes_no_tensor_of_another_dtype_size_device_or_layout() -> None:
    """Whatever its caller has checked: it would read or write what lies behind."""
    good = torch.zeros(4, 6)
    assert native.address("x", good, torch.float32, 24) == good.data_ptr()
    assert native.address("x", good.T, torch.float32, 24, (1, 6)) == good.data_ptr()
    for bad in (good.bfloat16(), good.double(), good.to("meta")):
        with pytest.raises(TypeError, match=r"^x must be torch\.float32 on the CPU"):
            native.address("x", bad, torch.float32, 24)
    with pytest.raises(ValueError, match=r"^x has 24 elements, and the native core takes 25"):
        native.address("x", good, torch.float32, 25)
    for bad, strides in ((good.T, None), (good.T, (6, 1)), (good[:, ::2], None)):
        with pytest.raises(ValueError, match=r"^x must .* its strides are"):
            native.address("x", bad, torch.float32, 12, strides)
    for dtype in (torch.float64, torch.uint8):
        with pytest.raises(TypeError, match=r"^x is torch"):
            native.values("x", good.to(dtype), 24)


def all_operations(
    run: ModuleType, spans: Table, x: Tensor, hostile: Tensor, form: Format, *, key: int
) -> dict[str, Tensor]:
    """What every operation makes of an ordinary message and of random bytes, without error feedback and with."""
    sent, out = message(spans, form), message(spans, form)
    run.bucketed_encode(x, spans, sent, form, key=key)
    stored, added, summed, kept = torch.full_like(x, 7.0), x.clone(), torch.full_like(x, 7.0), x.clone()
    run.bucketed_decode(sent, spans, stored, form)
    run.bucketed_decode(hostile, spans, added, form, add=True, scale=0.3)
    run.bucketed_sum([hostile, sent], None, spans, summed, form, scale=0.7)
    own = kept if run is kernels else x  # the native core also in place
    run.bucketed_reduce([sent, sent], own, spans, out, kept, form, scale=1 / 3, key=key + 1)
    got = {"encode": sent, "decode": stored, "add": added, "sum": summed, "reduce": out, "reduced values": kept}
    now, scale = values(x.numel(), 99), (1024.0, 3.0)[key % 2]  # division by powers of two is a case of its own
    twice, again, other = message(spans, form), message(spans, form), x.clone()
    first, second = now.clone() if run is kernels else torch.zeros_like(now), torch.full_like(now, 7.0)
    # The native core also in place.
    run.bucketed_encode(
        x, spans, twice, form, key=key, residual=Residual(first if run is kernels else now, first, scale)
    )
    held = Residual(now, second, scale)
    run.bucketed_reduce([sent, sent], x, spans, again, other, form, scale=1 / 3, key=key + 1, residual=held)
    inside = torch.cat([torch.arange(row.start, row.start + row.numel) for row in spans.segments])
    got |= {"encode, residual": twice, "kept": first[inside]}
    return got | {"reduce, residual": again, "reduced values, residual": other, "kept of reduced": second}


def check_all(
    spans: Table, x: Tensor, form: Format, *, key: int, levels: Sequence[str] = LEVELS, threads: Sequence[int] = (1,)
) -> None:
    """Every operation gives the bits of the reference, at every level and with any number of threads."""
    hostile = torch.randint(0, 256, message(spans, form).shape, dtype=torch.uint8)
    wanted = all_operations(reference, spans, x, hostile, form, key=key)
    for level in levels:
        for count in threads:
            with at(level, count):
                got = all_operations(kernels, spans, x, hostile, form, key=key)
            wrong = [name for name in wanted if not same(wanted[name], got[name])]
            assert not wrong, f"{wrong} differ: {form}, key {key}, {x.dtype}, {level}, {count} threads"


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("bucket", BUCKETS)
def test_same_bits_as_the_reference(bucket: int, bits: int) -> None:
    sizes = (*SIZES, 2 * bucket if 1000 <= bucket <= 20_000 else 300)
    for i, form in enumerate(kinds(bits, bucket)):
        spans = table(sizes, form)
        make = special if (bits + i) % 2 else values
        x = make(spans.num_elements + 3, bits, DTYPES[(bits + i // 2) % 3])
        levels = {LEVELS[0], LEVELS[(i + bits) % len(LEVELS)], LEVELS[-1]}
        check_all(spans, x, form, key=bits << 40 | i, levels=sorted(levels))


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    bits=st.integers(1, 8),
    bucket=st.integers(1, 900),
    gap=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    make=st.sampled_from([values, special]),
    key=st.integers(0, 2**64 - 2),
    kind=st.integers(0, 13),
)
def test_same_bits_for_any_sizes(
    sizes: list[int], bits: int, bucket: int, gap: int, dtype: torch.dtype, make, key: int, kind: int
) -> None:
    forms = kinds(bits, bucket)
    form = forms[kind % len(forms)]
    spans = table(sizes, form, gap=gap)
    x = make(spans.num_elements + 3, key % 1000, dtype)
    check_all(spans, x, form, key=key, levels=(LEVELS[0], LEVELS[-1]))


@pytest.mark.parametrize(
    ("bucket", "numel"), [(128, 300_000), (16_384, 200_001), (999, 150_000), (30_000, 200_001), (2**40, 200_001)]
)
def test_same_bits_for_large_rows_and_any_number_of_threads(bucket: int, numel: int) -> None:
    """Also where a bucket is too wide for one block, and its extrema come from several threads."""
    spans = Table(torch.tensor([[5, numel, 0, 64, 3], [numel + 5, 1000, 0, 64 * 10**5, 4]]))
    for dtype, make in ((torch.float32, values), (torch.float32, special), (torch.bfloat16, special)):
        x = make(spans.num_elements, 1, dtype)
        check_all(spans, x, Format(5, bucket), key=3, threads=(1, 3))
    x = special(spans.num_elements, 1)
    for form in (Format(3, bucket, rounding="shift"), *(Format(4, bucket, scheme) for scheme in ("maxabs", "norm"))):
        check_all(spans, x, form, key=4, threads=(1, 3))
    for form in (Format(4, bucket, "maxabs", clip=2.5), Format(1, bucket, "sides"), Format(1, bucket, "sign")):
        check_all(spans, values(spans.num_elements, 1), form, key=5, threads=(1, 3))


def test_a_layer_cut_at_the_grain_gets_the_codes_of_the_whole() -> None:
    x, cuts, bucket = values(20_000, 0), (0, 6400, 9600, 20_000), 100
    form = Format(4, bucket)
    whole, parts = torch.empty_like(x), torch.empty_like(x)
    rows = [[a, b - a, a, 64 * a, 5] for a, b in pairwise(cuts)]
    for rows_of, y in (([[0, 20_000, 0, 0, 5]], whole), (rows, parts)):
        spans = Table(torch.tensor(rows_of))
        sent = message(spans, form)
        kernels.bucketed_encode(x, spans, sent, form, key=1)
        kernels.bucketed_decode(sent, spans, y, form)
    assert torch.equal(whole, parts)


def test_messages_may_lie_at_any_address() -> None:
    form = Format(3, 100)
    x = values(1000, 0)
    spans = one(1000)
    wanted = message(spans, form)
    kernels.bucketed_encode(x, spans, wanted, form, key=1)
    for shift in (1, 2, 3, 17):
        sent = torch.zeros(wanted.numel() + shift, dtype=torch.uint8)[shift:]
        sent.fill_(0xAB)
        kernels.bucketed_encode(x[: x.numel()], spans, sent, form, key=1)
        assert torch.equal(sent, wanted)
        y, again = torch.zeros(1000), torch.zeros(1000)
        kernels.bucketed_decode(sent, spans, y, form)
        kernels.bucketed_decode(wanted, spans, again, form)
        assert torch.equal(y, again)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bytes_in_buffers_without_an_element_to_spare(level: str, dtype: torch.dtype) -> None:
    """Every content of a message decodes to something; the sanitizer build sees any access past an end."""
    generator = torch.Generator().manual_seed(0)
    for bits in range(1, 9):
        for bucket in (1, 7, 64, 100, 128, 1024, 2**40):
            forms = kinds(bits, bucket)
            for i, numel in enumerate((1, 5, 63, 64, 65, 127, 129, 1000, 2049)):
                spans, form = one(numel), forms[(bits + bucket + i) % len(forms)]
                size = kernels.bucketed_bytes(numel, form)
                sent = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
                x, y, out = values(numel, bits, dtype), torch.zeros(numel, dtype=dtype), torch.empty_like(sent)
                held = Residual(values(numel, 7), torch.empty(numel), 3.0)
                with at(level):
                    kernels.bucketed_encode(x, spans, out, form, key=1)
                    kernels.bucketed_encode(x, spans, out, form, key=1, residual=held)
                    kernels.bucketed_decode(sent, spans, y, form)
                    kernels.bucketed_decode(sent, spans, y, form, add=True, scale=0.5)
                    kernels.bucketed_sum([sent, out], x, spans, y, form)
                    again = out.clone()
                    kernels.bucketed_reduce([sent, out], x, spans, again, y, form, scale=0.5, key=1)
                    held = held._replace(loss_scale=2.0)
                    kernels.bucketed_reduce([sent, out], x, spans, again, y, form, scale=0.5, key=1, residual=held)
                with pytest.raises(ValueError, match="bytes"):
                    kernels.bucketed_decode(sent[:-1], spans, y, form)


@pytest.mark.parametrize("level", LEVELS)
def test_reducing_in_place_without_messages_keeps_nan(level: str) -> None:
    """A bucket whose NaN is found late is coded again, from values that must still be there."""
    form, spans = Format(4, 128), one(4096)
    x = values(4096, 0)
    x[200] = torch.nan
    sent = message(spans, form)
    with at(level):
        kernels.bucketed_reduce([], x, spans, sent, x, form, scale=1.0, key=1)
    assert torch.isnan(x[128:256]).all()
    assert torch.isnan(x).sum() == 128


def test_subnormal_values_count_even_where_torch_flushes_them() -> None:
    x, spans = torch.full((256,), 1e-40), one(256)
    form = Format(4, 128)
    sent = message(spans, form)
    flushes = torch.set_flush_denormal(True)
    try:
        kernels.bucketed_encode(x, spans, sent, form, key=1)
        y = torch.ones(256)
        kernels.bucketed_decode(sent, spans, y, form)
    finally:
        torch.set_flush_denormal(False)
    assert flushes
    assert torch.equal(y, x)


@pytest.mark.parametrize("numel", [0, 4, 4096, 4 * 200_003])
def test_checksum_is_that_of_the_reference(numel: int) -> None:
    sent = torch.randint(0, 256, (numel,), dtype=torch.uint8)
    for name in LEVELS:
        with at(name):
            assert kernels.checksum(sent) == reference.checksum(sent)


def test_threads_come_from_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    assert (compat.parallel_for_address() is not None) == (version >= (2, 10))


def test_the_interpreter_runs_on_while_the_core_works() -> None:
    numel = 2**22
    x, spans = torch.ones(numel), one(numel)
    form = Format(8, 3)
    sent = message(spans, form)
    started: list[float] = []

    def work(times: int) -> None:
        for _ in range(times):
            started.append(time.perf_counter())
            kernels.bucketed_encode(x, spans, sent, form, key=1)

    work(5)
    shortest = min(b - a for a, b in pairwise(started))
    started.clear()
    worker = threading.Thread(target=work, args=(10,))
    worker.start()
    seen = []
    while worker.is_alive():
        seen.append(time.perf_counter())
        time.sleep(shortest / 50)
    # With the interpreter's lock held, nothing at all could be seen in the first half of a call.
    inside = [sum(0 < now - start < shortest / 2 for now in seen) for start in started]
    assert sum(inside) >= 10


def test_bad_addresses_and_counts_do_not_reach_the_core() -> None:
    core = native.core()
    with pytest.raises(TypeError, match="missing argument"):
        core.encode(0, 0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="bits"):
        core.encode(0, 0, 0, 0, 0, 9 | 1 << 32, 128, 0.0, 1, 0, 0, 1.0)
    with pytest.raises(ValueError, match="dtype"):
        core.encode(0, 3, 0, 0, 0, 4 | 15 << 32, 128, 0.0, 1, 0, 0, 1.0)
    with pytest.raises(ValueError, match="rows"):
        core.encode(0, 0, 0, 1, 0, 4 | 15 << 32, 128, 0.0, 1, 0, 0, 1.0)
    with pytest.raises(ValueError, match="too many"):
        core.encode(0, 0, 0, 0, 0, 4 | 15 << 32, 128, 0.0, 1, 0, 0, 1.0, 5)  # pyright: ignore[reportCallIssue]
    with pytest.raises(OverflowError):
        core.encode(-1, 0, 0, 0, 0, 4 | 15 << 32, 128, 0.0, 1, 0, 0, 1.0)
    with pytest.raises(ValueError, match="no such level"):
        core.set_level("x86-64-v9")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_can_encode() -> None:
    """PyTorch's threads do not exist in the child; waiting for them would be for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    numel = 400_000  # so many that the parent uses its threads
    x, spans = values(numel, 0), one(numel)
    form = Format(4, 128)
    sent = message(spans, form)

    def encode(pipe) -> None:  # no torch operation: those hang
        kernels.bucketed_encode(x, spans, sent, form, key=1)
        pipe.send(kernels.checksum(sent))

    receiver, sender = multiprocessing.Pipe(duplex=False)
    encode(sender)
    wanted = receiver.recv()
    child = multiprocessing.get_context("fork").Process(target=encode, args=(sender,))
    child.start()
    try:
        assert receiver.poll(30), "the child hangs"
        assert receiver.recv() == wanted
    finally:
        child.kill()
        child.join()
        torch.set_num_threads(before)


class _Stale(ModuleType):
    """A core that was built before a function was added."""


@pytest.mark.parametrize("interface", [None, "of other sources"])
def test_a_core_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch, interface: str | None) -> None:
    stale = _Stale("stale")
    if interface is not None:
        vars(stale)["interface"] = lambda: interface
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setattr(native, "import_module", lambda name: stale)
    with pytest.warns(RuntimeWarning, match="built from other sources"):
        assert native.load() is None
