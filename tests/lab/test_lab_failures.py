"""Trainings in a lab one of whose links is cut: an error with the rank, or the same bits once it is back."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TextIO

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire_tools import lab
from thinwire_tools.ranks import ForkedProcess

MISSING = lab.unavailable()
pytestmark = [
    pytest.mark.network,
    pytest.mark.timeout(240),
    pytest.mark.skipif(MISSING is not None, reason=MISSING or ""),
]


def train(timeout_s: int, steps: int, _: TextIO, answers: TextIO) -> None:
    """Writes a line a step, and how it ends."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    network = thinwire.Network(timeout=timedelta(seconds=timeout_s))
    wire = thinwire.compress(model, "ef(minmax(bits=2))", network=network, skip_if_slower=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(steps):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            print("step", step, file=answers, flush=True)
            time.sleep(0.05)
        weights = model.module.weight.detach().numpy().tobytes()
        print("weights", hashlib.sha256(weights).hexdigest(), wire.stats.compressed_steps, file=answers, flush=True)
    except thinwire.TransportError as error:
        assert len(wire.state_dict()) > 0
        print("named", error.rank, file=answers, flush=True)
    os._exit(0)


def ends(folder: Path, timeout_s: int, steps: int, changes: list[tuple[bool, float]]) -> list[str]:
    """The last line of each rank; after a few steps the link of rank 1 is up, or not, for these times."""
    with lab.Network(2) as network:
        run, logs = partial(train, timeout_s, steps), (folder / "rank0", folder / "rank1")
        ranks = [ForkedProcess(run, network.namespaces(rank), log) for rank, log in enumerate(logs)]
        try:
            assert any(b"step 5" in line for line in ranks[0].stdout), logs[0].read_text()
            for up, seconds in changes:
                network.set_link(1, up=up)
                time.sleep(seconds)
            return [rank.stdout.readall().decode().splitlines()[-1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.close()


def test_where_a_link_is_cut_each_rank_names_the_other(tmp_path: Path) -> None:
    assert ends(tmp_path, 5, 1000, [(False, 0.0)]) == ["named 1", "named 0"]


def test_a_link_that_comes_back_in_time_changes_no_bit(tmp_path: Path) -> None:
    first, second = ends(tmp_path, 60, 16, [])
    assert first == second
    assert first.endswith(" 16"), "every step was compressed"
    assert ends(tmp_path, 60, 16, [(False, 1.0), (True, 0.0)]) == [first, first]
