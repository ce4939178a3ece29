"""The scripts in examples/, the recipes of docs/trainers.md and the notebook do what they say."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from harness import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def start(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run what starts its ranks itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_USAGE_STATS_ENABLED": "0"}
    options = {"capture_output": True, "text": True, "timeout": 250, "env": environment}
    done = subprocess.run([sys.executable, *arguments], check=False, **options)
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def as_script(rank: int, num_ranks: int, name: str, options: tuple[str, ...]) -> str:
    """What a rank of ``torchrun examples/NAME`` prints, where PyTorch is loaded and the ranks have met already."""
    import torch.distributed as dist

    told_by_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    told_by_torchrun |= {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "none"}
    os.environ.update({name: str(value) for name, value in told_by_torchrun.items()})
    dist.init_process_group = lambda *_, **__: None
    sys.argv = [name, *options]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return told.getvalue()


def run(name: str, num_ranks: int, *options: str) -> str:
    """What all ranks of an example print."""
    return "".join(run_ranks(as_script, num_ranks, num_ranks, name, options, timeout_s=200, group_timeout_s=60))


def losses(told: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", told)]


class Expected(NamedTuple):
    """Of an example: what it needs, how often it tells its loss, what that falls to, and how much less is sent."""

    ranks: int | None
    """None: it starts them itself."""
    num_losses: int
    falls_to: float
    less: float = 0.0
    """At least, said as often as there are ranks."""
    needs: str = "torch"
    options: tuple[str, ...] = ()
    says: str = ""
    """A pattern for each rank's line."""


EXPECTED = {
    "ddp.py": Expected(2, 4, 1.0, less=5.0),
    "fsdp.py": Expected(2, 4, 1.0, less=3.0),
    "local_fsdp.py": Expected(4, 4, 0.9, says="bytes a step to the other replica"),
    "pipeline.py": Expected(2, 8, 0.97, less=4.0),
    "pipeline_stream.py": Expected(2, 5, 0.5, less=4.0, says="33792 bytes of centers"),
    "tensor_parallel.py": Expected(2, 8, 0.97, less=3.0),
    "split_learning.py": Expected(3, 8, 0.7, less=2.0, needs="sklearn"),
    "trainer.py": Expected(2, 3, 0.9, less=5.0, needs="transformers"),
    "trainer.py --accelerate": Expected(2, 3, 0.9, less=5.0, needs="accelerate", options=("--accelerate",)),
    "accelerate_local.py": Expected(2, 3, 0.9, less=5.0, needs="accelerate"),
    "lightning.py": Expected(None, 4, 0.9, less=5.0, needs="pytorch_lightning"),
    "lightning_local.py": Expected(2, 4, 0.9, less=5.0, needs="pytorch_lightning"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EXPECTED)
def test_examples_learn_and_send_less(name: str) -> None:
    ranks, num_losses, falls_to, less, needs, options, says = EXPECTED[name]
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: pip install 'thinwire[trainers]'")
    script = name.split()[0]
    told = start(str(EXAMPLES / script)).stdout if ranks is None else run(script, ranks, *options)
    found = losses(told)
    assert len(found) == num_losses, told
    assert found[-1] < falls_to * found[0]
    ratios = [float(ratio) for ratio in re.findall(r"\((\d+\.\d+)x less\)", told)]
    assert not less or (len(ratios) == (ranks or 2) and min(ratios) > less), told
    assert not says or len(re.findall(says, told)) == ranks, told
    for right in re.findall(r"(\d+\.\d)% of held-out images", told):
        assert float(right) > 50


@pytest.mark.timeout(300)
def test_local_updates_learn_and_send_few_bytes() -> None:
    printed = run("local.py", 2)
    found = losses(printed)
    assert found[-1] < found[0]
    pairs = re.findall(r"(\d+) bytes a step; gradients in fp32 take (\d+)", printed)
    assert len(pairs) == 2
    assert all(100 * int(sent) < int(gradients) for sent, gradients in pairs)


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


def tensors(state: object, name: str = "") -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, by its place; numbers as tensors."""
    if isinstance(state, dict | list):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for key, value in items for k, v in tensors(value, f"{name}/{key}".lstrip("/")).items()}
    if isinstance(state, torch.Tensor):
        return {name: state}
    return {name: torch.tensor(state if isinstance(state, int | float) else list(str(state).encode()))}


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().reshape(-1).view(torch.uint8)


def by_step(text: str) -> dict[str, str]:
    return dict(re.findall(r"step (\d+): loss ([\d.]+)", text))


@pytest.mark.timeout(400)
def test_a_killed_training_goes_on_and_ends_where_it_would_have(tmp_path: Path) -> None:
    path = tmp_path / "out" / "killed.pt"
    whole = run("elastic.py", 2, "--checkpoint", str(tmp_path / "whole.pt"))
    # Not with --max-restarts: gloo may not join ranks anew that torchrun restarts in place, with or without thinwire.
    killed = start(*TORCHRUN, str(EXAMPLES / "elastic.py"), "--checkpoint", str(path), "--die-at", "25", check=False)
    assert killed.returncode != 0
    assert path.exists()
    rest = run("elastic.py", 2, "--checkpoint", str(path))
    assert "goes on from step 20" in rest
    assert by_step(killed.stdout) | by_step(rest) == by_step(whole)
    assert len(by_step(whole)) == 4
    # Weights, the optimizer's moments, residuals and counters, bit for bit.
    ended, should = (tensors(torch.load(file, weights_only=True)) for file in (path, tmp_path / "whole.pt"))
    assert ended.keys() == should.keys()
    assert [name for name in should if not torch.equal(bits(ended[name]), bits(should[name]))] == []
    assert should["model/0.weight"].abs().sum() > 0
    residuals = [name for name in should if name.startswith("wire/") and "residual" in name]
    assert residuals
    assert all(should[name].abs().sum() > 0 for name in residuals)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("wrapper", [(), ("--fsdp",)], ids=["ddp", "fsdp"])
def test_ray_train_replaces_a_killed_worker_and_goes_on(wrapper: tuple[str, ...]) -> None:
    done = start(str(EXAMPLES / "ray_train.py"), "--die-at", "25", *wrapper)
    (told,) = re.findall(r"^step 40: loss ([\d.]+), last attempt from step (\d+)$", done.stdout, re.MULTILINE)
    assert int(told[1]) in (10, 20)
    assert float(told[0]) < 0.7


def test_the_slurm_script_is_bash_and_starts_the_script_with_options_that_it_has() -> None:
    from torch.distributed.run import get_args_parser

    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    known = get_args_parser().format_help()
    options = re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)
    assert options
    assert all(option in known for option in options)


@pytest.mark.timeout(240)
def test_the_tour_runs() -> None:
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    names = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    told = printed.getvalue()
    assert re.search(r"thinwire run: 40 steps, .* \((6|7)\.\d+x less\)", told)
    found = [float(loss) for loss in re.findall(r"step 40: loss ([\d.]+)", told)]
    assert len(found) == 2
    assert found[1] == pytest.approx(found[0], rel=0.05)
