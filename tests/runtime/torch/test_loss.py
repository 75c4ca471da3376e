"""PyTorch as a runtime: the losses and gradients are those of the module alone, and only the weights change."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.core.arrays import F32
from baffle.core.directions import GAUSSIAN, Directions, Support
from baffle.core.ports import Batch
from baffle.models.lenet import lenet
from baffle.runtime.torch.loss import TorchLoss, accuracy, weights_of
from baffle.runtime.torch.stages import pipeline_of
from baffle.runtime.torch.structured import Structured
from tests.support import tokens


def _batch(n: int = 20, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    return Batch(random.standard_normal((n, 1, 8, 8)).astype(np.float32), random.integers(0, 10, n))


def _module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return lenet((1, 8, 8), 10, (3, 4), "flatten")


def _other_weights(module: nn.Module) -> F32:
    weights = weights_of(module)
    return (weights + np.random.default_rng(1).standard_normal(len(weights)) * 0.1).astype(np.float32)


def _plain_loss(weights: F32, batch: Batch) -> Tensor:
    """The loss of the same network after setting its weights by hand."""
    module = _module()
    start = 0
    for parameter in module.parameters():
        parameter.data = torch.from_numpy(weights[start : start + parameter.numel()].copy()).view_as(parameter)
        start += parameter.numel()
    return F.cross_entropy(module(torch.from_numpy(batch.x)), torch.from_numpy(batch.y))


def test_weights_are_one_vector_in_the_order_of_parameters() -> None:
    module = _module()
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()
    weights = weights_of(module)
    np.testing.assert_array_equal(weights, expected)
    weights[:] = 0
    assert any(p.abs().sum() > 0 for p in module.parameters())


def test_the_loss_is_that_of_the_plain_module() -> None:
    batch = _batch()
    runtime = TorchLoss(_module())
    loss = runtime.on(batch)
    for weights in (weights_of(_module()), _other_weights(_module()), weights_of(_module(seed=5))):
        assert loss(weights) == pytest.approx(float(_plain_loss(weights, batch).detach()), rel=1e-6)


def test_a_loss_does_not_depend_on_earlier_weights_and_batches() -> None:
    runtime, batch, other = TorchLoss(_module()), _batch(), _batch(seed=3)
    weights, moved = weights_of(_module()), _other_weights(_module())
    first = runtime.on(batch)
    expected = first(weights)
    second = runtime.on(other)
    assert second(moved) != expected
    runtime.gradient_on(other)(moved)
    assert first(weights) == expected


def test_parameters_are_views_into_one_buffer() -> None:
    module = _module()
    before = weights_of(module)
    runtime = TorchLoss(module)
    parameters = list(module.parameters())
    pointers = [p.data_ptr() for p in parameters]
    assert np.diff(pointers).tolist() == [4 * p.numel() for p in parameters[:-1]]
    np.testing.assert_array_equal(weights_of(module), before)
    weights = _other_weights(module)
    runtime.on(_batch())(weights)
    assert [p.data_ptr() for p in parameters] == pointers
    np.testing.assert_array_equal(weights_of(module), weights)


def test_the_callers_weights_are_left_alone() -> None:
    module = _module()
    runtime, weights = TorchLoss(module), _other_weights(module)
    before = weights.copy()
    runtime.on(_batch())(weights)
    runtime.gradient_on(_batch())(weights)
    runtime.outputs(weights, _batch())
    np.testing.assert_array_equal(weights, before)
    weights[:] = 0
    assert weights_of(module).any()


class Mixed(nn.Module):
    """A trained layer after a frozen one, followed by running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 12)
        self.frozen.requires_grad_(False)
        self.trained = nn.Linear(12, 10)
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        assert isinstance(scale, Tensor)
        output: Tensor = self.drop(self.norm(self.trained(self.frozen(x.flatten(1))))) * scale
        return output


def test_frozen_parameters_and_buffers_are_not_touched() -> None:
    module = Mixed()
    frozen = {
        name: value.clone()
        for name, value in module.state_dict().items()
        if name not in ("trained.weight", "trained.bias", "norm.weight", "norm.bias")
    }
    runtime = TorchLoss(module)
    assert runtime.n_weights == 12 * 10 + 10 + 20
    weights = np.random.default_rng(0).standard_normal(runtime.n_weights).astype(np.float32)
    runtime.on(_batch())(weights)
    _, gradient = runtime.gradient_on(_batch())(weights)
    runtime.outputs(weights, _batch())
    assert len(gradient) == runtime.n_weights
    for name, value in frozen.items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=0)


def test_modules_run_in_evaluation_mode() -> None:
    module = Mixed().train()
    weights = weights_of(module)
    runtime = TorchLoss(module)
    assert not module.training
    loss = runtime.on(_batch())
    assert loss(weights) == loss(weights)
    with torch.inference_mode():
        expected = F.cross_entropy(module.eval()(torch.from_numpy(_batch().x)), torch.from_numpy(_batch().y))
    assert loss(weights) == pytest.approx(float(expected), rel=1e-6)


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(0, 45))
def test_the_size_of_micro_batches_changes_the_loss_by_rounding_alone(n: int, micro_batch: int) -> None:
    batch, weights = _batch(n), _other_weights(_module())
    whole = TorchLoss(_module()).on(batch)(weights)
    micro_batches = TorchLoss(_module(), micro_batch=micro_batch)
    assert micro_batches.on(batch)(weights) == pytest.approx(whole, rel=1e-6)
    loss, _ = micro_batches.gradient_on(batch)(weights)
    assert loss == pytest.approx(whole, rel=1e-6)
    np.testing.assert_allclose(
        micro_batches.outputs(weights, batch), TorchLoss(_module()).outputs(weights, batch), atol=1e-5
    )


@pytest.mark.parametrize("micro_batch", [0, 1, 7, 20])
def test_a_mean_criterion_and_one_per_sample_agree(micro_batch: int) -> None:
    batch, weights = _batch(), _other_weights(_module())

    def mean(output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output, labels)

    of_mean = TorchLoss(_module(), mean, micro_batch=micro_batch)
    of_each = TorchLoss(_module(), micro_batch=micro_batch)
    assert of_mean.on(batch)(weights) == pytest.approx(of_each.on(batch)(weights), rel=1e-6)
    np.testing.assert_allclose(
        of_mean.gradient_on(batch)(weights)[1], of_each.gradient_on(batch)(weights)[1], atol=1e-6
    )


def test_any_criterion_can_be_given() -> None:
    batch, weights = _batch(), weights_of(_module())
    runtime = TorchLoss(_module(), lambda output, labels: (output.argmax(1) != labels).double())
    assert runtime.on(batch)(weights) == pytest.approx(1 - accuracy(runtime, weights, batch))


@pytest.mark.parametrize("micro_batch", [0, 1, 6])
def test_the_gradient_is_that_of_autograd(micro_batch: int) -> None:
    batch, weights = _batch(), _other_weights(_module())
    module = _module()
    start = 0
    for parameter in module.parameters():
        parameter.data = torch.from_numpy(weights[start : start + parameter.numel()].copy()).view_as(parameter)
        start += parameter.numel()
    expected = F.cross_entropy(module(torch.from_numpy(batch.x)), torch.from_numpy(batch.y))
    parts = torch.autograd.grad(expected, list(module.parameters()))
    loss, gradient = TorchLoss(_module(), micro_batch=micro_batch).gradient_on(batch)(weights)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert gradient.dtype == np.float32
    np.testing.assert_allclose(gradient, torch.cat([part.reshape(-1) for part in parts]).numpy(), atol=1e-6)


def test_float64_resolves_what_float32_cannot() -> None:
    batch, weights = _batch(), weights_of(_module())
    moved = weights.astype(np.float64)
    moved[0] += 1e-10
    exact = TorchLoss(_module(), dtype=torch.float64)
    loss = exact.on(batch)
    difference = loss(moved) - loss(weights.astype(np.float64))  # type: ignore[arg-type]
    slope = exact.gradient_on(batch)(weights)[1][0]
    assert difference / 1e-10 == pytest.approx(slope, rel=1e-3)
    assert loss(weights) == pytest.approx(TorchLoss(_module()).on(batch)(weights), rel=1e-6)


def test_losses_are_summed_in_float64() -> None:
    def criterion(output: Tensor, labels: Tensor) -> Tensor:
        return torch.where(labels == 0, 1e8, 1.0).to(output.dtype)

    batch = Batch(_batch(101).x, np.arange(101))
    for micro_batch in (0, 1):
        loss = TorchLoss(_module(), criterion, micro_batch=micro_batch).on(batch)(weights_of(_module()))
        assert loss == (1e8 + 100) / 101


def test_accuracy_counts_right_answers() -> None:
    batch = _batch(40)
    runtime, weights = TorchLoss(_module(), micro_batch=16), weights_of(_module())
    answers = runtime.outputs(weights, batch).argmax(1)
    labels = answers.copy()
    labels[:10] = (labels[:10] + 1) % 10
    assert accuracy(runtime, weights, Batch(batch.x, labels)) == 0.75


def test_backpropagation_causes_no_warning() -> None:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        TorchLoss(_module()).gradient_on(_batch())(weights_of(_module()))
    finally:
        torch.set_warn_always(before)


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_in_half_precision_a_step_below_half_a_unit_of_the_weight_vanishes(dtype: torch.dtype, ulp: float) -> None:
    """The next number above 1 is 1 + 2 · `ulp`. The loss itself is computed in float32."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    loss = TorchLoss(module, dtype=dtype).on(_batch())
    weights = np.ones(640, np.float32)
    small, large = weights.copy(), weights.copy()
    small[:64] += np.float32(0.9 * ulp)
    large[:64] += np.float32(1.1 * ulp)
    assert loss(small) == loss(weights) != loss(large)
    assert loss(weights) == pytest.approx(np.log(10), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [np.int64, np.int32])
def test_token_ids_are_not_rounded(dtype: torch.dtype, stored: type) -> None:
    tokens.seen.clear()
    module = tokens.model()
    weights = weights_of(module)
    runtime = TorchLoss(module, dtype=dtype)
    kinds = set[torch.dtype]()
    module[0].register_forward_pre_hook(lambda _, x: kinds.add(x[0].dtype))  # type: ignore[index]
    batch = Batch(np.array([tokens.ROUNDED], stored), np.zeros(1, np.int64))
    runtime.on(batch)(weights)
    runtime.gradient_on(batch)(weights)
    runtime.outputs(weights, batch)
    assert tokens.seen == set(tokens.ROUNDED)
    assert kinds == {torch.from_numpy(batch.x).dtype}


def test_a_pipeline_is_tried_on_ids_that_its_embedding_knows() -> None:
    """Random numbers are not indices. The losses along a direction are those of whole forward passes."""
    torch.manual_seed(0)
    module = tokens.model()
    weights = weights_of(module)
    batch = Batch(tokens.tokens(6), np.arange(6) % tokens.CLASSES)
    structured = TorchLoss(module, structured=True).on(batch)
    assert isinstance(structured, Structured)
    directions, head = Directions(bytes(32), GAUSSIAN), Support(8000, len(weights))
    moved = weights.copy()
    moved[8000:] += np.float32(0.1 * GAUSSIAN.unit) * directions.draw([0], 0, head.size)[0]
    (along,) = structured.along(weights, directions, [head], 0.1)
    assert along == pytest.approx(TorchLoss(tokens.model()).on(batch)(moved), abs=1e-6)
    assert along != pytest.approx(structured(weights), abs=1e-4)


class Centred(nn.Module):
    """Subtracts the mean over the batch from each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(("rows", "separate"), [(1, False), (2, True), (3, True), (9, True)])
def test_integer_samples_show_whether_a_stage_keeps_samples_apart(rows: int, separate: bool) -> None:
    """A single sample cannot show it, so then no stage counts as separate."""
    ids = torch.arange(rows * tokens.LENGTH).view(rows, tokens.LENGTH)
    pipeline = pipeline_of(nn.Sequential(nn.Embedding(50, 8), Centred(), nn.Flatten(), nn.Linear(40, 3)), ids)
    assert pipeline is not None
    assert [stage.separate for stage in pipeline.stages] == [separate, False, separate, separate]
