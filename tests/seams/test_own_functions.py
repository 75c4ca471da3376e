"""A user's own model and data in the current folder, through the command line."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

import baffle
from baffle.errors import PlanError
from baffle.plan.functions import call_own

Cli = Callable[..., subprocess.CompletedProcess[str]]

OWN = """
from pathlib import Path

import numpy as np
import sklearn
from torch import nn

import beside
from baffle import Dataset, Source


def model(classes, *, shape, width=4, **rest):
    assert (shape, classes, width, rest) == ((5,), 3, 4, {})
    return nn.Sequential(nn.Linear(*shape, width), nn.Tanh(), nn.Linear(width, classes))


def data(data):
    assert isinstance(data, Path)
    x = np.load(data / "x.npy")
    y = np.arange(len(x)) % beside.CLASSES
    return Source(Dataset(x[:40], y[:40], lambda x: x), Dataset(x[40:], y[40:], lambda x: x), classes=beside.CLASSES)
"""

PLAN = """
name = "own"
rounds = 2
task.data = "mymodel:data"
task.model = {name = "custom", factory = "mymodel:model"}
federation.clients = 3
probe.k = 4
secure.mode = "off"
"""

FAULTS = """
no_function = 5

def broken():
    raise RuntimeError("no such luck\\nand more")

def silent():
    raise KeyError

def number():
    return 5

def folder(data):
    raise ValueError(repr(data))

def demanding(shape, width):
    pass

def data_model(data):
    pass
"""


def in_folder(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line as the installed script starts it: the current folder is not on Python's path."""
    environment = os.environ | {"PYTHONPATH": str(Path(baffle.__file__).parents[1])}
    command = [sys.executable, "-P", "-m", "baffle.cli.main", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_run_with_a_model_and_data_that_lie_in_the_current_folder(tmp_path: Path) -> None:

    (tmp_path / "mymodel.py").write_text(OWN)
    (tmp_path / "beside.py").write_text("CLASSES = 3\n")
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "files").mkdir()
    np.save(tmp_path / "files" / "x.npy", np.random.default_rng(0).random((60, 5), dtype=np.float32))
    for package in ("torch", "numpy", "rich", "sklearn"):
        (tmp_path / f"{package}.py").write_text(f"raise RuntimeError('{package} is shadowed')\n")
    done = in_folder(tmp_path, "run", "plan.toml", "--data", "files", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["n_weights"] == 39
    resumed = ["run", "--resume", "run", "--set", "rounds=3", "--data", "files"]
    assert (
        "names functions, which this would call: mymodel:data, mymodel:model;" in in_folder(tmp_path, *resumed).stderr
    )
    done = in_folder(tmp_path, *resumed, "--own-code")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder."""
    name = f"faults_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(FAULTS)
    (tmp_path / f"{name}_syntax.py").write_text("def broken(:\n")
    (tmp_path / f"{name}_imports.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BAFFLE_DATA", "somewhere")
    return name


@pytest.mark.parametrize("setting", ["task.data", "task.model.factory"])
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (":broken", r"NAME:broken raised RuntimeError: no such luck \(.*NAME\.py, line 5\)$"),
        (":silent", r"NAME:silent raised KeyError \(.*, line 8\)$"),
        (":number", r"NAME:number must return (a baffle\.Source|an nn\.Module), got int$"),
        (":no_function", r"NAME:no_function must be a function, got int$"),
        (":missing", r"NAME:missing cannot be imported: .*NAME\.py has no missing$"),
        (":demanding", r"NAME:demanding needs (shape|width): expected no parameters without a default but "),
        ("_missing:model", r"NAME_missing:model cannot be imported: no module NAME_missing in .*FOLDER"),
        ("_missing.below:model", r"NAME_missing.below:model cannot be imported: no module NAME_missing in .*FOLDER"),
        ("_syntax:model", r"NAME_syntax:model cannot be imported: SyntaxError: .*line 1\)$"),
        ("_imports:model", r"NAME_imports:model cannot be imported: ModuleNotFoundError: .*no_such_package_at_all"),
    ],
)
def test_what_is_wrong_with_a_function_is_said_in_one_line_and_a_bug_in_it_keeps_its_traceback(
    setting: str, function: str, says: str, faults: str, tmp_path: Path, tiny_toml: Path, cli: Cli
) -> None:
    named = f'"{faults}{function}"'
    change = f"task.data={named}" if setting == "task.data" else f'task.model={{name="custom", factory={named}}}'
    done = cli("run", tiny_toml, "--set", change, "--out", tmp_path / "run")
    assert done.returncode != 0
    line, *below = done.stderr.splitlines()
    expected = says.replace("NAME", faults).replace("FOLDER", re.escape(str(tmp_path)))
    assert re.search(rf"^error: {re.escape(setting)}: {expected}", line), done.stderr
    assert bool(below) == (" raised " in line)
    if below:
        assert below[0] == "Traceback (most recent call last):"
        assert f"{faults}.py" in below[1]
        assert not any(str(Path(baffle.__file__).parent) in frame for frame in below)


def test_a_data_function_is_given_the_data_folder_and_a_factory_is_not(
    faults: str, tmp_path: Path, tiny_toml: Path, cli: Cli
) -> None:
    for options, says in (((), "PosixPath('somewhere')"), (("--data", tmp_path), f"PosixPath('{tmp_path}')")):
        done = cli("run", tiny_toml, "--set", f'task.data="{faults}:folder"', "--out", tmp_path / "run", *options)
        assert f"raised ValueError: {says}" in done.stderr
    with pytest.raises(PlanError, match=r"data_model needs data: expected .* but shape and classes"):
        call_own("task.model.factory", f"{faults}:data_model", shape=(1,), classes=2)


def test_the_current_folder_is_searched_only_during_the_call(faults: str, tmp_path: Path) -> None:
    before = list(sys.path)
    assert call_own("task.data", f"{faults}:number") == 5
    with pytest.raises(PlanError):
        call_own("task.data", f"{faults}:broken")
    assert sys.path == before
    assert str(tmp_path) not in before
