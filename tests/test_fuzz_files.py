"""Files that anybody may have written: stores on disk and checkpoints are taken, or refused in words."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_disk import ROWS, filled, make
from test_fuzz import TIMES, tried
from test_store import FORM
from test_wire import MIXED, gradients, make as make_wire, step_on
from torch import Tensor

from harness import run_threads
from states import resealed
from thinwire.store import DiskStore, MemoryStore, Rows, StoreError

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of eight records, closed."""
    folder = tmp_path_factory.mktemp("fuzz") / "store"
    filled(folder).close()
    return folder


def flipped(data: bytes, places: list[float], bits: list[int]) -> bytes:
    found = bytearray(data)
    for place, bit in zip(places, bits, strict=False):
        found[int(place * len(found))] ^= 1 << bit
    return bytes(found)


PLACES = st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=8)
BITS = st.lists(st.integers(0, 7), min_size=8, max_size=8)


@settings(deadline=None, max_examples=30 * TIMES)
@given(data=st.data(), places=PLACES, bits=BITS)
def test_a_damaged_manifest_is_refused_or_says_the_same(whole: Path, data: st.DataObject, places, bits) -> None:
    text = (whole / "manifest.json").read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "field", "other"]))
    if kind == "flip":
        found = flipped(text, places, bits)
    elif kind == "cut":
        found = text[: int(places[0] * len(text))]
    elif kind == "field":
        fields = json.loads(text)
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
        found = json.dumps(fields).encode()
    else:
        found = json.dumps(data.draw(JSON)).encode()
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "store"
        shutil.copytree(whole, copied)
        (copied / "manifest.json").write_bytes(found)
        store, why = tried(lambda: make(copied), StoreError)
        if not isinstance(store, DiskStore):
            assert str(copied) in why
            return
        said, meant = json.loads(found), json.loads(text)
        assert {name: said[name] for name in meant} == meant, "a manifest of another store was taken"
        store.close()


@settings(deadline=None, max_examples=15 * TIMES)
@given(which=st.sampled_from(["index.bin", "records.bin"]), places=PLACES, bits=BITS)
def test_damaged_records_and_rows_are_found(whole: Path, which: str, places: list[float], bits: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "store"
        shutil.copytree(whole, copied)
        data = (copied / which).read_bytes()
        damaged = flipped(data, places, bits)
        (copied / which).write_bytes(damaged)
        store, other = make(copied), make(whole)
        lost = set(store.verify(range(8)))
        for sample in store.samples:
            assert sample in other
            assert store.checksum(sample) == other.checksum(sample), "a damaged record counts as whole"
        assert not lost & set(store.samples)
        store.close()
        other.close()


def changed(state: dict[str, Tensor], draw: Callable) -> dict[str, Tensor]:
    """A state with one or two of its entries missing, of other sizes, dtypes or values, or no tensors at all."""
    found = dict(state)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(found))) if found else "x"
        value = found.get(name)
        kind = draw(st.sampled_from(["missing", "noise", "shorter", "longer", "dtype", "shape", "object", "extra"]))
        if kind == "missing":
            found.pop(name, None)
        elif kind == "extra":
            found[draw(st.sampled_from(["x", "rank7/residual/a.weight", "a/b/c"]))] = torch.zeros(3)
        elif kind == "object":
            found[name] = draw(st.sampled_from([None, 3, "text", [1, 2]]))
        elif isinstance(value, Tensor):
            found[name] = _changed(value, kind, draw)
    return found


def _changed(value: Tensor, kind: str, draw: Callable) -> Tensor:
    flat = value.reshape(-1)
    if kind == "noise" and flat.numel():
        number = draw(st.sampled_from([-(2**63), 2**63 - 1, -1, 0, 1, 255]))
        noisy = flat.clone()
        place = draw(st.integers(0, flat.numel() - 1))
        noisy[place : place + 3] = number % 256 if flat.dtype == torch.uint8 else number
        return noisy.view(value.shape)
    if kind == "shorter":
        return flat[: flat.numel() // 2].clone()
    if kind == "longer":
        return torch.cat([flat, flat, torch.zeros(1, dtype=flat.dtype)])
    if kind == "dtype":
        other = draw(st.sampled_from([torch.float32, torch.bool, torch.uint8, torch.int64, torch.complex64]))
        return value.to(other) if not value.is_complex() else value.real
    return value.reshape(1, *value.shape) if kind == "shape" else value


@settings(deadline=None, max_examples=30 * TIMES)
@given(data=st.data(), on_disk=st.booleans())
def test_a_changed_state_of_a_store_is_refused_or_readable(whole: Path, data: st.DataObject, on_disk: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if on_disk:
            shutil.copytree(whole, Path(folder) / "store")
            store = make(Path(folder) / "store")
        else:
            store = MemoryStore(FORM, 8, None)
            store.save(torch.zeros(8, FORM.record_bytes, dtype=torch.uint8), ROWS, 0)
        state = store.state_dict()
        _, why = tried(lambda: store.load_state_dict(changed(state, data.draw)), StoreError)
        if not why:
            store.verify(store.samples)
            store.digest()
            store.load(Rows.uniform(store.samples, 5))
        store.close()


@pytest.mark.filterwarnings("ignore:load_state_dict.. continues with the compressors of the checkpoint")
def test_a_changed_checkpoint_is_refused_or_goes_on() -> None:
    def run(transport) -> None:
        wire = make_wire(transport, MIXED)
        step_on(wire, gradients(0, 0))
        state = wire.state_dict()
        plan = str(bytes(state["plan"].tolist()), "utf-8")

        @settings(deadline=None, max_examples=40 * TIMES, database=None)
        @given(data=st.data())
        def load(data: st.DataObject) -> None:
            found = changed(copy.copy(state), data.draw)
            if data.draw(st.booleans()):
                old, new = data.draw(
                    st.sampled_from(
                        [
                            ("ef(minmax(bits=2", "ef(minmax(bits=3"),
                            ("raw", "powersgd(rank=3)"),
                            ("minmax", "nothing"),
                            ("bits=2", "bits='2'"),
                            ("raw", "globaltopk(density=0.1)"),
                            (plan, "[" * 50_000),
                            (plan, '{"a.weight": 1}'),
                        ]
                    )
                )
                found["plan"] = torch.frombuffer(bytearray(plan.replace(old, new).encode()), dtype=torch.uint8)
            if data.draw(st.booleans()):
                # As who changes a file on purpose would.
                found = resealed(found)
            tried(lambda: wire.load_state_dict(found))
            wire.load_state_dict(state)
            assert all(torch.equal(value, state[name]) for name, value in wire.state_dict().items())

        load()

    run_threads(run, 1, timeout_s=30.0 * TIMES)
