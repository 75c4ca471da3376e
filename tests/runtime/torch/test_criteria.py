"""Losses on PyTorch: they have the right derivatives, and functions of the user's own may be anything."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.core.samples import PADDING
from baffle.errors import OwnFunctionError, PlanError
from baffle.plan import Plan, change
from baffle.plan.tasks import LOSSES
from baffle.runtime.torch.loss import TorchLoss, criterion_named, criterion_of, cross_entropy, own_criterion, weights_of
from tests.support import own_tasks
from tests.support.modules import Made


def batch_of(name: str, seed: int) -> Batch:
    random = np.random.default_rng(seed)
    x = random.normal(size=(6, 4)).astype(np.float32)
    if name == "cross_entropy":
        return Batch(x, random.integers(0, 3, 6))
    return Batch(x, random.random((6, 3)).astype(np.float32))


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), micro_batch=st.integers(0, 4))
def test_its_gradient_is_the_slope_of_its_values(name: str, seed: int, micro_batch: int) -> None:
    torch.manual_seed(seed)
    module, batch = nn.Linear(4, 3), batch_of(name, seed)
    if name == "mae":  # has no slope where an output meets its target, so they stay apart
        away = np.copysign(1 + batch.y, batch.y - 0.5)
        batch = Batch(batch.x, module(torch.from_numpy(batch.x)).detach().numpy() + away)
    weights = weights_of(module)
    runtime = TorchLoss(module, criterion_named(name), micro_batch=micro_batch, dtype=torch.float64)
    loss, gradient = runtime.gradient_on(batch)(weights)
    at = runtime.on(batch)
    assert at(weights) == pytest.approx(loss, rel=1e-9)
    step: F32 = np.random.default_rng(seed).normal(size=len(weights)).astype(np.float32) * np.float32(1e-3)
    slope = (at(weights + step) - at(weights - step)) / 2
    assert slope == pytest.approx(float(gradient @ step), rel=2e-2, abs=2e-5)


def test_a_sample_of_padding_alone_has_no_loss() -> None:
    losses = cross_entropy(torch.randn(2, 3, 5), torch.tensor([[1, 2, PADDING], [PADDING] * 3]))
    assert losses.shape == (2,)
    assert losses[0] > 0
    assert losses[1] == 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda output, _: output.sum(1), 3.0),
        (lambda output, _: output.sum(1).mean(), 3.0),
        (lambda output, _: output.sum(1).numpy(), 3.0),
        (lambda _output, _labels: 2, 2.0),
        (lambda output, _: [1.5] * len(output), 1.5),
    ],
    ids=["one each", "their mean", "NumPy", "a number", "a list"],
)
def test_what_a_function_may_return(value: Any, expected: float) -> None:
    runtime = TorchLoss(nn.Flatten(), own_criterion("mine", value), micro_batch=2)
    assert runtime.on(Batch(np.ones((5, 3), np.float32), np.zeros(5, np.int64)))(np.empty(0, np.float32)) == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            lambda output, _: output,
            r"^task\.loss: mine must return one loss per sample, or their mean, got shape \(2, 3\)",
        ),
        (lambda _output, _labels: "low", r"^task\.loss: mine must return one loss per sample, or their mean, got str$"),
        (lambda _output, _labels: None, r", got NoneType$"),
    ],
)
def test_what_a_function_may_not_return(value: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        own_criterion("mine", value)(torch.ones(2, 3), torch.zeros(2))


def test_a_fault_in_a_function_is_its_own() -> None:
    criterion = criterion_of(change(Plan(), [f'task.loss="{own_tasks.HERE}:broken"']))
    with pytest.raises(OwnFunctionError, match=r"own_tasks:broken raised ZeroDivisionError: no luck \(.*own_tasks\.py"):
        criterion(torch.ones(1, 1), torch.ones(1))


def of_three(net: Any, ids: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)
    return torch.as_tensor(net.scale * (ids * mask + numbers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_several_inputs_reach_a_module_by_position_or_name_in_their_types(form: str, dtype: torch.dtype) -> None:
    named = {
        "ids": np.full((5, 2), 801),
        "mask": np.ones((5, 2), bool),
        "numbers": np.full((5, 2), 0.5)[::-1],  # PyTorch itself takes no negative strides
    }
    x: Any = named if form == "dict" else tuple(named.values())
    runtime = TorchLoss(Made(of_three, scale=torch.ones(1)), criterion_named("mae"), micro_batch=2, dtype=dtype)
    outputs = runtime.outputs(np.ones(1, np.float32), Batch(x, np.zeros((5, 2), np.float32)))
    assert outputs.shape == (5, 2)
    np.testing.assert_allclose(outputs, 801.5, rtol=4e-3 if dtype == torch.bfloat16 else 1e-7)
