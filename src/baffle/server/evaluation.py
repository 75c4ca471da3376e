"""Metrics of weights on a test set, overall and for each domain."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.core.state import Rule, ServerState
from baffle.errors import DataError, UnusableDataError
from baffle.task.load import Runtimes
from baffle.task.metrics import measured
from baffle.task.server_task import ServerTask


class Evaluation:
    """Evaluates states on a task's test set. Without a test set it evaluates nothing, and `missing` says why."""

    def __init__(self, task: ServerTask, runtimes: Runtimes, rule: Rule) -> None:
        self._source, self._runtimes, self._rule = task.source, runtimes, rule
        self._metrics = task.require_measurable()
        self.missing = ""
        try:
            test = task.source.test
            self._test: Batch | None = test.batch(np.arange(len(test)))
        except UnusableDataError:
            raise
        except DataError as fault:
            self._test, self.missing = None, str(fault)

    @property
    def names(self) -> list[str]:
        """What is measured; the first is the headline."""
        return [metric.name for metric in self._metrics]

    def evaluate(self, state: ServerState) -> dict[str, Any]:
        """Each metric as `test_NAME`, of the averaged weights (of the last ones, if the plan averages none), and the
        headline also as `test_NAME_last`, of the last weights; nothing without a test set."""
        if self._test is None:
            return {}
        smooth = self._rule.smooth_weights(state)
        candidates = [smooth] if smooth is state.weights else [smooth, state.weights]
        with ThreadPoolExecutor(len(candidates)) as pool:
            results = list(pool.map(self._measured, candidates))
        headline = f"test_{self.names[0]}"
        return results[0] | {f"{headline}_last": results[-1][headline]}

    def _measured(self, weights: F32) -> dict[str, Any]:
        assert self._test is not None
        with self._runtimes.borrow() as runtime:
            return measured(self._metrics, runtime, weights, self._test, self._source)
