"""Executes runs in forked processes and kills them: after a time, after a number of rounds, or before a write.

PyTorch is imported once, here, and never used before a fork. Each line of standard input is an order in JSON. Each is
answered with one line: how many processes were killed, and whether the last one, left alone, finished the run.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import baffle.runtime.torch.model  # noqa: F401  (with PyTorch, which takes seconds)
from baffle.plan import load
from baffle.simulation import resume, simulate

WRITES = ("os.mkdir", "os.rename", "sqlite3.connect")


def run(folder: Path, plan: str, settings: list[str]) -> None:
    """Resume the run, or start it if there is none yet, as a person would."""
    if (folder / "plan.toml").exists():
        resume(folder)
    else:
        simulate(load(plan, settings), folder)


def die_before_write(number: int) -> None:
    """Kill this process just before its n-th change to the file system."""
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        writes = event in WRITES or (event == "open" and str(arguments[1])[:1] in ("w", "a"))
        seen += writes
        if writes and seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def rounds_recorded(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def attempt(order: dict[str, Any], end: dict[str, Any]) -> int:
    """Run one process, kill it as ordered, and return its wait status."""
    folder = Path(order["folder"])
    before = rounds_recorded(folder)
    child = os.fork()
    if not child:
        try:
            if "write" in end:
                die_before_write(end["write"])
            run(folder, order["plan"], order["settings"])
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if "rounds" in end:
        while (
            rounds_recorded(folder) < before + end["rounds"]
            and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        ):
            time.sleep(0.0005)
    if "seconds" in end:
        time.sleep(end["seconds"])
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        killed = sum(os.WIFSIGNALED(attempt(order, end)) for end in order["ends"])
        finished = attempt(order, {}) == 0
        sys.stdout.write(json.dumps({"killed": killed, "finished": finished}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
