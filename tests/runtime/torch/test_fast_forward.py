"""Fast forward passes: the same output up to rounding, the same bits on every call, and an unchanged module."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.core.arrays import F32
from baffle.core.directions import GAUSSIAN, Directions, Support, dense
from baffle.core.ports import Batch
from baffle.core.probe import InPlace, losses_along
from baffle.models.networks import lenet, wrn
from baffle.runtime.torch.fast_forward import FastForward
from baffle.runtime.torch.loss import TorchLoss, weights_of
from baffle.runtime.torch.trials import tensor_bytes
from tests.support.modules import Made

KEY = bytes(range(32))
SHAPE = (3, 12, 12)


def own() -> nn.Module:
    """Layers of all kinds, combined in ways that a plain stack of layers does not allow."""

    def compute(net: Any, x: Tensor) -> Any:
        x = torch.tanh(net.large(x))
        x = net.pool(x + net.depthwise(net.depthwise(x)))
        return net.linear(net.wide_pool(x).flatten(1).unflatten(1, (32, -1)).mean(2))

    return Made(
        compute,
        large=nn.Conv2d(3, 32, 5, padding=2),
        depthwise=nn.Conv2d(32, 32, 3, groups=32, padding=1, padding_mode="circular"),
        **{"wide_pool": nn.MaxPool2d((3, 2)), "pool": nn.MaxPool2d(3), "linear": nn.Linear(32, 10)},
    )


def viewing() -> nn.Module:
    """Relies on the usual memory layout."""

    def compute(net: Any, x: Tensor) -> Any:
        x = F.max_pool2d(net.convolution(x), 2)
        return net.linear(x.view(len(x), -1))

    return Made(compute, convolution=nn.Conv2d(3, 6, 3), linear=nn.Linear(6 * 25, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lambda: lenet(SHAPE, 10, (5, 7)),
    "lenet with large filters": lambda: lenet(SHAPE, 10, (4, 40), "flatten", "gelu"),
    "lenet with fewer multiplications": lambda: lenet(SHAPE, 10, (8, 32)),
    "lenet of batch statistics": lambda: lenet(SHAPE, 10, (4, 8), norm="batch"),
    "wrn": lambda: wrn(SHAPE, 10, widen=1),
    "wrn of batch statistics": lambda: wrn(SHAPE, 10, 1, "selu", "batch"),
    "softmax": lambda: nn.Sequential(nn.Flatten(), nn.Linear(432, 10)),
    "own": own,
    "viewing": viewing,
}
ALL_MODELS = pytest.mark.parametrize("name", MODELS)


def _module(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().eval()


def _batch(n: int = 10, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    return Batch(random.standard_normal((n, *SHAPE)).astype(np.float32), random.integers(0, 10, n))


def _plain_loss(name: str, batch: Batch, micro_batch: int) -> Callable[[F32], float]:
    """The loss of the module, computed with torch alone."""
    module = _module(name)

    @torch.no_grad()
    def loss(weights: F32) -> float:
        nn.utils.vector_to_parameters(torch.from_numpy(weights.copy()), module.parameters())
        total = 0.0
        for start in range(0, len(batch.y), micro_batch):
            x, y = (torch.from_numpy(a[start : start + micro_batch]) for a in batch)
            total += float(F.cross_entropy(module(x), y, reduction="sum"))
        return total / len(batch.y)

    return loss


def _supports(n: int) -> list[Support]:
    return [*dense(n, 3), Support(2, n // 2), Support(5, 9, (n - 4, n - 1)), Support(5, 9, (n - 4, n - 1))]


@ALL_MODELS
@pytest.mark.parametrize("micro_batch", [10, 4])
def test_losses_along_directions_are_those_of_plain_forwards(name: str, micro_batch: int) -> None:
    batch, directions, weights = _batch(), Directions(KEY, GAUSSIAN), weights_of(_module(name))
    supports = _supports(len(weights))
    loss = TorchLoss(_module(name), micro_batch=micro_batch).on(batch)
    assert isinstance(loss, InPlace)
    plain = _plain_loss(name, batch, micro_batch)
    expected = losses_along(plain, weights, directions, supports, 0.01)
    np.testing.assert_allclose(losses_along(loss, weights, directions, supports, 0.01), expected, rtol=2e-6)
    assert loss(weights) == pytest.approx(plain(weights), rel=2e-6)


@ALL_MODELS
def test_the_same_losses_have_the_same_bits_on_every_call(name: str) -> None:
    weights, directions = weights_of(_module(name)), Directions(KEY, GAUSSIAN)
    supports = _supports(len(weights))
    runtime = TorchLoss(_module(name), micro_batch=8)
    first = losses_along(runtime.on(_batch()), weights, directions, supports, 0.01)
    losses_along(runtime.on(_batch(seed=1)), weights + np.float32(1), directions, supports, 0.01)
    for again in (runtime.on(_batch()), TorchLoss(_module(name, seed=1), micro_batch=8).on(_batch())):
        for loss in (again, lambda weights, again=again: again(weights)):  # the second has no scratch
            assert losses_along(loss, weights, directions, supports, 0.01).tobytes() == first.tobytes()


@ALL_MODELS
def test_afterwards_the_module_has_its_own_weights_and_layers(name: str) -> None:
    module = _module(name)
    inputs = torch.from_numpy(_batch().x)
    weights = weights_of(module)
    with torch.no_grad():
        before = module(inputs)
    losses_along(TorchLoss(module).on(_batch()), weights, Directions(KEY, GAUSSIAN), _supports(len(weights)), 0.1)
    assert weights_of(module).tobytes() == weights.tobytes()
    assert not any("forward" in vars(layer) for layer in module.modules())
    with torch.no_grad():
        assert torch.equal(module(inputs), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_run_plain_forwards(dtype: torch.dtype) -> None:
    weights, directions = weights_of(_module("lenet")), Directions(KEY, GAUSSIAN)
    supports = _supports(len(weights))
    loss = TorchLoss(_module("lenet"), dtype=dtype).on(_batch())
    expected = losses_along(_plain_loss("lenet", _batch(), 10), weights, directions, supports, 0.01)
    losses = losses_along(loss, weights, directions, supports, 0.01)
    np.testing.assert_allclose(losses, expected, rtol=1e-6 if dtype == torch.float64 else 0.02)
    if dtype == torch.float64:  # and weights are moved in double precision
        exact: F32 = weights.astype(np.float64)
        assert len({loss(exact), *losses_along(loss, exact, directions, supports[:3], 1e-9)}) == 4


def test_an_error_in_the_module_is_raised_and_leaves_it_unchanged() -> None:
    module = _module("lenet")
    loss = TorchLoss(module).on(Batch(np.zeros((2, 4, 12, 12), np.float32), np.zeros(2, np.int64)))
    with pytest.raises(RuntimeError, match="channels"):
        loss(weights_of(module))
    assert not any("forward" in vars(layer) for layer in module.modules())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("shape", [(2, 3, 11, 13), (3, 6, 4), (1, 1, 2, 2)])
def test_pooling_is_exactly_that_of_torch(shape: tuple[int, ...], size: int) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x.flatten()[0] = torch.nan
    pool = nn.MaxPool2d(size)
    torch.testing.assert_close(FastForward(pool)(x), pool(x), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(RuntimeError, match="too small"):
        FastForward(nn.MaxPool2d(3))(torch.zeros(1, 1, 2, 60))


def test_a_users_own_layer_is_not_replaced() -> None:
    class Doubled(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    torch.manual_seed(0)
    layer, x = Doubled(3, 2, 3), torch.randn(2, *SHAPE)
    assert torch.equal(FastForward(layer)(x), layer(x))


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 32, 5, padding=2), nn.MaxPool2d(2), nn.Conv2d(4, 32, 5, stride=3)])
def test_many_samples_go_through_in_pieces_with_the_same_bits(
    layer: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(11, 4, 12, 12, generator=torch.Generator().manual_seed(0))
    run = FastForward(nn.Sequential(layer))
    with torch.inference_mode():
        whole = run(x)
        monkeypatch.setattr("baffle.runtime.torch.fast_forward.AT_ONCE", 3 * whole[0].nbytes)
        pieces = run(x)
    assert torch.equal(whole, pieces)
    assert whole.stride() == pieces.stride()


def test_activations_work_in_place_only_where_nothing_else_uses_their_input() -> None:
    def compute(net: Any, x: Tensor) -> Any:
        """Uses the output of its sequence's convolution a second time."""
        first = net.inner[0](x)
        return first + net.inner[2](first) + net.inner(x)

    inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity(), nn.ReLU())
    module = Made(compute, inner=inner)
    seen = list[Tensor]()
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        first = inner[0](x)
        assert torch.allclose(FastForward(module)(x), first + 2 * torch.relu(first), atol=1e-5)
        inner[0].register_forward_hook(lambda _, __, output: seen.append(output))
        FastForward(module)(x)
        assert all(torch.allclose(output, first, atol=1e-5) for output in seen)
        before = x.clone()
        FastForward(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Hardswish()))(x)
    assert len(seen) == 2
    assert torch.equal(x, before)
    with torch.inference_mode():
        stack = nn.Sequential(nn.Conv2d(3, 64, 1), nn.ReLU6())
        convolution_bytes = tensor_bytes(lambda: nn.Sequential(stack[0])(x))
        assert tensor_bytes(lambda: FastForward(stack)(x)) < 1.3 * convolution_bytes + x.nbytes
        assert tensor_bytes(lambda: stack(x)) >= 2 * 2 * 64 * 144 * 4


def test_a_batch_of_several_micro_batches_is_not_copied() -> None:
    x = np.random.default_rng(0).normal(size=(64, 1, 40, 40)).astype(np.float32)
    batch = Batch(x, np.zeros(64, np.int64))
    module = lenet((1, 40, 40), 10, (1, 1))
    assert tensor_bytes(lambda: TorchLoss(module, micro_batch=8).on(batch)) < x.nbytes / 4
