"""The base of quantisers in PyTorch operations: a scale for each bucket, and codes of a few bits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors._core.calls import CodecCall
from thinwire.compressors._core.coded import Coded
from thinwire.compressors._core.segments import Piece
from thinwire.compressors._core.sparsifier import check_place
from thinwire.compressors._core.traits import Traits


@dataclass(frozen=True)
class CodedRows(Coded):
    """A quantiser in three methods, without a kernel of its own. It runs wherever PyTorch does.

    A payload is the scales of its buckets (fp32) and ``bits`` bits for each element, both padded to 64 bytes. Every
    operation is element by element, so that all devices compute the same bytes.
    """

    bits: int = field(metadata={"shown": True})
    """1 to 7."""
    bucket: int = field(default=128, metadata={"shown": True})
    """Elements that share a scale."""

    @abstractmethod
    def scales(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the scale of each bucket, fp32 [buckets, 1].

        Args:
            rows: fp32 [buckets, bucket], padded with zeros.
            counts: elements of each bucket without padding, [buckets, 1].
        """

    @abstractmethod
    def codes(self, scaled: Tensor) -> Tensor:
        """Return the codes, integers below ``2**bits``, of values divided by their scale; any code for NaN."""

    @abstractmethod
    def values(self, codes: Tensor) -> Tensor:
        """Return the values of ``codes`` (int64), in units of the scale."""

    @property
    def traits(self) -> Traits:
        return Traits(keeps_constants=False)

    @property
    def grain(self) -> int:
        return kernels.bucketed_grain(self.bucket)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self._scale_bytes(numel) + kernels.align(-(-numel * self.bits // 8))

    def _scale_bytes(self, numel: int) -> int:
        return kernels.align(4 * -(-numel // self.bucket))

    def _shifts(self, device: torch.device) -> Tensor:
        """Where each of eight codes stands in as many bytes as a code has bits."""
        return torch.arange(8, device=device) * self.bits

    def _bytes(self, device: torch.device) -> Tensor:
        """Where each of these bytes stands."""
        return torch.arange(self.bits, device=device) * 8

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        check_place(message, call.pieces, x, self.payload_bytes)
        for piece in call.pieces:
            if piece.numel:
                self._encode(x[piece.elements].float(), message[self._payload(piece)])

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        width = min(self.bucket, x.numel())
        rows = torch.nn.functional.pad(x, (0, -x.numel() % width)).view(-1, width)
        counts = torch.full((len(rows), 1), float(width), device=x.device)
        counts[-1:] -= -x.numel() % width
        scales = self.scales(rows, counts)
        codes = self.codes(rows / torch.where(scales > 0, scales, 1.0)).view(-1)[: x.numel()]
        eights = torch.nn.functional.pad(codes, (0, -x.numel() % 8)).view(-1, 8)
        packed = (eights << self._shifts(x.device)).sum(1)[:, None] >> torch.arange(
            0, 8 * self.bits, 8, device=x.device
        )
        start, num_bytes = self._scale_bytes(x.numel()), -(-x.numel() * self.bits // 8)
        payload.zero_()
        payload[: 4 * len(rows)].view(torch.float32).copy_(scales.view(-1))
        payload[start : start + num_bytes] = (packed & 0xFF).to(torch.uint8).view(-1)[:num_bytes]

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        check_place(message, call.pieces, y, self.payload_bytes)
        for piece in call.pieces:
            if piece.numel:
                received, out = self._decoded(message[self._payload(piece)], piece.numel), y[piece.elements]
                received = received.mul_(call.scale)
                out.copy_(out + received if add else received)

    def _decoded(self, payload: Tensor, numel: int) -> Tensor:
        start, num_bytes = self._scale_bytes(numel), -(-numel * self.bits // 8)
        scales = payload[: 4 * -(-numel // self.bucket)].view(torch.float32)
        sent = payload[start : start + num_bytes].long()
        eights = torch.nn.functional.pad(sent, (0, -num_bytes % self.bits)).view(-1, self.bits)
        packed = (eights << self._bytes(payload.device)).sum(1)
        codes = (packed[:, None] >> self._shifts(payload.device)) & (2**self.bits - 1)
        return self.values(codes.view(-1)[:numel]) * scales.repeat_interleave(self.bucket)[:numel]

    def _payload(self, piece: Piece) -> slice:
        return slice(piece.payload, piece.payload + self.payload_bytes(piece.numel, torch.float32))
