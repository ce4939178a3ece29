"""What `compress` returns, as people see it."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import run_ranks
from nets import make
from sharded import build, compress


class _Spectral(nn.Module):
    """A complex layer, of 8 bytes an element, beside one of fp32 and one of bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))
        self.up = nn.Linear(64, 64, bias=False)
        self.down = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)


def _shown(rank: int) -> list[str]:
    rules = {"layers.0.weight": "minmax(bits=4)", "layers.1.weight": "raw", "embed.*": "powersgd(rank=4)", "*": "qsgd"}
    wire = thinwire.compress(make(rank), rules, exclude=["layers.2"], min_numel=4000, skip_if_slower=False)
    options = {"exclude": ["spectrum", "down.weight"], "min_numel": 0, "skip_if_slower": False}
    spectral = thinwire.compress(DistributedDataParallel(_Spectral()), "minmax(bits=4, bucket=128)", **options)
    return [repr(wire), repr(spectral)]


def test_a_wire_is_shown_as_a_table_of_its_layers_with_bytes_by_their_dtypes() -> None:
    (text, spectral), other = run_ranks(_shown, 2)
    assert [text, spectral] == other
    lines = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert text.startswith("Wire of 2 ranks: 3 of ")
    assert "minmax(bits=4, bucket=128)" in lines["layers.0.weight"]
    assert lines["layers.0.weight"].split()[1] == "9,216"
    assert lines["layers.0.weight"].endswith("7.1x")
    assert "ef(powersgd(rank=4" in lines["embed.weight"]
    assert "raw: excluded" in lines["layers.2.weight"]
    assert "raw: 1 dimension, fewer than 2" in lines["norm.weight"]
    assert lines["layers.1.weight"].split()[2] == "raw"
    head, _, *rows = spectral.splitlines()
    shown = {row.split()[0]: row.split()[-2:] for row in rows}
    assert shown == {"spectrum": ["32,768", "1.0x"], "up.weight": ["2,304", "7.1x"], "down.weight": ["8,192", "1.0x"]}
    assert head.endswith("1 of 3 layers compressed, 43,264 bytes a step, 1.3 times less than uncompressed")


def _nothing(rank: int) -> list[list[str]]:
    warned: list[list[str]] = []
    for attach, rules in (
        (thinwire.compress, "minmax(bits=4)"),
        (thinwire.compress_ddp, "minmax(bits=4)"),
        (thinwire.compress, "raw"),
    ):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            wire = attach(make(rank), rules, min_numel=10**9, skip_if_slower=False)
        assert repr(wire).splitlines()[0].endswith(" bytes a step, uncompressed")
        wire.detach()
        warned.append([f"{each.filename.rsplit('/', 1)[-1]}: {each.message}" for each in seen])
    return warned


def test_a_wire_that_compresses_nothing_warns_unless_it_was_asked_to() -> None:
    for *warned, none in run_ranks(_nothing, 2):
        for (warning,) in warned:
            assert warning.startswith("test_handle.py: nothing is compressed")
            assert "min_numel=0" in warning
        assert none == []


def _resumed(rank: int) -> tuple[list[list[str]], dict[str, str], str]:
    """What is said where a checkpoint has other compressors and where it has the same; what is declined, and shown,
    where one layer is raw in it."""
    spec, told = "minmax(bits=4)", []
    saved = thinwire.compress(make(rank), spec, skip_if_slower=False).gather_state_dict()
    for given in ("minmax(bits=2)", spec):
        wire = thinwire.compress(make(rank), given, skip_if_slower=False)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            wire.load_state_dict(saved)
        told.append([f"{each.filename.rsplit('/', 1)[-1]}: {each.message}" for each in seen])
        assert str(wire.plan["embed.weight"]).startswith(spec[:-1])
    raw = thinwire.compress(make(rank), {"embed.weight": "raw", "*": spec}, skip_if_slower=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wire.load_state_dict(raw.gather_state_dict())
        wire.load_state_dict(wire.gather_state_dict())
    return told, wire.declined, repr(wire)


def test_a_checkpoint_with_other_compressors_says_so_and_its_raw_layers_are_shown() -> None:
    for ((warning,), none), declined, text in run_ranks(_resumed, 2):
        assert warning.startswith("test_handle.py: load_state_dict() continues with the compressors of the checkpoint")
        assert "minmax(bits=4" in warning
        assert none == []
        assert declined == {"embed.weight": "minmax(bits=4, bucket=128)"}
        (line,) = (line for line in text.splitlines() if line.split()[0] == "embed.weight")
        assert "raw: taken from the checkpoint, in place of minmax(bits=4, bucket=128)" in line
        assert "would be slower here" not in text


def _sharded(rank: int, size: int) -> str:
    return repr(compress(build(), "minmax(bits=8)", "minmax(bits=4)"))


def test_a_sharded_wire_is_shown_as_a_table_of_what_is_sent_of_each_layer() -> None:
    text, other = run_ranks(_sharded, 2, 2)
    assert text == other
    assert text.startswith("ShardedWire of 2 ranks: ")
    lines = {line.split()[0]: line for line in text.splitlines()[2:]}
    name = next(name for name, line in lines.items() if name.startswith("weights/") and "minmax" in line)
    assert "minmax(bits=8, bucket=128)" in lines[name]
    gathered, reduced = (lines[line].split()[-2:] for line in (name, name.replace("weights/", "gradients/")))
    assert "minmax(bits=4, bucket=128)" in lines[name.replace("weights/", "gradients/")]
    assert float(reduced[0].replace(",", "")) < float(gathered[0].replace(",", ""))
    assert 3 < float(gathered[1].rstrip("x")) < 4 < float(reduced[1].rstrip("x")) < 8
