"""Own models on own data: each trains through `baffle.fit`, and comes back as a module that says what was measured."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import baffle
from baffle.core.samples import PADDING, Array
from baffle.journal.audit import verify

CLIENTS = 4


def vectors(count: int, seed: int = 0) -> tuple[Array, Array]:
    """Samples of eight numbers in three classes."""
    random = np.random.default_rng(seed)
    y = random.integers(0, 3, count)
    x = random.standard_normal((count, 8)).astype(np.float32) + 2 * np.eye(3, 8, dtype=np.float32)[y]
    return x, y


def shared(x: Any, y: Array, clients: int = CLIENTS) -> list[tuple[Any, Array]]:
    """The samples of each client."""

    def rows(array: Array, part: Array) -> Array:
        return array[part]

    parts = np.array_split(np.arange(len(y)), clients)
    if isinstance(x, dict):
        return [({name: rows(array, part) for name, array in x.items()}, y[part]) for part in parts]
    if isinstance(x, tuple):
        return [(tuple(rows(array, part) for array in x), y[part]) for part in parts]
    return [(x[part], y[part]) for part in parts]


def fit(tmp_path: Path, model: Any, data: Any, test: Any, rounds: int = 20, **more: Any) -> baffle.Run:
    plan = {"rounds": rounds, "run.evaluate_every": rounds, **more.pop("plan", {})}
    return baffle.fit(model, data, test, plan=plan, out=tmp_path / "run", progress=False, **more)


def outputs(module: nn.Module, *x: Any, **named: Any) -> Array:
    module.eval()
    with torch.inference_mode():
        output: Tensor = module(*map(torch.from_numpy, x), **{name: torch.from_numpy(of) for name, of in named.items()})
    return output.numpy()


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def test_a_module_trains_and_comes_back(tmp_path: Path) -> None:
    model, (x, y) = small(), vectors(120)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    test = vectors(300, seed=1)
    run = fit(tmp_path, model, shared(x, y), test, rounds=60)
    assert run["test_accuracy"] > 0.8
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    predicted = run.predict(test[0])
    assert np.mean(predicted.argmax(1) == test[1]) == pytest.approx(run["test_accuracy"], abs=1e-6)
    np.testing.assert_allclose(outputs(run.model, test[0]), predicted, atol=1e-6)
    assert verify(run.path).weights_sha256 == run["weights_sha256"]


def test_a_run_is_arrays_and_a_summary(tmp_path: Path) -> None:
    run = fit(tmp_path, small(), shared(*vectors(60)), vectors(20, 1), rounds=6, plan={"run.evaluate_every": 3})
    np.testing.assert_array_equal(run.metrics["round"], [1, 2, 3, 4, 5, 6])
    assert run.metrics["loss"].shape == (6,)
    assert np.isnan(run.metrics["test_accuracy"]).tolist() == [True, True, False, True, True, False]
    assert run.metrics["test_accuracy"][-1] == run["test_accuracy"] == run.summary["test_accuracy"]
    assert dict(run) == run.summary
    assert str(run.path) in repr(run)


def test_a_run_has_a_page_and_a_figure(tmp_path: Path) -> None:
    run = fit(tmp_path, small(), shared(*vectors(60)), vectors(20, 1), rounds=4, plan={"run.evaluate_every": 2})
    page = run.report(tmp_path / "page.html")
    assert "Sequential" in page.read_text()
    assert run.report() == run.path / "report.html"
    loss, accuracy = run.plot().data
    assert list(loss.x) == [1, 2, 3, 4]
    assert list(accuracy.x) == [2, 4]
    assert accuracy.y[-1] == run["test_accuracy"]


def test_averaged_and_last_weights_are_both_at_hand(tmp_path: Path) -> None:
    run = fit(tmp_path, small(), shared(*vectors(60)), None, rounds=6)
    averaged, last = run.weights(), run.weights(last=True)
    assert (averaged != last).any()
    again = baffle.open(run.path)
    np.testing.assert_array_equal(again.weights(), averaged)
    module = again.restore(small(), last=True)
    np.testing.assert_array_equal(np.concatenate([p.detach().numpy().ravel() for p in module.parameters()]), last)
    with pytest.raises(baffle.BaffleError, match=r"give one: run\.restore\(module\)"):
        again.model  # noqa: B018


class Tokens(nn.Module):
    """A small transformer on token ids with a mask of padding; it says a class for each sample or each token."""

    def __init__(self, *, each: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.each = each
        self.embedding = nn.Embedding(12, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.block(self.embedding(ids), src_key_padding_mask=mask == 0)
        if self.each:
            return self.head(hidden)  # type: ignore[no-any-return]
        counted = mask.unsqueeze(-1).float()
        return self.head((hidden * counted).sum(1) / counted.sum(1))  # type: ignore[no-any-return]


def sentences(count: int, seed: int = 0) -> tuple[dict[str, Array], Array, Array]:
    """Token ids, their masks, a class for each sentence, and a class for each token."""
    random = np.random.default_rng(seed)
    ids = random.integers(1, 12, (count, 6))
    lengths = random.integers(2, 7, count)
    mask = (np.arange(6) < lengths[:, None]).astype(np.int64)
    whole = ids[:, 0] % 3
    each = np.where(mask == 1, ids % 3, PADDING)
    return {"ids": ids * mask, "mask": mask}, whole, each


@pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:.*dropout.*")
@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_a_transformer_takes_its_arguments_from_dicts_and_tuples(tmp_path: Path, form: str) -> None:
    x, y, _ = sentences(80)
    test_x, test_y, _ = sentences(60, 1)
    data: Any = x if form == "dict" else tuple(x.values())
    held_out: Any = test_x if form == "dict" else tuple(test_x.values())
    run = fit(tmp_path, Tokens(each=False), shared(data, y), (held_out, test_y), rounds=6)
    predicted = run.predict(held_out)
    assert np.mean(predicted.argmax(1) == test_y) == pytest.approx(run["test_accuracy"], abs=1e-6)
    np.testing.assert_allclose(outputs(run.model, **test_x), predicted, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:.*dropout.*")
def test_labels_may_be_given_for_each_token(tmp_path: Path) -> None:
    x, _, each = sentences(80)
    test_x, _, test_each = sentences(60, 1)
    run = fit(tmp_path, Tokens(each=True), shared(x, each), (test_x, test_each), rounds=25)
    counted = test_each != PADDING
    right = run.predict(test_x).argmax(2) == test_each
    assert right[counted].mean() == pytest.approx(run["test_accuracy"], abs=1e-6)
    assert run.metrics["loss"][-5:].mean() < run.metrics["loss"][:5].mean()


@pytest.mark.parametrize("width", [1, 3])
def test_a_regression(tmp_path: Path, width: int) -> None:
    random = np.random.default_rng(0)
    slopes = random.standard_normal((8, width)).astype(np.float32)
    x = random.standard_normal((200, 8)).astype(np.float32)
    y = x @ slopes if width > 1 else (x @ slopes)[:, 0]
    torch.manual_seed(0)
    run = fit(tmp_path, nn.Linear(8, width), shared(x[:150], y[:150]), (x[150:], y[150:]), 120, loss="mse")
    errors = run.predict(x[150:]).reshape(y[150:].shape) - y[150:]
    assert np.abs(errors).mean() == pytest.approx(run["test_mae"], rel=1e-4)
    assert run["test_r2"] > 0.8


class Tied(nn.Module):
    """An embedding whose matrix is also that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).mean(1))  # type: ignore[no-any-return]


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 5, (60, 3))
    run = fit(tmp_path, Tied(), shared(ids, ids[:, 0]), (ids, ids[:, 0]))
    assert run["n_weights"] == 20
    assert isinstance(run.model, Tied)
    assert run.model.head.weight is run.model.embedding.weight
    assert np.mean(run.predict(ids).argmax(1) == ids[:, 0]) == pytest.approx(run["test_accuracy"], abs=1e-6)


class Frozen(nn.Module):
    """A frozen front, a buffer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Linear(8, 6).requires_grad_(requires_grad=False)
        self.head = nn.Linear(6, 3)
        self.register_buffer("shift", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.front(x) + self.shift)  # type: ignore[no-any-return]


@pytest.mark.parametrize("train", ["all", "last", "head.*", ["head.weight", "head.bias"]])
def test_frozen_parts_and_buffers_stay_as_they_were(tmp_path: Path, train: Any) -> None:
    model = Frozen()
    run = fit(tmp_path, model, shared(*vectors(60)), vectors(40, 1), train=train)
    assert run["n_weights"] == 21
    state = run.model.state_dict()
    for name in ("front.weight", "front.bias", "shift"):
        assert torch.equal(state[name], model.state_dict()[name])
    assert not torch.equal(state["head.weight"], model.head.weight)
    assert [p.requires_grad for p in run.model.parameters()] == [p.requires_grad for p in model.parameters()]
    test = vectors(40, 1)
    assert np.mean(run.predict(test[0]).argmax(1) == test[1]) == pytest.approx(run["test_accuracy"], abs=1e-6)


def one_minus_accuracy(outputs: Tensor, labels: Tensor) -> float:
    """A loss that no derivative helps with: it has steps."""
    return float((outputs.argmax(1) != labels).float().mean())


def test_a_loss_without_a_derivative_and_an_own_metric(tmp_path: Path) -> None:
    def worst_class(outputs: Array, labels: Array) -> float:
        right = outputs.argmax(1) == labels
        return float(min(right[labels == label].mean() for label in range(3)))

    x, y = vectors(240)
    test = vectors(300, 1)
    run = fit(
        tmp_path,
        small(),
        shared(x, y),
        test,
        rounds=60,
        loss=one_minus_accuracy,
        metrics=["accuracy", worst_class],
        plan={"probe.sigma": 0.3, "federation.batch": 0, "update.rate": 0.03},
    )
    assert run["metrics"] == ["accuracy", "worst_class"]
    assert run["test_accuracy"] > 0.6
    assert run["test_worst_class"] == pytest.approx(worst_class(run.predict(test[0]), test[1]), rel=1e-5)


class Pairs:
    """A map-style data set, as PyTorch's loaders take them."""

    def __init__(self, x: Array, y: Array) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.x[number]), int(self.y[number])


def test_every_form_of_the_same_data_gives_the_same_run(tmp_path: Path) -> None:
    x, y = vectors(60)
    tensors = [(torch.from_numpy(part), torch.from_numpy(labels)) for part, labels in shared(x, y)]
    lists = [(part.astype(np.float64).tolist(), labels.tolist()) for part, labels in shared(x, y)]
    sets = [Pairs(part, labels) for part, labels in shared(x, y)]
    hashes = {
        fit(tmp_path / str(number), small(), clients, None, rounds=3)["weights_sha256"]
        for number, clients in enumerate([shared(x, y), tensors, lists, sets])
    }
    assert len(hashes) == 1


def test_secure_sums_change_no_bit(tmp_path: Path) -> None:
    hashes = {
        fit(tmp_path / mode, small(), shared(*vectors(60)), None, rounds=3, plan={"secure.mode": mode})[
            "weights_sha256"
        ]
        for mode in ("off", "on", "malicious-server")
    }
    assert len(hashes) == 1


def test_one_set_is_shared_out_as_the_plan_says(tmp_path: Path) -> None:
    settings = {"federation": {"clients": 5, "partition": "dirichlet"}}
    run = fit(tmp_path, small(), vectors(200), None, rounds=2, plan=settings)
    assert run.plan.federation.clients == 5
    assert run.plan.federation.partition == "dirichlet"


def test_callbacks_see_every_round_and_may_stop_the_run(tmp_path: Path) -> None:
    seen: list[Mapping[str, Any]] = []

    def stop(now: Mapping[str, Any]) -> bool:
        return bool(now["round"] == 4)

    run = fit(tmp_path, small(), shared(*vectors(60)), None, rounds=10, callbacks=[stop, seen.append])
    assert [now["round"] for now in seen] == [1, 2, 3, 4]
    assert (run["rounds"], run.plan.rounds) == (4, 10)
    whole = baffle.resume(run.path, model=small(), clients=shared(*vectors(60)))
    undisturbed = fit(tmp_path / "again", small(), shared(*vectors(60)), None, rounds=10)
    assert whole["weights_sha256"] == undisturbed["weights_sha256"]


def test_it_runs_where_nothing_can_be_imported_by_name(tmp_path: Path) -> None:
    """As in a cell of a notebook: the model, the loss and the data exist only there."""
    program = """
import numpy as np, torch, baffle
class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.layer(x)
x = np.random.default_rng(0).standard_normal((40, 4)).astype("float32")
y = (x[:, 0] > 0).astype(int)
run = baffle.fit(Mine(), [(x[:20], y[:20]), (x[20:], y[20:])], (x, y), loss=lambda o, t: ((o.argmax(1) != t) * 1.0),
                 metrics=["accuracy"], plan={"rounds": 20, "probe.sigma": 0.5})
print(run.predict(x).shape, run.plan.task.loss)
"""
    done = subprocess.run(
        [sys.executable, "-"], input=program, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "(40, 2) given:function"
    assert "round   20/20  loss" in done.stdout


def test_a_private_fit_tells_epsilon_and_no_loss(tmp_path: Path) -> None:
    x, y = vectors(400)
    plan = {
        "federation.weighting": "uniform",
        "secure.floor": CLIENTS,
        "privacy.epsilon": 40.0,
        "privacy.clip": 1.0,
    }
    run = fit(tmp_path, nn.Linear(8, 3), shared(x, y), vectors(60, 1), plan=plan)
    assert 39 < run["epsilon"] == run.metrics["epsilon"][-1] <= 40
    assert np.isnan(run.metrics["loss"]).all()
    assert len(run.plot().data) == 2
    assert verify(tmp_path / "run").weights_sha256 == run["weights_sha256"]
