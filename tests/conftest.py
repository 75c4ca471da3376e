"""What tests share: a tiny plan, a finished run of it, the command line, and data, spoilt or real."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import settings

from baffle.cli.main import main
from baffle.plan import Plan, load

settings.register_profile("baffle", deadline=None)
settings.load_profile("baffle")

TINY = """
name = "tiny"
rounds = 6
task.model = {name = "softmax"}
federation.clients = 3
probe = {k = 4, distribution = "rademacher"}
secure.mode = "off"
run.snapshot_every = 2
"""


SPOILT = """
import numpy as np
from baffle import Dataset, Source

def data():
    random = np.random.default_rng(0)
    x = random.standard_normal((80, 1, 8, 8)).astype(np.float32)
    x[{samples}] = np.nan
    y = random.integers(0, 10, 80)
    return Source(Dataset(x[:60], y[:60], lambda x: x), Dataset(x[60:], y[60:], lambda x: x), classes=10)
"""


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Small operators are quicker on one thread, most of all on a busy machine."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture
def data_folder() -> Path:
    """The folder of real data sets; without one, the test is skipped."""
    if not os.environ.get("BAFFLE_DATA"):
        pytest.skip("needs real data: set BAFFLE_DATA to a folder that holds it")
    return Path(os.environ["BAFFLE_DATA"])


@pytest.fixture
def spoilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], str]:
    """A setting for data with 60 training samples, of which one (or a slice) is not finite."""

    def setting(samples: object) -> str:
        name = f"spoilt_{uuid4().hex}"  # each test imports its own
        (tmp_path / f"{name}.py").write_text(SPOILT.format(samples=samples))
        monkeypatch.syspath_prepend(tmp_path)
        return f'task.data="{name}:data"'

    return setting


@pytest.fixture(scope="session")
def tiny_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file whose run takes a tenth of a second."""
    path = tmp_path_factory.mktemp("plans") / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def tiny(tiny_toml: Path) -> Callable[..., Plan]:
    """The tiny plan with settings laid over it."""
    return lambda *settings: load(str(tiny_toml), settings)


@pytest.fixture(scope="session")
def _finished(tiny: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from baffle.simulation import simulate

    path = tmp_path_factory.mktemp("finished") / "run"
    simulate(tiny(), path)
    return path


@pytest.fixture
def finished_run(_finished: Path, tmp_path: Path) -> Path:
    """A finished run of the tiny plan, to be read or spoiled: its snapshots are 0, 4 and 6."""
    return Path(shutil.copytree(_finished, tmp_path / "finished"))


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line, called in this process."""

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["baffle", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        code = stopped.value.code
        return subprocess.CompletedProcess(sys.argv, code if isinstance(code, int) else 1, *capsys.readouterr())

    return call


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """The command line, started in a process of its own that hears Ctrl-C even where this one does not."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "baffle.cli.main", *map(str, arguments)]
        here = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        finally:
            signal.signal(signal.SIGINT, here)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()
