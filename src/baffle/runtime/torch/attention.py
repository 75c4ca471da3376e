"""Attention for many directions at once.

PyTorch's `vmap` would run its attention kernel once for each direction. To that kernel, directions are just more
samples.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`, which may be called inside `vmap`."""
    if dropout_p:
        raise ValueError("attention with dropout is random, and a probe's loss must not be")
    output: Tensor = _Attention.apply(query, key, value, attn_mask, is_causal, scale, enable_gqa)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> Tensor:
        query, key, value, mask, is_causal, scale, enable_gqa = args
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: probes need no gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """Everything before the heads, directions and samples, becomes one dimension: with four of them the kernel is
        at its quickest."""
        query, key, value, mask = map(partial(_in_front, info.batch_size), args[:4], in_dims[:4])
        before = query.shape[:-3]
        if mask is not None:
            mask = mask.reshape(len(mask), *[1] * (query.ndim - mask.ndim), *mask.shape[1:])
            mask = mask.expand(*before, *mask.shape[-3:])
        joined = [x if x is None or x.ndim < 4 else x.flatten(0, -4) for x in (query, key, value, mask)]
        output = _Attention.apply(*joined, *args[4:])  # type: ignore[no-untyped-call]
        return output.reshape(*before, *output.shape[-3:]), 0


def _in_front(size: int, tensor: Tensor | None, dim: int | None) -> Any:
    """A tensor with the directions as its first dimension."""
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
