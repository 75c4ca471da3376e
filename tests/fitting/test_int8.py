"""Models with weights of integers through `baffle.fit`: what trains, what stays, and what comes back."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, load, numpy_helper, save
from onnx.checker import check_model

import baffle
from baffle.core.samples import Array
from baffle.data.sources import load as load_data
from baffle.fitting.fit import SIGMA_ROUNDED
from baffle.plan import Plan
from baffle.runtime.onnx.foreign import graph_from_file
from baffle.runtime.onnx.model_folder import read_manifest
from baffle.runtime.onnx.quantised import with_factors, with_float_head, without_factors
from tests.fitting.test_fit import fit, shared
from tests.support.command_line import Cli, refused
from tests.support.int8_nets import BIASES, FORMS, NUMBERS, SIZES, answers, floats, head_of_two, int8, integers
from tests.support.onnx_nets import Net

Digits = tuple[tuple[Array, Array], tuple[Array, Array]]

INTEGER_HEADS = [form for form in FORMS if form != "float head"]
STATIC = ["QDQ", "QOperator"]
pytestmark = pytest.mark.filterwarnings("ignore:probe.sigma")  # nets of random weights are steep
QUICK = {"update.rate": 0.1, "update.ema": 0.5}


@pytest.fixture(scope="module")
def digits() -> Digits:
    source = load_data("digits")
    parts = [part.batch(np.arange(count)) for part, count in ((source.train, 600), (source.test, 300))]
    return (parts[0].x, parts[0].y), (parts[1].x, parts[1].y)


def right(outputs: Array, y: Array) -> float:
    return float(np.mean(outputs.argmax(1) == y))


@pytest.mark.parametrize("form", FORMS)
def test_the_head_trains_as_floats_and_comes_back_as_floats_or_integers(
    tmp_path: Path, digits: Digits, form: str
) -> None:
    (x, y), test = digits
    theirs = int8(tmp_path / "theirs.onnx", form, x, softmax=form == "QOperator")
    run = fit(tmp_path, theirs, shared(x, y), test, 12, train="head", plan=QUICK)
    assert run["n_weights"] == SIZES["last"] + 10
    assert run.plan.probe.head == "exact"
    assert run["test_accuracy"] > 0.5  # chance is a tenth
    check_model(run.model, full_check=True)
    alone = answers(run.model, test[0])
    np.testing.assert_array_equal(alone.argmax(1), run.predict(test[0]).argmax(1))
    near = 1e-6 if form in [*STATIC, "float head"] else 0.01  # dynamic scales are those of a whole batch
    assert right(alone, test[1]) == pytest.approx(run["test_accuracy"], abs=near)
    was, now = integers(load(theirs)), integers(run.model)
    assert now.items() <= was.items()  # everything else stays as it was
    assert sum(map(len, now.values())) > SIZES["second"]
    again = run.restore(theirs, int8=True)
    check_model(again, full_check=True)
    assert form == "float head" or sum(map(len, integers(again).values())) >= sum(map(len, now.values())) + 160
    assert right(answers(again, test[0]), test[1]) == pytest.approx(run["test_accuracy"], abs=0.03)
    resumed = baffle.resume(run.path, ["rounds=13"], model=theirs, clients=shared(x, y), test=test)
    assert resumed["rounds"] == 13


@pytest.mark.parametrize("form", INTEGER_HEADS)
def test_a_head_as_floats_has_the_numbers_of_its_integers(tmp_path: Path, digits: Digits, form: str) -> None:
    (x, _), _ = digits
    theirs = load(int8(tmp_path / "theirs.onnx", form, x))
    alike = with_float_head(theirs, theirs.graph.output[0].name)
    logits, rounded = answers(alike, x), answers(theirs, x)
    assert np.abs(logits - rounded).mean() < 0.02 * logits.std()  # activations and outputs are not rounded
    floats = {tensor.name: numpy_helper.to_array(tensor) for tensor in alike.graph.initializer}
    original = next(t for t in load(tmp_path / "floats.onnx").graph.initializer if t.name == "last")
    head = floats["last"] if floats["last"].shape == (10, 16) else floats["last"].T
    np.testing.assert_allclose(head, numpy_helper.to_array(original), atol=0.02)
    assert "last_quantized" not in floats


@pytest.mark.parametrize("form", [*INTEGER_HEADS, "float head"])
def test_scales_train_and_become_part_of_the_file(tmp_path: Path, digits: Digits, form: str) -> None:
    (x, y), test = digits
    theirs = int8(tmp_path / "theirs.onnx", form, x)
    plan = {"probe.sigma": 0.03, "update.rate": 0.02, "update.ema": 0.0}
    run = fit(tmp_path, theirs, shared(x, y), test, 6, train=["scales"], plan=plan)
    graph = graph_from_file(theirs, train=["scales"])
    assert run["n_weights"] == sum(values.size for values in graph.weights.values())
    assert all(np.all(values == 1) for values in graph.weights.values())
    was, now = load(theirs), run.model
    check_model(now, full_check=True)
    assert [node.op_type for node in now.graph.node] == [node.op_type for node in was.graph.node]
    changed = {
        before.name
        for before, after in zip(was.graph.initializer, now.graph.initializer, strict=True)
        if before.name != after.name or not np.array_equal(numpy_helper.to_array(before), numpy_helper.to_array(after))
    }
    assert {f"{name.removesuffix('/factor')}" for name in graph.weights} <= changed
    assert all(name.endswith("_scale") for name in changed)
    assert integers(now) == integers(was)
    assert right(answers(now, test[0]), test[1]) == pytest.approx(run["test_accuracy"], abs=0.02)
    np.testing.assert_allclose(answers(now, x), run.predict(x), atol=0.02 * np.abs(run.predict(x)).max())


def test_floats_beside_integers_train_and_a_fit_says_which(
    tmp_path: Path,
    digits: Digits,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (x, y), _ = digits
    plan = {"rounds": 1, "probe.k": 8, "probe.sigma": 0.03}
    theirs = int8(tmp_path / "theirs.onnx", "dynamic, by channel", x)
    run = baffle.fit(theirs, shared(x, y), plan=plan, out=tmp_path / "a")
    assert run["n_weights"] == BIASES  # and no scales, although they are vectors
    said = capsys.readouterr().out
    assert f"{BIASES} of {NUMBERS} numbers train: bias1, bias2, bias3\n" in said
    assert "the last layer is probed like the others" in said
    baffle.fit(theirs, shared(x, y), plan=plan, out=tmp_path / "b", train=["bias2", "head"])
    assert f"186 of {NUMBERS} numbers train: bias2, bias3, last\n" in capsys.readouterr().out
    baffle.fit(theirs, shared(x, y), plan=plan, out=tmp_path / "c", train=["head", "scales"])
    assert f"187 of {NUMBERS + 17} numbers train: bias3, last, first_scale/factor, second_" in capsys.readouterr().out
    baffle.fit(floats(tmp_path / "all.onnx"), shared(x, y), plan=plan, out=tmp_path / "d", train="head")
    assert f"170 of {NUMBERS} numbers train: last, bias3\n" in capsys.readouterr().out


@pytest.mark.parametrize("form", STATIC)
def test_a_file_without_floats_says_what_can_be_trained(tmp_path: Path, digits: Digits, form: str, cli: Cli) -> None:
    (x, y), _ = digits
    theirs = int8(tmp_path / "theirs.onnx", form, x)
    words = ["are integers", 'train="head"', 'train="scales"', "--train head"]
    with pytest.raises(baffle.BaffleError) as caught:
        fit(tmp_path, theirs, shared(x, y), None)
    assert all(part in str(caught.value) for part in words)
    refused(cli("export", "--onnx", theirs, "--out", tmp_path / "a"), *words)
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "run" / "plan.toml").exists()


def test_a_file_without_scales_or_with_another_end_is_refused(tmp_path: Path, digits: Digits) -> None:
    (x, y), _ = digits
    with pytest.raises(baffle.BaffleError, match="no scales"):
        fit(tmp_path, floats(tmp_path / "floats.onnx"), shared(x, y), None, train="scales")
    with pytest.raises(baffle.BaffleError, match=r'no weight of the model fits .* "scales", "nonzero" or patterns'):
        fit(tmp_path, int8(tmp_path / "theirs.onnx", "QDQ", x), shared(x, y), None, train=["head", "other.*"])
    net = Net(1, 8, 8, opset=17)
    x8 = net.add(
        "DequantizeLinear", net.constant(np.ones((10, 1, 8, 8), np.int8)), net.constant(np.full(1, 0.1, np.float32))
    )
    net.saved(tmp_path / "conv.onnx", net.add("Flatten", net.add("Conv", "samples", x8)))
    with pytest.raises(baffle.BaffleError, match="the outputs come from Conv; expected a last linear layer"):
        fit(tmp_path, tmp_path / "conv.onnx", shared(x, y), None, train="head")


def test_an_export_says_what_trains_and_serves_a_plan(tmp_path: Path, digits: Digits, cli: Cli) -> None:
    (x, _), _ = digits
    theirs = int8(tmp_path / "theirs.onnx", "QDQ", x)
    made = cli("export", "--onnx", theirs, "--train", "head", "--head", "--out", tmp_path / "model")
    assert made.returncode == 0, made.stderr
    assert f"170 of {NUMBERS} numbers train" in made.stdout
    settings = ['task.model={name="onnx"}', f"run.model={tmp_path / 'model'}", "probe.head=exact", "rounds=3"]
    run = cli("run", "digits", *(word for text in settings for word in ("--set", text)), "--out", tmp_path / "run")
    assert run.returncode == 0, run.stderr
    trained = cli("export", tmp_path / "run", "--plain", "--out", tmp_path / "trained.onnx")
    assert trained.returncode == 0, trained.stderr
    assert sum(map(len, integers(load(tmp_path / "trained.onnx")).values())) > SIZES["second"]


def test_another_file_of_integers_gets_no_weights(tmp_path: Path, digits: Digits) -> None:
    (x, y), _ = digits
    theirs = int8(tmp_path / "theirs.onnx", "QDQ", x)
    run = fit(tmp_path, theirs, shared(x, y), None, 2, train="head")
    other = load(theirs)
    tensor = next(each for each in other.graph.initializer if each.name == "second_quantized")
    tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), tensor.name))
    save(other, theirs)
    with pytest.raises(baffle.BaffleError, match="is not the run's model"):
        run.restore(theirs)


def test_steps_below_the_rounding_of_activations_are_neither_taken_nor_advised(
    tmp_path: Path, digits: Digits, recwarn: pytest.WarningsRecorder
) -> None:
    """Between two roundings a loss looks smooth, but moves with what lies behind the last of them alone."""
    (x, y), _ = digits
    theirs = int8(tmp_path / "theirs.onnx", "dynamic, by channel", x)
    run = fit(tmp_path, theirs, shared(x, y), None, 1, train=["bias1", "bias2"])
    assert run.plan.probe.sigma == SIGMA_ROUNDED["layers"]
    assert not [warning for warning in recwarn if "use at most 0.0" in str(warning.message)]
    for sigma in (1e-3, 1e-5):
        with pytest.raises(baffle.BaffleError, match=r"would be rounding; .* use at least 0\.\d"):
            fit(tmp_path / "b", theirs, shared(x, y), None, train=["bias1", "bias2"], plan={"probe.sigma": sigma})
    whole = fit(tmp_path / "c", tmp_path / "floats.onnx", shared(x, y), None, 1)
    assert whole.plan.probe.sigma == Plan().probe.sigma
    assert baffle.costs(theirs, shared(x, y), train="bias2")["precision"]["noise"] < 0.5


@pytest.mark.parametrize("form", ["QOperator", "joined"])
def test_a_head_of_other_operators_trains(tmp_path: Path, digits: Digits, form: str) -> None:
    (x, y), test = digits
    theirs = head_of_two(tmp_path / "theirs.onnx", x, form)
    model = load(theirs)
    kinds = {node.op_type for node in model.graph.node}
    assert kinds >= {"QLinearMatMul", "QLinearAdd"} or "MatMulIntegerToFloat" in kinds
    logits = answers(with_float_head(model, model.graph.output[0].name), x)
    assert np.abs(logits - answers(model, x)).mean() < 0.02 * logits.std()
    run = fit(tmp_path, theirs, shared(x, y), test, 6, train="head", plan=QUICK)
    assert run["n_weights"] == 640 + 10 * (form == "QOperator")
    assert right(answers(run.model, test[0]), test[1]) == pytest.approx(run["test_accuracy"], abs=1e-6)
    assert "last_quantized" in integers(model).keys() - integers(run.model).keys()


def test_a_graph_that_goes_in_circles_is_refused(tmp_path: Path) -> None:
    model = load(floats(tmp_path / "floats.onnx"))
    model.graph.node.append(helper.make_node("Identity", ["round"], ["about"]))
    model.graph.node.append(helper.make_node("Identity", ["about"], ["round"]))
    with pytest.raises(baffle.BaffleError, match="no linear layer nearby"):
        with_float_head(model, "round")


def test_short_trials_choose_a_step_above_the_rounding(tmp_path: Path, digits: Digits) -> None:
    (x, y), _ = digits
    theirs = int8(tmp_path / "theirs.onnx", "dynamic, by channel", x)
    plan = {"rounds": 6, "probe.k": 8, "federation.batch": 8, "probe.sigma": 0.1}
    tuned = baffle.tuned(theirs, shared(x, y), train=["bias1", "bias2"], plan=plan, progress=False)
    assert 0.003 < tuned.plan.probe.sigma < 0.5


def test_the_command_line_exports_integers_beside_floats(tmp_path: Path, digits: Digits, cli: Cli) -> None:
    (x, _), _ = digits
    theirs, model, integer = int8(tmp_path / "theirs.onnx", "QDQ", x), tmp_path / "model", tmp_path / "integer"
    export = partial(cli, "export", "--json", "--onnx")
    assert export(tmp_path / "floats.onnx", "--train", "head", "--head", "--out", model).returncode == 0
    refused(export(theirs, "--beside", model, "--head", "--out", integer), "leave out the rest but --output")
    made = export(theirs, "--beside", model, "--out", integer)
    assert made.returncode == 0, made.stderr
    floats, integers = read_manifest(model), json.loads(made.stdout)
    assert integers["instead_of"] == floats.model_sha256 != integers["model_sha256"]
    assert (integers["weights_sha256"], integers["n_weights"]) == (floats.weights_sha256, 170)
    assert "instead_of" not in json.loads((model / "manifest.json").read_text())


@pytest.mark.parametrize("form", FORMS)
def test_factors_do_the_same_inside_the_scales(tmp_path: Path, digits: Digits, form: str) -> None:
    """Also to a bias in int32, which stays in units of the scales of what it is added to."""
    (x, _), _ = digits
    theirs, random = int8(tmp_path / "theirs.onnx", form, x), np.random.default_rng(0)
    model = with_factors(load(theirs))
    for tensor in model.graph.initializer:
        if tensor.name.endswith("/factor"):
            drawn = random.uniform(0.5, 1.5, tuple(tensor.dims)).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(drawn, tensor.name))
    folded = without_factors(model)
    beside, inside = answers(model, x), answers(folded, x)
    assert np.abs(beside - inside).mean() < 0.01 * beside.std()
    assert np.abs(beside - answers(load(theirs), x)).mean() > 0.1 * beside.std()
    was, now = ({t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (load(theirs), folded))
    for bias, weight in (("bias1", "first"), ("bias2", "second")):
        if form in ("QDQ", "float head"):
            name, other = f"{bias}_quantized_scale", f"{weight}_scale"
            np.testing.assert_allclose(now[name] / was[name], now[other] / was[other], rtol=1e-5)
            assert np.ptp(now[name] / was[name]) > 0.1
