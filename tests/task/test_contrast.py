"""How unlike the layers' gradients are: measured by forward passes, compared with backpropagation."""

from collections.abc import Callable

import pytest
from exact_contrast import exact_contrast
from torch import nn

from baffle.plan import Plan
from baffle.task.contrast import judge_contrast, measure_contrast
from baffle.task.costs import costs
from baffle.task.load import Task, load_task

MakePlan = Callable[..., Plan]
OWN = 'task.model={{name="custom", factory="{}:{}"}}'


def deep() -> nn.Module:
    """Eight layers without normalisation: gradients fade towards the first."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 24), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Linear(24, 24), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(24, 10))


def alike() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 10))


def begins_at_zero() -> nn.Module:
    """A last layer of zeros, behind which nothing has a gradient yet."""
    module = deep()
    nn.init.zeros_(module.get_submodule("15").weight)  # type: ignore[arg-type]
    return module


def _task(tiny: MakePlan, factory: str, *settings: str) -> Task:
    return load_task(tiny(OWN.format(__name__, factory), *settings))


@pytest.mark.parametrize("factory", ["deep", "alike"])
@pytest.mark.parametrize("seed", [0, 1])
def test_probes_find_what_backpropagation_finds(tiny: MakePlan, factory: str, seed: int) -> None:
    task = _task(tiny, factory, f"seed={seed}", "probe.scheme=central")
    found, exact = measure_contrast(task), exact_contrast(task)
    assert found is not None
    assert found.layers == exact.layers
    assert exact.factor / 2 < found.factor < 2 * exact.factor
    assert exact.noise / 2 < found.noise < 2 * exact.noise


def test_dense_directions_are_advised_against_where_layers_are_unlike(tiny: MakePlan) -> None:
    found = costs(_task(tiny, "deep")).contrast
    assert found is not None
    assert found.noise > 5
    assert (
        f"the gradients of the model's layers differ by a factor of {found.factor:.2g}, and dense directions have "
        f'{found.noise:.2g} times the noise of directions that touch one layer each; set probe.supports = "layers"'
    ) in costs(_task(tiny, "deep")).advice
    assert not any("noise of directions" in advice for advice in costs(_task(tiny, "alike")).advice)
    followed = _task(tiny, "deep", "probe.supports=layers", "probe.k=8")
    assert judge_contrast(followed, found) == []


def test_layers_without_a_gradient_are_left_out(tiny: MakePlan) -> None:
    """All but the last have none at first, so there is nothing to compare."""
    assert measure_contrast(_task(tiny, "begins_at_zero")) is None


def test_a_single_layer_and_backpropagation_have_no_contrast(tiny: MakePlan) -> None:
    assert measure_contrast(load_task(tiny())) is None
    assert measure_contrast(_task(tiny, "deep", "estimator=backprop")) is None


def test_of_many_layers_some_are_probed(tiny: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baffle.task.contrast.MOST_LAYERS", 3)
    found = measure_contrast(_task(tiny, "deep"))
    assert found is not None
    assert found.layers == 8
