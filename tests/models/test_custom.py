"""Users' own models and data, which a plan names."""

from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.errors import BaffleError
from baffle.journal.audit import verify
from baffle.plan import Plan
from baffle.simulation import simulate

OWN = """
import numpy as np
from torch import nn

from baffle import Dataset, Source


def model():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def nothing_to_train():
    return nn.Flatten()


def data():
    random = np.random.default_rng(0)
    x = random.standard_normal((60, 5)).astype(np.float32)
    y = (x @ random.standard_normal((5, 3))).argmax(1)
    return Source(Dataset(x[:40], y[:40], lambda x: x), Dataset(x[40:], y[40:], lambda x: x), classes=3)
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


@pytest.mark.parametrize(
    "settings",
    [
        ['task.model={name="custom", factory="OWN:nothing_to_train"}'],
        ['task.data="OWN:data"', 'task.model={name="lenet"}'],
        ['task.model={name="custom", factory="OWN:model"}'],
    ],
    ids=["no weights", "data do not fit", "a model that does not fit"],
)
def test_a_model_that_cannot_be_trained_on_the_data_is_refused(
    tiny: Callable[..., Plan], own: str, tmp_path: Path, settings: list[str]
) -> None:
    with pytest.raises(BaffleError):
        simulate(tiny(*(setting.replace("OWN", own) for setting in settings)), tmp_path / "run")
