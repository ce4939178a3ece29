"""The native core against the reference, bit for bit, and against threads, forks and hostile bytes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernel_cases import BUCKETS, DTYPES, SIZES, kinds, message, one, same, special, table, values
from kernel_levels import LEVELS, at, check, needs_native
from thinwire import kernels
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
            native.segments("x", good.to(dtype), one(24), good)


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
def test_same_bits_as_the_reference(bits: int) -> None:
    """Every kind of format of this width, each with buckets, values and instruction sets that take turns."""
    for i, kind in enumerate(kinds(bits, 1)):
        bucket = BUCKETS[(5 * i + bits) % len(BUCKETS)]
        form = dataclasses.replace(kind, bucket=bucket)
        spans = table((*SIZES, 2 * bucket if 1000 <= bucket <= 20_000 else 300), form)
        make = special if (bits + i) % 2 else values
        x = make(spans.num_elements + 3, bits, DTYPES[(bits + i // 2) % 3])
        levels = {LEVELS[0], LEVELS[(i + bits) % len(LEVELS)]}
        check_all(spans, x, form, key=bits << 40 | i, levels=sorted(levels))


LARGE = [
    (128, 300_000, Format(5)),
    (128, 200_001, Format(1, scheme="sides")),
    (999, 150_000, Format(3, rounding="shift")),
    *((16_384, 200_001, Format(5)), (16_384, 200_001, Format(4, scheme="norm"))),
    *((30_000, 200_001, form) for form in (Format(5), Format(4, scheme="maxabs"), Format(1, scheme="sides"))),
    *((2**40, 200_001, form) for form in (Format(3, rounding="shift"), Format(4, scheme="norm"))),
    *((2**40, 200_001, form) for form in (Format(4, scheme="maxabs", clip=2.5), Format(1, scheme="sign"))),
]


@pytest.mark.parametrize("turn", range(len(LARGE)))
def test_same_bits_for_large_rows_and_any_number_of_threads(turn: int) -> None:
    """Also where a bucket is too wide for one block, and its extrema come from several threads."""
    bucket, numel, kind = LARGE[turn]
    spans = Table(torch.tensor([[5, numel, 0, 64, 3], [numel + 5, 1000, 0, 64 * 10**5, 4]]))
    summed = kind.clip or kind.bits == 1
    x = (values if summed or turn % 2 else special)(spans.num_elements, 1, DTYPES[turn % 2])
    form = dataclasses.replace(kind, bucket=bucket)
    for level, threads in ((LEVELS[0], (1, 3)), (LEVELS[1 + turn % (len(LEVELS) - 1)], (3,))):
        check_all(spans, x, form, key=3, levels=[level], threads=threads)


@pytest.mark.parametrize("level", LEVELS)
def test_random_bytes_in_buffers_without_an_element_to_spare(level: str) -> None:
    """Every content of a message decodes to something; the sanitizer build sees any access past an end."""
    generator = torch.Generator().manual_seed(0)
    sizes, buckets = (1, 5, 63, 64, 65, 127, 129, 1000, 2049), (1, 7, 64, 100, 128, 1024, 2**40)
    for turn, (bits, bucket) in enumerate((bits, bucket) for bits in range(1, 9) for bucket in buckets):
        forms, dtype = kinds(bits, bucket), DTYPES[turn % 3]
        for i, numel in enumerate(sizes[turn % 2 :: 2]):
            spans, form = one(numel), forms[(turn + i) % len(forms)]
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


def test_reducing_in_place_without_messages_keeps_nan() -> None:
    """A bucket whose NaN is found late is coded again, from values that must still be there."""
    form, spans = Format(4, 128), one(4096)
    for level in LEVELS:
        x, sent = values(4096, 0), message(spans, form)
        x[200] = torch.nan
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


def test_checksum_is_that_of_the_reference() -> None:
    for numel in (0, 4, 4096, 4 * 200_003):
        sent = torch.randint(0, 256, (numel,), dtype=torch.uint8)
        for name in LEVELS:
            with at(name):
                assert kernels.checksum(sent) == reference.checksum(sent)


def test_the_interpreter_runs_on_while_the_core_works() -> None:
    """Another thread runs inside of a call, where only who gives the interpreter's lock away lets any run."""
    spans, form, inside, seen = one(2**20), Format(8, 3), threading.Event(), threading.Event()
    x, sent = torch.ones(2**20), message(spans, form)

    def work() -> None:
        for _ in range(200):
            inside.set()
            kernels.bucketed_encode(x, spans, sent, form, key=1)
            inside.clear()
            if seen.is_set():
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    worker = threading.Thread(target=work)
    try:
        worker.start()
        while worker.is_alive():
            if inside.is_set():
                seen.set()
            time.sleep(1e-4)
    finally:
        sys.setswitchinterval(interval)
        worker.join()
    assert seen.is_set()


def test_bad_addresses_and_counts_do_not_reach_the_core() -> None:
    core, form, wrap = native.core(), 4 | 15 << 32, 1 << 32
    samples = ((11, (0, 1, 0, 0)), (5, (0, 1, 11, 1)), (5, (9, 1, 2, 1)), (5, (0, 1, 5, 6)), (5, (-1, 1, 5, 1)))
    for function, arguments, error, says in (
        (core.encode, (0, 0), TypeError, "missing argument"),
        (core.encode, (0, 0, 0, 0, 0, 9 | 1 << 32, 128, 0.0, 1, 0, 0, 1.0), ValueError, "bits"),
        (core.encode, (0, 3, 0, 0, 0, form, 128, 0.0, 1, 0, 0, 1.0), ValueError, "dtype"),
        (core.encode, (0, 0, 0, 1, 0, form, 128, 0.0, 1, 0, 0, 1.0), ValueError, "rows"),
        (core.encode, (0, 0, 0, 0, 0, form, 128, 0.0, 1, 0, 0, 1.0, 5), ValueError, "too many"),
        (core.encode, (-1, 0, 0, 0, 0, form, 128, 0.0, 1, 0, 0, 1.0), OverflowError, None),
        (core.set_level, ("x86-64-v9",), ValueError, "no such level"),
        *((core.abs_histogram, (0, *bad, 0), ValueError, "span") for bad in ((0, -1, 5), (0, 0, 2**31))),
        *((core.pick, (0, 0, 0, 10, k, 1, False, False, *s, 0, 0), ValueError, "numel|sample") for k, s in samples),
        (core.unpack_indices, (0, 10, 11, False, 0), ValueError, "k"),
        *((core.shared_post, wrong, ValueError, None) for wrong in ((0, 1), (4097, 1), (4096, wrap), (4096, -1))),
        (core.shared_post, (4096,), TypeError, None),
        (core.shared_read, (0,), ValueError, None),
        *((core.shared_wait, wrong, ValueError, None) for wrong in ((0, 1, 0, 0), (4096, 1, -1, 0), (4096, 1, 0, -1))),
        (core.shared_wait, (4096, 1, 0, 0, 0), ValueError, None),
        (core.shared_wait, (4096, 1, 1 << 63, 0), OverflowError, None),
        (core.shared_wait, ("x", 1, 0, 0), TypeError, None),
    ):
        with pytest.raises(error, match=says):
            function(*arguments)


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


def test_a_core_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    for interface in ({}, {"interface": lambda: "of other sources"}):
        stale = ModuleType("stale")
        vars(stale).update(interface)
        monkeypatch.setattr(native, "import_module", lambda name, stale=stale: stale)
        with pytest.warns(RuntimeWarning, match="built from other sources"):
            assert native.load() is None


def test_the_environment_chooses_the_core_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "x86-64-v9")
    with pytest.raises(ValueError, match=r"x86-64-v9.*reference"):
        native.load()
    monkeypatch.setenv(native.VARIABLE, native.REFERENCE)
    assert native.load() is None  # and without a warning, which would be an error
    monkeypatch.setattr(native, "CORE", None)
    assert native.cpu_level() == "reference"


def large(seed: int = 0) -> Tensor:
    """512 values of which four add up to more than fp32 holds. Stock DDP, which divides first, has a mean of them."""
    return 1.2e38 * (1.0 + 0.2 * torch.rand(512, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(
    ("form", "ranks"), [(Format(4, 128), 3), (Format(8, 100), 8), (Format(8, 128, "maxabs"), 5)], ids=str
)
def test_large_means_have_the_same_bits_everywhere(form: Format, ranks: int) -> None:
    spans = one(512)

    def run() -> dict[str, Tensor]:
        sent = [torch.zeros(kernels.bucketed_bytes(512, form), dtype=torch.uint8) for _ in range(ranks)]
        for rank, into in enumerate(sent):
            kernels.bucketed_encode(large(rank), spans, into, form, key=rank)
        y, z = torch.empty(512), torch.empty(512)
        kernels.bucketed_sum(sent[1:], large(), spans, y, form, scale=1 / ranks)
        kernels.bucketed_reduce(sent[1:], large(), spans, sent[0], z, form, scale=1 / ranks, key=9)
        assert bool(y.isfinite().all()), "the mean is finite"
        return {"sum": y, "reduced": z, "message": sent[0]}

    check(run)


def test_a_sum_that_is_no_mean_still_overflows() -> None:
    spans, x = one(512), large()
    kernels.raw_sum([x.view(torch.uint8)] * 3, x, spans, y := torch.empty(512), scale=1.0)
    assert bool(y.isinf().all())
