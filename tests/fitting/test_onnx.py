"""Models that come as ONNX through `baffle.fit`: without PyTorch, whole or in part, with any loss."""

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, load, numpy_helper, save
from onnx.checker import check_model
from onnx.parser import parse_model

import baffle
from baffle.client.worker import Worker
from baffle.core.samples import Array
from baffle.export import export_onnx
from baffle.network.member.edge import edge_equipment
from baffle.runtime.onnx.model_folder import read_exported, read_manifest
from baffle.task.load import Runtimes, load_task
from tests.fitting.test_fit import fit, require_accuracy, shared
from tests.support.command_line import Cli, refused

WORDS, WIDTH, CLASSES = 12, 4, 3


def saved(path: Path, graph: str) -> Path:
    """Another tool's classifier of token ids: this graph, with a table of words and a linear layer."""
    model = parse_model(f"<ir_version: 8, opset_import: ['' : 17]> theirs {graph}".replace("'", '"'))
    for node in model.graph.node:  # the parser takes no dots in names
        node.input[:] = [name.replace("_", ".") for name in node.input]
    random = np.random.default_rng(0)
    table, head = random.standard_normal((WORDS, WIDTH)) / 2, random.standard_normal((WIDTH, CLASSES)) / 2
    tensors = {"table.weight": table, "head.weight": head, "head.bias": np.zeros(CLASSES)}
    for name, values in tensors.items():
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    save(model, path)
    return path


def bag_of_words(path: Path, *, softmax: bool = False) -> Path:
    """A table, a mean over six tokens, and a linear layer."""
    end = "logits = Gemm(mean, head_weight, head_bias) out = Softmax(logits)"
    return saved(
        path,
        f"""(int64[batch, 6] ids) => (float[batch, {CLASSES}] out) {{
            found = Gather(table_weight, ids)
            mean = ReduceMean<axes = [1], keepdims = 0>(found)
            {end if softmax else "out = Gemm(mean, head_weight, head_bias)"}
        }}""",
    )


def sentences(count: int, seed: int = 0) -> tuple[Array, Array]:
    ids = np.random.default_rng(seed).integers(0, WORDS, (count, 6))
    return ids, ids.sum(1) // 12 % CLASSES


@pytest.mark.parametrize(("train", "weights"), [("all", 63), ("last", 15), ("table.*", 48)])
def test_a_foreign_graph_of_token_ids_trains(tmp_path: Path, train: str, weights: int) -> None:
    (x, y), test = sentences(80), sentences(60, 1)
    run = fit(tmp_path, bag_of_words(tmp_path / "theirs.onnx"), shared(x, y), test, train=train)
    assert run["n_weights"] == weights
    require_accuracy(run, *test)
    again = baffle.resume(run.path, ["rounds=6"], model=tmp_path / "theirs.onnx", clients=shared(x, y), test=test)
    assert again["rounds"] == 6


def two_outputs(path: Path, *, label: bool) -> Path:
    """The bag of words with its label as the first output, as scikit-learn's classifiers have it, or with a second
    output of floats."""
    kind, first = ("int64[batch]", "ArgMax<axis = 1, keepdims = 0>(out)") if label else ("float[batch, 4]", "Neg(mean)")
    return saved(
        path,
        f"""(int64[batch, 6] ids) => ({kind} first, float[batch, {CLASSES}] out) {{
            found = Gather(table_weight, ids)
            mean = ReduceMean<axes = [1], keepdims = 0>(found)
            out = Gemm(mean, head_weight, head_bias)
            first = {first}
        }}""",
    )


def test_beside_a_label_the_output_of_floats_is_trained(tmp_path: Path) -> None:
    (x, y), test, theirs = sentences(80), sentences(60, 1), two_outputs(tmp_path / "theirs.onnx", label=True)
    run = fit(tmp_path, theirs, shared(x, y), test)
    alone = fit(tmp_path / "alone", bag_of_words(tmp_path / "alone.onnx"), shared(x, y), test)
    assert run["weights_sha256"] == alone["weights_sha256"]
    labels = answers(run.model, ids=test[0])  # the first output of the file as it was given
    assert np.mean(labels == test[1]) == pytest.approx(run["test_accuracy"], abs=1e-6)


def test_one_of_several_outputs_is_chosen_by_name(tmp_path: Path, cli: Cli) -> None:
    (x, y), theirs = sentences(80), two_outputs(tmp_path / "theirs.onnx", label=False)
    words = r"one output of floats, got 2 \(first, out\); choose one with --output NAME \(in Python"
    with pytest.raises(baffle.BaffleError, match=words):
        fit(tmp_path, theirs, shared(x, y), None)
    refused(
        cli("export", "--onnx", theirs, "--output", "last", "--out", tmp_path / "a"), "no such output", "first, out"
    )
    assert cli("export", "--onnx", theirs, "--output", "out", "--out", tmp_path / "a").returncode == 0
    run = fit(tmp_path, tmp_path / "a", shared(x, y), (x, y))
    require_accuracy(run, x, y)
    assert [value.name for value in run.restore(theirs).graph.output] == ["first", "out"]


def answers(model: ModelProto, **inputs: Array) -> Array:
    """The outputs of ONNX Runtime for a model, without BAFFLE."""
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
    np.testing.assert_allclose(logits, require_accuracy(opened, *test), rtol=1e-5)
    np.testing.assert_allclose(logits, run.predict(test[0]), rtol=1e-6)


def _tensors(model: ModelProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def test_an_exported_folder_comes_back_as_one_model_and_a_graph_of_half_floats_in_half_floats(tmp_path: Path) -> None:
    x, y = sentences(80)
    export_onnx(bag_of_words(tmp_path / "theirs.onnx"), tmp_path / "folder")
    run = fit(tmp_path / "a", tmp_path / "folder", shared(x, y), (x, y))
    np.testing.assert_allclose(answers(run.model, x=x), run.predict(x), rtol=1e-5)
    assert [value.name for value in run.model.graph.input] == ["x"]
    theirs = load(tmp_path / "theirs.onnx")
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
    whole = fit(tmp_path / "b", bag_of_words(tmp_path / "b.onnx"), shared(x, y), None, rounds=2)
    with pytest.raises(baffle.BaffleError, match="this is not the run's model, but another graph"):
        baffle.resume(run.path, ["rounds=4"], model=whole.plan.run.model, clients=shared(x, y))
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
    return saved(
        path,
        f"""(int64[batch, tokens] ids, float[batch, tokens] mask, float[batch] scale) => (float[batch, {CLASSES}] out)
        <int64[1] axis = {{2}}, int64[1] one = {{1}}> {{
            found = Gather(table_weight, ids)
            column = Unsqueeze(mask, axis)
            kept = Mul(found, column)
            mean = ReduceMean<axes = [1], keepdims = 0>(kept)
            factor = Unsqueeze(scale, one)
            scaled = Mul(mean, factor)
            out = Gemm(scaled, head_weight, head_bias)
        }}""",
    )


def masked_sentences(count: int) -> tuple[dict[str, Array], Array]:
    ids, y = sentences(count)
    random = np.random.default_rng(1)
    mask, scale = random.integers(0, 2, ids.shape).astype(np.float32), random.random(count).astype(np.float32) + 0.5
    return {"mask": mask, "ids": ids, "scale": scale}, y


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_a_graph_with_several_inputs_trains(tmp_path: Path, form: str) -> None:
    by_name, y = masked_sentences(80)
    x: Any = by_name if form == "dict" else (by_name["ids"], by_name["mask"], by_name["scale"])
    theirs, clients = masked_bag(tmp_path / "theirs.onnx"), shared(x, y)
    run = fit(tmp_path, theirs, clients, (x, y))
    assert run["n_weights"] == 63
    said = answers(run.model, **by_name)
    assert np.mean(said.argmax(1) == y) == pytest.approx(run["test_accuracy"], abs=1e-6)
    np.testing.assert_allclose(said, run.predict(x), rtol=1e-4, atol=1e-6)
    assert run.metrics["loss"][-1] < run.metrics["loss"][0]
    again = baffle.resume(run.path, ["rounds=6"], model=theirs, clients=clients, test=(x, y))
    assert again["rounds"] == 6
    opened = baffle.open(run.path)
    in_folder = {f"x/{name}": array for name, array in by_name.items()}
    np.testing.assert_allclose(answers(opened.model, **in_folder), opened.predict(x), rtol=1e-4, atol=1e-6)


def test_the_order_and_the_names_of_several_inputs_matter(tmp_path: Path) -> None:
    x, y = masked_sentences(80)
    theirs = masked_bag(tmp_path / "theirs.onnx")
    ids, mask, scale = x["ids"], x["mask"], x["scale"]
    wrong: dict[str, Any] = {
        "the model has no input tokens; its inputs are ids, mask, scale": {"tokens": ids, "mask": mask, "scale": scale},
        r"takes samples of ids of shape \(6,\), mask .* scale of shape \(\)": {"ids": ids, "mask": mask},
        "an array for each of the inputs ids, mask, scale, got 2": (ids, mask),
        "an array for each of the inputs ids, mask, scale, got 1": ids,
        "the model takes int64 ids, got float32": (mask, ids, scale),
    }
    for words, samples in wrong.items():
        with pytest.raises(baffle.BaffleError, match=words):
            fit(tmp_path, theirs, [(samples, y)], None, rounds=2)


def test_a_manifest_whose_inputs_contradict_it_is_refused(tmp_path: Path) -> None:
    """The liar: an untrusted folder, with arrays that are named twice, not at all, or in the old format."""
    shapes: dict[str, tuple[int, ...]] = {"ids": (6,), "mask": (6,)}
    folder = tmp_path / "folder"
    export_onnx(masked_bag(tmp_path / "theirs.onnx"), folder, shape=shapes)
    sound = json.loads((folder / "manifest.json").read_text())
    ids, mask, scale = sound["inputs"]
    assert read_manifest(folder).shape == {**shapes, "scale": ()}
    names = [[], [ids, mask, {**scale, "name": "ids"}], [ids, mask, {**scale, "name": ""}]]
    for lie in ({"format": "baffle/model/1"}, *({"inputs": inputs} for inputs in names)):
        (folder / "manifest.json").write_text(json.dumps(sound | lie))
        with pytest.raises(baffle.BaffleError, match="its inputs do not suit the format"):
            read_manifest(folder)
    x, y = masked_sentences(20)
    for inputs in ([mask, ids, scale], [ids, mask, {**scale, "shape": [2**62]}]):
        (folder / "manifest.json").write_text(json.dumps(sound | {"inputs": inputs}))
        with pytest.raises(baffle.BaffleError, match=r"inputs|takes|refuses"):
            fit(tmp_path, folder, [((x["ids"], x["mask"], x["scale"]), y)], None, rounds=1)


def test_an_export_of_several_inputs_serves_a_plan(
    tmp_path: Path, cli: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, folder = masked_bag(tmp_path / "theirs.onnx"), tmp_path / "folder"
    export = partial(cli, "export", "--onnx", str(theirs), "--out", str(folder))
    assert "the input ids leaves the size of a sample open" in export().stderr
    assert export("--shape", "6", "--shape", "6").returncode == 2
    assert "the model has no input tokens; its inputs are ids, mask, scale" in export("--shape", "tokens=6").stderr
    made = export("--shape", "ids=6", "--shape", "mask=6")
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
    approved = [read_exported(folder).sha256]
    device = edge_equipment(run.plan, folder, 1, part=True, approved=approved).worker
    task = load_task(run.plan)
    here = Worker(1, run.plan.probe.k, device.trajectory, task.source.train, task.shares[1], Runtimes(task, 1).borrow)
    weights = task.initial_weights()
    ours, theirs_too = (worker.vector(0, weights).view(np.int32).astype(np.int64) for worker in (device, here))
    np.testing.assert_allclose(ours, theirs_too, rtol=1e-2, atol=1e-3 * np.abs(ours).max())  # in other micro-batches
    assert np.abs(ours).max() > 1000
    x, _ = masked_sentences(80)
    np.testing.assert_allclose(run.predict(x), answers(run.restore(theirs), **x), rtol=1e-4, atol=1e-6)


def test_a_loss_of_the_users_own_gets_arrays_and_a_refused_fit_leaves_nothing_in_its_way(tmp_path: Path) -> None:
    def share_wrong(outputs: Array, labels: Array) -> Array:
        assert isinstance(outputs, np.ndarray)
        return np.asarray(outputs.argmax(1) != labels, np.float64)

    x, y = sentences(80)
    theirs = bag_of_words(tmp_path / "theirs.onnx")
    with pytest.raises(baffle.BaffleError, match="y has class 9, but the model has outputs for 3"):
        fit(tmp_path, theirs, shared(x, np.where(y == 1, 9, y)), None, rounds=2)
    in_steps = {"probe.sigma": 0.3}  # the loss moves in steps
    run = fit(tmp_path, theirs, shared(x, y), (x, y), loss=share_wrong, metrics=["accuracy"], plan=in_steps)
    assert run.metrics["loss"].max() <= 1
    assert run["metrics"] == ["accuracy"]
    (tmp_path / "words.onnx").write_text("hi")
    with pytest.raises(baffle.BaffleError, match=r"words\.onnx cannot be read as an ONNX model: it has no graph"):
        fit(tmp_path / "b", tmp_path / "words.onnx", shared(x, y), None)


def test_a_graph_of_bytes_and_booleans_trains(tmp_path: Path) -> None:
    """Words as bytes, and a mask of booleans; numbers that a byte cannot hold are refused."""
    theirs = saved(
        tmp_path / "theirs.onnx",
        f"""(uint8[batch, 6] ids, bool[batch, 6] mask) => (float[batch, {CLASSES}] out) <int64[1] axis = {{2}}> {{
            numbers = Cast<to = 7>(ids)
            found = Gather(table_weight, numbers)
            kept = Cast<to = 1>(mask)
            column = Unsqueeze(kept, axis)
            words = Mul(found, column)
            mean = ReduceMean<axes = [1], keepdims = 0>(words)
            out = Gemm(mean, head_weight, head_bias)
        }}""",
    )
    ids, y = sentences(80)
    x = {"ids": ids.astype(np.uint8), "mask": ids != 0}
    run = fit(tmp_path, theirs, shared(x, y), (x, y))
    assert [wanted.dtype for wanted in read_manifest(Path(run.plan.run.model)).inputs] == ["uint8", "bool"]
    require_accuracy(run, x, y)
    np.testing.assert_allclose(answers(run.model, **x), run.predict(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(run.predict({**x, "ids": ids}), run.predict(x))
    for wrong in ({**x, "ids": ids + 256}, {**x, "mask": ids}, {**x, "ids": ids.astype(np.float32)}):
        with pytest.raises(baffle.BaffleError, match=r"the model takes (uint8 ids|bool mask), got"):
            run.predict(wrong)


@pytest.mark.parametrize("train", [["nonzero"], ["head", "nonzero"], ["table.*", "nonzero"]])
def test_a_pruned_model_keeps_its_zeros(tmp_path: Path, capsys: pytest.CaptureFixture[str], train: list[str]) -> None:
    (x, y), test = sentences(80), sentences(60, 1)
    theirs = bag_of_words(tmp_path / "theirs.onnx")
    model = load(theirs)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor).copy()
        if values.ndim == 2:
            values[np.indices(values.shape).sum(0) % 2 == 0] = 0
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    save(model, theirs)
    before = _tensors(model)
    plan = {"rounds": 4, "probe.k": 8}
    run = baffle.fit(theirs, shared(x, y), test, train=train, plan=plan, out=tmp_path / "run")
    trained = 24 * ("head" not in train) + (6 + 3) * ("table.*" not in train)
    assert f"{trained} of 63 numbers train" in capsys.readouterr().out
    assert run.plan.probe.head == ("probed" if "table.*" in train else "exact")
    after = _tensors(run.model)
    assert list(after) == list(before)
    changed = {name for name, values in before.items() if not np.array_equal(values, after[name])}
    assert changed == {"head.weight", "head.bias"} if "head" in train else {"table.weight"} <= changed
    for name in ("table.weight", "head.weight"):
        assert not after[name][before[name] == 0].any()
        if name in changed:
            assert np.all(after[name][before[name] != 0] != before[name][before[name] != 0])
    np.testing.assert_allclose(answers(run.model, ids=test[0]), require_accuracy(run, *test), rtol=1e-5, atol=1e-6)
    baffle.resume(run.path, ["rounds=5"], model=theirs, clients=shared(x, y), test=test)
