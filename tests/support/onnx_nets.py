"""ONNX models: as other tools write them, node by node with weights inside, and exported from modules."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import nn

from baffle.export import write_export
from baffle.runtime.onnx.from_module import graph_of
from baffle.runtime.onnx.model_folder import Manifest

KINDS = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}


class Net:
    """A model under construction. Weights are drawn from a fixed stream, so equal nets are equal."""

    def __init__(self, *shape: int, dtype: str = "float32", opset: int = 21) -> None:
        self._inputs = [helper.make_tensor_value_info("samples", KINDS[dtype], ("batch", *shape))]
        self._nodes = list[NodeProto]()
        self._tensors = list[TensorProto]()
        self._random = np.random.default_rng(0)
        self._opset = opset

    def input(self, name: str, *shape: int, dtype: str = "float32") -> str:
        self._inputs.append(helper.make_tensor_value_info(name, KINDS[dtype], ("batch", *shape)))
        return name

    def weight(self, *shape: int, name: str = "") -> str:
        values = self._random.normal(size=shape).astype(np.float32) * 0.5
        return self.constant(values, name or f"weight{len(self._tensors)}")

    def constant(self, values: NDArray[Any] | Sequence[int], name: str = "") -> str:
        name = name or f"constant{len(self._tensors)}"
        array = np.asarray(values, None if isinstance(values, np.ndarray) else np.int64)
        self._tensors.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{operator}{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def classify(self, x: str, width: int, classes: int = 4) -> str:
        """A last layer on everything, flattened."""
        return self.add("Gemm", self.add("Flatten", x), self.weight(width, classes), self.weight(classes))

    def saved(self, path: Path, output: str) -> Path:
        graph = helper.make_graph(
            self._nodes,
            "net",
            self._inputs,
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, ("batch", None))],
            self._tensors,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self._opset)], ir_version=10)
        onnx.checker.check_model(model)
        onnx.save(model, path)
        return path


def export_module(module: nn.Module, shape: tuple[int, ...], out: Path, dtype: str = "float32") -> Manifest:
    """Export a module with its present weights, for samples of this shape and type."""
    graph = graph_of(module, shape, np.dtype(dtype))
    return write_export(out, graph, graph.flat())
