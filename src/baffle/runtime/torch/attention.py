"""Attention for many directions at once.

PyTorch's `vmap` would run its attention kernel once for each direction. To that kernel, directions are just more
samples.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from baffle.runtime.torch.rows import differs, rows_of, seen_by_each


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **how: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention`, which may be called inside a `vmap`."""
    if dropout_p:
        raise ValueError("attention with dropout is random, and a probe's loss must not be")
    if not any(map(differs, (query, key, value, attn_mask))):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, **how)
    q, k, v = (rows_of(tensor) for tensor in (query, key, value))
    count = max(len(q), len(k), len(v))
    q, k, v = (rows.expand(count, *rows.shape[1:]) for rows in (q, k, v))
    mask = None if attn_mask is None else rows_of(attn_mask)
    return seen_by_each(attend_rows(q, k, v, mask, is_causal=is_causal, **how))


def attend_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
    """Everything before the heads, directions and samples, becomes one dimension: with four of them the kernel is at
    its quickest. The mask may be the same for all directions."""
    before = query.shape[:-3]
    if mask is not None:
        mask = mask.reshape(len(mask), *[1] * (query.ndim - mask.ndim), *mask.shape[1:])
        mask = mask.expand(*before, *mask.shape[-3:])
    joined = [x if x is None or x.ndim < 4 else x.flatten(0, -4) for x in (query, key, value, mask)]
    output = F.scaled_dot_product_attention(*joined, **how)  # type: ignore[arg-type]  # only a mask may be None
    return output.reshape(*before, *output.shape[-3:])


def attend_packed(projected: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    """Self-attention of queries, keys and values side by side, directions × samples × tokens × 3 · width."""
    query, key, value = projected.view(*projected.shape[:-1], 3, heads, -1).transpose(2, 4).unbind(3)
    attended = attend_rows(query, key, value, None if mask is None else mask[None])
    return attended.transpose(2, 3).flatten(3)


def joined_masks(mask: Tensor | None, padding: Tensor | None, heads: int) -> Tensor | None:
    """What is added to the scores, as `nn.MultiheadAttention` has it: `mask` for tokens × tokens, of each sample and
    head or the same for all, `padding` for samples × tokens."""
    if mask is not None and mask.ndim == 3:
        mask = mask.view(-1, heads, *mask.shape[1:])
    if padding is None:
        return mask
    padding = padding[:, None, None]
    return padding if mask is None else mask + padding
