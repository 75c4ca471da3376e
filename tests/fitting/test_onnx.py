"""Models that come as ONNX through `baffle.fit`: without PyTorch, whole or in part, with any loss."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, load, numpy_helper, save
from onnx.checker import check_model

import baffle
from baffle.core.samples import Array
from baffle.export import export_onnx
from tests.fitting.test_fit import fit, shared

WORDS, WIDTH, CLASSES = 12, 4, 3


def bag_of_words(path: Path, count: int | str = "batch", *, softmax: bool = False) -> Path:
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
            helper.make_node("Gemm", ["mean", "head.weight", "head.bias"], ["logits" if softmax else "out"]),
            *([helper.make_node("Softmax", ["logits"], ["out"])] if softmax else []),
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


def answers(model: ModelProto, **inputs: Array) -> Array:
    """What ONNX Runtime makes of a model, without anything of BAFFLE."""
    check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, inputs)[0])


def test_a_trained_graph_comes_back_as_it_was_given(tmp_path: Path) -> None:
    (x, y), test = sentences(80), sentences(60, 1)
    theirs = bag_of_words(tmp_path / "theirs.onnx", softmax=True)
    before = theirs.read_bytes()
    run = fit(tmp_path, theirs, shared(x, y), test, train="head.*")
    said = answers(run.model, ids=test[0])
    np.testing.assert_allclose(said.sum(1), 1, rtol=1e-5)  # probabilities: the file's own end, which the run left out
    assert np.mean(said.argmax(1) == test[1]) == pytest.approx(run["test_accuracy"], abs=1e-6)
    assert theirs.read_bytes() == before
    was, now = (_tensors(model) for model in (load(theirs), run.model))
    assert np.array_equal(was["table.weight"], now["table.weight"])
    assert not np.array_equal(was["head.weight"], now["head.weight"])
    last = _tensors(run.restore(theirs, last=True))
    np.testing.assert_array_equal(
        np.concatenate([last["head.weight"].ravel(), last["head.bias"]]), run.weights(last=True)
    )
    opened = baffle.open(run.path)
    logits = answers(opened.model, x=test[0])
    np.testing.assert_allclose(logits, opened.predict(test[0]), rtol=1e-5)
    np.testing.assert_allclose(logits, run.predict(test[0]), rtol=1e-6)
    assert np.mean(logits.argmax(1) == test[1]) == pytest.approx(run["test_accuracy"], abs=1e-6)


def _tensors(model: ModelProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def test_an_exported_folder_comes_back_as_one_model(tmp_path: Path) -> None:
    x, y = sentences(80)
    export_onnx(bag_of_words(tmp_path / "theirs.onnx"), tmp_path / "folder")
    run = fit(tmp_path, tmp_path / "folder", shared(x, y), (x, y))
    np.testing.assert_allclose(answers(run.model, x=x), run.predict(x), rtol=1e-5)
    assert [value.name for value in run.model.graph.input] == ["x"]


def test_a_graph_of_half_floats_comes_back_in_half_floats(tmp_path: Path) -> None:
    x, y = sentences(80)
    theirs = load(bag_of_words(tmp_path / "theirs.onnx"))
    for tensor in theirs.graph.initializer:
        values = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    theirs.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    save(theirs, tmp_path / "half.onnx")
    run = fit(tmp_path, tmp_path / "half.onnx", shared(x, y), (x, y), rounds=2)
    assert {values.dtype.name for values in _tensors(run.model).values()} == {"float16"}
    np.testing.assert_allclose(answers(run.model, ids=x), run.predict(x), rtol=1e-2, atol=1e-3)


def test_another_file_gets_none_of_a_runs_weights(tmp_path: Path) -> None:
    x, y = sentences(80)
    theirs = bag_of_words(tmp_path / "theirs.onnx")
    run = fit(tmp_path, theirs, shared(x, y), None, rounds=2, train="head.*")
    other = load(theirs)
    table = next(tensor for tensor in other.graph.initializer if tensor.name == "table.weight")
    table.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(table), "table.weight"))  # a frozen part
    save(other, tmp_path / "other.onnx")
    refusal = "other.onnx is not the run's model, but another graph; give the one"
    with pytest.raises(baffle.BaffleError, match=refusal):
        run.restore(tmp_path / "other.onnx")
    with pytest.raises(baffle.BaffleError, match=refusal):
        baffle.resume(run.path, ["rounds=4"], model=tmp_path / "other.onnx", clients=shared(x, y))
    save(other, theirs)  # the file was overwritten while the run went on
    with pytest.raises(baffle.BaffleError, match=r"theirs\.onnx is not the run's model"):
        run.model  # noqa: B018
    with pytest.raises(baffle.BaffleError, match="came as ONNX; expected its path again, got object"):
        baffle.resume(run.path, ["rounds=4"], model=object(), clients=shared(x, y))  # type: ignore[arg-type]


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
