"""Folds a fixed journal and prints the digest of the state, which no setting of BLAS or NumPy may change."""

import sys

import numpy as np

from baffle.core.arrays import F32
from baffle.core.directions import DISTRIBUTIONS, OUTER, Directions, Distribution, Support, dense, distribution_of
from baffle.core.messages import Group, Outcome
from baffle.core.rebuild import gradient_from_scalars
from baffle.core.ring import Ring
from baffle.core.seeds import Seeds
from baffle.core.state import Rule, apply
from baffle.core.update import adam, adam_by_layers, average, clip, compose, weight_decay

N, K, ROUNDS = 9001, 300, 3
RING = Ring(clients=10, n_max=100, clip=50.0)


def fold(distribution: Distribution) -> bytes:
    seeds = Seeds(1, bytes(32))

    def gradient(outcome: Outcome, _step: int = 0) -> F32:
        (group,) = outcome.groups
        directions = Directions(seeds.key("directions", group.key), distribution)
        return gradient_from_scalars(group.numbers(), group.weight, directions, dense(N, K), N, RING)

    layers = [Support(0, 5000), Support(5000, N)]
    optimizer = compose(clip(0.3), weight_decay(1e-3), adam(0.05), adam_by_layers(layers, 0.05))
    rule = Rule(gradient, optimizer, average(0.995))
    state = rule.start(np.linspace(-1, 1, N, dtype=np.float32))
    for number in range(ROUNDS):
        totals = np.frombuffer(b"".join(seeds.key("local", number, i) for i in range(-(-K // 8))), "<i4")[:K]
        state = apply(rule, state, Outcome(number, "scalars", (Group(number, totals.tobytes(), 1000),)))
    return state.digest()


if __name__ == "__main__":
    outer = distribution_of(OUTER, ((300, 7, 4), (1,), (40, 15)))
    sys.stdout.write(" ".join(fold(distribution).hex() for distribution in (*DISTRIBUTIONS.values(), outer)))
