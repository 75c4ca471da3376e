"""A model that came as ONNX, as a module: PyTorch holds its weights, ONNX Runtime computes. It has no gradient."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from baffle.core.ports import Batch
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import WEIGHTS, read_weights


class OnnxClassifier(nn.Module):
    """The model in a folder that `baffle export` made, with the weights there."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._runtime = OnnxLoss(folder)
        self.manifest = self._runtime.manifest
        tensors = self.manifest.split(read_weights(folder / WEIGHTS, self.manifest))
        self.weights = nn.ParameterList(nn.Parameter(torch.from_numpy(values.copy())) for values in tensors.values())

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.cat([weight.reshape(-1) for weight in self.weights]).to("cpu", torch.float32)
        samples = Batch(x.to("cpu", torch.float32).numpy(), np.zeros(len(x), np.int64))
        return torch.from_numpy(self._runtime.outputs(weights.numpy(), samples)).to(x)
