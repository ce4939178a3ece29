"""``thinwire doctor`` and pipelines: what it sees of them, leaves alone, predicts and refuses."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed import pipelining

import thinwire
from doctor_pipeline_training import WIDTH, train
from harness import run_ranks
from thinwire.compressors import parse
from thinwire.runtime.probe import Pair
from thinwire_tools import lab
from thinwire_tools.doctor import page, report
from thinwire_tools.doctor.observer_pipeline import PipelineObserver, WatchedPipeline
from thinwire_tools.doctor.record_pipeline import record_pipeline
from thinwire_tools.doctor.settings_pipeline import (
    MeasuredPipeline,
    PipelineSetting,
    pipeline_compressors,
    pipeline_settings,
    predict_pipeline,
)
from thinwire_tools.doctor.watched import DoctorError
from thinwire_tools.planner import Schedule, StageTimes

pytestmark = pytest.mark.alone
SCRIPT = str(Path(__file__).parents[1] / "support" / "doctor_pipeline_training.py")


def watch(rank: int, schedule: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def done(observer: PipelineObserver) -> None:
        found["watched"] = observer.result()

    kind = pipelining.PipelineStage
    with PipelineObserver(6, done):
        import doctor_pipeline_training as script

        script.PipelineStage = pipelining.PipelineStage
        found["weights"] = train(12, schedule)
        script.PipelineStage = kind
    assert pipelining.PipelineStage is kind
    found["alone"] = train(12, schedule)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_boundaries_and_the_schedule_are_seen_and_nothing_changes(schedule: str) -> None:
    first, second = run_ranks(watch, 2, schedule)
    for found in (first, second):
        assert all(torch.equal(found["weights"][name], of) for name, of in found["alone"].items())
    assert first["watched"] == second["watched"]
    watched = first["watched"]
    assert watched.schedule.name == schedule
    assert watched.schedule.num_chunks == 4
    assert watched.activation_bytes == (4 * 64 * WIDTH,)
    assert len(watched.stages) == len(watched.step_s) == 6  # the evaluation is none of them
    assert all(of.forward_s > 0.003 and of.backward_s > 0 for step in watched.stages for of in step)
    assert all(0 < part < whole for part, whole in zip(watched.pipeline_s, watched.step_s, strict=True))
    assert watched.parameters == 2 * 2 * (WIDTH * WIDTH + WIDTH)


def test_pipelining_is_imported_by_those_who_use_it_and_is_watched_then() -> None:
    """Importing it takes about as long as the rest of doctor does, which most trainings need not wait for."""
    code = f"""
import sys
import thinwire_tools.doctor.examine
from thinwire_tools.doctor.observer_pipeline import PipelineObserver
name, before = {pipelining.__name__!r}, list(sys.meta_path)
assert name not in sys.modules
with PipelineObserver(6, print):
    assert name not in sys.modules
assert sys.meta_path == before
with PipelineObserver(6, print):
    from torch.distributed.pipelining import PipelineStage as watched
from torch.distributed.pipelining import PipelineStage
assert sys.meta_path == before
assert watched is not PipelineStage and issubclass(watched, PipelineStage)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


def refused(rank: int) -> str:
    def done(observer: PipelineObserver) -> None:
        raise AssertionError("nothing is to be seen")

    with PipelineObserver(6, done):
        stage = pipelining.PipelineStage(torch.nn.Linear(4, 4), rank, 2, torch.device("cpu"))
        compressed = thinwire.compress_stage(stage, forward="raw", backward="raw")
        schedule = pipelining.ScheduleGPipe(compressed, 2, loss_fn=torch.nn.functional.mse_loss)
        try:
            schedule.step(*([torch.ones(4, 4)] if rank == 0 else []), target=None if rank == 0 else torch.ones(4, 4))
        except DoctorError as error:
            return str(error)
    return ""


def test_a_compressed_stage_is_refused() -> None:
    assert all("take thinwire.compress() out" in answer for answer in run_ranks(refused, 2))


def measured(bandwidth: float, name: str = "1f1b") -> MeasuredPipeline:
    """Four stages of 30 ms a micro-batch; 1 MB crosses each boundary."""
    schedule = Schedule.build(name, 4, 8)  # pyright: ignore[reportArgumentType]
    stages = ((StageTimes(0.01, 0.02),) * 4,) * 3
    settings = pipeline_settings(schedule)
    codecs = dict.fromkeys(pipeline_compressors(settings), (1e-9, 1e-9))
    pairs = tuple(Pair(a, b, bandwidth, 1e-4) for b in range(4) for a in range(b))
    bare = WatchedPipeline(schedule, stages, (1.0,) * 3, (0.9,) * 3, (1e6,) * 3, 1000)
    today = predict_pipeline(settings[0], MeasuredPipeline(bare, pairs, codecs)).step.value
    watched = WatchedPipeline(schedule, stages, (today,) * 3, (today - 0.1,) * 3, (1e6,) * 3, 1000)
    return MeasuredPipeline(watched, pairs, codecs)


def answered(of: MeasuredPipeline) -> dict[str, Any]:
    predictions = [predict_pipeline(setting, of) for setting in pipeline_settings(of.watched.schedule)]
    return record_pipeline(of, predictions, about={"script": ["train.py"], "link": ""}).to_dict()


def test_a_slow_link_is_seen_and_few_bits_are_advised() -> None:
    about = answered(measured(12.5e6))["about"]
    assert about["verdict"].startswith("Bound by communication")
    first = about["advice"][0]
    assert any("thinwire.compress(stage" in line for line in first["lines"])
    assert all(row["exposed_s"] > 0 for row in about["boundaries"])
    steps = {row["title"]: row["step_s"] for row in about["predictions"]}
    assert steps["3 and 6 bits"] < steps["sent ahead, uncompressed"] < steps["as it is"]
    assert steps["zero-bubble, 3 and 6 bits"] < steps["3 and 6 bits"]
    for setting in pipeline_settings(Schedule.build("1f1b", 4, 8)):
        for spec in (setting.spec, setting.backward):
            assert spec is None or parse(spec)


def test_a_fast_link_is_left_alone_and_bubbles_are_named() -> None:
    about = answered(measured(12.5e9))["about"]
    assert about["verdict"].startswith("Not bound by communication")
    assert about["advice"][0]["title"] == "nothing"
    # Three of eleven micro-batches' time, and a tenth of a second outside of the pipeline.
    assert about["bubble_share"] == pytest.approx(0.09 / (0.33 + 0.1), rel=0.02)


def test_the_report_and_the_page_show_boundaries() -> None:
    record = answered(measured(12.5e6))
    out = io.StringIO()
    report.show(Console(file=out, width=120), record)
    shown = out.getvalue()
    assert "Stage boundaries" in shown
    assert "2 – 3" in shown
    assert "zero-bubble, 3 and 6 bits" in shown
    assert "are bubbles" in " ".join(shown.split())
    html = page.page(record)
    assert "Stage boundaries" in html
    assert "rank 3" in html


def test_lines_to_paste_name_what_exists() -> None:
    for setting in pipeline_settings(Schedule.build("1f1b", 2, 4)):
        for line in setting.lines:
            if line.startswith("schedule = "):
                assert hasattr(pipelining, line.removeprefix("schedule = ").split("(")[0])
    assert PipelineSetting("as it is").lines == ()


@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_the_command_examines_a_pipeline_over_a_slow_link(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "thinwire", "doctor", "--ranks", "2", "--rate", "20mbit", "--steps", "6"]
    command += ["--json", str(out), "--", SCRIPT, "30", str(tmp_path / "script")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, check=False, env={**os.environ, "COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stderr
    about = json.loads(out.read_text())["about"]
    assert about["schedule"] == "1f1b"
    assert about["boundaries"][0]["rate"] == pytest.approx(2.5e6, rel=0.3)
    assert about["verdict"].startswith("Bound by communication")
    assert "thinwire.compress(stage" in done.stdout
    assert all((tmp_path / f"script.ended.{rank}").exists() for rank in range(2))
