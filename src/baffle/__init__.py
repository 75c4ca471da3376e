"""Federated learning for clients that can only run inference."""

from typing import TYPE_CHECKING, Any

from baffle.core.pixels import PixelScale
from baffle.data.sources import Dataset, Source
from baffle.errors import BaffleError
from baffle.plan import Plan
from baffle.plan import load as load_plan
from baffle.version import __version__

if TYPE_CHECKING:
    from baffle.journal.replay import Verified, verify
    from baffle.simulation import resume, simulate

__all__ = [
    "BaffleError",
    "Dataset",
    "PixelScale",
    "Plan",
    "Source",
    "Verified",
    "__version__",
    "load_plan",
    "resume",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    # These need PyTorch, or SQLite; a client on the edge has neither.
    if name in ("resume", "simulate"):
        from baffle import simulation

        return getattr(simulation, name)
    if name in ("Verified", "verify"):
        from baffle.journal import replay

        return getattr(replay, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
