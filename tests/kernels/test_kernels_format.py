"""Sizes, tables, keys and refusals: what all executions share."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading

import pytest
import torch

from kernel_cases import message, one, values
from thinwire import kernels
from thinwire.kernels import Format, Residual, Table, bucketed_bytes, derive_key


def test_keys_are_64_bits_and_depend_on_every_part_and_on_the_order() -> None:
    keys = {derive_key(*parts) for parts in [(), (0,), (0, 0), (1, 2), (2, 1), (1, 2, 0), (-1,), (2**63,)]}
    assert len(keys) == 8
    assert all(0 <= key < 2**64 for key in keys)
    assert derive_key(-1) == derive_key(2**64 - 1)
    assert derive_key(1, 2, 3) == 0x48CF5028B6DF10DB  # pinned: keys are part of the format


def test_table_keeps_a_copy_of_its_rows() -> None:
    rows = torch.tensor([[0, 10, 0, 0, 1]])
    kept = Table(rows)
    rows[0, 1] = 10**9
    assert kept.rows.tolist() == [[0, 10, 0, 0, 1]]
    assert kept.segments[0].numel == 10
    assert kept.on("cpu") is kept.rows
    assert len(Table(torch.empty(0, 5, dtype=torch.int64))) == 0


def test_table_hands_out_what_it_keeps_to_all_threads_that_ask_at_once() -> None:
    """The core is given addresses of it: what is not kept would be freed while the core reads it."""
    spans, kept = one(64), []

    def make() -> object:
        # Meanwhile another thread asks, and is done first.
        other = threading.Thread(target=lambda: kept.append(spans.kept("key", object)))
        other.start()
        other.join()
        return object()

    assert spans.kept("key", make) is kept[0]
    assert spans.kept("key", object) is kept[0]


def test_table_refuses_impossible_rows() -> None:
    for rows, says in (
        ([[0, 10, 0, 0]], "shape"),
        ([[-1, 10, 0, 0, 1]], "start"),
        ([[0, -10, 0, 0, 1]], "numel"),
        ([[0, 10, 64, 0, 1]], "index0"),
        ([[0, 10, 0, 32, 1]], "payload"),
        ([[0, 10, 0, -64, 1]], "payload"),
        ([[0, 10, 0, 0, -1]], "site"),
        ([[0, 2**63 - 1, 0, 0, 1]], "numel"),
        ([[0, 10, 0, 0, 1], [9, 10, 0, 640, 2]], "share elements"),
    ):
        with pytest.raises(ValueError, match=says):
            Table(torch.tensor(rows))
    with pytest.raises(TypeError, match="int64"):
        Table(torch.zeros(1, 5, dtype=torch.int32))


def test_table_refuses_overlapping_payloads_and_misplaced_cuts() -> None:
    rows = Table(torch.tensor([[0, 256, 0, 0, 1], [256, 256, 256, 128, 1]]))
    with pytest.raises(ValueError, match="share payload bytes"):
        rows.extent(Format(4, 128))
    with pytest.raises(ValueError, match="grain of bucket 1000"):
        rows.extent(Format(4, 1000))


def _calls(residual: Residual | None = None, **change: torch.Tensor) -> list:
    """All operations on good arguments, but for those given."""
    spans, form = one(300), Format(4, 128)
    good = {"x": values(300, 0), "message": message(spans, form), "out": message(spans, form), "y": torch.zeros(300)}
    a, coding = {**good, **change}, {"key": 1, "residual": residual}
    return [
        lambda: kernels.bucketed_encode(a["x"], spans, a["message"], form, **coding),
        lambda: kernels.bucketed_decode(a["message"], spans, a["y"], form),
        lambda: kernels.bucketed_sum([a["message"]], a["x"], spans, a["y"], form),
        lambda: kernels.bucketed_reduce([a["message"]], a["x"], spans, a["out"], a["y"], form, scale=0.5, **coding),
    ]


SHORT = bucketed_bytes(300, Format(4, 128)) - 1
BAD = {
    "fp64": ({"x": torch.zeros(300, dtype=torch.float64)}, (0, 2, 3), TypeError, "float64"),
    "fp64 out": ({"y": torch.zeros(300, dtype=torch.float64)}, (1, 2, 3), TypeError, "float64"),
    "integers": ({"x": torch.zeros(300, dtype=torch.int32)}, (0, 2, 3), TypeError, "int32"),
    "two dimensions": ({"x": torch.zeros(3, 100)}, (0, 2, 3), ValueError, "flatten"),
    "strided": ({"y": torch.zeros(600)[::2]}, (1, 2, 3), ValueError, "flatten"),
    "short values": ({"x": torch.zeros(299)}, (0, 2, 3), ValueError, "299 elements"),
    "short result": ({"y": torch.zeros(299)}, (1, 2, 3), ValueError, "299 elements"),
    "truncated": ({"message": torch.zeros(SHORT, dtype=torch.uint8)}, (0, 1, 2, 3), ValueError, "bytes"),
    "short message out": ({"out": torch.zeros(SHORT, dtype=torch.uint8)}, (3,), ValueError, "bytes"),
    "float message": ({"message": torch.zeros(10**4)}, (0, 1, 2, 3), TypeError, "uint8"),
    "strided message": ({"message": torch.zeros(10**4, dtype=torch.uint8)[::2]}, (0, 1, 2, 3), ValueError, "flatten"),
    "elsewhere": ({"message": torch.zeros(10**4, dtype=torch.uint8, device="meta")}, (0, 1, 2, 3), ValueError, "meta"),
}
GOOD = torch.zeros(300)
for residual, error, says in (
    (Residual(GOOD[1:], GOOD), ValueError, "residual.now has 299 elements"),
    (Residual(GOOD, GOOD.bfloat16()), TypeError, "residual.next must be float32"),
    (Residual(GOOD, GOOD.view(3, 100)), ValueError, "residual.next must be 1-D"),
    (Residual(GOOD, GOOD.to("meta")), ValueError, "meta"),
    *((Residual(GOOD, GOOD, scale), ValueError, "loss_scale") for scale in (0.0, math.nan, math.inf)),
):
    BAD[f"residual, {says}, {residual.loss_scale}"] = ({"residual": residual}, (0, 3), error, says)


def test_bad_tensors_are_refused() -> None:
    for change, wrong, error, says in BAD.values():
        for i, call in enumerate(_calls(**change)):
            if i in wrong:
                with pytest.raises(error, match=says):
                    call()
            else:
                call()


def test_checksum_is_the_weighted_sum_of_words() -> None:
    words = [1, 2**32 - 1, 0, 7]
    sent = torch.frombuffer(bytearray(b"".join(w.to_bytes(4, "little") for w in words)), dtype=torch.uint8)
    assert kernels.checksum(sent) == sum(w * (2 * i + 1) for i, w in enumerate(words))
    assert kernels.checksum(sent[:0]) == 0
    with pytest.raises(ValueError, match="multiple of 4"):
        kernels.checksum(sent[:7])
    with pytest.raises(TypeError, match="uint8"):
        kernels.checksum(torch.zeros(4))


def test_without_the_native_core_the_reference_runs_and_says_so_once() -> None:
    code = (
        "import sys; sys.modules['thinwire.kernels._native'] = None\n"
        "import thinwire.kernels as k, thinwire.kernels.native as n, torch\n"
        "assert (k.HAVE_NATIVE, k.cpu_level()) == (False, 'reference')\n"
        "t = k.Table(torch.tensor([[0, 9, 0, 0, 1]])); m = torch.zeros(192, dtype=torch.uint8)\n"
        "f = k.Format(8, 128, rounding='nearest')\n"
        "k.bucketed_encode(torch.arange(9.), t, m, f, key=1)\n"
        "y = torch.zeros(9); k.bucketed_decode(m, t, y, f)\n"
        "assert (y - torch.arange(9.)).abs().max() < .1\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "THINWIRE_CPU_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert "compiler" in done.stderr
