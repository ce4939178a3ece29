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


def test_a_preset_is_no_part_of_another_spec() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'ef\(minmax\(bits=4, bucket=128\)\)'"):
        parse("ef(4bit)")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *((written, "4bit") for written in ("4bits", "4 bit", "4-bit", "4BIT", "bit4", "int4", "uint4")),
        ("8bits", "8bit"),
        ("3bit", "minmax(bits=3)"),
        ("1bit", "onebit(bucket=512)"),
        ("bfloat16", "bf16"),
        ("fp16", "cast(fp16)"),
        ("none", "raw"),
        ("PowerSGD", "powersgd"),
        ("MinMax(bits=3)", "minmax(bits=3)"),
        *((written, "topk(0.01)") for written in ("topk(1%)", "topk 1%", "topk 0.01")),
        *((written, "topk(density=0.01)") for written in ("topk(density=1%)", "topk(ratio=0.01)", "density=0.01")),
        ("topk(0.1%)", "topk(0.001)"),
        ("topk(1%, ef)", "ef(topk(0.01))"),
        ("bits=3", "minmax(bits=3)"),
        ("rank=8", "powersgd(rank=8)"),
        ("powersgd rank 8", "powersgd(rank=8)"),
        ("minmax 3", "minmax(3)"),
        *((written, "ef(minmax(bits=4, bucket=128))") for written in ("ef", "ef=True", "4bit+ef", "ef + 4-bit")),
        ("error_feedback(4bit)", "ef(minmax(bits=4, bucket=128))"),
        ("minmax(bits=3, ef=True)", "ef(minmax(bits=3))"),
        ("ef()", "ef(minmax(bits=2))"),
        *((written, "sign") for written in ("signsgd", "signSGD", "sign-sgd")),
        ("ef(signsgd)", "ef(sign)"),
        *((written, "dgc(topk(density=0.001))") for written in ("dgc", "DGC()", "dgc(density=0.1%)")),
    ],
)
def test_what_users_write_instead_is_understood_in_the_error(written: str, meant: str) -> None:
    with pytest.raises(ValueError, match="is not a spec") as error:
        parse(written)
    assert str(error.value).endswith(f"Did you mean {meant!r}?")
    parse(meant)


@pytest.mark.parametrize("written", ["auto", "Auto(every=5)", "ef(auto)"])
def test_auto_is_said_to_go_alone(written: str) -> None:
    with pytest.raises(ValueError, match=r'auto is no compressor: .* alone .*thinwire.compress\(model, "auto"\)'):
        parse(written)


@pytest.mark.parametrize(
    ("written", "bits"),
    [
        ("fp8", 8),
        ("FP8", 8),
        ("float8", 8),
        ("fp8_e4m3", 8),
        ("float8_e5m2fnuz", 8),
        ("e4m3", 8),
        ("fp4", 4),
        ("nvfp4", 4),
    ],
)
def test_floats_of_few_bits_are_answered_with_as_many_bits(written: str, bits: int) -> None:
    with pytest.raises(ValueError, match=written) as error:
        parse(written)
    assert str(error.value).endswith(f"Did you mean '{bits}bit' or 'rangefloat(bits={bits})'?")
    parse(f"{bits}bit")
    parse(f"rangefloat(bits={bits})")


@pytest.mark.parametrize("nothing", ["", "  "])
def test_an_empty_spec_is_said_to_be_empty(nothing: str) -> None:
    with pytest.raises(ValueError, match=r"'' is not a spec: it is empty. Did you mean '4bit'\?"):
        parse(nothing)
