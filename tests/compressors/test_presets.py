"""Short names for specs."""

from __future__ import annotations

import pytest

from thinwire import parse
from thinwire.compressors import PRESETS


def test_a_preset_is_the_spec_that_it_stands_for() -> None:
    for name, spec in PRESETS.items():
        assert parse(f" {name} ") == parse(spec)
        assert str(parse(name)) == str(parse(spec))
    assert str(parse("8bit")) == "minmax(bits=8, bucket=128)"
    assert str(parse("4bit")) == "minmax(bits=4, bucket=128)"
    assert str(parse("2bit")).startswith("ef(minmax(bits=2, bucket=128")
    assert str(parse("bf16")) == "cast(bf16)"


MEANT = {
    **dict.fromkeys(("4bits", "int4", "fp4", "bits=3"), "4bit"),
    **dict.fromkeys(("4 bit", "4-bit", "4BIT", "", "  "), "minmax(bits=4, bucket=128)"),
    **dict.fromkeys(("8bits", "fp8", "FP8"), "8bit"),
    **{"3bit": "minmax(bits=3)", "1bit": "onebit", "bfloat16": "bf16", "fp16": "cast(fp16)", "none": "raw"},
    **{"PowerSGD": "powersgd", "MinMax(bits=3)": "minmax(bits=3)", "minmax(bits=3": "minmax(bits=3)"},
    **dict.fromkeys(("topk(1%)", "topk 1%", "topk(ratio=0.01)", "density=0.01"), "topk(density=0.01)"),
    **dict.fromkeys(("rank=8", "powersgd rank 8"), "powersgd(rank=4)"),
    **dict.fromkeys(("ef", "ef()", "4bit+ef", "ef + 4-bit"), "ef(minmax(bits=4, bucket=128))"),
    **dict.fromkeys(("ef(4bit)", "error_feedback(4bit)"), "ef(minmax(bits=4, bucket=128))"),
    **dict.fromkeys(("signsgd", "signSGD", "sign-sgd"), "sign"),
    "ef(signsgd)": "ef(sign)",
    **dict.fromkeys(("dgc", "dgc()"), "dgc(topk(density=0.001))"),
}


def test_what_users_write_instead_is_understood_in_the_error() -> None:
    for written, meant in MEANT.items():
        with pytest.raises(ValueError, match="is not a spec") as error:
            parse(written)
        assert str(error.value).endswith(f"Did you mean {meant!r}?"), written
        parse(meant)
