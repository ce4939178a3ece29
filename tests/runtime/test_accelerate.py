"""Checkpoints that Accelerate writes."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from harness import on_ranks
from nets import fingerprint, make, train, trained


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.timeout(300)
@on_ranks(2, timeout_s=250)
def test_accelerate_saves_and_loads_it(rank: int, tmp_path: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    from accelerate import Accelerator

    def begin() -> tuple[Any, Any, Any]:
        accelerator = Accelerator(cpu=True)
        module = make(rank).module
        model, optimizer = accelerator.prepare(module, torch.optim.Adam(trained(module)))
        wire = thinwire.compress(model, "ef(minmax(bits=2))", skip_if_slower=False)
        accelerator.register_for_checkpointing(wire.checkpointable())
        return accelerator, model, optimizer

    accelerator, model, optimizer = begin()
    train(model, rank, 3, optimizer=optimizer)
    accelerator.save_state(str(tmp_path))
    train(model, rank, 2, first=3, optimizer=optimizer)
    again, resumed, its_optimizer = begin()
    again.load_state(str(tmp_path))
    train(resumed, rank, 2, first=3, optimizer=its_optimizer)
    assert fingerprint(resumed) == fingerprint(model)
