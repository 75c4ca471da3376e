"""A plan's model on PyTorch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial

import msgspec
import torch
from torch import Tensor, nn

from baffle.core.arrays import F32
from baffle.core.directions import OUTER, Support
from baffle.core.outer import Shapes
from baffle.core.ports import Batch
from baffle.core.seeds import Seeds
from baffle.core.supports import Layout
from baffle.errors import PlanError, first_line
from baffle.models.build import build
from baffle.models.drawing import draw_weights
from baffle.models.inputs import Inputs
from baffle.plan import MobileNet, Model, Plan, ProbeSettings, Softmax
from baffle.runtime.layers import layer_of, layers_of
from baffle.runtime.model import RunnableModel, Split, Together
from baffle.runtime.outer import as_many_as_fit
from baffle.runtime.torch.criteria import TorchCriterion, criterion_of
from baffle.runtime.torch.fast_forward import give_back_freed_memory
from baffle.runtime.torch.footprint import tensor_bytes
from baffle.runtime.torch.frozen_front import TorchFront, halves
from baffle.runtime.torch.layouts import propose
from baffle.runtime.torch.loss import TorchLoss, one_thread_each, weights_of
from baffle.runtime.torch.modes import GENERATOR, advice_on_modes
from baffle.runtime.torch.tensors import as_tensors, call, trained_parameters
from baffle.runtime.torch.together import bytes_each, why_not_together

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

SAMPLES_TRIED = 3
"""Samples on which a pass for many directions is compared with one for each."""


def load(plan: Plan, inputs: Inputs) -> "TorchModel":
    model = plan.task.model
    if isinstance(model, MobileNet):
        model = msgspec.structs.replace(model, scaling="once")
    return TorchModel(plan, model, partial(initial_module, plan, inputs))


def initial_module(plan: Plan, inputs: Inputs) -> nn.Module:
    """The whole model with its initial weights, including frozen parts."""
    module = _built(plan, inputs)
    if plan.task.draws_weights:
        shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
        nn.utils.vector_to_parameters(torch.from_numpy(draw_weights(shapes, plan.seed)), module.parameters())
    return module


def _built(plan: Plan, inputs: Inputs) -> nn.Module:
    key = Seeds(plan.seed, b"").key("init")
    with GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(key[:8], "big") >> 1)
        return build(plan.task.model, inputs)


class TorchModel(RunnableModel):
    """A plan's model, built again for each thread's runtime.

    `linear` is set for a head alone and for softmax regression: many probes of such a model are one matrix product.
    `criterion` is the loss; left out, the one that the plan names.
    """

    packages = ("torch",)
    precisions = frozenset(DTYPES)

    def __init__(
        self,
        plan: Plan,
        settings: Model,
        module: Callable[[], nn.Module],
        *,
        linear: bool = False,
        criterion: TorchCriterion | None = None,
    ) -> None:
        self.settings = settings
        self.module = module
        self._plan = plan
        _require_device(plan.run.device)
        self._device = plan.run.device
        self._criterion = criterion or criterion_of(plan)
        self._linear = linear or isinstance(plan.task.model, Softmax)

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
        )

    def advice(self) -> list[str]:
        return advice_on_modes(self.module(), backpropagates=self._plan.estimator == "backprop")

    def runs_whole(self, probe: ProbeSettings, precision: str) -> bool:
        """A linear model in half precision runs whole, because a matrix product would use weights that are not
        rounded. Outer directions have a quicker way of their own."""
        linear = self._linear and DTYPES[precision].itemsize >= 4 and probe.distribution != OUTER
        return probe.moves_whole_models and not linear

    def split(self, sample: Batch) -> Split | None:
        parts = halves(self.module(), sample.x)
        if parts is None:
            return None
        module = partial(deepcopy, parts.head)
        head = TorchModel(self._plan, self.settings, module, linear=True, criterion=self._criterion)
        return Split(TorchFront(parts.front, self._device), head)

    def layers(self) -> tuple[Support, ...]:
        trained = ((name, weight) for name, weight in self.module().named_parameters() if weight.requires_grad)
        return layers_of((layer_of(name), weight.numel()) for name, weight in trained)

    def shapes(self) -> Shapes:
        return tuple(tuple(weight.shape) for weight in trained_parameters(self.module()) if weight.numel())

    def layout(self, probe: ProbeSettings, batch: Batch) -> Layout:
        if probe.supports not in ("stages", "units"):
            return super().layout(probe, batch)
        with self.one_thread_each():
            return propose(self.module(), batch, probe.supports, probe.k, self._criterion)

    def together(self, probe: ProbeSettings, batch: Batch, room: int) -> Together:
        if not _can_share(probe, probe.precision):
            return Together(1, f"{probe.precision} would round what they add to a layer's output")
        module = self.module()
        with self.one_thread_each():
            if reason := why_not_together(module, self._criterion, batch.take(slice(SAMPLES_TRIED))):
                return Together(1, reason)
            each = bytes_each(module, self._criterion, batch)
        return as_many_as_fit(probe.k, each, len(batch.y), room)

    def pass_bytes(self, probe: ProbeSettings, batch: Batch) -> int:
        if probe.together > 1 and _can_share(probe, probe.precision):
            with self.one_thread_each():
                return min(probe.together, probe.k) * bytes_each(self.module(), self._criterion, batch)
        runtime = self.runtime(probe, probe.precision)
        weights = self.initial_weights()
        with self.one_thread_each():
            return tensor_bytes(lambda: runtime.on(batch)(weights))

    def activation_bytes(self, batch: Batch) -> int:
        """Inputs and outputs of all layers."""
        sizes: list[int] = []

        def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            tensors = [tensor for tensor in (*inputs, output) if isinstance(tensor, Tensor)]
            sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))

        module = self.module().eval()
        hooks = [layer.register_forward_hook(note) for layer in module.modules() if not list(layer.children())]
        with torch.inference_mode():
            call(module, as_tensors(batch.x))
        for hook in hooks:
            hook.remove()
        return sum(sizes)

    def one_thread_each(self) -> AbstractContextManager[None]:
        return one_thread_each()


def _can_share(probe: ProbeSettings, precision: str) -> bool:
    """Whether outer directions may share a forward pass: rounded to half precision, what a direction adds to a layer's
    output would be lost."""
    return probe.distribution == OUTER and probe.moves_whole_models and DTYPES[precision].itemsize >= 4


def _require_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as fault:  # torch raises these for a missing device
        raise PlanError(f"run.device: {name!r} cannot be used: {first_line(fault)}") from None
