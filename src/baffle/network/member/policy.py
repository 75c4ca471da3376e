"""A client's policy: which plans it takes part in, from a TOML file or the defaults.

Each rule bounds what a server can ask of a client: how exact its questions are, how many, for how long, and about which
data. A client that refuses a plan says in its own log which setting breaks a rule, what the server asks, and what the
policy allows.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baffle.aggregation.client_policy import liars_among
from baffle.data.sources import SOURCES, least_weights
from baffle.errors import PlanError, RefusalError, one_line
from baffle.files import read_file
from baffle.plan import Custom, FederationSettings, Plan, Section, read_toml, settings_of
from baffle.plan.arithmetic import own_of
from baffle.plan.plan import LYING
from baffle.plan.privacy import USUAL_DELTA, USUAL_EPSILON
from baffle.plan.sections import LARGEST, Count, NonNegative, OptionalCount, Positive, Proportion
from baffle.plan.tasks import is_own
from baffle.privacy.accounting import Budget

POLICY_BYTES = 64 << 10  # the most bytes of a policy file
MOST_NAME = 80  # longer names of data sets are cut
MODES = ("off", "on", LYING)  # from the least protection to the most
MOST_EXPOSED = 0.5  # the largest share of its samples that a client uses at once where only masks protect it
Range = tuple[Positive, Positive]


class Policy(Section, frozen=True):
    """The bounds within which a client takes part.

    `mode` and `floor` are the least `secure.mode` and `secure.floor`. Where the server may lie, at least `least_liars`
    clients may work with it (`secure.liars`); 0: just fewer than a third of all. With `scalars_only`, plans must be at
    batch level with shared directions: a client then sends K scalars and no vector. Unless `exact_head` is false, the
    gradient of the model's last layer may come with them. A round must use at least `least_batch` of the client's
    samples, and at most `largest_batch` of all that it has: plans whose text breaks these two are refused, and a client
    whose own samples are too few uses fewer, or none. `data` names data sets; one of the client's own is named as in a
    plan, "package.module:function". A round's exchanges wait at most `most_seconds`.

    `least_noise` is the least `privacy.noise`. All private runs together may cost an ε of `most_epsilon` at `delta`; a
    client with such a budget takes part in private runs only. 0 is any ε, but where the server may lie (mode
    "malicious-server") it is 8, and plans without [privacy] are refused unless `without_privacy` is set.

    `most_step` is how far one round may move the weights, and `most_distance` how far they may come from those that a
    run began with: root mean squares over all weights. A client that would be moved further leaves the run.

    `models` are the hashes of exported models that this client may run besides BAFFLE's own.
    """

    mode: Literal["off", "on", "malicious-server"] = "on"
    floor: Annotated[int, Meta(ge=2, le=LARGEST)] = 3
    least_liars: OptionalCount = 0
    scalars_only: bool = True
    exact_head: bool = True
    least_batch: OptionalCount = 8
    largest_batch: Proportion = 0.5
    most_weights: Count = 100_000_000
    most_k: Count = 10_000
    sigma: Range = (1e-6, 0.1)
    d_max: Range = (0.01, 1e4)
    most_rate: Positive = 1.0
    most_step: Positive = 10.0
    most_distance: Positive = 50.0
    most_rounds: Count = 10_000
    most_seconds: Positive = 3600.0
    data: tuple[str, ...] = tuple(SOURCES)
    least_noise: NonNegative = 0.0
    most_epsilon: NonNegative = 0.0
    delta: Annotated[float, Meta(gt=0, lt=1)] = USUAL_DELTA
    without_privacy: bool = False
    models: tuple[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")], ...] = ()

    def budget(self, plan: Plan) -> Budget | None:
        """What all private runs may cost this client before it sends another vector of this plan."""
        most = self.most_epsilon or (USUAL_EPSILON if plan.secure.mode == LYING else 0)
        return Budget(most, self.delta) if most else None

    @classmethod
    def beside(cls, pinned: Plan) -> "Policy":
        """The policy of a client with a pinned plan and no policy file. It allows all that the plan fixes. What the
        plan leaves open is bounded as by default, or by the plan itself if that goes further."""
        usual, anything = cls(), (0.0, float("inf"))
        exposed = pinned.secure.mode == LYING and not pinned.privacy.on
        return msgspec.structs.replace(
            usual,
            mode="off",
            floor=2,
            least_liars=1,
            scalars_only=False,
            least_batch=0,
            largest_batch=MOST_EXPOSED if exposed else 1.0,  # never the same samples in every round
            without_privacy=True,
            most_weights=LARGEST,
            most_k=LARGEST,
            sigma=anything,
            d_max=anything,
            most_rate=float("inf"),
            most_rounds=max(usual.most_rounds, pinned.rounds),
            most_seconds=max(usual.most_seconds, pinned.run.deadline_seconds),
        )

    def refusals(self, plan: Plan, *, named: bool = False) -> list[str]:
        """What speaks against taking part in a plan, a sentence each, by its text alone. With `named`, a person has
        named this plan, so its data and its functions are what they want."""
        return [
            *([] if named else self._about_data(plan)),
            *self._about_protection(plan),
            *self._about_batches(plan.federation),
            *self._about_bounds(plan),
        ]

    def require(self, plan: Plan, *, named: bool = False) -> None:
        if refusals := self.refusals(plan, named=named):
            raise RefusalError(f"this client's policy: {'; '.join(refusals)}")

    def largest_share(self, plan: Plan) -> float:
        """The largest share of its samples that a client uses at once. Where a server may lie and there is no noise, it
        is never all: a batch that is larger than any client would be another name for all samples in every round."""
        exposed = plan.secure.mode == LYING and not plan.privacy.on
        return min(self.largest_batch, MOST_EXPOSED) if exposed else self.largest_batch

    def batch(self, plan: Plan, samples: int) -> int:
        """How many samples at once a client with so many uses in a plan that is not refused: as many as the plan says,
        or fewer; 0 if no batch suits the rules. To refuse instead would tell the server how many it has."""
        federation, most = plan.federation, int(self.largest_share(plan) * samples)
        used, steps = _used(federation, samples), federation.steps or 1
        batch = min(federation.batch or samples, samples)
        if used > most:
            batch = most // steps
            used = steps * batch
        return batch if used >= self.least_batch else 0

    def _about_data(self, plan: Plan) -> Iterator[str]:
        if plan.task.data not in self.data:
            known = ", ".join(self.data) or "none"
            yield f"task.data is {one_line(plan.task.data, MOST_NAME)!r} in the server's plan, data allows {known}"
        task = plan.task
        for setting, own in (
            ("task.model", isinstance(task.model, Custom)),
            ("task.loss", is_own(task.loss)),
            ("task.metrics", any(map(is_own, task.metrics))),
            *((own.setting, True) for own in own_of(plan)),
        ):
            if own:
                yield (
                    f"{setting} comes from a function outside BAFFLE in the server's plan; to let this client call it, "
                    "give the plan with --plan"
                )

    def _about_protection(self, plan: Plan) -> Iterator[str]:
        secure = plan.secure
        if MODES.index(secure.mode) < MODES.index(self.mode):
            yield f'secure.mode is "{secure.mode}" in the server\'s plan, mode asks for at least "{self.mode}"'
        if secure.mode != "off" and secure.floor < self.floor:
            yield f"secure.floor is {secure.floor} in the server's plan, floor asks for at least {self.floor}"
        clients = plan.federation.clients
        allowed, least = (liars_among(clients, most) for most in (secure.liars, self.least_liars))
        if secure.mode == LYING and allowed < least:
            yield (
                f"secure.liars is {allowed} in the server's plan, least_liars asks for at least {least} of {clients} "
                "clients"
            )
        if self.scalars_only and plan.outcome_kind != "scalars":
            yield (
                f'clients send vectors in the server\'s plan (estimator = "{plan.estimator}", '
                f'federation.level = "{plan.federation.level}", federation.seeds = "{plan.federation.seeds}"), '
                "scalars_only asks for scalars at batch level with shared seeds"
            )
        if plan.probe.head == "exact" and not self.exact_head:
            yield (
                'probe.head is "exact" in the server\'s plan, so the gradient of the last layer leaves this client; '
                'exact_head = false asks for "probed"'
            )
        if not plan.privacy.on and secure.mode == LYING and not self.without_privacy:
            yield (
                f'the server\'s plan has no [privacy], secure.mode = "{LYING}" asks for it; to take part all the same, '
                "set without_privacy = true"
            )
        asks = {"least_noise": self.least_noise, "most_epsilon": self.most_epsilon}
        if not plan.privacy.on and any(asks.values()):
            name = next(name for name, value in asks.items() if value)
            yield f"the server's plan has no [privacy], {name} asks for it"
        elif plan.privacy.on and plan.privacy.noise < self.least_noise:
            yield (
                f"privacy.noise is {plan.privacy.noise:g} in the server's plan, least_noise asks for at least "
                f"{self.least_noise:g}"
            )

    def _about_batches(self, federation: FederationSettings) -> Iterator[str]:
        used, asks = _used(federation, LARGEST), f"federation.batch is {federation.batch} in the server's plan"
        if used == LARGEST and self.largest_batch < 1:
            yield f"{asks}, so a round uses all samples; largest_batch allows {self.largest_batch:g} of them"
        if used < self.least_batch:
            yield f"{asks}, so a round uses {used} samples; least_batch asks for at least {self.least_batch}"

    def _about_bounds(self, plan: Plan) -> Iterator[str]:
        steps = plan.federation.local_steps
        asks = "probe.k" if steps == 1 else "probe.k times federation.local_steps"
        for setting, asked, name, (least, most) in (
            ("the number of weights", least_weights(plan.task), "most_weights", (0, self.most_weights)),
            (asks, plan.probe.k * steps, "most_k", (0, self.most_k)),
            ("probe.sigma", plan.probe.sigma, "sigma", self.sigma),
            ("ring.d_max", plan.ring.d_max, "d_max", self.d_max),
            ("update.rate", plan.update.rate, "most_rate", (0, self.most_rate)),
            ("rounds", plan.rounds, "most_rounds", (0, self.most_rounds)),
            ("run.deadline_seconds", plan.run.deadline_seconds, "most_seconds", (0, self.most_seconds)),
        ):
            if not least <= asked <= most:
                allowed = f"{least:g} to {most:g}" if least else f"at most {most:g}"
                yield f"{setting} is {asked:g} in the server's plan, {name} allows {allowed}"


def load_policy(path: Path) -> Policy:
    """A policy from a TOML file. A setting that is left out has its default, an unknown one is an error."""
    try:
        text = read_file(path, POLICY_BYTES).decode()
    except (OSError, UnicodeDecodeError) as fault:
        raise PlanError(f"the policy {path} cannot be read: {fault}") from None
    policy = settings_of(read_toml(text, str(path)), Policy)
    for name, (least, most) in (("sigma", policy.sigma), ("d_max", policy.d_max)):
        if least > most:
            raise PlanError(f"{name}: expected the least value first, got [{least:g}, {most:g}]")
    return policy


def _used(federation: FederationSettings, samples: int) -> int:
    """How many of a client's samples a round uses."""
    batch = min(federation.batch or samples, samples)
    if federation.level == "batch":
        return batch
    return min(samples, federation.steps * batch) if federation.steps else samples
