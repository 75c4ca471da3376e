"""How far down a model's list of answers the right one is."""

import numpy as np

from baffle.core.arrays import F32, I64


def ranks(outputs: F32, labels: I64) -> I64:
    """For each row of outputs, how many classes come before its label: 0 if the label is the model's answer.

    Equal outputs are ranked in their order, as in `argmax`. An output that is not a number comes before all others, and
    a label with such an output comes last.
    """
    own = outputs[np.arange(len(labels)), labels][:, None]
    columns = np.arange(outputs.shape[1])
    earlier = columns < labels[:, None]
    before = np.where(earlier, ~(outputs < own), ~(outputs <= own)) & (columns != labels[:, None])
    return np.asarray(before.sum(1), np.int64)
