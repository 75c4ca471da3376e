"""Damaged plans: read from a file, as `baffle` does, or sent by a server to a client, which checks
them against its own policy or against a plan that it was given. Policies are read in the same way."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgspec

from baffle.core.messages import encode
from baffle.network.joining import Begin, Introduction
from baffle.network.member.equipment import with_plan
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy, load_policy
from baffle.plan import load, parse, presets
from baffle.statement import MOST_PLAN
from fuzzing.checks import Tried, tried
from fuzzing.members import PLAN, impatient, to_member
from fuzzing.texts import damaged_text
from tests.support.lines_in_memory import new_keys
from tests.support.server_by_hand import ServerByHand

SECONDS = 1.0
"""No plan takes more CPU time than this to be refused."""

CLIENTS, VICTIM = 4, 2

POLICY = """mode = "on"
floor = 3
least_liars = 1
scalars_only = true
exact_head = false
least_batch = 8
largest_batch = 0.5
most_k = 100
sigma = [1e-6, 0.1]
d_max = [0.01, 1e4]
most_rounds = 1000
data = ["digits", "mnist"]
most_epsilon = 10.0
delta = 1e-6
most_weights = 1000000
most_step = 1.0
most_distance = 5.0
without_privacy = true
models = ["0000000000000000000000000000000000000000000000000000000000000000"]
"""

PRIVATE = ("federation.weighting=uniform", "privacy.epsilon=8.0", "privacy.clip=2.0")
SETTLED = (
    *("probe.head=exact", "probe.head_at=[0,650,0,0]", "ring.head_max=8.0", "ring.n_max=40", "probe.micro_batch=8"),
    *(
        "update.moments=layers",
        "update.layers=[[0,650,0,0]]",
        "probe.distribution=outer",
        "probe.shapes=[[10],[10,64]]",
    ),
)
LYING = (
    *(*PRIVATE, *SETTLED, "secure.mode=malicious-server", "secure.liars=1", "privacy.head_factor=2.0"),
    *("privacy.sharers=2", "federation.local_steps=3", "federation.warm_up=2"),
)

Reader = Callable[[str], bool]
"""A text → whether it was refused."""


def plans(count: int, seed: int) -> Iterator[Tried]:
    """Malformed plans and policies."""
    draw = Random(seed)
    texts = [load(name).to_toml() for name in presets()]
    with tempfile.TemporaryDirectory() as folder, impatient():
        readers = [*_of_files(Path(folder)), *_of_members(Path(folder))]
        own = [
            PLAN,
            parse(PLAN).to_toml(),
            parse(PLAN, PRIVATE).to_toml(),
            parse(PLAN, SETTLED).to_toml(),
            parse(PLAN, LYING).to_toml(),
        ]
        for _ in range(count):
            name, read = draw.choice(readers)
            sound = POLICY if name.startswith("policy") else draw.choice(texts if draw.random() < 0.3 else own)
            yield _tried(name, read, damaged_text(draw, sound)[:MOST_PLAN])


def _tried(name: str, read: Reader, text: str) -> Tried:
    return tried(name, text.encode(), lambda: read(text), SECONDS)


def _of_files(folder: Path) -> list[tuple[str, Reader]]:
    path = folder / "plan.toml"

    def plan(text: str) -> bool:
        path.write_text(text)
        read = load(str(path))
        if parse(read.to_toml()) != read:
            raise AssertionError("a plan that reads otherwise when written again")
        return False

    def policy(text: str) -> bool:
        path.write_text(text)
        load_policy(path)
        return False

    return [("plan in a file", plan), ("policy in a file", policy)]


def _of_members(folder: Path) -> list[tuple[str, Reader]]:
    """Clients that are sent a plan before they have one, with and without a plan of their own."""
    server = ServerByHand(new_keys(folder, CLIENTS), parse(PLAN, ['secure.mode="on"']))
    log: list[str] = []
    feed = to_member(log)

    def member(*, pinned: bool) -> Member:
        equip = with_plan(VICTIM, None, part=True)
        plan = server.plan if pinned else None
        return Member(server.keys[VICTIM], None, equip, pinned=plan, tell=log.append, policy=Policy(floor=2))

    def introduce(client: Member) -> Reader:
        return lambda text: feed(client, encode(msgspec.structs.replace(server.introduce(), plan=text)))

    def begin(client: Member) -> Reader:
        none = Introduction(0, bytes(32), bytes(64))
        return lambda text: feed(client, encode(Begin(encode(server.statement(VICTIM, none, plan=text)), ())))

    free, pinned = member(pinned=False), member(pinned=True)
    for client in (free, pinned):
        introduce(client)(server.plan.to_toml())  # so that everything is loaded that a plan within a policy needs
    return [
        ("plan in Introduce", introduce(free)),
        ("plan in Begin", begin(free)),
        ("plan in Introduce, pinned", introduce(pinned)),
        ("plan in Begin, pinned", begin(pinned)),
    ]
