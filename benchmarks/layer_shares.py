"""How to share directions out among layers: several ways beside dense directions, on held-out samples alone.

    python benchmarks/layer_shares.py --out results/layer_shares.json   # rows that are in the file are not run again
    python benchmarks/layer_shares.py --net "eight layers" --seeds 1    # print what is found, write nothing

The nets, batches, rounds and rates are those of any_net.py. So that many ways can be tried with several seeds, no probe
is evaluated: a scalar is z·g with the gradient g of backpropagation, to which forward differences tend for a small σ.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from any_net import EVERY, NETS, RATES, ROUNDS, plan_of

from baffle.core.arrays import F32
from baffle.core.directions import Layout, LayoutEntry, Support, allocate
from baffle.core.update import adam, adam_by_layers, average
from baffle.runtime.torch.loss import TorchLoss
from baffle.task.load import Task, load_task
from baffle.task.metrics import evaluate

FIRST_SEED, SEEDS = 100, 2

Shares = Callable[[Sequence[int], Sequence[float]], list[float]]
"""The sizes of the layers and the squares of their gradients at the initial weights → what K_s is proportional to."""


def _by_root(sizes: Sequence[int], _: Sequence[float]) -> list[float]:
    return [size**0.5 for size in sizes]


def _by_size(sizes: Sequence[int], _: Sequence[float]) -> list[float]:
    return [float(size) for size in sizes]


def _equal(sizes: Sequence[int], _: Sequence[float]) -> list[float]:
    return [1.0] * len(sizes)


def _by_cost(sizes: Sequence[int], _: Sequence[float]) -> list[float]:
    """As if only a layer and those behind it were computed again, all at the same cost."""
    return [(size / (len(sizes) - number)) ** 0.5 for number, size in enumerate(sizes)]


def _by_gradient(sizes: Sequence[int], squares: Sequence[float]) -> list[float]:
    """This makes the noise of all weights together as small as possible, at the initial weights."""
    return [(size * square) ** 0.5 for size, square in zip(sizes, squares, strict=True)]


WAYS: dict[str, tuple[float, Shares, bool]] = {
    "dense": (1.0, _by_root, False),
    "dense, a moment for each layer": (1.0, _by_root, True),
    "one layer each, K_s ∝ √n_s": (0.0, _by_root, False),
    "K_s ∝ √n_s, a moment for each layer": (0.0, _by_root, True),
    "K_s ∝ n_s": (0.0, _by_size, False),
    "K_s equal": (0.0, _equal, False),
    "K_s ∝ √(n_s / cost), as stages have it": (0.0, _by_cost, False),
    "K_s ∝ √n_s · gradient at the start": (0.0, _by_gradient, False),
    "half dense, half K_s ∝ √n_s": (0.5, _by_root, False),
}
"""The share of dense directions, how the others are shared out, and whether Adam has one second moment a layer."""


def lay_out(layers: Sequence[Support], gradient: F32, k: int, dense: float, shares: Shares) -> Layout:
    n, count = len(gradient), round(k * dense)
    layout = [LayoutEntry(Support(0, n), count)] if count else []
    if count < k:
        squares = [sum(float(np.sum(gradient[own] ** 2)) for own, _ in layer.parts()) for layer in layers]
        wanted = shares([layer.size for layer in layers], squares)
        costs = [max(share, 1e-9) ** -2 for share in wanted]  # allocate takes the root of 1 / cost
        layout += map(LayoutEntry, layers, allocate([1] * len(layers), costs, k - count))
    return tuple(layout)


def estimate(gradient: F32, layout: Layout, random: np.random.Generator) -> F32:
    """The mean over the directions that touch a weight of (z·g) z, with random signs z."""
    total, touched = np.zeros(len(gradient)), np.zeros(len(gradient))
    for support, count in layout:
        parts = support.parts()
        z = (2.0 * random.integers(0, 2, (count, support.size), np.int8) - 1).astype(np.float32)
        product = (z @ np.concatenate([gradient[own] for own, _ in parts])) @ z
        for own, here in parts:
            total[own] += product[here]
            touched[own] += count
    mean: F32 = (total / touched).astype(np.float32)
    return mean


def curve_of(task: Task, way: str, rate: float, rounds: int) -> list[float]:
    """The accuracy of the averaged weights after every so many rounds."""
    plan, runtime = task.plan, task.runtime()
    assert isinstance(runtime, TorchLoss)
    layers, samples = task.model.layers() or (), task.source.train
    random = np.random.default_rng(plan.seed)
    weights = task.initial_weights()
    dense, shares, by_layers = WAYS[way]
    first = samples.batch(task.shares[0][: plan.federation.batch])
    layout = lay_out(layers, runtime.gradient_on(first)(weights)[1], plan.probe.k, dense, shares)
    step = adam_by_layers(layers, rate) if by_layers else adam(rate)
    smooth = average(plan.update.ema)
    state, averaged = step.init(weights), smooth.init(weights)
    metrics, test = task.require_measurable(), task.source.test.batch(np.arange(len(task.source.test)))
    order, curve = task.shares[0][:0], list[float]()
    for number in range(1, rounds + 1):
        if len(order) < plan.federation.batch:
            order = random.permutation(task.shares[0])
        batch, order = samples.batch(order[: plan.federation.batch]), order[plan.federation.batch :]
        state, move = step.update(state, estimate(runtime.gradient_on(batch)(weights)[1], layout, random), weights)
        weights = weights + move
        averaged, mean = smooth.update(averaged, move, weights)
        if number % EVERY == 0 or number == rounds:
            curve.append(round(evaluate(metrics, runtime, mean, test, task.source)["test_accuracy"], 4))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", action="append", choices=NETS, help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, help="write rows here, and continue from those that are already there")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.out and args.rounds != ROUNDS:
        parser.error(f"rows in --out are those of {ROUNDS} rounds; leave --rounds or --out out")
    found: dict[str, list[float]] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
        for net in args.net or NETS:
            settings = ("run.runtime=torch",)
            task = load_task(plan_of(net, "dense", RATES[0], seed, held_out=True, settings=settings))
            for key, way, rate in ((f"{net} | {way} | {rate:g} | {seed}", way, rate) for way in WAYS for rate in RATES):
                if key in found:
                    continue
                with task.model.one_thread_each():
                    found[key] = curve_of(task, way, rate, args.rounds)
                print(f"{key:70} {found[key]}", file=sys.stderr, flush=True)
                if args.out:
                    args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.json:
        print(json.dumps(found, indent=1))
        return
    ends = dict[str, list[float]]()
    for key, curve in found.items():
        ends.setdefault(key.rpartition(" | ")[0], []).append(curve[-1])
    for row, accuracies in ends.items():
        print(f"{row:60} mean {fmean(accuracies):.1%}  {accuracies}")


if __name__ == "__main__":
    main()
