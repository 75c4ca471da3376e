"""BAFFLE's own models as graphs: the same names, weights and losses as the modules that PyTorch runs."""

from collections.abc import Iterator
from hashlib import sha256
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings, strategies as st

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.models.inputs import Inputs
from baffle.plan import WRN, LeNet, Model, ModelSettings, Plan, Softmax, TaskSettings
from baffle.runtime.onnx.built_in import BUILDERS, built_in
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import GraphLoss
from baffle.runtime.torch.loss import TorchLoss
from baffle.runtime.torch.model import initial_module

ACTIVATIONS = ("hardswish", "relu", "relu6", "selu", "gelu")
NORMS = ("none", "group", "batch")


def models() -> Iterator[tuple[Model, Inputs]]:
    for activation, norm in product(ACTIVATIONS, NORMS):
        variant: Any = {"activation": activation, "norm": norm}
        yield LeNet(channels=(4, 6), head="average", **variant), Inputs((3, 9, 11), 5)
        if activation == "hardswish":
            yield WRN(widen=1, **variant), Inputs((3, 17, 16), 7)
    yield LeNet(channels=(8, 16), head="flatten"), Inputs((1, 8, 8), 10)
    yield LeNet(channels=(1, 12), head="flatten"), Inputs((2, 2, 3), 4)
    yield Softmax(), Inputs((1, 8, 8), 10)
    yield Softmax(), Inputs((5,), 3)


def plan_of(model: Model, seed: int = 3) -> Plan:
    return Plan(seed=seed, task=TaskSettings(model=model, init="numpy"))


def batch_for(inputs: Inputs, count: int, seed: int = 0) -> Batch:
    numbers = np.random.default_rng(seed)
    samples = numbers.normal(size=(count, *inputs.shape)).astype(np.float32)
    return Batch(samples, numbers.integers(0, inputs.classes, count))


@pytest.mark.parametrize(("model", "inputs"), list(models()))
def test_both_runtimes_have_the_same_weights_and_losses(model: Model, inputs: Inputs) -> None:
    graph, module = built_in(model, inputs, seed=3), initial_module(plan_of(model), inputs)
    onnx.checker.check_model(graph.model, full_check=True)
    assert list(graph.weights) == [name for name, _ in module.named_parameters()]
    for drawn, parameter in zip(graph.weights.values(), module.parameters(), strict=True):
        np.testing.assert_array_equal(drawn, parameter.detach().numpy())
    data, weights = graph.model, graph.flat()
    ours = OnnxLoss(graph.manifest(weights), data, micro_batch=4)
    theirs = TorchLoss(module, micro_batch=4)
    moved: F32 = (weights + np.random.default_rng(1).normal(size=len(weights)) / 50).astype(np.float32)
    for count, point in ((4, weights), (7, weights), (4, moved), (7, moved)):
        batch = batch_for(inputs, count)
        assert ours.on(batch)(point) == pytest.approx(theirs.on(batch)(point), abs=1e-5)
        np.testing.assert_allclose(ours.outputs(point, batch), theirs.outputs(point, batch), atol=2e-5)


def test_every_model_that_claims_a_graph_has_one() -> None:
    kinds = [kind for kind in ModelSettings.__subclasses__() if kind.has_graph]
    assert {*kinds} == {*BUILDERS}


def test_graphs_have_the_bytes_that_version_0_2_wrote() -> None:
    """It wrote them with the `onnx` package, version 1.23."""
    losses: tuple[GraphLoss, ...] = ("cross-entropy", "mse", "mae", "bce", "none")
    graphs = [built_in(model, inputs, 3, loss).model for model, inputs in models() for loss in losses]
    assert sha256(b"".join(graphs)).hexdigest() == "763571139ca9f906b900e35a86270019cd263ff04ab6512bc70097899057f560"


def test_a_graph_is_the_same_each_time() -> None:
    inputs = Inputs((1, 8, 8), 10)
    assert built_in(LeNet(), inputs, 1).model == built_in(LeNet(), inputs, 2).model


@settings(max_examples=15, deadline=None)
@given(
    channels=st.tuples(st.integers(1, 9), st.integers(1, 12)),
    shape=st.tuples(st.integers(1, 3), st.integers(2, 12), st.integers(2, 12)),
    head=st.sampled_from(["average", "flatten"]),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_size_of_a_lenet(channels: tuple[int, int], shape: tuple[int, int, int], head: str, seed: int) -> None:
    model, inputs = LeNet(channels=channels, head=head, norm="group"), Inputs(shape, 4)  # type: ignore[arg-type]
    graph, module = built_in(model, inputs, seed), initial_module(plan_of(model, seed), inputs)
    data, weights, batch = graph.model, graph.flat(), batch_for(inputs, 3)
    flat = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
    np.testing.assert_array_equal(weights, flat)
    ours = OnnxLoss(graph.manifest(weights), data).on(batch)(weights)
    # A group of nearly equal numbers is multiplied by up to 1/√ε ≈ 300, and so is its rounding error.
    assert ours == pytest.approx(TorchLoss(module).on(batch)(weights), abs=3e-4)
