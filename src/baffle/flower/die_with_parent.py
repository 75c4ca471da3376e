"""Runs a command that ends when the process that started it ends, even if that one is killed.

    python -m baffle.flower.die_with_parent COMMAND …

Standard input is a pipe that the starter holds open. The system closes it when the starter has ended.
"""

import os
import signal
import subprocess
import sys
from threading import Thread


def main(command: list[str]) -> int:
    """Run a command until it ends by itself, or until the other end of standard input is closed."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda _number, _frame: process.terminate())

    def watch() -> None:
        while os.read(0, 1):
            pass
        process.kill()

    Thread(target=watch, daemon=True).start()
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
