"""From a module to an ONNX graph. The trained weights are inputs from the start, so the exporter cannot fold them."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from baffle.errors import ModelError
from baffle.runtime.onnx.graph import OnnxGraph, finished

SAMPLES = 2
"""Samples that a module is traced with. With a single one, the exporter could take the batch for a fixed size."""

TAG = "weight:"
"""Prefix of the weights' names in the exporter's graph, which has names of its own."""

INTEGERS = {"int64": torch.int64, "int32": torch.int32}
"""Types of integer samples that a graph can take."""


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
    return finished(program.model_proto, {name: weight.numpy() for name, weight in weights.items()}, TAG)


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
