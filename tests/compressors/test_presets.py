"""Short names for specs."""

from __future__ import annotations

import pytest

from thinwire import parse
from thinwire.compressors import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_spec_that_it_stands_for(name: str) -> None:
    assert parse(f" {name} ") == parse(PRESETS[name])
    assert str(parse(name)) == str(parse(PRESETS[name]))


def test_presets_are_what_their_names_say() -> None:
    assert str(parse("8bit")) == "minmax(bits=8, bucket=128)"
    assert str(parse("4bit")) == "minmax(bits=4, bucket=128)"
    assert str(parse("2bit")).startswith("ef(minmax(bits=2, bucket=128")
    assert str(parse("bf16")) == "cast(bf16)"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *((written, "4bit") for written in ("4bits", "int4", "fp4", "bits=3")),
        *((written, "minmax(bits=4, bucket=128)") for written in ("4 bit", "4-bit", "4BIT", "", "  ")),
        *((written, "8bit") for written in ("8bits", "fp8", "FP8")),
        ("3bit", "minmax(bits=3)"),
        ("1bit", "onebit"),
        ("bfloat16", "bf16"),
        ("fp16", "cast(fp16)"),
        ("none", "raw"),
        ("PowerSGD", "powersgd"),
        ("MinMax(bits=3)", "minmax(bits=3)"),
        ("minmax(bits=3", "minmax(bits=3)"),
        *((written, "topk(density=0.01)") for written in ("topk(1%)", "topk 1%", "topk(ratio=0.01)", "density=0.01")),
        *((written, "powersgd(rank=4)") for written in ("rank=8", "powersgd rank 8")),
        *((written, "ef(minmax(bits=4, bucket=128))") for written in ("ef", "ef()", "4bit+ef", "ef + 4-bit")),
        *((written, "ef(minmax(bits=4, bucket=128))") for written in ("ef(4bit)", "error_feedback(4bit)")),
        *((written, "sign") for written in ("signsgd", "signSGD", "sign-sgd")),
        ("ef(signsgd)", "ef(sign)"),
        *((written, "dgc(topk(density=0.001))") for written in ("dgc", "dgc()")),
    ],
)
def test_what_users_write_instead_is_understood_in_the_error(written: str, meant: str) -> None:
    with pytest.raises(ValueError, match="is not a spec") as error:
        parse(written)
    assert str(error.value).endswith(f"Did you mean {meant!r}?")
    parse(meant)
