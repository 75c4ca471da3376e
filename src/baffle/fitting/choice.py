"""Which weights a fit hands back: the averaged ones, or the last ones where an average is still behind.

An average trails the weights by about a tenth of a short run (`baffle.core.update.average`), in which a loss that
falls fast may halve. The user's validation data decide, or else training samples; test samples never do.
"""

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.ports import Runtime
from baffle.data.sources import Dataset

MOST_JUDGED = 1024  # samples, at even steps through the data
PIECES = 16  # of these samples: the scatter between them tells how sure the comparison is
SURE = 2.0  # a loss is clearly lower if it is so by this many standard errors

AVERAGED, LAST = "averaged", "last"


def choose_weights(runtime: Runtime, data: Dataset, averaged: F32, last: F32) -> tuple[str, str]:
    """The averaged weights, unless the last ones have a clearly lower loss on the data; and both losses in words."""
    rows = np.linspace(0, len(data) - 1, min(len(data), MOST_JUDGED)).astype(int)
    pieces = [data.batch(rows[first::PIECES]) for first in range(min(PIECES, len(rows)))]

    def losses(weights: F32) -> F64:
        with np.errstate(all="ignore"):
            return np.array([float(runtime.on(piece)(weights)) for piece in pieces])

    of_average, of_last = losses(averaged), losses(last)
    gains = of_average - of_last
    error = np.std(gains, ddof=1) / np.sqrt(len(gains)) if len(gains) > 1 else 0.0
    behind = np.mean(gains) > SURE * error if np.isfinite(gains).all() else np.isfinite(of_last).all()
    words = f"loss on {len(rows):,} {{}} samples: averaged {np.mean(of_average):.4g}, last {np.mean(of_last):.4g}"
    return LAST if behind else AVERAGED, words
