"""What `compress` returns, as people see it."""

from __future__ import annotations

import re
import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import on_ranks
from nets import make


class _Spectral(nn.Module):
    """A complex layer, of 8 bytes an element, beside one of fp32 and one of bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))
        self.up = nn.Linear(64, 64, bias=False)
        self.down = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)


@on_ranks(2)
def test_a_wire_is_shown_as_a_table_of_its_layers_with_bytes_by_their_dtypes(rank: int) -> None:
    options = {"exclude": ["spectrum", "down.weight"], "min_numel": 0, "skip_if_slower": False}
    spectral = thinwire.compress(DistributedDataParallel(_Spectral()), "minmax(bits=4, bucket=128)", **options)
    head, _, *rows, memory = repr(spectral).splitlines()
    shown = {row.split()[0]: row.split()[-2:] for row in rows}
    assert shown == {"spectrum": ["32,768", "1.0x"], "up.weight": ["2,304", "7.1x"], "down.weight": ["8,192", "1.0x"]}
    told = rf"  on this rank: 0 bytes .* at most {spectral.memory:,} while .* has \d+ threads and \d+ open files"
    assert re.fullmatch(told, memory)
    assert head.endswith("1 of 3 layers compressed, 43,264 bytes a step, 1.3 times less than uncompressed")


@on_ranks(2)
def test_a_wire_that_compresses_nothing_warns_unless_it_was_asked_to(rank: int) -> None:
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
        assert len(seen) == (rules != "raw")
        for warning in seen:
            assert warning.filename == __file__
            assert re.match("nothing is compressed.*min_numel=0", str(warning.message), re.DOTALL)


@on_ranks(2)
def test_a_checkpoint_with_other_compressors_says_so_and_its_raw_layers_are_shown(rank: int) -> None:
    spec = "minmax(bits=4)"
    saved = thinwire.compress(make(rank), spec, skip_if_slower=False).gather_state_dict()
    for given in ("minmax(bits=2)", spec):
        wire = thinwire.compress(make(rank), given, skip_if_slower=False)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            wire.load_state_dict(saved)
        assert len(seen) == (given != spec)
        for warning in seen:
            assert warning.filename == __file__
            text = str(warning.message)
            assert text.startswith("load_state_dict() continues with the compressors of the checkpoint")
            assert "minmax(bits=4" in text
        assert str(wire.plan["embed.weight"]).startswith(spec[:-1])
    raw = thinwire.compress(make(rank), {"embed.weight": "raw", "*": spec}, skip_if_slower=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wire.load_state_dict(raw.gather_state_dict())
        wire.load_state_dict(wire.gather_state_dict())
    assert wire.declined == {"embed.weight": "minmax(bits=4, bucket=128)"}
    assert "raw: taken from the checkpoint, in place of minmax(bits=4, bucket=128)" in repr(wire)
    assert "would be slower here" not in repr(wire)
