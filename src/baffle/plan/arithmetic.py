"""Functions of your own that a run's weights follow from: optimizers, schedules of the rate, distributions.

Whoever replays a run calls them, so a plan names the SHA-256 of the file of each, and another file is refused. They are
called only if somebody has vouched for their names in this process: the user by typing them, or by `--own-code`. What
`optimizer_of` and the others give calls nothing before it is used, so a journal with such names can be read safely.

docs/architecture.md says what such a function may compute with. What can be tried is tried once, when it is loaded.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from hashlib import sha256
from pathlib import Path
from sys import modules
from typing import Any, NamedTuple

import numpy as np

from baffle.core.arrays import F32, U8, Integers
from baffle.core.directions import Distribution, distribution_of
from baffle.core.rates import SCHEDULES
from baffle.core.seeds import Scratch, look_up
from baffle.core.update import OPTIMIZERS, State, Transform, Update
from baffle.errors import OwnFunctionError, PlanError, one_line
from baffle.plan.functions import call_own, calling, own_function
from baffle.plan.plan import Plan
from baffle.plan.sections import ProbeSettings, UpdateSettings
from baffle.plan.tasks import is_own

UNIT_BITS, LARGEST = 12, 2**15 - 1  # of the integers of a distribution of your own: then all sums of them are exact
CODES = np.arange(1 << 16, dtype=np.uint16)
NEAR = 1e-3  # how far the mean of a distribution may be from 0, and its mean square from 1
MOST_NAME = 80  # longer names of functions are cut
TRIED = 6  # weights that an optimizer is tried on


class Own(NamedTuple):
    """A function that a plan names: where, its name, and the hash of its file."""

    setting: str
    name: str
    source: str


_vouched = set[str]()


def own_of(plan: Plan) -> list[Own]:
    """The functions of your own that the plan's weights follow from."""
    update, probe = plan.update, plan.probe
    named = (
        Own("update.optimizer", update.optimizer, update.optimizer_source),
        Own("update.schedule", update.schedule, update.schedule_source),
        Own("probe.distribution", probe.distribution, probe.distribution_source),
    )
    return [own for own in named if is_own(own.name)]


def vouch_for(plan: Plan) -> None:
    """Let functions of these names be called in this process."""
    _vouched.update(own.name for own in own_of(plan))


def require_vouched(plan: Plan) -> None:
    for own in own_of(plan):
        _require_vouched(own)


def _require_vouched(own: Own) -> None:
    if own.name not in _vouched:
        raise PlanError(
            f"{own.setting}: the plan names {one_line(own.name, MOST_NAME)}, which this would call; if you trust it, "
            "give --own-code (in Python own_code=True)"
        )


def source_of(own: Own) -> str:
    """The SHA-256 of the file that holds a function's module."""
    _require_vouched(own)
    own_function(own.setting, own.name)
    try:
        return _hash_of_file(own.name.partition(":")[0])
    except OSError as fault:
        raise PlanError(f"{own.setting}: {own.name} must be in a file of its own, whose hash a plan names") from fault


@cache
def _hash_of_file(module: str) -> str:
    """Taken once, because a process goes on with what it has imported when the file is edited."""
    return sha256(Path(getattr(modules[module], "__file__", None) or "").read_bytes()).hexdigest()


@cache
def _function(own: Own) -> Callable[..., Any]:
    """The function, from the file that the plan means."""
    if not own.source:
        raise PlanError(f"{own.setting}_source is empty: expected what a run writes into its own plan.toml")
    if (here := source_of(own)) != own.source:
        raise PlanError(
            f"{own.setting}: {own.name} is not the function of this plan: the SHA-256 of its file is {here} here and "
            f"{own.source} there; get the file that the run was begun with"
        )
    return own_function(own.setting, own.name)


def optimizer_of(settings: UpdateSettings) -> Transform:
    """The optimizer of a plan with all its settings."""
    if settings.optimizer in OPTIMIZERS:
        return OPTIMIZERS[settings.optimizer](settings.rate, settings.betas, settings.momentum)

    def load() -> Transform:
        own = Own("update.optimizer", settings.optimizer, settings.optimizer_source)
        _require_vouched(own)
        return _optimizer(own, settings.rate, settings.betas, settings.momentum)

    return Transform(
        lambda weights: load().init(weights),
        lambda state, gradient, weights: load().update(state, gradient, weights),
        lambda state: load().frozen(state),
    )


@lru_cache(64)
def _optimizer(own: Own, rate: float, betas: tuple[float, float], momentum: float) -> Transform:
    _function(own)
    who = f"{own.setting}: {own.name}"
    parts = call_own(own.setting, own.name, rate=rate, betas=betas, momentum=momentum)
    if not (isinstance(parts, tuple) and len(parts) in (2, 3) and all(map(callable, parts))):
        raise OwnFunctionError(f"{who} must return (init, update) or (init, update, freeze), got {parts!r:.80}")
    start, step, *more = parts

    def init(weights: F32) -> State:
        with calling(who):
            state = start(weights)
        if not isinstance(state, tuple) or not all(map(_is_vector, state)):
            raise OwnFunctionError(f"{who}: its init must give a tuple of vectors of float32, got {state!r:.80}")
        return state

    def checked(update: Update) -> Update:
        def one(state: State, gradient: F32, weights: F32) -> tuple[State, F32]:
            with calling(who):
                after, change = update(state, gradient, weights)
                shapes = [[np.shape(vector) for vector in vectors] for vectors in ((*state, weights), (*after, change))]
            if shapes[0] != shapes[1] or not all(map(_is_vector, (*after, change))):
                raise OwnFunctionError(
                    f"{who}: its update must give (state, step): vectors of float32 of the shapes {shapes[0]}, got "
                    f"{shapes[1]}"
                )
            return tuple(after), change

        return one

    def freeze(state: State) -> Update:
        if not more:
            raise PlanError(f"{who} gives no freeze, which federation.local_steps needs; leave one of them out")
        with calling(who):
            return checked(more[0](state))

    transform = Transform(init, checked(step), freeze)
    _try_optimizer(who, transform, frozen=bool(more))
    return transform


def _is_vector(part: object) -> bool:
    return isinstance(part, np.ndarray) and part.dtype == np.float32 and part.ndim == 1


def _try_optimizer(who: str, transform: Transform, *, frozen: bool) -> None:
    """Two steps of a few weights must have the same bits twice, and for each weight alone."""
    numbers = np.random.default_rng(0).standard_normal((3, TRIED)).astype(np.float32)
    numbers.flags.writeable = False  # they are shared with others, so nobody may write there
    gradients, weights = numbers[:2], numbers[2]

    def walked(part: slice) -> tuple[State, F32]:
        state, here, changes = transform.init(weights[part]), weights[part], list[F32]()
        for gradient in gradients:
            for vector in state:
                vector.flags.writeable = False
            state, change = transform.update(state, gradient[part], here)
            here, changes = here + change, [*changes, change]
        return state, np.array(changes)

    state, changes = walked(slice(None))
    if changes.tobytes() != walked(slice(None))[1].tobytes():
        raise OwnFunctionError(f"{who} is not deterministic: the same step came out differently")
    alone = np.concatenate([walked(slice(number, number + 1))[1] for number in range(TRIED)], axis=1)
    if changes.tobytes() != alone.tobytes():
        raise OwnFunctionError(f"{who} is not elementwise: the step of a weight depends on other weights")
    if frozen:
        step = transform.frozen(state)
        halves = [step(state, gradient, weights)[1] for gradient in gradients]
        middle = step(state, (gradients[0] + gradients[1]) / np.float32(2), weights)[1]
        if not np.allclose(middle, (halves[0] + halves[1]) / 2, rtol=1e-3, atol=1e-6 * float(np.abs(halves).max())):
            raise OwnFunctionError(f"{who}: the update that its freeze gives is not linear in the gradient")


def share_of(settings: UpdateSettings) -> Callable[[int], np.float32]:
    """The share of the rate that each round has."""
    if settings.schedule == "constant":
        return lambda _number: np.float32(1)
    if not settings.schedule_rounds:
        raise PlanError("update.schedule_rounds is 0: expected what a run writes into its own plan.toml when it starts")
    rounds, factor, known = settings.schedule_rounds, settings.schedule_factor, SCHEDULES.get(settings.schedule)
    own = Own("update.schedule", settings.schedule, settings.schedule_source)

    def share(number: int) -> np.float32:
        if known:
            return np.float32(known(number, rounds, factor))
        _require_vouched(own)
        with calling(f"{own.setting}: {own.name}"):
            found = _function(own)(number, rounds, factor)
        if not isinstance(found, (int, float)) or not 0 <= found <= 1:
            raise OwnFunctionError(f"{own.setting}: {own.name} must give a share from 0 to 1, got {found!r:.80}")
        return np.float32(found)

    return share


def distribution(settings: ProbeSettings) -> Distribution:
    """The distribution of a resolved plan's directions."""
    if not is_own(settings.distribution):
        return distribution_of(settings.distribution, settings.shapes)
    own = Own("probe.distribution", settings.distribution, settings.distribution_source)
    return Distribution(own.name, 16, UNIT_BITS, LARGEST, partial(_decode, own))


def _decode(own: Own, stream: U8, scratch: Scratch) -> Integers:
    _require_vouched(own)
    return look_up(_table(own), stream.view("<u2"), scratch)


@cache
def _table(own: Own) -> Integers:
    """The integer for each code of 16 bits."""
    who = f"{own.setting}: {own.name}"
    with calling(who):
        once, twice = (_function(own)(CODES.copy()) for _ in range(2))
    if not isinstance(once, np.ndarray) or once.dtype.kind not in "iu" or once.shape != CODES.shape:
        raise OwnFunctionError(f"{who} must give an integer for each of {len(CODES)} codes, got {once!r:.80}")
    if not np.array_equal(once, twice):
        raise OwnFunctionError(f"{who} is not deterministic: it gave other integers for the same codes")
    numbers = once.astype(np.float64) / 2**UNIT_BITS
    mean, square = float(numbers.mean()), float((numbers**2).mean())
    if np.abs(once.astype(np.int64)).max() > LARGEST or abs(mean) > NEAR or abs(square - 1) > NEAR:
        raise OwnFunctionError(
            f"{who}: expected integers up to {LARGEST}, in units of 2^-{UNIT_BITS}, with mean 0 and mean square 1, got "
            f"up to {np.abs(once.astype(np.int64)).max()}, {mean:.4f} and {square:.4f}"
        )
    table: Integers = once.astype(np.int16)
    return table


def try_own(plan: Plan) -> None:
    """Load the functions of a settled plan, so that one that cannot work is refused before round 0."""
    require_vouched(plan)
    transform, share = optimizer_of(plan.update), share_of(plan.update)
    state = transform.init(np.zeros(1, np.float32))
    if plan.federation.local_steps > 1:
        transform.frozen(state)
    for number in (0, plan.rounds // 2, plan.rounds):
        if share(number) != share(number):
            raise OwnFunctionError(f"update.schedule: {plan.update.schedule} is not deterministic")
    if is_own(plan.probe.distribution):
        _table(Own("probe.distribution", plan.probe.distribution, plan.probe.distribution_source))
