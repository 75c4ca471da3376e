"""Mistakes that people make with data, models and losses of their own: the sentence that each gives."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from uuid import uuid4

import pytest

from tests.support.command_line import Cli, setting

Trial = Callable[..., CompletedProcess[str]]

MODULE = """
import numpy as np
from torch import nn
from baffle import Dataset, Source

random = np.random.default_rng(0)
x = random.normal(size=(60, 5)).astype(np.float32)
y = np.arange(60) % 3

def source(x=x, y=y, classes=3, prepare=lambda x: x, cut=20):
    return Source(Dataset(x[cut:], y[cut:], prepare), Dataset(x[:cut], y[:cut], prepare), classes=classes)

def nine():
    return nn.Linear(5, 9)

def three():
    return nn.Linear(5, 3)

def buggy():
    class Buggy(nn.Linear):
        def forward(self, x):
            return super().forward(x).no_such_method()

    return Buggy(5, 3)

def pair():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    return Pair(5, 3)

def no_loss(outputs, labels):
    raise KeyError("weight")

def of_outputs(outputs, labels):
    return outputs

def data():
    BODY
"""


@pytest.fixture
def trial(cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """Runs the tiny plan on data that a function's body makes; `NAME` in a setting is the name of its module."""

    def run(body: str, *settings: str) -> CompletedProcess[str]:
        name = f"mistake_{uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(MODULE.replace("BODY", body))
        monkeypatch.chdir(tmp_path)
        options = setting(f"task.data={name}:data", *(text.replace("NAME", name) for text in settings))
        done = cli("run", tiny_toml, *options, "--out", tmp_path / "run", "--quiet")
        return CompletedProcess(done.args, done.returncode, done.stdout, done.stderr.replace(name, "NAME"))

    return run


def model(name: str) -> str:
    return f'task.model={{name="custom", factory="NAME:{name}"}}'


CORRECT = [
    "return source()",
    "return source(y=y.tolist())",
    "return source(x=x.tolist(), prepare=lambda x: x.astype(np.float32))",
    "return source(y=y.astype(np.uint8))",
]


@pytest.mark.parametrize("body", CORRECT, ids=["arrays", "labels as a list", "samples as a list", "labels in bytes"])
def test_what_is_no_mistake(trial: Trial, tmp_path: Path, body: str) -> None:
    done = trial(body)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["n_weights"] == 18


MISTAKES = """
return Source(Dataset(x, y[:59]), None, classes=3)
    the data set has 60 training samples, but 59 labels; expected a label for each sample
return Source(Dataset({'a': x, 'b': x[:50]}, y), None, classes=3)
    the data set has 50 training samples in input b, but 60 labels; expected a label for each sample
y[34] = 3 | return source()
    the data set's training labels: expected class numbers from 0 to 2, got 3 in sample 14; correct the labels,
    or the source's classes
y[9] = -1 | return source()
    the data set's test labels: expected class numbers from 0 to 2, got -1 in sample 9; correct the labels, or
    the source's classes
labels = np.zeros((60, 4), int) | labels[30, 2:] = -100, -2 | return source(y=labels)
    the data set's training labels: expected class numbers from 0 to 2 (-100 for padding), got -2 in sample 10;
    correct the labels, or the source's classes
return source(y=np.array(['cat', 'dog'] * 30))
    baffle.Dataset: its labels are <U3, expected class numbers or numbers to predict; convert them
return source(y=y / 2)
    the data set's training labels are float32, but it has 3 classes: expected class numbers from 0 to 2; for
    numbers to predict, set classes = 0
x[50, 3] = np.nan | return source()
    the data set's training samples hold values that are not finite, first in sample 30; remove or replace them
return source(prepare=lambda x: x * np.float32('nan'))
    the data set's training samples, as its prepare gives them, hold values that are not finite, first in sample
    0; remove or replace them
return source(prepare=lambda x: x.tolist())
    the data set's prepare gave a list, expected an array, or a tuple or dict of arrays
return source(prepare=lambda x: {'x': x.tolist()})
    the data set's prepare gave a dict that holds a list, expected arrays of numbers
return source(prepare=lambda x: {'x': x, 'mask': x > 0})
    task.model: this model takes one array, but the data set gives a dict of 2; use a "custom" model that takes
    them
return source(prepare=lambda x: x[1:])
    the data set's prepare gave 1 rows for 2 samples, expected a row for each sample
return source(cut=0)
    the data set's test set is empty; expected samples, or None instead of a set without any
return source(cut=60)
    the data set's training set is empty; expected samples, or None instead of a set without any
return Source((x, y), None, classes=3)
    baffle.Source: its training set must be a baffle.Dataset, a function that reads one, or None, got tuple
return Source(lambda: (x, y), None, classes=3)
    the function that reads the data set's training samples must return a baffle.Dataset, got tuple
return source() | task.model={name="custom", factory="NAME:nine"}
    task.model: the model has 9 outputs, but the data has 3 classes; make them equal
return source(y=x[:, :2], classes=0) | task.model={name="custom", factory="NAME:three"} | task.loss="mse"
    task.model: the model has 3 outputs, but the data has 2 numbers to predict for each sample; give the model
    as many outputs
return source(y=np.zeros((60, 4), int)) | task.model={name="custom", factory="NAME:three"}
    task.model: the model gives outputs of shape (3,) for a sample whose labels have shape (4,); expected (4, 3)
return source() | task.model={name="custom", factory="NAME:pair"}
    task.model: the model gives a tuple, expected one tensor; return the outputs alone
return source(classes=0)
    task.loss: "cross_entropy" needs classes, but NAME:data has none; set it to "mse", "mae", "bce" or a
    function of your own, or say how many classes the source has
return source() | task.loss="mse"
    task.loss: "mse" needs numbers to predict, but NAME:data has 3 classes; set it to "cross_entropy", or give
    the source classes = 0
return source(y=y, classes=0) | task.loss="bce"
    the data set's training labels lie between 0 and 2, but task.loss = "bce" takes targets from 0 to 1; scale
    them, or set task.loss = "mse"
return source() | task.loss=crossentropy
    task.loss: expected one of 'cross_entropy', 'mse', 'mae', 'bce' or "package.module:function", got
    'crossentropy'
return source() | task.metrics=["mae"]
    task.metrics: 'mae' cannot be taken with task.loss = "cross_entropy"; expected one of 'accuracy', 'top5',
    'loss' or "package.module:function"
return source() | task.metrics=["accuracy", "NAME:accuracy"]
    task.metrics: results would hold test_accuracy twice; name each metric once, and a function of your own
    neither domains nor …_last
return source() | task.metrics=["NAME:rouge"]
    task.metrics: NAME:rouge cannot be imported: FOLDER/NAME.py has no rouge
return source() | task.loss="NAME:of_outputs"
    task.loss: NAME:of_outputs must return one loss per sample, or their mean, got shape (2, 3) for 2 samples
return source() | task.model={name="lenet"} | task.init=
    task.model: a "lenet" takes images of (channels, height, width), 2 pixels each way at least, got samples of
    shape (5,); use "softmax", which takes any, or a "custom" model
return source(x=x[:, :1, None, None]) | task.model={name="lenet"} | task.init=numpy
    task.model: a "lenet" takes images of (channels, height, width), 2 pixels each way at least, got samples of
    shape (1, 1, 1); use "softmax", which takes any, or a "custom" model
return source(y=x[:, 0], classes=0) | task.loss="mse" | federation.partition=dirichlet
    federation.partition: "dirichlet" divides classes, but NAME:data has no class for each sample; expected
    "iid"
"""
"""What a user does, as lines of `data` and as settings, and the sentence that it gives."""


def mistakes() -> list[tuple[list[str], str]]:
    blocks = re.findall(r"^(\S.*)\n((?: {4}.*\n)+)", MISTAKES, re.MULTILINE)
    return [(made.split(" | "), " ".join(says.split())) for made, says in blocks]


@pytest.mark.parametrize(("lines", "says"), mistakes(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_said_in_one_line(trial: Trial, tmp_path: Path, lines: list[str], says: str) -> None:
    settings = [line for line in lines if line.startswith(("task.", "federation."))]
    done = trial("\n    ".join(line for line in lines if line not in settings), *settings)
    assert done.returncode == 2
    assert done.stderr == f"error: {says.replace('FOLDER', str(tmp_path))}\n"
    assert not (tmp_path / "run").exists()


BUGS = {
    "the loss": (['task.loss="NAME:no_loss"'], "task.loss: NAME:no_loss raised KeyError: 'weight'"),
    "prepare": (["prepare=lambda x: x.mean(7)"], "the data set's prepare raised AxisError: axis 7 is out of bounds"),
    "the model": ([model("buggy")], "task.model cannot run on samples: float32 of shape (5,): AttributeError: "),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_a_function_keeps_its_traceback_below_one_line(trial: Trial, tmp_path: Path, name: str) -> None:
    settings, says = BUGS[name]
    given = ", ".join(text for text in settings if text.startswith("prepare"))
    done = trial(f"return source({given})", *(text for text in settings if text.startswith("task")))
    assert done.returncode == 2
    line, below, place, *_ = done.stderr.splitlines()
    assert line.startswith(f"error: {says}")
    assert below == "Traceback (most recent call last):"
    if name != "the model":  # PyTorch's own frames come first
        assert place.startswith(f'  File "{tmp_path}/NAME.py"')
    assert f'File "{tmp_path}/NAME.py"' in done.stderr
    assert not (tmp_path / "run").exists()
