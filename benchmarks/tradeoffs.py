"""What accuracy costs a client on MNIST: bytes, passes, CPU seconds, peak memory, for each way to train the same model.

    BAFFLE_DATA=... python benchmarks/tradeoffs.py --out results/tradeoffs.json    # half an hour; goes on where it was

**The task.** The paper's LeNet, ten iid clients with 8 samples each in a step, Adam, the average of the weights. FedSGD
sends gradients. FedAvg takes ten steps a round and sends weights. The others with a gradient compress that of FedSGD: a
client rounds it to 8 bits with one scale a tensor, or sends its largest entries, value and place; what it did not send
it adds to its next gradient. The rest send scalars, and the gradient of an exact head.

**Settings.** For each way the best of three rates, by the accuracy of the first half of a run on a fifth of the
training images that no client gets, with a seed that is not measured. Then three seeds on the test images.

**Costs** are those of one client. Bytes up are its values alone, without envelopes, masks and signatures. A backward
pass counts as one with its forward pass, and a direction of one unit as a whole pass. CPU seconds and memory are
measured with real passes, memory in a fresh process. For accuracies, scalars are dot products with a gradient
(`run.derivatives = "gradient"`), which probes give up to rounding and curvature.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from kept import Kept
from training import training

from baffle.client.worker import Worker
from baffle.core.arrays import F32
from baffle.core.freed_memory import give_back_freed_memory
from baffle.core.ports import Batch, GradientRuntime
from baffle.core.state import ServerState
from baffle.federation import workers_of
from baffle.plan import Plan, load
from baffle.runtime.torch.loss import accuracy, one_thread_each
from baffle.runtime.torch.trials import grown
from baffle.task.load import Runtimes, Task, load_task
from baffle.trajectory import Trajectory, trajectory_of

COMMON = (
    *("federation.level=batch", "federation.batch=8", "secure.mode=off", "rounds=1000000", "run.runtime=torch"),
    *("run.workers=1", "probe.sigma=1e-3", "probe.distribution=rademacher", "update.ema=0.98"),
)
BACK = ("estimator=backprop",)
WAYS: dict[str, tuple[str, ...]] = {
    "FedSGD": BACK,
    "FedAvg": (*BACK, "federation.level=epoch", "federation.steps=10"),
    "FedSGD, 8 bits": BACK,
    "FedSGD, top 1 %": BACK,
    "FedSGD, top 0.1 %": BACK,
    "dense, K = 100": ("probe.k=100",),
    "dense, K = 100, exact head": ("probe.k=100", "probe.head=exact"),
    "units, K = 400": ("probe.k=400", "probe.supports=units"),
    "units, K = 400, exact head": ("probe.k=400", "probe.supports=units", "probe.head=exact"),
}
KEPT = {"FedSGD, top 1 %": 0.01, "FedSGD, top 0.1 %": 0.001}
RATES, SEEDS, TRIAL_SEED = (0.005, 0.01, 0.02), (0, 1, 2), 1000
ROUNDS, MARKS, ALLOWANCE = 300, (5, 10, 20, 40, 75, 150, 225, 300), 100_000
"""Rounds of a run, after which of them it is tested, and how many bytes up the table allows a client."""
STEPS_OF_FEDAVG = 10
PLACE = 4  # bytes of an entry's place

Compress = Callable[[F32], F32]


def eight_bits(tensors: Sequence[slice]) -> Compress:
    def compressed(gradient: F32) -> F32:
        sent = np.zeros_like(gradient)
        for own in tensors:
            scale = np.float32(np.abs(gradient[own]).max() / 127)
            sent[own] = np.rint(gradient[own] / scale) * scale if scale else 0
        return sent

    return compressed


def largest(share: float) -> Compress:
    def compressed(gradient: F32) -> F32:
        sent, count = np.zeros_like(gradient), max(1, round(share * len(gradient)))
        chosen = np.argpartition(np.abs(gradient), -count)[-count:]
        sent[chosen] = gradient[chosen]
        return sent

    return compressed


def tensors_of(task: Task) -> list[slice]:
    stops = np.cumsum([0, *(int(np.prod(shape)) for shape in task.model.shapes() or ())]).tolist()
    return [slice(start, stop) for start, stop in pairwise(stops)]


def compress_of(way: str, task: Task) -> Compress | None:
    if way in KEPT:
        return largest(KEPT[way])
    return eight_bits(tensors_of(task)) if way.endswith("8 bits") else None


def bytes_up(way: str, task: Task) -> int:
    """Of a client's values in a round."""
    n, plan = len(task.initial_weights()), task.plan
    if way in KEPT:
        return (4 + PLACE) * max(1, round(KEPT[way] * n))
    if way.endswith("8 bits"):
        return n + 4 * len(tensors_of(task))
    return 4 * (plan.probe.k + plan.head_size) if plan.scalars else 4 * n


def passes(plan: Plan) -> int:
    return plan.probe.k + 1 if plan.scalars else max(1, plan.federation.steps)


def plan_of(way: str, rate: float, seed: int, *settings: str) -> Plan:
    own = (f"update.rate={rate}", f"seed={seed}", *settings)
    return load("paper-mnist-lenet", [*COMMON, *WAYS[way], *own])


def quick(way: str) -> tuple[str, ...]:
    """A setting that gives the scalars of a way sooner, if it has any."""
    return () if WAYS[way][:1] == BACK else ("run.derivatives=gradient",)


def compressing(task: Task, compress: Compress) -> Generator[tuple[int, Callable[[Batch], float]]]:
    """FedSGD with compressed gradients, round by round, with the accuracy of the averaged weights after each."""
    initial, runtimes = task.initial_weights(), Runtimes(task, 1)
    trajectory = trajectory_of(task.plan, len(initial))
    rule, workers = trajectory.rule, workers_of(task, trajectory, runtimes.borrow)
    state, unsent = rule.start(initial), [np.zeros_like(initial) for _ in workers]
    for number in range(task.plan.rounds):
        total = np.zeros(len(initial))
        for worker, left in zip(workers, unsent, strict=True):
            left += gradient_of(worker, number, state.weights, runtimes)
            sent = compress(left)
            left -= sent
            total += sent
        mean = (total / len(workers)).astype(np.float32)
        optimizer, change = rule.optimizer.update(state.optimizer, mean, state.weights)
        weights = state.weights + change
        average, _ = rule.average.update(state.average, mean, weights)
        state = ServerState(weights, optimizer, average)

        def measured(batch: Batch, state: ServerState = state) -> float:
            with runtimes.borrow() as runtime:
                return round(accuracy(runtime, rule.smooth_weights(state), batch), 4)

        yield number + 1, measured


def gradient_of(worker: Worker, number: int, weights: F32, runtimes: Runtimes) -> F32:
    with runtimes.borrow() as runtime:
        assert isinstance(runtime, GradientRuntime)
        return runtime.gradient_on(worker.batch_of_round(number), number)(weights)[1]


def played(way: str, plan: Plan, marks: Sequence[int]) -> dict[str, Any]:
    """A run: its accuracy after these rounds."""
    task = load_task(plan)
    compress, test = compress_of(way, task), task.source.test.batch(np.arange(len(task.source.test)))
    whole = ((progress.rounds, progress.accuracy) for progress in training(task))
    curve = list[tuple[int, float]]()
    with closing(compressing(task, compress) if compress else whole) as rounds:
        for number, measured in rounds:
            if number in marks:
                curve.append((number, measured(test)))
            if number >= max(marks):
                break
    return {"rate": plan.update.rate, "curve": curve}


def rounds_of(way: str) -> int:
    """FedAvg takes several steps a round, and as many in all as the others take in two runs."""
    return 2 * ROUNDS // STEPS_OF_FEDAVG if way == "FedAvg" else ROUNDS


def tried(way: str, rate: float) -> dict[str, Any]:
    plan = plan_of(way, rate, TRIAL_SEED, "task.validation=true", *quick(way))
    return played(way, plan, [rounds_of(way) // 2])


def measured(way: str, rate: float, seed: int, allowed: int) -> dict[str, Any]:
    last = rounds_of(way)
    marks = {mark for mark in (*MARKS, allowed, last) if 1 <= mark <= last}
    return played(way, plan_of(way, rate, seed, *quick(way)), sorted(marks))


def one_client(way: str) -> tuple[Task, Worker, Trajectory, Runtimes]:
    task = load_task(plan_of(way, RATES[0], 0))
    trajectory, runtimes = trajectory_of(task.plan, len(task.initial_weights())), Runtimes(task, 1)
    return task, workers_of(task, trajectory, runtimes.borrow)[0], trajectory, runtimes


def costs(way: str) -> dict[str, Any]:
    """What a round costs a client, with real passes."""
    task, worker, _, runtimes = one_client(way)
    weights, compress, seconds = task.initial_weights(), compress_of(way, task), list[float]()
    for number in range(6):
        began = time.process_time()
        if compress:
            compress(gradient_of(worker, number, weights, runtimes))
        else:
            worker.vector(number, weights)
        seconds.append(time.process_time() - began)
    command = [sys.executable, __file__, "--memory", way]
    grew = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    about = {"bytes": bytes_up(way, task), "passes": passes(task.plan), "weights": len(weights)}
    return about | {"cpu_seconds": median(seconds[1:]), "memory": grew}


def memory(way: str) -> int:
    """By how many bytes a round raises the high-water mark of this process, which has played one before."""
    task, worker, _, _ = one_client(way)
    weights = task.initial_weights()
    worker.vector(0, weights)
    give_back_freed_memory()
    return grown(lambda: worker.vector(1, weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="costs, trials and runs, as 'dense*'")
    parser.add_argument("--memory", metavar="WAY", help="measure the memory of this way in this process, and print it")
    parser.add_argument("--out", type=Path, help="write results here, and continue from those that are already there")
    args = parser.parse_args()
    with one_thread_each():
        if args.memory:
            print(memory(args.memory))
            return
        results = Kept(args.out, args.only or ["*"], ("costs", "trials", "runs"))
        for way in WAYS:
            results.note("costs", way, partial(costs, way))
            for rate in RATES:
                results.note("trials", f"{way}/{rate:g}", partial(tried, way, rate))
        for seed in SEEDS:
            for way in WAYS:
                trials = results.trials(way)
                if len(trials) == len(RATES):
                    best = max(trials, key=lambda rate: trials[rate])
                    allowed = ALLOWANCE // results.found["costs"][way]["bytes"]
                    results.note("runs", f"{way}/{seed}", partial(measured, way, best, seed, allowed))


if __name__ == "__main__":
    main()
