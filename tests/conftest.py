"""What tests share: the choice of tests, a tiny plan, a finished run of it, the command line, data spoilt or real."""

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
from hypothesis import is_hypothesis_test, settings

from baffle.cli.main import main
from baffle.plan import Plan, load

os.environ |= {"ORT_DISABLE_TELEMETRY": "1", "FLWR_TELEMETRY_ENABLED": "0"}  # tests import both libraries themselves

settings.register_profile("random", deadline=None, print_blob=True)
settings.register_profile("same", settings.get_profile("random"), derandomize=True, database=None)
settings.load_profile("same")  # every run draws the same examples; `make soak` draws others

FEWER_EXAMPLES = 5
"""Without the slow tests, a property is tried on this fraction of its examples."""

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

    def part(rows):
        calls = []

        def prepare(stored):
            # A sensor that breaks once it has been checked: data that is not finite from the start is refused.
            calls.append(stored)
            return x[stored] if len(calls) > 1 else np.nan_to_num(x[stored])

        return Dataset(rows, y[rows], prepare)

    return Source(part(np.arange(60)), part(np.arange(60, 80)), classes=10)
"""


def _without_slow(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "not slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Try properties on fewer examples where slow tests are left out.

    A profile would not do: it is overruled by the number that most properties set for themselves.
    """
    if _without_slow(config):
        tests = {item.obj for item in items if isinstance(item, pytest.Function)}
        for test in filter(is_hypothesis_test, tests):
            whole = test._hypothesis_internal_use_settings
            fewer = max(10, whole.max_examples // FEWER_EXAMPLES)
            test._hypothesis_internal_use_settings = settings(whole, max_examples=min(fewer, whole.max_examples))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and how to run it."""
    if _without_slow(config):
        terminalreporter.write_line(
            "Slow tests were left out, and properties tried on fewer examples. "
            "To run everything: make test-all, or scripts/test --all"
        )


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Small operators are faster on one thread, above all on a busy machine."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: no test cuts the power."""
    monkeypatch.setattr("os.fsync", lambda _file: None)


FEW_KEYS = 8


@pytest.fixture(scope="module")
def few_keys() -> Iterator[None]:
    """Clients advertise keys for few slots at a time. Lists are quicker to make, and run out within a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baffle.aggregation.client.session.KEYS_AT_ONCE", FEW_KEYS)
        yield


@pytest.fixture
def data_folder() -> Path:
    """The folder of real data sets. Skips the test if there is none."""
    if not os.environ.get("BAFFLE_DATA"):
        pytest.skip("needs real data: set BAFFLE_DATA to a folder that holds it")
    return Path(os.environ["BAFFLE_DATA"])


@pytest.fixture
def spoilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], str]:
    """Gives a setting for data with 60 training samples, of which the named one (or slice) is not finite once a
    run has begun."""

    def setting(samples: object) -> str:
        name = f"spoilt_{uuid4().hex}"  # Python imports a module of one name only once
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
    """Gives the tiny plan, changed by settings."""
    return lambda *settings: load(str(tiny_toml), settings)


@pytest.fixture(scope="session")
def _finished(tiny: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from baffle.simulation import simulate

    path = tmp_path_factory.mktemp("finished") / "run"
    simulate(tiny(), path)
    return path


@pytest.fixture
def finished_run(_finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run of the tiny plan, for the test to read or spoil. Its snapshots are 0, 4 and 6."""
    return Path(shutil.copytree(_finished, tmp_path / "finished"))


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Calls the command line in this process."""

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
    """Starts the command line as a process that reacts to Ctrl-C even if this process ignores it."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "baffle.cli.main", *map(str, arguments)]
        ours = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        finally:
            signal.signal(signal.SIGINT, ours)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()
