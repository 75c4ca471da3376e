"""From a module to an ONNX graph. The trained weights are inputs from the start, so the exporter cannot fold them."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from baffle.errors import ModelError
from baffle.runtime.onnx.graph import OnnxGraph, finished
from baffle.runtime.onnx.model_folder import Stored

SAMPLES = 2
"""Samples that a module is traced with. With a single one, the exporter could take the batch for a fixed size."""

TAG = "weight:"
"""Prefix of the weights' names in the exporter's graph, which has names of its own."""

INTEGERS = {"int64": torch.int64, "int32": torch.int32}
"""Types of integer samples that a graph can take."""

KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of types in a safetensors file."""

BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
"""Types that NumPy does not have, and those that hold their bits."""


class Stateless(nn.Module):
    """A module as a function of samples and weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.names = [name for name, weight in module.named_parameters() if weight.requires_grad]

    def forward(self, x: Tensor, *weights: Tensor) -> Tensor:
        output: Tensor = functional_call(self.module, dict(zip(self.names, weights, strict=True)), (x,))
        return output


def graph_of(module: nn.Module, shape: tuple[int, ...], dtype: np.dtype[Any]) -> OnnxGraph:
    """The graph of a module on samples of this shape and type, with the module's own weights. Frozen parts stay inside
    the graph."""
    integers = np.issubdtype(dtype, np.integer)
    if integers and dtype.name not in INTEGERS:
        raise ModelError(f"expected samples that are floats, int64 or int32, got {dtype}; convert them in the data set")
    traced_on = INTEGERS[dtype.name] if integers else torch.float32
    whole = Stateless(module).eval()
    weights = {name: weight.detach() for name, weight in module.named_parameters() if weight.requires_grad}
    try:
        with _quietly():
            program = torch.onnx.export(
                whole,
                (torch.zeros(SAMPLES, *shape, dtype=traced_on), *weights.values()),
                dynamo=True,
                verbose=False,
                input_names=["x", *(TAG + name for name in weights)],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")}, tuple({} for _ in weights)),
            )
    except torch.onnx.errors.OnnxExporterError as fault:
        reason = str(fault.__cause__ or fault).strip().splitlines()[0]
        raise ModelError(f"task.model cannot be exported to ONNX: {reason}") from fault
    assert program is not None
    graph = finished(program.model_proto, {name: weight.numpy() for name, weight in weights.items()}, TAG)
    return _with_state(graph, module)


def _with_state(graph: OnnxGraph, module: nn.Module) -> OnnxGraph:
    """The graph with the rest of the module's state dict: frozen parameters, persistent buffers, and further names of
    trained weights that the module uses in several places."""
    names = {id(weight): name for name, weight in module.named_parameters() if weight.requires_grad}
    frozen = dict[str, Stored]()
    tied = dict[str, tuple[str, ...]]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in graph.weights or not isinstance(tensor, Tensor):
            continue
        if trained := names.get(id(tensor)):
            tied[trained] = (*tied.get(trained, ()), name)
        else:
            frozen[name] = _stored(name, tensor.detach().cpu().contiguous())
    return replace(graph, frozen=frozen, tied=tied)


def _stored(name: str, tensor: Tensor) -> Stored:
    if tensor.dtype not in KINDS:
        raise ModelError(
            f"task.model: {name} is {tensor.dtype}, which a safetensors file cannot hold; convert it, or register the "
            "buffer with persistent=False"
        )
    bits = tensor.view(BITS[tensor.dtype]) if tensor.dtype in BITS else tensor
    return Stored(KINDS[tensor.dtype], bits.numpy().copy())


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the exporter's warnings about itself and about packages that it does not need."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
