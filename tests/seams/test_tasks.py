"""Plans beyond classification, run as a whole: regression, labels per token, several inputs, losses of one's own; in a
simulation on both runtimes, and in a network."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.core.arrays import F32
from baffle.errors import PlanError, RefusalError
from baffle.journal.audit import verify
from baffle.plan import Plan, change
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.torch.loss import TorchLoss
from baffle.simulation import add_baseline, resume, simulate
from baffle.task.load import load_task
from tests.support.lines_in_memory import Federation, new_keys
from tests.support.own_tasks import HERE

Tiny = Callable[..., Plan]
Cli = Callable[..., CompletedProcess[str]]
LEARN = ("rounds=60", "probe.k=24", "federation.batch=0", "update.rate=0.05", "update.ema=0")


def data(name: str) -> str:
    return f'task.data="{HERE}:{name}"'


def model(name: str) -> str:
    return f'task.model={{name="custom", factory="{HERE}:{name}"}}'


def own(name: str) -> str:
    return f'task.loss="{HERE}:{name}"'


ON_BOTH = {
    "cross_entropy": [data("blobs")],
    "mse": [data("line"), 'task.loss="mse"'],
    "mse of vectors": [data("plane"), 'task.loss="mse"'],
    "mae": [data("plane"), 'task.loss="mae"'],
    "bce": [data("marks"), 'task.loss="bce"'],
    "own": [data("blobs"), own("share_of_errors")],
}


@pytest.mark.parametrize(("name", "runtime"), list(zip(ON_BOTH, ("torch", "onnx") * 3, strict=True)))
def test_it_learns(tiny: Tiny, tmp_path: Path, name: str, runtime: str) -> None:
    """On one runtime each: the next test says that the other has the same losses."""
    steps = ("probe.sigma=0.3", "update.rate=0.1") if name == "own" else ()
    plan = tiny(*LEARN, *ON_BOTH[name], "task.init=numpy", f"run.runtime={runtime}", *steps)
    summary = simulate(plan, tmp_path / "run")
    headline = {"mse": "mae", "mse of vectors": "mae", "mae": "mae", "own": "loss"}.get(name, "accuracy")
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert summary["metrics"][0] == headline
    assert summary["train_loss"] < first["loss"] / 2
    value = summary[f"test_{headline}"]
    assert value > 0.9 if headline == "accuracy" else value < 0.4
    assert summary[f"test_{headline}_last"] == value
    if headline == "mae":
        assert summary["test_r2"] > 0.85
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]


@pytest.mark.parametrize("name", ON_BOTH)
def test_a_plan_has_the_same_losses_on_both_runtimes(tiny: Tiny, name: str) -> None:
    tasks = [
        load_task(tiny(*ON_BOTH[name], "task.init=numpy", f"run.runtime={runtime}")) for runtime in ("onnx", "torch")
    ]
    ours, theirs = (task.runtime() for task in tasks)
    assert (type(ours), type(theirs)) == (OnnxLoss, TorchLoss)
    weights: F32 = tasks[0].initial_weights()
    np.testing.assert_array_equal(weights, tasks[1].initial_weights())

    @settings(max_examples=20, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 40), by=st.floats(0, 3))
    def same_losses(seed: int, size: int, by: float) -> None:
        random = np.random.default_rng(seed)
        batch = tasks[0].source.train.batch(random.integers(0, 80, size))
        moved = weights + random.normal(0, by, len(weights)).astype(np.float32)
        assert ours.on(batch)(moved) == pytest.approx(theirs.on(batch)(moved), rel=1e-5, abs=1e-5)

    same_losses()


def test_a_label_for_each_token(tiny: Tiny, tmp_path: Path) -> None:
    summary = simulate(tiny(*LEARN, data("sentences"), model("channels_first_tagger"), "rounds=25"), tmp_path / "run")
    assert summary["metrics"] == ["accuracy"]
    assert summary["test_accuracy"] > 0.6


def test_both_orders_of_axes_give_the_same_loss(tiny: Tiny) -> None:
    settings = ("rounds=3", data("sentences"))
    task, other = (load_task(tiny(*settings, model(name))) for name in ("tagger", "channels_first_tagger"))
    batch = task.source.train.batch(np.arange(30))
    weights = task.initial_weights()
    assert task.runtime().on(batch)(weights) == pytest.approx(other.runtime().on(batch)(weights), rel=1e-9)


@pytest.mark.parametrize(("name", "supports"), [("named", "layers"), ("paired", "dense")])
def test_several_inputs(tiny: Tiny, tmp_path: Path, name: str, supports: str) -> None:
    plan = tiny(*LEARN, data(name), model("both"), f"probe.supports={supports}", "probe.micro_batch=24", "rounds=14")
    summary = simulate(plan, tmp_path / "run")
    assert summary["test_accuracy"] > 0.7
    assert resume(tmp_path / "run", ["rounds=15"], own_code=True)["rounds"] == 15


def test_several_inputs_are_refused_where_a_model_takes_one(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"^task.model: this model takes one array, but the data set gives a dict of 2"):
        simulate(tiny(data("named")), tmp_path / "run")


def test_backpropagation_needs_a_derivative(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r'^task\.loss: .*in_numpy has no derivative, which estimator = "backprop" needs'
    ):
        simulate(tiny(data("blobs"), own("in_numpy"), "estimator=backprop"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_baseline_without_a_derivative_is_refused_before_the_run(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    settings = (data("blobs"), own("share_of_errors"), "probe.sigma=0.3")
    options = [word for setting in settings for word in ("--set", setting)]
    done = cli("run", tiny_toml, *options, "--out", tmp_path / "run", "--baseline")
    assert done.stderr.startswith("error: task.loss: it has no derivative, which backpropagation needs;")
    assert not (tmp_path / "run").exists()


def test_what_a_person_sees_of_a_regression(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    options = [word for setting in (data("line"), "task.loss=mse") for word in ("--set", setting)]
    done = cli("run", tiny_toml, *options, "--out", tmp_path / "run", "--baseline")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = [re.split(r" {2,}", line.strip(), maxsplit=1) for line in done.stdout.splitlines()]
    lines = {row[0]: row[1] for row in rows if len(row) == 2}
    assert f"mae {summary['test_mae']:.4g}" in done.stdout
    assert lines["test mae"] == f"{summary['test_mae']:.4g}  (without averaging: {summary['test_mae_last']:.4g})"
    assert lines["test r2"] == f"{summary['test_r2']:.4g}"
    assert lines["backpropagation"].startswith(f"{summary['baseline_test_mae']:.4g} in 0 s, ")
    assert "accuracy" not in done.stdout
    shown = cli("plan", tiny_toml, *options, "--show-partition")
    assert shown.returncode == 0, shown.stderr
    assert "27" in shown.stdout


def test_a_baseline_is_compared_by_the_first_metric(tiny: Tiny, tmp_path: Path) -> None:
    simulate(tiny(data("line"), own("squared"), 'task.metrics=["mae", "r2"]'), tmp_path / "run")
    summary = add_baseline(tmp_path / "run", own_code=True)
    assert summary["metrics"] == ["mae", "r2"]
    assert summary["baseline_test_mae"] < summary["test_mae"] * 2


def test_metrics_are_beside_the_chain(tiny: Tiny, tmp_path: Path) -> None:
    """Other metrics change neither weights nor hashes, and a resumed run may have others."""
    plan = tiny(data("line"), 'task.loss="mse"')
    others = change(plan, [f'task.metrics=["rmse", "{HERE}:largest_error"]'])
    first, second = simulate(plan, tmp_path / "one"), simulate(others, tmp_path / "two")
    assert first["weights_sha256"] == second["weights_sha256"]
    assert verify(tmp_path / "one").chain == verify(tmp_path / "two").chain
    assert second["metrics"] == ["rmse", "largest_error"]
    assert second["test_largest_error"] >= second["test_rmse"] > 0
    resumed = resume(tmp_path / "two", ["rounds=8", 'task.metrics=["loss"]'], own_code=True)
    assert resumed["metrics"] == ["loss"]
    assert "test_rmse" not in resumed


@pytest.mark.parametrize("loss", ["mse", f"{HERE}:squared"])
def test_in_a_network_it_is_the_same(tiny: Tiny, tmp_path: Path, loss: str) -> None:
    """Clients that were given the plan take part, and all end with the weights of the journal."""
    plan = tiny(data("line"), f'task.loss="{loss}"', f'task.metrics=["mae", "{HERE}:largest_error"]', "rounds=4")
    federation = Federation(new_keys(tmp_path, 3), tmp_path, change(plan, ['secure.mode="on"']))
    member = federation.member
    federation.member = lambda number, **given: member(number, pinned=federation.plan, **given)  # type: ignore[method-assign]
    summary = federation.serve(federation.lines(3))
    assert summary["metrics"] == ["mae", "largest_error"]
    assert summary["skipped_rounds"] == 0
    assert summary["test_largest_error"] > summary["test_mae"] > 0
    federation.require_agreement(range(3))


def test_without_the_plan_a_client_takes_no_part_in_such_a_run(tiny: Tiny, tmp_path: Path) -> None:
    plan = tiny('secure.mode="on"', own("share_of_errors"))
    federation = Federation(new_keys(tmp_path, 3), tmp_path, plan)
    with pytest.raises(RefusalError, match=r"task\.loss comes from a function outside BAFFLE"):
        federation.member(0).consent._require_acceptable(plan)
