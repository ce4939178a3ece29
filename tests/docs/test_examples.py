"""The scripts in examples/ do what they say, as torchrun starts them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, num_ranks: int, *options: str) -> str:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    argv += [str(EXAMPLES / name), *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(told: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", told)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "least"), [("ddp.py", 5.0), ("fsdp.py", 3.0)])
def test_small_ones_learn_and_send_less(name: str, least: float) -> None:
    told = run(name, 2)
    found = losses(told)
    assert found[-1] < found[0]
    ratios = [float(ratio) for ratio in re.findall(r"\((\d+\.\d+)x less\)", told)]
    assert len(ratios) == 2
    assert min(ratios) > least


@pytest.mark.timeout(300)
def test_local_updates_learn_and_send_few_bytes() -> None:
    printed = run("local.py", 2)
    found = losses(printed)
    assert found[-1] < found[0]
    pairs = re.findall(r"(\d+) bytes a step; gradients in fp32 take (\d+)", printed)
    assert len(pairs) == 2
    assert all(100 * int(sent) < int(gradients) for sent, gradients in pairs)


@pytest.mark.timeout(300)
def test_local_updates_of_sharded_replicas_learn() -> None:
    printed = run("local_fsdp.py", 4)
    found = losses(printed)
    assert len(found) == 4
    assert found[-1] < 0.9 * found[0]
    assert len(re.findall(r"bytes a step to the other replica", printed)) == 4


def start(name: str, *options: str) -> str:
    """Run an example that starts its ranks itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    argv = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(300)
def test_the_pipeline_learns_and_sends_less() -> None:
    told = run("pipeline.py", 2)
    found = losses(told)
    assert len(found) == 8
    assert found[-1] < 0.97 * found[0]
    assert min(float(ratio) for ratio in re.findall(r"\((\d+\.\d+)x less\)", told)) > 4


@pytest.mark.timeout(300)
def test_a_stream_is_sent_as_changes_from_centres() -> None:
    told = run("pipeline_stream.py", 2)
    found = losses(told)
    assert len(found) == 5
    assert found[-1] < 0.5 * found[0]
    assert min(float(ratio) for ratio in re.findall(r"\((\d+\.\d+)x less\)", told)) > 4
    assert told.count("33792 bytes of centres") == 2


@pytest.mark.timeout(300)
def test_tensor_parallelism_learns_and_sends_less() -> None:
    told = run("tensor_parallel.py", 2)
    found = losses(told)
    assert len(found) == 8
    assert found[-1] < 0.97 * found[0]
    ratios = [float(ratio) for ratio in re.findall(r"\((\d+\.\d+)x less\)", told)]
    assert len(ratios) == 2
    assert min(ratios) > 3


@pytest.mark.timeout(300)
def test_split_learning_learns_and_sends_less() -> None:
    pytest.importorskip("sklearn")
    told = run("split_learning.py", 3)
    found = losses(told)
    assert len(found) == 8
    assert found[-1] < 0.7 * found[0]
    (right,) = re.findall(r"(\d+\.\d)% of held-out images", told)
    assert float(right) > 50
    assert min(float(ratio) for ratio in re.findall(r"\((\d+\.\d+)x less\)", told)) > 2


TRAINERS = {
    "transformers": ("transformers", lambda: run("trainer.py", 2)),
    "accelerate": ("accelerate", lambda: run("trainer.py", 2, "--accelerate")),
    "accelerate, local updates": ("accelerate", lambda: run("accelerate_local.py", 2)),
    "lightning": ("pytorch_lightning", lambda: start("lightning.py")),
    "lightning, local updates": ("pytorch_lightning", lambda: start("lightning_local.py")),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("library", "train"), TRAINERS.values(), ids=TRAINERS)
def test_trainers_learn_and_send_less(library: str, train: Callable[[], str]) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'thinwire[trainers]'")
    told = train()
    found = losses(told)
    assert len(found) == (4 if library == "pytorch_lightning" else 3)
    assert found[-1] < 0.9 * found[0]
    ratios = [float(ratio) for ratio in re.findall(r"\((\d+\.\d+)x less\)", told)]
    assert len(ratios) == 2, told
    assert min(ratios) > 5


@pytest.mark.timeout(400)
def test_the_full_stack_goes_on_bit_for_bit_and_replicas_stay_alike(tmp_path: Path) -> None:
    once = run("full_stack.py", 4, "--epochs", "4")
    # In the first epochs the optimizer warms up; the stop comes when momenta travel.
    parts = [run("full_stack.py", 4, "--epochs", epochs, "--checkpoint", str(tmp_path)) for epochs in ("3", "1")]
    assert losses(once) == losses(parts[0]) + losses(parts[1])
    ends = [dict(re.findall(r"(stage \d, replica \d): gradients.*parameters (\w+)", told)) for told in (once, parts[1])]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 4
    for stage in (0, 1):
        assert ends[0][f"stage {stage}, replica 0"] == ends[0][f"stage {stage}, replica 1"]
    assert losses(once)[-1] < losses(once)[0]
