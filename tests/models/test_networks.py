"""Softmax regression, LeNet and WRN: their sizes in the paper and the demo, their options, and the registry."""

from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.data.sources import SOURCES, least_weights, load as load_data
from baffle.errors import PlanError
from baffle.models.build import BUILDERS, build
from baffle.models.inputs import Inputs
from baffle.models.networks import ACTIVATIONS, lenet, normalisation, wrn
from baffle.plan import WRN, LeNet, MobileNet, Model, Onnx, Softmax, load, parse
from baffle.runtime.torch.loss import weights_of


def test_every_model_of_a_plan_except_onnx_has_a_builder() -> None:
    assert set(BUILDERS) == set(get_args(Model)) - {Onnx}
    with pytest.raises(PlanError, match=r"task\.model: expected one of LeNet, .*got Onnx, which has no builder"):
        build(Onnx(), Inputs((1, 8, 8), 10))


def test_a_models_initial_weights_come_from_torchs_generator() -> None:
    def first_weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return next(build(LeNet(), Inputs((1, 8, 8), 10)).parameters()).detach()

    assert torch.equal(first_weights(1), first_weights(1))
    assert not torch.equal(first_weights(1), first_weights(2))


@pytest.mark.parametrize(
    ("model", "shape", "classes", "weights"),
    [
        (load("paper-mnist-lenet").task.model, (1, 32, 32), 10, 26_730),
        (parse('[task.model]\nname = "lenet"\nchannels = [32, 128]').task.model, (3, 32, 32), 100, 117_860),
        (load("digits").task.model, (1, 8, 8), 10, 5_994),
        (Softmax(), (1, 8, 8), 10, 650),
        (parse('[task.model]\nname = "wrn"').task.model, (3, 32, 32), 10, 302_794),
    ],
    ids=["the paper's LeNet", "for CIFAR-100", "the demo's", "softmax", "the paper's WRN"],
)
def test_sizes(model: Model, shape: tuple[int, ...], classes: int, weights: int) -> None:
    module = build(model, Inputs(shape, classes))
    assert len(weights_of(module)) == weights == model.n_weights(shape, classes)
    assert module(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 13, 6)])
@pytest.mark.parametrize(
    "model",
    [Softmax(), WRN(widen=3), LeNet(channels=(3, 5)), LeNet(channels=(3, 5), head="flatten")],
    ids=["softmax", "wrn", "average", "flatten"],
)
def test_a_models_settings_say_how_many_weights_it_has(model: Model, shape: tuple[int, ...]) -> None:
    """Clients bound the number before anything is built."""
    assert model.n_weights(shape, 7) == len(weights_of(build(model, Inputs(shape, 7))))


def test_the_weights_of_mobilenet_count_whether_they_are_trained_or_not() -> None:
    everything = MobileNet(weights="random", trained="all")
    assert everything.n_weights((3, 32, 32), 7) == len(weights_of(build(everything, Inputs((3, 32, 32), 7))))
    assert MobileNet().n_weights((3, 32, 32), 7) == everything.n_weights((3, 32, 32), 7)


def test_what_a_plans_text_says_about_weights_needs_no_data() -> None:
    for data in SOURCES:
        task, source = parse(f'task.data = "{data}"').task, load_data(data)
        assert least_weights(task) == len(weights_of(build(task.model, Inputs(source.shape, source.classes))))
    assert least_weights(parse('task = {data = "pacs", pixels = 256}').task) > least_weights(
        parse('task.data = "pacs"').task
    )
    own = parse('task = {data = "no.such:data", model = {name = "wrn", widen = 100}}').task
    assert 7e8 < least_weights(own) < 7.5e8
    assert least_weights(parse('task.model = {name = "onnx"}').task) == 0


@pytest.mark.parametrize("kind", [LeNet, WRN])
@pytest.mark.parametrize("norm", ["none", "group", "batch"])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_option_runs_and_learns_from_every_weight(kind: Any, activation: str, norm: str) -> None:
    """Normalisations add no weights and keep no buffers."""
    torch.manual_seed(0)
    options = {"widen": 1} if kind is WRN else {"channels": (4, 6), "head": "flatten" if norm == "none" else "average"}
    module = build(kind(activation=activation, norm=norm, **options), Inputs((3, 12, 12), 7))
    output = module(torch.randn(5, 3, 12, 12))
    assert output.shape == (5, 7)
    (output**2).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert not list(module.buffers())
    assert len(weights_of(module)) == len(weights_of(build(kind(norm="none", **options), Inputs((3, 12, 12), 7))))
    kinds = {type(layer) for layer in module.modules()} & set(ACTIVATIONS.values())
    assert kinds == {ACTIVATIONS[activation]}


@pytest.mark.parametrize("channels", [1, 6, 16])
def test_group_normalisation_fits_any_number_of_channels(channels: int) -> None:
    x = torch.randn(3, channels, 5, 5, generator=torch.Generator().manual_seed(0)) * 4 + 7
    y = normalisation("group", channels)(x)
    np.testing.assert_allclose(y.mean((1, 2, 3)), np.zeros(3), atol=1e-5)
    np.testing.assert_allclose(y.var((1, 2, 3), correction=0), np.ones(3), rtol=1e-3)


def test_the_average_head_ignores_positions() -> None:
    torch.manual_seed(0)
    average, flat = (lenet((1, 32, 32), 10, head=head).eval() for head in ("average", "flatten"))
    image = torch.zeros(1, 1, 32, 32)
    image[..., 10:14, 10:14] = torch.randn(4, 4)
    moved = torch.roll(image, (4, 6), (2, 3))
    torch.testing.assert_close(average(image), average(moved), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(flat(image), flat(moved), rtol=1e-4, atol=1e-5)


def test_the_output_of_a_wrn_is_that_of_the_network_written_out() -> None:
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
    biases = [layer.bias is not None for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    assert biases == [True] + [False] * 9
