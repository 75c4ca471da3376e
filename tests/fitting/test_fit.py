"""Models and data of your own: each trains through `baffle.fit`, and comes back as a module with the measured
accuracy."""

import doctest
import re
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import baffle
from baffle.core.samples import PADDING, Array, take
from baffle.fitting.given_data import given_data
from baffle.fitting.progress import progress_lines
from baffle.journal.audit import verify
from baffle.plan import load
from baffle.server.recorder import Progress

CLIENTS = 4
QUICK = {"probe.k": 30, "update.rate": 0.1, "update.ema": 0.8}
"""Settings with which the small models here learn in few rounds."""


def vectors(count: int, seed: int = 0) -> tuple[Array, Array]:
    """Samples of eight numbers in three classes."""
    random = np.random.default_rng(seed)
    y = random.integers(0, 3, count)
    x = random.standard_normal((count, 8)).astype(np.float32) + 2 * np.eye(3, 8, dtype=np.float32)[y]
    return x, y


def shared(x: Any, y: Array, clients: int = CLIENTS) -> list[tuple[Any, Array]]:
    """The samples of each client."""
    return [(take(x, part), y[part]) for part in np.array_split(np.arange(len(y)), clients)]


def fit(tmp_path: Path, model: Any, data: Any, test: Any, rounds: int = 4, **more: Any) -> baffle.Run:
    plan = {"rounds": rounds, "run.evaluate_every": rounds, "probe.k": 8, **more.pop("plan", {})}
    return baffle.fit(model, data, test, plan=plan, out=tmp_path / "run", progress=False, **more)


def outputs(module: nn.Module, *x: Any, **named: Any) -> Array:
    module.eval()
    with torch.inference_mode():
        output: Tensor = module(*map(torch.from_numpy, x), **{name: torch.from_numpy(of) for name, of in named.items()})
    return output.numpy()


def require_accuracy(run: baffle.Run, x: Any, y: Array) -> Array:
    """The predictions of a run's model, which are as often right as the run says."""
    predicted = run.predict(x)
    right = predicted.argmax(-1) == y
    assert right[y != PADDING].mean() == pytest.approx(run["test_accuracy"], abs=1e-6)
    return predicted


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> baffle.Run:
    plan = {**QUICK, "run.evaluate_every": 6}
    return fit(tmp_path_factory.mktemp("trained"), small(), shared(*vectors(120)), vectors(300, 1), 12, plan=plan)


def test_a_module_trains_and_comes_back(trained: baffle.Run, tmp_path: Path) -> None:
    x, y = vectors(300, seed=1)
    assert trained["test_accuracy"] > 0.7  # chance is a third
    np.testing.assert_allclose(outputs(trained.model, x), require_accuracy(trained, x, y), atol=1e-6)
    assert verify(trained.path).weights_sha256 == trained["weights_sha256"]
    model = small()
    fit(tmp_path, model, shared(*vectors(60)), None, rounds=1)
    assert all(torch.equal(mine, new) for mine, new in zip(model.parameters(), small().parameters(), strict=True))


def test_the_last_layer_is_exact_unless_the_plan_says_otherwise(trained: baffle.Run, tmp_path: Path) -> None:
    assert load(str(trained.path / "plan.toml")).probe.head == "exact"
    run = fit(tmp_path, small(), shared(*vectors(60)), None, rounds=1, plan={"probe": {"head": "probed"}})
    assert load(str(run.path / "plan.toml")).probe.head == "probed"


def test_a_model_without_an_exact_head_is_probed_unless_the_plan_asks_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    softplus = nn.Sequential(small(), nn.Softplus())
    data = shared(*vectors(60))
    run = baffle.fit(softplus, data, plan={"rounds": 1, "probe.k": 8}, out=tmp_path / "run")
    assert load(str(run.path / "plan.toml")).probe.head == "probed"
    assert "the last layer is probed like the others: the outputs come from Softplus" in capsys.readouterr().out
    with pytest.raises(baffle.BaffleError, match="the outputs come from Softplus, not from"):
        fit(tmp_path / "asked", softplus, data, None, rounds=1, plan={"probe.head": "exact"})
    assert not (tmp_path / "asked" / "run").exists()


def test_a_run_is_arrays_and_a_summary_with_a_page_and_a_figure(trained: baffle.Run, tmp_path: Path) -> None:
    np.testing.assert_array_equal(trained.metrics["round"], np.arange(1, 13))
    assert trained.metrics["loss"].shape == (12,)
    assert np.flatnonzero(~np.isnan(trained.metrics["test_accuracy"])).tolist() == [5, 11]
    assert trained.metrics["test_accuracy"][-1] == trained["test_accuracy"] == trained.summary["test_accuracy"]
    assert dict(trained) == trained.summary
    assert str(trained.path) in repr(trained)
    assert "Sequential" in trained.report(tmp_path / "page.html").read_text()
    assert trained.report() == trained.path / "report.html"
    loss, accuracy = trained.plot().data
    assert (list(loss.x), list(accuracy.x)) == ([*range(1, 13)], [6, 12])
    assert accuracy.y[-1] == trained["test_accuracy"]


def test_averaged_and_last_weights_are_both_at_hand(trained: baffle.Run) -> None:
    averaged, last = trained.weights(last=False), trained.weights(last=True)
    assert (averaged != last).any()
    again = baffle.open(trained.path)
    np.testing.assert_array_equal(again.weights(), last if trained["returned"] == "last" else averaged)
    module = again.restore(small(), last=True)
    np.testing.assert_array_equal(np.concatenate([p.detach().numpy().ravel() for p in module.parameters()]), last)
    with pytest.raises(baffle.BaffleError, match=r"give one: run\.restore\(module\)"):
        again.model  # noqa: B018


class Tokens(nn.Module):
    """A small transformer on token ids with a mask of padding. It gives a class for each sample or each token."""

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
@pytest.mark.parametrize("form", [dict, lambda x: tuple(x.values())], ids=["dict", "tuple"])
def test_a_transformer_takes_its_arguments_from_dicts_and_tuples(tmp_path: Path, form: Callable[[Any], Any]) -> None:
    x, y, _ = sentences(80)
    test_x, test_y, _ = sentences(60, 1)
    run = fit(tmp_path, Tokens(each=False), shared(form(x), y), (form(test_x), test_y), rounds=2)
    np.testing.assert_allclose(outputs(run.model, **test_x), require_accuracy(run, form(test_x), test_y), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:.*dropout.*")
def test_labels_may_be_given_for_each_token(tmp_path: Path) -> None:
    x, _, each = sentences(80)
    test_x, _, test_each = sentences(60, 1)
    plan = {**QUICK, "probe.k": 16}
    run = fit(tmp_path, Tokens(each=True), shared(x, each), (test_x, test_each), plan=plan)
    require_accuracy(run, test_x, test_each)
    assert run.metrics["loss"][-1] < run.metrics["loss"][0]


class Encoded(nn.Module):
    """A transformer of PyTorch's own, which takes padding as booleans alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 3)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids), src_key_padding_mask=~mask)[:, 0])  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:.*enable_nested_tensor.*")
def test_the_mask_of_docs_data_reaches_a_transformer_encoder(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (block,) = re.findall(r"^x = (\{\"ids\".*\})", page, re.MULTILINE)
    ids, y = sentences(80)[0]["ids"], sentences(80)[1]
    x = eval(block, {"ids": ids})
    require_accuracy(fit(tmp_path, Encoded(), shared(x, y), (x, y), rounds=2), x, y)


class Masked(nn.Module):
    """A mean over the tokens that a mask of booleans keeps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        assert mask.dtype == torch.bool
        return self.embedding(ids).masked_fill(~mask.unsqueeze(-1), 0.0).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", [lambda values: values, torch.from_numpy, np.ndarray.tolist])
def test_booleans_reach_a_model_as_booleans(tmp_path: Path, form: Callable[[Array], Any]) -> None:
    ids, y = sentences(80)[0]["ids"], sentences(80)[1]
    x = {"ids": ids, "mask": ids != 0}
    clients = [({"ids": part["ids"], "mask": form(part["mask"])}, labels) for part, labels in shared(x, y)]
    require_accuracy(fit(tmp_path, Masked(), clients, (x, y), rounds=2), x, y)


@pytest.mark.parametrize("width", [1, 3])
def test_a_regression(tmp_path: Path, width: int) -> None:
    random = np.random.default_rng(0)
    slopes = random.standard_normal((8, width)).astype(np.float32)
    x = random.standard_normal((200, 8)).astype(np.float32)
    y = x @ slopes if width > 1 else (x @ slopes)[:, 0]
    torch.manual_seed(0)
    data, test = shared(x[:150], y[:150]), (x[150:], y[150:])
    run = fit(tmp_path, nn.Linear(8, width), data, test, 20, loss="mse", plan=QUICK)
    errors = run.predict(x[150:]).reshape(y[150:].shape) - y[150:]
    assert np.abs(errors).mean() == pytest.approx(run["test_mae"], rel=1e-4)
    assert run["test_r2"] > 0.7


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
    require_accuracy(run, ids, ids[:, 0])


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
    require_accuracy(run, *vectors(40, 1))


def test_a_loss_without_a_derivative_and_an_own_metric(tmp_path: Path) -> None:
    def one_minus_accuracy(outputs: Tensor, labels: Tensor) -> float:
        return float((outputs.argmax(1) != labels).float().mean())

    def worst_class(outputs: Array, labels: Array) -> float:
        right = outputs.argmax(1) == labels
        return float(min(right[labels == label].mean() for label in range(3)))

    plan = {**QUICK, "probe.sigma": 0.3, "federation.batch": 0}
    objects: dict[str, Any] = {"loss": one_minus_accuracy, "metrics": ["accuracy", worst_class]}
    run = fit(tmp_path, small(), shared(*vectors(240)), vectors(300, 1), 12, plan=plan, **objects)
    assert run["metrics"] == ["accuracy", "worst_class"]
    assert run["test_accuracy"] > 0.55
    x, y = vectors(300, 1)
    assert run["test_worst_class"] == pytest.approx(worst_class(run.predict(x), y), rel=1e-5)


def test_every_form_of_the_same_data_is_the_same() -> None:
    x, y = vectors(60)
    tensors = [(torch.from_numpy(part), torch.from_numpy(labels)) for part, labels in shared(x, y)]
    lists = [(part.astype(np.float64).tolist(), labels.tolist()) for part, labels in shared(x, y)]
    sets = [TensorDataset(*pair) for pair in tensors]
    assert len({given_data(clients).fingerprint() for clients in (shared(x, y), tensors, lists, sets)}) == 1


class Items:
    """A data set as Hugging Face's are: a length, and items that are dicts."""

    def __init__(self, label: str, columns: Mapping[str, Any]) -> None:
        self.label, self.columns = label, columns

    def __len__(self) -> int:
        return len(self.columns[self.label])

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: values[number] for name, values in self.columns.items()}


def test_loaders_named_clients_and_items_with_labels_are_the_same_data_too() -> None:
    x, y = vectors(60)
    sets = [TensorDataset(torch.from_numpy(part), torch.from_numpy(labels)) for part, labels in shared(x, y)]
    loaders = {f"clinic {number}": DataLoader(data, batch_size=7, shuffle=True) for number, data in enumerate(sets)}
    items = [Items("label", {"x": part, "label": labels}) for part, labels in shared(x, y)]
    assert len({given_data(clients).fingerprint() for clients in (sets, loaders, items)}) == 1
    with pytest.raises(baffle.BaffleError, match=r"clients\['b'\] has 3 samples, but 2 labels"):
        given_data({"a": (x, y), "b": (x[:3], y[:2])})
    own = DataLoader(sets[0], collate_fn=lambda batch: batch)
    with pytest.raises(baffle.BaffleError, match="a DataLoader with a collate_fn of its own gives batches"):
        given_data([own])


class Encoding(UserDict[str, Array]):
    """What tokenizers of Hugging Face give."""


class Answer:
    """What models of Hugging Face give."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Tokens(each=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Answer:
        return Answer(self.inner(ids, mask))


@pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:.*dropout.*")
def test_encodings_and_outputs_with_logits_train_as_tensors_do(tmp_path: Path) -> None:
    x, y, _ = sentences(80)
    encoded = [(Encoding(part), labels) for part, labels in shared(x, y)]
    items = [Items("labels", {**part, "labels": labels}) for part, labels in shared(x, y)]
    runs = [
        fit(tmp_path / str(place), Wrapped(), clients, (x, y), rounds=2)
        for place, clients in enumerate((shared(x, y), encoded, items))
    ]
    assert len({run["weights_sha256"] for run in runs}) == 1
    require_accuracy(runs[1], Encoding(x), y)


def test_a_run_is_overwritten_if_asked_and_only_when_the_new_one_begins(tmp_path: Path) -> None:
    data, test = shared(*vectors(60)), vectors(20, 1)
    first = fit(tmp_path, small(), data, test, rounds=1)
    with pytest.raises(baffle.BaffleError, match=r"holds a run; .* replace it with overwrite=True"):
        fit(tmp_path, small(), data, test, rounds=2)
    with pytest.raises(baffle.BaffleError, match="mat1 and mat2"):
        fit(tmp_path, nn.Linear(7, 3), data, test, rounds=2, overwrite=True)
    assert baffle.open(first.path)["weights_sha256"] == first["weights_sha256"]
    second = fit(tmp_path, small(), data, test, rounds=2, overwrite=True)
    assert second["rounds"] == verify(first.path).rounds == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(baffle.BaffleError, match="not empty"):
        baffle.fit(small(), data, out=tmp_path / "other", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]


def test_several_seeds_are_several_runs_with_mean_and_range(tmp_path: Path) -> None:
    data, test = shared(*vectors(60)), vectors(100, 1)
    run = fit(tmp_path, small(), data, test, rounds=2, plan={"seed": 5}, seeds=3)
    assert [one.plan.seed for one in run.seeds] == [5, 6, 7]
    assert [one.path.name for one in run.seeds] == ["run", "run-seed-6", "run-seed-7"]
    assert len({one["weights_sha256"] for one in run.seeds}) == 3
    values = [one["test_accuracy"] for one in run.seeds]
    assert run.spread("test_accuracy") == pytest.approx((sum(values) / 3, min(values), max(values)))
    text = run.report().read_text()
    assert "Over seeds" in text
    assert f"{min(values):.2%} to {max(values):.2%}" in text
    alone = fit(tmp_path / "alone", small(), data, test, rounds=2, plan={"seed": 6})
    assert alone["weights_sha256"] == run.seeds[1]["weights_sha256"]
    with pytest.raises(baffle.BaffleError, match="seeds: expected how many runs to make, at least 1, got 0"):
        fit(tmp_path / "none", small(), data, test, seeds=0)


def test_one_set_is_shared_out_as_the_plan_says(tmp_path: Path) -> None:
    settings = {"federation": {"clients": 5, "partition": "dirichlet"}}
    run = fit(tmp_path, small(), vectors(200), None, rounds=2, plan=settings)
    assert run.plan.federation.clients == 5
    assert run.plan.federation.partition == "dirichlet"


def test_callbacks_see_every_round_and_may_stop_the_run(tmp_path: Path) -> None:
    seen: list[Mapping[str, Any]] = []

    def stop(now: Mapping[str, Any]) -> bool:
        return bool(now["round"] == 2)

    run = fit(tmp_path, small(), shared(*vectors(60)), None, rounds=4, callbacks=[stop, seen.append])
    assert [now["round"] for now in seen] == [1, 2]
    assert (run["rounds"], run.plan.rounds) == (2, 4)
    whole = baffle.resume(run.path, {"rounds": np.int64(4)}, model=small(), clients=shared(*vectors(60)))
    undisturbed = fit(tmp_path / "again", small(), shared(*vectors(60)), None, rounds=4)
    assert whole["weights_sha256"] == undisturbed["weights_sha256"]


def test_progress_tells_evaluations_and_every_ten_seconds_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = [0.0]
    watch = progress_lines(lambda: seconds[-1])
    now = Progress(0.0, 50, loss=1.5, seconds_left=75.0)
    for at, done in {5: 0.3, 12: 0.6, 15: 1, 16: 20, 17: 21, 40: 25.5}.items():
        seconds.append(at)
        watch(replace(now, rounds_done=float(done), value=None if done < 20 else 0.5))
    assert capsys.readouterr().out.splitlines() == [
        "round  0.6/50  loss 1.5  1 min 15 s left",
        "round   20/50  loss 1.5  test accuracy 50.0%  1 min 15 s left",
        "round 25.5/50  loss 1.5  test accuracy 50.0%  1 min 15 s left",
    ]


class Notebook:
    """The part of IPython's shell in a notebook that a fit talks to."""

    kernel = object()

    def __init__(self) -> None:
        self.shown = list[tuple[dict[str, str], str, bool]]()

    @property
    def display_pub(self) -> "Notebook":
        return self

    def publish(self, data: dict[str, str], *, transient: dict[str, str], update: bool) -> None:
        self.shown.append((data, transient["display_id"], update))


def test_a_notebook_shows_one_bar_and_a_run_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook()
    monkeypatch.setattr("builtins.get_ipython", lambda: notebook, raising=False)
    run = baffle.fit(small(), shared(*vectors(60)), vectors(30, 1), plan={"rounds": 3}, out=tmp_path / "<run>")
    first, *others = notebook.shown
    assert (first[2], {(place, update) for _, place, update in others}) == (False, {(first[1], True)})
    last = others[-1][0]
    assert 'max="3" value="3.00"' in last["text/html"]
    assert last["text/plain"].startswith("round    3/3  loss ")
    assert "round " not in capsys.readouterr().out
    html = run._repr_html_()
    assert f"<th>test_accuracy</th><td>{run['test_accuracy']:.6g}</td>" in html
    assert "&lt;run&gt;" in html
    assert "<run>" not in html


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
                 metrics=["accuracy"], plan={"rounds": 2, "probe.k": 4, "probe.sigma": 0.5})
print(run.predict(x).shape, run.plan.task.loss)
"""
    command = [sys.executable, "-"]
    done = subprocess.run(command, input=program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "(40, 2) given:function"
    assert "round    2/2  loss" in done.stdout


def test_secure_sums_are_off_in_a_fit_alone_as_its_pages_say(tmp_path: Path, trained: baffle.Run) -> None:
    assert (trained["secure"], baffle.Plan().secure.mode) == ("off", "on")
    root = Path(__file__).parents[2]
    for words in (
        (root / "README.md").read_text(),
        (root / "docs/quickstart.md").read_text(),
        baffle.fit.__doc__ or "",
    ):
        assert re.search(r'plain.{0,80}"secure.mode"|`baffle.fit`,.{0,80}leaves it off', words, re.DOTALL)
    plan = {**QUICK, "run.evaluate_every": 6, "secure.mode": "on"}
    masked = fit(tmp_path, small(), shared(*vectors(120)), vectors(300, 1), 12, plan=plan)
    assert masked["weights_sha256"] == trained["weights_sha256"]


def test_a_private_fit_tells_epsilon_and_no_loss(tmp_path: Path) -> None:
    plan = {"federation.weighting": "uniform", "secure.floor": CLIENTS, "privacy.epsilon": 40.0, "privacy.clip": 1.0}
    run = fit(tmp_path, nn.Linear(8, 3), shared(*vectors(400)), vectors(60, 1), plan=plan)
    assert 39 < run["epsilon"] == run.metrics["epsilon"][-1] <= 40
    assert np.isnan(run.metrics["loss"]).all()
    assert len(run.plot().data) == 2
    assert verify(tmp_path / "run").weights_sha256 == run["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("function", [baffle.fit, baffle.resume, baffle.open])
def test_the_example_in_a_docstring_runs(
    function: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a model, the data of some clients, and a run of theirs in runs/mine for granted."""
    monkeypatch.chdir(tmp_path)
    clients, test = shared(*vectors(60)), vectors(20, 1)
    names = {f"{name}{i}": part for i, pair in enumerate(clients) for name, part in zip("xy", pair, strict=True)}
    (tmp_path / "runs").mkdir()
    fit(tmp_path, small(), clients, test, rounds=2).path.rename("runs/mine")
    names |= {"baffle": baffle, "model": small(), "clients": clients, "test": test, "x": test[0], "y": test[1]}
    examples = doctest.DocTestParser().get_examples(function.__doc__ or "")
    assert examples
    for example in examples:
        exec(example.source, names)  # what it prints is not compared: rounds and folders differ


def test_a_module_that_was_pruned_keeps_its_zeros(tmp_path: Path) -> None:
    module = small()
    prune.l1_unstructured(module[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    state = module.state_dict()
    before = (state["0.weight_orig"] * state["0.weight_mask"]).numpy()
    run = fit(tmp_path, module, shared(*vectors(60)), None, 2)
    x, _ = vectors(5)
    outputs(run.model, x)  # a pass applies the mask
    after = run.model[0].weight.detach().numpy()
    np.testing.assert_array_equal(after == 0, before == 0)
    assert not np.array_equal(before, after)


@pytest.mark.parametrize("named", [False, True])
def test_each_client_is_tested_on_its_own_held_out_samples(tmp_path: Path, named: bool) -> None:
    x, y = vectors(200)
    parts = [(x[:40], y[:40]), (x[40:140], (y[40:140] + 1) % 3), (x[140:], y[140:])]  # the second one disagrees
    clients: Any = dict(zip("abc", parts, strict=True)) if named else parts
    plan = {"rounds": 40, "federation.batch": 0, "run.evaluate_every": 20}
    run = baffle.fit(small(), clients, 0.2, plan=plan, out=tmp_path / "run", progress=False)
    held = given_data(clients, 0.2)
    assert held.test is not None
    assert [len(own) for own in held.shares or ()] == [32, 80, 48]
    kept = {tuple(row) for row in held.train.samples.tolist()}
    assert not kept & {tuple(row) for row in held.test.samples.tolist()}
    whose = list(run["test_domains"])
    assert whose == (["a", "b", "c"] if named else ["0", "1", "2"])
    right = run.predict(held.test.samples).argmax(1) == held.test.labels
    for number, name in enumerate(whose):
        own = right[held.test.domain_of == number]
        assert run["test_domains"][name]["accuracy"] == pytest.approx(own.mean(), abs=1e-6)
        assert len(own) == (8, 20, 12)[number]
    assert len({values["accuracy"] for values in run["test_domains"].values()}) > 1
    page = run.report().read_text()
    assert "By client" in page
    assert f"<td>{whose[0]}</td>" in page
    more = baffle.resume(run.path, {"rounds": 41}, model=small(), clients=clients, test=0.2)
    assert more["rounds"] == 41
    with pytest.raises(baffle.BaffleError, match="these are not the run's data"):
        baffle.resume(run.path, {"rounds": 42}, model=small(), clients=clients, test=0.3)
    by_name = fit(tmp_path / "b", small(), parts, {"near": vectors(30, 1), "far": vectors(20, 2)}, rounds=2)
    assert list(by_name["test_domains"]) == ["near", "far"]


def test_a_share_to_test_on_needs_clients_with_enough_samples() -> None:
    x, y = vectors(60)
    for clients, share, words in (
        ((x, y), 0.2, "a share of each client's own samples is a number between 0 and 1, where clients are a list"),
        ([(x, y)], 1.5, "a share of each client's own samples is a number between 0 and 1, .* got 1.5"),
        ([(x, y), (x[:1], y[:1])], 0.2, r"clients\[1\] has 1 samples, too few to hold out 0.2 of them"),
    ):
        with pytest.raises(baffle.BaffleError, match=words):
            given_data(clients, share)
