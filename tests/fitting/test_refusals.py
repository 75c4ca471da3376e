"""What `baffle.fit` and `baffle.resume` refuse, in the words that users see."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import baffle
from baffle.network.member.policy import Policy
from tests.fitting.test_fit import fit, shared, small, vectors

X, Y = vectors(60)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds."""
    return fit(tmp_path_factory.mktemp("begun"), small(), shared(X, Y), (X, Y), rounds=2).path


def with_one(change: Any) -> list[Any]:
    """The data of the clients, those of client 1 changed."""
    clients: list[Any] = shared(X, Y)
    clients[1] = change(*clients[1])
    return clients


NAN = X.copy()
NAN[7, 3] = np.nan


class Odd(nn.Module):
    """A linear layer whose forward pass is not a function of samples and weights."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layer, self.fault, self.calls = nn.Linear(8, 3), fault, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fault == "input":
            x *= 2
        nothing, state = torch.zeros(1), torch.full((1,), float(self.calls))
        noise = {"random": torch.randn(len(x), 3), "state": state, "input": nothing}
        return self.layer(x) + noise[self.fault] * torch.arange(3)  # type: ignore[no-any-return]


def jitter(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels) + torch.rand(()) / 100


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"data": []}, "clients: expected the data of at least one client, got none"),
    ({"data": (X[:0], Y[:0])}, "clients: expected samples, got none"),
    ({"data": with_one(lambda x, _: x)}, "clients[1]: expected a pair (x, y) of samples and targets, or a map-style"),
    ({"data": with_one(lambda x, y: (x, y[:-2]))}, "clients[1] has 15 samples, but 13 labels; expected a label for"),
    (
        {"data": with_one(lambda x, y: (x[:, :5], y))},
        "clients[1] has samples of float32 of shape (5,), but clients[0] of float32 of shape (8,); make them alike",
    ),
    ({"data": with_one(lambda x, y: (x[:0], y[:0]))}, "client 1 of 4 has no samples; leave it out, or give it some"),
    ({"data": with_one(lambda _x, y: ([[1.0], [1.0, 2.0]], y[:2]))}, "clients[1]: x: its entries have different"),
    (
        {"data": with_one(lambda x, y: (x, np.array(["cat"] * len(y))))},
        "clients[1]: y: expected numbers whose first axis is the sample, got <U3 of shape (15,)",
    ),
    (
        {"data": with_one(lambda x, y: (x, np.where(np.arange(len(y)) == 9, 3, y)))},
        "clients: y has class 3, but the model has outputs for 3: expected class numbers from 0 to 2; give the model "
        "more outputs, or correct the labels",
    ),
    (
        {"data": with_one(lambda x, y: (x, np.where(np.arange(len(y)) == 9, -1, y)))},
        "the data set's training labels: expected class numbers from 0 to 2, got -1 in sample 24; correct the labels",
    ),
    (
        {"data": shared(X, np.eye(3, dtype=np.float32)[Y])},
        "clients: y is float32, but the loss is cross_entropy: expected class numbers from 0, as integers; of rows "
        'with a one for the class, y.argmax(1); for numbers to predict give loss="mse"',
    ),
    (
        {"data": shared(X, Y[:, None])},
        "clients: y has shape (1,) for each sample, but the model's outputs have (3,): expected one class number for",
    ),
    ({"data": shared(NAN, Y)}, "the data set's training samples hold values that are not finite, first in sample 7"),
    ({"test": (X[:, :5], Y)}, "test has samples of float32 of shape (5,), but clients[0] of float32 of shape (8,)"),
    ({"data": (X, Y), "test": (X[:, :5], Y)}, "test has samples of float32 of shape (5,), but clients of"),
    ({"test": (X, Y + 3)}, "test: y has class 5, but the model has outputs for 3"),
    ({"test": (X, Y.astype(np.float32))}, "test: y is float32, but the loss is cross_entropy"),
    ({"test": (X[:0], Y[:0])}, "test set is empty"),
    (
        {"data": shared(X, X[:, :2]), "loss": "mse"},
        "clients: y has shape (2,) for each sample, but the model's outputs have (3,): expected as many numbers",
    ),
    ({"plan": {"run.device": "cuda:99"}}, "run.device: 'cuda:99' cannot be used"),
    ({"plan": {"probe.kk": 5}}, "unknown key probe.kk (did you mean probe.k?)"),
    ({"plan": {"rounds.more": 5}}, "rounds is a value, not a table"),
    ({"plan": {"task.validation": True}}, "task.validation: baffle.fit tests on what it is given"),
    ({"model": "nothing.onnx"}, "nothing.onnx"),
    (
        {"model": Odd("random")},
        "task.model: the forward pass is random, or keeps state from call to call: the same samples at the same "
        "weights gave ",
    ),
    ({"model": Odd("state")}, "task.model: the forward pass is random, or keeps state from call to call"),
    ({"model": Odd("input")}, "task.model: the model changes its input, so a second forward pass on the same samples"),
    ({"loss": jitter}, "task.loss: the loss is random, or keeps state from call to call"),
    ({"model": 3}, "model: expected an nn.Module or the path of an ONNX file, got int"),
    ({"model": nn.ReLU()}, "no trainable weights"),
    ({"train": "hed.*"}, 'train: no parameter of the model fits \'hed.*\'; expected "all", "last" or patterns of'),
    ({"callbacks": ["stop"]}, "callbacks: expected functions, got 'stop'"),
    ({"callbacks": "stop"}, "callbacks: expected functions, got 'stop'"),
    ({"metrics": "acuracy"}, "task.metrics: expected one of 'accuracy'"),
    ({"metrics": [3]}, 'metrics: expected names such as "accuracy", or functions, got 3'),
    (
        {"plan": {"federation.clients": 10}},
        "federation.clients: the plan says 10, but clients is a list with the data of 4; leave it out, or give one",
    ),
    ({"plan": {"federation": {"clients": 3}}}, "federation.clients: the plan says 3, but clients is a list with"),
]


@pytest.mark.parametrize(("objects", "words"), UNUSABLE, ids=[words for _, words in UNUSABLE])
def test_unusable_objects_and_settings(tmp_path: Path, objects: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"model": small(), "data": shared(X, Y), "test": None}
    with pytest.raises(baffle.BaffleError, match=re.escape(words)):
        fit(tmp_path, **(given | objects))
    assert not (tmp_path / "run").exists()


def test_a_plan_may_say_how_many_clients_have_data(tmp_path: Path) -> None:
    plans: list[Any] = [{"federation.clients": 4}, baffle.Plan(), ["rounds=1"]]
    for number, plan in enumerate(plans):
        run = baffle.fit(small(), shared(X, Y), plan=plan, out=tmp_path / str(number), progress=False, callbacks=stop)
        assert run.plan.federation.clients == 4
    with pytest.raises(baffle.BaffleError, match="the plan says 7, but clients is a list with the data of 4"):
        baffle.fit(small(), shared(X, Y), plan=baffle.load_plan("digits", {"federation.clients": 7}))


def stop(_now: object) -> bool:
    return True


def test_a_plan_of_another_type_is_refused_and_as_many_targets_as_outputs_are_taken(tmp_path: Path) -> None:
    words = "plan: expected a preset's name, the path of a TOML file, a baffle.Plan or a dict of settings, got int"
    with pytest.raises(baffle.BaffleError, match=words):
        baffle.fit(small(), shared(X, Y), plan=5, out=tmp_path / "run")  # type: ignore[arg-type]
    assert fit(tmp_path, small(), shared(X, X[:, :3]), None, loss="mse", rounds=1)["rounds"] == 1


def test_a_model_that_does_not_take_the_samples_and_a_bug_in_an_own_loss_keep_their_traceback(tmp_path: Path) -> None:
    def wrong(outputs: Tensor, _labels: Tensor) -> Tensor:
        return getattr(outputs, "no_such_thing")()  # type: ignore[no-any-return]  # noqa: B009

    with pytest.raises(baffle.BaffleError, match="wrong") as refused:
        fit(tmp_path, small(), shared(X, Y), None, loss=wrong)
    assert isinstance(refused.value.__cause__, AttributeError)
    begins = "model: on samples of float32 of shape (8,), Linear raised RuntimeError: mat1 and mat2 shapes cannot be"
    with pytest.raises(baffle.BaffleError, match=re.escape(begins)) as refused:
        fit(tmp_path, nn.Linear(7, 3), shared(X, Y), None)
    assert isinstance(refused.value.__cause__, RuntimeError)
    run = fit(tmp_path, small(), shared(X, Y), None, rounds=1)
    with pytest.raises(baffle.BaffleError, match=r"model: on samples of float32 of shape \(3,\), Sequential raised"):
        run.predict(X[:, :3])


def test_what_a_person_mistypes_around_a_run(begun: Path) -> None:
    with pytest.raises(baffle.BaffleError, match=r"out: .*run holds a run; go on with it by baffle\.resume\("):
        fit(begun.parent, small(), shared(X, Y), None)
    for settings, words in (
        ("rounds=5", r"settings: expected a dict or a list of them, as \['rounds=5'\], got one text"),
        (["probe.k=5"], r"a resumed run may change rounds, run\.\* and secure"),
        (["rounds=0"], r"rounds: expected int >= 1, got 0"),
    ):
        with pytest.raises(baffle.BaffleError, match=words):
            baffle.resume(begun, settings, model=small(), clients=shared(X, Y), test=(X, Y))
    with pytest.raises(baffle.BaffleError, match=r"the run's model is a module; .* got the path theirs\.onnx"):
        baffle.open(begun).restore("theirs.onnx")
    with pytest.raises(KeyError, match=r"accuracy; the summary has .*test_accuracy"):
        baffle.open(begun)["accuracy"]
    assert baffle.open(begun).get("accuracy") is None


def test_a_run_goes_on_with_a_model_that_began_elsewhere(begun: Path) -> None:
    """The folder has the weights that the run began with, so a new process need not find the same ones again."""
    other = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    run = baffle.resume(begun, ["rounds=4"], model=other, clients=shared(X, Y), test=(X, Y))
    assert run["rounds"] == 4
    assert np.mean(run.predict(X).argmax(1) == Y) == pytest.approx(run["test_accuracy"], abs=1e-6)


ANOTHER_NET = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def half(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels) / 2


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"model": ANOTHER_NET}, "model: this is not the run's model: with the same weights it has other outputs"),
        ({"model": nn.Linear(8, 3)}, "model: it has 27 weights to train, but the run has 75"),
        ({"clients": shared(X + 1, Y)}, "clients: these are not the run's data"),
        ({"clients": shared(X, Y, 5)}, "clients: these are not the run's data"),
        ({"loss": half}, "loss: this is not the run's loss: it gives another value"),
        ({"model": None}, "was begun by baffle.fit; give its objects again: model=…, clients=…"),
    ],
)
def test_other_objects_do_not_continue_a_run(begun: Path, objects: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"model": small(), "clients": shared(X, Y), "test": (X, Y)} | objects
    with pytest.raises(baffle.BaffleError, match=words):
        baffle.resume(begun, ["rounds=9"], **given)


def test_a_run_of_a_plan_takes_no_objects_and_the_command_line_says_how_to_give_them(
    begun: Path, finished_run: Path, cli: Any
) -> None:
    with pytest.raises(baffle.BaffleError, match=r"was not begun by baffle\.fit"):
        baffle.resume(finished_run, ["rounds=9"], model=small(), clients=shared(X, Y))
    done = cli("run", "--resume", begun)
    assert (done.returncode, done.stderr) == (
        2,
        "error: task.data: this was given to baffle.fit as an object, and no plan can name it; go on in Python: "
        "baffle.resume(DIR, model=…, clients=…)\n",
    )
    assert cli("verify", begun).returncode == 0


def test_a_server_cannot_make_a_client_look_for_a_given_object(begun: Path) -> None:
    """The liar: a server's plan that names what was given to its own fit, and a module called `given` at hand."""
    plan = baffle.load_plan(str(begun / "plan.toml"))
    refusals = Policy(mode="off", scalars_only=False).refusals(plan)
    assert any("task.data" in words for words in refusals)
    assert any("outside BAFFLE" in words for words in refusals)


@pytest.mark.parametrize("says", ["[]", "[nan, nan, nan, nan, nan, nan, nan]", "[1.0]"])
def test_a_folder_whose_plan_was_changed_is_refused(begun: Path, tmp_path: Path, says: str) -> None:
    """The liar: an untrusted folder, whose plan would accept any model as the run's."""
    plan = shutil.copytree(begun, tmp_path / "run") / "plan.toml"
    plan.write_text(re.sub(r"^says = .*$", f"says = {says}", plan.read_text(), flags=re.MULTILINE))
    with pytest.raises(baffle.BaffleError):
        baffle.resume(tmp_path / "run", ["rounds=9"], model=ANOTHER_NET, clients=shared(X, Y))


def test_a_warning_names_the_line_that_called_fit(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="dropout in layer 1 is off") as warned:  # before the first round
        fit(tmp_path, nn.Sequential(nn.Linear(8, 6), nn.Dropout(), nn.Linear(6, 3)), shared(X, Y), None, rounds=1)
    fast = {"update.rate": 3.0, "rounds": 20}  # and while it goes on
    with pytest.warns(UserWarning, match="the loss climbs") as late:
        fit(tmp_path / "fast", small(), shared(X, Y), None, plan=fast)
    assert {Path(warning.filename).name for warning in [*warned, *late]} == {"test_fit.py"}
