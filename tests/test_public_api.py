"""The public names, and that reading plans and checking journals needs no PyTorch."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import baffle


def test_the_public_names_are_these_and_exist() -> None:
    assert sorted(baffle.__all__) == [
        "BaffleError",
        "Dataset",
        "PixelScale",
        "Plan",
        "Run",
        "Source",
        "Verified",
        "__version__",
        "estimate",
        "fit",
        "load_plan",
        "open",
        "resume",
        "simulate",
        "verify",
    ]
    for name in baffle.__all__:
        assert getattr(baffle, name) is not None


def test_folders_may_be_strings(tiny: Callable[..., baffle.Plan], tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    first = baffle.simulate(tiny("rounds=2"), folder, data=str(tmp_path))
    assert baffle.verify(folder).weights_sha256 == first["weights_sha256"]
    assert baffle.resume(folder, ["rounds=4"], data=str(tmp_path))["rounds"] == 4


def test_importing_the_package_is_quick() -> None:
    """CPU time, so that a busy machine does not matter; 0.05 s were measured."""
    program = "import resource, baffle; usage = resource.getrusage(resource.RUSAGE_SELF)"
    spent = subprocess.check_output(
        [sys.executable, "-c", f"{program}; print(usage.ru_utime + usage.ru_stime)"], text=True
    )
    assert float(spent) <= 0.3


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        baffle.no_such_name  # noqa: B018


def test_importing_the_package_imports_no_machine_learning_library() -> None:
    program = (
        "import sys, baffle, baffle.cli.main, baffle.trajectory, baffle.journal.replay, baffle.aggregation.plain,"
        "baffle.aggregation.server.secure_sum, baffle.transport.local, baffle.transport.dropouts;"
        "baffle.load_plan('digits');"
        "print(sorted({'torch', 'sklearn', 'scipy', 'flwr', 'onnxruntime'} & sys.modules.keys()))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
