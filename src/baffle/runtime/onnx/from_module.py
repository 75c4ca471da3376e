"""From a PyTorch module to an ONNX graph. Trained weights are traced as inputs, so the exporter cannot fold them."""

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

from baffle.errors import ModelError, first_line
from baffle.runtime.onnx.finishing import finished
from baffle.runtime.onnx.graph import OnnxGraph
from baffle.runtime.onnx.model_folder import CROSS_ENTROPY, GraphLoss
from baffle.runtime.onnx.tensor_file import KINDS, Stored

SAMPLES = 2
"""Samples that a module is traced with. With only one, the exporter could take the batch size for a constant."""

TAG = "weight:"
"""Prefix of the weights' names in the exporter's graph, to keep them apart from names that the exporter invents."""

INTEGERS = {"int64": torch.int64, "int32": torch.int32}  # the integer types of samples that a graph takes

UNLIKE_NUMPY = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
"""Types that NumPy lacks: unsigned integers hold their bits."""

NAMES = {UNLIKE_NUMPY.get(name) or getattr(torch, kind.name): name for name, kind in KINDS.items()}
"""The name of each type in a safetensors file."""


class Stateless(nn.Module):
    """A module as a function of samples and trained weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.names = [name for name, weight in module.named_parameters() if weight.requires_grad]

    def forward(self, x: Tensor, *weights: Tensor) -> Tensor:
        output: Tensor = functional_call(self.module, dict(zip(self.names, weights, strict=True)), (x,))
        return output


def graph_of(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    loss: GraphLoss = CROSS_ENTROPY,
    label_shape: tuple[int, ...] | None = None,
    *,
    head: bool = False,
) -> OnnxGraph:
    """The graph of a module with its present weights. Frozen weights stay inside the graph. With `head`, it shows what
    its last linear layer takes and gives."""
    integers = np.issubdtype(dtype, np.integer)
    if integers and dtype.name not in INTEGERS:
        raise ModelError(f"expected float, int64 or int32 samples, got {dtype}; convert them in the data set")
    sample_dtype = INTEGERS[dtype.name] if integers else torch.float32
    weights = {name: weight.detach() for name, weight in module.named_parameters() if weight.requires_grad}
    frozen, tied = _rest_of_state(module)
    try:
        with _quietly():
            program = torch.onnx.export(
                Stateless(module).eval(),
                (torch.zeros(SAMPLES, *shape, dtype=sample_dtype), *weights.values()),
                dynamo=True,
                verbose=False,
                input_names=["x", *(TAG + name for name in weights)],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")}, tuple({} for _ in weights)),
            )
    except torch.onnx.errors.OnnxExporterError as fault:
        reason = first_line(fault.__cause__ or fault)
        raise ModelError(f"task.model cannot be exported to ONNX: {reason}") from fault
    assert program is not None
    arrays = {name: weight.numpy() for name, weight in weights.items()}
    made = finished(program.model_proto, arrays, TAG, loss, label_shape, head=head)
    return replace(made, frozen=frozen, tied=tied)


def _rest_of_state(module: nn.Module) -> tuple[dict[str, Stored], dict[str, tuple[str, ...]]]:
    """The rest of a module's state dict: what is frozen, and further names of trained weights that are used twice."""
    names = {id(weight): name for name, weight in module.named_parameters() if weight.requires_grad}
    frozen = dict[str, Stored]()
    tied = dict[str, tuple[str, ...]]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in names.values() or not isinstance(tensor, Tensor):
            continue
        if trained := names.get(id(tensor)):
            tied[trained] = (*tied.get(trained, ()), name)
        else:
            frozen[name] = _stored(name, tensor.detach().cpu().contiguous())
    return frozen, tied


def _stored(name: str, tensor: Tensor) -> Stored:
    kind = NAMES.get(tensor.dtype)
    if kind is None:
        raise ModelError(
            f"task.model: {name} is {tensor.dtype}, which a safetensors file cannot hold; convert it, or register the "
            "buffer with persistent=False"
        )
    bits = tensor.view(getattr(torch, KINDS[kind].name)) if kind in UNLIKE_NUMPY else tensor
    return Stored(kind, bits.numpy().copy())


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the exporter's warnings about itself and about optional packages."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
