"""A model from elsewhere: an ONNX file of any tool is fine-tuned on ONNX Runtime. PyTorch is not needed.

python examples/onnx_from_elsewhere.py

The file here is made with the `onnx` package and stands for one that you were given: a classifier of 8 × 8 images whose
first layer stays as it is, while its last one is trained on the digits.
"""

from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

import baffle
from baffle.data.handwriting import digits


def their_file(path: Path) -> Path:
    random = np.random.default_rng(0)
    weights = {
        "features.weight": random.normal(0, 1 / 8, (64, 128)),
        "features.bias": random.normal(0, 1, 128),
        "head.weight": np.zeros((128, 10)),
        "head.bias": np.zeros(10),
    }
    nodes = [
        helper.make_node("Flatten", ["image"], ["flat"]),
        helper.make_node("Gemm", ["flat", "features.weight", "features.bias"], ["linear"]),
        helper.make_node("Relu", ["linear"], ["features"]),
        helper.make_node("Gemm", ["features", "head.weight", "head.bias"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "theirs",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(values.astype(np.float32), name) for name, values in weights.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


source = digits()
train, test = (part.batch(np.arange(len(part))) for part in (source.train, source.test))
folder = Path(mkdtemp())
run = baffle.fit(
    their_file(folder / "theirs.onnx"),
    clients=(train.x, train.y),
    test=(test.x, test.y),
    train="head.*",
    plan={"rounds": 200, "federation.batch": 32, "update.rate": 0.02},
    out=folder / "run",
)
print(f"accuracy {run['test_accuracy']:.1%} with {run['n_weights']:,} weights trained; the rest is as it came")
save(run.model, folder / "trained.onnx")
print(f"{folder / 'trained.onnx'} is their file with the trained head, for any runtime of ONNX")
