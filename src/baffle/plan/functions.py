"""Functions of your own that a plan names: how they are found, and which arguments they get."""

import importlib
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from baffle.errors import BaffleError, OwnFunctionError, PlanError, one_line
from baffle.plan.plan import Plan
from baffle.plan.sections import Custom
from baffle.plan.tasks import is_own

_searching = threading.RLock()

GIVEN = "given"  # the module part of the name of an object that was given to `baffle.fit`. It cannot be imported


def call_own(setting: str, name: str, **offered: object) -> Any:
    """Call "package.module:function" with those offered values that are among its parameters."""
    with _current_folder():
        function = _imported(setting, name)
        arguments = _declared(setting, name, function, offered)
        with calling(f"{setting}: {name}"):
            return function(**arguments)


def own_function(setting: str, name: str) -> Callable[..., Any]:
    """The function "package.module:function"."""
    with _current_folder():
        return _imported(setting, name)


def named_by(plan: Plan) -> list[str]:
    """The functions that a plan names, without the objects that were given to `baffle.fit`."""
    task = plan.task
    factory = [task.model.factory] if isinstance(task.model, Custom) else []
    arithmetic = (plan.update.optimizer, plan.update.schedule, plan.probe.distribution)
    names = dict.fromkeys([task.data, *factory, task.loss, *task.metrics, *arithmetic])
    return [name for name in names if is_own(name) and not name.startswith(f"{GIVEN}:")]


def require_own_code(plan: Plan, folder: Path, *, own_code: bool) -> None:
    """Refuse the plan in a run's folder if it names functions, unless the user vouches for them: the folder may come
    from a stranger, and a function may do anything."""
    if not own_code and (names := named_by(plan)):
        raise PlanError(
            f"the plan in {folder} names functions, which this would call: {one_line(', '.join(names))}; if you trust "
            "them, give --own-code (in Python own_code=True)"
        )


@contextmanager
def calling(whose: str) -> Iterator[None]:
    """Turn an exception of a user's function into an error that names the function."""
    try:
        yield
    except BaffleError:
        raise
    except Exception as fault:
        raise OwnFunctionError(f"{whose} raised {_in_one_line(fault)}") from fault


@contextmanager
def _current_folder() -> Iterator[None]:
    """Let modules be imported from the current folder, after all others, so that a file there shadows no installed
    package.

    Only during a call: a folder that is named like a missing package must not pass for it when BAFFLE looks for that
    package.
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
        place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), module.__name__)
        raise PlanError(f"{setting}: {name} cannot be imported: {place} has no {attribute or 'such function'}")
    function = getattr(module, attribute)
    if not callable(function):
        raise PlanError(f"{setting}: {name} must be a function, got {type(function).__name__}")
    return cast(Callable[..., Any], function)


def _declared(setting: str, name: str, function: Callable[..., Any], offered: dict[str, object]) -> dict[str, object]:
    """The offered values that are among the function's parameters. Other parameters need defaults."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions that are written in C have no signature
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    collects = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    arguments = {p.name: offered[p.name] for p in parameters if p.kind in by_name and p.name in offered}
    for p in parameters:
        if p.name not in arguments and p.kind not in collects and p.default is inspect.Parameter.empty:
            known = " and ".join(offered)
            raise PlanError(f"{setting}: {name} needs {p.name}: expected no parameters without a default but {known}")
    return arguments


def _in_one_line(fault: Exception) -> str:
    """An exception's type, the first line of its message, and where it was raised."""
    words = str(fault).splitlines()
    frames = traceback.extract_tb(fault.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if not isinstance(fault, SyntaxError) else ""
    return f"{type(fault).__name__}{f': {words[0]}' if words else ''}{place}"
