"""Nonsense from strangers, clients, servers and files: a million malformed messages, which must end nothing and hang
nothing.

    python benchmarks/fuzz_messages.py                      # 1,000,000 messages
    python benchmarks/fuzz_messages.py --count 20000 --seed 7 --json
    python benchmarks/fuzz_messages.py --only plan --count 5000
    python benchmarks/fuzz_messages.py --join A.json B.json --json    # one result of several, of different areas

Control-C or a SIGTERM ends a run early and prints the results so far.

Real messages and files are damaged: bits are flipped, bytes cut off, added, spliced and nested, and fields get other
types, other tags, extreme numbers and false lengths, also in messages inside messages and in the text of plans. They go
to these, each in a module of fuzzing/ that says more:

    stranger  the port of a real link, with and without TLS, while a client is connected and asked
    line      that port, from clients of the roster: signed answers to everything that a server asks, and envelopes
    caller    the client's end of a line: websockets, handshakes, envelopes
    member    a client before every message of a run: signed messages of a server that lies
    run       whole runs of `serve` with real clients of which two lie
    sum       both ends of a secure sum in every phase
    plan      plans and policies, from files and from servers
    roster    rosters, handed over and in folders of keys
    file      keys, certificates, marks, saved weights, crash records
    journal   folders of runs

The checks: Nothing but a BaffleError is raised, and no refusal takes longer than a second (an audit: three). A message
that was refused has changed nothing. Honest clients come through, threads and open files do not grow, runs come to an
end. From a tenth of its messages on, none of these makes the process grow by more than 16 MB. If a check fails, that is
a violation, and the exit status is 1.
"""

import argparse
import faulthandler
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fuzzing.callers import callers
from fuzzing.checks import VIOLATION, Tried, resident_bytes
from fuzzing.files import files
from fuzzing.journals import journals
from fuzzing.lines import lines
from fuzzing.members import members
from fuzzing.plans import plans
from fuzzing.rosters import rosters
from fuzzing.runs import runs
from fuzzing.strangers import strangers
from fuzzing.sums import sums

MILLION = 1_000_000
MOST_GROWTH = 16 * 2**20

HANGS = 300.0
"""Seconds without a message after which the fuzzer ends with the traceback of what hangs."""

EVERY = 5.0
"""Seconds between two lines about progress."""

Area = Callable[[int, int], Iterator[Tried]]
"""How many messages, and a seed → what became of each."""

AREAS: dict[str, tuple[Area, int]] = {
    "stranger": (strangers, 10_000),
    "line": (lines, 80_000),
    "caller": (callers, 15_000),
    "member": (members, 300_000),
    "run": (runs, 500),
    "sum": (sums, 396_500),
    "plan": (plans, 80_000),
    "roster": (rosters, 100_000),
    "file": (files, 10_000),
    "journal": (journals, 8_000),
}
"""Of a million messages, how many go where. What costs much gets few."""
assert sum(share for _, share in AREAS.values()) == MILLION


@dataclass
class Results:
    """What became of the messages so far."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    areas: dict[str, dict[str, Any]] = field(default_factory=dict)
    violations: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    _told: float = field(default_factory=time.monotonic)

    def take(self, name: str, result: Tried) -> None:
        outcome = result.outcome
        if outcome.startswith(VIOLATION):
            self.violations[outcome] += 1
            self.examples.setdefault(outcome, result.data[:2000].hex())
            outcome = "violation"
        self.outcomes.setdefault(result.where.split(" (")[0], Counter())[outcome] += 1
        area = self.areas[name]
        area[outcome] = area.get(outcome, 0) + 1
        area["messages"] += 1

    def tell(self, name: str, *, always: bool = False) -> None:
        now = time.monotonic()
        if always or now - self._told > EVERY:
            self._told = now
            area = self.areas[name]
            print(
                f"{now - self.began:.0f} s, {name}: {area['messages']:,} of {area['planned']:,} messages, "
                f"{self.violations.total()} violations",
                file=sys.stderr,
                flush=True,
            )

    def summary(self, seed: int) -> dict[str, Any]:
        messages, seconds = sum(area["messages"] for area in self.areas.values()), time.monotonic() - self.began
        return {
            "messages": messages,
            "seed": seed,
            "seconds": round(seconds, 1),
            "messages_per_second": round(messages / seconds),
            "grown_bytes": max((area["grown_bytes"] for area in self.areas.values()), default=0),
            "areas": self.areas,
            "outcomes": {name: dict(sorted(counts.items())) for name, counts in sorted(self.outcomes.items())},
            "violations": {
                what: {"times": n, "example": self.examples.get(what, "")} for what, n in self.violations.most_common()
            },
        }


def fuzz(planned: dict[str, int], seed: int) -> dict[str, Any]:
    """Send so many messages to each area."""
    results = Results()
    with suppress(KeyboardInterrupt):
        for name, count in planned.items():
            _fuzz_area(name, count, seed, results)
    faulthandler.cancel_dump_traceback_later()
    return results.summary(seed)


def _fuzz_area(name: str, count: int, seed: int, results: Results) -> None:
    area = results.areas[name] = {"messages": 0, "planned": count, "seconds": 0.0, "grown_bytes": 0}
    began, warm, grown = time.monotonic(), count // 10, resident_bytes()
    _watch()
    try:
        with closing(cast(Generator[Tried, None, None], AREAS[name][0](count, seed))) as tries:
            for number, result in enumerate(tries):
                if number == warm:
                    grown = resident_bytes()
                results.take(name, result)
                if number % 100 == 0:
                    _watch()
                    results.tell(name)
            area["grown_bytes"] = resident_bytes() - grown
    finally:
        area["seconds"] = round(time.monotonic() - began, 1)
        results.tell(name, always=True)
    if area["grown_bytes"] > MOST_GROWTH:
        what = f"the process has grown by {area['grown_bytes'] / 2**20:.1f} MB"
        results.violations[f"{VIOLATION} {name}: {what}"] += 1


def _watch() -> None:
    """Begin to wait for the next messages. What is stuck in C cannot be interrupted, only ended."""
    faulthandler.dump_traceback_later(HANGS, exit=True)


def planned(count: int, only: str = "") -> dict[str, int]:
    """How many of so many messages go to each area."""
    if only:
        return {only: count}
    shares = {name: max(1, count * share // MILLION) for name, (_, share) in AREAS.items()}
    shares["sum"] += max(0, count - sum(shares.values()))
    return shares


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of several runs. What two runs sent to the same place is added up."""
    whole: dict[str, Any] = {"messages": 0, "seed": results[0]["seed"], "seconds": 0.0, "messages_per_second": 0}
    whole |= {"grown_bytes": 0, "areas": {}, "outcomes": {}, "violations": {}}
    for result in results:
        for name in ("messages", "seconds"):
            whole[name] = round(whole[name] + result[name], 1)
        whole["grown_bytes"] = max(whole["grown_bytes"], result["grown_bytes"])
        whole["violations"] |= result["violations"]
        for name, area in result["areas"].items():
            known = whole["areas"].setdefault(name, {"planned": area["planned"], "grown_bytes": area["grown_bytes"]})
            known["grown_bytes"] = max(known["grown_bytes"], area["grown_bytes"])
            for what in area.keys() - {"planned", "grown_bytes"}:
                known[what] = round(known.get(what, 0) + area[what], 1)
        for where, counts in result["outcomes"].items():
            known = whole["outcomes"].setdefault(where, {})
            for what, times in counts.items():
                known[what] = known.get(what, 0) + times
    whole["areas"] = {name: whole["areas"][name] for name in AREAS if name in whole["areas"]}
    return whole | {"messages_per_second": round(whole["messages"] / whole["seconds"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0, help="how many messages; of a million, each area has its share")
    parser.add_argument("--only", choices=list(AREAS), help="send all of them there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE", help="join results instead")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    usual = AREAS[args.only][1] if args.only else MILLION
    if args.join:
        result = joined([json.loads(path.read_text()) for path in args.join])
    else:
        result = fuzz(planned(args.count or usual, args.only), args.seed)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for name, counts in result["outcomes"].items():
            print(f"{name:44} {', '.join(f'{times:,} {what}' for what, times in counts.items())}")
        for name, area in result["areas"].items():
            print(
                f"{name:10} {area['messages']:,} in {area['seconds']} s, grown by {area['grown_bytes'] / 2**20:.1f} MB"
            )
        for what, violation in result["violations"].items():
            print(f"{violation['times']} × {what}\n    {violation['example'][:200]}")
    sys.exit(bool(result["violations"]))


if __name__ == "__main__":
    main()
