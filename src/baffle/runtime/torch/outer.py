"""Losses along outer directions, many of them in one forward pass of a module that stays what it is."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from baffle.core.arrays import F32, F64
from baffle.core.directions import Directions, Support
from baffle.core.outer import Shapes, places
from baffle.core.probe import Loss, losses_along
from baffle.core.seeds import signs
from baffle.errors import ModelError
from baffle.runtime.torch.fast_forward import max_of_tiles
from baffle.runtime.torch.tensors import MicroBatch, call


class Share(NamedTuple):
    """What a direction adds to a parameter: a bᵀ, or `a` if `b` is empty. Outside of `vmap`, a row per direction."""

    a: Tensor
    b: Tensor


class MovedParameters(TorchFunctionMode):
    """Inside, functions see parameters as one direction moves them. Use it inside a `vmap` over the directions."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], shares: Sequence[Share]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._shares = dict(zip(self._names, shares, strict=True))
        self._moved = dict[int, Tensor]()

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = FORMS.get(func)
        if form and (output := form(self, *args, **kwargs)) is not None:
            return output
        if _name(func) == "__get__" and not isinstance(value := func(*args, **kwargs), Tensor):
            return value  # such as a parameter's shape, which no direction changes
        try:
            return func(*self.moved(args), **self.moved(kwargs))
        except Exception as fault:  # PyTorch has no common error for what `vmap` cannot compute
            used = [self._names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._names]
            if not used:
                raise
            raise ModelError(
                f"PyTorch cannot compute {_name(func)} of {', '.join(used)} for many directions at once"
            ) from fault

    def share(self, parameter: object) -> Share | None:
        """The share of a trained matrix; None for anything else."""
        share = self._shares.get(id(parameter))
        return share if share and share.b.numel() else None

    def moved(self, tree: Any) -> Any:
        """Arguments of a function, with each trained parameter where the direction leads."""
        if isinstance(tree, (list, tuple)):
            items = [self.moved(item) for item in tree]
            return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
        if isinstance(tree, dict):
            return {name: self.moved(item) for name, item in tree.items()}
        if (share := self._shares.get(id(tree))) is None:
            return tree
        if id(tree) not in self._moved:
            added = share.a[:, None] * share.b if share.b.numel() else share.a
            self._moved[id(tree)] = tree + added.view(tree.shape)
        return self._moved[id(tree)]


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def run_moved(run: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter], shares: Sequence[Share]) -> Tensor:
    """What `run()` gives when these parameters are moved, a row for each direction."""

    def one(shares: Sequence[Share]) -> Tensor:
        with MovedParameters(parameters, shares):
            return run()

    output: Tensor = torch.func.vmap(one)(list(shares))
    return output


def _linear(moves: MovedParameters, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if (share := moves.share(weight)) is None:
        return None
    return _moved_linear(moves.moved(input), weight, share, moves.moved(bias))


def _moved_linear(x: Tensor, weight: Tensor, share: Share, bias: Tensor | None) -> Tensor:
    # With b on the left, MKL is ten times as quick as with b on the right.
    dots = (share.b[None] @ x.reshape(-1, x.shape[-1]).t()).view(*x.shape[:-1], 1)
    added = dots * share.a if bias is None else torch.addcmul(bias, dots, share.a)
    return added.add_(F.linear(x, weight))


def _convolution(convolve: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """A direction adds filters that are equal up to a factor each: one more filter for each group, times `a`."""

    def form(
        moves: MovedParameters,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        if (share := moves.share(weight)) is None or input.ndim != weight.ndim:
            return None
        x, biases, ones = moves.moved(input), moves.moved(bias), [1] * (weight.ndim - 2)
        placing = (stride, padding, dilation)
        responses = _responses(convolve, x, share.b.view(weight.shape[1:]), placing, groups)
        a = share.a.view(groups, -1, *ones)
        added = responses * a if bias is None else torch.addcmul(biases.view(groups, -1, *ones), responses, a)
        return added.flatten(1, 2).add_(convolve(x, weight, None, *placing, groups))

    return form


def _responses(
    convolve: Callable[..., Tensor], x: Tensor, filter: Tensor, placing: Sequence[Any], groups: int
) -> Tensor:
    """Samples convolved with one filter: samples × groups × 1 × places."""
    samples, channels, *size = x.shape
    shape = filter.shape[1:]
    if set(shape) == {1}:
        dots = filter.view(1, -1) @ x.reshape(samples, groups, channels // groups, -1)
        placed = convolve(dots.view(-1, 1, *size), x.new_ones(1, 1, *shape), None, *placing, 1)
        return placed.view(samples, groups, 1, *placed.shape[2:])
    # One filter for each channel of each sample, and a sum over channels: up to twenty times as quick as the group for
    # each direction that `vmap` would make of it.
    each = filter.expand(samples, groups, *filter.shape).reshape(-1, 1, *shape)
    layers = convolve(x.reshape(1, -1, *size), each, None, *placing, len(each))
    layers = layers.view(samples, groups, channels // groups, *layers.shape[2:])
    return layers.sum(2, keepdim=True) if groups < channels else layers


def _embedding(
    moves: MovedParameters,
    input: Tensor,
    weight: Tensor,
    _padding: int | None = None,
    max_norm: float | None = None,
    *_: Any,
    **__: Any,
) -> Tensor | None:
    if (share := moves.share(weight)) is None or max_norm is not None:
        return None
    indices = input.long()
    return torch.addcmul(F.embedding(indices, weight), share.a[indices][..., None], share.b)


def _max_pool(
    moves: MovedParameters, input: Tensor, kernel_size: Any, stride: Any = None, **others: Any
) -> Tensor | None:
    plain = isinstance(kernel_size, int) and stride in (None, kernel_size) and input.ndim == 4
    plain = plain and all(others.get(name, usual) == usual for name, usual in POOLING.items())
    return max_of_tiles(kernel_size, moves.moved(input)) if plain and min(input.shape[-2:]) >= kernel_size else None


POOLING = {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
"""Settings of pooling that must have their defaults."""


def _attention(
    moves: MovedParameters,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **others: Any,
) -> Tensor | None:
    if dropout_p or any(others.values()):
        return None
    query, key, value, mask = moves.moved((query, key, value, attn_mask))
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    return _attended(query, key, value, mask, scale)


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Attention in operators that `vmap` knows. As in PyTorch, a query whose keys are all masked attends to nothing."""
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-1, -2)
    if mask is None:
        return scores.softmax(-1) @ value
    weights = (scores + mask).softmax(-1)
    return weights.masked_fill_((mask == -math.inf).all(-1, keepdim=True), 0.0) @ value


def _multi_head_attention(
    moves: MovedParameters, query: Tensor, key: Tensor, value: Tensor, *settings: Any, **more: Any
) -> tuple[Tensor, Tensor | None]:
    """Self-attention as encoders have it, tokens × samples × width. Any other attention is computed with moved weights,
    and with `need_weights`, which avoids PyTorch's kernel."""
    _, heads, in_weight, in_bias, bias_k, bias_v, add_zero_attn, dropout_p, out_weight, out_bias = settings
    into, out = moves.share(in_weight), moves.share(out_weight)
    mask, padding = more.get("attn_mask"), more.get("key_padding_mask")
    special = more["need_weights"] or (more["training"] and dropout_p) or add_zero_attn or query.ndim != 3
    special = special or any(
        given is not None for given in (bias_k, bias_v, more.get("static_k"), more.get("static_v"))
    )
    special = special or any(each is not None and each.dtype != query.dtype for each in (mask, padding))
    if into is None or out is None or special or not (query is key is value):
        arguments = moves.moved((query, key, value, *settings))
        output, weights = F.multi_head_attention_forward(*arguments, **moves.moved(more) | {"need_weights": True})
        return output, weights if more["need_weights"] else None
    mask = mask.unflatten(0, (-1, heads)) if mask is not None and mask.ndim == 3 else mask
    if padding is not None:
        mask = padding[:, None, None] if mask is None else mask + padding[:, None, None]
    projected = _moved_linear(moves.moved(query), in_weight, into, moves.moved(in_bias))
    q, k, v = projected.view(*query.shape[:2], 3, heads, -1).permute(2, 1, 3, 0, 4).unbind()
    attended = _attended(q, k, v, mask)
    return _moved_linear(attended.permute(2, 0, 1, 3).flatten(2), out_weight, out, moves.moved(out_bias)), None


FORMS: Mapping[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **{convolve: _convolution(convolve) for convolve in (torch.conv1d, torch.conv2d, torch.conv3d)},
    F.embedding: _embedding,
    F.max_pool2d: _max_pool,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
}
"""Functions that know about directions. Each returns None for arguments that it does not handle."""


def lengths(shapes: Shapes) -> list[int]:
    """The lengths of `a` and `b` of each tensor, in turns. `b` of a vector has length 0."""
    return [length for place in places(shapes) for length in (place.rows, place.columns)]


def steps(directions: Directions, numbers: range, supports: Sequence[Support], step: float, shapes: Shapes) -> F32:
    """What directions add to the tensors of a model: `a` and `b` of each, side by side, a row for each direction. `a`
    is multiplied by the step, or by 0 where a direction does not touch the tensor."""
    if directions.distribution.shapes != shapes:
        raise ModelError("probe.shapes are not those of task.model; leave them out to have them found")
    own = [supports[k] for k in numbers]
    kinds = list(dict.fromkeys(own))
    scales = np.ones((len(kinds), 2 * len(shapes)), np.float32)
    for number, place in enumerate(places(shapes)):
        scales[:, 2 * number] = [kind.below(place.stop) > kind.below(place.start) for kind in kinds]
    scales[:, ::2] *= np.float32(step)  # as core rounds it
    each = np.repeat(scales, lengths(shapes), axis=1)
    drawn: F32 = signs(directions.key, numbers, 0, each.shape[1]).astype(np.float32)
    drawn *= each if len(kinds) == 1 else each[[kinds.index(support) for support in own]]
    return drawn


@dataclass
class OuterLosses:
    """The losses of a module's samples, for many outer directions at once. The criterion receives outputs in float64.
    `scratch` is the buffer that the module's parameters are views of. At most `together` directions share a forward
    pass of a micro-batch."""

    module: nn.Module
    scratch: Tensor
    micro_batches: Sequence[MicroBatch]
    criterion: Callable[[Tensor, Tensor], Tensor]
    together: int

    def __post_init__(self) -> None:
        self._parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad and p.numel()}
        self._shapes = tuple(tuple(parameter.shape) for parameter in self._parameters.values())

    @torch.inference_mode()
    def __call__(self, weights: F32) -> F64:
        """Each sample's loss."""
        self.scratch.copy_(torch.from_numpy(weights))
        parts = [self._losses(call(self.module, x)[None], y)[0] for x, y in self.micro_batches]
        return np.concatenate(parts)

    @torch.inference_mode()
    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        """Each sample's loss at W + step · z_k, a row for every k."""
        self.scratch.copy_(torch.from_numpy(weights))
        rows = list[F64]()
        needed = -(-len(supports) // self.together)
        for start, stop in pairwise(len(supports) * i // needed for i in range(needed + 1)):  # passes of equal size
            numbers = range(start, stop)
            drawn = steps(directions, numbers, supports, step, self._shapes)
            factors = torch.split(torch.from_numpy(drawn).to(self.scratch), lengths(self._shapes), dim=1)
            shares = [Share(a, b) for a, b in zip(factors[::2], factors[1::2], strict=True)]
            parts = [
                self._losses(run_moved(partial(call, self.module, x), self._parameters, shares), y)
                for x, y in self.micro_batches
            ]
            rows.append(np.concatenate(parts, axis=1))
        return np.concatenate(rows)

    def _losses(self, outputs: Tensor, labels: Tensor) -> F64:
        """The losses of outputs of shape (directions, samples, ...). A criterion's mean stands for each sample."""
        count, samples = outputs.shape[:2]
        outputs = outputs.double()
        losses = self.criterion(outputs.flatten(0, 1), labels.repeat(count, *[1] * (labels.ndim - 1))).double()
        if not losses.ndim:
            means = torch.stack([self.criterion(moved, labels).double() for moved in outputs])
            losses = means[:, None].expand(count, samples)
        return losses.reshape(count, samples).cpu().numpy()


@dataclass(frozen=True)
class OuterLoss:
    """The mean of these losses. `plain` is the loss of the whole model, for directions that are not outer."""

    losses: OuterLosses
    plain: Loss

    def __call__(self, weights: F32) -> float:
        return float(self.losses(weights).mean())

    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        if not directions.distribution.shapes:
            # The plain loss may round differently, which must not show in differences to this object's loss.
            rounding = self(weights) - self.plain(weights)
            return losses_along(self.plain, weights, directions, supports, step) + rounding
        means: F64 = self.losses.along(weights, directions, supports, step).mean(axis=1)
        return means
