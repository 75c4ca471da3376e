"""Accuracy of weights on a test set: overall, top-5 and for each domain, all from one forward pass over the set."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from baffle.core.arrays import F32, I64
from baffle.core.ports import Batch
from baffle.core.ranks import ranks
from baffle.core.state import Rule, ServerState
from baffle.data.sources import Source
from baffle.errors import DataError
from baffle.task.load import Runtimes, ServerTask

TOP = 5
"""A sample counts for top-5 accuracy if its label is among the model's five best classes."""

EVALUATED = ("test_accuracy", "test_accuracy_last", "test_top5", "test_domains")
"""The names of what is measured: accuracy of the averaged weights (of the last ones, if the plan averages none), and of
the last weights. For the averaged ones also top-5, if there are more than five classes, and for each domain, if the
data set has domains."""


class Evaluation:
    """Evaluates states on a task's test set. Without a test set it evaluates nothing, and `missing` says why."""

    def __init__(self, task: ServerTask, runtimes: Runtimes, rule: Rule) -> None:
        self._source, self._runtimes, self._rule = task.source, runtimes, rule
        self.missing = ""
        try:
            test = task.source.test
            self._test: Batch | None = test.batch(np.arange(len(test)))
        except DataError as fault:
            self._test, self.missing = None, str(fault)

    def evaluate(self, state: ServerState) -> dict[str, Any]:
        """Accuracies, under the names in EVALUATED; none without a test set."""
        if self._test is None:
            return {}
        smooth = self._rule.smooth_weights(state)
        candidates = [smooth] if smooth is state.weights else [smooth, state.weights]
        with ThreadPoolExecutor(len(candidates)) as pool:
            results = list(pool.map(self._accuracies, candidates))
        return results[0] | {"test_accuracy_last": results[-1]["test_accuracy"]}

    def _accuracies(self, weights: F32) -> dict[str, Any]:
        assert self._test is not None
        with self._runtimes.borrow() as runtime:
            return accuracies(self._source, runtime.outputs(weights, self._test))


def accuracies(source: Source, outputs: F32) -> dict[str, Any]:
    """Accuracy of a model's outputs on the test set; top-5 if there are more than five classes; and both for each
    domain that has test samples."""
    labels_ranks, domain_of = ranks(outputs, source.test.labels), source.test.domain_of
    whole = {f"test_{name}": value for name, value in _shares(labels_ranks, source.classes).items()}
    if domain_of is None or not source.domains:
        return whole
    domains = {
        name: _shares(labels_ranks[domain_of == number], source.classes)
        for number, name in enumerate(source.domains)
        if (domain_of == number).any()
    }
    return whole | {"test_domains": domains}


def _shares(labels_ranks: I64, classes: int) -> dict[str, float]:
    tops = {"accuracy": 1} | ({"top5": TOP} if classes > TOP else {})
    return {name: round(float(np.mean(labels_ranks < top)), 6) for name, top in tops.items()}
