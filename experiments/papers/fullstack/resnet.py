"""ResNet34's shape, narrower, cut as in split learning: the client has both ends, the server what lies between."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from experiments.tasks.images import NUM_CLASSES
from experiments.tasks.resnet import Residual

_BLOCKS = (3, 4, 6, 3)
"""Of two convolutions each, by width: 32 of them with the first one's and the classifier's make 34 layers."""
_NORM_CHANNELS = 16
_LEAST_PIXELS = 16


class Block(Residual):
    """A residual block that begins as its shortcut, so that 34 layers learn from the first step on."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__(narrow, wide, stride)
        # Groups of as many channels at every width: of few channels and pixels little would be left.
        self.first_norm, self.second_norm = norm(wide), norm(wide)
        nn.init.zeros_(self.second_norm.weight)


def norm(channels: int) -> nn.GroupNorm:
    """Groups are normalized, not batches: a client's few classes would be what a batch's moments say."""
    return nn.GroupNorm(max(1, channels // _NORM_CHANNELS), channels)


class Front(nn.Module):
    """The client's: images to what the first residual block makes of them."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = norm(width)
        self.block = Block(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(functional.relu(self.norm(self.stem(x))))


class Back(nn.Module):
    """The client's: the last residual block and the classifier, which sees the labels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width, width, 1)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean((2, 3)))


class SplitResNet(nn.Module):
    """Images ``[batch, channels, size, size]`` to logits ``[batch, 10]``, in three parts.

    ``widths`` and ``strides`` are channels and pixels to a position at the first cut and at the second. Images of fewer
    than 16 pixels a side are halved in size twice, others three times.
    """

    def __init__(self, channels: int, size: int, width: int) -> None:
        super().__init__()
        blocks, narrow, scale = [], width, 1
        for stage, count in enumerate(_BLOCKS):
            stride = 2 if stage and (stage < len(_BLOCKS) - 1 or size >= _LEAST_PIXELS) else 1
            scale *= stride
            for at in range(count):
                wide = width * 2**stage
                blocks.append(Block(narrow, wide, 1 if at else stride))
                narrow = wide
        self.front = Front(channels, width)
        self.middle = nn.Sequential(*blocks[1:-1])
        self.back = Back(narrow)
        self.widths, self.strides = (width, narrow), (1, scale)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.middle(self.front(x)))
