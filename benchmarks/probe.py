"""How fast a client probes: BAFFLE against a plain loop and against the peak of a matrix product.

    python benchmarks/probe.py            # a table: LeNet and WRN-10-2 on one and on two threads
    python benchmarks/probe.py --json     # as JSON: one thread, and two beside it

BAFFLE is `forward_difference` on a `TorchLoss`, including drawing the directions and moving the weights. The plain loop
does what research code does: it draws noise for each tensor, loads a state dict, runs a forward pass and restores the
state dict. The peak is the best of several square float32 products. All take turns, so that other work on the machine
disturbs them equally, and only CPU time counts. Ratios are those of the median turns; those of the quickest turns are
beside them. Each way has its own process, because BAFFLE lets its process keep freed memory. That alone makes the plain
loop faster, and sometimes the loop gets the same by luck; so the loop runs a second time with it ("kept"), to show what
remains of the ratio.

On two threads, each thread works alone on its own model, and times are those of one thread.
"""

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.core.directions import GAUSSIAN, Directions, dense
from baffle.core.freed_memory import keep_freed_memory
from baffle.core.ports import Batch
from baffle.core.probe import forward_difference
from baffle.models.networks import lenet, wrn
from baffle.runtime.torch.loss import TorchLoss, weights_of

MODELS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "lenet": (lenet, (1, 32, 32)),
    "wrn": (wrn, (3, 32, 32)),
}
SIZES = (384, 512, 768, 1024)
BATCH = 32
SIGMA = 1e-4

Work = Callable[[], Any]


class Turn(NamedTuple):
    """What to do in one turn: probe a model with BAFFLE ("engine") or with the plain loop ("reference", or "kept" if
    freed memory is kept), or multiply matrices ("gemm"; `model` is then their size)."""

    what: str
    model: str
    directions: int
    threads: int


def engine(model: str, directions: int) -> Work:
    module, batch = _problem(model)
    weights, runtime = weights_of(module), TorchLoss(module, micro_batch=BATCH)
    drawn, supports = Directions(bytes(32), GAUSSIAN), dense(len(weights), directions)
    return lambda: forward_difference(runtime.on(batch), weights, drawn, supports, SIGMA)


def reference(model: str, directions: int) -> Work:
    module, batch = _problem(model)
    x, y = torch.from_numpy(batch.x), torch.from_numpy(batch.y)

    @torch.no_grad()
    def probe() -> list[float]:
        state = {name: value.clone() for name, value in module.state_dict().items()}
        base = F.cross_entropy(module(x), y).item()
        scalars = []
        for _ in range(directions):
            noise = {name: torch.randn(value.shape) for name, value in state.items()}
            module.load_state_dict({name: value + SIGMA * noise[name] for name, value in state.items()})
            scalars.append((F.cross_entropy(module(x), y).item() - base) / SIGMA)
            module.load_state_dict(state)
        return scalars

    return probe


def gemm(size: int) -> Work:
    a, b, c = (torch.ones(size, size) for _ in range(3))
    return lambda: torch.mm(a, b, out=c)


def flops(model: str) -> int:
    """Floating-point operations of one forward pass: two for every product in a convolution or linear layer."""
    module, batch = _problem(model)
    counted = []

    def count(layer: nn.Module, _: Any, output: Tensor) -> None:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            counted.append(2 * output.numel() * layer.weight[0].numel())

    for layer in module.modules():
        layer.register_forward_hook(count)
    with torch.inference_mode():
        module(torch.from_numpy(batch.x))
    return sum(counted)


def serve(connection: Connection) -> None:
    """The work of one process: answer each turn with the CPU seconds that a forward pass or a product took."""
    torch.set_num_threads(1)
    prepared: dict[Turn, list[Work]] = {}
    while turn := connection.recv():
        if turn not in prepared:
            prepared[turn] = [_work(turn) for _ in range(turn.threads)]
            _together(prepared[turn])
        forwards = 1 if turn.what == "gemm" else turn.directions + 1
        connection.send(_together(prepared[turn]) / forwards)


def _work(turn: Turn) -> Work:
    match turn.what:
        case "engine":
            return engine(turn.model, turn.directions)
        case "reference":
            return reference(turn.model, turn.directions)
        case "kept":
            keep_freed_memory()
            return reference(turn.model, turn.directions)
        case _:
            return gemm(int(turn.model))


def _together(works: list[Work]) -> float:
    """CPU seconds of one thread, on average, if all run at once."""
    seconds: list[float] = []

    def run(work: Work) -> None:
        torch.set_num_threads(1)
        barrier.wait()
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)

    barrier = threading.Barrier(len(works))
    threads = [threading.Thread(target=run, args=(work,)) for work in works[1:]]
    for thread in threads:
        thread.start()
    run(works[0])
    for thread in threads:
        thread.join()
    return statistics.mean(seconds)


def _problem(model: str) -> tuple[nn.Module, Batch]:
    make, shape = MODELS[model]
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    x = random.standard_normal((BATCH, *shape)).astype(np.float32)
    return make(shape, 10).eval(), Batch(x, random.integers(0, 10, BATCH))


def measure(model: str, threads: int, directions: int, repeat: int) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    turns = [Turn(what, model, directions, threads) for what in ("engine", "reference", "kept")]
    turns += [Turn("gemm", str(size), 0, threads) for size in SIZES]
    seconds: dict[Turn, list[float]] = {turn: [] for turn in turns}
    connections = {}
    for what in {turn.what for turn in turns}:
        ours, theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(theirs,), daemon=True).start()
        theirs.close()
        connections[what] = ours
    for _ in range(repeat):
        for turn in turns:
            connections[turn.what].send(turn)
            seconds[turn].append(connections[turn.what].recv())
    for connection in connections.values():
        connection.send(None)
    return _summary(flops(model), seconds)


def _summary(work: int, seconds: dict[Turn, list[float]]) -> dict[str, float]:
    def typical(of: Callable[[list[float]], float]) -> tuple[dict[str, float], float]:
        """Seconds of a forward pass in each way, and the peak in operations per second."""
        taken = {turn: of(times) for turn, times in seconds.items()}
        peak = max(2 * int(turn.model) ** 3 / each for turn, each in taken.items() if turn.what == "gemm")
        return {turn.what: each for turn, each in taken.items() if turn.what != "gemm"}, peak

    summary: dict[str, float] = {}
    for prefix, of in (("", statistics.median), ("best_", min)):
        taken, peak = typical(of)
        summary |= {
            f"{prefix}ratio_to_reference": round(taken["reference"] / taken["engine"], 3),
            f"{prefix}ratio_to_kept_reference": round(taken["kept"] / taken["engine"], 3),
            f"{prefix}fraction_of_peak": round(work / taken["engine"] / peak, 3),
            f"{prefix}reference_fraction_of_peak": round(work / taken["reference"] / peak, 3),
            f"{prefix}forward_ms": round(taken["engine"] * 1e3, 3),
            f"{prefix}reference_ms": round(taken["reference"] * 1e3, 3),
            f"{prefix}peak_gflops": round(peak / 1e9, 1),
        }
    return summary | {"forward_gflop": round(work / 1e9, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--directions", type=int, default=10, help="directions in one turn")
    parser.add_argument("--repeat", type=int, default=10, help="turns of each way")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.json:
        measured = {
            name: {
                **measure(name, 1, args.directions, args.repeat),
                "two_threads": measure(name, 2, args.directions, args.repeat),
            }
            for name in args.models
        }
        print(json.dumps(measured, indent=2))
        return
    print("model  threads  forward ms  of the peak (best)  plain loop ms  ratio (best)  to kept (best)  peak GFLOP/s")
    for name in args.models:
        for threads in (1, 2):
            row = measure(name, threads, args.directions, args.repeat)
            print(
                f"{name:5}  {threads:7}  {row['forward_ms']:10.2f}  "
                f"{row['fraction_of_peak']:11.0%} ({row['best_fraction_of_peak']:.0%})   {row['reference_ms']:13.2f}  "
                f"{row['ratio_to_reference']:5.2f} ({row['best_ratio_to_reference']:.2f})  "
                f"{row['ratio_to_kept_reference']:7.2f} ({row['best_ratio_to_kept_reference']:.2f})  "
                f"{row['peak_gflops']:12.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
