"""Federations for tests of the network. Most runs are short, so clients advertise few keys at a time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.network.member.policy import Policy
from baffle.plan import Plan
from tests.support.lines_in_memory import Federation, new_keys


@pytest.fixture(autouse=True)
def _few_keys(few_keys: None) -> None:
    pass


@pytest.fixture
def federate(tiny: Callable[..., Plan], tmp_path: Path) -> Callable[..., Federation]:
    """Makes a federation of so many clients, with secure sums and these settings."""

    def make(clients: int, *settings: str, policy: Policy | None = None) -> Federation:
        plan = tiny('secure.mode="on"', "run.evaluate_every=100", *settings)
        return Federation(new_keys(tmp_path, clients), tmp_path, plan, policy=policy)

    return make


@pytest.fixture
def federation(federate: Callable[..., Federation]) -> Federation:
    """Four clients; three are enough for a round."""
    return federate(4)
