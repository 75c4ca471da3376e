"""The weights are a fold over the journal: the same bits for any chunk, thread, order, library setting or language."""

import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.core.arrays import F32, I32
from baffle.core.directions import DISTRIBUTIONS, GAUSSIAN, NUMBERS_AT_ONCE, Directions, Distribution, Support, dense
from baffle.core.messages import Group, Outcome
from baffle.core.rebuild import EXACT_DIRECTIONS, WEIGHTS_AT_ONCE, gradient_from_scalars, rebuild
from baffle.core.ring import Ring, add
from baffle.core.seeds import Seeds
from baffle.core.state import Rule, ServerState, apply, pack, unpack
from baffle.core.update import adam, average, clip, compose, weight_decay

KEY = bytes(range(32))
SEEDS = Seeds(5, bytes(32))
LARGEST = 2**31 - 1
FOLD = Path(__file__).with_name("fold.py")

Extreme = Literal["random", "largest", "smallest", "aligned"]
distributions = st.sampled_from(list(DISTRIBUTIONS.values()))
extremes = st.sampled_from(["random", "largest", "smallest", "aligned"])
block_sizes = st.integers(1, 50) | st.integers(1, 10_000)


def some_totals(extreme: Extreme, k: int, directions: Directions, seed: int = 0) -> I32:
    """Totals at the ring's edge; `aligned` ones add up as far as they can at weight 0."""
    match extreme:
        case "random":
            return np.random.default_rng(seed).integers(-(2**31), 2**31, k).astype(np.int32)
        case "largest":
            return np.full(k, LARGEST, np.int32)
        case "smallest":
            return np.full(k, -LARGEST - 1, np.int32)
        case "aligned":
            signs = np.where(directions.draw(range(k), 0, 1)[:, 0] < 0, -1, 1)
            return (signs * LARGEST).astype(np.int32)


def touched(support: Support) -> list[int]:
    return [*range(support.start, support.stop), *range(*support.tail)]


def rebuild_in_python(totals: I32, directions: Directions, supports: Sequence[Support], n: int) -> list[int]:
    """G = Σ_k T_k · z_k in integers without bounds."""
    gradient = [0] * n
    for k, (total, support) in enumerate(zip(totals.tolist(), supports, strict=True)):
        (row,) = directions.draw(range(k, k + 1), 0, support.size).tolist()
        for i, z in zip(touched(support), row, strict=True):
            gradient[i] += total * z
    return gradient


@st.composite
def random_supports(draw: st.DrawFn, n: int = 30) -> list[Support]:
    """Supports that overlap, repeat and leave gaps, of one slice or two."""
    edges = st.lists(st.integers(0, n), min_size=2, max_size=4, unique=True).filter(lambda ends: len(ends) != 3)
    runs = draw(st.lists(st.tuples(edges.map(sorted), st.integers(1, 40)), min_size=1, max_size=15))
    return [
        Support(ends[0], ends[1], (ends[2], ends[3]) if len(ends) == 4 else (0, 0))
        for ends, count in runs
        for _ in range(count)
    ]


@settings(deadline=None, max_examples=25)
@given(
    distribution=distributions,
    extreme=extremes,
    k=st.integers(1, 400) | st.integers(1, 5000),
    n=st.integers(1, 9),
    chunk=st.integers(1, EXACT_DIRECTIONS),
    block=block_sizes,
    threads=st.integers(1, 4),
)
def test_the_rebuilt_sum_is_the_integers_own_sum(
    distribution: Distribution, extreme: Extreme, k: int, n: int, chunk: int, block: int, threads: int
) -> None:
    directions = Directions(KEY, distribution)
    totals = some_totals(extreme, k, directions)
    expected = rebuild_in_python(totals, directions, dense(n, k), n)
    rebuilt = rebuild(totals, directions, dense(n, k), n, chunk=chunk, block=block, threads=threads)
    assert rebuilt.tolist() == expected


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_five_thousand_directions_beyond_the_integers_of_float64_are_exact(distribution: Distribution) -> None:
    directions, k = Directions(KEY, distribution), 5000
    totals = some_totals("aligned", k, directions)
    expected = rebuild_in_python(totals, directions, dense(3, k), 3)
    if distribution is GAUSSIAN:
        assert expected[0] > 2**54
    assert rebuild(totals, directions, dense(3, k), 3).tolist() == expected


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_no_chunk_size_changes_a_bit(distribution: Distribution) -> None:
    directions, k, n = Directions(KEY, distribution), 300, 50
    totals = some_totals("aligned", k, directions)
    expected = rebuild(totals, directions, dense(n, k), n, chunk=1).tobytes()
    for chunk in range(2, EXACT_DIRECTIONS + 1):
        assert rebuild(totals, directions, dense(n, k), n, chunk=chunk).tobytes() == expected, chunk


@settings(deadline=None, max_examples=40)
@given(
    distribution=distributions,
    supports=random_supports(),
    extreme=extremes,
    chunk=st.integers(1, EXACT_DIRECTIONS),
    block=block_sizes,
    threads=st.integers(1, 4),
)
def test_overlapping_supports_are_exact_too(
    distribution: Distribution, supports: list[Support], extreme: Extreme, chunk: int, block: int, threads: int
) -> None:
    directions = Directions(KEY, distribution)
    totals = some_totals(extreme, len(supports), directions)
    expected = rebuild_in_python(totals, directions, supports, 30)
    rebuilt = rebuild(totals, directions, supports, 30, chunk=chunk, block=block, threads=threads)
    assert rebuilt.tolist() == expected


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_pieces_of_the_weights_and_blocks_of_numbers_leave_no_seam(distribution: Distribution) -> None:
    n, directions = 2 * WEIGHTS_AT_ONCE + 77, Directions(KEY, distribution)
    edge = WEIGHTS_AT_ONCE - 5
    supports = [
        *dense(n, 3),
        *[Support(7, edge, (edge + 3, n - 9))] * 2,
        Support(1, 2, (edge + 1, edge + 99)),
        Support(0, 9),
    ]
    totals, expected = some_totals("random", len(supports), directions), np.zeros(n, np.int64)
    for k, support in enumerate(supports):
        (row,) = directions.draw(range(k, k + 1), 0, support.size)
        expected[touched(support)] += int(totals[k]) * row.astype(np.int64)
    ring, scale = Ring(clients=1, n_max=9, clip=1.0), 9 * 2.0**distribution.unit_bits
    covered = np.sum([np.isin(np.arange(n), touched(support)) for support in supports], axis=0)
    gradient = (expected / (covered * ring.scale * scale)).astype(np.float32)
    for threads in (1, 2, 5):
        for block in (NUMBERS_AT_ONCE, 99_991):
            rebuilt = rebuild(totals, directions, supports, n, block=block, threads=threads)
            assert np.array_equal(rebuilt, expected)
            divided = gradient_from_scalars(totals, 9, directions, supports, n, ring, block=block, threads=threads)
            assert divided.tobytes() == gradient.tobytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_beside_its_result_a_thread_needs_six_megabytes(distribution: Distribution, threads: int) -> None:
    n, k, directions, ring = 4_000_000, 3, Directions(KEY, distribution), Ring(clients=1, n_max=1, clip=1.0)
    totals, supports = some_totals("random", k, directions), dense(n, k)

    def peak(work: Callable[[], object]) -> int:
        tracemalloc.start()
        try:
            work()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(lambda: rebuild(totals, directions, supports, n, threads=threads)) < 8 * n + threads * 6_000_000
    gradient = partial(gradient_from_scalars, totals, 1, directions, supports, n, ring, threads=threads)
    assert peak(gradient) < 4 * n + threads * 6_000_000


@settings(deadline=None, max_examples=40)
@given(supports=random_supports(), cut=st.integers(0, 600), seed=st.integers(0, 100))
def test_directions_may_be_rebuilt_in_parts(supports: list[Support], cut: int, seed: int) -> None:
    directions = Directions(KEY, GAUSSIAN)
    totals = some_totals("random", len(supports), directions, seed)
    head, tail = totals.copy(), totals.copy()
    head[cut:] = 0
    tail[:cut] = 0
    parts = [rebuild(part, directions, supports, 30) for part in (head, tail)]
    assert np.array_equal(rebuild(totals, directions, supports, 30), parts[0] + parts[1])


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 100), wide=st.integers(1, 100), offset=st.integers(0, 20), distribution=distributions)
def test_where_a_support_lies_and_ends_changes_no_number_in_it(
    n: int, wide: int, offset: int, distribution: Distribution
) -> None:
    directions, k = Directions(KEY, distribution), 140
    totals = some_totals("random", k, directions)
    short = rebuild(totals, directions, [Support(offset, offset + n)] * k, offset + n)
    long = rebuild(totals, directions, dense(n + wide, k), n + wide)
    assert np.array_equal(short[offset:], long[:n])
    assert not short[:offset].any()


def single(x: float) -> float:
    """The nearest float32. A sum, product, quotient or root computed in float64 and then rounded is the float32 one."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", x))
    return float(rounded)


@settings(deadline=None, max_examples=40)
@given(supports=random_supports(), distribution=distributions, extreme=extremes, weight=st.integers(1, 10**6))
def test_a_weights_gradient_is_divided_by_its_own_number_of_directions(
    supports: list[Support], distribution: Distribution, extreme: Extreme, weight: int
) -> None:
    directions, ring = Directions(KEY, distribution), Ring(clients=100, n_max=10**6, clip=3.0)
    totals = some_totals(extreme, len(supports), directions)
    exact = rebuild_in_python(totals, directions, supports, 30)
    covering = [max(1, sum(i in touched(support) for support in supports)) for i in range(30)]
    scale = 2.0 ** (ring.exponent + distribution.unit_bits)
    expected = [single(g / (count * weight * scale)) for g, count in zip(exact, covering, strict=True)]
    assert gradient_from_scalars(totals, weight, directions, supports, 30, ring).tolist() == expected


N, K, ROUNDS = 23, 150, 25
RING = Ring(clients=5, n_max=100, clip=2.0)
CLIP, DECAY, RATE, BETA1, BETA2, EPSILON, EMA = 0.02, 0.01, 0.05, 0.9, 0.99, 1e-8, 0.5


def gradient_of(outcome: Outcome, _step: int = 0) -> F32:
    (group,) = outcome.groups
    directions = Directions(SEEDS.key("directions", group.key), GAUSSIAN)
    return gradient_from_scalars(group.numbers(), group.weight, directions, dense(N, K), N, RING)


RULE = Rule(gradient_of, compose(clip(CLIP), weight_decay(DECAY), adam(RATE, BETA1, BETA2, EPSILON)), average(EMA))


def start() -> F32:
    return np.linspace(-0.7, 1.1, N, dtype=np.float32)


def journal(seed: int | None = None) -> list[Outcome]:
    """A journal with some skipped rounds and one of tiny totals. A seed shuffles the order of its clients."""
    rounds, order = list[Outcome](), np.random.default_rng(seed)
    for number in range(ROUNDS):
        values = np.random.default_rng(number)
        size = 1e-6 if number == 3 else 1.0
        vectors = [RING.encode(values.normal(size=K) * size, K, int(values.integers(1, 101)), 1.0) for _ in range(5)]
        if seed is not None:
            order.shuffle(vectors)
        total = RING.decode(add(vectors), 5)
        group = Group(number, total.totals.astype("<i4").tobytes(), total.weight)
        rounds.append(Outcome(number, "skipped", ()) if number % 7 == 5 else Outcome(number, "scalars", (group,)))
    return rounds


def folded(outcomes: list[Outcome]) -> ServerState:
    state = RULE.start(start())
    for outcome in outcomes:
        state = apply(RULE, state, outcome)
    return state


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32), stop=st.integers(0, ROUNDS))
def test_order_of_clients_and_a_restart_change_no_digest(seed: int, stop: int) -> None:
    outcomes = journal(seed)
    state = unpack(RULE, pack(folded(outcomes[:stop])))
    for outcome in outcomes[stop:]:
        state = apply(RULE, state, outcome)
    assert state.digest() == folded(journal()).digest()


def test_threads_that_fold_at_once_get_one_digest() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert len({state.digest() for state in pool.map(lambda _: folded(journal()), range(8))}) == 1


def test_skipped_rounds_leave_no_trace() -> None:
    outcomes = journal()
    kept = [outcome for outcome in outcomes if outcome.kind != "skipped"]
    assert len(kept) < len(outcomes)
    assert folded(kept).digest() == folded(outcomes).digest()


def printed_digests(**environment: str) -> str:
    run = [sys.executable, str(FOLD)]
    return subprocess.run(run, check=True, capture_output=True, text=True, env=os.environ | environment).stdout


def test_no_setting_of_blas_or_numpy_changes_the_digest() -> None:
    digests = {
        printed_digests(OPENBLAS_NUM_THREADS="1"),
        printed_digests(OPENBLAS_NUM_THREADS="2"),
        printed_digests(OPENBLAS_CORETYPE="Prescott"),
        printed_digests(NPY_DISABLE_CPU_FEATURES=" ".join(_optional_features())),
    }
    assert len(digests) == 1


def _optional_features() -> list[str]:
    """The instruction sets that NumPy uses here beyond its baseline."""
    config = np.show_config(mode="dicts")
    return list(config["SIMD Extensions"].get("found", [])) if config else []
