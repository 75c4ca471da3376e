"""Settings that several targets lay over a preset."""

from collections.abc import Mapping

from baffle.paper.target import Scale

Settings = tuple[str, ...]

PRESET: Mapping[Scale, str] = {"smoke": "digits", "short": "paper-mnist-lenet", "full": "paper-mnist-lenet"}

FEW_DIGITS: Settings = (
    "federation.clients=30",
    "federation.participation=0.1",
    "federation.batch=16",
    "rounds=2",
    "run.evaluate_every=1",
)
"""A smoke test on the digits that takes seconds."""

UNITS: Settings = (
    *("probe.supports=units", "probe.distribution=rademacher", "probe.sigma=1e-3"),
    *("federation.batch=8", "update.rate=0.02", "update.clip=0.3"),
)
"""Directions that touch one unit each cost a small part of a forward pass, so runs get somewhere in minutes."""
