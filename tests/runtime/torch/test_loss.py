"""PyTorch as a runtime: the losses and gradients are those of the module alone, and only the weights change."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.core.arrays import F32
from baffle.core.directions import GAUSSIAN, Directions, Support
from baffle.core.ports import Batch
from baffle.models.networks import lenet
from baffle.plan import Plan
from baffle.runtime.torch.loss import TorchLoss, accuracy, advice_on_modes, weights_of
from baffle.runtime.torch.stages import pipeline_of
from baffle.runtime.torch.structured import Structured
from baffle.simulation import simulate
from baffle.task.load import load_server_task
from tests.support import tokens
from tests.support.modules import Made


def _batch(n: int = 20, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    return Batch(random.standard_normal((n, 1, 8, 8)).astype(np.float32), random.integers(0, 10, n))


def _module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return lenet((1, 8, 8), 10, (3, 4), "flatten")


def _other_weights(module: nn.Module) -> F32:
    weights = weights_of(module)
    return (weights + np.random.default_rng(1).standard_normal(len(weights)) * 0.1).astype(np.float32)


def _plain_loss(weights: F32, batch: Batch, module: nn.Module) -> Tensor:
    """The loss of a module after setting its weights by hand."""
    nn.utils.vector_to_parameters(torch.from_numpy(weights.copy()), module.parameters())
    return F.cross_entropy(module(torch.from_numpy(batch.x)), torch.from_numpy(batch.y))


def test_the_loss_is_that_of_the_plain_module_whatever_came_before() -> None:
    runtime, batch, other = TorchLoss(_module()), _batch(), _batch(seed=3)
    weights, moved = weights_of(_module()), _other_weights(_module())
    loss = runtime.on(batch)
    for point in (weights, moved, weights_of(_module(seed=5)), weights):
        assert loss(point) == pytest.approx(float(_plain_loss(point, batch, _module()).detach()), rel=1e-6)
        assert runtime.on(other)(moved) != loss(weights)
        runtime.gradient_on(other)(moved)


def test_parameters_are_views_into_one_buffer_and_the_callers_weights_are_left_alone() -> None:
    module = _module()
    before = weights_of(module)
    runtime = TorchLoss(module)
    parameters = list(module.parameters())
    pointers = [p.data_ptr() for p in parameters]
    assert np.diff(pointers).tolist() == [4 * p.numel() for p in parameters[:-1]]
    np.testing.assert_array_equal(weights_of(module), before)
    given = _other_weights(module)
    weights = given.copy()
    runtime.gradient_on(_batch())(weights)
    runtime.outputs(weights, _batch())
    runtime.on(_batch())(weights)
    assert [p.data_ptr() for p in parameters] == pointers
    np.testing.assert_array_equal(weights, given)
    weights[:] = 0
    np.testing.assert_array_equal(weights_of(module), given)


def mixed() -> nn.Module:
    """A trained layer after a frozen one, followed by running statistics and dropout."""
    frozen, norm, drop = nn.Linear(64, 12).requires_grad_(False), nn.BatchNorm1d(10), nn.Dropout(0.5)
    module = Made(
        lambda net, x: net.drop(net.norm(net.trained(net.frozen(x.flatten(1))))) * net.scale,
        **{"frozen": frozen, "trained": nn.Linear(12, 10), "norm": norm, "drop": drop},
    )
    module.register_buffer("scale", torch.tensor(2.0))
    return module


def test_frozen_parameters_and_buffers_are_not_touched() -> None:
    module = mixed()
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
    module = mixed().train()
    loss, weights = TorchLoss(module).on(_batch()), weights_of(module)
    assert not module.training
    with torch.inference_mode():
        expected = F.cross_entropy(module(torch.from_numpy(_batch().x)), torch.from_numpy(_batch().y))
    assert loss(weights) == loss(weights) == pytest.approx(float(expected), rel=1e-6)


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


@pytest.mark.parametrize("micro_batch", [0, 6])
def test_the_gradient_is_that_of_autograd(micro_batch: int) -> None:
    batch, weights = _batch(), _other_weights(_module())
    module = _module()
    expected = _plain_loss(weights, batch, module)
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


@pytest.mark.parametrize(("rows", "separate"), [(1, False), (2, True), (3, True), (9, True)])
def test_integer_samples_show_whether_a_stage_keeps_samples_apart(rows: int, separate: bool) -> None:
    """A single sample cannot show it, so then no stage counts as separate."""
    centred = Made(lambda _, x: x - x.mean(0))
    ids = torch.arange(rows * tokens.LENGTH).view(rows, tokens.LENGTH)
    pipeline = pipeline_of(nn.Sequential(nn.Embedding(50, 8), centred, nn.Flatten(), nn.Linear(40, 3)), ids)
    assert pipeline is not None
    assert [stage.separate for stage in pipeline.stages] == [separate, False, separate, separate]


def dropping() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Dropout(0.5), nn.Linear(20, 10))


def normalising() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 10))


def test_probes_drop_nothing_and_backpropagation_as_its_seed_determines() -> None:
    module = dropping()
    plain = TorchLoss(nn.Sequential(*(layer for layer in dropping() if not isinstance(layer, nn.Dropout))))
    runtime, weights = TorchLoss(module), weights_of(module)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert {runtime.on(_batch())(weights) for _ in range(5)} == {plain.on(_batch())(weights)}
    gradients = [runtime.gradient_on(_batch(), seed)(weights)[1].tobytes() for seed in (1, 1, 2)]
    assert gradients[0] == gradients[1] != gradients[2]
    assert gradients[0] != plain.gradient_on(_batch(), 1)(weights)[1].tobytes()
    assert not module.training
    assert torch.equal(torch.rand(3), expected), "torch's generator is as it was"


def test_running_statistics_stay_as_they_were() -> None:
    module = normalising()
    runtime, weights = TorchLoss(module), weights_of(module)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    loss = runtime.on(_batch())(weights)
    trained, _ = runtime.gradient_on(_batch())(weights)
    assert trained == pytest.approx(loss, rel=1e-6)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_people_are_told_of_dropout_and_of_running_statistics() -> None:
    (dropout,) = advice_on_modes(dropping())
    assert "dropout in layer 2 is off" in dropout
    assert advice_on_modes(dropping(), backpropagates=True) == []
    (statistics,) = advice_on_modes(normalising())
    assert "layer 1 uses its initial running statistics" in statistics
    assert advice_on_modes(nn.Sequential(nn.Dropout(0.0), nn.BatchNorm2d(2, track_running_stats=False))) == []


def both() -> nn.Module:
    return nn.Sequential(dropping(), nn.BatchNorm1d(10))


def test_the_baseline_of_a_model_with_dropout_repeats_itself_and_a_run_gives_advice(
    tiny: Callable[..., Plan], tmp_path: Path
) -> None:
    plan, advice = tiny("estimator=backprop", f'task.model={{name="custom", factory="{__name__}:both"}}'), list[str]()
    summaries = [simulate(plan, tmp_path / name, warn=advice.append) for name in ("one", "two")]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert any("initial running statistics" in line for line in advice), advice


def test_the_initial_weights_are_the_same_in_every_thread(tiny: Callable[..., Plan]) -> None:
    """Clients of one process make them at the same time, and PyTorch's generator is shared by all threads."""
    task = load_server_task(tiny('task.model={name="lenet", channels=[8,16]}'), None, 10)
    expected = task.initial_weights().tobytes()
    with ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda _: task.initial_weights().tobytes(), range(64))
        assert set(made) == {expected}
