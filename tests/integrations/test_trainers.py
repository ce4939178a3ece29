"""Callbacks for trainers: what they compress, keep in checkpoints and refuse."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import run_ranks
from ranks import alike, assert_alike

RULES = {"*": "ef(minmax(bits=2))"}


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(64, 64))


def train(ddp: nn.Module, rank: int, steps: int) -> torch.Tensor:
    for step in range(steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * rank + step))
        ddp.zero_grad()
        ddp(x).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None])


def hugging_face_on(rank: int, folder: str) -> None:
    arguments = SimpleNamespace(output_dir=folder, should_save=rank == 0)

    def begin(step: int) -> Any:
        callback = thinwire.trainer_callback(RULES, skip_if_slower=False)
        # The trainer hands over the model inside, and wraps it afterwards.
        callback.on_train_begin(arguments, SimpleNamespace(global_step=step), None, model=nn.Linear(64, 64))
        return callback

    callback = begin(0)
    train(model(), rank, 3)
    callback.on_step_end(arguments, SimpleNamespace(global_step=3), None)
    callback.on_save(arguments, SimpleNamespace(global_step=3), None)
    dist.barrier()
    assert [path.name for path in Path(folder).rglob("*.pt")] == ["thinwire.pt"]
    before, resumed, net = callback.wire.state_dict(), begin(3), model()
    net.module.register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stop here"):
        net(torch.ones(1, 64))
    assert alike(before, resumed.wire.state_dict())
    missing = begin(5)
    with pytest.raises(FileNotFoundError, match="checkpoint-5"):
        model()(torch.ones(1, 64))
    missing.on_train_end(arguments, None, None)
    unwrapped = begin(0)
    with pytest.raises(TypeError, match="start it with torchrun"):
        unwrapped.on_step_end(arguments, SimpleNamespace(global_step=1), None, model=nn.Linear(2, 2))
    unwrapped.on_train_end(arguments, None, None)


def stop(module: nn.Module, inputs: object) -> None:
    raise RuntimeError("stop here")


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_hugging_face_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    run_ranks(hugging_face_on, 2, str(tmp_path))


def lightning_on(rank: int, path: str) -> None:
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    def begin() -> Any:
        strategy = thinwire.lightning_strategy(RULES, skip_if_slower=False, ddp={"find_unused_parameters": True})
        # What Lightning's Trainer gives it before it calls `configure_ddp`.
        strategy.parallel_devices = [torch.device("cpu")]
        strategy.cluster_environment = SimpleNamespace(local_rank=lambda: 0, global_rank=lambda: rank)
        strategy.model = Module()
        strategy.configure_ddp()
        return strategy

    first, again = begin(), begin()
    assert first.model.find_unused_parameters
    train(first.model, rank, 3)
    first.save_checkpoint({"optimizer_states": []}, path)
    dist.barrier()
    checkpoint = torch.load(path, weights_only=True)
    assert int(checkpoint["thinwire"]["step"]) == 2
    again.load_optimizer_state_dict(checkpoint)
    assert alike(first.wire.state_dict(), again.wire.state_dict())
    # A checkpoint that knows nothing of thinwire, as of a run before.
    begin().load_optimizer_state_dict({"optimizer_states": []})


@pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed")
def test_lightning_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    run_ranks(lightning_on, 2, str(tmp_path / "last.ckpt"))


def accelerate_on(rank: int, folder: str) -> None:
    from accelerate import Accelerator

    # accelerate asks the environment, as torchrun sets it, for the world.
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launched.items():
            patch.setenv(name, str(value))

        def begin() -> tuple[Any, Any, Any]:
            torch.manual_seed(0)
            handler = thinwire.accelerate_handler(RULES, skip_if_slower=False, ddp={"find_unused_parameters": True})
            accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
            net = accelerator.prepare(nn.Linear(64, 64))
            accelerator.register_for_checkpointing(handler.wire.checkpointable())
            return accelerator, net, handler.wire

        accelerator, net, wire = begin()
        train(net, rank, 3)
        accelerator.save_state(folder)
        again, _, resumed = begin()
        again.load_state(folder)
    assert wire.stats.compressed_steps == 3
    assert net.find_unused_parameters
    assert alike(wire.state_dict(), resumed.state_dict())


def accelerate_local_on(rank: int, folder: str) -> None:
    from accelerate import Accelerator

    net = nn.Linear(64, 64)
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    local = thinwire.local.DiLoCo(net, optimizer, every=2, compressor="minmax(bits=4)")
    for step in range(4):
        train(net, 10 * rank + step, 1)
        optimizer.step()
        local.step()
    assert_alike(net.weight.detach())


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("what", [accelerate_on, accelerate_local_on])
def test_accelerate_compresses_what_it_prepares_and_local_updates_take_its_optimizer(what: Any, tmp_path: Path) -> None:
    run_ranks(what, 2, str(tmp_path))


@pytest.mark.parametrize("library", ["trainer_callback", "lightning_strategy", "accelerate_handler"])
def test_a_wrong_option_is_refused_where_it_is_given(library: str) -> None:
    needs = {"trainer_callback": "transformers", "lightning_strategy": "pytorch_lightning"}.get(library, "accelerate")
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    for error, says, arguments, options in (
        (TypeError, r"nosuch= is not an argument .*compress_ddp\(\) takes compressor=, ex", ["4bit"], {"nosuch": 1}),
        (TypeError, r'thinwire.compress\(model, "minmax\(bits=4\)"\)', [], {"bits": 4}),
        (ValueError, r"compressor: .*Did you mean 'topk\(density=0.01\)'", ["topk(1%)"], {}),
        (TypeError, r"start must be an integer", ["4bit"], {"start": "abc"}),
    ):
        with pytest.raises(error, match=says):
            getattr(thinwire, library)(*arguments, **options)
