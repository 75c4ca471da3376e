"""Models that came as ONNX, with trained weights inside: ordinary ONNX, which any runtime takes."""

from glob import escape
from hashlib import sha256
from pathlib import Path

from onnx import ModelProto, numpy_helper

from baffle.core.arrays import F32
from baffle.errors import ModelError
from baffle.runtime.onnx.foreign import graph_from_file
from baffle.runtime.onnx.graph import replace_all
from baffle.runtime.onnx.model_file import computing, read_model
from baffle.runtime.onnx.model_folder import LOGITS, MODEL, WEIGHT, Manifest, read_manifest


def require_file(path: Path, manifest: Manifest) -> None:
    """Refuse an ONNX file other than the one that an exported graph was made of. Its trained weights may differ."""
    trained = {tensor.name for tensor in manifest.weights}
    frozen = [escape(tensor.name) for tensor in read_model(path).graph.initializer if tensor.name not in trained]
    try:
        made = graph_from_file(path, frozen, manifest.shape, manifest.loss).to_bytes()
    except ModelError:
        made = b""
    if sha256(made).hexdigest() != manifest.model_sha256:
        raise ModelError(
            f"model: {path} is not the run's model, but another graph; give the one that the run began with"
        )


def file_with_weights(path: Path, manifest: Manifest, weights: F32) -> ModelProto:
    """The model in an ONNX file, as it is but for its weights. The graph of the manifest was made of it."""
    require_file(path, manifest)
    model, trained = read_model(path), manifest.split(weights)
    for tensor in model.graph.initializer:
        if tensor.name in trained:
            kind = numpy_helper.to_array(tensor).dtype
            tensor.CopyFrom(numpy_helper.from_array(trained[tensor.name].astype(kind), tensor.name))
    return model


def graph_with_weights(folder: Path, weights: F32) -> ModelProto:
    """The graph in an exported folder with weights inside: from samples, `x` (or `x/…` for each of several
    arrays), to outputs, `logits`."""
    manifest, model = read_manifest(folder), computing(read_model(folder / MODEL), [LOGITS])
    trained = manifest.split(weights)
    model.graph.initializer.extend(numpy_helper.from_array(values, WEIGHT + name) for name, values in trained.items())
    samples = {wanted.in_graph for wanted in manifest.arrays}
    replace_all(model.graph.input, [value for value in model.graph.input if value.name in samples])
    return model
