"""Users' own models and data, which a plan names."""

from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.data.sources import Dataset, Source
from baffle.errors import BaffleError, DataError, PlanError
from baffle.journal.audit import verify
from baffle.models.build import build
from baffle.models.inputs import Inputs
from baffle.plan import Custom, Plan
from baffle.simulation import simulate
from baffle.task.load import load_task

OWN = """
import numpy as np
from torch import nn

from baffle import Dataset, Source


def model():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def no_model():
    return "a model"


def nothing_to_train():
    return nn.Flatten()


def data():
    random = np.random.default_rng(0)
    x = random.standard_normal((60, 5)).astype(np.float32)
    y = (x @ random.standard_normal((5, 3))).argmax(1)
    return Source(Dataset(x[:40], y[:40], lambda x: x), Dataset(x[40:], y[40:], lambda x: x), classes=3)


def no_data():
    return [1, 2, 3]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_task_of_a_user.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_task_of_a_user"


def test_a_run_on_a_users_own_model_and_data(tiny: Callable[..., Plan], own: str, tmp_path: Path) -> None:
    settings = [f'task.model={{name="custom", factory="{own}:model"}}', f'task.data="{own}:data"', "rounds=40"]
    summary = simulate(tiny(*settings, "update.rate=0.05", "probe.k=8"), tmp_path / "run")
    assert summary["n_weights"] == 39
    assert summary["test_accuracy"] > 0.5
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]


def test_initial_weights_of_a_users_model_follow_from_the_seed(tiny: Callable[..., Plan], own: str) -> None:
    settings = [f'task.model={{name="custom", factory="{own}:model"}}', f'task.data="{own}:data"']
    weights = [load_task(tiny(*settings, f"seed={seed}")).initial_weights() for seed in (1, 1, 2)]
    assert weights[0].tobytes() == weights[1].tobytes()
    assert weights[0].tobytes() != weights[2].tobytes()


def test_a_factory_must_return_a_module(own: str) -> None:
    with pytest.raises(PlanError, match=rf"task\.model\.factory: {own}:no_model must return an nn\.Module, got str"):
        build(Custom(factory=f"{own}:no_model"), Inputs((5,), 3))


def test_a_missing_factory_is_named(own: str) -> None:
    with pytest.raises(PlanError, match=f"{own}:missing cannot be imported"):
        build(Custom(factory=f"{own}:missing"), Inputs((5,), 3))


def test_data_must_be_a_source(tiny: Callable[..., Plan], own: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"task\.data: {own}:no_data must return a baffle\.Source, got list"):
        simulate(tiny(f'task.data="{own}:no_data"'), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_without_weights_is_refused(tiny: Callable[..., Plan], own: str, tmp_path: Path) -> None:
    with pytest.raises(BaffleError):
        simulate(tiny(f'task.model={{name="custom", factory="{own}:nothing_to_train"}}'), tmp_path / "run")


def test_a_model_that_does_not_fit_the_data_is_refused(tiny: Callable[..., Plan], own: str, tmp_path: Path) -> None:
    with pytest.raises(BaffleError):
        simulate(tiny(f'task.data="{own}:data"', 'task.model={name="lenet"}'), tmp_path / "run")
    with pytest.raises(BaffleError):
        simulate(tiny(f'task.model={{name="custom", factory="{own}:model"}}'), tmp_path / "run")


def test_the_names_that_users_need_are_public() -> None:
    import baffle

    assert (baffle.Dataset, baffle.Source) == (Dataset, Source)
