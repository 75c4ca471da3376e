"""A plan's model on one runtime. Tasks, clients and servers use this interface without knowing which runtime it is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.blas import one_blas_thread
from baffle.core.directions import Layout, Support, coverage, lay_out, merge, row_of, support_of
from baffle.core.head import Head, without
from baffle.core.outer import Shapes
from baffle.core.ports import Batch, Runtime
from baffle.core.samples import PADDING, Labels, Samples
from baffle.errors import NoHeadError, PlanError
from baffle.plan import Model, ProbeSettings, UpdateSettings
from baffle.plan.functions import calling
from baffle.plan.tasks import LOSSES
from baffle.stopwatch import Stopwatch

FLOAT32, FLOAT64 = "float32", "float64"
"""Precisions of forward passes: every runtime has float32; probes are checked against float64."""

ONLY_A_MEAN = "probe.stacked: task.loss gives the mean of a batch, expected one loss for each sample; leave it out"


class Front(Protocol):
    """The frozen front of a model. Equal keys mean equal features."""

    @property
    def key(self) -> Hashable: ...

    def features(self, samples: Samples) -> F32: ...


@dataclass(frozen=True)
class SplitModel:
    """A model cut in two: a front without trained weights, and a head with all of them."""

    front: Front
    head: "RunnableModel"


class Together(NamedTuple):
    """How many outer directions share a forward pass. If each takes one of its own, `remark` may say why."""

    directions: int
    remark: str = ""


def require_own_shapes(probe: ProbeSettings, shapes: Shapes) -> None:
    """Refuse shapes in a plan that are not those of the model's tensors. With as many weights they would give sound
    directions, but others than a plan without them gets, and none that can share a pass."""
    if probe.shapes not in ((), shapes):
        expected, given = ([list(shape) for shape in some] for some in (shapes, probe.shapes))
        raise PlanError(
            f"probe.shapes are not those of task.model's tensors: expected {expected}, got {given}; leave them out to "
            "have them found"
        )


def require_own_layout(probe: ProbeSettings, own: Collection[Support], n: int) -> None:
    """Refuse a layout of other supports than the model's own, or one that leaves out some of its n weights. Directions
    of a support with few weights measure these weights exactly, whatever the salt is: nobody may choose which."""
    supports = [support_of(row[:4]) for row in probe.layout]
    strange = next((support for support in supports if support not in own), None)
    if strange is not None:
        what = f"[{strange.start}, {strange.stop}) is no support of task.model's {probe.supports}"
    elif supports and not coverage([*supports, support_of(probe.head_at)], n).all():
        what = "it leaves out weights of task.model"
    else:
        return
    raise PlanError(f"probe.layout: {what}; leave it out to have one made")


def require_own_layers(update: UpdateSettings, own: Iterable[Support]) -> None:
    """Refuse layers of adam's second moments that are not the model's own."""
    if update.layers not in ((), expected := tuple(map(row_of, own))):
        raise PlanError(
            f"update.layers are not those of task.model: expected {[list(row) for row in expected]}; leave them out to "
            "have them found"
        )


def require_own_head(probe: ProbeSettings, head: Head) -> None:
    """Refuse another place than that of the model's own last layer: it would be measured exactly in every round."""
    if probe.head_at not in (ProbeSettings().head_at, at := row_of(head.support)):
        raise PlanError(f"probe.head_at is {probe.head_at}, expected {at}; leave it out to have it found")


class RunnableModel(ABC):
    """What a runtime supplies. Initial weights and runtimes for threads are required; everything else has a default."""

    packages: tuple[str, ...] = ()
    """Libraries whose versions a run records."""

    precisions: Set[str] = frozenset({FLOAT32})
    """The precisions that its forward passes can be computed in."""

    settings: Model
    """The plan's [task.model], with the settings filled in that become known when the model is loaded."""

    @abstractmethod
    def initial_weights(self) -> F32:
        """The trained weights before round 0, as one flat vector."""

    @abstractmethod
    def runtime(self, probe: ProbeSettings, precision: str) -> Runtime:
        """The model for one thread, computing in this precision."""

    @property
    def rounds(self) -> bool:
        """Whether its activations are rounded to integers. Tiny steps then find a slope between two roundings, which is
        not the loss's."""
        return False

    def advice(self) -> list[str]:
        """Remarks for the user before this model is trained."""
        return []

    def runs_whole(self, _probe: ProbeSettings, _precision: str) -> bool:
        """Whether every probe is a forward pass of the whole model."""
        return True

    def split(self, _sample: Batch) -> SplitModel | None:
        """The model's frozen front and its head; None if no front is frozen whose features are worth keeping."""
        return None

    def layers(self) -> tuple[Support, ...] | None:
        """The slices of the flat weight vector that each layer owns, all weights once; None if unknown."""
        return None

    def shapes(self) -> Shapes | None:
        """The shapes of the trained tensors that have weights, in the order of the flat vector; None if unknown."""
        return None

    def supports(self, probe: ProbeSettings, _batch: Batch) -> Collection[Support]:
        """The supports that a layout of this model may share directions out among."""
        return layer_supports(self.layers() or (), probe)

    def layout(self, probe: ProbeSettings, _batch: Batch, _stopwatch: Stopwatch | None = None) -> Layout:
        """How many directions each part of the model gets, given what a direction costs there on this batch."""
        layers = self.layers() if probe.supports == "layers" else None
        if layers is None:
            known = '"dense"' if self.layers() is None else '"dense" or "layers"'
            raise PlanError(f'probe.supports: this runtime runs whole models; expected {known}, got "{probe.supports}"')
        return lay_out(layer_supports(layers, probe), probe.k)

    def head(self, _loss: str, _batch: Batch) -> Head:
        """The model's last linear layer, tried on this batch. Refuses a model whose outputs do not follow from one."""
        raise NoHeadError("this runtime does not look into its models")

    def together(self, _probe: ProbeSettings, _batch: Batch, _room: int) -> Together:
        """How many outer directions share a forward pass of this batch, if its tensors take at most `room` bytes."""
        return Together(1)

    def pass_bytes(self, _probe: ProbeSettings, _batch: Batch) -> int | None:
        """The peak memory of tensors during a whole forward pass, of all directions that share it; None if unknown."""
        return None

    def activation_bytes(self, _batch: Batch) -> int | None:
        """The memory of all activations of a batch, which backpropagation keeps; None if unknown."""
        return None

    def one_thread_each(self) -> AbstractContextManager[None]:
        """Run each operator on one thread, so that sums are always added in the same order. Clients run in parallel."""
        return one_blas_thread()


def besides_head(supports: Iterable[Support], probe: ProbeSettings) -> tuple[Support, ...]:
    """Supports without the weights of an exact head, of which directions move none."""
    head = support_of(probe.head_at)
    try:
        return tuple(rest for support in supports if (rest := without(support, head)))
    except ValueError as fault:
        raise NoHeadError(f"in a layer, {fault}") from None


def layer_supports(layers: Sequence[Support], probe: ProbeSettings) -> tuple[Support, ...]:
    """What directions of layers are shared out among. Merged neighbours may have the head between them."""
    return besides_head(merge(besides_head(layers, probe), probe.k), probe)


def layer_of(name: str) -> str:
    """The layer of a tensor: of "block.conv.bias" it is "block.conv", of "positions" the tensor itself."""
    return name.rpartition(".")[0] or name


def layers_of(tensors: Iterable[tuple[str, int]]) -> tuple[Support, ...]:
    """The slices of each layer, given the layer and the size of every tensor in the order of the flat vector. A support
    has two slices at most, so if the tensors of a layer lie in more places, each place is a layer of its own."""
    places = dict[str, list[tuple[int, int]]]()
    end = 0
    for layer, size in tensors:
        start, end = end, end + size
        if not size:
            continue
        own = places.setdefault(layer, [])
        if own and own[-1][1] == start:
            own[-1] = (own[-1][0], end)
        else:
            own.append((start, end))
    layers = list[Support]()
    for own in places.values():
        layers += [Support(*own[0], own[1])] if len(own) == 2 else [Support(start, stop) for start, stop in own]
    return tuple(sorted(layers))


A = TypeVar("A")

USED_TWICE = "the last linear layer, or its weight, is used more than once"


def require_closed_form(loss: str) -> None:
    """Refuse an exact head under a loss whose derivative by the outputs is not known."""
    if loss not in LOSSES or (LOSSES[loss].each and not LOSSES[loss].slope):
        raise NoHeadError(f"the derivative of task.loss = {loss!r} by the outputs is not known")


def slopes_of(loss: str, outputs: F64, labels: Labels) -> F64:
    """The derivative of each sample's loss by a last layer's outputs, for a loss of BAFFLE's own: a row for each sample
    and in it one for each of its positions. The outputs may have any shape with these numbers in their order."""
    slope, samples = LOSSES[loss].slope, len(labels)
    if slope is None:
        slopes = _slopes_of_classes(outputs.reshape(*labels.shape, -1), labels)
    else:
        rows, targets = outputs.reshape(samples, -1), labels.astype(np.float64).reshape(samples, -1)
        slopes = slope(np, rows, targets) / rows.shape[1]
    return slopes.reshape(samples, -1, outputs.shape[-1])


def _slopes_of_classes(outputs: F64, labels: Labels) -> F64:
    """p − y, divided by how many positions of the sample count; 0 at padding. The last axis is that of the classes."""
    powers = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
    slopes: F64 = powers / powers.sum(axis=-1, keepdims=True)
    counted = labels != PADDING
    chosen = np.where(counted, labels, 0)[..., None]
    np.put_along_axis(slopes, chosen, np.take_along_axis(slopes, chosen, axis=-1) - 1, axis=-1)
    positions = np.maximum(counted.reshape(len(labels), -1).sum(axis=1), 1)
    slopes[~counted] = 0
    slopes /= positions.reshape(-1, *[1] * (slopes.ndim - 1))
    return slopes


def loss_of_numbers(name: str, xp: Any, outputs: Any, targets: Any) -> Any:
    """A loss of BAFFLE's own for each sample, by the library `xp`. A target of shape (n,) fits an output of (n, 1)."""
    each = LOSSES[name].each
    assert each is not None
    return each(xp, outputs.reshape(len(outputs), -1), targets.reshape(len(outputs), -1)).mean(1)


def as_criterion(as_array: Callable[[Any], A], name: str, function: Callable[[A, A], Any]) -> Callable[[A, A], A]:
    """A function of the user's own as a loss. It may compute anything from outputs and labels, and return whatever
    `as_array` converts: a loss for each sample, or their mean."""
    expected = f"task.loss: {name} must return one loss per sample, or their mean"

    def criterion(outputs: Any, labels: Any) -> Any:
        with calling(f"task.loss: {name}"):
            returned = function(outputs, labels)
        try:
            losses: Any = as_array(returned)
        except (TypeError, ValueError, RuntimeError):
            raise PlanError(f"{expected}, got {type(returned).__name__}") from None
        if losses.shape not in ((), (len(outputs),)):
            raise PlanError(f"{expected}, got shape {tuple(losses.shape)} for {len(outputs)} samples")
        return losses

    return criterion
