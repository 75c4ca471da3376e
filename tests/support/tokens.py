"""A data set of token ids and a model that embeds them. The embedding records the ids that reach it."""

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from baffle import Dataset, Source
from baffle.core.arrays import I64

ROUNDED = (801, 887, 993)  # ids that bfloat16 rounds, to 800, 888 and 992

LENGTH, VOCABULARY, CLASSES = 5, 1000, 4

seen = set[int]()  # ids that reached an embedding


class Recording(nn.Embedding):
    """An embedding that notes what it is asked for, except while it is being exported."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            seen.update(x.flatten().tolist())
        return super().forward(x)


class Mean(nn.Module):
    """The mean over a sample's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def model() -> nn.Module:
    return nn.Sequential(Recording(VOCABULARY, 8), Mean(), nn.Linear(8, CLASSES))


def frozen_model() -> nn.Module:
    """The same, where only the last layer is trained."""
    module = model()
    module.get_submodule("0").requires_grad_(False)
    return module


def tokens(count: int) -> I64:
    """Samples that consist of the ids which bfloat16 rounds."""
    return np.random.default_rng(0).choice(ROUNDED, (count, LENGTH)).astype(np.int64)


def data() -> Source:
    x = tokens(60)
    y: I64 = np.arange(60) % CLASSES
    return Source(Dataset(x[:40], y[:40], lambda x: x), Dataset(x[40:], y[40:], lambda x: x), classes=CLASSES)


def write_graph(path: Path, *sizes: str | int, kind: int = TensorProto.INT64) -> None:
    """Write a classifier of tokens as another tool would make it. Its input has these sizes."""
    table = np.random.default_rng(0).normal(0, 1, (VOCABULARY, CLASSES)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("ReduceMean", ["rows"], ["logits"], axes=[1], keepdims=0),
    ]
    graph = helper.make_graph(
        *(nodes, "foreign", [helper.make_tensor_value_info("ids", kind, sizes)]),
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", CLASSES])],
        [numpy_helper.from_array(table, "table")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
