"""Journals beside the results: replaying one gives the weights that its page names."""

import json
import shutil
from pathlib import Path

import pytest

from baffle.journal.audit import verify

PAPER = Path(__file__).resolve().parents[2] / "results" / "paper"
JOURNALS = sorted((PAPER / "journals").iterdir())


@pytest.mark.parametrize("folder", JOURNALS, ids=lambda folder: folder.name)
def test_a_journal_replays_to_the_weights_of_its_row(folder: Path, tmp_path: Path) -> None:
    replayed = verify(shutil.copytree(folder, tmp_path / "run"))
    assert replayed.rounds > 0
    if (folder / "summary.json").exists():  # an unfinished run has no row yet
        stem, _, asked = folder.name.rpartition("-")
        page = json.loads((PAPER / f"{stem}.json").read_text())
        (name,) = (name for name, run in page["runs"].items() if run["asked"].startswith(asked))
        assert page["weights"][name] == replayed.weights_sha256
