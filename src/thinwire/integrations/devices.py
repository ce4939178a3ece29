"""Devices of a model's gradients, and the transport by which they leave a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import DeviceGroupTransport, Transport
from thinwire.integrations.options import Network
from thinwire.plan import named_parameters

_SIMULATE = "; simulate=True studies the effect on accuracy on any device"


def replicated(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are the same on all ranks, by their names in the module inside DDP: not those that DDP
    was told to ignore, such as each rank's own experts."""
    ignored = {id(p) for name, p in model.module.named_parameters() if name in model.parameters_to_ignore}
    return {name: p for name, p in named_parameters(model.module).items() if id(p) not in ignored}


def trained(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of `replicated` that get gradients."""
    return {name: p for name, p in replicated(model).items() if p.requires_grad}


def device_of(trained: Mapping[str, torch.Tensor], group: dist.ProcessGroup, as_device: bool) -> torch.device | None:
    """Return the device from which gradients are sent without going over the host; None if they are on the CPU."""
    devices = {p.device: name for name, p in trained.items()}
    if all(device.type == "cpu" for device in devices):
        return torch.device("cpu") if as_device else None
    return check_device(devices, dist.get_backend_config(group), _SIMULATE)


def check_device(devices: Mapping[torch.device, str], backends: str, instead: str = "") -> torch.device:
    """Return the one device on which a model's parameters are, if gradients can leave it.

    ``devices`` has the name of a parameter on each device. ``backends`` are those of the process group, by device, as
    in ``cpu:gloo,cuda:nccl``; ``instead`` ends error messages with what else may be done.

    Raises:
        NotImplementedError: The parameters are on several devices, or on one that is not a GPU.
        RuntimeError: Something is missing; the message names it.
    """
    device, name = next((device, name) for device, name in devices.items() if device.type != "cpu")
    if device.type == "meta":
        raise RuntimeError(
            f"parameters are on meta ({name}): call model.to_empty(device=...) and initialize them, then "
            "thinwire.compress(model)"
        )
    if len(devices) > 1 or device.type != "cuda":
        where = ", ".join(str(device) for device in devices)
        raise NotImplementedError(
            f"{name} is on {device}, and parameters are on {where}: thinwire compresses gradients that are all on the "
            f"CPU (over gloo) or all on one CUDA device of each rank (over NCCL){instead}"
        )
    if "cuda:nccl" not in backends.split(","):
        raise RuntimeError(
            f"{name} is on {device}, where gradients are sent over NCCL, but the model's process group has {backends}: "
            f"call init_process_group('nccl'), or 'cpu:gloo,cuda:nccl'{instead}"
        )
    if find_spec("triton") is None:
        raise RuntimeError(
            f"{name} is on {device}, where Triton compresses, and Triton is not installed: pip install triton, in the "
            f"version that this PyTorch wants ({torch.__version__}){instead}"
        )
    return device


def on_device(
    host: Transport, device: torch.device, group: dist.ProcessGroup, timeout: timedelta, network: Network
) -> Transport:
    """Return a transport between devices; ``host`` carries what ranks agree on.

    There is no worker thread: messages are sent over the model's own group, from the thread from which DDP uses it, in
    one order with those of DDP.

    Raises:
        ValueError: ``network`` asks for a way of sending that only the host has.
    """
    if network.transport == "shared":
        raise ValueError("transport='shared' is memory of the host: from a GPU, bytes go over the model's group")
    if network.streams > 1:
        raise ValueError(f"streams={network.streams} is for the host: from a GPU, bytes go over the model's group")
    return DeviceGroupTransport(host, device, group, timeout)
