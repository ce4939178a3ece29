"""A GPT of the size that a comparison can train in minutes: pre-norm blocks, rotary positions, tied embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a :class:`GPT`; ``width / heads`` must be an even whole number."""

    vocabulary: int = 256
    context: int = 64
    width: int = 256
    layers: int = 6
    heads: int = 4

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width={self.width} is not a multiple of 2 * heads={2 * self.heads}")


def rotary_angles(context: int, head_width: int) -> Tensor:
    """Return the rotation of each position and pair of coordinates, complex ``[context, head_width / 2]``.

    Rotary position embedding (Su et al. 2021, RoFormer, section 3.2.2).
    """
    frequencies = _ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32, device="cpu") / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float32, device="cpu"), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """Causal self-attention and a 4x wide MLP, each behind a layer norm and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape; ``cos`` and ``sin`` are ``[length, head width / 2]``."""
        batch, length, width = x.shape
        heads = self.attention(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(functional.gelu(self.mlp(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """A model of tokens ``int64 [batch, length]`` that returns logits ``[batch, length, vocabulary]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        angles = rotary_angles(config.context, config.width // config.heads)
        # Plain attributes: DDP would send buffers before every step.
        self.cos, self.sin = angles.real.contiguous(), angles.imag.contiguous()
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Branches that end in the residual stream start smaller, or its variance grows with depth.
                shrink = math.sqrt(2 * config.layers) if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=1.0 / (math.sqrt(config.width) * shrink))
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = (part[: tokens.shape[1]].to(tokens.device) for part in (self.cos, self.sin))
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return functional.linear(self.norm(x), self.embedding.weight)


def next_token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in nats per token of ``logits [..., vocabulary]`` against ``targets [...]``."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)
