"""Exports: token ids are not rounded, the files restore a whole module, and a failure leaves nothing behind."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from baffle import export
from baffle.core.ports import Batch
from baffle.data.sources import load as load_source
from baffle.errors import ModelError
from baffle.export import export_onnx, export_plan, export_run, graph_from_folder
from baffle.plan import Plan
from baffle.runtime.onnx import model_folder
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import AVERAGE, MODEL, WEIGHTS, read_manifest, read_weights
from baffle.runtime.onnx.tensor_file import read_tensors
from baffle.runtime.torch.loss import TorchLoss, weights_of
from baffle.simulation import simulate
from tests.support import tokens
from tests.support.command_line import Cli, refused
from tests.support.modules import Made
from tests.support.onnx_nets import Net, export_module


class Whole(nn.Module):
    """Everything that a state dict can hold: trained, tied and frozen weights, running statistics, unusual types."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.inner = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.inner.weight
        self.head = nn.Linear(8, 3)
        self.register_buffer("offset", torch.randn(8).bfloat16())
        self.register_buffer("on", torch.tensor([True, False, True]))
        self.register_buffer("third", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.offset, Tensor)
        x = self.norm(self.frozen(x)) + self.offset.float()
        output: Tensor = self.head(self.again(torch.relu(self.inner(x))))
        return output


def _trained(seed: int) -> Whole:
    torch.manual_seed(seed)
    module = Whole()
    for _ in range(3):
        module(torch.randn(16, 6) * 2 + 1)  # moves the running statistics
    return module.eval()


def _restored(path: Path, module: nn.Module) -> nn.Module:
    """The module with all tensors of a file; an error if the names in the file are others."""
    of_torch = {name: torch.from_numpy(values) for name, values in read_tensors(path).items()}
    state = module.state_dict()
    for name, values in of_torch.items():
        if state[name].dtype == torch.bfloat16:
            of_torch[name] = values.view(torch.bfloat16)
    assert {name: values.dtype for name, values in of_torch.items()} == {n: v.dtype for n, v in state.items()}
    module.load_state_dict(of_torch, strict=True)
    return module.eval()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    export_module(_trained(0), (6,), folder)
    return folder


def test_the_weights_file_restores_a_whole_module(whole: Path) -> None:
    module, manifest = _trained(0), read_manifest(whole)
    other = _restored(whole / WEIGHTS, _trained(1))
    x = torch.randn(5, 6)
    assert torch.equal(other(x), module(x))
    for name, values in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], values), name
    assert int(other.get_buffer("norm.num_batches_tracked")) == 3
    assert [tensor.name for tensor in manifest.weights] == [n for n, p in module.named_parameters() if p.requires_grad]
    assert "frozen.weight" not in {tensor.name for tensor in manifest.weights}
    np.testing.assert_array_equal(read_weights(whole / WEIGHTS, manifest), weights_of(module))


def frozen_front() -> nn.Module:
    """A frozen front with running statistics, followed by two layers that share a weight."""
    torch.manual_seed(3)
    front = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10)).requires_grad_(False)
    front(torch.randn(20, 64))
    layers = nn.Linear(10, 10), nn.Linear(10, 10)
    layers[1].weight = layers[0].weight
    return nn.Sequential(*front, Made(lambda net, x: net.second(net.first(x)), first=layers[0], second=layers[1]))


def test_a_run_behind_a_frozen_backbone_is_exported_whole(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    plan = tiny(f'task.model={{name="custom", factory="{__name__}:frozen_front"}}', "rounds=2")
    simulate(plan, tmp_path / "run")
    manifest = export_run(tmp_path / "run", tmp_path / "model", own_code=True)
    assert [tensor.name for tensor in manifest.weights] == ["3.first.weight", "3.first.bias", "3.second.bias"]
    batch = Batch(np.random.default_rng(0).random((6, 1, 8, 8), np.float32), np.arange(6))
    for file in (WEIGHTS, AVERAGE):
        weights = read_weights(tmp_path / "model" / file, manifest)
        module = _restored(tmp_path / "model" / file, frozen_front())
        assert (weights_of(module) == weights).all()
        assert (weights_of(module) != weights_of(frozen_front())).any()
        with torch.inference_mode():
            expected = module(torch.from_numpy(batch.x)).numpy()
        np.testing.assert_allclose(OnnxLoss.in_folder(tmp_path / "model").outputs(weights, batch), expected, atol=1e-5)


def test_a_model_that_is_exported_again_keeps_its_frozen_parts(whole: Path, tmp_path: Path) -> None:
    """Weights that were trained meanwhile change under all of their names."""
    weights = np.arange(read_manifest(whole).n_weights, dtype=np.float32)
    export.write_export(tmp_path / "again", graph_from_folder(whole), weights, rounds=4)
    module = _restored(tmp_path / "again" / WEIGHTS, _trained(1))
    assert (weights_of(module) == weights).all()
    assert torch.equal(module.get_parameter("frozen.weight"), _trained(0).frozen.weight)


def test_a_buffer_that_a_file_cannot_hold_is_named(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 3))
    module.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ModelError, match=r"odd is torch\.complex128.*persistent=False"):
        export_module(module, (6,), tmp_path / "model")


@pytest.mark.parametrize("model", [tokens.model, pytest.param(tokens.frozen_model, marks=pytest.mark.slow)])
def test_token_ids_reach_a_simulated_model_unrounded(
    model: Callable[[], nn.Module], tiny: Callable[..., Plan], tmp_path: Path
) -> None:
    tokens.seen.clear()
    plan = tiny(
        f'task.data="{tokens.__name__}:data"',
        f'task.model={{name="custom", factory="{tokens.__name__}:{model.__name__}"}}',
        'probe.precision="bfloat16"',
        "probe.sigma=0.05",
        "rounds=2",
    )
    simulate(plan, tmp_path / "run")
    assert tokens.seen == set(tokens.ROUNDED)
    manifest = export_run(tmp_path / "run", tmp_path / "model", own_code=True)
    assert (manifest.input_dtype, manifest.input_shape) == ("int64", (tokens.LENGTH,))
    weights = read_weights(tmp_path / "model" / WEIGHTS, manifest)
    batch = tokens.data().test.batch(np.arange(20))
    expected = TorchLoss(_restored(tmp_path / "model" / WEIGHTS, model())).on(batch)(weights)
    assert OnnxLoss.in_folder(tmp_path / "model", micro_batch=4).on(batch)(weights) == pytest.approx(expected, abs=1e-6)
    onnx_plan = tiny(
        f'task.data="{tokens.__name__}:data"', 'task.model={name="onnx"}', f"run.model={tmp_path / 'model'}", "rounds=2"
    )
    simulate(onnx_plan, tmp_path / "onnx-run")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A single layer as ONNX, which is quick to export."""
    net = Net(6)
    return net.saved(tmp_path_factory.mktemp("onnx") / "layer.onnx", net.add("MatMul", "samples", net.weight(6, 3)))


def _fails_in_the_test_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, *_: Any) -> None:
        assert (folder / MODEL).exists()
        raise ModelError(f"ONNX Runtime refuses {folder / MODEL}")

    monkeypatch.setattr(export, "_try_out", fail)


def _is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("Ctrl-C")

    monkeypatch.setattr(model_folder, "write_manifest", interrupt)


def _has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, *_: Any) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "write_tensors", write)


def _cannot_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == MODEL:
            return rename(self, target)
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)


@pytest.mark.parametrize("existed", [False, True], ids=["new", "an empty folder"])
@pytest.mark.parametrize(
    ("breaks", "error", "says"),
    [
        (_fails_in_the_test_run, ModelError, f"refuses .*there/model/{MODEL}"),
        (_is_interrupted, KeyboardInterrupt, "Ctrl-C"),
        (_has_no_room, ModelError, "No space left on device; give another --out"),
        (_cannot_be_moved, ModelError, "Permission denied; give another --out"),
    ],
)
def test_an_export_that_fails_leaves_nothing_behind(
    breaks: Callable[[pytest.MonkeyPatch], None],
    error: type[BaseException],
    says: str,
    existed: bool,
    classifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "not" / "there" / "model"
    if existed:
        out.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    breaks(monkeypatch)
    with pytest.raises(error, match=says):
        export_onnx(classifier, out)
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.undo()
    export_onnx(classifier, out)
    assert read_manifest(out).n_weights == 18


def test_an_empty_folder_stays_the_same_folder(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is the working directory, which cannot be replaced by a rename."""
    tmp_path.chmod(0o750)
    before = tmp_path.stat()
    monkeypatch.chdir(tmp_path)
    export_onnx(classifier, Path())
    after = tmp_path.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["manifest.json", MODEL, WEIGHTS]


def test_samples_of_small_integers_are_refused_with_a_remedy(
    tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "tokens", lambda count: np.ones((count, 5), np.uint8))
    settings = [
        f'task.data="{tokens.__name__}:data"',
        f'task.model={{name="custom", factory="{__name__}:float_bytes"}}',
    ]
    with pytest.raises(ModelError, match="int64 or int32 samples, got uint8"):
        export_plan(str(tiny_toml), tmp_path / "model", settings)


def float_bytes() -> nn.Module:
    """A linear layer that takes bytes."""
    return Made(lambda net, x: net.inner(x.float()), inner=nn.Linear(tokens.LENGTH, tokens.CLASSES))


def test_a_graph_for_one_batch_size_is_refused_in_plain_words(tmp_path: Path) -> None:
    net = Net(6)
    path = net.saved(tmp_path / "net.onnx", net.classify(net.add("Reshape", "samples", net.constant([1, 6])), 6))
    with pytest.raises(ModelError, match=r"refuses a forward pass: Reshape: The input tensor cannot be reshaped .*3,6"):
        export_onnx(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("model", ['{name="softmax"}', '{name="lenet", channels=[2, 4], head="flatten"}'])
def test_a_plain_export_gives_the_reported_accuracy_in_onnx_runtime_alone(
    tiny: Callable[..., Plan], tmp_path: Path, cli: Cli, model: str
) -> None:
    summary = simulate(tiny(f"task.model={model}", "update.ema=0.5", "rounds=4"), tmp_path / "run")
    done = cli("export", tmp_path / "run", "--plain", "--out", tmp_path / "trained.onnx")
    assert done.returncode == 0
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    test = load_source("digits").test
    batch = test.batch(np.arange(len(test)))
    (logits,) = session.run(None, {"x": batch.x})
    assert np.mean(np.asarray(logits).argmax(1) == batch.y) == pytest.approx(summary["test_accuracy"], abs=1e-6)
    again = cli("export", tmp_path / "run", "--plain", "--out", tmp_path / "trained.onnx")
    refused(again, "trained.onnx exists; give another --out")
    refused(cli("export", "digits", "--plain", "--out", tmp_path / "a.onnx"), "--plain exports a trained model")
