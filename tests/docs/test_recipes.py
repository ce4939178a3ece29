"""The recipes of docs/recipes.md, and the notebook: each is run as a reader would."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(*argv: str, timeout: float = 200, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": timeout, "env": ENVIRONMENT | environment}
    done = subprocess.run(argv, check=False, **options)
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


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


def losses(text: str) -> dict[str, str]:
    """Losses by step."""
    return dict(re.findall(r"step (\d+): loss ([\d.]+)", text))


@pytest.mark.timeout(400)
def test_a_killed_training_goes_on_and_ends_where_it_would_have(tmp_path: Path) -> None:
    script, path = str(EXAMPLES / "elastic.py"), tmp_path / "out" / "killed.pt"
    whole = run(*TORCHRUN, script, "--checkpoint", str(tmp_path / "whole.pt"))
    # Not with --max-restarts: gloo may not join ranks anew that torchrun restarts in place, with or without thinwire.
    killed = run(*TORCHRUN, script, "--checkpoint", str(path), "--die-at", "25", check=False)
    assert killed.returncode != 0
    assert path.exists()
    rest = run(*TORCHRUN, script, "--checkpoint", str(path))
    assert "goes on from step 20" in rest.stdout
    assert losses(killed.stdout) | losses(rest.stdout) == losses(whole.stdout)
    assert len(losses(whole.stdout)) == 4
    # Weights, the optimizer's moments, residuals and counters, bit for bit.
    ended, should = (tensors(torch.load(file, weights_only=True)) for file in (path, tmp_path / "whole.pt"))
    assert ended.keys() == should.keys()
    assert [name for name in should if not torch.equal(bits(ended[name]), bits(should[name]))] == []
    assert should["model/0.weight"].abs().sum() > 0
    residuals = [name for name in should if name.startswith("wire/") and "residual" in name]
    assert residuals
    assert all(should[name].abs().sum() > 0 for name in residuals)


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'")
@pytest.mark.timeout(400)
def test_ray_train_replaces_a_killed_worker_and_goes_on() -> None:
    script = str(EXAMPLES / "ray_train.py")
    quiet = {"RAY_USAGE_STATS_ENABLED": "0"}
    done = run(sys.executable, script, "--die-at", "25", timeout=350, **quiet)
    (told,) = re.findall(r"^step 40: loss ([\d.]+), last attempt from step (\d+)$", done.stdout, re.MULTILINE)
    assert int(told[1]) in (10, 20)
    assert float(told[0]) < 0.7


@pytest.mark.skipif(sys.platform != "linux", reason="takes bash")
def test_the_slurm_script_is_bash_and_starts_the_script_with_options_that_it_has() -> None:
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "examples/elastic.py --checkpoint" in text
    from torch.distributed.run import get_args_parser

    known = get_args_parser().format_help()
    options = re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)
    assert options
    assert all(option in known for option in options)


@pytest.mark.timeout(240)
def test_the_tour_runs() -> None:
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    printed, names = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed):
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    told = printed.getvalue()
    assert "2.weight  256" in told
    assert "raw: 1 dimension" in told
    assert re.search(r"thinwire run: 40 steps, .* \((6|7)\.\d+x less\)", told)
    found = [float(loss) for loss in re.findall(r"step 40: loss ([\d.]+)", told)]
    assert len(found) == 2
    assert found[1] == pytest.approx(found[0], rel=0.05)
