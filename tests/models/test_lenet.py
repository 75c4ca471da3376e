"""LeNet: its size in the paper and the demo, and its options."""

import numpy as np
import pytest
import torch
from torch import nn

from baffle.models.build import build
from baffle.models.inputs import Inputs
from baffle.models.layers import ACTIVATIONS, normalisation
from baffle.models.lenet import lenet
from baffle.plan import LeNet, Softmax, load, parse
from baffle.runtime.torch.loss import weights_of


def test_the_papers_form_has_26730_weights() -> None:
    assert len(weights_of(lenet((1, 32, 32), 10))) == 26_730
    assert len(weights_of(build(load("paper-mnist-lenet").task.model, Inputs((1, 32, 32), 10)))) == 26_730


def test_the_papers_form_for_cifar100_has_32_and_128_channels() -> None:
    plan = parse('[task.model]\nname = "lenet"\nchannels = [32, 128]')
    module = build(plan.task.model, Inputs((3, 32, 32), 100))
    assert len(weights_of(module)) == 117_860
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_the_demos_form_has_5994_weights() -> None:
    assert len(weights_of(build(load("digits").task.model, Inputs((1, 8, 8), 10)))) == 5_994


def test_softmax_regression_is_one_linear_layer() -> None:
    model = build(Softmax(), Inputs((1, 8, 8), 10))
    assert len(weights_of(model)) == 650
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


@pytest.mark.parametrize("head", ["average", "flatten"])
@pytest.mark.parametrize("norm", ["none", "group", "batch"])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_option_runs_and_learns_from_every_weight(activation: str, norm: str, head: str) -> None:
    model = LeNet(channels=(4, 6), activation=activation, norm=norm, head=head)  # type: ignore[arg-type]
    torch.manual_seed(0)
    module = build(model, Inputs((3, 12, 12), 7))
    output = module(torch.randn(5, 3, 12, 12))
    assert output.shape == (5, 7)
    (output**2).sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
def test_normalisation_adds_no_weights_and_keeps_no_buffers(norm: str) -> None:
    module = lenet((1, 32, 32), 10, norm=norm)
    assert len(weights_of(module)) == 26_730
    assert not list(module.buffers())


@pytest.mark.parametrize("channels", [1, 2, 6, 16, 64])
def test_group_normalisation_fits_any_number_of_channels(channels: int) -> None:
    x = torch.randn(3, channels, 5, 5, generator=torch.Generator().manual_seed(0)) * 4 + 7
    y = normalisation("group", channels)(x)
    np.testing.assert_allclose(y.mean((1, 2, 3)), np.zeros(3), atol=1e-5)
    np.testing.assert_allclose(y.var((1, 2, 3), correction=0), np.ones(3), rtol=1e-3)


def test_the_activation_is_the_one_named_in_the_settings() -> None:
    kinds = {nn.Hardswish, nn.ReLU, nn.ReLU6, nn.SELU, nn.GELU}
    for name, kind in ACTIVATIONS.items():
        assert {type(layer) for layer in lenet((1, 8, 8), 10, activation=name)} & kinds == {kind}


def test_the_average_head_ignores_positions() -> None:
    torch.manual_seed(0)
    module = lenet((1, 32, 32), 10).eval()
    image = torch.zeros(1, 1, 32, 32)
    image[..., 10:14, 10:14] = torch.randn(4, 4)
    moved = torch.roll(image, (4, 6), (2, 3))
    torch.testing.assert_close(module(image), module(moved), rtol=1e-4, atol=1e-5)
    flat = lenet((1, 32, 32), 10, head="flatten").eval()
    assert not torch.allclose(flat(image), flat(moved), rtol=1e-4, atol=1e-5)
