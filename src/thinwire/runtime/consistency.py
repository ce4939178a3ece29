"""Ranks agree before they communicate, and replicas stay the same bit for bit: checks that raise on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from thinwire.collectives import PeerFailedError, Transport, TransportError, contiguous_values
from thinwire.compressors import Compressor
from thinwire.kernels import checksum, cpu_level

_MAX_RECORD_BYTES = 64 << 20
_SAME_ARGUMENTS = "Give every rank the same arguments, model and thinwire version"
_SAME_STATE = "A rank has loaded the state of another run or moment: load what was saved together on all ranks"


class DisagreementError(RuntimeError):
    """Ranks were given different plans, seeds, versions or states."""


def library_version() -> str:
    try:
        return version("thinwire")
    except PackageNotFoundError:
        return "not installed"


def machine_record(compressors: Iterable[Compressor], device: torch.device | None = None) -> dict[str, str]:
    """Return what must be equal on all ranks' machines, so that ``compressors`` give the same bits on all of them.

    ``device`` is the one that computes and communicates, None if the host does.
    """
    traits = [compressor.traits for compressor in compressors]
    if all(t.exact_bits for t in traits):
        return {}
    if device is not None:
        return {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type}
    level = "CPU level, which THINWIRE_CPU_LEVEL sets"
    if cpu_level() != "reference" and all(t.exact_bits or t.exact_natively for t in traits):
        return {level: "any, with the native core"}
    return {level: cpu_level(), "threads, which OMP_NUM_THREADS sets": str(torch.get_num_threads())}


def agree(record: Mapping[str, str], transport: Transport, *, remedy: str = _SAME_ARGUMENTS) -> None:
    """Check that all ranks hold the same record; where they do not, the error ends with ``remedy``.

    Only fixed-size tensors are exchanged unless there is a difference; nothing received is unpickled.

    Raises:
        DisagreementError: on every rank alike, naming the ranks that differ from rank 0 and the first difference.
    """
    mine = "\n".join(f"{key}: {value}" for key, value in record.items()).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(mine).digest()), dtype=torch.uint8)
    digests = transport.all_gather(digest)
    if bool((digests == digests[0]).all()):
        return
    texts = exchange_texts(mine, transport)
    first = texts[0].splitlines()
    for rank, text in enumerate(texts):
        if text == texts[0]:
            continue
        others = [str(r) for r, t in enumerate(texts) if t == text]
        lines = text.splitlines()
        length = max(len(first), len(lines))
        pairs = zip(_padded(first, length), _padded(lines, length), strict=True)
        at_first, here = next(pair for pair in pairs if pair[0] != pair[1])
        raise DisagreementError(
            f"ranks do not agree: rank 0 has '{_short(at_first)}', rank {rank} has '{_short(here)}' "
            f"(ranks that differ from rank 0 like this: {', '.join(others)}). "
            f"{remedy}"
        )


def agree_on_state(record: Mapping[str, str], values: Mapping[str, Tensor], transport: Transport) -> None:
    """Check that all ranks have loaded the same record and, by their checksums, the same ``values``. A rank that goes
    on from the state of another run would diverge from the others without an error.

    Raises:
        DisagreementError: see `agree`.
    """
    sums = {name: f"checksum {signed_checksum(value.cpu()):#x}" for name, value in values.items()}
    agree({**record, **sums}, transport, remedy=_SAME_STATE)


def raise_together(error: Exception | None, transport: Transport, doing: str) -> None:
    """Let all ranks fail where one has failed, so that none waits for a rank that went no further.

    Every rank calls this with the error that it met, or None. ``doing`` names the call in the message.

    Raises:
        Exception: ``error`` itself, on the ranks that met one.
        PeerFailedError: on the others, naming the ranks that failed and the first one's message.
    """
    mine = b"" if error is None else f"{type(error).__name__}: {error}".encode()
    with transport.detector.calling(doing) if transport.detector is not None else nullcontext():
        size = torch.tensor([len(mine)], dtype=torch.int64, device="cpu")
        failed = transport.all_gather(size)[:, 0].nonzero()[:, 0].tolist()
    if not failed:
        return
    texts = exchange_texts(mine, transport)
    if error is not None:
        raise error
    text = f"{doing} failed on rank {', '.join(map(str, failed))}: {texts[failed[0]]}"
    raise PeerFailedError(text, rank=failed[0], reason=texts[failed[0]])


@contextmanager
def fail_together(transports: Iterable[Transport], doing: str) -> Iterator[None]:
    """Let all ranks fail where the body fails on one of them: see `raise_together`. Every rank runs the body.

    Errors that all ranks meet alike, of a link that broke and of ranks that disagree, pass.
    """
    error: Exception | None = None
    try:
        yield
    except (TransportError, DisagreementError):
        raise
    except Exception as met:  # noqa: BLE001 - raised again below, on every rank
        error = met
    for transport in transports:
        try:
            raise_together(error, transport, doing)
        except (TransportError, DisagreementError):
            raise
        except Exception as met:  # noqa: BLE001 - raised below, once the ranks of all transports know
            error = error or met
    if error is not None:
        raise error


def _padded(lines: list[str], length: int) -> list[str]:
    return lines + ["(nothing)"] * (length - len(lines))


def _short(line: str) -> str:
    return line if len(line) <= 200 else line[:200] + "..."


def exchange_texts(mine: bytes, transport: Transport) -> list[str]:
    """Return all ranks' texts, by rank. A native collective: all ranks must call it, and nothing else at the time."""
    sizes = transport.all_gather(torch.tensor([len(mine)], dtype=torch.int64, device="cpu"))[:, 0].tolist()
    size = max(sizes)
    if not 0 <= size <= _MAX_RECORD_BYTES:
        raise DisagreementError(f"ranks do not agree, and a rank announced a record of {size} bytes")
    padded = torch.frombuffer(bytearray(mine.ljust(size, b"\n")), dtype=torch.uint8)
    return [bytes(row.tolist()).decode(errors="replace").rstrip("\n") for row in transport.all_gather(padded)]


class ParityError(RuntimeError):
    """Ranks hold different parameters."""


def checksums(parameters: Iterable[Tensor]) -> Tensor:
    """Return the checksums of ``parameters``, for `check_parity`: int64 values of shape (number of parameters,)."""
    return torch.tensor([signed_checksum(parameter) for parameter in parameters], dtype=torch.int64, device="cpu")


def check_parity(names: Sequence[str], sums: Tensor | None, transport: Transport, step: int) -> None:
    """Compare the `checksums` of the parameters ``names`` across ranks: 8 bytes are sent for each.

    A rank without ``sums`` takes part in the call, and is not compared.

    Raises:
        ParityError: on every rank alike, naming the first parameter that differs and the ranks.
    """
    mine = torch.zeros(1 + len(names), dtype=torch.int64, device="cpu")
    if sums is not None:
        mine[0], mine[1:] = 1, sums
    everywhere = transport.all_gather(mine)
    ranks = everywhere[:, 0].nonzero()[:, 0].tolist()
    if not ranks:
        return
    first = ranks[0]
    unlike = everywhere[:, 1:] != everywhere[first, 1:]
    unlike[everywhere[:, 0] == 0] = False
    differs = unlike.any(0)
    if not bool(differs.any()):
        return
    parameter = int(differs.nonzero()[0])
    others = ", ".join(str(rank) for rank in unlike[:, parameter].nonzero()[:, 0].tolist())
    raise ParityError(
        f"replicas differ at step {step}: {names[parameter]} of rank {others} is not that of rank {first} "
        f"({int(differs.sum())} of {len(names)} parameters differ). Something outside thinwire changed them "
        "(unequal initial weights, a rank that skipped an optimizer step, different hardware); "
        "checks=thinwire.Checks(resync_every=k) copies rank 0's parameters to all every k steps, and "
        "Checks(parity_every=0) compares nothing, for a loop that lets ranks differ on purpose"
    )


def resync(parameters: Mapping[str, Tensor], transport: Transport) -> None:
    """Copy the parameters of rank 0 to all ranks."""
    for parameter in parameters.values():
        with contiguous_values(parameter) as values:
            transport.broadcast(values)


def signed_checksum(values: Tensor) -> int:
    """Return the checksum of a tensor's bytes as a signed 64-bit integer."""
    data = values.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, 4 - data.numel() % 4))
    value = checksum(data)
    return value - (1 << 64) if value >= 1 << 63 else value
