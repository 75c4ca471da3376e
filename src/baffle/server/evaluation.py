"""How good weights are on a test set. All that is told of them comes from one forward pass over it."""

from typing import Any

import numpy as np

from baffle.core.arrays import F32, I64
from baffle.core.ranks import ranks
from baffle.data.sources import Source

TOP = 5
"""A label among so many best answers counts for top-5 accuracy, where there are more classes than that."""


def accuracies(source: Source, outputs: F32) -> dict[str, Any]:
    """Accuracy of a model's outputs on the test set; top-5 where there are more than five classes; and both for each
    domain of which there are test samples."""
    found, domain_of = ranks(outputs, source.test.labels), source.test.domain_of
    whole = {f"test_{name}": value for name, value in _shares(found, source.classes).items()}
    if domain_of is None or not source.domains:
        return whole
    domains = {
        name: _shares(found[domain_of == number], source.classes)
        for number, name in enumerate(source.domains)
        if (domain_of == number).any()
    }
    return whole | {"test_domains": domains}


def _shares(found: I64, classes: int) -> dict[str, float]:
    tops = {"accuracy": 1} | ({"top5": TOP} if classes > TOP else {})
    return {name: round(float(np.mean(found < top)), 6) for name, top in tops.items()}
