"""Models that come as ONNX through `baffle.fit`: without PyTorch, whole or in part, with any loss."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

import baffle
from baffle.core.samples import Array
from tests.fitting.test_fit import fit, shared

WORDS, WIDTH, CLASSES = 12, 4, 3


def bag_of_words(path: Path, count: int | str = "batch") -> Path:
    """Another tool's classifier of six token ids: a table, a mean over the tokens, a linear layer."""
    random = np.random.default_rng(0)
    tensors = {
        "table.weight": random.standard_normal((WORDS, WIDTH)) / 2,
        "head.weight": random.standard_normal((WIDTH, CLASSES)) / 2,
        "head.bias": np.zeros(CLASSES),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table.weight", "ids"], ["found"]),
            helper.make_node("ReduceMean", ["found"], ["mean"], axes=[1], keepdims=0),
            helper.make_node("Gemm", ["mean", "head.weight", "head.bias"], ["out"]),
        ],
        "theirs",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [count, 6])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [count, CLASSES])],
        [numpy_helper.from_array(values.astype(np.float32), name) for name, values in tensors.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def sentences(count: int, seed: int = 0) -> tuple[Array, Array]:
    ids = np.random.default_rng(seed).integers(0, WORDS, (count, 6))
    return ids, ids.sum(1) // 12 % CLASSES


@pytest.mark.parametrize(("train", "weights"), [("all", 63), ("last", 15), ("head.*", 15), ("table.*", 48)])
def test_a_foreign_graph_of_token_ids_trains(tmp_path: Path, train: str, weights: int) -> None:
    (x, y), test = sentences(80), sentences(60, 1)
    run = fit(tmp_path, bag_of_words(tmp_path / "theirs.onnx"), shared(x, y), test, train=train)
    assert run["n_weights"] == weights
    assert np.mean(run.predict(test[0]).argmax(1) == test[1]) == pytest.approx(run["test_accuracy"], abs=1e-6)
    again = baffle.resume(run.path, ["rounds=22"], model=tmp_path / "theirs.onnx", clients=shared(x, y), test=test)
    assert again["rounds"] == 22
    with pytest.raises(baffle.BaffleError, match="the model came as ONNX"):
        run.model  # noqa: B018


def test_a_loss_of_the_users_own_gets_arrays(tmp_path: Path) -> None:
    def share_wrong(outputs: Array, labels: Array) -> Array:
        assert isinstance(outputs, np.ndarray)
        return np.asarray(outputs.argmax(1) != labels, np.float64)

    x, y = sentences(80)
    model = bag_of_words(tmp_path / "theirs.onnx")
    run = fit(tmp_path, model, shared(x, y), (x, y), loss=share_wrong, metrics=["accuracy"])
    assert run.metrics["loss"].max() <= 1
    assert run["metrics"] == ["accuracy"]


def test_another_graph_does_not_continue_a_run(tmp_path: Path) -> None:
    x, y = sentences(80)
    run = fit(tmp_path, bag_of_words(tmp_path / "theirs.onnx"), shared(x, y), None, rounds=2)
    other = fit(tmp_path / "b", bag_of_words(tmp_path / "b.onnx"), shared(x, y), None, rounds=2, train="last")
    with pytest.raises(baffle.BaffleError, match="this is not the run's model, but another graph"):
        baffle.resume(run.path, ["rounds=4"], model=other.plan.run.model, clients=shared(x, y))
