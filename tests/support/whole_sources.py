"""Data sets whose two parts are read at once, so that a fault in either of them shows."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from baffle.data.sources import Source

P = ParamSpec("P")


def eager(read: Callable[P, Source]) -> Callable[P, Source]:
    """The same reader, which reads the training and the test set before it returns."""

    @wraps(read)
    def read_both(*args: P.args, **kwargs: P.kwargs) -> Source:
        source = read(*args, **kwargs)
        assert source.train is source.train
        assert source.test is source.test
        return source

    return read_both
