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


def alike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def hugging_face_on(rank: int, folder: str) -> tuple[bool, list[str], str, str]:
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
    before, resumed, net = callback.wire.state_dict(), begin(3), model()
    net.module.register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stop here"):
        net(torch.ones(1, 64))
    same = alike(before, resumed.wire.state_dict())
    missing = begin(5)
    with pytest.raises(FileNotFoundError) as lost:
        model()(torch.ones(1, 64))
    missing.on_train_end(arguments, None, None)
    unwrapped = begin(0)
    with pytest.raises(TypeError) as refused:
        unwrapped.on_step_end(arguments, SimpleNamespace(global_step=1), None, model=nn.Linear(2, 2))
    unwrapped.on_train_end(arguments, None, None)
    return same, [path.name for path in Path(folder).rglob("*.pt")], str(lost.value), str(refused.value)


def stop(module: nn.Module, inputs: object) -> None:
    raise RuntimeError("stop here")


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_hugging_face_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    for same, files, missing, unwrapped in run_ranks(hugging_face_on, 2, str(tmp_path)):
        assert same
        assert files == ["thinwire.pt"]
        assert "checkpoint-5" in missing
        assert "start it with torchrun" in unwrapped


def lightning_on(rank: int, path: str) -> tuple[bool, bool, bool]:
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
    train(first.model, rank, 3)
    first.save_checkpoint({"optimizer_states": []}, path)
    dist.barrier()
    checkpoint = torch.load(path, weights_only=True)
    again.load_optimizer_state_dict(checkpoint)
    resumed = alike(first.wire.state_dict(), again.wire.state_dict())
    # A checkpoint that knows nothing of thinwire, as of a run before.
    begin().load_optimizer_state_dict({"optimizer_states": []})
    return resumed, int(checkpoint["thinwire"]["step"]) == 2, first.model.find_unused_parameters


@pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed")
def test_lightning_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    assert run_ranks(lightning_on, 2, str(tmp_path / "last.ckpt")) == [(True, True, True)] * 2


def accelerate_on(rank: int) -> tuple[int, bool]:
    from accelerate import Accelerator

    torch.manual_seed(0)
    handler = thinwire.accelerate_handler(RULES, skip_if_slower=False, ddp={"find_unused_parameters": True})
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    net = accelerator.prepare(nn.Linear(64, 64))
    accelerator.register_for_checkpointing(handler.wire.checkpointable())
    train(net, rank, 3)
    return handler.wire.stats.compressed_steps, net.find_unused_parameters


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_compresses_what_it_prepares() -> None:
    assert run_ranks(launched_accelerate_on, 2) == [(3, True), (3, True)]


def accelerate_local_on(rank: int) -> bool:
    from accelerate import Accelerator

    net = nn.Linear(64, 64)
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    local = thinwire.local.DiLoCo(net, optimizer, every=2, compressor="minmax(bits=4)")
    for step in range(4):
        train(net, 10 * rank + step, 1)
        optimizer.step()
        local.step()
    weights = [torch.empty_like(net.weight) for _ in range(2)]
    dist.all_gather(weights, net.weight.detach())
    return torch.equal(*weights)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_local_updates_take_an_optimizer_that_accelerate_prepared() -> None:
    assert run_ranks(accelerate_local_on, 2) == [True, True]


def launched_accelerate_on(rank: int) -> tuple[int, bool]:
    # accelerate asks the environment, as torchrun sets it, for the world.
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launched.items():
            patch.setenv(name, str(value))
        return accelerate_on(rank)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_in_a_world_of_one_a_callback_has_a_wire_that_sends_nothing(tmp_path: Path) -> None:
    callback = thinwire.trainer_callback()
    arguments = SimpleNamespace(output_dir=str(tmp_path), should_save=True)
    callback.on_train_begin(arguments, SimpleNamespace(global_step=0), None, model=nn.Linear(64, 64))
    callback.on_step_end(arguments, SimpleNamespace(global_step=1), None)
    callback.on_save(arguments, SimpleNamespace(global_step=1), None)
    assert callback.wire.world_size == 1
    state = torch.load(tmp_path / "checkpoint-1" / "thinwire.pt", weights_only=True)
    callback.wire.load_state_dict(state)


@pytest.mark.parametrize("library", ["trainer_callback", "lightning_strategy", "accelerate_handler"])
def test_a_wrong_option_is_refused_where_it_is_given(library: str) -> None:
    needs = {"trainer_callback": "transformers", "lightning_strategy": "pytorch_lightning"}.get(library, "accelerate")
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    with pytest.raises(TypeError, match=r"nosuch= is not an argument .*compress_ddp\(\) takes compressor=, exclude="):
        getattr(thinwire, library)("4bit", nosuch=1)
    with pytest.raises(TypeError, match=r'thinwire.compress\(model, "minmax\(bits=4\)"\)'):
        getattr(thinwire, library)(bits=4)
    with pytest.raises(ValueError, match=r"compressor: .*Did you mean 'topk\(density=0.01\)'"):
        getattr(thinwire, library)("topk(1%)")
    with pytest.raises(TypeError, match=r"compressor must be .*, not 4"):
        getattr(thinwire, library)(4)
    with pytest.raises(TypeError, match=r"start must be an integer"):
        getattr(thinwire, library)("4bit", start="abc")
