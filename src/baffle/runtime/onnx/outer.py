"""Losses along outer directions on ONNX Runtime: many of them in one pass, at weights that stay what they are."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.directions import OUTER, Directions, Support, dense, distribution_of
from baffle.core.ports import Batch
from baffle.core.probe import moves
from baffle.core.samples import Array
from baffle.runtime.onnx.criteria import NumpyCriterion, sample_losses
from baffle.runtime.onnx.feeding import fitting_labels, fitting_samples
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import LOGITS, WEIGHT, A, B, Manifest
from baffle.runtime.onnx.session import open_session, translated
from baffle.runtime.outer import OuterLoss, lengths, passes, steps

TRIED, SAMPLES_TRIED = 4, 3
"""Directions and samples that a graph is tried with."""

STEP, TOLERANCE = 0.05, 1e-4
"""A pass for many directions must give the outputs of one pass each, in float32, after a step of this length."""


class OnnxOuter:
    """A graph for many outer directions. Use one object per thread.

    At most `together` directions share a pass of a micro-batch. `plain` opens the graph for one direction, which is
    asked about everything else.
    """

    def __init__(
        self,
        manifest: Manifest,
        graph: Path | bytes,
        plain: Callable[[], OnnxLoss],
        *,
        together: int,
        micro_batch: int = 0,
        criterion: NumpyCriterion | None = None,
    ) -> None:
        self.manifest = manifest
        self.n_weights = manifest.n_weights
        self.together = together
        self.micro_batch = micro_batch
        self.criterion = criterion or partial(sample_losses, manifest.loss)
        self._tensors = [tensor for tensor in manifest.weights if tensor.size]
        self.shapes = tuple(tensor.shape for tensor in self._tensors)
        self._plain = cache(plain)
        self._session = open_session(graph)
        self._taken = [value.name for value in self._session.get_inputs()]

    def on(self, batch: Batch) -> OuterLoss:
        """The loss on one batch, to be called for many weights."""
        return OuterLoss(self.samples_on(batch), lambda weights: self._plain().on(batch)(weights))

    def samples_on(self, batch: Batch) -> "OnnxOuterLosses":
        """Each sample's loss on one batch, to be called for many weights."""
        return OnnxOuterLosses(self, batch)

    def outputs(self, weights: F32, batch: Batch) -> F32:
        """The model's outputs, one row per sample."""
        return self._plain().outputs(weights, batch)

    def run(self, weights: F32, x: tuple[Array, ...], drawn: F32) -> F32:
        """The outputs of samples at weights that directions move, those of one direction side by side."""
        inputs = self.inputs_of(weights, x, drawn)
        with translated("a forward pass"):
            outputs: F32 = self._session.run([LOGITS], {name: inputs[name] for name in self._taken})[0]
        return outputs

    def inputs_of(self, weights: F32, x: tuple[Array, ...], drawn: F32) -> dict[str, Array]:
        """What the graph may read."""
        inputs: dict[str, Array] = {WEIGHT + name: view for name, view in self.manifest.split(weights).items()}
        inputs |= {wanted.in_graph: samples for wanted, samples in zip(self.manifest.arrays, x, strict=True)}
        ends = np.cumsum(lengths(self.shapes))
        parts = [np.ascontiguousarray(part) for part in np.split(drawn, ends[:-1], axis=1)]
        names = [prefix + tensor.name for tensor in self._tensors for prefix in (A, B)]
        return inputs | dict(zip(names, parts, strict=True))


def tried_outputs(plain: OnnxLoss, weights: F32, batch: Batch) -> F32:
    """The outputs of a few samples along a few directions, each in a pass of its own."""
    directions, supports = _tried(plain.manifest)
    scratch, outputs = weights.copy(), dict[int, F32]()
    for k in moves(scratch, weights, directions, supports, STEP):
        outputs[k] = plain.outputs(scratch, batch.take(slice(SAMPLES_TRIED)))
    return np.concatenate([outputs[k] for k in range(TRIED)])


def disagreement(outer: OnnxOuter, weights: F32, batch: Batch, expected: F32) -> str:
    """Why a graph for many directions cannot stand for the one that it was made of and that gave the expected outputs;
    empty if it can. It is tried, because graphs compute in ways that no rule foresees."""
    directions, supports = _tried(outer.manifest)
    drawn = steps(directions, range(TRIED), supports, STEP, outer.shapes)
    got = outer.run(weights, fitting_samples(outer.manifest, batch.take(slice(SAMPLES_TRIED)).x), drawn)
    if got.shape == expected.shape and np.allclose(
        got, expected, TOLERANCE, TOLERANCE * _largest(expected), equal_nan=True
    ):
        return ""
    return "a pass for many directions gives other outputs than one for each"


def _tried(manifest: Manifest) -> tuple[Directions, Sequence[Support]]:
    shapes = tuple(tensor.shape for tensor in manifest.weights if tensor.size)
    return Directions(bytes(32), distribution_of(OUTER, shapes)), dense(manifest.n_weights, TRIED)


def _largest(numbers: F32) -> float:
    finite = numbers[np.isfinite(numbers)]
    return float(np.abs(finite).max(initial=0.0))


class OnnxOuterLosses:
    """The losses of one batch's samples, for many outer directions at once."""

    def __init__(self, runtime: OnnxOuter, batch: Batch) -> None:
        fitting_labels(runtime.manifest, batch.y)
        self._runtime = runtime
        samples = Batch(fitting_samples(runtime.manifest, batch.x), batch.y)
        self._micro_batches = samples.pieces(runtime.micro_batch)

    def __call__(self, weights: F32) -> F64:
        nowhere = np.zeros((1, sum(lengths(self._runtime.shapes))), np.float32)
        losses: F64 = self._moved(weights, nowhere)[0]
        return losses

    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        shapes, rows = self._runtime.shapes, list[F64]()
        for numbers in passes(len(supports), self._runtime.together):
            rows.append(self._moved(weights, steps(directions, numbers, supports, step, shapes)))
        return np.concatenate(rows)

    def _moved(self, weights: F32, drawn: F32) -> F64:
        """Each sample's loss, a row for each direction. If the criterion gives only a mean, it stands for each
        sample."""
        count = len(drawn)
        parts = list[F64]()
        for x, y in self._micro_batches:
            outputs = self._runtime.run(weights, x, drawn)
            losses = self._runtime.criterion(outputs, np.tile(y, (count, *[1] * (y.ndim - 1))))
            if not losses.ndim:
                each = outputs.reshape(count, len(y), *outputs.shape[1:])
                means = np.array([self._runtime.criterion(moved, y) for moved in each])
                losses = np.repeat(means, len(y))
            parts.append(losses.reshape(count, len(y)))
        return np.concatenate(parts, axis=1)
