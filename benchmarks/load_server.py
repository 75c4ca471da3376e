"""The server's process of benchmarks/load.py: the real `serve` over a real `Link`.

After each round it notes what it has spent so far, and waits if it may not play another one yet. The file `orders` says
how many rounds it may play, and the deadline of exchanges.
"""

import json
import sys
import threading
import time
from pathlib import Path
from unittest import mock

from secure_sum import Meter
from swarm import cpu_of

from baffle.aggregation.server.secure_sum import SecureSum
from baffle.network.keys.authority import ServerKeys
from baffle.network.link.server import Link, server_tls
from baffle.network.server.machine import require_open_files
from baffle.network.server.serve import serve
from baffle.plan import load
from baffle.server.recorder import Progress

MOMENT = 0.02


def main() -> None:
    folder, port, *settings = sys.argv[1:]
    keys, plan = ServerKeys.load(Path(folder, "keys", "server")), load("digits", settings)
    require_open_files(len(keys.roster.clients), sys.exit)
    meter = Meter()
    with (
        mock.patch.object(SecureSum, "collect", meter.around(SecureSum.collect, "collect")),
        mock.patch.object(Link, "carry", meter.around(Link.carry, "carry")),
        Link(keys, "127.0.0.1", int(port), server_tls(keys), plan.run.deadline_seconds, tell=tell) as link,
        Path(folder, "rows.jsonl").open("a") as rows,
    ):
        on_link = next(thread for thread in threading.enumerate() if thread.name == "link")

        def note(progress: Progress) -> None:
            if float(progress.rounds_done).is_integer():
                threads = {"link": cpu_of(on_link), "main": cpu_of(threading.main_thread())}
                cpu = {**threads, **meter.spent, "process": time.process_time()}
                row = {"round": progress.rounds_done, "moment": time.monotonic(), "cpu": cpu}
                print(json.dumps(row), file=rows, flush=True)
                while (orders := read_orders(Path(folder)))["rounds"] <= progress.rounds_done:
                    time.sleep(MOMENT)
                link._exchanges._seconds = orders["deadline"]

        tell("listening")
        least = len(keys.roster.clients)
        serve(plan, Path(folder, "run"), link, keys.roster, least=least, watch=note, tell=tell)


def read_orders(folder: Path) -> dict[str, float]:
    orders: dict[str, float] = json.loads((folder / "orders").read_text())
    return orders


def tell(words: str) -> None:
    print(words, flush=True)


if __name__ == "__main__":
    main()
