"""``thinwire repro fft``: the small version from end to end, the images, the cost model, the judging."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thinwire
from thinwire import cli, lab
from thinwire.compressors import MinMax
from thinwire.repro.crew import Crew, RankFailed
from thinwire.repro.fft import cost, images, methods, of_theorems, reconstruct
from thinwire.repro.fft.of_methods import faster
from thinwire.repro.fft.runs import Gradients, Trained
from thinwire.repro.fft.study import Scale
from thinwire.repro.fft.task import ImageTask, ResNet
from thinwire.repro.findings import Finding, no_worse, record, table, worse

RECORD = 3073
FIGURES = ("5", "6", "10", "12", "13", "14", "15", "16")


# --- the command


def test_the_small_version_makes_every_figure_and_judges_every_claim(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    path = tmp_path / "fft.json"
    arguments = ["repro", "fft", "--smoke", "--figures", ",".join(FIGURES), "--out", str(tmp_path), "--json", str(path)]
    assert cli.main(arguments) == 0, capsys.readouterr()
    found = json.loads(path.read_text(), parse_constant=_no_constant)
    assert found["about"]["images"] == {"name": "digits", "train": 898, "held_out": 899}
    assert {row["figure"] for row in found["results"]} == set(FIGURES)
    for row in found["results"]:
        assert row["found"]
        assert row["holds"] in (True, False, None)
    for name in FIGURES:
        assert any(row["claim"] for row in found["results"] if row["figure"] == name), name
        assert (tmp_path / f"fig{name}.svg").read_text().startswith("<?xml")
    rows = {row["name"]: row for row in found["results"]}
    for method in ("fp32", "fft", "topk", "qsgd", "terngrad", "fft ef", "topk ef", "qsgd ef", "terngrad ef"):
        assert 0 <= rows[f"fig14/accuracy/{method}"]["value"] <= 1
        assert rows[f"fig14/speedup/{method}"]["payload_bytes"] > 0
    # One seed decides nothing.
    assert rows["fig14/accuracy/fft"]["holds"] is None
    assert rows["fig14/speedup/fft"]["holds"] is None
    # Of so small a network much is raw.
    assert rows["fig14/speedup/fft"]["ratio"] > 3
    for theta in of_theorems.alpha_thetas():
        assert [step for step, _ in rows[f"fig12/alpha/{theta}"]["samples"]] == [0, 3, 6, 9]
        assert 0 < rows[f"fig12/alpha/{theta}"]["value"] < 1
    assert list(rows["fig16/scaling/fft"]["by_world_size"]) == ["1", "2"]
    shown = capsys.readouterr().out
    assert "holds" in shown
    assert "Ethernet" in shown


def test_a_rank_that_fails_costs_its_figure_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Crew.run

    def run_and_kill(crew: Crew, command: dict[str, Any], *args: Any) -> list[dict[str, Any]]:
        if command["do"] == "train":
            crew._members[1].process.kill()
        return run(crew, command, *args)

    monkeypatch.setattr(Crew, "run", run_and_kill)
    monkeypatch.setattr(lab, "unavailable", lambda: "no right to make namespaces")
    assert cli.main(["repro", "fft", "--smoke", "--figures", "6,13,5", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "repro-fft.json").read_text())
    assert found["about"]["failures"] == {"13": "rank 1: ended by signal 9"}
    assert found["about"]["link"] == "loopback"
    assert {row["figure"] for row in found["results"]} == {"5", "6"}
    assert "no right to make namespaces" in " ".join(capsys.readouterr().out.split())


def test_ranks_that_do_not_start_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RankFailed(0, "it ended", "no such module")

    monkeypatch.setattr("thinwire.repro.crew.Crew", refuse)
    monkeypatch.setattr(lab, "unavailable", lambda: "no right to make namespaces")
    assert cli.main(["repro", "fft", "--smoke", "--figures", "6,10", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "repro-fft.json").read_text())
    assert found["about"]["failures"] == dict.fromkeys(("6", "10"), "rank 0: it ended")
    assert "no such module" in capsys.readouterr().out


def _no_constant(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--figures", "5,7"], "choose among 5, 6, 10"),
        (["--figures", ","], "choose among"),
        (["--seeds", "0"], "at least 1"),
        (["--steps", "1"], "at least 2"),
        (["--rate", "fast"], "not a rate"),
        (["--data", "/nonexistent/folder"], "unpack the binary version"),
    ],
)
def test_wrong_arguments_are_told_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert cli.main(["repro", "fft", "--smoke", "--out", str(out), *arguments]) == 64
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


# --- the images


def _write_cifar(folder: Path, records: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
        content = np.zeros((records, RECORD), dtype=np.uint8)
        content[:, 0] = (np.arange(records) + index) % 10
        content[:, 1:1025], content[:, 1025:2049], content[:, 2049:] = 10 + index, 20, 30
        content[:, 1 + 32 * 5 + 7] = 99
        (folder / name).write_bytes(content.tobytes())
    return folder


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_cifar_is_read_as_it_is_defined(tmp_path: Path, inside: str) -> None:
    _write_cifar(tmp_path / inside)
    found = images.cifar10(tmp_path)
    assert found.train.shape == (15, 3, 32, 32)
    assert found.held_out.shape == (3, 3, 32, 32)
    assert found.train_labels.tolist() == [(record + batch) % 10 for batch in range(5) for record in range(3)]
    # Channel by channel, row by row, in the order of the files.
    assert found.train[3 * 2, :, 0, 0].tolist() == [12, 20, 30]
    assert int(found.train[0, 0, 5, 7]) == 99
    assert found.held_out[0, 0, 0, 0] == 15
    pixels = found.normalised(found.train)
    assert pixels.dtype == torch.float32
    assert abs(float(pixels.mean())) < 0.1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * (RECORD - 1),
        b"\x00" * (2 * RECORD + 1),
        b"\x0a" + b"\x00" * (RECORD - 1),
        b"\xff" * RECORD,
        b"\x00" * RECORD * 10_001,
        pickle.dumps({"data": [1, 2, 3]}),
    ],
    ids=["empty", "short", "long", "class 10", "class 255", "too many", "pickle"],
)
def test_hostile_and_short_cifar_files_are_refused(tmp_path: Path, content: bytes) -> None:
    _write_cifar(tmp_path)
    (tmp_path / "data_batch_4.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"data_batch_4\.bin.*(records of 3073|is of class)"):
        images.cifar10(tmp_path)


def test_a_missing_cifar_file_and_one_that_is_no_file_are_errors(tmp_path: Path) -> None:
    _write_cifar(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match="cifar-10-binary"):
        images.cifar10(tmp_path)
    os.mkfifo(tmp_path / "test_batch.bin")
    with pytest.raises(ValueError, match="is not a file"):
        images.cifar10(tmp_path)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "harm"),)

    _write_cifar(tmp_path)
    payload = pickle.dumps(Bomb())
    (tmp_path / "data_batch_1.bin").write_bytes(payload + b"\x00" * (-len(payload) % RECORD))
    with pytest.raises(ValueError, match="is of class"):
        images.cifar10(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_the_digits_are_split_by_index() -> None:
    pytest.importorskip("sklearn")
    found = images.digits()
    assert (found.train.shape, found.held_out.shape) == ((898, 1, 8, 8), (899, 1, 8, 8))
    assert found.train.dtype == torch.uint8
    assert int(found.train.max()) == 240
    assert set(found.held_out_labels.tolist()) == set(range(10))


# --- the task


@pytest.fixture
def cifar_task(tmp_path: Path) -> ImageTask:
    return ImageTask(data=str(_write_cifar(tmp_path)), width=8, steps=10, batch=4, probe_images=2)


def test_the_task_is_a_function_of_seed_and_rank(cifar_task: ImageTask) -> None:
    first, second = (list(cifar_task.batches(3, rank, 2)) for rank in (0, 1))
    again = list(cifar_task.batches(3, 0, 2))
    assert len(first) == cifar_task.steps
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    weights = [torch.cat([p.flatten() for p in cifar_task.build(seed).parameters()]) for seed in (3, 3, 4)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_learning_rate_falls_to_a_tenth_once(cifar_task: ImageTask) -> None:
    rates = [cifar_task.rate(step) for step in range(cifar_task.steps)]
    assert rates == pytest.approx([0.02] * 7 + [0.002] * 3)
    assert cifar_task.drop_step == 7


def test_every_held_out_image_is_scored_once(cifar_task: ImageTask) -> None:
    model = cifar_task.build(0)
    parts = [cifar_task.score(model, rank, 2, probe=False) for rank in (0, 1)]
    total, right, count = cifar_task.score(model, 0, 1, probe=False)
    assert sum(part[2] for part in parts) == count == 3
    assert sum(part[1] for part in parts) == right
    assert sum(part[0] for part in parts) == pytest.approx(total, rel=1e-5)
    assert cifar_task.evaluate(model, 0, 1, probe=False) == (total, count)


def test_the_network_is_mostly_convolutions() -> None:
    model = ResNet(1, 32)
    size = {name: parameter.numel() for name, parameter in model.named_parameters()}
    convolutions = sum(p.numel() for p in model.parameters() if p.ndim == 4)
    assert 0.25e6 < sum(size.values()) < 1e6
    assert convolutions > 0.98 * sum(size.values())
    assert not list(model.buffers())


# --- equations 1 to 4


SPEEDS = cost.Throughputs(convert=100e9, transform=50e9, pack=25e9, select=20e9)


def test_the_cost_model_is_that_of_the_paper() -> None:
    # 2/100 + 1/50 + 1/25 + 1/20 = 0.13 seconds a gigabyte.
    assert SPEEDS.seconds_per_byte == pytest.approx(0.13e-9)
    assert cost.compression_seconds(2e9, SPEEDS) == pytest.approx(0.26)
    # 10 Gbit/s are 1.25 GB/s: 1 GB takes 0.8 s, a fifth of it 0.16 s.
    assert cost.communication_seconds(1e9, 1.25e9, 5) == pytest.approx(0.16)
    assert cost.saved_seconds(1e9, 1.25e9, 5) == pytest.approx(0.64)
    # 1 / (1 - 1.25 * 0.26) = 1 / 0.675
    assert cost.minimal_ratio(1.25e9, 2 * SPEEDS.seconds_per_byte) == pytest.approx(1 / 0.675)
    # 56 Gbit/s are 7 GB/s, and 7 * 0.26 is over one.
    assert cost.minimal_ratio(7e9, 2 * SPEEDS.seconds_per_byte) == math.inf
    assert cost.useful_bandwidth(2 * SPEEDS.seconds_per_byte) == pytest.approx(1e9 / 0.26)


def test_at_the_minimal_ratio_saving_and_cost_are_equal() -> None:
    for bandwidth in (0.1e9, 1e9, 3e9):
        ratio = cost.minimal_ratio(bandwidth, 2 * SPEEDS.seconds_per_byte)
        saved = cost.saved_seconds(1e9, bandwidth, ratio)
        assert saved == pytest.approx(2 * cost.compression_seconds(1e9, SPEEDS))


def test_the_bitmap_costs_what_it_has_bits() -> None:
    # 25 million values: 5 MB of values at a ratio of 20, and 3.125 MB of bitmap.
    assert cost.message_bytes(100e6, 20, bitmap=False) == pytest.approx(5e6)
    assert cost.message_bytes(100e6, 20, bitmap=True) == pytest.approx(8.125e6)
    assert cost.ratio_with_bitmap(20) == pytest.approx(100 / 8.125)


def test_codes_of_the_range_based_float() -> None:
    # Three bits of mantissa: eight steps from each power of two to the next.
    x = torch.tensor([1.0, 1.124, 1.125, 2.0, 4.0])
    assert cost.range_codes(x, 3, 1.0).tolist() == [1, 1, 2, 9, 17]


def test_throughputs_are_measured() -> None:
    found = cost.measure(10_000, 0.85, 1)
    assert all(1e6 < value < 1e13 for value in vars(found).values())


# --- reconstruction


def _gradients(ranks: int = 2) -> Gradients:
    generator = torch.Generator().manual_seed(0)
    layers = tuple(tuple(torch.randn(8, 16, generator=generator) for _ in range(2)) for _ in range(ranks))
    return Gradients((0,), ("one", "two"), (layers,))


def test_a_reconstruction_is_the_mean_of_what_each_rank_sends() -> None:
    gradients = _gradients()
    exact = [torch.stack([rank[i].flatten() for rank in gradients.layers[0]]).mean(0) for i in range(2)]
    codec = MinMax(bits=4, bucket=128, rounding="nearest")
    found = reconstruct.reconstruct(gradients, 0, codec)
    assert torch.allclose(found.exact, torch.cat(exact))
    # Nearest rounding: within half a unit of each rank's range over fifteen steps.
    widest = max(float(layer.max() - layer.min()) for rank in gradients.layers[0] for layer in rank)
    assert 0 < float(found.errors.max()) <= widest / 30 * 1.001
    assert found.relative_error == pytest.approx(float(found.errors.norm() / found.exact.norm()))
    assert reconstruct.num_levels(gradients.layers[0][0][0], codec) <= 16


def test_histograms_and_shares() -> None:
    edges = np.array([-1.0, 0.0, 1.0])
    same = reconstruct.Reconstruction(torch.tensor([-0.5, 0.5, -3.0, 3.0]), torch.tensor([-0.1, 0.9, -0.2, 7.0]))
    assert reconstruct.histogram(same.exact, edges).tolist() == [0.5, 0.5]
    assert reconstruct.distance(same, edges) == 0
    other = reconstruct.Reconstruction(torch.tensor([-0.5, -0.5]), torch.tensor([0.5, 0.5]))
    assert reconstruct.distance(other, edges) == 1
    errors = {"a": torch.zeros(10), "b": torch.ones(10), "c": torch.full((10,), 2.0)}
    found = {name: reconstruct.quantiles(values) for name, values in errors.items()}
    assert reconstruct.share_with_least_error(found, "a") == 1
    assert reconstruct.share_with_least_error(found, "b") == 0
    assert reconstruct.share_with_least_error(found, "b", ["c"]) == 1


def test_the_largest_layer_is_a_part_of_the_whole() -> None:
    gradients = _gradients()
    codec = MinMax(bits=4, bucket=128, rounding="nearest")
    assert reconstruct.largest_layer(gradients) == 0
    whole = reconstruct.reconstruct(gradients, 0, codec)
    second = reconstruct.reconstruct_layer(gradients, 0, 1, codec)
    assert torch.equal(whole.exact[128:], second.exact)
    assert torch.equal(whole.received[128:], second.received)


# --- the methods


def test_every_spec_is_a_compressor_of_the_paper() -> None:
    for spec in methods.all_specs():
        thinwire.parse(spec)
    codecs = {name: thinwire.parse(spec) for name, spec in methods.SPECS.items() if "{" not in spec}
    assert [codecs[method.name].wants_feedback for method in methods.LOSSY] == [False] * 4
    planned = {method.name: thinwire.parse(method.with_feedback().spec or "") for method in methods.LOSSY}
    keeps = {name: codec.wants_feedback or codec.spec_name == "ef" for name, codec in planned.items()}
    assert keeps == dict.fromkeys(keeps, True)


def test_messages_are_as_long_as_the_paper_counts() -> None:
    numel = 1 << 20
    bits = {m.name: 8 * thinwire.parse(methods.SPECS[m.name]).wire_bytes((numel,)) / numel for m in methods.LOSSY}
    # 15 % of half as many complex numbers of twice 10 bits, and a bitmap of theirs; 15 % of 32 bits, and a bitmap.
    assert bits["fft"] == pytest.approx(32 / methods.FFT.ratio + 0.5, rel=0.01)
    assert bits["topk"] == pytest.approx(32 / methods.TOPK.ratio + 1, rel=0.01)
    assert bits["qsgd"] == pytest.approx(32 / methods.QSGD.ratio, rel=0.01)
    assert bits["terngrad"] == pytest.approx(32 / methods.TERNGRAD.ratio, rel=0.01)


def test_theta_drops_to_0_at_its_step() -> None:
    codec = thinwire.parse(methods.dropped(0.9, 288))
    numel = 1 << 16
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    before, after = (codec.at(step, None) for step in (287, 288))
    assert float((before.roundtrip(x) - x).norm() / x.norm()) > 0.5
    # Nothing is dropped; what is left is the rounding of ten bits.
    assert float((after.roundtrip(x) - x).norm() / x.norm()) < 0.02
    assert before.wire_bytes((numel,)) < after.wire_bytes((numel,)) < 0.4 * 4 * numel


# --- judging


def _trained(accuracy: float, alpha: tuple[tuple[int, float], ...] = ()) -> Trained:
    return Trained((0.1, 0.2), 0.15, (2.0, 1.0), (2,), (0.1, accuracy), (2.3, 1.0), 8.0, accuracy, 1.0, alpha)


class _Study:
    """A study whose runs are made up."""

    task = ImageTask(steps=2)
    scale = Scale(task, seeds=3)
    seeds = range(3)

    def __init__(self, out: Path, runs: dict[str | None, Trained]) -> None:
        self._out, self._runs = out, runs

    def picture(self, figure: str) -> Path:
        return self._out / f"fig{figure}.svg"

    def train(self, spec: str | None, seed: int, **options: Any) -> Trained:
        return self._runs[spec]


@pytest.mark.parametrize(("highest", "holds"), [(0.9, True), (1.2, False), (math.nan, False)])
def test_alpha_is_judged_by_its_highest(tmp_path: Path, highest: float, holds: bool) -> None:
    pytest.importorskip("matplotlib")
    samples = ((0, 0.3), (10, highest), (20, 0.4))
    runs = {methods.constant(theta): _trained(0.9, samples) for theta in of_theorems.alpha_thetas()}
    found = of_theorems.figure_12(_Study(tmp_path, dict(runs)))  # pyright: ignore[reportArgumentType]
    assert [row.holds for row in found if row.claim] == [holds]
    assert (tmp_path / "fig12.svg").exists()


def test_theorems_are_judged_by_accuracy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    dropped = methods.dropped(of_theorems.STRONG, _Study.task.drop_step)
    mild, strong = (methods.constant(theta) for theta in (of_theorems.MILD, of_theorems.STRONG))
    runs = {None: _trained(0.95), mild: _trained(0.949), strong: _trained(0.9), dropped: _trained(0.8)}
    found = of_theorems.figure_13(_Study(tmp_path, runs))  # pyright: ignore[reportArgumentType]
    assert {row.name: row.holds for row in found if row.claim} == {
        "accuracy/mild": True,
        "accuracy/strong": True,
        "accuracy/dropped": False,
        "train_loss/mild": True,
        "train_loss/strong": False,
    }


def test_training_loss_is_compared_relatively() -> None:
    base, above, diverged = (dataclasses.replace(_trained(0.9), train_loss=(2.0, x)) for x in (0.5, 0.6, math.nan))
    assert of_theorems.added_loss([base, base], [base, above]) == pytest.approx([0.0, 0.2])
    assert of_theorems.added_loss([base, diverged], [diverged, base]) == [math.inf, math.inf]


def test_claims_are_judged_with_their_bounds() -> None:
    assert no_worse([0.001, 0.0, -0.001], 0.005)[1] is True
    assert no_worse([0.05, 0.051, 0.049], 0.005)[1] is False
    assert no_worse([0.05, -0.05, 0.0], 0.005)[1] is None
    assert no_worse([0.0], 0.005)[1] is None
    assert worse([0.05, 0.051, 0.049], 0.005)[1] is True
    assert worse([0.001, 0.0, -0.001], 0.005)[1] is False
    assert faster([1.0, 2.0], [[1.1, 2.1], [1.2, 2.2]]) is True
    assert faster([1.0, 2.0], [[1.1, 2.1], [0.9, 1.9]]) is False
    assert faster([1.0, 2.0], [[1.1, 1.9]]) is None
    assert faster([1.0], [[1.1]]) is None


def test_rows_carry_claim_and_verdict_and_no_value_that_is_not_json() -> None:
    rows = [
        Finding("10", "ratio", math.inf, "x", "a ratio of 2 is enough", "none is", False, {"curve": [1.0, math.nan]}),
        Finding("10", "more", 1.0, "x", "", "as it is", None),
        Finding("10", "shown", 1.0, "x", "", "as it is", None, aside="with [error] feedback"),
    ]
    found = record(rows, "thinwire repro fft", {}).to_dict()["results"]
    assert found[0] == {
        "name": "fig10/ratio",
        "value": None,
        "unit": "x",
        "figure": "10",
        "claim": "a ratio of 2 is enough",
        "found": "none is",
        "holds": False,
        "curve": [1.0, None],
    }
    assert table(rows, "as found").row_count == 2
