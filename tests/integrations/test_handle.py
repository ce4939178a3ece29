"""What `compress` returns, as people see it, and the wrappers that it looks through."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import run_ranks
from nets import make
from sharded import build, compress


def _shown(rank: int) -> str:
    rules = {"layers.0.weight": "minmax(bits=4)", "layers.1.weight": "raw", "embed.*": "powersgd(rank=4)", "*": "qsgd"}
    wire = thinwire.compress(make(rank), rules, exclude=["layers.2"], min_numel=4000, skip_if_slower=False)
    return repr(wire)


def test_a_wire_is_shown_as_a_table_of_its_layers() -> None:
    text, other = run_ranks(_shown, 2)
    assert text == other
    lines = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert text.startswith("Wire of 2 ranks: 3 of ")
    assert "minmax(bits=4, bucket=128)" in lines["layers.0.weight"]
    assert lines["layers.0.weight"].split()[1] == "9,216"
    assert lines["layers.0.weight"].endswith("7.1x")
    assert "ef(powersgd(rank=4" in lines["embed.weight"]
    assert "raw: excluded" in lines["layers.2.weight"]
    assert "raw: 1 dimension, fewer than 2" in lines["norm.weight"]
    assert lines["layers.1.weight"].split()[2] == "raw"


class _Spectral(nn.Module):
    """A complex layer, of 8 bytes an element, beside one of fp32 and one of bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))
        self.up = nn.Linear(64, 64, bias=False)
        self.down = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)


def _bytes_shown(rank: int) -> str:
    model = DistributedDataParallel(_Spectral())
    options = {"exclude": ["spectrum", "down.weight"], "min_numel": 0, "skip_if_slower": False}
    return repr(thinwire.compress(model, "minmax(bits=4, bucket=128)", **options))


def test_the_bytes_of_a_layer_are_those_of_its_dtype() -> None:
    head, _, *lines = run_ranks(_bytes_shown, 2)[0].splitlines()
    shown = {line.split()[0]: line.split()[-2:] for line in lines}
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


def _resumed(rank: int, spec: str) -> tuple[list[str], str]:
    saved = thinwire.compress(make(rank), "minmax(bits=4)", skip_if_slower=False).gather_state_dict()
    wire = thinwire.compress(make(rank), spec, skip_if_slower=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        wire.load_state_dict(saved)
    return [f"{each.filename.rsplit('/', 1)[-1]}: {each.message}" for each in seen], str(wire.plan["embed.weight"])


def test_a_checkpoint_with_other_compressors_says_so() -> None:
    for (warning,), loaded in run_ranks(_resumed, 2, "minmax(bits=2)"):
        assert warning.startswith("test_handle.py: load_state_dict() continues with the compressors of the checkpoint")
        assert "minmax(bits=4" in warning
        assert loaded.startswith("minmax(bits=4")
    for warned, _ in run_ranks(_resumed, 2, "minmax(bits=4)"):
        assert warned == []


def _declined_elsewhere(rank: int) -> tuple[dict[str, str], str]:
    """What is declined once a checkpoint is loaded, in which one layer is raw, and how it is shown."""
    spec, raw = "minmax(bits=4)", {"embed.weight": "raw", "*": "minmax(bits=4)"}
    saved = thinwire.compress(make(rank), raw, skip_if_slower=False).gather_state_dict()
    wire = thinwire.compress(make(rank), spec, skip_if_slower=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wire.load_state_dict(saved)
        wire.load_state_dict(wire.gather_state_dict())
    return wire.declined, repr(wire)


def test_a_layer_that_is_raw_because_of_the_checkpoint_is_shown_so() -> None:
    for declined, text in run_ranks(_declined_elsewhere, 2):
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


def _compiled(rank: int) -> int:
    torch.manual_seed(0)
    compiled = torch.compile(DistributedDataParallel(nn.Linear(64, 64)), backend="eager")
    wire = thinwire.compress(compiled, skip_if_slower=False)
    compiled(torch.full((2, 64), rank + 1.0)).sum().backward()
    return wire.stats.compressed_steps


def test_a_compiled_model_is_looked_through() -> None:
    assert run_ranks(_compiled, 2) == [1, 1]
