"""Model FLOPs and MFU: the arithmetic that a model needs, as a share of what the device could do in the same time.

    FLOPs a token = 6 (12 L C^2 + V C) + 12 L C T         L layers, C width, V vocabulary, T tokens a row
    GPT-2 124M, T = 1024:  6 (84,934,656 + 38,633,472) + 113,246,208 = 854,654,976

From Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B: a multiplication and an
addition for each parameter in a matrix product, and twice that for the backward pass; and likewise for the products of
queries with keys and of weights with values, over whole rows, although half of each is masked. Embedding look-ups,
norms, biases, softmax, and what is computed anew to save memory do not count.
"""

from dataclasses import dataclass

import torch
from gpt import ModelShape

_PER_PARAMETER = 6  # 2 forward, 4 backward


def flops_per_token(shape: ModelShape, row_tokens: int) -> int:
    """Forward and backward, for rows of `row_tokens` tokens."""
    layer = 12 * shape.width**2  # 3 C^2 for queries, keys and values, C^2 for the output, 8 C^2 for the feed-forward
    parameters = shape.layers * layer + shape.vocab_size * shape.width
    attention = 2 * shape.layers * shape.width * row_tokens
    return _PER_PARAMETER * (parameters + attention)


@dataclass(frozen=True)
class Card:
    """Peak TFLOP/s of dense matrix products with sums in float32, by the type of their inputs; and who says so."""

    source: str
    bfloat16: float
    tf32: float
    float32: float


# Datasheets state most of these with structured sparsity, which doubles them.
_A100 = Card("NVIDIA A100 datasheet", 312, 156, 19.5)
_H100_SXM = Card("NVIDIA H100 datasheet, SXM", 1979 / 2, 989 / 2, 67)
_H100_PCIE = Card("NVIDIA H100 datasheet, PCIe", 1513 / 2, 756 / 2, 51)
_H100_NVL = Card("NVIDIA H100 datasheet, NVL", 1671 / 2, 835 / 2, 60)
_H200_SXM = Card("NVIDIA H200 datasheet, SXM", 1979 / 2, 989 / 2, 67)
_H200_NVL = Card("NVIDIA H200 datasheet, NVL", 1671 / 2, 835 / 2, 60)

CARDS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H200": _H200_SXM,
    "NVIDIA H200 NVL": _H200_NVL,
    "NVIDIA B200": Card("NVIDIA Blackwell datasheet, HGX B200", 4500 / 2, 2200 / 2, 75),
    "NVIDIA L40S": Card("NVIDIA L40S datasheet", 362.05, 183, 91.6),
    "NVIDIA L40": Card("NVIDIA L40 datasheet", 181.05, 90.5, 90.5),
    "NVIDIA L4": Card("NVIDIA L4 datasheet", 242 / 2, 120 / 2, 30.3),
    "NVIDIA A40": Card("NVIDIA A40 datasheet", 149.7, 74.8, 37.4),
    "NVIDIA A10": Card("NVIDIA A10 datasheet", 125, 62.5, 31.2),
    "NVIDIA GeForce RTX 4090": Card("NVIDIA Ada GPU architecture whitepaper", 165.2, 82.6, 82.6),
}
"""By the name that torch gives, in full: "RTX 4090 Laptop GPU", "A10G" or a MIG slice is another card."""


@dataclass(frozen=True)
class Peak:
    """What a device could do. flops: FLOP/s, None if not known. about: where that is from, or why it is not known."""

    flops: float | None
    about: str


def find_peak(device: torch.device, given: float | None = None, *, autocast: bool = True) -> Peak:
    """The peak of `device`, for products of bfloat16 under `autocast`, else of float32 as torch is set to make them.

    given: FLOP/s that the user states
    """
    if given is not None:
        return Peak(given, "--peak-flops")
    if device.type != "cuda":
        return Peak(None, f"peak not known for device {device.type}; set --peak-flops")
    return peak_of_card(torch.cuda.get_device_name(device), _precision(autocast=autocast))


def peak_of_card(name: str, precision: str) -> Peak:
    """The peak of a card. precision: a field of `Card`."""
    card = CARDS.get(name)
    if card is None:
        return Peak(None, f"peak not known for {name}; set --peak-flops")
    return Peak(1e12 * getattr(card, precision), f"{precision}, {card.source}")


def _precision(*, autocast: bool) -> str:
    if autocast:
        return "bfloat16"
    return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
