"""The examples in the docstrings of the public functions run, with the names that they take for granted."""

import doctest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import baffle
from tests.fitting.test_fit import fit, shared, small, vectors


@pytest.fixture
def taken_for_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model, the data of some clients, and a run of theirs in runs/mine."""
    monkeypatch.chdir(tmp_path)
    clients, test = shared(*vectors(60)), vectors(20, 1)
    names = {
        f"{name}{number}": part for number, pair in enumerate(clients) for name, part in zip("xy", pair, strict=True)
    }
    run = fit(tmp_path, small(), clients, test, rounds=2)
    (tmp_path / "runs").mkdir(exist_ok=True)
    run.path.rename("runs/mine")
    return {"baffle": baffle, "model": small(), "clients": clients, "test": test, "x": test[0], "y": test[1], **names}


@pytest.mark.slow
@pytest.mark.parametrize("function", [baffle.fit, baffle.resume, baffle.open])
def test_an_example_runs(function: Callable[..., object], taken_for_granted: dict[str, Any]) -> None:
    examples = doctest.DocTestParser().get_examples(function.__doc__ or "")
    assert examples
    for example in examples:
        exec(example.source, taken_for_granted)  # what it prints is not compared: rounds and folders differ
