"""Which weights a fit hands back: the averaged ones, or the last ones where an average is still behind.

An average trails the weights by about a tenth of a short run (`baffle.core.update.average`), in which a loss that
falls fast may halve. Yet it is often the better classifier of the two at a larger loss, so classifiers are judged by
their wrong answers. The user's validation data decide, or else training samples; test samples never do.
"""

from collections.abc import Callable

import numpy as np

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.data.sources import Dataset

MOST_JUDGED = 1024  # samples, at even steps through the data
PIECES = 16  # of these samples: the scatter between them tells how sure the comparison is
SURE = 2.0  # an error is clearly smaller if it is so by this many standard errors

AVERAGED, LAST = "averaged", "last"

Error = Callable[[F32, Batch], float]
"""What weights get wrong on a batch."""


def choose_weights(error: Error, data: Dataset, averaged: F32, last: F32) -> tuple[str, str]:
    """The averaged weights, unless the last ones have a clearly smaller error on the data; and both errors in words."""
    rows = np.linspace(0, len(data) - 1, min(len(data), MOST_JUDGED)).astype(int)
    pieces = [data.batch(rows[first::PIECES]) for first in range(min(PIECES, len(rows)))]
    with np.errstate(all="ignore"):
        of_average, of_last = (np.array([error(weights, piece) for piece in pieces]) for weights in (averaged, last))
        gains = of_average - of_last
    scatter = np.std(gains, ddof=1) / np.sqrt(len(gains)) if len(gains) > 1 else 0.0
    behind = np.mean(gains) > SURE * scatter if np.isfinite(gains).all() else np.isfinite(of_last).all()
    words = f"on {len(rows):,} {{}} samples: averaged {np.mean(of_average):.4g}, last {np.mean(of_last):.4g}"
    return LAST if behind else AVERAGED, words
