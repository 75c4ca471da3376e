"""`apply` steps the optimizer, then the average; a state reads back from its bytes and is named by its hash; and the
gradient from totals."""

import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from baffle.core.arrays import F32
from baffle.core.directions import DISTRIBUTIONS, GAUSSIAN, Directions, Distribution, dense
from baffle.core.messages import Group, Outcome
from baffle.core.rebuild import EXACT_DIRECTIONS, gradient_from_vector, rebuild
from baffle.core.ring import Ring
from baffle.core.state import Rule, ServerState, apply, pack, require_denormals, unpack
from baffle.core.update import adam, average, clip, compose, momentum, no_average, sgd, weight_decay
from baffle.errors import BaffleError, JournalError

KEY = bytes(range(32))
RING = Ring(clients=1, n_max=4, clip=1.0)
N = 5


def gradient(outcome: Outcome, _step: int = 0) -> F32:
    (group,) = outcome.groups
    return gradient_from_vector(group.numbers(), group.weight, RING)


def vector_of(values: list[float], number: int = 0) -> Outcome:
    total = RING.decode(RING.encode(np.array(values), len(values), 2, 0.0), 1)
    return Outcome(number, "vector", (Group(number, total.totals.astype("<i4").tobytes(), total.weight),))


PLAIN = Rule(gradient, sgd(0.5), no_average())
FULL = Rule(gradient, compose(clip(0.3), adam(0.01)), average(0.995))


def start() -> F32:
    return np.arange(N, dtype=np.float32)


def frozen(state: ServerState) -> ServerState:
    for vector in state.vectors():
        vector.flags.writeable = False
    return state


def test_the_optimizer_sees_the_weights_before_and_the_average_those_after() -> None:
    rule = replace(PLAIN, optimizer=compose(weight_decay(1.0), sgd(1.0)), average=average(0.0))
    after = apply(rule, rule.start(start()), vector_of([1.0] * N))
    assert after.weights.tolist() == [-1.0] * N
    assert after.average[0].tolist() == [-1.0] * N
    alone = replace(rule, average=no_average())
    assert apply(alone, alone.start(start()), vector_of([1.0] * N)).weights_hash() == after.weights_hash()


@pytest.mark.parametrize("rule", [PLAIN, FULL])
def test_a_skipped_round_gives_the_very_same_state(rule: Rule) -> None:
    state = apply(rule, rule.start(start()), vector_of([0.5] * N))
    assert apply(rule, state, Outcome(1, "skipped", ())) is state


def test_apply_changes_nothing_that_it_was_given() -> None:
    state = frozen(FULL.start(start().copy()))
    first = frozen(apply(FULL, state, vector_of([0.5, 0.1, 0.9, 0.0, -1.0])))
    again = apply(FULL, state, vector_of([0.5, 0.1, 0.9, 0.0, -1.0]))
    assert first.digest() == again.digest() != state.digest()
    assert state.weights.tobytes() == start().tobytes()


def test_smooth_weights_are_the_average_where_there_is_one() -> None:
    state = apply(FULL, FULL.start(start()), vector_of([0.5] * N))
    assert FULL.smooth_weights(state) is state.average[0]
    state = apply(PLAIN, PLAIN.start(start()), vector_of([0.5] * N))
    assert PLAIN.smooth_weights(state) is state.weights


@pytest.mark.parametrize("rule", [PLAIN, FULL, replace(FULL, optimizer=momentum(0.1))])
def test_a_state_reads_back_bit_for_bit(rule: Rule) -> None:
    state = apply(rule, rule.start(start()), vector_of([0.5, 1e-7, 0.9, -0.0, -1.0]))
    again = unpack(rule, pack(state))
    assert again.digest() == state.digest()
    assert [len(part) for part in (again.optimizer, again.average)] == [len(state.optimizer), len(state.average)]
    assert all(vector.dtype == np.float32 for vector in again.vectors())
    later = vector_of([0.3] * N, 1)
    assert apply(rule, again, later).digest() == apply(rule, state, later).digest()


PACKED = pack(FULL.start(start()))


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xc1", PACKED[:-1], PACKED + b"\0", pack(PLAIN.start(start()))),
        *map(msgspec.msgpack.encode, ([], [1, 2], [b"abc"], [b""], [bytes(20)] * 7)),
    ],
)
def test_a_damaged_snapshot_is_refused(data: bytes) -> None:
    with pytest.raises(JournalError, match="a snapshot cannot be read"):
        unpack(FULL, data)


def test_a_thread_that_keeps_denormals_is_accepted_and_keeps_them_in_the_weights() -> None:
    """No library that is imported here may have switched them off for the main thread."""
    bits = np.array([0x00000001, 0x80000001, 0x00000600, 0x00400000, 0x007FFFFF], np.uint32)  # ±2⁻¹⁴⁹ to almost 2⁻¹²⁶
    after = apply(PLAIN, PLAIN.start(bits.view(np.float32)), vector_of([0.0] * N))
    assert after.weights.view(np.uint32).tolist() == bits.tolist()


def test_a_thread_that_flushes_denormals_is_refused_unless_there_is_nothing_to_compute() -> None:
    state, done = PLAIN.start(start()), list[object]()

    def flush_and_apply() -> None:
        done.append(torch.set_flush_denormal(True))
        for outcome in (Outcome(0, "skipped", ()), vector_of([0.5] * N)):
            try:
                done.append(apply(PLAIN, state, outcome))
            except BaffleError as fault:
                done.append(str(fault))

    thread = threading.Thread(target=flush_and_apply)
    thread.start()
    thread.join()
    supported, skipped, fault = done
    if not supported:
        pytest.skip("this processor cannot flush denormals")
    assert skipped is state
    assert "flushes denormal numbers" in str(fault)
    require_denormals()


# The gradient


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_a_product_of_the_largest_chunk_stays_where_float64_counts_integers(distribution: Distribution) -> None:
    assert EXACT_DIRECTIONS * 2**31 * distribution.bound < 2**53


def test_no_direction_gives_no_gradient() -> None:
    assert rebuild(np.empty(0, np.int32), Directions(KEY, GAUSSIAN), (), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_totals_than_directions_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"a total per direction \(3\), got {count}"):
        rebuild(np.ones(count, np.int32), Directions(KEY, GAUSSIAN), dense(4, 3), 4)


@pytest.mark.parametrize("chunk", [0, -1, EXACT_DIRECTIONS + 1])
def test_a_chunk_that_could_be_inexact_is_refused(chunk: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 128 directions, got {chunk}"):
        rebuild(np.ones(3, np.int32), Directions(KEY, GAUSSIAN), dense(4, 3), 4, chunk=chunk)


def test_a_vector_is_the_weighted_mean_rounded_once() -> None:
    ring, totals = Ring(clients=2, n_max=30, clip=1.0), [3, -(2**31), 2**31 - 1, 0, *range(2**24, 2**24 + 40)]
    rebuilt = gradient_from_vector(np.array(totals, np.int32), 25, ring)
    assert rebuilt.dtype == np.float32
    assert rebuilt.tolist() == [float(np.float32(total / (25 * 2**ring.exponent))) for total in totals]
