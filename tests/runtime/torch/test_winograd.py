"""Convolutions with fewer multiplications: exact in fractions, and accurate to rounding in float32."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.runtime.torch import winograd
from baffle.runtime.torch.fast_forward import FastForward
from baffle.runtime.torch.trials import tensor_bytes
from baffle.runtime.torch.winograd import SIZE, TILE, VALUES, Rows, convolve, exact_transforms, suits, takes

INTEGERS = st.integers(-1000, 1000)
Pair = tuple[int, int]


def _apply(rows: Rows, vector: list[Fraction]) -> list[Fraction]:
    return [sum((a * b for a, b in zip(row, vector, strict=True)), Fraction(0)) for row in rows]


@given(g=st.lists(INTEGERS, min_size=SIZE, max_size=SIZE), d=st.lists(INTEGERS, min_size=VALUES, max_size=VALUES))
def test_in_fractions_the_sums_of_products_are_the_correlation(g: list[int], d: list[int]) -> None:
    sums, filters, tiles = exact_transforms()
    products = zip(_apply(filters, [Fraction(x) for x in g]), _apply(tiles, [Fraction(x) for x in d]), strict=True)
    expected = [sum(x * y for x, y in zip(g, d[start:], strict=False)) for start in range(TILE)]
    assert _apply(sums, [a * b for a, b in products]) == expected


def test_the_matrices_for_images_and_products_are_exact_in_float32() -> None:
    sums, _, tiles = exact_transforms()
    assert all(Fraction(torch.tensor(float(x)).item()) == x for row in (*sums, *tiles) for x in row)


def _layer(into: int, out: int, padding: int | tuple[int, int], bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(into, out, SIZE, padding=padding, bias=bias)


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "usual": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "turned": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second": lambda x: torch.stack([x, x + 1], 1).flatten(0, 1)[::2],
}


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 9),
    channels=st.tuples(st.integers(1, 12), st.integers(1, 40)),
    sides=st.tuples(st.integers(5, 19), st.integers(5, 19)),
    padding=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    bias=st.booleans(),
    order=st.sampled_from(sorted(ORDERS)),
    at_once=st.sampled_from([1, 1 << 17, winograd.AT_ONCE]),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_direct_convolution_to_rounding(
    n: int, channels: Pair, sides: Pair, padding: Pair, bias: bool, order: str, at_once: int, seed: int
) -> None:
    torch.manual_seed(seed)
    layer, x = _layer(*channels, padding, bias), ORDERS[order](torch.randn(n, channels[0], *sides))
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        assert takes(layer, x)
        patch.setattr(winograd, "AT_ONCE", at_once)
        output = convolve(layer, x)
        biases = layer.bias.double() if layer.bias is not None else None
        expected = F.conv2d(x.double(), layer.weight.double(), biases, padding=padding)
        summands = F.conv2d(x.double().abs(), layer.weight.double().abs(), padding=padding)
    assert output.shape == expected.shape
    assert output.dtype == torch.float32
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert (output - expected).abs().max() < 2e-6 * summands.max(), "sums may cancel, so what is summed sets the scale"


@pytest.fixture
def layer() -> nn.Conv2d:
    torch.manual_seed(0)
    return _layer(8, 32, 2)


@torch.inference_mode()
def test_weights_that_change_between_calls_are_seen(layer: nn.Conv2d) -> None:
    x = torch.randn(3, 8, 12, 12)
    run = FastForward(nn.Sequential(layer))
    before = run(x)
    layer.weight.data.mul_(2)
    torch.testing.assert_close(run(x), 2 * before - layer.bias.view(-1, 1, 1))  # type: ignore[union-attr]


@torch.inference_mode()
def test_pieces_have_the_same_bits_and_bound_the_memory(layer: nn.Conv2d, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(53, 8, 12, 12)  # the last piece is not full
    whole = convolve(layer, x)
    monkeypatch.setattr(winograd, "AT_ONCE", 1 << 18)
    assert torch.equal(convolve(layer, x), whole)
    assert tensor_bytes(lambda: convolve(layer, x)) < whole.nbytes + 2 * winograd.AT_ONCE


@pytest.mark.parametrize(
    "settings",
    [
        *({"kernel_size": 3}, {"stride": 2}, {"dilation": 2}, {"groups": 2}, {"padding": "same"}),
        *({"padding_mode": "circular"}, {"in_channels": 1}, {"out_channels": 16}),
        {"in_channels": 128, "out_channels": 128},
    ],
    ids=str,
)
def test_other_layers_are_left_to_torch(layer: nn.Conv2d, settings: dict[str, Any]) -> None:
    assert suits(layer)
    assert not suits(nn.Conv2d(**{"in_channels": 8, "out_channels": 32, "kernel_size": 5, **settings}))


@pytest.mark.parametrize(
    "shape", [(2, 1, 12, 12), (8, 12, 12), (0, 8, 12, 12), (2, 8, 0, 12), (1, 8, 100, 100)], ids=str
)
def test_other_images_are_left_to_torch(layer: nn.Conv2d, shape: tuple[int, ...]) -> None:
    fitting = torch.zeros(2, 8, 12, 12)
    with torch.inference_mode():
        assert takes(layer, fitting)
        assert not takes(layer, fitting.double())
        assert not takes(layer, torch.zeros(shape))
    assert not takes(layer, fitting), "gradients flow through torch's own"
    output = FastForward(nn.Sequential(layer))(torch.randn(2, 8, 12, 12))
    assert torch.autograd.grad(output.sum(), layer.weight)[0].abs().sum() > 0
