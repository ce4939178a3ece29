"""Every wrong argument is an error that names it, and shows a call that is right."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import thinwire

# In a world of one the arguments are checked as in any other.
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"compressor": 4}, TypeError, r"compressor must be .*compressor='minmax\(bits=4\)'"),
    ({"compressor": {"*": 4}}, TypeError, "compressor must be"),
    ({"compressor": {}}, ValueError, r"compressor is an empty mapping.*compressor=\{'\*': '4bit'\}"),
    ({"compressor": {"*": None}}, TypeError, "compressor must be .*, not None"),
    ({"compressor": {"": "4bit"}}, ValueError, r"a pattern is empty: .*'\*' for every layer"),
    ({"compressor": "4bits"}, ValueError, "compressor: .*Did you mean '4bit'"),
    ({"compressor": {3: "raw"}}, TypeError, r"compressor must map name patterns .*compressor=\{"),
    ({"compressor": "minmax(bits=99)"}, ValueError, "compressor: bits must be between 1 and 8"),
    ({"compressor": "minmax(bit=4)"}, ValueError, r"compressor: .*Did you mean 'minmax\(bits=4\)'"),
    ({"exclude": "bias"}, TypeError, r"exclude must be .*exclude=\['bn', 'bias'\]"),
    ({"exclude": 3}, TypeError, r"exclude must be .*exclude=\['bn', 'bias'\]"),
    ({"exclude": [""]}, ValueError, "a pattern is empty"),
    ({"exclude": ["nosuch"]}, ValueError, "'nosuch' matches no parameter; close names are"),
    ({"min_numel": -1}, ValueError, r"min_numel must be at least 0.*compress\(model, min_numel=1000\)"),
    ({"start": "abc"}, TypeError, r"start must be an integer.*compress\(model, start=1000\)"),
    ({"seed": 2**64}, ValueError, r"seed must be between.*compress\(model, seed=1000\)"),
    ({"adapt": 3}, TypeError, r"adapt must be .*adapt='lgreco\(every=500\)'"),
    ({"adapt": "lgrec"}, ValueError, "adapt: .*no policy is called 'lgrec'. Did you mean 'lgreco'"),
    ({"optimizer": "adam"}, TypeError, r"optimizer must be .*optimizer=optimizer\)"),
    ({"grad_scaler": 3}, TypeError, r"grad_scaler must be .*grad_scaler=scaler\)"),
    ({"skip_if_slower": 1}, TypeError, r"skip_if_slower must be .*skip_if_slower=False\)"),
    ({"simulate": 1}, TypeError, r"simulate must be .*simulate=False\)"),
    ({"network": "ring"}, TypeError, r"network must be .*network=thinwire.Network\("),
    ({"checks": None}, TypeError, r"checks must be thinwire.Checks, not None"),
    ({"checks": 3}, TypeError, r"checks must be .*checks=thinwire.Checks\("),
    ({"bits": 4}, TypeError, r'thinwire.compress\(model, "minmax\(bits=4\)"\)'),
    ({"rank": 8}, TypeError, r'thinwire.compress\(model, "powersgd\(rank=8\)"\)'),
    ({"ef": True}, TypeError, r'thinwire.compress\(model, "ef\(minmax\(bits=4\)\)"\)'),
    ({"error_feedback": True}, TypeError, r'thinwire.compress\(model, "ef\(minmax\(bits=4\)\)"\)'),
    ({"spec": "4bit"}, TypeError, r"did you mean compressor=\?"),
    ({"warmup": 100}, TypeError, r"did you mean start=\?"),
    ({"compressor": thinwire.compressors.MinMax}, TypeError, r"compressor=MinMax\(\), an instance"),
    ({"compressor": "topk(1%)"}, ValueError, r"Did you mean 'topk\(density=0.01\)'"),
    ({"algorithm": "ring"}, TypeError, r"compress\(model, network=thinwire.Network\(algorithm='ring'\)\)"),
    ({"parity_every": 3}, TypeError, r"compress\(model, checks=thinwire.Checks\(parity_every=3\)\)"),
    ({"weights": "raw"}, TypeError, r"weights= is an argument of thinwire.compress_fsdp\(\)"),
    ({"excludes": ["bn"]}, TypeError, r"excludes= is not an argument .*did you mean exclude=\?"),
    ({"nosuch": 1}, TypeError, "nosuch= is not an argument .*takes compressor=, exclude="),
]


@pytest.mark.parametrize(("wrong", "kind", "says"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_argument_is_named_beside_a_right_call(wrong: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        thinwire.compress(nn.Linear(64, 64), **wrong)


@pytest.mark.parametrize(
    ("group", "wrong", "kind", "says"),
    [
        (thinwire.Network, {"algorithm": 3}, TypeError, r"algorithm must be .*Network\(algorithm='ring'\)"),
        (thinwire.Network, {"aggregator": 3}, TypeError, r"aggregator must be .*Network\(aggregator='host:5000'\)"),
        (thinwire.Network, {"timeout": 3}, TypeError, r"timeout must be .*Network\(timeout=timedelta\(seconds=60\)\)"),
        (thinwire.Network, {"timeout": timedelta(seconds=-1)}, ValueError, "timeout must be above 0"),
        (thinwire.Network, {"streams": 0}, ValueError, r"streams must be between 1 and 64.*Network\(streams=4\)"),
        (thinwire.Network, {"streams": "4"}, TypeError, r"streams must be .*Network\(streams=4\)"),
        (thinwire.Checks, {"parity_every": -1}, ValueError, r"parity_every .*Checks\(parity_every=1000\)"),
        (thinwire.Checks, {"measure_every": 1.0}, TypeError, r"measure_every .*Checks\(measure_every=1000\)"),
    ],
)
def test_so_are_those_of_network_and_checks(group: Any, wrong: dict[str, Any], kind: Any, says: str) -> None:
    with pytest.raises(kind, match=says):
        group(**wrong)


@pytest.mark.parametrize("model", [3, None, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])])
@pytest.mark.parametrize("function", [thinwire.compress, thinwire.compress_ddp, thinwire.compress_fsdp])
def test_what_is_no_model_is_refused(function: Any, model: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not .*model\)\)"):
        function(model)


def test_a_launched_rank_that_forgot_to_join_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TypeError, match=r"not Linear: wrap it first, .*DistributedDataParallel\(model\)"):
        thinwire.compress(nn.Linear(64, 64))
    with pytest.raises(TypeError, match=r"unwrap it first: model.module, then .*DistributedDataParallel\(model.mod"):
        thinwire.compress(nn.DataParallel(nn.Linear(64, 64)))
