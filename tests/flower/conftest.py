"""Clients at a SuperLink that end with their test."""

from collections.abc import Iterator

import pytest

from tests.support.superlinks import Echo, Join


@pytest.fixture
def join() -> Iterator[Join]:
    """Starts clients, which leave when the test ends."""
    echoes: list[Echo] = []

    def start(*arguments: object, **options: object) -> Echo:
        echoes.append(Echo(*arguments, **options))  # type: ignore[arg-type]
        return echoes[-1]

    yield start
    for echo in echoes:
        echo.client.stop()
    for echo in echoes:
        echo.leave()
