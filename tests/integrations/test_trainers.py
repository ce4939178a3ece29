"""Trainers that wrap the model: what is compressed in each, kept in its checkpoints and refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import thinwire
from harness import run_ranks
from ranks import alike, assert_alike

SPEC = "ef(minmax(bits=2))"
STEPS, SAVED = 4, 2


class Net(nn.Module):
    """What every trainer trains, on inputs that are numbered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - x.flip(-1)).square().mean()}


class Inputs(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32  # an epoch is `SAVED` steps: in the middle of one, Lightning goes on with the first batch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(64, generator=torch.Generator().manual_seed(index))}


Trained = tuple[Any, thinwire.Wire]
"""The model that a trainer has trained from a step on to `STEPS`, and its wire."""


def pretend_devices(wrapper: str) -> None:
    """Have accelerate heed its FSDP plugin, for which it wants GPUs: on CPUs it takes DDP."""
    from accelerate import DistributedType, PartialState

    state = PartialState(cpu=True)
    if wrapper == "fsdp" and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


def transformers(wrapper: str, folder: str, resume: bool) -> Trained:
    from transformers import Trainer, TrainingArguments

    callback = thinwire.trainer_callback(SPEC, skip_if_slower=False)
    sharded: Any = wrapper == "fsdp"
    args = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        save_steps=SAVED,
        per_device_train_batch_size=8,
        eval_on_start=not resume,
        prediction_loss_only=True,
        fsdp=sharded,
        fsdp_config={"version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 4000},
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    pretend_devices(wrapper)
    trainer = Trainer(Net(), args, train_dataset=Inputs(), eval_dataset=Inputs(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
    return trainer.model, callback.wire


def accelerate(wrapper: str, folder: str, resume: bool) -> Trained:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    pretend_devices(wrapper)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if wrapper == "fsdp" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    net = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    wire = thinwire.compress(net, SPEC, skip_if_slower=False)
    accelerator.register_for_checkpointing(wire.checkpointable())
    if resume:
        accelerator.load_state(folder)
    for step in range(SAVED if resume else 0, STEPS):
        x = Inputs()[2 * step + accelerator.process_index]["x"]
        optimizer.zero_grad()
        accelerator.backward(net(x)["loss"])
        optimizer.step()
        if step + 1 == SAVED and not resume:
            accelerator.save_state(folder)
    return net, wire


def lightning(wrapper: str, folder: str, resume: bool) -> Trained:
    import pytorch_lightning
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def configure_model(self) -> None:
            if self.device_mesh is not None:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.net(**batch)["loss"]

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            self.net(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    callback = thinwire.lightning_callback(SPEC, skip_if_slower=False)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy() if wrapper == "ddp" else ModelParallelStrategy(2, 1),
        max_steps=STEPS,
        callbacks=[callback, ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, loader = Module(), DataLoader(Inputs(), 8)
    trainer.fit(module, loader, loader, ckpt_path=f"{folder}/step={SAVED}.ckpt" if resume else None)
    return module, callback.wire


def trained_and_resumed(rank: int, train: Callable[[str, str, bool], Trained], wrapper: str, folder: str) -> None:
    # Trainers ask the environment, as torchrun sets it, for the world.
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launched.items():
            patch.setenv(name, str(value))
        whole, resumed = train(wrapper, folder, False), train(wrapper, folder, True)
    for (_, wire), steps in ((whole, STEPS), (resumed, STEPS - SAVED)):
        assert wire.stats.steps == steps
        assert wire.stats.ratio > 4
    assert alike(whole[1].state_dict(), resumed[1].state_dict())
    first, second = ({name: full(value) for name, value in net.state_dict().items()} for net, _ in (whole, resumed))
    assert alike(first, second)
    assert_alike(first)


def full(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("train", [transformers, accelerate, lightning])
def test_trainers_compress_what_they_wrap_and_go_on_from_their_checkpoints(
    train: Any, wrapper: str, tmp_path: Path
) -> None:
    needs = "pytorch_lightning" if train is lightning else train.__name__
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    run_ranks(trained_and_resumed, 2, train, wrapper, str(tmp_path))


def test_the_trainer_is_told_of_a_model_that_is_not_wrapped_and_a_state_that_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    callback, net = thinwire.trainer_callback(SPEC), nn.Linear(64, 64)
    with pytest.raises(TypeError, match=r"a Linear that neither .* start it with torchrun"):
        callback.on_step_end(None, None, None, model=net)
    arguments, state = SimpleNamespace(output_dir=tmp_path), SimpleNamespace(global_step=5)
    with pytest.raises(FileNotFoundError, match="checkpoint-5"):
        callback.on_train_begin(arguments, state, None, model=net)


def accelerate_local_on(rank: int) -> None:
    from accelerate import Accelerator

    net = Net()
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    local = thinwire.local.DiLoCo(net, optimizer, every=2, compressor="minmax(bits=4)")
    for step in range(4):
        optimizer.zero_grad()
        net(Inputs()[2 * step + rank]["x"])["loss"].backward()
        optimizer.step()
        local.step()
    assert_alike(net.state_dict())


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_local_updates_take_the_optimizer_that_accelerate_prepared() -> None:
    run_ranks(accelerate_local_on, 2)


@pytest.mark.parametrize(
    ("callback", "needs"), [("trainer_callback", "transformers"), ("lightning_callback", "pytorch_lightning")]
)
def test_a_wrong_option_is_refused_where_it_is_given(callback: str, needs: str) -> None:
    pytest.importorskip(needs)
    for error, says, arguments, options in (
        (TypeError, r"nosuch= is not an argument .*compress_ddp\(\) takes compressor=, ex", ["4bit"], {"nosuch": 1}),
        (TypeError, r'thinwire.compress\(model, "minmax\(bits=4\)"\)', [], {"bits": 4}),
        (ValueError, r"compressor: .*Did you mean 'topk\(density=0.01\)'", ["topk(1%)"], {}),
        (TypeError, r"start must be an integer", ["4bit"], {"start": "abc"}),
    ):
        with pytest.raises(error, match=says):
            getattr(thinwire, callback)(*arguments, **options)
