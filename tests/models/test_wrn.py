"""The wide residual network: its size in the paper's form, its structure and its options."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.models.build import build
from baffle.models.inputs import Inputs
from baffle.models.layers import ACTIVATIONS
from baffle.models.wrn import wrn
from baffle.plan import WRN, parse
from baffle.runtime.torch.loss import weights_of


def test_the_papers_form_has_302794_weights() -> None:
    assert len(weights_of(wrn((3, 32, 32), 10))) == 302_794
    plan = parse('[task.model]\nname = "wrn"')
    assert len(weights_of(build(plan.task.model, Inputs((3, 32, 32), 10)))) == 302_794


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_option_runs_and_learns_from_every_weight(activation: str, norm: str) -> None:
    torch.manual_seed(0)
    module = build(WRN(widen=1, activation=activation, norm=norm), Inputs((1, 12, 12), 7))  # type: ignore[arg-type]
    output = module(torch.randn(5, 1, 12, 12))
    assert output.shape == (5, 7)
    (output**2).sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
    assert not list(module.buffers())


def test_the_output_is_that_of_the_network_written_out() -> None:
    torch.manual_seed(0)
    module = wrn((3, 16, 16), 10, widen=1, activation="relu").eval()
    weights = iter(module.parameters())

    def ready(x: Tensor) -> Tensor:
        return F.relu(F.group_norm(x, 8))

    inputs = torch.randn(4, 3, 16, 16)
    x = F.conv2d(inputs, next(weights), next(weights), padding=1)
    for stride in (1, 2, 2):
        x = ready(x)
        first = F.conv2d(x, next(weights), stride=stride, padding=1)
        x = F.conv2d(ready(first), next(weights), padding=1) + F.conv2d(x, next(weights), stride=stride)
    expected = F.linear(ready(x).mean((2, 3)), next(weights), next(weights))
    assert next(weights, None) is None
    torch.testing.assert_close(module(inputs), expected)


def test_only_the_first_convolution_has_a_bias() -> None:
    biases = [layer.bias is not None for layer in wrn((3, 32, 32), 10).modules() if isinstance(layer, nn.Conv2d)]
    assert biases == [True] + [False] * 9
