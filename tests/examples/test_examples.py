"""Every example, and every Python block of the pages, runs. Those of the README and the quick start run as they stand
in an empty folder, the others after a few lines that make what they speak of."""

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


BEFORE = {
    "docs/data.md": """
import baffle
import numpy as np
import sys
from baffle import Dataset, Source
from pathlib import Path
np.save("houses.npy", np.random.default_rng(0).random((300, 4), np.float32))
np.save("prices.npy", np.arange(300, dtype=np.float32))
ids, tags = np.array([[3, 1, 0], [2, 0, 0]]), np.array([[1, 2, 0], [0, 0, 0]])
train = test = Dataset(np.zeros((20, 1, 8, 8), np.float32), np.arange(20) % 10)
""",
    "docs/plans.md": "",
    "docs/edge.md": """
from baffle.core.messages import encode
from baffle.data.sources import load as source_of
from baffle.export import export_plan
from baffle.network.keys.authority import make_keys
from baffle.plan import load
from baffle.runtime.torch.model import initial_module
from baffle.task.load import inputs_of
from pathlib import Path
make_keys(Path("keys"), 4, ["localhost"])
export_plan("digits", Path("model"), ["task.init="])
module, request = initial_module(load("digits"), inputs_of(load("digits"), source_of("digits", None, 0), None)), b"?"
""",
}
"""What the blocks of a page need before they run."""

AFTER = {
    "docs/data.md": 'assert houses(Path(".")).width == 1',
    "docs/plans.md": """
import sys
from pathlib import Path
import baffle
for number, settings in enumerate(({"task.loss": "mylosses:share_of_errors", "probe.sigma": 0.3},
                                   {"task.model": {"name": "custom", "factory": "mymodel:small"}, "task.init": ""})):
    plan = baffle.load_plan("digits", {"rounds": 2, "federation.clients": 4, "probe.k": 4, **settings})
    assert baffle.simulate(plan, f"run-{number}")["rounds"] == 2
""",
    "docs/edge.md": "assert reply",
}


def test_no_page_with_blocks_is_forgotten() -> None:
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md") if blocks(f"docs/{path.name}")}
    assert {*PAGES, *BEFORE} == pages | {"README.md"}


@pytest.mark.slow
@pytest.mark.parametrize("page", BEFORE)
def test_the_blocks_of_another_page(page: str, tmp_path: Path) -> None:
    program = list[str]()
    for block in blocks(page):
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
        program.append(block)
    run_python(cwd=tmp_path, program="\n".join([BEFORE[page], *program, AFTER[page]]))
