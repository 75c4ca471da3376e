"""The public names, and that reading plans and checking journals needs no PyTorch."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import baffle


def test_the_public_names_are_these_and_exist() -> None:
    classes = {"BaffleError", "Dataset", "PixelScale", "Plan", "Run", "Source", "Verified"}
    functions = {"costs", "estimate", "fit", "load_plan", "open", "resume", "simulate", "sweep", "tuned", "verify"}
    assert set(baffle.__all__) == classes | functions | {"__version__"}
    for name in baffle.__all__:
        assert getattr(baffle, name) is not None


def test_folders_may_be_strings(tiny: Callable[..., baffle.Plan], tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    first = baffle.simulate(tiny("rounds=2"), folder, data=str(tmp_path))
    assert baffle.verify(folder).weights_sha256 == first["weights_sha256"]
    assert baffle.resume(folder, ["rounds=4"], data=str(tmp_path))["rounds"] == 4


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        baffle.no_such_name  # noqa: B018


def test_importing_the_package_imports_no_machine_learning_library_and_hardly_anything_else() -> None:
    program = (
        "import sys, baffle, baffle.cli.main, baffle.trajectory, baffle.journal.replay, baffle.aggregation.plain,"
        "baffle.aggregation.server.secure_sum;"
        "baffle.load_plan('digits');"
        "print(sorted({'torch', 'sklearn', 'scipy', 'flwr', 'onnxruntime'} & sys.modules.keys()))"
    )
    alone = "import sys, baffle; print(sorted({'numpy', 'msgspec', 'cryptography', 'sqlite3'} & sys.modules.keys()))"
    for code in (program, alone):
        assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
