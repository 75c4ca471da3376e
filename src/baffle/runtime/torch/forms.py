"""Layers with weights W + a bᵀ, for all directions at once: x (W + a bᵀ)ᵀ = x Wᵀ + (x·b) aᵀ.

The first dimension of every input is that of directions, with length one if the input is the same for all of them. The
forms are the quickest of those that were tried with oneDNN 3.12, MKL 2024 and AVX2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from baffle.runtime.torch.shares import Matrix


def linear(x: Tensor, weight: Tensor, share: Matrix, bias: Tensor | None) -> Tensor:
    """`bias` is that of one direction or of all, as x."""
    rows = x.reshape(len(x), -1, x.shape[-1])
    a = share.a[:, None]
    output = x.new_empty(len(a), rows.shape[1], len(weight))
    if len(rows) == 1:
        dots = torch.matmul(share.b, rows[0].t())[:, :, None]
        torch.addcmul(F.linear(rows, weight), dots, a, out=output)
        output = output if bias is None else output.add_(bias[:, None])
    else:
        # With b on the left, MKL is ten times as quick as with b on the right.
        dots = torch.bmm(share.b[:, None], rows.transpose(1, 2)).transpose(1, 2)
        torch.mul(dots, a, out=output) if bias is None else torch.addcmul(bias[:, None], dots, a, out=output)
        output.view(-1, len(weight)).addmm_(rows.flatten(0, 1), weight.t())
    return output.view(len(a), *x.shape[1:-1], len(weight))


def convolution(
    convolve: Callable[..., Tensor], x: Tensor, weight: Tensor, share: Matrix, bias: Tensor | None, how: Sequence[Any]
) -> Tensor:
    """a bᵀ are equal filters up to a factor each: one more filter (one for each group) and an outer product. `how` are
    stride, padding, dilation and groups."""
    *placing, groups = how
    count, places = len(share.a), [1] * (weight.ndim - 2)
    filters = share.b.view(count, *weight.shape[1:])
    responses = _responses(convolve, x, filters, placing, groups)
    output = convolve(x.flatten(0, 1), weight, None, *how)
    size = output.shape[2:]
    grouped = output.view(*x.shape[:2], groups, -1, *size)
    a = share.a.view(count, 1, groups, -1, *places)
    grouped = grouped.addcmul_(responses, a) if len(x) == count else torch.addcmul(grouped, responses, a)
    output = grouped.reshape(count, x.shape[1], -1, *size)
    return output if bias is None else output.add_(bias.view(len(bias), 1, -1, *places))


def _responses(
    convolve: Callable[..., Tensor], x: Tensor, filters: Tensor, placing: Sequence[Any], groups: int
) -> Tensor:
    """x convolved with one filter a direction: directions × samples × groups × 1 × places."""
    count, (samples, channels, *size), shape = len(filters), x.shape[1:], filters.shape[2:]
    if len(x) == 1:
        shared = convolve(x[0], filters.repeat(groups, *[1] * (filters.ndim - 1)), None, *placing, groups)
        return shared.view(samples, groups, count, 1, *shared.shape[2:]).movedim(2, 0).contiguous()
    if set(shape) == {1}:
        split = x.reshape(count, samples, groups, channels // groups, -1)
        dots = torch.matmul(filters.view(count, 1, 1, 1, -1), split)
        placed = convolve(dots.view(-1, 1, *size), dots.new_ones(1, 1, *shape), None, *placing, 1)
        return placed.view(count, samples, groups, 1, *placed.shape[2:])
    # One filter for each channel of each sample, and a sum over channels: up to twenty times as quick as a group for
    # each direction, unless a filter is a single number.
    each = filters[:, None, None].expand(count, samples, groups, *filters.shape[1:]).reshape(-1, 1, *shape)
    layers = convolve(x.reshape(1, -1, *size), each, None, *placing, len(each))
    layers = layers.view(count, samples, groups, channels // groups, *layers.shape[2:])
    return layers.sum(3, keepdim=True) if groups < channels else layers


def embedding(indices: Tensor, weight: Tensor, share: Matrix) -> Tensor:
    count, flat = len(share.a), indices.flatten(1).long()
    a = share.a.gather(1, flat.expand(count, -1))[:, :, None]
    output = torch.addcmul(F.embedding(flat, weight), a, share.b[:, None])
    return output.view(count, *indices.shape[1:], -1)


def scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    """x · weight + bias, as far as they are given: a row of this shape for each direction, or one for all."""
    weight, bias = (None if each is None else each.view(len(each), *shape) for each in (weight, bias))
    if weight is not None and bias is not None:
        return torch.addcmul(bias, x, weight)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
