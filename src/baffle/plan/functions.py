"""Functions of a user's own, which a plan names."""

import importlib
from collections.abc import Callable
from typing import Any, cast

from baffle.errors import PlanError


def imported(name: str) -> Callable[..., Any]:
    """The function that "package.module:function" names."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as fault:
        raise PlanError(f"{name} cannot be imported: {fault}") from None
    if not callable(found):
        raise PlanError(f"{name} must be a function, got {type(found).__name__}")
    return cast(Callable[..., Any], found)
