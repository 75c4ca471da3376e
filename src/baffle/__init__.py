"""Federated learning for clients that can only run inference."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from baffle.errors import BaffleError
from baffle.version import __version__

if TYPE_CHECKING:
    from baffle.core.pixels import PixelScale
    from baffle.core.probe import estimate
    from baffle.data.sources import Dataset, Source
    from baffle.fitting.advice import costs, tuned
    from baffle.fitting.fit import fit, resume
    from baffle.fitting.run import Run, open_run as open
    from baffle.grid.sweep import sweep
    from baffle.journal.audit import Verified, verify
    from baffle.plan import Plan, load as load_plan
    from baffle.simulation import simulate

__all__ = [
    "BaffleError",
    "Dataset",
    "PixelScale",
    "Plan",
    "Run",
    "Source",
    "Verified",
    "__version__",
    "costs",
    "estimate",
    "fit",
    "load_plan",
    "open",
    "resume",
    "simulate",
    "sweep",
    "tuned",
    "verify",
]

_HOMES = {
    "Dataset": ("baffle.data.sources", "Dataset"),
    "PixelScale": ("baffle.core.pixels", "PixelScale"),
    "Plan": ("baffle.plan", "Plan"),
    "Run": ("baffle.fitting.run", "Run"),
    "Source": ("baffle.data.sources", "Source"),
    "Verified": ("baffle.journal.audit", "Verified"),
    "costs": ("baffle.fitting.advice", "costs"),
    "estimate": ("baffle.core.probe", "estimate"),
    "fit": ("baffle.fitting.fit", "fit"),
    "load_plan": ("baffle.plan", "load"),
    "open": ("baffle.fitting.run", "open_run"),
    "resume": ("baffle.fitting.fit", "resume"),
    "simulate": ("baffle.simulation", "simulate"),
    "sweep": ("baffle.grid.sweep", "sweep"),
    "tuned": ("baffle.fitting.advice", "tuned"),
    "verify": ("baffle.journal.audit", "verify"),
}
"""Where each public name is defined, and its name there.

They are imported when they are first used: the command line must start without NumPy, and a client on the edge has
neither PyTorch nor SQLite.
"""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
