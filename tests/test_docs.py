"""What the docs name exists: tests that attack a promise, files of this repository, and places on other pages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"])
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


def anchors(page: Path) -> set[str]:
    """The places on a page that a link can lead to, as GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`(test_(?:[a-z0-9]+_){2,}\w+)`", text):  # a shorter one is a metric, as test_accuracy
        assert f"def {name}(" in TESTS, name
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|scripts|deploy|examples)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            path, _, place = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), target
            assert not place or place in anchors(linked), target
