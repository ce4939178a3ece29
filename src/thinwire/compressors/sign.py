"""One bit an element: signSGD, and 1-bit SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors._core.bucketed import Bucketed, bucket_elements, check_bucket
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.segments import CodecCall
from thinwire.kernels import Format


@dataclass(frozen=True)
class Sign(Bucketed):
    """signSGD with a scale (Bernstein et al. 2018; Karimireddy et al. 2019): ``(‖x‖₁/d) · sign(x)``, per layer.

    With ``majority=True``, the owner of a chunk sends the sign that most ranks have, times the mean of their scales;
    its own sign decides a tie. Biased; a plan adds error feedback unless ``feedback=False``.
    """

    spec_name: ClassVar[str] = "sign"

    majority: bool = field(default=False, metadata={"shown": True})
    bucket: int | Literal["layer"] = "layer"
    feedback: bool = True

    def __post_init__(self) -> None:
        check_bucket(self.bucket)

    @property
    def traits(self) -> Traits:
        return Traits(wants_feedback=self.feedback, plain_sum=not self.majority)

    def make_format(self) -> Format:
        return Format(1, bucket_elements(self.bucket), scheme="sign")

    def add_up(self, messages: Sequence[Tensor], own: Tensor, total: Tensor, call: CodecCall) -> None:
        if not self.majority:
            super().add_up(messages, own, total, call)
            return
        decoded = torch.empty_like(total)
        votes, scales = torch.empty_like(total), torch.empty_like(total)
        before = kernels.before_sum(call.scale)
        for piece in call.pieces:
            values = own[piece.elements].float()
            votes[piece.elements] = 1.5 * values.sign()
            scales[piece.elements] = before * self._magnitude(values)
        for message in messages:
            self.decode(message, decoded, call._replace(scale=before))
            for piece in call.pieces:
                votes[piece.elements] += decoded[piece.elements].sign()
                scales[piece.elements] += decoded[piece.elements].abs()
        for piece in call.pieces:
            part = piece.elements
            torch.mul(votes[part].sign(), scales[part].mul_(call.scale / before), out=total[part])

    def _magnitude(self, x: Tensor) -> Tensor:
        """Return the mean magnitude of each element's bucket."""
        bucket = min(bucket_elements(self.bucket), max(1, x.numel()))
        whole = torch.nn.functional.pad(x.abs().double(), (0, -x.numel() % bucket)).view(-1, bucket)
        counts = torch.full((whole.shape[0], 1), bucket, dtype=torch.float64, device=x.device)
        counts[-1:] -= -x.numel() % bucket
        return (whole.sum(1, keepdim=True) / counts).expand_as(whole).reshape(-1)[: x.numel()].float()


@dataclass(frozen=True)
class OneBit(Bucketed):
    """1-bit SGD (Seide et al. 2014): in each bucket, values below zero become their mean, and so do all others.

    Biased; a plan adds error feedback unless ``feedback=False``. Costs ``1 + 64/bucket`` bits an element.
    """

    spec_name: ClassVar[str] = "onebit"

    bucket: int | Literal["layer"] = field(default=512, metadata={"shown": True})
    feedback: bool = True

    def __post_init__(self) -> None:
        check_bucket(self.bucket)

    @property
    def traits(self) -> Traits:
        return Traits(wants_feedback=self.feedback)

    def make_format(self) -> Format:
        return Format(1, bucket_elements(self.bucket), scheme="sides")
