"""Models that come as ONNX through `baffle.fit`: without PyTorch, whole or in part, with any loss."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, load, numpy_helper, save
from onnx.checker import check_model

import baffle
from baffle.core.samples import Array, each
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


def masked_bag(path: Path) -> Path:
    """The same with a mask over the tokens and a number for each sentence as further inputs, and open sizes."""
    random = np.random.default_rng(0)
    tensors = {
        "table.weight": random.standard_normal((WORDS, WIDTH)) / 2,
        "head.weight": random.standard_normal((WIDTH, CLASSES)) / 2,
        "head.bias": np.zeros(CLASSES),
    }
    axis = numpy_helper.from_array(np.array([2]), "axis")
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table.weight", "ids"], ["found"]),
            helper.make_node("Unsqueeze", ["mask", "axis"], ["column"]),
            helper.make_node("Mul", ["found", "column"], ["kept"]),
            helper.make_node("ReduceMean", ["kept"], ["mean"], axes=[1], keepdims=0),
            helper.make_node("Unsqueeze", ["scale", "one"], ["factor"]),
            helper.make_node("Mul", ["mean", "factor"], ["scaled"]),
            helper.make_node("Gemm", ["scaled", "head.weight", "head.bias"], ["out"]),
        ],
        "theirs",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "tokens"]),
            helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch", "tokens"]),
            helper.make_tensor_value_info("scale", TensorProto.FLOAT, ["batch"]),
        ],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", CLASSES])],
        [
            axis,
            numpy_helper.from_array(np.array([1]), "one"),
            *(numpy_helper.from_array(values.astype(np.float32), name) for name, values in tensors.items()),
        ],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def masked_sentences(count: int) -> tuple[dict[str, Array], Array]:
    ids, y = sentences(count)
    random = np.random.default_rng(1)
    mask, scale = random.integers(0, 2, ids.shape).astype(np.float32), random.random(count).astype(np.float32) + 0.5
    return {"mask": mask, "ids": ids, "scale": scale}, y


def rows_of(x: Any, rows: slice) -> Any:
    return each(lambda array: array[rows], x)


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_a_graph_with_several_inputs_trains(tmp_path: Path, form: str) -> None:
    by_name, y = masked_sentences(80)
    x: Any = by_name if form == "dict" else (by_name["ids"], by_name["mask"], by_name["scale"])
    theirs = masked_bag(tmp_path / "theirs.onnx")
    parts = [slice(start, start + 20) for start in range(0, 80, 20)]
    clients: list[Any] = [(rows_of(x, rows), y[rows]) for rows in parts]
    run = fit(tmp_path, theirs, clients, (x, y))
    assert run["n_weights"] == 63
    said = answers(run.model, **by_name)
    assert np.mean(said.argmax(1) == y) == pytest.approx(run["test_accuracy"], abs=1e-6)
    np.testing.assert_allclose(said, run.predict(x), rtol=1e-4, atol=1e-6)
    assert run.metrics["loss"][-1] < run.metrics["loss"][0]
    again = baffle.resume(run.path, ["rounds=22"], model=theirs, clients=clients, test=(x, y))
    assert again["rounds"] == 22
    opened = baffle.open(run.path)
    in_folder = {f"x/{name}": array for name, array in by_name.items()}
    np.testing.assert_allclose(answers(opened.model, **in_folder), opened.predict(x), rtol=1e-4, atol=1e-6)


def test_the_order_and_the_names_of_several_inputs_matter(tmp_path: Path) -> None:
    x, y = masked_sentences(80)
    theirs = masked_bag(tmp_path / "theirs.onnx")
    renamed = {"tokens": x["ids"], "mask": x["mask"], "scale": x["scale"]}
    for number, (wrong, words) in enumerate(
        [
            (renamed, "the model has no input tokens; its inputs are ids, mask, scale"),
            (
                {"ids": x["ids"], "mask": x["mask"]},
                r"takes samples of ids of shape \(6,\), mask .* scale of shape \(\)",
            ),
            ((x["ids"], x["mask"]), "an array for each of the inputs ids, mask, scale, got 2"),
            (x["ids"], "an array for each of the inputs ids, mask, scale, got 1"),
            ((x["mask"], x["ids"], x["scale"]), "the model takes int64 ids, got float32"),
        ]
    ):
        with pytest.raises(baffle.BaffleError, match=words):
            fit(tmp_path / str(number), theirs, [(wrong, y)], None, rounds=2)


def test_an_export_of_several_inputs_serves_a_plan(
    tmp_path: Path, cli: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, folder = masked_bag(tmp_path / "theirs.onnx"), tmp_path / "folder"
    refused = cli("export", "--onnx", str(theirs), "--out", str(folder))
    assert "the input ids leaves the size of a sample open" in refused.stderr
    assert cli("export", "--onnx", str(theirs), "--out", str(folder), "--shape", "6", "--shape", "6").returncode == 2
    sizes = ["--shape", "ids=6", "--shape", "mask=6"]
    refused = cli("export", "--onnx", str(theirs), "--out", str(folder), "--shape", "tokens=6")
    assert "the model has no input tokens; its inputs are ids, mask, scale" in refused.stderr
    made = cli("export", "--onnx", str(theirs), "--out", str(folder), *sizes)
    assert made.returncode == 0, made.stderr
    assert json.loads((folder / "manifest.json").read_text())["format"] == "baffle/model/2"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "masked.py").write_text(
        "import numpy as np\n"
        "from baffle.data.sources import Dataset, Source\n"
        "def source():\n"
        "    ids = np.random.default_rng(0).integers(0, 12, (80, 6))\n"
        "    x = {'ids': ids, 'mask': ids != 0, 'scale': np.ones(80, np.float32)}\n"
        "    y = ids.sum(1) // 12 % 3\n"
        "    return Source(Dataset(x, y), Dataset(x, y), 3)\n"
    )
    done = cli(
        *("run", "digits", "--set", "task.data=masked:source", "--set", 'task.model={name="onnx"}'),
        *("--set", f"run.model={folder}", "--set", "rounds=3", "--set", "federation.clients=3", "--out", "run"),
    )
    assert done.returncode == 0, done.stderr
    run = baffle.open("run")
    assert run["rounds"] == 3
    ids = np.random.default_rng(0).integers(0, 12, (80, 6))
    samples = {"ids": ids, "mask": ids != 0, "scale": np.ones(80, np.float32)}
    said = answers(run.restore(theirs), ids=ids, mask=(ids != 0).astype(np.float32), scale=samples["scale"])
    np.testing.assert_allclose(
        run.predict({**samples, "mask": (ids != 0).astype(np.float32)}), said, rtol=1e-4, atol=1e-6
    )


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


def test_a_refused_fit_leaves_nothing_in_the_way_of_the_next(tmp_path: Path) -> None:
    x, y = sentences(80)
    theirs = bag_of_words(tmp_path / "theirs.onnx")
    with pytest.raises(baffle.BaffleError, match="y has class 9, but the model has outputs for 3"):
        fit(tmp_path, theirs, shared(x, np.where(y == 1, 9, y)), None, rounds=2)
    assert fit(tmp_path, theirs, shared(x, y), None, rounds=2)["rounds"] == 2
    (tmp_path / "words.onnx").write_text("hi")
    with pytest.raises(baffle.BaffleError, match=r"words\.onnx cannot be read as an ONNX model: it has no graph"):
        fit(tmp_path / "b", tmp_path / "words.onnx", shared(x, y), None)
