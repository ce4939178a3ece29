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
    with pytest.raises(ValueError, match="is not a spec"):
        parse("ef(4bit)")
