"""Functions of a user's own that a plan names: where they are looked for, and what they are called with."""

import importlib
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from baffle.errors import BaffleError, OwnFunctionError, PlanError

_searching = threading.RLock()

GIVEN = "given"
"""The module, in names, of what was given to `baffle.fit` as an object. It cannot be imported."""


def call_own(setting: str, name: str, **offered: object) -> Any:
    """Call "package.module:function" with those of the offered values that it has parameters for, by name."""
    with _current_folder():
        function = _imported(setting, name)
        arguments = _declared(setting, name, function, offered)
        with calling(f"{setting}: {name}"):
            return function(**arguments)


def own_function(setting: str, name: str) -> Callable[..., Any]:
    """The function "package.module:function"."""
    with _current_folder():
        return _imported(setting, name)


@contextmanager
def calling(whose: str) -> Iterator[None]:
    """Whatever a user's function raises inside becomes an error that begins with whose function it is."""
    try:
        yield
    except BaffleError:
        raise
    except Exception as fault:
        raise OwnFunctionError(f"{whose} raised {_in_one_line(fault)}") from fault


@contextmanager
def _current_folder() -> Iterator[None]:
    """Let modules be found in the current folder, after all others, so that a file there shadows no installed package.

    Only for the time of a call: a folder that happens to be named like a package that is not installed must not pass
    for it when BAFFLE looks for that package.
    """
    here = str(Path.cwd())
    with _searching:
        if here in sys.path or "" in sys.path:
            yield
            return
        sys.path.append(here)
        try:
            yield
        finally:
            with suppress(ValueError):
                sys.path.remove(here)


def _imported(setting: str, name: str) -> Callable[..., Any]:
    path, _, attribute = name.partition(":")
    if path == GIVEN:
        raise PlanError(
            f"{setting}: this was given to baffle.fit as an object, and no plan can name it; go on in Python: "
            "baffle.resume(DIR, model=…, clients=…)"
        )
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(path)
    except Exception as fault:  # a user's module can raise anything
        if isinstance(fault, ModuleNotFoundError) and f"{path}.".startswith(f"{fault.name}."):
            folders = ", ".join(folder or str(Path.cwd()) for folder in sys.path)
            raise PlanError(f"{setting}: {name} cannot be imported: no module {fault.name} in {folders}") from None
        raise PlanError(f"{setting}: {name} cannot be imported: {_in_one_line(fault)}") from fault
    if not hasattr(module, attribute):
        raise PlanError(f"{setting}: {name} cannot be imported: {_place(module)} has no {attribute or 'such function'}")
    function = getattr(module, attribute)
    if not callable(function):
        raise PlanError(f"{setting}: {name} must be a function, got {type(function).__name__}")
    return cast(Callable[..., Any], function)


def _declared(setting: str, name: str, function: Callable[..., Any], offered: dict[str, object]) -> dict[str, object]:
    """The offered values that the function names in its signature; it must need no others."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions that are written in C have no signature
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    collects = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    arguments = {p.name: offered[p.name] for p in parameters if p.kind in by_name and p.name in offered}
    for parameter in parameters:
        if parameter.name in arguments or parameter.kind in collects:
            continue
        if parameter.default is inspect.Parameter.empty:
            raise PlanError(
                f"{setting}: {name} needs {parameter.name}: expected no parameters without a default but "
                f"{' and '.join(offered)}"
            )
    return arguments


def _place(module: ModuleType) -> str:
    folders = list(getattr(module, "__path__", []))
    return str(getattr(module, "__file__", None) or (folders[0] if folders else module.__name__))


def _in_one_line(fault: Exception) -> str:
    """An exception's type, its words' first line, and where it was raised."""
    words = str(fault).splitlines()
    frames = traceback.extract_tb(fault.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if not isinstance(fault, SyntaxError) else ""
    return f"{type(fault).__name__}{f': {words[0]}' if words else ''}{place}"
