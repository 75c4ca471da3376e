"""The registry of models: its entries, and that one more entry is enough to run another model."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch
from torch import nn

from baffle.errors import PlanError
from baffle.models.build import BUILDERS, build
from baffle.models.inputs import Inputs
from baffle.plan import LeNet, Model, ModelSettings, Onnx, Plan, Section
from baffle.simulation import simulate


class Toy(ModelSettings, frozen=True, tag_field="name", tag="toy"):
    """One hidden layer."""

    width: int = 5


def build_toy(model: Toy, inputs: Inputs) -> nn.Module:
    size = int(torch.Size(inputs.one_shape()).numel())
    return nn.Sequential(nn.Flatten(), nn.Linear(size, model.width), nn.ReLU(), nn.Linear(model.width, inputs.classes))


def test_every_model_of_a_plan_except_onnx_has_a_builder() -> None:
    assert set(BUILDERS) == set(get_args(Model)) - {Onnx}


def test_a_model_without_a_builder_is_refused() -> None:
    with pytest.raises(PlanError, match=r"task\.model: expected one of LeNet, .*got Onnx, which has no builder"):
        build(Onnx(), Inputs((1, 8, 8), 10))


def test_a_new_model_runs_once_it_is_in_the_registry(
    tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny()
    plan = msgspec.structs.replace(plan, task=msgspec.structs.replace(plan.task, model=Toy(width=3)))
    with pytest.raises(PlanError, match="got Toy"):
        simulate(plan, tmp_path / "without")
    kind: type[Section] = Toy
    monkeypatch.setitem(BUILDERS, kind, build_toy)
    assert simulate(plan, tmp_path / "run")["n_weights"] == 65 * 3 + 4 * 10


def test_a_models_initial_weights_come_from_torchs_generator() -> None:
    def first_weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return next(build(LeNet(), Inputs((1, 8, 8), 10)).parameters()).detach()

    assert torch.equal(first_weights(1), first_weights(1))
    assert not torch.equal(first_weights(1), first_weights(2))
