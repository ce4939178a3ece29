"""Trainings in a lab whose links are cut: an error with the rank, or the same bits once the link is back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from thinwire_tools import lab

MISSING = lab.unavailable()
pytestmark = [
    pytest.mark.alone,
    pytest.mark.network,
    pytest.mark.timeout(240),
    pytest.mark.skipif(MISSING is not None, reason=MISSING or ""),
]

STEPS = 16
TRAINING = """
import hashlib, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import thinwire
dist.init_process_group("gloo")
rank, timeout = dist.get_rank(), timedelta(seconds=float(sys.argv[1]))
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
wire = thinwire.compress(model, "ef(minmax(bits=2))", network=thinwire.Network(timeout=timeout), skip_if_slower=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(int(sys.argv[2])):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, flush=True)
        time.sleep(0.05)
    weights = model.module.weight.detach().numpy().tobytes()
    print("weights", hashlib.sha256(weights).hexdigest(), wire.stats.compressed_steps, flush=True)
except thinwire.TransportError as error:
    assert len(wire.state_dict()) > 0
    print("named", error.rank, flush=True)
"""


def train(network: lab.Network, script: Path, timeout_s: float, cut_s: float) -> list[str]:
    """The last line of each rank, where the link of rank 1 is cut for ``cut_s`` seconds after a few steps."""
    script.write_text(TRAINING)
    argv = [sys.executable, str(script), str(timeout_s), str(STEPS)]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    ranks = [network.popen(rank, argv, **pipes) for rank in range(2)]
    lines: list[list[str]] = [[], []]
    readers = [threading.Thread(target=lambda r=r: lines[r].extend(ranks[r].stdout), daemon=True) for r in range(2)]
    for reader in readers:
        reader.start()
    end = time.monotonic() + 90.0
    while not any("step 5" in line for line in lines[0]):
        assert time.monotonic() < end, lines
        assert ranks[0].poll() is None, lines
        time.sleep(0.01)
    if cut_s:
        network.set_link(1, up=False)
        if cut_s < timeout_s:
            time.sleep(cut_s)
            network.set_link(1, up=True)
    for rank, reader in zip(ranks, readers, strict=True):
        rank.wait(90.0)
        reader.join(10.0)
        rank.stdout.close()
    return [of_rank[-1].strip() for of_rank in lines]


def test_where_a_link_is_cut_each_rank_names_the_other(tmp_path: Path) -> None:
    with lab.Network(2) as network:
        assert train(network, tmp_path / "train.py", 5.0, 600.0) == ["named 1", "named 0"]


def test_a_link_that_comes_back_in_time_changes_no_bit(tmp_path: Path) -> None:
    ends = []
    for cut_s in (0.0, 1.0):
        with lab.Network(2) as network:
            ends.append(train(network, tmp_path / "train.py", 60.0, cut_s))
    assert ends[0][0] == ends[0][1]
    assert ends[0] == ends[1]
    assert ends[0][0].endswith(f" {STEPS}"), "every step was compressed"
