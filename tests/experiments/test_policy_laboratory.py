"""The policy laboratory: the recording's format, and what policies are replayed on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.__main__ import main as experiments_main
from experiments.papers.lgreco.gradients import Snapshot
from experiments.policies import command, replay
from experiments.policies.baselines import Bayes, ByPriority, Linear
from experiments.policies.candidates import FAMILIES
from experiments.policies.methods import METHODS, Method
from experiments.policies.recording import MANIFEST, BadRecording, Recording, Training, layers_of
from experiments.policies.replay import against, fewer_bytes, less_error
from experiments.tasks.words import WORDS
from thinwire import parse
from thinwire.plan import sent_bytes
from thinwire.policies import Evidence

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHAPES = {"embedding": (64, 64), "middle": (32, 64), "norm": (64,), "head": (64, 48)}
FAST = tuple(method for method in METHODS if not method.sparse)


def snapshot(step: int, seed: int, spread: float = 30.0) -> Snapshot:
    """Gradients of layers that differ in their norms."""
    draw = torch.Generator().manual_seed(seed)
    scales = dict(zip(SHAPES, (1.0, spread, 1.0, spread**0.5), strict=True))
    gradients = {name: scales[name] * torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    return Snapshot(step, gradients, 0.1)


def training(seed: int = 0, steps: tuple[int, ...] = (4, 8)) -> tuple[Training, list[Snapshot]]:
    taken = [snapshot(step, 10 * seed + step) for step in steps]
    layers = layers_of(taken[0].gradients)
    return Training("toy", "toy", seed, steps, (0.1,) * len(steps), 2, 2, 0.01, layers), taken


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording.write(tmp_path / "gradients", [training(0), training(1)])


def test_a_recording_is_read_as_it_was_written_in_bfloat16(recording: Recording) -> None:
    again = Recording.open(recording.folder)
    assert again.trainings == recording.trainings
    assert again.tasks == {"toy": "toy"}
    for one, (_, taken) in zip(again.trainings, (training(0), training(1)), strict=True):
        for read, written in zip(again.snapshots(one), taken, strict=True):
            assert (read.step, read.learning_rate) == (written.step, written.learning_rate)
            for name, gradient in written.gradients.items():
                assert torch.equal(read.gradients[name], gradient.bfloat16().float())


def test_recordings_that_lie_or_have_other_or_endless_values_are_refused(tmp_path: Path) -> None:
    one, taken = training()
    Recording.write(tmp_path, [(one, taken)])
    path, manifest = tmp_path / one.file, tmp_path / MANIFEST
    whole, written = path.read_bytes(), manifest.read_text()
    for changes, why in (
        ({"layers": [3]}, "is not one"),
        ({"steps": [4, 8, 12]}, "the manifest says"),
        ({"sha256": "0" * 64}, "SHA-256 differs"),
    ):
        told = json.loads(written)
        told["trainings"][0] |= changes
        manifest.write_text(json.dumps(told))
        with pytest.raises(BadRecording, match=why):
            Recording.open(tmp_path)
    manifest.write_text(written)
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    for damaged in (path.read_bytes(), whole[:-2]):
        path.write_bytes(damaged)
        with pytest.raises(BadRecording):
            Recording.open(tmp_path)
    taken[1].gradients["head"][0, 0] = math.nan
    made = Recording.write(tmp_path, [(one, taken)])
    with pytest.raises(BadRecording, match="step 8 is not finite"):
        list(made.snapshots(made.trainings[0]))


def test_layers_are_in_the_buckets_that_ddp_put_them_in() -> None:
    rows = json.loads((BENCHMARKS / "lgreco/all.json").read_text())["results"]
    recorded = next(row for row in rows if row["name"] == "figure B.1/priority_slower")["layers"]["powersgd"]
    gradients = dict(WORDS.build(0).named_parameters())
    one = Training("gpt", "GPT", 0, (1,), (0.1,), 1, 2, WORDS.bucket_cap_mb, layers_of(gradients))
    assert one.bucket_of == {row["name"]: row["bucket"] for row in recorded}


def test_baselines_find_a_smaller_plan_within_the_budget() -> None:
    pytest.importorskip("sklearn")
    taken = snapshot(4, seed=1)
    reference = {name: parse("minmax(bits=4)") for name, shape in SHAPES.items() if len(shape) > 1}
    of = {name: taken.gradients[name] for name in reference}
    buckets = {name: at for at, name in enumerate(reference)}
    for policy in (Linear(), Bayes(trials=16), ByPriority()):
        found = policy.propose(Evidence(reference, reference, of, num_ranks=4, bucket_of=buckets))
        errors, allowed = (sum(e**0.5 for e in each.values()) for each in (found.errors, found.reference_errors))
        assert errors <= allowed * (1 + 1e-9), policy
        sent, asked = (
            sum(sent_bytes(c, SHAPES[name], 4) for name, c in plan.items()) for plan in (found.layers, reference)
        )
        assert sent < asked, policy


def test_policies_keep_the_budget_of_every_level_and_plans_send_what_they_say(recording: Recording) -> None:
    for bench in replay.replay(recording, methods=FAST):
        for name in ("lgreco", "kmeans", "linear"):
            decisions = bench.replayed[name].decisions
            assert len(decisions) == 4 * len(bench.family.levels)
            for one in decisions:
                at = bench.steps[one.training].index(one.step)
                level = bench.family.members.index(bench.family.levels[one.level])
                uniform = bench.uniform[one.training][at][level]
                assert one.point.error <= uniform.error * (1 + 1e-9)
                if name == "lgreco":
                    assert one.point.sent_bytes <= uniform.sent_bytes


def test_uniform_compression_saves_nothing_against_itself(recording: Recording) -> None:
    itself = Method("itself", "itself", "#000000", lambda table, level, memory: (table.uniform(level), memory))
    for bench in replay.replay(recording, methods=[itself]):
        for ratio in (fewer_bytes(bench, "itself"), less_error(bench, "itself"), against(bench, "itself", "itself")):
            assert ratio is not None
            # Of layers so small, two ranks may send the same bytes with other errors.
            assert (ratio.mean, ratio.lower, ratio.upper) == pytest.approx((1.0, 1.0, 1.0), abs=0.005)


def test_where_layers_differ_l_greco_saves_and_where_they_do_not_it_does_not(tmp_path: Path) -> None:
    saved = {}
    for spread in (1.0, 100.0):
        pairs = []
        for seed in range(2):
            one, _ = training(seed, (4,))
            pairs.append((one, [snapshot(4, seed, spread)]))
        made = Recording.write(tmp_path / str(spread), pairs)
        (bench,) = replay.replay(made, methods=FAST[:1], families=FAMILIES[:1])
        ratio = fewer_bytes(bench, "lgreco")
        assert ratio is not None
        saved[spread] = ratio.mean
    assert saved[1.0] == pytest.approx(1.0, abs=0.03)
    assert saved[100.0] > 1.1


def test_a_small_recording_has_both_networks(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    assert experiments_main(["policies", "record", "--smoke", "--out", str(tmp_path)]) == 0
    made = Recording.open(tmp_path)
    assert set(made.tasks) == {"gpt", "cnn"}
    for one in made.trainings:
        assert [snapshot.step for snapshot in made.snapshots(one)] == [6, 12]
        assert {layer.name for layer in one.layers} == set(one.bucket_of)


def test_a_recording_is_replayed_shown_and_drawn(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "replay", lambda made, on_step: replay.replay(made, methods=FAST, on_step=on_step))
    monkeypatch.setenv("COLUMNS", "200")
    json_path, svg = tmp_path / "policies.json", tmp_path / "frontiers.svg"
    argv = ["policies", "replay", str(recording.folder), "--json", str(json_path), "--plot", str(svg)]
    assert experiments_main(argv) == 0
    assert "L-GreCo + Accordion" in capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(json_path.read_text())["results"]}
    found = rows["toy/topk/lgreco"]
    assert found["value"] == found["fewer_bytes"]["mean"] > 1
    assert svg.read_text().startswith("<?xml")
