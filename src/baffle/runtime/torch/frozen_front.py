"""The front of a module that is not trained: what it says of a sample is the same in every round."""

import threading
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from baffle.core.arrays import F32, Samples
from baffle.runtime.torch.fast_forward import Quick
from baffle.runtime.torch.stages import pipeline_of


class Halves(NamedTuple):
    """A module in two: a front without trained weights, and the head behind it, which has them all."""

    front: nn.Module
    head: nn.Module


def halves(module: nn.Module, sample: Samples) -> Halves | None:
    """A module's frozen front and its head; none if nothing worth keeping is frozen.

    The front must hold parameters, or keeping its output would save nothing, and it must treat every sample alone.
    """
    if all(parameter.requires_grad for parameter in module.parameters()):
        return None
    pipeline = pipeline_of(module.eval(), torch.from_numpy(sample))
    if pipeline is None:
        return None
    first = next((i for i, stage in enumerate(pipeline.stages) if stage.start < stage.stop), 0)
    front = nn.Sequential(*(stage.module for stage in pipeline.stages[:first]))
    if not all(stage.separate for stage in pipeline.stages[:first]) or not list(front.parameters()):
        return None
    head = nn.Sequential(*(stage.module for stage in pipeline.stages[first:]))
    return Halves(front, head)


class TorchFront:
    """A frozen front that computes features, for one thread at a time."""

    def __init__(self, module: nn.Module, device: str) -> None:
        self.key = (repr(module), _digest(module))
        self._device = device
        self._forward = Quick(module.to(device).eval(), plain=device != "cpu")
        self._alone = threading.Lock()

    @torch.inference_mode()
    def features(self, samples: Samples) -> F32:
        with self._alone:
            arranged = self._forward.arranged(torch.from_numpy(samples).to(self._device))
            return np.asarray(self._forward(arranged).cpu().numpy())


def _digest(module: nn.Module) -> bytes:
    digest = sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.digest()
