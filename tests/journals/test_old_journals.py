"""Journals of earlier versions: each must replay, for ever, to the weights and hashes that it had when it was made."""

import json
import shutil
from pathlib import Path

import pytest

from baffle.journal.audit import verify

HERE = Path(__file__).resolve().parent
EXPECTED = json.loads((HERE / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_journal_replays_to_the_bits_that_it_was_made_with(name: str, tmp_path: Path) -> None:
    found = verify(shutil.copytree(HERE / name, tmp_path / "run"))
    assert {key: getattr(found, key) for key in EXPECTED[name]} == EXPECTED[name]


def test_every_journal_here_is_checked_and_some_rounds_are_skipped() -> None:
    assert {path.parent.name for path in HERE.glob("*/plan.toml")} == set(EXPECTED)
    for name in ("skipped", "refused-update"):
        assert 0 < EXPECTED[name]["skipped"] < EXPECTED[name]["rounds"]
