"""The frozen front of a module: its features of a sample are the same in every round."""

import threading
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from baffle.core.arrays import F32
from baffle.core.samples import Samples
from baffle.runtime.torch.fast_forward import FastForward
from baffle.runtime.torch.stages import pipeline_of
from baffle.runtime.torch.tensors import as_tensors


class Halves(NamedTuple):
    """A module cut in two: a front without trained weights, and a head with all of them."""

    front: nn.Module
    head: nn.Module


def halves(module: nn.Module, sample: Samples) -> Halves | None:
    """A module's frozen front and its head; None if no front is frozen whose features are worth keeping.

    The front must have parameters, or keeping its output would save nothing, and it must treat each sample separately.
    """
    if all(parameter.requires_grad for parameter in module.parameters()) or not isinstance(sample, np.ndarray):
        return None
    pipeline = pipeline_of(module.eval(), torch.from_numpy(sample))
    if pipeline is None:
        return None
    first = pipeline.first_trained
    front = nn.Sequential(*(stage.module for stage in pipeline.stages[:first]))
    if not all(stage.separate for stage in pipeline.stages[:first]) or not list(front.parameters()):
        return None
    head = nn.Sequential(*(stage.module for stage in pipeline.stages[first:]))
    return Halves(front, head)


class TorchFront:
    """Computes the features of a frozen front, for one thread at a time."""

    def __init__(self, module: nn.Module, device: str) -> None:
        self.key = (repr(module), _digest(module))
        self._device = device
        self._forward = FastForward(module.to(device).eval(), plain=device != "cpu")
        self._lock = threading.Lock()

    @torch.inference_mode()
    def features(self, samples: Samples) -> F32:
        with self._lock:
            arranged = self._forward.arranged(as_tensors(samples, self._device))
            return np.asarray(self._forward(arranged).cpu().numpy())


def _digest(module: nn.Module) -> bytes:
    digest = sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.digest()
