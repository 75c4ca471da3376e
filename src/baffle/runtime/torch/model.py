"""A plan's model on PyTorch."""

import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from baffle.core.arrays import F32
from baffle.core.directions import OUTER, Layout, Support, support_of
from baffle.core.freed_memory import give_back_freed_memory
from baffle.core.head import Head
from baffle.core.outer import Shapes
from baffle.core.ports import Batch
from baffle.core.samples import Array, Samples, count, describe, pieces, take
from baffle.core.seeds import Seeds
from baffle.errors import ModelError, PlanError, first_line
from baffle.models.build import build
from baffle.models.drawing import draw_weights
from baffle.models.inputs import Inputs
from baffle.plan import MobileNet, Model, Plan, ProbeSettings, Softmax
from baffle.plan.functions import calling
from baffle.runtime.model import RunnableModel, SplitModel, Together, besides_head, layer_of, layers_of
from baffle.runtime.torch.fast_forward import FastForward
from baffle.runtime.torch.head import find_head
from baffle.runtime.torch.loss import (
    GENERATOR,
    TorchCriterion,
    TorchLoss,
    advice_on_modes,
    criterion_of,
    one_thread_each,
    weights_of,
)
from baffle.runtime.torch.stages import pipeline_of
from baffle.runtime.torch.tensors import as_tensors, call, trained_parameters
from baffle.runtime.torch.trials import (
    LEAST,
    bytes_each,
    how_many,
    own_supports,
    propose,
    tensor_bytes,
    why_not_together,
)
from baffle.stopwatch import Stopwatch


def halves(module: nn.Module, sample: Samples) -> tuple[nn.Module, nn.Module] | None:
    """A module's frozen front and its head; None if no front is frozen whose features are worth keeping. The front must
    have parameters, or keeping its output would save nothing, and it must treat each sample separately."""
    if all(parameter.requires_grad for parameter in module.parameters()) or not isinstance(sample, np.ndarray):
        return None
    pipeline = pipeline_of(module.eval(), torch.from_numpy(sample))
    if pipeline is None:
        return None
    first = pipeline.first_trained
    front = nn.Sequential(*(stage.module for stage in pipeline.stages[:first]))
    if not all(stage.separate for stage in pipeline.stages[:first]) or not list(front.parameters()):
        return None
    return front, nn.Sequential(*(stage.module for stage in pipeline.stages[first:]))


class TorchFront:
    """Computes the features of a frozen front, for one thread at a time."""

    def __init__(self, module: nn.Module, device: str) -> None:
        digest = sha256()
        for name, tensor in module.state_dict().items():
            digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
        self.key = (repr(module), digest.digest())
        self._device = device
        self._forward = FastForward(module.to(device).eval(), plain=device != "cpu")
        self._lock = threading.Lock()

    @torch.inference_mode()
    def features(self, samples: Samples) -> F32:
        with self._lock:
            arranged = self._forward.arranged(as_tensors(samples, self._device))
            return np.asarray(self._forward(arranged).cpu().numpy())


ROWS_AT_ONCE = 256  # samples that run through the module together


def require_module(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise PlanError(f"model: expected an nn.Module or the path of an ONNX file, got {type(module).__name__}")
    return module


def restored(module: nn.Module, trained: nn.Module, weights: F32) -> nn.Module:
    """A copy of a module, whole, with these weights in what is trained in `trained`, which has the same parameters."""
    copy = deepcopy(module)
    names = {name for name, parameter in trained.named_parameters() if parameter.requires_grad}
    targets = [parameter for name, parameter in copy.named_parameters() if name in names]
    expected = sum(parameter.numel() for parameter in targets)
    if expected != len(weights):
        raise ModelError(
            f"model: it has {expected:,} weights to train, but the run has {len(weights):,}; give the run's own model"
        )
    parts = torch.split(torch.from_numpy(np.array(weights)), [parameter.numel() for parameter in targets])
    with torch.no_grad():
        for parameter, numbers in zip(targets, parts, strict=True):
            parameter.copy_(numbers.view_as(parameter))
    return copy


@torch.inference_mode()
def outputs(module: nn.Module, x: Samples) -> Array:
    """A module's outputs in evaluation mode, a row for each sample. The modes of its parts are restored afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with calling(f"model: on samples of {describe(x)}, {type(module).__name__}"):
            rows = [call(module, as_tensors(take(x, here))).float().numpy() for here in pieces(count(x), ROWS_AT_ONCE)]
    finally:
        for part, mode in modes.items():
            part.training = mode
    return np.concatenate(rows)


DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SAMPLES_TRIED = 3  # samples on which a pass for many directions is compared with one for each


def load(plan: Plan, inputs: Inputs) -> "TorchModel":
    model = plan.task.model
    if isinstance(model, MobileNet):
        model = msgspec.structs.replace(model, scaling="once")
    return TorchModel(plan, model, partial(initial_module, plan, inputs))


def initial_module(plan: Plan, inputs: Inputs) -> nn.Module:
    """The whole model with its initial weights, including frozen parts."""
    seed = int.from_bytes(Seeds(plan.seed, b"").key("init")[:8], "big") >> 1
    with GENERATOR, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes milliseconds for devices that are not there
        module = build(plan.task.model, inputs)
    if plan.task.draws_weights:
        shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
        nn.utils.vector_to_parameters(torch.from_numpy(draw_weights(shapes, plan.seed)), module.parameters())
    return module


@dataclass
class TorchModel(RunnableModel):
    """A plan's model, built again for each thread's runtime. `linear` is set for a head alone and for softmax
    regression: many probes of such a model are one matrix product. `criterion` is the loss; left out, the one that the
    plan names."""

    packages = ("torch",)
    precisions = frozenset(DTYPES)

    plan: Plan
    settings: Model
    module: Callable[[], nn.Module]
    linear: bool = False
    criterion: TorchCriterion | None = None

    def __post_init__(self) -> None:
        self._device = self.plan.run.device
        self._criterion = self.criterion or criterion_of(self.plan)
        try:
            torch.empty(0, device=self._device)
        except (RuntimeError, AssertionError) as fault:  # torch raises these for a missing device
            raise PlanError(f"run.device: {self._device!r} cannot be used: {first_line(fault)}") from None

    def initial_weights(self) -> F32:
        return weights_of(self.module())

    def runtime(self, probe: ProbeSettings, precision: str) -> TorchLoss:
        if probe.memory_mb:
            give_back_freed_memory()
        return TorchLoss(
            self.module(),
            self._criterion,
            micro_batch=probe.micro_batch,
            dtype=DTYPES[precision],
            device=self._device,
            structured=not self.runs_whole(probe, precision),
            together=probe.together if _can_share(probe, precision) else 1,
            head_at=support_of(probe.head_at),
            loss_name=self.plan.task.loss,
        )

    def advice(self) -> list[str]:
        return advice_on_modes(self.module(), backpropagates=self.plan.estimator == "backprop")

    def runs_whole(self, probe: ProbeSettings, precision: str) -> bool:
        """A linear model in half precision runs whole, because a matrix product would use weights that are not
        rounded. Outer directions have a quicker way of their own."""
        linear = self.linear or isinstance(self.plan.task.model, Softmax)
        alone = linear and DTYPES[precision].itemsize >= 4 and probe.distribution != OUTER
        return probe.moves_whole_models and not alone

    def split(self, sample: Batch) -> SplitModel | None:
        parts = halves(self.module(), sample.x)
        if parts is None:
            return None
        front, head = parts
        module = partial(deepcopy, head)
        model = TorchModel(self.plan, self.settings, module, linear=True, criterion=self._criterion)
        return SplitModel(TorchFront(front, self._device), model)

    def layers(self) -> tuple[Support, ...]:
        trained = ((name, weight) for name, weight in self.module().named_parameters() if weight.requires_grad)
        return layers_of((layer_of(name), weight.numel()) for name, weight in trained)

    def shapes(self) -> Shapes:
        return tuple(tuple(weight.shape) for weight in trained_parameters(self.module()) if weight.numel())

    def supports(self, probe: ProbeSettings, batch: Batch) -> Collection[Support]:
        if probe.supports not in ("stages", "units"):
            return super().supports(probe, batch)
        return besides_head(own_supports(self.module(), batch, probe.supports, self._criterion), probe)

    def layout(self, probe: ProbeSettings, batch: Batch, stopwatch: Stopwatch | None = None) -> Layout:
        if probe.supports not in ("stages", "units"):
            return super().layout(probe, batch)
        with self.one_thread_each():
            left = partial(besides_head, probe=probe)
            return propose(self.module(), batch, probe.supports, probe.k, self._criterion, stopwatch, left)

    def head(self, loss: str, batch: Batch) -> Head:
        return find_head(self.module(), loss, batch)

    def together(self, probe: ProbeSettings, batch: Batch, room: int) -> Together:
        if not _can_share(probe, probe.precision):
            return Together(1, f"{probe.precision} would round what they add to a layer's output")
        module = self.module()
        with self.one_thread_each():
            if reason := why_not_together(module, self._criterion, batch.take(slice(SAMPLES_TRIED))):
                return Together(1, reason)
            each = bytes_each(module, self._criterion, batch)
        if room // each < LEAST:
            return Together(1, f"the tensors of {len(batch.y)} samples are so large that it would not pay")
        return Together(how_many(probe.k, each, room))

    def pass_bytes(self, probe: ProbeSettings, batch: Batch) -> int:
        if probe.together > 1 and _can_share(probe, probe.precision):
            with self.one_thread_each():
                return min(probe.together, probe.k) * bytes_each(self.module(), self._criterion, batch)
        runtime, weights = self.runtime(probe, probe.precision), self.initial_weights()
        with self.one_thread_each():
            return tensor_bytes(lambda: runtime.on(batch)(weights))

    def activation_bytes(self, batch: Batch) -> int:
        """Inputs and outputs of all layers."""
        sizes: list[int] = []

        def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            tensors = [tensor for tensor in (*inputs, output) if isinstance(tensor, Tensor)]
            sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))

        module = self.module().eval()
        for layer in module.modules():
            if not list(layer.children()):
                layer.register_forward_hook(note)
        with torch.inference_mode():
            call(module, as_tensors(batch.x))
        return sum(sizes)

    def one_thread_each(self) -> AbstractContextManager[None]:
        return one_thread_each()


def _can_share(probe: ProbeSettings, precision: str) -> bool:
    """Whether outer directions may share a pass: half precision would lose what they add to a layer's output."""
    return probe.distribution == OUTER and probe.moves_whole_models and DTYPES[precision].itemsize >= 4
