"""What a round of ten clients costs in a network: CPU time of all of them and the server, and bytes of a client.

    python benchmarks/round_cost.py                     # of this tree
    python benchmarks/round_cost.py TREE --json         # of another checkout and of this one, in turns

Real members with marks and weights on disk and a real server, in one process and without a transport: what a link adds
is in network.py. Each turn is a process of its own. Given is the least time of all turns, over rounds after the first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
CLIENTS, FIRST, ROUNDS, TURNS = 10, 10, 40, 4
MODES = {"on": [], "malicious-server": ['federation.weighting="uniform"']}


def measured(mode: str) -> dict[str, float]:
    """A run of the tree from which `baffle` and `tests` are imported."""
    from baffle.core.messages import tag_of
    from baffle.network.member.policy import Policy
    from baffle.plan import load
    from tests.support.lines_in_memory import Federation, new_keys

    counted = {"up": 0, "down": 0, "rounds": 0}
    began = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [f"rounds={ROUNDS}", f'secure.mode="{mode}"', *MODES[mode]]
        policy: dict[str, Any] = {"without_privacy": True} if hasattr(Policy, "without_privacy") else {}
        plan = load("digits", settings)
        federation = Federation(new_keys(folder, CLIENTS), folder, plan, policy=Policy(**policy))
        lines = federation.lines(CLIENTS)
        carry = lines.carry

        def counting(requests: Any, run: bytes, **patience: bool) -> Any:
            nonlocal began
            if any(tag_of(data) == "masked-request" for data in requests.values()):
                counted["rounds"] += 1
                if counted["rounds"] == FIRST:
                    began = time.process_time()
            replies = carry(requests, run, **patience)
            if counted["rounds"] >= FIRST:
                counted["down"] += sum(map(len, requests.values()))
                counted["up"] += sum(map(len, replies.values()))
            return replies

        lines.carry = counting  # type: ignore[method-assign]
        federation.serve(lines)
        seconds, rounds = time.process_time() - began, ROUNDS - FIRST + 1
    return {"ms": 1000 * seconds / rounds, **{way: counted[way] / rounds / CLIENTS for way in ("up", "down")}}


def in_turns(trees: list[Path]) -> dict[str, dict[str, dict[str, float]]]:
    """Mode → tree → the least of each figure."""
    found: dict[str, dict[str, dict[str, float]]] = {mode: {} for mode in MODES}
    for turn in range(TURNS):
        for mode in MODES:
            for tree in trees[:: 1 if turn % 2 else -1]:
                paths = os.pathsep.join([str(tree / "src"), str(tree)])
                command = [sys.executable, __file__, "--mode", mode]
                env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
                one = json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)
                name = "before" if tree != HERE else "now"
                known = found[mode].get(name, one)
                found[mode][name] = {what: round(min(value, known[what]), 1) for what, value in one.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", nargs="?", type=Path, help="another checkout, to compare with")
    parser.add_argument("--mode", choices=list(MODES), help="only measure the tree that is imported, in this process")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(measured(args.mode)))
        return
    found = in_turns([*([args.tree.resolve()] if args.tree else []), HERE])
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for mode, trees in found.items():
        for name, one in trees.items():
            print(f"{mode:18} {name:7} {one['ms']:7.1f} ms, {one['up']:7,.0f} bytes up, {one['down']:7,.0f} down")


if __name__ == "__main__":
    main()
