"""From a module to an ONNX graph: its trainable weights are inputs from the start, so that none can be folded away."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from baffle.errors import ModelError
from baffle.runtime.onnx.graph import OnnxGraph, finished

SAMPLES = 2
"""A module is traced with so many: with one, its batch could be taken for a fixed size."""

TAG = "weight:"
"""Before the names of weights, while the exporter makes up names of its own."""


class Stateless(nn.Module):
    """A module as a function of samples and weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.names = [name for name, weight in module.named_parameters() if weight.requires_grad]

    def forward(self, x: Tensor, *weights: Tensor) -> Tensor:
        output: Tensor = functional_call(self.module, dict(zip(self.names, weights, strict=True)), (x,))
        return output


def graph_of(module: nn.Module, shape: tuple[int, ...]) -> OnnxGraph:
    """The graph of a module on samples of a shape, with the module's own weights. What is frozen stays inside it."""
    whole = Stateless(module).eval()
    weights = {name: weight.detach() for name, weight in module.named_parameters() if weight.requires_grad}
    try:
        with _quietly():
            program = torch.onnx.export(
                whole,
                (torch.zeros(SAMPLES, *shape), *weights.values()),
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
    """The exporter talks about packages that it does not need, and about itself."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
