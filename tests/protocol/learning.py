"""What a client computes: streams and directions, a vector of integers from losses, and weights from outcomes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from numpy.typing import NDArray

from tests.protocol.directions import DRAW, key_of, outer, salted_key_of, stream_byte_range, stretch
from tests.protocol.plans import Plan, digest
from tests.protocol.wire import RefusedError, decode, require, unpack

F32 = NDArray[np.float32]
Numbers = NDArray[np.int64]
State = list[F32]

_DRAW = DRAW | {"sphere": DRAW["gaussian"]}
SALTED = {"directions", "local", "batches", "augment", "participation", "groups"}


def aes(key: bytes, blocks: bytes) -> bytes:
    return Cipher(AES256(key), ECB()).encryptor().update(blocks)


class Epoch(NamedTuple):
    first: int
    run: bytes
    salt: bytes
    before: bytes | None  # the chain before its link, if it is known


# Keys, streams, and what follows from them


def key_for(plan: Plan, salt: bytes, purpose: str, *numbers: int) -> bytes:
    if purpose in SALTED:
        return salted_key_of(plan["seed"], digest(plan), salt, purpose, *numbers)
    return key_of(plan["seed"], b"", purpose, *numbers)


def permutation(key: bytes, n: int) -> Numbers:
    tickets = np.frombuffer(stream_byte_range(key, 0, 0, 8 * n, aes), "<u8")
    return np.argsort(tickets, kind="stable")


def steps_in(plan: Plan, number: int) -> int:
    """How many steps a round has."""
    return 1 if number < plan["federation.warm_up"] else int(plan["federation.local_steps"])


def batch(plan: Plan, salt: bytes, client: int, samples: int, number: int, step: int = 0) -> Numbers:
    """The samples that a client probes on in a step of a round."""
    number += max(0, number - plan["federation.warm_up"]) * (plan["federation.local_steps"] - 1) + step
    size = plan["federation.batch"]
    if not 0 < size < samples:
        return np.arange(samples)
    laps = range(number * size // samples, -(-(number + 1) * size // samples))
    order = np.concatenate([permutation(key_for(plan, salt, "batches", lap, client), samples) for lap in laps])
    start = number * size - laps.start * samples
    return order[start : start + size]


def clients_of_round(plan: Plan) -> int:
    m: int = round(plan["federation.clients"] * plan["federation.participation"])
    return max(1, m)


def groups_of_round(plan: Plan, salt: bytes, number: int) -> list[list[int]]:
    """The clients that are summed together, group by group."""
    if number >= plan["rounds"]:
        return []
    m, everyone, count = clients_of_round(plan), plan["federation.clients"], plan["secure.groups"]
    chosen = list(range(everyone))
    if m < everyone:
        chosen = sorted(permutation(key_for(plan, salt, "participation", number), everyone)[:m].tolist())
    if count == 1:
        return [chosen]
    order = permutation(key_for(plan, salt, "groups", number), m).tolist()
    return [sorted(chosen[place] for place in order[group::count]) for group in range(count)]


def initial_weights(plan: Plan, shapes: Sequence[tuple[int, ...]]) -> F32:
    """With task.init = "numpy": of layers that each have a weight and a bias."""
    tensors = []
    for number, shape in enumerate(shapes, 1):
        inputs, count = math.prod(shapes[(number - 1) // 2 * 2][1:]), math.prod(shape)
        stream = stream_byte_range(key_for(plan, b"", "init", number), 0, 0, 4 * count, aes)
        uniform = (np.frombuffer(stream, "<u4").astype(np.float64) + 0.5) * 2.0**-31 - 1
        tensors.append(uniform.astype(np.float32) * np.float32(1 / math.sqrt(inputs)))
    return np.concatenate(tensors)


class Directions(NamedTuple):
    """A row for each direction: its integers, zeros where it touches nothing; which weights it touches; its stretch."""

    unit: float
    z: Numbers
    touched: NDArray[np.bool_]
    stretches: list[float]


def directions_of(plan: Plan, key: bytes, n: int) -> Directions:
    layout = plan["probe.layout"] or [[0, n, 0, 0, plan["probe.k"]]]
    shapes = tuple(map(tuple, plan["probe.shapes"]))
    return _directions(key, plan["probe.distribution"], tuple(map(tuple, layout)), shapes, n)


@lru_cache(maxsize=2)
def _directions(key: bytes, name: str, layout: tuple[Any, ...], shapes: tuple[Any, ...], n: int) -> Directions:
    places = sorted(((j + 0.5) / row[4], i) for i, row in enumerate(layout) for j in range(row[4]))
    z, touched = np.zeros((len(places), n), np.int64), np.zeros((len(places), n), np.bool_)
    stretches = []
    for k, (_, i) in enumerate(places):
        start, stop, tail, end, _ = layout[i]
        here = np.r_[start:stop, tail:end]
        drawn = outer(key, k, list(shapes), 0, n) if name == "outer" else _DRAW[name](key, k, 0, len(here), aes)
        z[k, here], touched[k, here] = np.array(drawn)[here if name == "outer" else slice(None)], True
        stretches.append(stretch(key, k, len(here), aes) if name == "sphere" else 1.0)
    return Directions(1.0 if name in ("rademacher", "outer") else 2.0**-12, z, touched, stretches)


# From losses to a vector


def scale(plan: Plan, bound: Fraction) -> float:
    """S(B) of the page."""
    m = clients_of_round(plan)
    room = (2**29 - m) / (bound * m * plan["ring.n_max"])
    exponent = math.floor(math.log2(room))
    exponent += (Fraction(2) ** (exponent + 1) <= room) - (Fraction(2) ** exponent > room)
    return float(2.0**exponent)


def value_bound(plan: Plan) -> Fraction:
    """B: the largest value of a client of weight 1."""
    smallest = min((tier["k"] for tier in plan["federation.tiers"]), default=plan["probe.k"])
    return Fraction(plan["ring.d_max"]) * Fraction(plan["probe.k"], smallest)


def value_scale(plan: Plan) -> float:
    return scale(plan, value_bound(plan))


def probe(
    plan: Plan, loss: Callable[[F32], float], weights: F32, drawn: Directions, k: int
) -> tuple[list[float], float]:
    """D_k of the first k directions, and the base loss."""
    sigma, central = plan["probe.sigma"], plan["probe.scheme"] == "central"

    def moved(number: int, step: float) -> float:
        scale = np.float32(step * drawn.unit * drawn.stretches[number])
        return loss(weights + scale * drawn.z[number].astype(np.float32))

    ahead = [moved(number, sigma) for number in range(k)]
    behind = [moved(number, -sigma) for number in range(k)] if central else [loss(weights)] * k
    base = float(np.mean([*ahead, *behind])) if central else behind[0]
    width = 2 * sigma if central else sigma
    return [(a - b) / width * s for a, b, s in zip(ahead, behind, drawn.stretches, strict=False)], base


def joined(plan: Plan, vectors: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """A client's contribution to a round, from the vectors of its steps."""
    rows = np.array(vectors).view(np.int32).astype(np.int64)
    length = plan["federation.local_steps"] * (rows.shape[1] - 4)
    values = rows[:, :-4].reshape(-1)
    extras = [*rows[0, -4:-2], rows[:, -2].sum(), np.rint(rows[:, -1].mean())]
    whole = [*values, *[0] * (length - len(values)), *extras]
    return np.array(whole, np.int64).astype(np.uint32)


def weight_of(plan: Plan, samples: int) -> int:
    return 1 if plan["federation.weighting"] == "uniform" else min(samples, plan["ring.n_max"])


def nothing(plan: Plan, samples: int) -> NDArray[np.uint32]:
    """What a client contributes to a round if something was not finite."""
    return joined(plan, [vector(plan, [math.nan], samples, 0)] * plan["federation.local_steps"])


def vector(plan: Plan, values: Sequence[float], samples: int, loss: float) -> NDArray[np.uint32]:
    """A client's contribution to a step."""
    length, bound, weight = plan["probe.k"], plan["ring.d_max"], weight_of(plan, samples)
    if not all(map(math.isfinite, [*values, loss])):
        numbers, count, loss = [0.0] * length, length, 64.0
    else:
        clipped = np.clip(values, -bound, bound)
        factor = weight * (length / len(values)) * value_scale(plan)
        numbers = [*np.rint(clipped * factor), *[0.0] * (length - len(values))]
        count = int(np.count_nonzero(clipped != np.array(values)))
    base = round(weight * min(max(loss, -64.0), 64.0) * scale(plan, Fraction(64)))
    extras = [weight, 1, 0, 0] if plan["secure.mode"] == "malicious-server" else [weight, 1, count, base]
    return np.array([*map(int, numbers), *extras], np.int64).astype(np.uint32)


# From outcomes to weights


def state_digest(vectors: Sequence[F32]) -> bytes:
    return sha256(b"".join(vector.astype("<f4").tobytes() for vector in vectors)).digest()


def initial_state(plan: Plan, weights: F32) -> State:
    zeros, one = np.zeros_like(weights), np.ones(1, np.float32)
    square = np.zeros(len(plan["update.layers"]), np.float32) if plan["update.layers"] else zeros
    optimizer = {"sgd": [], "momentum": [zeros], "adam": [zeros, square, one, one]}[plan["update.optimizer"]]
    return [weights, *optimizer, *([weights, np.zeros(1, np.float32)] if plan["update.ema"] else [])]


def gradient(plan: Plan, groups: Sequence[Any], drawn: Callable[[int], Directions], number: int = 0) -> F32:
    """The gradient of a step of an outcome. `drawn` gives the directions of a key's number."""
    whole_rounds = [(group.key, np.frombuffer(group.totals, "<i4").astype(np.int64), group.weight) for group in groups]
    rows = plan["federation.local_steps"]
    sums = [(key, totals.reshape(rows, -1)[number], weight) for key, totals, weight in whole_rounds]
    whole, median = sum(weight for _, _, weight in sums), plan["secure.combine"] == "median"
    if len(sums) > 1 and plan["secure.group_seeds"] == "shared":
        totals = np.sum([totals for _, totals, _ in sums], axis=0)
        if median:
            middle = np.median([totals / weight for _, totals, weight in sums], axis=0)
            totals = np.rint(np.clip(middle * whole, -(2**29), 2**29)).astype(np.int64)
        sums = [(sums[0][0], totals, whole)]
    found: list[F32] = []
    for key, totals, weight in sums:
        directions = drawn(key)
        per_direction = value_scale(plan) * weight * (1 / directions.unit)
        touching = np.maximum(directions.touched.sum(axis=0), 1)
        found.append(((totals @ directions.z) / (touching * per_direction)).astype(np.float32))
    if len(found) == 1:
        return found[0]
    wide = [g.astype(np.float64) for g in found]
    added = sum(g * weight for g, (_, _, weight) in zip(wide, sums, strict=True)) / whole
    combined: F32 = np.asarray(np.median(wide, axis=0) if median else added).astype(np.float32)
    return combined


def divisor(state: State) -> F32:
    """What adam divides by in all steps of a round that has several."""
    square, least = state[2], np.float32(2.0**-10 * (tree_sum(state[2].astype(np.float64)) / len(state[2])))
    if least == 0:
        return np.full(len(square), np.inf, np.float32)
    frozen: F32 = np.sqrt(np.maximum(square, least) / (np.float32(1) - state[4])) + np.float32(1e-8)
    return frozen


def share_of_rate(plan: Plan, number: int) -> float:
    """The share of the rate that a round has: float64 in this order, then float32."""
    rounds, factor, share = plan["update.schedule_rounds"], plan["update.schedule_factor"], 1.0
    match plan["update.schedule"]:
        case "warm-up":
            share = min(1.0, (number + 1) / rounds)
        case "cosine":
            x, cosine = min(number, rounds) / rounds * math.pi, 1.0
            for j in range(24, 0, -1):
                cosine = 1.0 - x * x / ((2 * j - 1) * (2 * j)) * cosine
            share = factor + (1.0 - factor) * (0.5 + 0.5 * cosine)
        case "steps":
            power, times = factor, number // rounds
            while times:
                share, power, times = share * power if times % 2 else share, power * power, times // 2
    return float(np.float32(share))


def step(plan: Plan, state: State, g: F32, frozen: F32 | None = None, share: float = 1.0) -> State:
    """The state after a gradient: float32 throughout. `frozen` is adam's divisor, if it is that of the round, and
    `share` the share of the rate that the round has."""
    f, one, weights = np.float32, np.float32(1), state[0]
    rate = f(-plan["update.rate"])
    if bound := plan["update.clip"]:
        largest = np.max(np.abs(g))
        g = g * (f(bound) / largest) if largest > f(bound) else g
    if decay := plan["update.weight_decay"]:
        g = g + f(decay) * weights
    match plan["update.optimizer"]:
        case "sgd":
            optimizer, change = [], rate * g
        case "momentum":
            velocity = f(plan["update.momentum"]) * state[1] + g
            optimizer, change = [velocity], rate * velocity
        case _:
            b1, b2 = map(f, plan["update.betas"])
            p1, p2 = b1 * state[3], b2 * state[4]
            mean = state[1] * b1 + g * (one - b1)
            layers = [np.r_[start:stop, tail:end] for start, stop, tail, end in plan["update.layers"]]
            latest = np.array([_mean_square(g[layer]) for layer in layers], f) if layers else g * g
            square = state[2] * b2 + latest * (one - b2)
            root = np.sqrt(square / (one - p2)) + f(1e-8) if frozen is None else frozen
            if layers:
                root, of_layers = np.empty_like(g), root
                for layer, number in zip(layers, of_layers, strict=True):
                    root[layer] = number
            change = ((mean / (one - p1)) / root) * rate
            optimizer = [mean, square, p1, p2]
    after = weights + change * f(share)
    average: State = []
    if ema := plan["update.ema"]:
        smooth, steps = state[-2:]
        d = np.minimum(f(ema), (one + steps) / (f(10) + steps))
        average = [smooth * d + (one - d) * after, steps + one]
    return [after, *optimizer, *average]


def _mean_square(g: F32) -> float:
    return tree_sum(g.astype(np.float64) ** 2) / len(g)


def tree_sum(numbers: NDArray[np.float64]) -> float:
    """A binary tree: neighbours first."""
    while len(numbers) > 1:
        numbers = np.append(numbers, np.zeros(len(numbers) % 2)).reshape(-1, 2).sum(axis=1)
    return float(numbers[0])


@dataclass(frozen=True)
class Replica:
    """Where a client is in a run: the state before a round, and the chain up to there with all links."""

    plan: Plan
    epochs: tuple[Epoch, ...]
    round: int
    state: State = field(repr=False)
    chain: bytes = b""

    @classmethod
    def beginning(cls, plan: Plan, weights: F32, epochs: tuple[Epoch, ...]) -> "Replica":
        state = initial_state(plan, weights)
        chain = sha256(b"baffle/chain/1" + digest(plan) + state_digest(state)).digest()
        return cls(plan, epochs, 0, state, chain)._linked(epochs)

    def in_epochs(self, epochs: tuple[Epoch, ...]) -> "Replica":
        """The same place in a run that has got further epochs."""
        return replace(self, epochs=epochs)._linked(epochs[len(self.epochs) :])

    def _linked(self, epochs: Sequence[Epoch]) -> "Replica":
        """After the links of these epochs, as far as they begin here."""
        chain = self.chain
        for epoch in epochs:
            if epoch.first == self.round:
                require(epoch.before in (None, chain), "an epoch that names another past")
                chain = sha256(b"baffle/epoch/2" + chain + epoch.run).digest()
        return replace(self, chain=chain)

    def directions(self, key_number: int, step: int = 0) -> Directions:
        """The directions of a key's number, that of the round or of a group in it, in a step of the round."""
        groups = self.plan["secure.groups"] if self.plan["secure.group_seeds"] == "own" else 1
        number, group = divmod(key_number, groups)
        salt = next(epoch.salt for epoch in reversed(self.epochs) if epoch.first <= number)
        numbers = (number, group, step) if step else (number, group)
        return directions_of(self.plan, key_for(self.plan, salt, "directions", *numbers), len(self.state[0]))

    def walked(self, groups: Sequence[Any], steps: int) -> State:
        """The state after so many steps of the round with these totals."""
        state, many = self.state, steps_in(self.plan, self.round) > 1
        frozen = divisor(state) if many and self.plan["update.optimizer"] == "adam" else None
        share = share_of_rate(self.plan, self.round)
        for number in range(steps):
            found = gradient(self.plan, groups, partial(self.directions, step=number), number)
            state = step(self.plan, state, found, frozen, share)
        return state

    def after(self, data: bytes) -> "Replica":
        """The state after one more outcome."""
        outcome = decode(data, "outcome")
        require(outcome.round == self.round and outcome.kind in ("scalars", "skipped"), "not the next outcome")
        state = self.state
        if outcome.kind == "scalars":
            self._require_possible(outcome.groups)
            state = self.walked(outcome.groups, steps_in(self.plan, self.round))
            require(np.isfinite(state[0]).all(), "weights that are not finite")
            moved, most = np.linalg.norm(state[0].astype(np.float64) - self.state[0]), self.plan["update.norm_max"]
            require(not most or moved <= most, "a step that is too long")
        chain = sha256(b"baffle/chain/1" + self.chain + data + state_digest(state)).digest()
        return Replica(self.plan, self.epochs, self.round + 1, state, chain)._linked(self.epochs)

    def _require_possible(self, groups: Sequence[Any]) -> None:
        m, count = clients_of_round(self.plan), self.plan["secure.groups"]
        own = self.plan["secure.group_seeds"] == "own"
        first, most = self.round * count if own else self.round, -(-m // count)
        keys = [group.key for group in groups]
        require(1 <= len(keys) <= count and len(set(keys)) == (len(keys) if own else 1), "not the round's groups")
        for group in groups:
            totals = np.frombuffer(group.totals, "<i4").astype(np.int64)
            require(0 <= group.key - first < (count if own else 1), "not the round's key")
            length = self.plan["probe.k"] * self.plan["federation.local_steps"]
            require(len(totals) == length, "not a total for each direction and step")
            heaviest = 1 if self.plan["secure.mode"] == "malicious-server" else self.plan["ring.n_max"]
            require(1 <= group.weight <= most * heaviest, "an impossible weight")
            bound = group.weight * value_bound(self.plan) * Fraction(value_scale(self.plan)) + min(most, group.weight)
            require(np.abs(totals).max() <= bound, "an impossible total")

    def caught_up(self, request: Any, *, snapshots: bool) -> "Replica":
        """The place that a request is about, by its catch-up."""
        here, catch_up, items = self, request.catch_up, request.catch_up.items
        if catch_up.kind == "snapshot":
            require(snapshots and len(items) > 2 and catch_up.since == self.epochs[-1].first, "an unproved state")
            here, items = self._from_snapshot(*items[:3]), items[3:]
        elif catch_up.kind == "hashed":
            items = items[::2]
        else:
            require(catch_up.kind == "outcomes", f"a catch-up by {catch_up.kind}")
        require(here.round >= catch_up.since, "a catch-up from a later round")
        for outcome in items[here.round - catch_up.since :]:
            here = here.after(outcome)
        found = here.round, here.chain, state_digest(here.state[:1])
        require(found == (request.round, request.chain, request.weights_hash), "another story than the chain's")
        return here

    def _from_snapshot(self, packed: bytes, before: bytes, outcome: bytes) -> "Replica":
        parts, _ = unpack(packed, 0)
        state = [np.frombuffer(part, "<f4") for part in parts]
        if [len(part) for part in state] != [len(part) for part in self.state]:
            raise RefusedError("a state of another form")
        chain = sha256(b"baffle/chain/1" + before + outcome + state_digest(state)).digest()
        return replace(self, round=self.epochs[-1].first, state=state, chain=chain)._linked(self.epochs)
