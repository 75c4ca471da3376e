"""Most runs here are short, so clients advertise few keys at a time."""

import pytest


@pytest.fixture(autouse=True)
def _few_keys(few_keys: None) -> None:
    pass
