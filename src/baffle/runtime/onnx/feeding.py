"""A batch in the types and shapes that a graph takes, or a sentence that says why it does not fit."""

import math

import numpy as np

from baffle.core.samples import Array, Labels, Samples, arrays, describe, shape_of
from baffle.errors import ModelError
from baffle.runtime.onnx.model_folder import CROSS_ENTROPY, NO_LOSS, Input, Manifest


def fitting_samples(manifest: Manifest, x: Samples) -> tuple[Array, ...]:
    """The arrays of samples, in the order of the graph's inputs."""
    if not manifest.takes(shape_of(x)):
        raise ModelError(
            f"the model takes samples of {manifest.sample}, got {describe(x)}; was it exported for other data?"
        )
    names = [wanted.name for wanted in manifest.arrays]
    by_name = x if isinstance(x, dict) else dict(zip(names, arrays(x), strict=True))
    return tuple(_samples(wanted, by_name[wanted.name]) for wanted in manifest.arrays)


def _samples(wanted: Input, x: Array) -> Array:
    """Samples in the type of the graph's input. Integers may be token ids, so a conversion must not change any; what is
    true or false, as a mask is, becomes 1 or 0."""
    kind = np.dtype(wanted.dtype)
    x = x.astype(kind) if x.dtype.kind == "b" else x
    integers = np.issubdtype(x.dtype, np.integer)
    if integers == (kind.kind == "i"):
        converted: Array = np.ascontiguousarray(x, kind)
        if not integers or np.array_equal(converted, x):
            return converted
    what = f"{kind} {wanted.name}" if wanted.name else f"{kind} samples"
    raise ModelError(f"the model takes {what}, got {x.dtype}; was it exported for other data?")


def fitting_labels(manifest: Manifest, y: Labels) -> Labels:
    """Labels in the type and shape of the graph's input. A target of shape (n,) fits an output of (n, 1)."""
    shape = (len(y), *manifest.label_shape)
    if manifest.loss == NO_LOSS:
        return y
    if y.size != math.prod(shape):
        raise ModelError(
            f"the model takes labels of shape {manifest.label_shape} for each sample, got {y.shape[1:]}; was it "
            "exported for other data?"
        )
    dtype = np.int64 if manifest.loss == CROSS_ENTROPY else np.float32
    return np.ascontiguousarray(y.reshape(shape), dtype)
