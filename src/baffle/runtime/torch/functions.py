"""Functions of PyTorch that know about directions: their arguments, and the forms that compute them.

Each returns None if its arguments are unusual, and it needs the moved parameters themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from baffle.runtime.torch import forms
from baffle.runtime.torch.attention import attend, attend_packed, joined_masks
from baffle.runtime.torch.fast_forward import max_of_tiles
from baffle.runtime.torch.rows import differs, rows_of, seen_by_each
from baffle.runtime.torch.shares import Matrix, Shares

Form = Callable[..., Any]

POOLING = {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
"""What pooling of tiles has not got."""


def _linear(shares: Shares, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if (share := shares.of(weight)) is None:
        return None
    return seen_by_each(forms.linear(shares.rows(input), weight, share, shares.rows_if_any(bias)))


def _matmul(shares: Shares, input: Tensor, other: Tensor) -> Tensor | None:
    if (share := shares.of(other)) is None or other.ndim != 2:
        return None
    return seen_by_each(forms.linear(shares.rows(input), other.t(), Matrix(share.b, share.a), None))


def _convolution(convolve: Callable[..., Tensor]) -> Form:
    def form(
        shares: Shares,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        if (share := shares.of(weight)) is None or input.ndim != weight.ndim:
            return None
        how = (stride, padding, dilation, groups)
        biases = shares.rows_if_any(bias)
        return seen_by_each(forms.convolution(convolve, shares.rows(input), weight, share, biases, how))

    return form


def _embedding(shares: Shares, weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor | None:
    if (share := shares.of(weight)) is None:
        return None
    return seen_by_each(forms.embedding(rows_of(indices), weight, share))


def _self_attention(
    shares: Shares,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _: int,
    heads: int,
    in_weight: Tensor | None,
    in_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    *,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, None] | None:
    """What encoders have. PyTorch's own code copies queries, keys and values."""
    into, out = shares.of(in_weight), shares.of(out_weight)
    masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    special = need_weights or add_zero_attn or (training and dropout_p) or (is_causal and attn_mask is None)
    if (
        in_weight is None
        or into is None
        or out is None
        or special
        or not (query is key is value and query.ndim == 3)
        or any(tensor is not None for tensor in (bias_k, bias_v, static_k, static_v))
        or any(differs(mask) or mask.dtype != query.dtype for mask in masks)
    ):
        return None
    x = shares.rows(query).transpose(1, 2)
    projected = forms.linear(x, in_weight, into, shares.rows_if_any(in_bias))
    attended = attend_packed(projected, heads, joined_masks(attn_mask, key_padding_mask, heads))
    output = forms.linear(attended, out_weight, out, shares.rows_if_any(out_bias))
    return seen_by_each(output.transpose(1, 2)), None


def _layer_norm(
    shares: Shares,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    normed = F.layer_norm(shares.rows(input), normalized_shape, eps=eps)
    shape = [1] * (input.ndim - len(normalized_shape)) + [*normalized_shape]
    return seen_by_each(forms.scaled(normed, shares.rows_if_any(weight), shares.rows_if_any(bias), shape))


def _group_norm(
    shares: Shares,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    rows = shares.rows(input)
    normed = F.group_norm(rows.flatten(0, 1), num_groups, eps=eps).view(rows.shape)
    shape = [1, -1] + [1] * (input.ndim - 2)
    return seen_by_each(forms.scaled(normed, shares.rows_if_any(weight), shares.rows_if_any(bias), shape))


def _max_pool(input: Tensor, kernel_size: Any, stride: Any = None, *others: Any, **settings: Any) -> Any:
    """The maximum of square tiles, without the positions that PyTorch's pooling also computes."""
    usual = all(settings.get(name, default) == default for name, default in POOLING.items())
    usual = usual and isinstance(kernel_size, int) and stride in (None, kernel_size) and input.ndim == 4
    if not usual or others or not differs(input):
        return F.max_pool2d(input, kernel_size, stride, *others, **settings)
    rows = rows_of(input)
    pooled = max_of_tiles(kernel_size, rows.flatten(0, 1))
    return seen_by_each(pooled.view(*rows.shape[:2], *pooled.shape[1:]))


FORMS: Mapping[Any, Form] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.conv1d: _convolution(torch.conv1d),
    torch.conv2d: _convolution(torch.conv2d),
    torch.conv3d: _convolution(torch.conv3d),
    torch.embedding: _embedding,
    F.multi_head_attention_forward: _self_attention,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
}
"""Functions of moved parameters."""

QUICKER: Mapping[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: attend,
    F.max_pool2d: _max_pool,
}
"""Functions that `vmap` would make slow, whatever they are called with."""
