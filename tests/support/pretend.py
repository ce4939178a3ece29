"""A device that is not there: tensors that compute on the CPU, and refuse what would make a host wait for a GPU.

A tensor of this device says that it is on ``meta``. What reads one of its values, copies it to the host or to it from
the host's pageable memory, or has a result whose size depends on its values, raises `Waits` while ``strict`` is set.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")

READS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive", "nonzero_numpy", "argwhere"),
}
"""Operations that cannot be enqueued: their result, or its size, is needed at once."""


class Waits(AssertionError):
    """The host would wait for the device."""


class Pretended(torch.Tensor):
    """A tensor of the device; what it holds is in ``held``, on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, device=DEVICE, **layout)
        made.held = held
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of the device's mode")


class Pretend(TorchDispatchMode):
    """Inside, the device exists. One for each thread."""

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self.strict = strict
        self.given_out = 0
        """Bytes that the host was given."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        flat = tree_flatten((args, kwargs))[0]
        mine = [a for a in flat if isinstance(a, Pretended)]
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device) == DEVICE
        if not mine and not to_device:
            return func(*args, **kwargs)
        if self.strict:
            self._check(func, args, kwargs, flat, mine, to_device)
        if to_device:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        wrapped = {id(a.held): a for a in mine}

        def wrap(result):
            if not isinstance(result, torch.Tensor):
                return result
            # What was written in place stays the tensor that it was.
            return wrapped[id(result)] if id(result) in wrapped else Pretended(result)

        result = func(*_held(args), **_held(kwargs))
        if mine and device is not None and not to_device:
            self.given_out += result.nbytes
            return result  # it went to the host
        if mine and func.overloadpacket.__name__ == "copy_" and not isinstance(args[0], Pretended):
            self.given_out += result.nbytes
            return result
        return tree_map(wrap, result)

    @staticmethod
    def _check(func, args, kwargs, flat, mine, to_device: bool) -> None:
        name = func.overloadpacket.__name__
        hosts = [a for a in flat if isinstance(a, torch.Tensor) and not isinstance(a, Pretended)]
        if name in READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            raise Waits(f"{func} looks at a value")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [i for i in args[1] if i is not None]
            if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
                raise Waits(f"{func} counts what a mask selects")
        moves = name in ("copy_", "_to_copy") and (hosts or kwargs.get("device") is not None)
        if moves:
            blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if blocking:
                raise Waits(f"{func} copies between host and device")
            return
        if any(h.dim() for h in hosts):
            raise Waits(f"{func} takes a tensor of the host: {[tuple(h.shape) for h in hosts]}")


def _held(tree):
    return tree_map(lambda a: a.held if isinstance(a, Pretended) else a, tree)
