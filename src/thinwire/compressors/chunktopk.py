"""The largest elements of each chunk, in about ten bits each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_choice, check_int
from thinwire.compressors._core.coded import Coded
from thinwire.compressors._core.compressor import Traits, check_dtype
from thinwire.compressors._core.mixins import Indexed
from thinwire.compressors._core.segments import CodecCall, Piece
from thinwire.compressors._core.sparsifier import check_place
from thinwire.kernels import square_sums


@dataclass(frozen=True)
class ChunkTopK(Coded, Indexed):
    """The ``k`` largest of every ``chunk`` elements, in 2 bits each (SparseLoCo, Sarfi et al. 2025, 2508.15706).

    The bits are a sign and which of two magnitudes is meant: the means of the chunk's chosen magnitudes above their
    mean and of the others, in bf16. A layer's m indices are one Elias–Fano code (Elias 1974): the low
    ``l = floor(log2(numel / m))`` bits of each, and the others in unary, at most ``l + 2`` bits an index in all. With
    64 of 4096 that is 8, where an offset in the chunk takes 12 and the entropy of the choice is 7.4; its length does
    not depend on the choice. The last chunk sends its share of ``k``; of equal magnitudes, the first are taken. Biased;
    a plan adds error feedback unless ``feedback=False``.

    ``average=senders`` divides an element's sum by the number of ranks that sent it, and first scales what a rank sent
    of a layer down to the median norm of all ranks (Covenant-72B, 2603.08163), so that none dominates.
    """

    spec_name: ClassVar[str] = "chunktopk"

    k: int = field(default=64, metadata={"shown": True})
    chunk: int = field(default=4096, metadata={"shown": True})
    average: Literal["ranks", "senders"] = "ranks"
    feedback: bool = True

    def __post_init__(self) -> None:
        check_choice("average", self.average, ("ranks", "senders"))
        check_int("chunk", self.chunk, 1, 1 << 16)
        check_int("k", self.k, 1, self.chunk)

    @property
    def traits(self) -> Traits:
        return Traits(dense=False, wants_feedback=self.feedback, plain_mean=self.average != "senders")

    def _sizes(self, numel: int) -> tuple[int, int, int, int]:
        """Return the chunks of a layer, the elements that are sent, the low bits of an index, and the unary bits."""
        chunks = -(-numel // self.chunk)
        last = numel - (chunks - 1) * self.chunk
        m = (chunks - 1) * self.k + math.ceil(self.k * last / self.chunk)
        low = (numel // m).bit_length() - 1
        return chunks, m, low, m + ((numel - 1) >> low)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        if not numel:
            return 0
        chunks, m, low, unary = self._sizes(numel)
        return kernels.align(4 * chunks + math.ceil((m * (2 + low) + unary) / 8))

    def index_bytes(self, message: Tensor, piece: Piece) -> int:
        _, m, low, unary = self._sizes(piece.numel) if piece.numel else (0, 0, 0, 0)
        return math.ceil((m * low + unary) / 8)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        check_dtype(x.dtype, self)
        pieces = [piece for piece in call.pieces if piece.numel]
        check_place(message, pieces, x, self.payload_bytes)
        for piece in pieces:
            values = x[piece.elements].float()
            _, m, low, unary = self._sizes(piece.numel)
            indices = self._largest(values)
            chosen = values[indices]
            levels, upper = self._levels(chosen.abs())
            numbers = (indices % (1 << low)) << 2 | upper.view(-1)[:m].long() << 1 | chosen.signbit()
            marks = torch.zeros(unary, dtype=torch.bool, device=x.device)
            marks[(indices >> low) + torch.arange(m, dtype=torch.int64, device=x.device)] = True
            digits = numbers[:, None] >> torch.arange(2 + low, dtype=torch.int64, device=x.device) & 1
            content = torch.cat((levels.view(torch.uint8).view(-1), _packed(torch.cat((digits.view(-1), marks)))))
            payload = message[piece.payload : piece.payload + self.payload_bytes(piece.numel, x.dtype)]
            payload[: content.numel()] = content
            payload[content.numel() :] = 0

    def _largest(self, values: Tensor) -> Tensor:
        """Return the indices of the elements that are sent, int64, ascending."""
        chunks, m, _, _ = self._sizes(values.numel())
        keys = torch.full((chunks * self.chunk,), -1, dtype=torch.int64, device=values.device)
        keys[: values.numel()] = values.view(torch.int32) & 0x7FFFFFFF
        # No two keys are equal, so that every machine chooses the same elements.
        places = torch.arange(self.chunk, dtype=torch.int64, device=values.device)
        keys = keys.view(chunks, self.chunk) * self.chunk - places
        starts = torch.arange(chunks, dtype=torch.int64, device=values.device)[:, None] * self.chunk
        return (keys.topk(self.k, dim=1).indices + starts).view(-1)[:m].sort().values

    def _levels(self, magnitudes: Tensor) -> tuple[Tensor, Tensor]:
        """Return both magnitudes of each chunk, bf16 [chunks, 2], and which values take the upper, [chunks, k]."""
        padded = torch.nn.functional.pad(magnitudes.double(), (0, -magnitudes.numel() % self.k)).view(-1, self.k)
        there = torch.ones_like(magnitudes, dtype=torch.bool)
        there = torch.nn.functional.pad(there, (0, -magnitudes.numel() % self.k)).view(-1, self.k)
        upper = padded * there.sum(1, keepdim=True) > padded.sum(1, keepdim=True)
        means = [(padded * which).sum(1) / which.sum(1).clamp(min=1) for which in (there & ~upper, there & upper)]
        return torch.stack(means, 1).to(torch.bfloat16), upper

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        pieces = [piece for piece in call.pieces if piece.numel]
        check_place(message, pieces, y, self.payload_bytes)
        for piece in pieces:
            received, out = self._received(message, piece).mul_(call.scale), y[piece.elements]
            out.copy_(out.float() + received if add else received)

    def _received(self, message: Tensor, piece: Piece) -> Tensor:
        """Return what the payload of a piece decodes to, fp32."""
        chunks, m, low, unary = self._sizes(piece.numel)
        payload = message[piece.payload : piece.payload + self.payload_bytes(piece.numel, torch.float32)]
        levels = payload[: 4 * chunks].view(torch.bfloat16).float()
        bits = _unpacked(payload[4 * chunks :])
        digits, marks = bits[: m * (2 + low)], bits[m * (2 + low) :][:unary]
        shifts = torch.arange(2 + low, dtype=torch.int64, device=message.device)
        numbers = (digits.view(m, 2 + low).long() << shifts).sum(1)
        places = torch.arange(m, dtype=torch.int64, device=message.device)
        # Where a damaged message lacks marks, the last place stands for theirs.
        at = torch.searchsorted(marks.cumsum(0), places + 1).clamp(max=unary - 1)
        indices = ((at - places << low) + (numbers >> 2)).clamp(max=piece.numel - 1)
        values = levels[places // self.k * 2 + (numbers >> 1 & 1)] * (1 - 2 * (numbers & 1))
        return torch.zeros(piece.numel, dtype=torch.float32, device=message.device).index_copy_(0, indices, values)

    def mean(self, messages: Sequence[Tensor], y: Tensor, call: CodecCall) -> None:
        if self.average != "senders":
            super().mean(messages, y, call)
            return
        pieces = [piece for piece in call.pieces if piece.numel]
        for message in messages:
            check_place(message, pieces, y, self.payload_bytes)
        for piece in pieces:
            received = [self._received(message, piece) for message in messages]
            norms = square_sums(received).sqrt()
            ordered = norms.sort().values
            median = (ordered[(len(messages) - 1) // 2] + ordered[len(messages) // 2]) / 2
            factors = torch.where(norms <= median, 1.0, median / norms).float()
            total, senders = torch.zeros_like(received[0]), torch.zeros_like(received[0])
            for values, factor in zip(received, factors, strict=True):
                total += values * factor
                senders += values != 0
            y[piece.elements] = (total * (call.scale * len(messages)) / senders.clamp(min=1)).to(y.dtype)


def _packed(bits: Tensor) -> Tensor:
    """Return bits, of any dtype, in bytes: the first is the lowest bit of the first byte."""
    whole = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (whole << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Tensor:
    """Return the bits in bytes, uint8."""
    return (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).view(-1)
