"""Directions that touch a part of the weights: their losses are those of full forward passes."""

import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.core.arrays import F32, F64
from baffle.core.directions import DISTRIBUTIONS, GAUSSIAN, OUTER, Directions, Support, distribution_of
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES, StructuredLoss, forward_difference, losses_along
from baffle.errors import PlanError
from baffle.runtime.torch import units
from baffle.runtime.torch.loss import TorchCriterion, TorchLoss, cross_entropy, weights_of
from baffle.runtime.torch.stages import Pipeline, pipeline_of, unit_support
from baffle.runtime.torch.structured import Structured
from tests.support.modules import Made

SIGMA = 1e-2
CLASSES = 5


def residual(channels: int, norm: nn.Module) -> nn.Module:
    """A residual block, which is one stage."""
    inner = nn.Sequential(norm, nn.ReLU(inplace=False), nn.Conv2d(channels, channels, 3, padding=1))
    return Made(lambda net, x: net.shortcut(x) + net.inner(x), inner=inner, shortcut=nn.Conv2d(channels, channels, 1))


def wrapped(inner: nn.Module) -> nn.Module:
    """Hides the module inside it."""
    return Made(lambda net, x: net.inner(x), inner=inner)


class Net(nn.Module):
    """Not an nn.Sequential; a method names its stages, truthfully or not."""

    def __init__(self, *parts: nn.Module, lie: Sequence[nn.Module] | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._declared = list(parts if lie is None else lie)

    def stages(self) -> list[nn.Module]:
        return self._declared

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.Hardswish, nn.ReLU, nn.SELU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Identity)


def activation(draw: st.DrawFn) -> nn.Module:
    return draw(st.sampled_from(ACTIVATIONS))()


EPS = 1e-2
"""Added to a variance. With the usual 1e-5, rounding errors in a group of nearly equal numbers would grow 300 times."""


def norms(channels: int) -> list[nn.Module]:
    groups = [g for g in (1, 2, 3, channels) if channels % g == 0]
    return [
        *(nn.GroupNorm(g, channels, EPS, affine) for g in groups for affine in (True, False)),
        nn.BatchNorm2d(channels, EPS, affine=False, track_running_stats=False),
        nn.BatchNorm2d(channels, EPS),
    ]


@st.composite
def models(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """Stacks of convolutions with all kinds of layers between them, then linear layers; and the shape of a sample."""
    torch.manual_seed(draw(st.integers(0, 99)))
    shape = (draw(st.integers(1, 3)), draw(st.sampled_from([6, 8, 9])), 8)
    x = torch.zeros(2, *shape)
    parts = list[nn.Module]()

    def add(module: nn.Module) -> None:
        nonlocal x
        parts.append(module)
        x = module(x)

    for _ in range(draw(st.integers(0, 2))):
        kernel = draw(st.sampled_from([(1, 1), (3, 3), (2, 3)]))
        out = draw(st.integers(1, 6))
        padding = draw(st.sampled_from([(0, 0), (1, 1), (1, 0)]))
        stride, dilation = draw(st.sampled_from([((1, 1), 1), ((2, 2), 1), ((1, 2), 1), ((1, 1), 2)]))
        add(nn.Conv2d(x.shape[1], out, kernel, stride, padding, dilation, bias=draw(st.booleans())))
        if draw(st.booleans()):
            add(draw(st.sampled_from(norms(out))))
        add(activation(draw))
        if min(x.shape[2:]) >= 2 and draw(st.booleans()):
            add(draw(st.sampled_from([nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(2, 1), nn.AdaptiveAvgPool2d(2)])))
        if draw(st.booleans()):
            add(residual(out, draw(st.sampled_from([nn.Identity(), nn.GroupNorm(1, out, EPS), norms(out)[-2]]))))
        if min(x.shape[2:]) < 5:
            break
    if draw(st.booleans()):
        add(nn.AdaptiveAvgPool2d(1))
    add(nn.Flatten())
    for _ in range(draw(st.integers(0, 2))):
        add(nn.Linear(x.shape[1], draw(st.integers(1, 6))))
        add(activation(draw))
        if draw(st.booleans()):
            add(nn.Dropout(0.5))
    add(nn.Linear(x.shape[1], CLASSES, bias=draw(st.booleans())))
    wraps = (nn.Sequential, Net, lambda *parts: nn.Sequential(nn.Sequential(*parts[:2]), *parts[2:]))
    module: nn.Module = draw(st.sampled_from(wraps))(*parts)
    return module.eval(), shape


@st.composite
def parts_of(draw: st.DrawFn, pipeline: Pipeline, n: int) -> Support:
    """A range of a layer's units, a stage, all weights, or any slice of them."""
    kinds = ["units", "units", "units", "stage", "dense", "slice"] if pipeline.layers else ["stage", "dense", "slice"]
    match draw(st.sampled_from(kinds)):
        case "units":
            layer = draw(st.sampled_from(pipeline.layers))
            start = draw(st.integers(0, layer.units - 1))
            stop = draw(st.integers(start + 1, layer.units))
            return unit_support(layer, start, stop, biased=draw(st.booleans()))
        case "stage":
            stage = draw(st.sampled_from([stage for stage in pipeline.stages if stage.start < stage.stop]))
            return Support(stage.start, stage.stop)
        case "slice":
            start = draw(st.integers(0, n - 1))
            return Support(start, draw(st.integers(start + 1, n)))
        case _:
            return Support(0, n)


def mean_cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels)


def batch_of(shape: tuple[int, ...], samples: int, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    x = random.standard_normal((samples, *shape)).astype(np.float32)
    return Batch(x, random.integers(0, CLASSES, samples))


def full_forwards(
    module: nn.Module,
    micro_batches: Sequence[Batch],
    weights: F32,
    directions: Directions,
    supports: Sequence[Support],
    step: float,
) -> tuple[float, F64]:
    """The base loss and L(W + step·z) for each direction, computed by running the module itself in float64."""
    own = module.double().eval()
    trained = [p for p in own.parameters() if p.requires_grad]

    def loss(flat: F64) -> float:
        nn.utils.vector_to_parameters(torch.from_numpy(flat.copy()), trained)
        with torch.no_grad():
            sums = [
                F.cross_entropy(own(torch.from_numpy(p.x).double()), torch.from_numpy(p.y), reduction="sum")
                for p in micro_batches
            ]
        return float(sum(sums)) / sum(len(p.y) for p in micro_batches)

    losses = np.empty(len(supports))
    for k, support in enumerate(supports):
        moved = weights.astype(np.float64)
        (z,) = directions.over(support, [k]) * directions.distribution.unit
        z *= directions.stretch([k], support.size)
        for touched, here in support.parts():
            moved[touched] += step * z[here]
        losses[k] = loss(moved)
    return loss(weights.astype(np.float64)), losses


def structured(
    module: nn.Module, batch: Batch, loss: TorchCriterion = cross_entropy, micro_batch: int = 0
) -> StructuredLoss:
    on_batch = TorchLoss(module, loss, micro_batch=micro_batch, structured=True).on(batch)
    assert isinstance(on_batch, Structured)
    assert isinstance(on_batch, StructuredLoss)
    return on_batch


def pipeline_for(module: nn.Module, *shape: int) -> Pipeline:
    pipeline = pipeline_of(module, torch.zeros(1, *shape))
    assert pipeline is not None
    return pipeline


def require_exact(module: nn.Module, batch: Batch, supports: Sequence[Support], atol: float = 1e-6) -> None:
    """Losses along a direction for each support differ from the base loss as full forward passes say."""
    weights, directions, loss = weights_of(module), Directions(bytes(32), GAUSSIAN), structured(module, batch)
    base, moved = loss(weights), loss.along(weights, directions, supports, SIGMA)
    exact_base, exact = full_forwards(module, [batch], weights, directions, supports, SIGMA)
    np.testing.assert_allclose(moved - base, exact - exact_base, rtol=1e-2, atol=atol)


@settings(deadline=None, max_examples=50)
@given(data=st.data(), distribution=st.sampled_from(list(DISTRIBUTIONS)), tile=st.sampled_from([1, 40, 1000, 1 << 20]))
def test_losses_along_any_supports_are_those_of_full_forwards(
    data: st.DataObject, distribution: str, tile: int
) -> None:
    module, shape = data.draw(models())
    weights = weights_of(module)
    pipeline = pipeline_for(module, *shape)
    choices = data.draw(st.lists(parts_of(pipeline, len(weights)), min_size=1, max_size=5))
    supports = data.draw(st.lists(st.sampled_from(choices), min_size=1, max_size=12))
    batch, micro_batch = batch_of(shape, data.draw(st.integers(2, 7))), data.draw(st.sampled_from([0, 2]))
    criterion = data.draw(st.sampled_from([cross_entropy, mean_cross_entropy]))
    directions = Directions(bytes(32), DISTRIBUTIONS[distribution])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "TILE", tile)
        loss = structured(module, batch, criterion, micro_batch)
        base, moved = loss(weights), loss.along(weights, directions, supports, SIGMA)
        again = loss.along(weights, directions, supports, SIGMA)
    size = micro_batch or len(batch.y)
    micro_batches = [Batch(batch.x[i : i + size], batch.y[i : i + size]) for i in range(0, len(batch.y), size)]
    exact_base, exact = full_forwards(module, micro_batches, weights, directions, supports, SIGMA)
    np.testing.assert_array_equal(again, moved)
    assert base == pytest.approx(exact_base, rel=2e-5)
    np.testing.assert_allclose(moved, exact, rtol=2e-5)
    np.testing.assert_allclose(moved - base, exact - exact_base, rtol=2e-2, atol=2e-5)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_losses_along_outer_directions_over_any_tensors_are_those_of_full_forwards(data: st.DataObject) -> None:
    module, shape = data.draw(models())
    weights, shapes = weights_of(module), tuple(tuple(weight.shape) for weight in module.parameters())
    edges = st.sampled_from([0, *accumulate(math.prod(shape) for shape in shapes)])
    ends = st.lists(edges, min_size=4, max_size=4).map(sorted).filter(lambda ends: ends[0] < ends[1])
    supports = [Support(a, b, (c, d)) for a, b, c, d in data.draw(st.lists(ends, min_size=1, max_size=6))]
    batch, directions = batch_of(shape, 4), Directions(bytes(32), distribution_of(OUTER, shapes))
    exact_base, exact = full_forwards(deepcopy(module), [batch], weights, directions, supports, SIGMA)
    for loss in (structured(deepcopy(module), batch), TorchLoss(module).on(batch)):
        assert loss(weights) == pytest.approx(exact_base, rel=2e-5)
        np.testing.assert_allclose(losses_along(loss, weights, directions, supports, SIGMA), exact, rtol=2e-5)


def lenet_like(norm: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), norm or nn.Identity(), nn.Hardswish(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 12, 5, padding=2), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(12, CLASSES),
    )


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("norm", [None, nn.GroupNorm(3, 6, affine=False)])
def test_scalars_are_closer_to_the_exact_ones_than_those_of_float32_forwards(
    scheme: str, norm: nn.Module | None
) -> None:
    sigma, batch = 1e-3, batch_of((1, 16, 16), 16)
    module = lenet_like(norm)
    weights, pipeline = weights_of(module), pipeline_for(module, 1, 16, 16)
    supports = [unit_support(layer, u, u + 1) for layer in pipeline.layers for u in range(layer.units)] * 2
    directions = Directions(bytes(32), GAUSSIAN)
    loss = structured(module, batch)
    ours = SCHEMES[scheme](loss, weights, directions, supports, sigma).scalars

    def plain(flat: F32) -> float:
        return float(loss(flat))

    plainly = SCHEMES[scheme](plain, weights, directions, supports, sigma).scalars
    base, ahead = full_forwards(module, [batch], weights, directions, supports, sigma)
    _, behind = full_forwards(module, [batch], weights, directions, supports, -sigma)
    exact = (ahead - base) / sigma if scheme == "forward" else (ahead - behind) / (2 * sigma)
    error, plain_error = (float(np.sqrt(np.mean((scalars - exact) ** 2))) for scalars in (ours, plainly))
    assert error <= plain_error
    assert error < 1e-3 * float(np.sqrt(np.mean(exact**2)))


def test_kept_activations_are_used_only_for_their_own_weights_and_batch() -> None:
    batch, other = batch_of((1, 8, 8), 6), batch_of((1, 8, 8), 6, seed=1)
    weights = weights_of(lenet_like())
    moved = (weights + np.float32(0.05)).astype(np.float32)
    first_layer, second_layer, _ = pipeline_for(lenet_like(), 1, 8, 8).layers
    supports = [unit_support(second_layer, 3, 5), unit_support(first_layer, 0, 1)]

    def scalars(loss: Any, weights: F32) -> F64:
        return forward_difference(loss, weights, Directions(bytes(32), GAUSSIAN), supports, SIGMA).scalars

    runtime = TorchLoss(lenet_like(), structured=True)
    first, second = runtime.on(batch), runtime.on(other)
    cases = [(first, batch, weights), (second, other, moved), (first, batch, moved)]
    expected = [scalars(TorchLoss(lenet_like(), structured=True).on(own), at) for _, own, at in cases]
    for _ in range(2):
        for (loss, _, at), wanted in zip(cases, expected, strict=True):
            np.testing.assert_array_equal(scalars(loss, at), wanted)
    changed = weights.copy()
    first(changed)
    changed += np.float32(0.05)
    np.testing.assert_array_equal(scalars(first, changed), expected[2])


def between(channels: int) -> dict[str, list[nn.Module]]:
    """Layers that may stand between two convolutions."""
    return {
        "nothing": [],
        "groups": [nn.GroupNorm(channels // 2, channels), nn.Hardswish(), nn.MaxPool2d(2)],
        "plain groups": [nn.GroupNorm(2, channels, affine=False), nn.GELU(), nn.AvgPool2d(2)],
        "batch": [nn.BatchNorm2d(channels, affine=False, track_running_stats=False), nn.ReLU()],
        "activation, batch": [nn.Tanh(), nn.BatchNorm2d(channels, track_running_stats=False)],
        "residual": [nn.ReLU(), residual(channels, nn.GroupNorm(1, channels)), nn.GroupNorm(2, channels), nn.SELU()],
    }


@pytest.mark.parametrize(("number", "name"), list(enumerate(between(4))))
def test_all_units_of_all_layers_together(number: int, name: str) -> None:
    torch.manual_seed(0)
    ends: list[list[nn.Module]] = [
        [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES)],
        [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, CLASSES)],
        [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 7), nn.ReLU(), nn.Linear(7, CLASSES)],
    ]
    module = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), *between(4)[name]),
        *(nn.Conv2d(4, 6, 3, padding=1), *between(6)[name], *ends[number % 3]),
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    batch = batch_of((1, 8, 8), 3)
    pipeline = pipeline_for(module, 1, 8, 8)
    widths = (
        (layer, start, width) for layer in pipeline.layers for width in (1, 2) for start in range(layer.units - 1)
    )
    supports = [unit_support(layer, start, start + width) for layer, start, width in widths] * 2
    require_exact(module, batch, supports, atol=1e-5)


@pytest.mark.parametrize("inplace", [True, False])
def test_a_stage_that_overwrites_its_input_does_no_harm(inplace: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.LeakyReLU(inplace=inplace), nn.Linear(8, CLASSES))
    require_exact(module, batch_of((3, 4), 5), [Support(104, 104 + 45), Support(0, 12, (96, 97)), Support(0, 149)])


def test_directions_over_all_weights_run_the_whole_module() -> None:
    module, batch = lenet_like(), batch_of((1, 8, 8), 4)
    weights, called = weights_of(module), list[int]()
    pipeline = pipeline_for(module, 1, 8, 8)

    def plain(_: F32) -> float:
        called.append(1)
        return 1.0

    x, y = torch.from_numpy(batch.x), torch.from_numpy(batch.y)
    loss = Structured(pipeline, torch.from_numpy(weights.copy()), [(x, y)], cross_entropy, plain)
    dense = [Support(0, len(weights))] * 3
    assert loss.along(weights, Directions(bytes(32), GAUSSIAN), dense, SIGMA).tolist() == [loss(weights)] * 3
    assert len(called) == 4


def test_only_a_module_with_known_stages_is_a_pipeline() -> None:
    opaque = wrapped(nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES)))
    assert pipeline_of(opaque, torch.zeros(1, 3, 4)) is None
    assert not isinstance(TorchLoss(opaque, structured=True).on(batch_of((3, 4), 2)), Structured)
    shared = nn.Linear(4, 4)
    assert pipeline_of(nn.Sequential(shared, nn.ReLU(), shared), torch.zeros(1, 4)) is None
    act = nn.ReLU()
    again = pipeline_of(nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act), torch.zeros(1, 4))
    assert again is not None
    assert len(again.stages) == 4


def test_stages_that_are_not_the_module_are_refused() -> None:
    first, act, last = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, CLASSES)
    for lie in ([first, last], [first, nn.ReLU(), last], [act, first, last]):
        with pytest.raises(PlanError, match=r"stages\(\) one after the other"):
            pipeline_of(Net(first, act, last, lie=lie), torch.zeros(1, 4))
    for lie in ([first, act], [first, act, last, last], [first, act, nn.Linear(4, CLASSES)]):
        with pytest.raises(PlanError, match="every trained weight in exactly one stage"):
            pipeline_of(Net(first, act, last, lie=lie), torch.zeros(1, 4))


def test_stages_whose_samples_depend_on_each_other_are_found() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, affine=False, track_running_stats=False), nn.GroupNorm(1, 2), nn.Flatten()
    )
    pipeline = pipeline_for(module, 1, 5, 5)
    assert [stage.separate for stage in pipeline.stages] == [True, False, True, True]


def test_layers_that_a_block_adds_to_its_output_are_found() -> None:
    torch.manual_seed(0)
    block, head = residual(4, nn.GroupNorm(2, 4)), nn.Linear(4, CLASSES)
    clipped = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module = Net(block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), wrapped(clipped), wrapped(nn.Linear(4, 4)), head)
    pipeline = pipeline_for(module, 4, 6, 6)
    assert [(layer.stage, layer.inside, layer.filters, layer.biases) for layer in pipeline.layers] == [
        (0, True, 8, 152),
        (0, True, 156, 172),
        (4, True, 196, 212),
        (5, False, 216, 236),
    ]


def test_frozen_weights_are_left_out_of_supports() -> None:
    module = lenet_like()
    module[0].weight.requires_grad_(False)
    module[4].bias.requires_grad_(False)
    second, head = pipeline_for(module, 1, 8, 8).layers
    assert (second.filters, second.biases, head.filters) == (6, None, 6 + 12 * 150)
    supports = [unit_support(second, 2, 3), Support(0, 6), unit_support(head, 1, 3)]
    require_exact(module, batch_of((1, 8, 8), 4), supports)
