"""Specs, patterns and plans."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import thinwire
from thinwire import Plan, parse
from thinwire.compat import unwrapped
from thinwire.plan import Filter, at_site, matches, named_parameters, parameter_names, sharded_plan

SHAPES = {
    "embed.weight": (64, 96),
    "layers.0.bn.weight": (96,),
    "layers.0.linear.weight": (96, 96),
    "layers.0.linear.bias": (96,),
    "tiny.weight": (8, 8),
}


def test_specs_and_patterns() -> None:
    for spec, compressor in {
        "minmax": thinwire.compressors.MinMax(),
        " minmax(2) ": thinwire.compressors.MinMax(bits=2),
        "minmax(3, bucket=64)": thinwire.compressors.MinMax(bits=3, bucket=64),
        "minmax(bits=4, rounding=nearest)": thinwire.compressors.MinMax(rounding="nearest"),
        "minmax(bits=4, rounding='nearest')": thinwire.compressors.MinMax(rounding="nearest"),
        "cast(fp16)": thinwire.compressors.Cast("fp16"),
        "ef(randk(density=0.5))": thinwire.compressors.ef(thinwire.compressors.RandK(density=0.5)),
    }.items():
        assert parse(spec) == compressor
        assert parse(str(compressor)) == compressor
    for pattern, name, expected in (
        ("bias", "layers.0.linear.bias", True),
        ("bn", "layers.0.bn.weight", True),
        ("embed.*", "embed.weight", True),
        ("embed.*", "model.embed.weight", False),
        ("*", "anything", True),
        ("layers.[01].*", "layers.2.weight", False),
    ):
        assert matches(pattern, name) is expected


WORDS: dict[str, set[str]] = {
    "0.weight": {"0.weight"},
    "10.weight": {"10.weight"},
    "w": {"w"},
    "head.weight": {"0.weight"},
    "frozen.weight": set(),
    "weight": {"0.weight", "10.weight", "h.weight", "my_frozen.weight", "other_head.weight"},
    "0": {"0.weight", "10.weight"},
    "?.weight": {"0.weight", "h.weight"},
    "a[0].weight": {"a[0].weight"},
}


def named(plan: Plan, raw: bool) -> set[str]:
    return {name for name, compressor in plan.layers.items() if (str(compressor) == "raw()") == raw}


@pytest.mark.parametrize("word", WORDS)
def test_a_full_name_is_that_layer_alone(word: str) -> None:
    layers = ["0.weight", "10.weight", "w", "h.weight", "my_frozen.weight", "other_head.weight"]
    layers += ["a[0].weight"] * word.startswith("a")
    shapes = dict.fromkeys(layers, (64, 64))
    names = {**{name: name for name in (*layers, "frozen.weight")}, "head.weight": "0.weight"}
    keep, raw = Filter(exclude=(word,), names=names), WORDS[word]
    assert named(Plan.build(shapes, "minmax(bits=4)", keep), raw=True) == raw
    sharded = sharded_plan(shapes, {"weights": "minmax(bits=8)", "gradients": "minmax(bits=4)"}, keep)
    assert named(sharded, raw=True) == {at_site(site, name) for site in ("weights", "gradients") for name in raw}
    if raw:
        assert named(Plan.build(shapes, {word: "minmax(bits=2)"}, Filter(names=names)), raw=False) == raw


def test_all_names_of_a_parameter_are_known_without_those_of_wrappers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), checkpoint_wrapper(nn.Linear(4, 4)))
    model.register_module("tied", model[0])
    model[1] = torch.compile(model[1], backend="eager")
    whole = torch.compile(model, backend="eager")
    assert isinstance(whole, nn.Module)
    own = [f"{layer}.{name}" for layer in (0, 1, 2) for name in ("weight", "bias")]
    assert list(named_parameters(whole)) == list(named_parameters(model)) == own
    names = {**{name: name for name in own}, "tied.weight": "0.weight", "tied.bias": "0.bias"}
    assert {name: own for name, own in parameter_names(whole).items() if name == unwrapped(name)} == names
    assert parameter_names(whole)["_orig_mod.1._orig_mod.weight"] == "1.weight"
    assert unwrapped("") == unwrapped("_orig_mod") == ""


def test_the_default_plan() -> None:
    plan = Plan.build(SHAPES)
    assert {name: str(c) for name, c in plan.layers.items()} == {
        "embed.weight": "minmax(bits=4, bucket=128)",
        "layers.0.bn.weight": "raw()",
        "layers.0.linear.weight": "minmax(bits=4, bucket=128)",
        "layers.0.linear.bias": "raw()",
        "tiny.weight": "raw()",
    }
    assert plan.summary() == "2 x minmax(bits=4, bucket=128), 3 x raw()"


def test_rules_by_name() -> None:
    rules = {"embed.*": "minmax(bits=2)", "layers.0.bn.weight": "minmax(bits=8)", "*": "minmax(bits=4)"}
    plan = Plan.build(SHAPES, rules, Filter(exclude=("linear",)))
    assert str(plan["embed.weight"]) == "minmax(bits=2, bucket=128)"
    assert str(plan["layers.0.bn.weight"]) == "minmax(bits=8, bucket=128)", "a full name overrides the size filter"
    assert str(plan["layers.0.linear.weight"]) == "raw()"
    assert str(Plan.build(SHAPES, {"embed.*": "minmax"})["layers.0.linear.weight"]) == "raw()"


def test_a_pattern_whose_layers_an_earlier_one_takes_is_refused_and_others_are_not() -> None:
    for wide, narrow in (("*", "embed.*"), ("linear", "layers.0.linear.*")):
        with pytest.raises(ValueError, match=re.escape(f"{narrow!r} is never used: {wide!r} before it")):
            Plan.build(SHAPES, {wide: "minmax(bits=4)", narrow: "minmax(bits=2)"})
    # A full name, a fallback and what is taken in part.
    for patterns in (("embed.*", "*"), ("*", "embed.weight"), ("weight", "bias", "*"), ("bn", "0")):
        Plan.build(SHAPES, dict.fromkeys(patterns, "minmax(bits=4)"))


def test_a_plan_survives_json_and_its_hash_tells_plans_apart() -> None:
    plan = Plan.build(SHAPES, "ef(minmax(bits=2))")
    again = Plan.build(SHAPES).with_json(plan.to_json())
    assert again.layers == plan.layers
    assert again.hash == plan.hash != Plan.build(SHAPES).hash
    assert json.loads(plan.to_json())["embed.weight"] == "ef(minmax(bits=2, bucket=128))"
    assert Plan.from_dict(plan.to_dict()).layers == plan.layers
    assert re.search(r"^embed.weight +ef\(minmax\(bits=2, bucket=128\)\)$", str(plan), re.MULTILINE)
    for text in ("[]", '{"a": 1}'):
        with pytest.raises(ValueError, match="JSON object"):
            plan.with_json(text)
    for wrong in ("minmax(bits=40)", "no such thing", "minmax(color=1)", "minmax(bits=[])", "ef(" * 5000):
        with pytest.raises(ValueError, match=r"\S"):
            Plan.from_dict({"a": wrong})


def test_a_compressor_from_outside_joins_by_its_name() -> None:
    with pytest.raises(ValueError, match="already belongs"):
        thinwire.register(lambda: thinwire.compressors.Raw(), "minmax")
