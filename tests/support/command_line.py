"""What tests of the command line share; the fixture `cli` calls it."""

import json
import subprocess
import sys
from collections.abc import Callable
from subprocess import CompletedProcess

Cli = Callable[..., CompletedProcess[str]]


def refused(done: CompletedProcess[str], *words: str) -> str:
    """Check that a command was refused: one line on stderr that holds these words, and nothing else. Gives the line."""
    assert done.returncode == 2
    assert done.stdout.strip() == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("\n")
    for part in words:
        assert part in done.stderr
    return done.stderr


def setting(*settings: str) -> list[str]:
    """These settings as arguments."""
    return [word for text in settings for word in ("--set", text)]


_MODULES_LAST = """
import json, sys
from baffle.cli.main import main
sys.argv = ["baffle", *sys.argv[1:]]
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)))
"""


def loaded_by(*arguments: object) -> tuple[str, set[str]]:
    """What a command prints in a process of its own, and the modules that it loads."""
    command = [sys.executable, "-c", _MODULES_LAST, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    *printed, modules = done.stdout.splitlines()
    return "\n".join(printed), set(json.loads(modules))
