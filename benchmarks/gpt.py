"""A GPT of the GPT-2 family: learned positions, pre-norm blocks, GELU, output matrix tied to the token embedding.

    ids (B, T) int64 ── embed ──▶ (B, T, C) ── blocks ──▶ (B, T, C) ── norm, @ embedding.T ──▶ logits (B, T, V)

B is rows, T tokens a row, C `width`, V `vocab_size`. Architecture: Radford et al., "Language Models are Unsupervised
Multitask Learners", 2019. Tied embedding: Press and Wolf, "Using the Output Embedding to Improve Language Models",
2017.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from output_loss import output_loss
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelShape:
    """What fixes the parameters of a model; `width` is a multiple of `heads`."""

    layers: int
    heads: int
    width: int
    vocab_size: int
    seq_len: int
    dropout: float = 0.0


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        packed = self.query_key_value(hidden).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return cast(Tensor, self.output(mixed.transpose(1, 2).reshape(rows, length, width)))


class _FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input = nn.Linear(shape.width, 4 * shape.width)
        self.output = nn.Linear(4 * shape.width, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.output(F.gelu(self.input(hidden), approximate="tanh")))


class _Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = _Attention(shape)
        self.feed_forward_norm = nn.LayerNorm(shape.width)
        self.feed_forward = _FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + cast(Tensor, self.dropout(self.feed_forward(self.feed_forward_norm(hidden))))


class GPT(nn.Module):
    """The model. Parameters are float32; call it under autocast for a narrower type."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.position_embedding = nn.Embedding(shape.seq_len, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        # GPT-2's 0.02 at its width of 768, and as large an output at any other.
        std = 0.02 * math.sqrt(768 / shape.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        # Random positions as large as the tokens' own vectors hide which token is meant; from zero, the validation
        # loss of the small model after 150 steps was 5.50 instead of 5.92.
        nn.init.zeros_(self.position_embedding.weight)
        # Every block adds to the residual stream twice; without this its variance grows with depth (GPT-2, 2.3).
        for name, parameter in self.named_parameters():
            if name.endswith(".output.weight"):
                nn.init.normal_(parameter, std=std / math.sqrt(2 * shape.layers))

    def hidden_states(self, ids: Tensor) -> Tensor:
        """(B, T) int64 ids, T at most `seq_len` → (B, T, C) states after the last norm."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.dropout(self.token_embedding(ids) + self.position_embedding(positions))
        for block in self.blocks:
            hidden = block(hidden)
        return cast(Tensor, self.norm(hidden))

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats, a float32 scalar, over the labels that are not -100; both are (B, T) int64.

        And the loss of each label, (B, T), without gradients.
        """
        hidden = self.hidden_states(ids).flatten(0, 1)
        mean, losses = output_loss(hidden, self.token_embedding.weight, labels.flatten())
        return mean, losses.view_as(labels)

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, count: int, *, generator: torch.Generator, temperature: float = 0.8, top_k: int = 50
    ) -> Tensor:
        """Continue `prompt`, (N,) int64, by `count` drawn ids: (N + count,) int64. Call `eval()` first: no dropout.

        Draws come from `generator` alone (on the model's device), so the global random state stays as it is. The last
        `seq_len` ids are the context.
        """
        ids = prompt
        for _ in range(count):
            last = self.hidden_states(ids[None, -self.shape.seq_len :])[0, -1]
            logits = F.linear(last, self.token_embedding.weight).float()
            best, candidates = torch.topk(logits, min(top_k, logits.numel()))
            drawn = torch.multinomial(torch.softmax(best / temperature, dim=-1), 1, generator=generator)
            ids = torch.cat([ids, candidates[drawn]])
        return ids


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two AdamW groups: the matrices of linear layers decay; embeddings, biases and the gains of norms do not."""
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    decaying = set(map(id, matrices))
    others = [parameter for parameter in model.parameters() if id(parameter) not in decaying]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
