"""Every Python block of the README and the quick start runs, each page from top to bottom in an empty folder."""

import re
from pathlib import Path

import pytest

from tests.support.environments import run_python

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/quickstart.md")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_each_page_has_some() -> None:
    assert all(blocks(page) for page in PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page(page: str, tmp_path: Path) -> None:
    run_python(cwd=tmp_path, program="\n".join(blocks(page)))
