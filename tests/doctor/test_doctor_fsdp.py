"""``thinwire doctor`` and models under FSDP2: what it sees of them, leaves alone, predicts and refuses."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from test_links import Mark
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from doctor_fsdp_training import build, train
from harness import run_ranks
from thinwire.compressors import parse
from thinwire.plan.forecast import Curve, Links
from thinwire.runtime.probe import Pair
from thinwire_tools import lab
from thinwire_tools.doctor import observer_fsdp, page, report
from thinwire_tools.doctor.advice import verdict
from thinwire_tools.doctor.forecast import Event, Move, ShardedPace, native_sharded_step
from thinwire_tools.doctor.measure import Measured
from thinwire_tools.doctor.observer import Observer
from thinwire_tools.doctor.record import record
from thinwire_tools.doctor.settings import Care, Prediction
from thinwire_tools.doctor.settings_sharded import (
    SHARDED_SETTINGS,
    ShardedSetting,
    fits,
    predict_sharded,
    sharded_compressors,
    sharded_settings,
)
from thinwire_tools.doctor.watched import DoctorError, Watched

SCRIPT = str(Path(__file__).parents[1] / "support" / "doctor_fsdp_training.py")
LAYER = (1000, 500)


def _watch(rank: int) -> None:
    found: list[Observer] = []
    with Observer(6, found.append):
        weights = train(14)
    assert all(torch.equal(weights[name], of) for name, of in train(14).items())
    (observer,) = found
    assert observer.sharded
    watched = observer.result()
    pace = watched.paces[0]
    # Forward gathers the root and each block; backward the blocks anew, whose gradients are reduced before the root's.
    gathered = [move.module for move in pace.moves if move.kind == "all_gather"]
    reduced = [move.module for move in pace.moves if move.kind == "reduce_scatter"]
    root, *blocks = "the root module", "module 1", "module 2", "module 3"
    assert gathered == [root, *blocks, *blocks[::-1]]
    assert reduced == [*blocks[::-1], root]
    assert all(move.late for move in pace.moves)
    names = ("1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias")
    assert dict(pace.moves[1].layers) == {name: observer.layers[name] for name in names}
    assert observer.layers["1.0.weight"] == (512, 64)
    assert sum(event.needed for event in pace.events) == len(gathered)
    assert [event.at_s for event in pace.events] == sorted(event.at_s for event in pace.events)
    # FSDP2 asks for a block's weights while the one behind it goes backward.
    second = [i for i, move in enumerate(pace.moves) if move.kind == "all_gather"][5]
    first_reduction = next(i for i, move in enumerate(pace.moves) if move.kind == "reduce_scatter")
    order = [(event.move, event.needed) for event in pace.events]
    assert order.index((second, False)) < order.index((first_reduction, False)) < order.index((second, True))
    # Every step shows both: all count as they are, and all show what computing takes.
    assert len(watched.paces) == len(watched.step_s) == len(watched.bucket_s) == 6
    assert all(of.compute_s >= of.alone_s > 0 for of in watched.paces)
    assert watched.parameters == sum(torch.Size(shape).numel() for shape in observer.layers.values())
    assert 0 < watched.exposed_share < 1


def _watch_a_device(rank: int) -> None:
    """A fake one: each of its marks is a second later than the last, and is not read before training has ended."""
    clock, stream, found = itertools.count(), mock.Mock(), list[Any]()
    now = mock.Mock(side_effect=lambda _: Mark(next(clock), found))
    with (
        mock.patch.multiple(observer_fsdp, mark=now, current_stream=lambda _: stream),
        mock.patch("thinwire_tools.doctor.observer.mark", now),
        Observer(6, found.append),
    ):
        train(14)
    watched = found[0].result()
    pace, moves = watched.paces[0], len(watched.bucket_s[0])
    # Where streams take turns, collectives have two further marks, a second apart.
    assert watched.bucket_s == ((1,) * moves,) * 3
    assert (watched.step_s, pace.compute_s) == ((1 + len(pace.events),) * 3, 1 + len(pace.events) + moves)
    assert stream.wait_stream.call_count == 5 * 2 * moves
    assert native_sharded_step(pace, [0] * moves) == pace.compute_s < native_sharded_step(pace, [100] * moves)


def test_every_move_of_a_step_is_seen_and_changes_nothing() -> None:
    run_ranks(_watch, 2)
    run_ranks(_watch_a_device, 2)


def _two_batches(rank: int) -> None:
    found: list[Any] = []
    model = build()
    with Observer(6, lambda observer: found.append(observer.result())):
        for _ in range(11):
            for last in (False, True):
                model.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]
                model(torch.ones(2, 128)).sum().backward()
            model.zero_grad()
    pace = found[0].paces[0]
    kinds = [[move.kind for move in of.moves] for of in (pace, pace.kept())]
    assert found[0].batches == 2
    # Of each batch the root gathers once, since it keeps its weights for backward, and each block twice.
    assert [(of.count("reduce_scatter"), of.count("all_gather")) for of in kinds] == [(4, 14), (4, 8)]


def test_batches_between_two_reductions_are_one_step() -> None:
    run_ranks(_two_batches, 2)


class _Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)


def _refused(rank: int, kind: str) -> str:
    dist.barrier()
    try:
        if kind == "compressed":
            model = build()
            thinwire.compress(model)
        elif kind == "replicas":
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
            model = fully_shard(nn.Linear(8, 8), mesh=mesh)
        elif kind == "several":
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            groups = [init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))]
            fully_shard(model[0], mesh=groups[0])
            fully_shard(model[1], mesh=groups[1]["b"])
        elif kind == "fewer in backward":
            model = fully_shard(nn.Linear(8, 8), reshard_after_forward=2)
        else:
            model = fully_shard(nn.Linear(8, 8))
        with Observer(6, lambda observer: None):
            _Around(model)(  # pyright: ignore[reportArgumentType] - it is a module, too
                torch.ones(1, 128 if kind == "compressed" else 8)
            )
    except DoctorError as error:
        return str(error)
    return "nothing was wrong"


NOT_EXAMINED = {
    "compressed": "take thinwire.compress() and other custom collectives out of the script",
    "replicas": "sharded and replicated",
    "several": "sharded over the same ranks",
    "a module around it": "nothing was wrong",
}


def _refused_in_turn(rank: int) -> None:
    for kind, message in NOT_EXAMINED.items():
        assert message in _refused(rank, kind)


def test_what_cannot_be_examined_says_why() -> None:
    run_ranks(_refused_in_turn, 2)
    assert "gathers among fewer ranks in backward" in run_ranks(_refused, 4, "fewer in backward")[0]


def measured(bytes_per_s: float, *, took_s: float, itemsize: int = 4, kept: bool = False) -> Measured:
    """Two ranks; a root and a block of half a million weights each; 0.1 s forward, 0.2 s backward, 0.1 s optimizer."""
    gathers = [("root", 0.0), ("block", 0.05)] + ([] if kept else [("block", 0.1)])
    reductions = [("block", 0.2), ("root", 0.3)]
    moves, events = [], []
    for kind, rows in (("all_gather", gathers), ("reduce_scatter", reductions)):
        for module, at in rows:
            number = len(moves)
            size = itemsize if kind == "reduce_scatter" else 4
            moves.append(Move(at, ((f"{module}.weight", LAYER),), size, kind, module))  # pyright: ignore[reportArgumentType]
            events.append(Event(at, number, needed=False))
            events += [Event(at, number, needed=True)] if kind == "all_gather" else []
    pace = ShardedPace(tuple(moves), tuple(events), 0.4, 0.38)
    took = (took_s,) * len(moves)
    watched = Watched((pace,) * 3, (0.4 + sum(took),) * 3, (took,) * 3, 1, 1_000_000, ("float32",))
    curve = Curve(((0.0, 1e-3), (1e7, 1e-3 + 1e7 / bytes_per_s)))
    codecs = dict.fromkeys(
        sharded_compressors(SHARDED_SETTINGS, {"root.weight": LAYER, "block.weight": LAYER}), (1e-9, 1e-9)
    )
    pairs = (Pair(0, 1, bytes_per_s, 1e-3),)
    return Measured(watched, (Links(curve, curve, 2),), pairs, codecs, 2, 2, 1.0, 1, None, "eth0")


SLOW = measured(1e7, took_s=0.11)


def predicted(of: Measured) -> dict[str, Prediction]:
    pace = of.watched.paces[0]
    assert isinstance(pace, ShardedPace)
    return {setting.title: predict_sharded(setting, of) for setting in SHARDED_SETTINGS if fits(setting, pace)}


def test_predictions_are_those_of_the_timeline() -> None:
    found = predicted(SLOW)
    assert found["as it is"].step.value == pytest.approx(0.4 + 5 * 0.11)
    # One gather fewer.
    assert found["weights kept"].step.value == pytest.approx(0.4 + 4 * 0.11)
    # Half of what the two reductions take beyond a millisecond.
    assert found["gradients in bf16"].step.value == pytest.approx(0.4 + 5 * 0.11 - 2 * 0.109 / 2)
    # At least the first two gathers stop forward: 0.1 s each, of which the root's computing hides half of one.
    raw = parse("raw").wire_bytes(LAYER) / 2 / 1e7
    uncompressed = found["uncompressed, overlapped"].step.value
    assert uncompressed < found["as it is"].step.value
    assert uncompressed > 0.4 + 2 * raw - 0.05
    assert found["W4G4"].step.value < found["W8G4"].step.value < found["W8G8"].step.value < uncompressed
    assert found["W8G8"].sent_bytes == pytest.approx(found["as it is"].sent_bytes / 4, rel=0.02)
    assert found["W8G4"].sent_bytes == pytest.approx((3 / 4 + 2 / 8) / 5 * found["as it is"].sent_bytes, rel=0.03)
    # Of four batches three gather, go forward and backward, and reduce nothing.
    batches = 4 * (0.3 + 3 * 0.11) + 0.1 + 2 * 0.11
    assert found["accumulate 4"].step.value == pytest.approx(batches / 4)
    assert found["accumulate 4"].sent_bytes == pytest.approx((3 + 2 / 4) / 5 * found["as it is"].sent_bytes)
    assert all(of.step.low <= of.step.value <= of.step.high for of in found.values())


def test_what_would_change_nothing_is_not_offered() -> None:
    assert {"weights kept", "gradients in bf16"} <= set(predicted(SLOW))
    assert "weights kept" not in predicted(measured(1e7, took_s=0.11, kept=True))
    assert "gradients in bf16" not in predicted(measured(1e7, took_s=0.11, itemsize=2))


def test_a_slow_link_gets_8_bits_and_a_fast_one_nothing() -> None:
    slow = verdict(SLOW, list(predicted(SLOW).values()))
    assert "Bound by communication" in slow.sentence
    assert slow.advice[0].title == "W8G8"
    *code, checkpoint = slow.advice[0].lines
    assert code == [
        "import thinwire",
        "wire = thinwire.compress(model)  # after fully_shard(model)",
        "thinwire.prefetch(model)",
    ]
    assert "wire.gather_state_dict()" in checkpoint
    by_title = {advice.title: advice for advice in slow.advice}
    assert 'gradients="minmax(bits=4, bucket=1024)")' in by_title["W8G4"].lines[1]
    assert "reshard_after_forward=False" in by_title["weights kept"].lines[0]
    assert "reduce_dtype=torch.bfloat16" in by_title["gradients in bf16"].lines[0]
    assert "set_requires_gradient_sync(last_of_4)" in by_title["accumulate 4"].lines[0]
    fast = measured(1e10, took_s=0.002)
    assert verdict(fast, list(predicted(fast).values())).advice[0].title == "nothing"


def test_more_compressors_are_for_both_and_must_serve_shards() -> None:
    shapes = {"a": (64, 64)}
    *usual, more = sharded_settings(["qsgd(bits=4, bucket=64)", "minmax(bits=8, bucket=1024)"], shapes)
    assert usual == list(SHARDED_SETTINGS)
    assert more == ShardedSetting(
        str(parse("qsgd(bits=4, bucket=64)")), str(parse("qsgd(bits=4, bucket=64)")), care=Care.CHECK
    )
    with pytest.raises(DoctorError, match=r"--compressors topk.*this model is sharded.*leaves out too much"):
        sharded_settings(["topk(density=0.01)"], shapes)


def test_the_record_the_terminal_and_the_page_say_what_was_seen() -> None:
    predictions = list(predicted(SLOW).values())
    results = record(SLOW, predictions, verdict(SLOW, predictions), about={"script": ["train.py"], "link": ""})
    found = json.loads(json.dumps(results.to_dict()))
    about = found["about"]
    assert about["sharded"] is True
    assert [of["kind"] for of in about["buckets"]] == ["all_gather"] * 3 + ["reduce_scatter"] * 2
    # fp32 of which half crosses, in 8 bits and scales.
    assert about["codecs"][0]["ratio"] == pytest.approx(4, rel=0.02)
    wide, narrow = (Console(width=width, record=True, file=io.StringIO()) for width in (140, 80))
    report.show(wide, found)
    assert "weights and gradients of 2 modules" in " ".join(wide.export_text().split())
    narrow.print(report.predictions(about))
    assert "…" not in narrow.export_text()
    assert "gradients are reduced" in page.page(found)


@pytest.mark.alone
@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_a_script_over_a_slow_link(tmp_path: Path) -> None:
    path, html = tmp_path / "doctor.json", tmp_path / "doctor.html"
    options = ["--rate", "30mbit", "--steps", "6", "--json", str(path), "--html", str(html)]
    argv = [sys.executable, "-m", "thinwire", "doctor", *options, "--", SCRIPT, "60", str(tmp_path / "weights.pt")]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, env={**environment, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["about"]
    assert found["sharded"] is True
    assert found["exposed_share"] > 0.5
    steps = {of["title"]: of["step_s"] for of in found["predictions"]}
    assert steps["W8G8"] < 0.8 * found["today_s"]
    assert steps["W8G8"] < steps["uncompressed, overlapped"] < steps["as it is"]
    assert steps["as it is"] == pytest.approx(found["today_s"], rel=0.5)
    assert html.read_text().count("<svg") == 3
