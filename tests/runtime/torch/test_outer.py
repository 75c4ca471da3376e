"""Outer directions in one pass: the losses of a full forward pass each, whatever a module is built of."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.core.arrays import F32
from baffle.core.directions import OUTER, RADEMACHER, Directions, Support, dense, distribution_of
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES, losses_along
from baffle.errors import ModelError
from baffle.models.inputs import Inputs
from baffle.models.networks import build_lenet, build_wrn
from baffle.plan import WRN, LeNet
from baffle.runtime.torch.loss import TorchLoss, cross_entropy, weights_of
from baffle.runtime.torch.trials import why_not_together
from tests.support.modules import Made

STEP = 1e-2
CLASSES = 5


def attention(*, batch_first: bool = True, need_weights: bool = False, causal: bool = False) -> nn.Module:
    """Attention over tokens, of which 0 is padding, with parameters that no layer owns."""

    def compute(net: Any, tokens: Tensor) -> Any:
        padded = F.pad(tokens == 0, (1, 0))
        x = torch.cat([net.first.expand(len(tokens), -1, -1), net.tokens(tokens) + net.positions], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=x.dtype) if causal else None
        x = x if batch_first else x.transpose(0, 1)
        masks = {"key_padding_mask": padded.to(x.dtype) * -1e9, "attn_mask": mask}
        attended, _ = net.attention(x, x, x, need_weights=need_weights, **masks)
        x = net.encoder(x + attended, src_key_padding_mask=padded)
        x = x if batch_first else x.transpose(0, 1)
        return (net.scale * x.mean(1) @ net.tokens.weight.T)[:, :CLASSES]

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first, norm_first=causal)
    return Made(
        compute,
        tokens=nn.Embedding(20, 8, padding_idx=0),
        positions=torch.randn(6, 8) * 0.3,
        first=torch.randn(1, 1, 8),
        attention=nn.MultiheadAttention(8, 2, batch_first=batch_first),
        encoder=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        scale=torch.ones(()),
    )


def over_tokens(attend: Callable[[Any, Tensor, Tensor], Any], **settings: Any) -> nn.Module:
    """Attention between an embedding and a linear layer, tokens × samples × width."""
    return Made(
        lambda net, tokens: net.head(attend(net.attention, net.tokens(tokens.int()).transpose(0, 1), tokens).mean(0)),
        tokens=nn.Embedding(20, 8),
        attention=nn.MultiheadAttention(8, 2, **settings),
        head=nn.Linear(8, CLASSES),
    )


def masked(layer: Any, x: Tensor, tokens: Tensor) -> Any:
    """A mask for each sample and head."""
    mask = (tokens[:, None] % 3 > tokens[:, :, None] % 4).repeat_interleave(2, 0) & ~torch.eye(6, dtype=torch.bool)
    return layer(x, x, x, attn_mask=mask, key_padding_mask=tokens == 0, need_weights=False)[0]


def crossed(layer: Any, x: Tensor, _tokens: Tensor) -> Any:
    """Keys that differ from queries, and attention without a batch."""
    first = x[:, 0]
    alone, _ = layer(first, first, first, need_weights=False)
    return layer(x, x * x, x, need_weights=False)[0] + alone[:, None]


def own_attention(**settings: Any) -> nn.Module:
    """PyTorch's attention without a layer around it. The first token may look at no key."""

    def compute(net: Any, x: Tensor) -> Any:
        query, key, value = net.inner(x).view(len(x), 1, 3, 4).expand(-1, 3, -1, -1).unbind(2)
        return net.head(F.scaled_dot_product_attention(query, key, value, **settings).sum(1))

    return Made(compute, inner=nn.Linear(6, 12), head=nn.Linear(4, CLASSES))


def own_vmap() -> nn.Module:
    """Samples one by one, in a `vmap` of the module's own."""

    def compute(net: Any, x: Tensor) -> Any:
        return torch.func.vmap(lambda one: net.head(net.inner(net.filters(net.norm(one)[None]).flatten()).tanh()))(x)

    norm, filters = nn.LayerNorm(6), nn.Conv1d(1, 2, 3)
    return Made(compute, norm=norm, filters=filters, inner=nn.Linear(8, 7), head=nn.Linear(7, CLASSES))


def loose() -> nn.Module:
    """Parameters in functions of many kinds."""

    def compute(net: Any, x: Tensor) -> Any:
        assert net.right.shape == (6, 7)
        assert net.right.size(0) == len(net.right) == 6
        y = net.bends((x + torch.einsum("ij,bj->bi", net.left[:, :6], x) @ net.left) @ net.right)
        z = F.conv1d(y.view(len(y), 1, 7).expand(-1, 2, -1), net.filters).flatten(1)
        w = torch.stack([y.flip(0)[:, :3], z[:, :3]]).sum(0)
        return torch.mm(y.square(), net.table).sub(w.sum(1, keepdim=True)) / (1 + net.table.abs().sum(0))

    right, left, filters = torch.randn(6, 7), torch.randn(4, 6), torch.randn(3, 2, 2)
    return Made(compute, right=right, left=left, filters=filters, table=torch.randn(7, CLASSES), bends=nn.PReLU(7))


def inward() -> nn.Module:
    """Parameters that are the inputs of layers with parameters."""

    def compute(net: Any, x: Tensor) -> Any:
        first = net.inner(net.table).sum(0) + (net.table @ net.inner.weight.T).sum(0) + net.norm(net.table)[0]
        second, _ = net.attention(net.learned, net.learned, net.learned, need_weights=False)
        third = (net.filters(net.image) + net.filters(net.groups(net.image))).amax((0, 2, 3))
        pooled = F.max_pool2d(net.image, 2) + F.max_pool2d(net.image, 2, 2, 0)
        fourth = F.scaled_dot_product_attention(net.table, x, x).sum() + pooled.sum()
        return net.outer((x * first + second[0]).tanh() * third + 0.1 * fourth)

    return Made(
        compute,
        **{"table": torch.randn(4, 6), "learned": torch.randn(3, 1, 6), "image": torch.randn(1, 2, 4, 4)},
        **{"norm": nn.LayerNorm(6), "inner": nn.Linear(6, 6), "outer": nn.Linear(6, CLASSES)},
        **{"attention": nn.MultiheadAttention(6, 2), "groups": nn.GroupNorm(2, 2), "filters": nn.Conv2d(2, 6, 3)},
    )


def images(*shape: int) -> Callable[[int], Any]:
    return lambda count: np.random.default_rng(0).normal(size=(count, *shape)).astype(np.float32)


def tokens(count: int) -> Any:
    return np.random.default_rng(0).integers(0, 20, (count, 6))


def small_lenet(norm: str) -> nn.Module:
    return build_lenet(LeNet(channels=(3, 4), head="flatten", norm=norm), Inputs((1, 8, 8), CLASSES))  # type: ignore[arg-type]


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, CLASSES, bias=False)), images(6)),
    "narrow": (
        lambda: nn.Sequential(
            *(nn.Linear(6, 1, bias=False), nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1, bias=False)),
            nn.Linear(1, CLASSES),
        ),
        images(6),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.GroupNorm(3, 6)),
            *(nn.Conv2d(6, 6, 3, stride=2, groups=6, bias=False), nn.BatchNorm2d(6)),
            *(nn.Conv2d(6, 4, (1, 3), padding="same", padding_mode="circular"), nn.Flatten(2)),
            *(nn.Conv1d(4, 4, 3, dilation=2), nn.LayerNorm(5), nn.ConvTranspose1d(4, 3, 2)),
            *(nn.Flatten(), nn.Linear(18, CLASSES)),
        ),
        images(4, 8, 8),
    ),
    "filters of one pixel": (
        lambda: nn.Sequential(
            *(nn.MaxPool2d(2), nn.Conv2d(4, 6, 1, groups=2), nn.MaxPool2d(2, padding=1)),
            *(nn.Conv2d(6, 6, 1, stride=2, padding=1), nn.Conv2d(6, 4, 1, groups=2, bias=False), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(4, CLASSES)),
        ),
        images(4, 8, 8),
    ),
    "volumes": (
        lambda: nn.Sequential(
            nn.Conv3d(2, 4, 2, groups=2), nn.Conv3d(4, 3, (1, 2, 3), stride=2), nn.Flatten(), nn.Linear(3, CLASSES)
        ),
        images(2, 3, 4, 4),
    ),
    "norms": (
        lambda: nn.Sequential(
            *(nn.LayerNorm((4, 6)), nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4), nn.LayerNorm((4, 6), bias=False)),
            *(nn.Flatten(), nn.GroupNorm(3, 24), nn.Linear(24, CLASSES)),
        ),
        images(4, 6),
    ),
    "batch statistics": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, CLASSES)),
        images(6),
    ),
    "parameters as inputs": (inward, images(6)),
    "loose parameters": (loose, images(6)),
    "attention": (attention, tokens),
    "attention, tokens first": (lambda: attention(batch_first=False), tokens),
    "attention with weights": (lambda: attention(need_weights=True), tokens),
    "causal attention": (lambda: attention(causal=True), tokens),
    "masked attention": (lambda: over_tokens(masked), tokens),
    "attention with one more key": (lambda: over_tokens(masked, add_bias_kv=True), tokens),
    "attention with an empty key": (lambda: over_tokens(masked, add_zero_attn=True), tokens),
    "cross attention": (lambda: over_tokens(crossed), tokens),
    "a mask that hides every key": (lambda: own_attention(attn_mask=torch.ones(3, 3).tril(-1).bool()), images(6)),
    "causal, scaled attention": (lambda: own_attention(is_causal=True, scale=0.3), images(6)),
    "a vmap of its own": (own_vmap, images(6)),
    "LeNet": (lambda: small_lenet("none"), images(1, 8, 8)),
    "LeNet with GroupNorm": (lambda: small_lenet("group"), images(1, 8, 8)),
    "WRN": (lambda: build_wrn(WRN(widen=1), Inputs((3, 8, 8), CLASSES)), images(3, 8, 8)),
}


def losses_of(
    module: nn.Module, batch: Batch, together: int, supports: tuple[Support, ...] | int = 7, **settings: Any
) -> Any:
    """Losses along the directions of one key, in float64 unless the settings say otherwise."""
    settings = {"dtype": torch.float64} | settings
    weights = weights_of(module)
    if settings["dtype"] == torch.float64:
        weights = weights.astype(np.float64)
    shapes = tuple(tuple(parameter.shape) for parameter in module.parameters() if parameter.requires_grad)
    directions = Directions(bytes(range(32)), distribution_of(OUTER, shapes))
    supports = dense(len(weights), supports) if isinstance(supports, int) else supports
    loss = TorchLoss(module, together=together, **settings).on(batch)
    return loss(weights), losses_along(loss, weights, directions, supports, STEP)


def batch_of(samples: Callable[[int], Any], count: int = 5) -> Batch:
    return Batch(samples(count), np.random.default_rng(1).integers(0, CLASSES, count))


def built(net: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(3)
    make, samples = NETS[net]
    return make(), batch_of(samples)


@pytest.mark.parametrize("net", NETS)
def test_losses_are_those_of_one_pass_a_direction(net: str) -> None:
    """Up to rounding, in float64 and in float32; and the check before a run finds no fault."""
    base, alone = losses_of(*built(net), together=1)
    same, shared = losses_of(*built(net), together=3)
    np.testing.assert_allclose(shared, alone, rtol=1e-11, atol=1e-12)
    assert same == pytest.approx(base, rel=1e-12)
    assert np.ptp(alone) > 1e-4  # directions matter
    _, rounded = losses_of(*built(net), together=7, dtype=torch.float32)
    np.testing.assert_allclose(rounded, alone, rtol=3e-6)
    module, batch = built(net)
    assert why_not_together(module, cross_entropy, batch) == ""


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_networks(data: st.DataObject) -> None:
    """Chains of layers in any order, with samples and blocks of any number."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    channels = data.draw(st.sampled_from([2, 4, 6]))
    layers: list[nn.Module] = []
    here = channels
    for _ in range(data.draw(st.integers(1, 4))):
        out, groups = data.draw(st.sampled_from([(2, 1), (4, 2), (6, 2), (here, here)]))
        biased = data.draw(st.booleans())
        layers += data.draw(
            st.sampled_from(
                [
                    [nn.Conv2d(here, out, 3, padding=1, groups=math.gcd(groups, here), bias=biased)],
                    [nn.Conv2d(here, out, 1, bias=biased), nn.GroupNorm(2 if out % 2 == 0 else 1, out)],
                    [nn.Conv2d(here, out, (3, 2), padding=(1, 1)), nn.AdaptiveAvgPool2d(4), nn.LayerNorm(4)],
                    [nn.Linear(4, 4, bias=biased), nn.Conv2d(here, out, 1)],
                ]
            )
        )
        layers.append(data.draw(st.sampled_from([nn.Tanh(), nn.ReLU(), nn.Hardswish(), nn.Identity()])))
        here = out
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * here, CLASSES))
    batch = batch_of(images(channels, 4, 4), data.draw(st.integers(1, 5)))
    micro_batch = data.draw(st.integers(0, 3))
    _, alone = losses_of(module, batch, 1, micro_batch=micro_batch)
    _, shared = losses_of(module, batch, data.draw(st.integers(2, 9)), micro_batch=micro_batch)
    np.testing.assert_allclose(shared, alone, rtol=1e-10, atol=1e-11)


def test_directions_of_one_layer_each_move_that_layer_alone_and_frozen_parameters_stay() -> None:
    def half_frozen() -> nn.Module:
        module, _ = built("LeNet")
        module.get_parameter("4.bias").requires_grad_(False)
        return module

    batch, n = batch_of(images(1, 8, 8)), len(weights_of(half_frozen()))
    cut = half_frozen().get_parameter("0.weight").numel() + 3  # the first convolution with its bias
    supports = (Support(0, cut), Support(cut, n), Support(0, n), Support(0, cut))
    _, alone = losses_of(half_frozen(), batch, 1, supports)
    _, shared = losses_of(half_frozen(), batch, 4, supports)
    np.testing.assert_allclose(shared, alone, rtol=1e-11)


def test_a_module_is_what_it_was() -> None:
    module, batch = built("attention")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    losses_of(module, batch, together=4, dtype=torch.float32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_loss_that_gives_only_a_mean(scheme: str) -> None:
    def mean(outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(outputs, labels).mean()

    module, batch = built("linear")
    weights: Any = weights_of(module).astype(np.float64)
    directions = Directions(bytes(32), distribution_of(OUTER, tuple(tuple(p.shape) for p in module.parameters())))
    scalars = [
        SCHEMES[scheme](
            TorchLoss(built("linear")[0], loss, dtype=torch.float64, together=together, micro_batch=2).on(batch),
            weights,
            directions,
            dense(len(weights), 5),
            STEP,
        ).scalars
        for loss, together in ((cross_entropy, 1), (cross_entropy, 4), (mean, 4))
    ]
    np.testing.assert_allclose(scalars[1], scalars[0], rtol=1e-9)
    np.testing.assert_allclose(scalars[2], scalars[0], rtol=1e-9)


def test_other_directions_go_the_usual_way() -> None:
    module, batch = built("linear")
    weights = weights_of(module)
    directions, supports = Directions(bytes(32), RADEMACHER), dense(len(weights), 3)
    alone, shared = (
        SCHEMES["forward"](TorchLoss(built("linear")[0], together=t).on(batch), weights, directions, supports, STEP)
        for t in (1, 8)
    )
    np.testing.assert_allclose(shared.scalars, alone.scalars, atol=1e-4)


def test_shapes_of_another_model_are_refused() -> None:
    module, batch = built("linear")
    weights: F32 = weights_of(module)
    directions = Directions(bytes(32), distribution_of(OUTER, ((len(weights),),)))
    with pytest.raises(ModelError, match=r"probe\.shapes are not those of task\.model"):
        losses_along(TorchLoss(module, together=2).on(batch), weights, directions, dense(len(weights), 2), STEP)


def with_head(compute: Callable[[Any, Tensor], Any], **parts: Any) -> Callable[[], nn.Module]:
    return lambda: Made(compute, **parts, head=nn.Linear(6, CLASSES))


def hidden(net: Any, x: Tensor) -> Any:
    """Its functions are out of sight."""
    with torch._C.DisableTorchFunction():
        return net.head(x)


RECURRENT = with_head(lambda net, x: net.head(net.cells(x[None])[0][0]), cells=nn.LSTM(6, 6))
ASKING = with_head(lambda net, x: net.head(x) * 2 if net.gate > 0 else net.head(x), gate=torch.zeros(1))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (RECURRENT, "cannot compute lstm of cells.weight_ih_l0, cells.weight_hh_l0"),
        (ASKING, "data-dependent control flow"),
        (with_head(lambda net, x: F.dropout(net.head(x), 0.5, training=True)), "random"),
        (lambda: own_attention(dropout_p=0.5), "random"),
        (with_head(hidden), "gives other losses than one for each"),
        (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, CLASSES))), "weight_norm"),
    ],
)
def test_what_cannot_be_shared_is_found_before_a_run(module: Callable[[], nn.Module], reason: str) -> None:
    torch.manual_seed(0)
    assert reason in why_not_together(module(), cross_entropy, batch_of(images(6)))
