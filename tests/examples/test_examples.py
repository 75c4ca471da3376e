"""Every example, and every Python block of the README and the quick start, runs as it stands in an empty folder."""

import os
import re
from pathlib import Path

import pytest

from tests.support.environments import run_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

EXPECTED = {
    "own_model": (r"^accuracy ([\d.]+)%", 90),
    "regression": (r"^R² ([\d.]+)", 0.8),
    "loss_without_derivative": (r"([\d.]+)% of the digits right", 80),
    "onnx_from_elsewhere": (r"^accuracy ([\d.]+)%", 85),
    "callbacks": (r"^accuracy ([\d.]+)%; 80 rounds", 90),
    "own_optimizer": (r"^accuracy ([\d.]+)%", 85),
    "own_schedule": (r"^accuracy ([\d.]+)%", 85),
    "own_distribution": (r"^accuracy ([\d.]+)%", 85),
    "sentences": (r"^accuracy ([\d.]+)%", 80),
    "handwriting_by_writers": (r"^accuracy ([\d.]+)%", 70),
}
"""What an example prints, and how large the number in it must be. They reach more; this is to notice what breaks."""

NEED_DATA = {"sentences": "text", "handwriting_by_writers": "mnist"}


def test_each_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == EXPECTED.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example(name: str, tmp_path: Path) -> None:
    arguments = []
    if name in NEED_DATA:
        data = os.environ.get("BAFFLE_DATA", "")
        if not data or not (Path(data) / NEED_DATA[name]).is_dir():
            pytest.skip(f"needs real data: set BAFFLE_DATA to a folder that holds {NEED_DATA[name]}/")
        arguments = [data]
    printed = run_python(EXAMPLES / f"{name}.py", *arguments, cwd=tmp_path)
    pattern, least = EXPECTED[name]
    (number,) = re.findall(pattern, printed, re.MULTILINE)
    assert float(number) >= least, printed


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
