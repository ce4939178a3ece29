"""One bit an element: 1-bit SGD and signSGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.compressors.bucketed import Bucketed, bucket_elements, check_bucket
from thinwire.compressors.pieces import Segments
from thinwire.kernels import Format


@dataclass(frozen=True)
class OneBit(Bucketed):
    """1-bit SGD (Seide et al. 2014): below or above zero, received as the mean of each side, per bucket.

    Biased: a plan puts error feedback around it unless ``feedback=False``. Costs ``1 + 64/bucket`` bits an element.
    """

    spec_name: ClassVar[str] = "onebit"

    bucket: int | Literal["layer"] = field(default=512, metadata={"shown": True})
    feedback: bool = True

    def __post_init__(self) -> None:
        check_bucket(self.bucket)

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def make_format(self) -> Format:
        return Format(1, bucket_elements(self.bucket), scheme="sides")


@dataclass(frozen=True)
class Sign(Bucketed):
    """signSGD with a scale (Bernstein et al. 2018; Karimireddy et al. 2019): ``(‖x‖₁/d) · sign(x)``, per layer.

    With ``majority=True`` an owner counts the ranks' signs and hands on that of the majority, times the mean of their
    scales; its own exact value breaks a tie. Biased: a plan puts error feedback around it unless ``feedback=False``.
    """

    spec_name: ClassVar[str] = "sign"

    majority: bool = field(default=False, metadata={"shown": True})
    bucket: int | Literal["layer"] = "layer"
    feedback: bool = True

    def __post_init__(self) -> None:
        check_bucket(self.bucket)

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def gathered(self) -> bool:
        return self.grain is None and not self.majority

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    @property
    def plain_sum(self) -> bool:
        return not self.majority

    def make_format(self) -> Format:
        return Format(1, bucket_elements(self.bucket), scheme="sign")

    def add_up(
        self, messages: Sequence[Tensor], own: Tensor, segments: Segments, total: Tensor, *, scale: float
    ) -> None:
        if not self.majority:
            super().add_up(messages, own, segments, total, scale=scale)
            return
        decoded = torch.empty_like(total)
        votes, scales = torch.empty_like(total), torch.empty_like(total)
        for piece in segments.pieces:
            mine = own[piece.elements].float()
            votes[piece.elements] = 1.5 * mine.sign()
            scales[piece.elements] = self._magnitude(mine)
        for message in messages:
            self.decode(message, segments, decoded)
            for piece in segments.pieces:
                votes[piece.elements] += decoded[piece.elements].sign()
                scales[piece.elements] += decoded[piece.elements].abs()
        for piece in segments.pieces:
            part = piece.elements
            torch.mul(votes[part].sign(), scales[part].mul_(scale), out=total[part])

    def _magnitude(self, x: Tensor) -> Tensor:
        """Mean magnitude of each element's bucket."""
        bucket = min(bucket_elements(self.bucket), max(1, x.numel()))
        whole = torch.nn.functional.pad(x.abs().double(), (0, -x.numel() % bucket)).view(-1, bucket)
        counts = torch.full((whole.shape[0], 1), bucket, dtype=torch.float64, device=x.device)
        counts[-1:] -= -x.numel() % bucket
        return (whole.sum(1, keepdim=True) / counts).expand_as(whole).reshape(-1)[: x.numel()].float()
