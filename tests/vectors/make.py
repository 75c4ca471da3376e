"""Makes the test vectors of docs/protocol.md from the package: `python -m tests.vectors.make` writes them here.

directions.json is not among them: tests/protocol/directions.py makes it. All keys here are for tests alone.
"""

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec import inspect

import baffle.aggregation.messages
import baffle.core.messages
import baffle.network.joining
import baffle.network.link.handshake
import baffle.statement
from baffle.aggregation import context
from baffle.aggregation.client.marks import Marks, MarksFile
from baffle.aggregation.client.peers import FrozenPeers, Peers
from baffle.aggregation.client_policy import ClientPolicy
from baffle.aggregation.masks import agree, derive, mask_key, pair_mask, self_mask
from baffle.aggregation.messages import Advertisement, Opening
from baffle.aggregation.shares import new_secret, split
from baffle.core.messages import CatchUp, Group, Message, Outcome, RoundRequest, encode
from baffle.core.ring import add
from baffle.core.seeds import Seeds, batch_indices, permutation
from baffle.lineage import Lineage
from baffle.models.drawing import draw_weights
from baffle.network.keys.authority import sign_roster
from baffle.network.keys.rosters import Participant, Roster
from baffle.network.link.envelope import ask, reply
from baffle.network.link.handshake import ClientSide, ServerSide
from baffle.plan import parse
from baffle.schedule import choose_groups
from baffle.statement import (
    PROTOCOL,
    Commitment,
    Statement,
    commitment_text,
    commitment_to,
    ready_text,
    run_of,
    salt_of,
)
from baffle.trajectory import Epoch, Trajectory, trajectory_of
from tests.protocol.directions import written

HERE = Path(__file__).parent
Vectors = dict[str, list[dict[str, Any]]]

WIRE: tuple[ModuleType, ...] = (
    baffle.network.link.handshake,
    baffle.network.joining,
    baffle.statement,
    baffle.core.messages,
    baffle.aggregation.messages,
)
"""The modules whose messages travel."""


def of(name: str, size: int = 32) -> bytes:
    """Bytes that look random and are always the same."""
    blocks = (sha256(f"{name} {i}".encode()).digest() for i in range(-(-size // 32)))
    return b"".join(blocks)[:size]


def identity(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(of(name))


def public(private: Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


@contextmanager
def fixed_randomness() -> Iterator[list[bytes]]:
    """Random bytes are always the same, and listed."""
    drawn: list[bytes] = []

    def token_bytes(size: int) -> bytes:
        drawn.append(of(f"random {len(drawn)}", size))
        return drawn[-1]

    with patch.object(secrets, "token_bytes", token_bytes):
        yield drawn


def message_types() -> list[type[Message]]:
    """Every type of message that travels."""
    kinds = [(kind, module.__name__) for module in WIRE for kind in vars(module).values() if isinstance(kind, type)]
    messages = [kind for kind, home in kinds if issubclass(kind, Message) and kind.__module__ == home]
    return [kind for kind in messages if kind is not Message]


def example(kind: inspect.Type, name: str) -> Any:
    """A value of a field's type."""
    match kind:
        case inspect.StructType(cls=cls):
            return cls(*(example(field.type, f"{name}.{field.name}") for field in inspect.type_info(cls).fields))  # type: ignore[attr-defined]
        case inspect.UnionType(types=types):
            return example(types[0], name)
        case inspect.VarTupleType(item_type=item):
            if not isinstance(item, inspect.IntType | inspect.BytesType):
                return (example(item, name),)
            return tuple(sorted(example(item, f"{name}[{i}]") for i in range(2)))
        case inspect.BytesType(min_length=size):
            return of(name, size or 40)
        case inspect.IntType():
            return int.from_bytes(of(name, 2), "big")
        case inspect.LiteralType(values=values):
            return values[0]
        case _:
            return f"ä {name}"


def plain(value: Any) -> Any:
    """A value as JSON has it: bytes as hexadecimal digits, floats by their bits, a message as its tag and fields."""
    match value:
        case Message():
            fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
            return {"tag": value.__struct_config__.tag, **fields}
        case dict():
            return {plain(name): plain(item) for name, item in value.items()}
        case tuple() | list():
            return [plain(item) for item in value]
        case np.ndarray():
            return value.tolist()
        case bytes() | float():
            return value.hex()
        case _:
            return value


def messages() -> Vectors:
    examples = [example(inspect.type_info(kind), kind.__name__) for kind in message_types()]
    return {"messages": [{"message": one, "bytes": encode(one)} for one in examples]}


def handshake() -> Vectors:
    client, server, process = identity("client"), identity("server"), of("process", 16)
    one = ClientSide(client, public(server), "localhost", process)
    other = ServerSide(server, {public(client): 3}, ["localhost"])
    with fixed_randomness():
        greeting = one.greeting()
        challenge = other.take(greeting)
        proof = one.proof(challenge)
        accepted = other.take(proof)
    frames = {"greeting": greeting, "challenge": challenge, "proof": proof, "accepted": accepted}
    keys = {"client private": of("client"), "server private": of("server"), "process": process}
    return {"handshakes": [{"host": "localhost", **keys, **frames}]}


def envelope() -> Vectors:
    client, server = identity("client"), identity("server")
    rows = []
    for run, number, kind, body, answer in (
        (bytes(32), 0, "introduce", b"a question", b"an answer"),
        (of("run"), 70_000, "masked-request", b"", b""),
    ):
        with fixed_randomness():
            request = ask(server, public(client), run, number, kind, body)
        parts = {"client private": of("client"), "server private": of("server"), "request": request.frame}
        frames = parts | {"answer": answer, "reply": reply(client, public(server), request, answer)}
        rows.append({"kind": kind, "round": number, "run": run, **frames})
    return {"exchanges": rows}


PLANS = [
    'task = {init = "numpy", model = {name = "softmax"}}\nring.n_max = 1000\nfederation.clients = 4',
    'seed = 9\nprobe = {k = 3, sigma = 1e-5, distribution = "rademacher"}\nupdate = {rate = 1e-6, clip = 1}',
    "probe.sigma = 1.5e-7\nring = {d_max = 1e16, update_max = 123456.789, n_max = 7}\nupdate.norm_max = 1e15",
    "federation.tiers = [{k = 4, share = 0.5}, {k = 8, share = 0.25}]\ntask.metrics = ['accuracy']",
    'task.model = {name = "lenet", channels = [16, 64], norm = "group"}\nsecure = {groups = 2, combine = "median"}',
    'federation.weighting = "uniform"\nprivacy = {noise = 2, clip = 0.3, sharers = 3}\nsecure.floor = 4',
    'update = {moments = "layers", layers = [[0, 4, 0, 0], [4, 6, 8, 9]], betas = [0.5, 0]}\ntask.data = "my.dätä:set"',
]


def plans() -> Vectors:
    return {"plans": [{"plan": text, "digest": parse(text).trajectory_digest()} for text in PLANS]}


def schedule() -> Vectors:
    text = "seed = 5\nfederation = {clients = 9, participation = 0.7, batch = 6}\nring.n_max = 10\nsecure.floor = 2"
    grouped = f"{text}\nsecure.groups = 2"
    salt, shapes = of("salt"), {"1.weight": (3, 4), "1.bias": (3,), "2.weight": (2, 3), "2.bias": (2,)}
    seeds = Seeds(5, parse(text).trajectory_digest(), salt)

    def batch(client: int, samples: int, number: int) -> Any:
        return batch_indices(lambda lap: seeds.key("batches", lap, client), samples, 6, number)

    def groups(plan: str, number: int) -> list[list[int]]:
        return choose_groups(trajectory_of(parse(plan), 5, epochs=(Epoch(0, salt),)), number)

    weights = draw_weights(shapes, 5).astype("<f4").tobytes()
    return {
        "permutations": [{"key": of("key"), "n": n, "order": permutation(of("key"), n)} for n in (1, 7, 20)],
        "batches": [
            {"plan": text, "salt": salt, "client": c, "samples": n, "round": r, "batch": batch(c, n, r)}
            for c, n, r in ((0, 10, 0), (0, 10, 1), (8, 17, 2**31))
        ],
        "groups": [
            {"plan": plan, "salt": salt, "round": r, "groups": groups(plan, r)}
            for plan, r in ((text, 0), (text, 7), (grouped, 0), (grouped, 7))
        ],
        "initial weights": [{"plan": "seed = 5", "shapes": [*map(list, shapes.values())], "weights": weights}],
    }


RING = """
probe.k = {k}
federation = {{clients = {clients}, weighting = "{by}", tiers = {tiers}}}
ring = {{n_max = 50, d_max = {d_max}}}
"""


def ring() -> Vectors:
    rows = []
    for k, clients, by, tiers, d_max, samples, values, loss in (
        (3, 4, "samples", "[]", 100.0, 20, [0.1, -2.5, 99.0], 2.25),
        (3, 4, "samples", "[]", 2.0, 2000, [0.1, -2.5, 99.0], 1e9),
        (4, 10, "uniform", "[{k = 3, share = 0.5}]", 1e-3, 20, [1e-4, -3e-5, 2e-6], -0.5),
        (2, 7, "samples", "[]", 1e12, 9, [5e11, -0.5], 3.0),
        (2, 7, "samples", "[]", 1.0, 9, [0.5, float("nan")], 3.0),
        (2, 7, "uniform", "[]", 1.0, 9, [0.5, float("nan")], 3.0),
        (3, 7, "uniform", "[]", 1.0, 9, [0.5, -2.0, 0.25], 3.0),
    ):
        text = RING.format(k=k, clients=clients, by=by, tiers=tiers, d_max=d_max)
        text += 'secure.mode = "malicious-server"\n' if clients == 7 and by == "uniform" else ""
        trajectory = trajectory_of(parse(text), 5)
        vector = trajectory.ring.encode(np.array(values), k, trajectory.weight_of(samples), loss)
        known = {"plan": text, "samples": samples, "values": values, "loss": loss}
        rows.append({**known, "scale": trajectory.ring.scale, "vector": vector})
    return {"vectors": rows, "private": [_private(*row) for row in ((3, 4, 0.3, 2.0, 3), (500, 40, 17.5, 0.5, 20))]}


def _private(k: int, clients: int, clip: float, noise: float, sharers: int) -> dict[str, Any]:
    text = RING.format(k=k, clients=clients, by="uniform", tiers="[]", d_max=1.0)
    text += f"secure.floor = {sharers}\nprivacy = {{noise = {noise}, clip = {clip}, sharers = {sharers}}}\n"
    found = trajectory_of(parse(text), 5).private
    assert found
    return {"plan": text, "scale": found.scale, "bound": found.delta_2, "most": found.most(clients)}


RUNS = [
    'probe = {k = 4, distribution = "rademacher"}',
    'probe = {k = 3, distribution = "gaussian"}\nupdate = {optimizer = "momentum", clip = 0.25, weight_decay = 0.01}',
    'probe = {k = 2, distribution = "sphere"}\nupdate = {optimizer = "sgd", norm_max = 1e9, ema = 0}',
    'probe = {k = 6, supports = "layers", layout = [[0, 5, 9, 11, 2], [5, 9, 0, 0, 1], [11, 21, 0, 0, 3]]}',
    'probe = {k = 3, distribution = "outer", shapes = [[4, 5], [1]]}\nsecure = {groups = 2, floor = 2}',
    "probe.k = 2\nsecure = {groups = 2, floor = 2, combine = 'median'}",
    "probe.k = 2\nsecure = {groups = 2, floor = 2, group_seeds = 'own'}",
    "probe.k = 2\nsecure = {groups = 2, floor = 2, group_seeds = 'own', combine = 'median'}",
    "probe.k = 2\nupdate = {moments = 'layers', layers = [[0, 5, 9, 12], [5, 9, 0, 0], [12, 21, 0, 0]]}",
    "probe.k = 2\nfederation.local_steps = 3\nfederation.warm_up = 1",
    "probe.k = 2\nfederation.local_steps = 2\nfederation.warm_up = 4\nupdate.optimizer = 'momentum'",
    "probe.k = 2\nfederation.local_steps = 2\nfederation.warm_up = 1\n"
    "secure = {groups = 2, floor = 2, group_seeds = 'own'}\n"
    "update = {moments = 'layers', layers = [[0, 5, 9, 12], [5, 9, 0, 0], [12, 21, 0, 0]]}",
]
N = 21


def rounds() -> Vectors:
    return {
        "runs": [_run(f"seed = {i}\nfederation.clients = 5\nring.n_max = 40\n{text}") for i, text in enumerate(RUNS)]
    }


def _run(text: str) -> dict[str, Any]:
    """Six rounds, of which one was skipped, in two epochs."""
    epochs = (Epoch(0, of("salt 0"), of("run 0")), Epoch(3, of("salt 1"), of("run 1")))
    trajectory = trajectory_of(parse(text), N, epochs=epochs)
    weights = np.frombuffer(of("weights", 2 * N), "<i2").astype(np.float32) / np.float32(32768)
    lineage = Lineage(trajectory)
    present = lineage.beginning(trajectory.rule.start(weights))
    steps = [{"outcome": "", "state": present.state.digest(), "chain": present.chain}]
    for number in range(6):
        data = encode(_outcome(trajectory, number))
        present = lineage.advance(present, data)
        steps.append({"outcome": data, "state": present.state.digest(), "chain": present.chain})
    shown = [{"first": epoch.first, "run": epoch.run, "salt": epoch.salt} for epoch in epochs]
    return {"plan": text, "weights": weights.tobytes(), "epochs": shown, "steps": steps}


def _outcome(trajectory: Trajectory, number: int) -> Outcome:
    if number == 2:
        return Outcome(number, "skipped", ())
    groups = []
    for group in range(trajectory.plan.secure.groups):
        totals = np.frombuffer(of(f"totals {number} {group}", 4 * trajectory.length), "<i4") >> 5
        key = trajectory.key_number(number, group)
        groups.append(Group(key, totals.astype("<i4").tobytes(), 70 + number + group))
    return Outcome(number, "scalars", tuple(groups))


def statement() -> Vectors:
    server, nonces = public(identity("server")), [of(f"nonce {i}") for i in range(3)]
    plan, roster_hash = parse(PLANS[0]).to_toml(), of("roster")
    commitments = [commitment_to(nonce) for nonce in nonces]
    texts = [commitment_text(server, plan, roster_hash, 0, one) for one in commitments]
    signed = tuple(
        Commitment(client, one, identity(f"client {client}").sign(text))
        for client, one, text in zip((0, 2, 3), commitments, texts, strict=True)
    )
    made = Statement(
        PROTOCOL,
        plan,
        of("initial"),
        1,
        roster_hash,
        (32, 32, 16, 32),
        0,
        bytes(32),
        0,
        of("chain"),
        signed[1:],
        signed[:1],
    )
    run = run_of(encode(made))
    known = {"server": server, "statement": encode(made), "run": run, "nonces": b"".join(nonces[1:])}
    salt = salt_of(run, made, known["nonces"])
    return {"statements": [known | {"salt": salt}]}


def signatures() -> Vectors:
    run, chain, about = of("run"), of("chain"), of("context")
    unsigned = Advertisement(3, of("session", 16), of("channel"), 128, (of("key 0"), of("key 1")), bytes(64))
    advertisement = context.sign(identity("client"), run, unsigned)
    survivors = {"run": run, "context": about, "alive": [0, 2, 300]}
    commitment = {"server": of("server"), "plan": "ä = 1", "roster hash": of("r"), "epoch": 4, "commitment": chain}
    rows = [
        ("ready", {"run": run}, ready_text(run)),
        ("state", {"run": run, "round": 7, "chain": chain}, context.state_text(run, 7, chain)),
        ("survivors", survivors, context.survivors_text(run, about, (0, 2, 300))),
        ("commitment", commitment, commitment_text(of("server"), "ä = 1", of("r"), 4, chain)),
    ]
    private = {"private": of("client")}
    texts = [
        {"name": name, "of": fields, **private, "text": text, "signature": identity("client").sign(text)}
        for name, fields, text in rows
    ]
    return {"texts": texts, "advertisements": [{"run": run, **private, "bytes": encode(advertisement)}]}


def roster() -> Vectors:
    authority = identity("authority")
    one, two, server = (public(identity(name)).hex() for name in ("client 0", "client 2", "server"))
    clients = (Participant(one, "a node's key"), None, Participant(two, ""))
    made = sign_roster(Roster(12, "9999-12-31T23:59:59Z", server, clients, ""), authority)
    known = {"authority": public(authority), "file": made.encode(), "text": made.signed_text(), "hash": made.hash()}
    return {"rosters": [known]}


def masks() -> Vectors:
    run, slot, length = of("run"), 5, 6
    request = RoundRequest(slot, of("trajectory"), of("chain"), of("weights"), CatchUp("outcomes", 0, ()))
    opening = Opening(slot, (1, 4, 9), 2, 2, ())
    sessions = {client: of(f"session {client}", 16) for client in opening.members}
    contexts = {client: context.key_context(run, session, client, slot) for client, session in sessions.items()}
    private = {client: mask_key(of(f"secret {client}", 16), contexts[client]) for client in opening.members}
    keys = sha256(b"".join(contexts.values())).digest()
    about = context.round_context(keys, opening, request, opening.members)
    vector = np.arange(length, dtype=np.uint32)
    pairs = [pair_mask(agree(private[4], public(private[peer])), about, length, plus=peer > 4) for peer in (1, 9)]
    seed = of("seed", 16)
    masked = add([vector, self_mask(seed, about, length), *pairs])
    commitment = context.seed_commitment(run, slot, 4, seed)
    return {
        "mask keys": [
            {"run": run, "session": sessions[client], "owner": client, "slot": slot}
            | {"secret": of(f"secret {client}", 16), "context": contexts[client], "public": public(private[client])}
            for client in opening.members
        ],
        "rounds": [{"keys": keys, "opening": opening, "request": request, "participants": [1, 4, 9], "context": about}],
        "masked": [{"client": 4, "seed": seed, "vector": vector, "masked": masked}],
        "commitments": [{"run": run, "slot": slot, "sender": 4, "seed": seed, "commitment": commitment}],
        "boxes": [_box(run, slot)],
    }


def _box(run: bytes, slot: int) -> dict[str, Any]:
    """A box from client 4 to client 9."""
    channels = {client: X25519PrivateKey.from_private_bytes(of(f"channel {client}")) for client in (4, 9)}
    advertised = (
        Advertisement(client, of(f"session {client}", 16), public(channel), slot, (of("key"),), bytes(64))
        for client, channel in channels.items()
    )
    peers = Peers(4, run, _never, FrozenPeers(of("channel 4"), tuple(advertised)))
    text = of("share of the seed", 16) + of("share of the secret", 16)
    about = {"run": run, "slot": slot, "sender": 4, "receiver": 9, "session": of("session 4", 16)}
    keys = {"private": of("channel 4"), "public": public(channels[9])}
    channel = derive(agree(channels[4], public(channels[9])), b"", "channel")
    return about | keys | {"channel": channel, "text": text, "box": peers.seal(slot, {9: text})}


def _never(_data: bytes) -> Advertisement:
    raise NotImplementedError


def shares() -> Vectors:
    rows = []
    for t, points in ((1, [4]), (3, [1, 2, 4, 100_000]), (20, list(range(1, 31)))):
        with fixed_randomness() as drawn:
            seed, secret = new_secret(), new_secret()
            dealt = split(seed, secret, t, points)
        _, _, *noise = [int.from_bytes(one[i : i + 16], "big") for one in drawn for i in range(0, len(one), 16)]
        for place, constant in enumerate((seed, secret)):
            highest_first = noise[place * (t - 1) : (place + 1) * (t - 1)]
            coefficients = [constant, *(f"{number:032x}" for number in reversed(highest_first))]
            rows.append({"points": points, "coefficients": coefficients, "shares": [pair[place] for pair in dealt]})
    return {"shares": rows}


def graph() -> Vectors:
    rows = []
    honest = ((n, False, 0) for n in (3, 200, 201, 1000))
    for n, may_lie, liars in (*honest, (300, True, 0), (5, True, 1), (9, True, 2)):
        members = tuple(range(7, 7 + 2 * n, 2))
        policy = ClientPolicy(agreement=may_lie, salt=of("salt"), liars=liars)
        drawn = policy.graph(members, 3)
        near = drawn.neighbours[9]
        known = {"members": n, "first": 7, "step": 2, "salt": of("salt"), "slot": 3, "may lie": may_lie, "client": 9}
        known["liars"] = liars
        threshold, shown = policy.least_threshold(drawn, n), [] if len(near) == n - 1 else near
        rows.append({**known, "k": drawn.k, "threshold": threshold, "neighbours": shown})
    return {"graphs": rows}


def marks() -> Vectors:
    run, other = of("run"), of("another run")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "marks"
        path.touch()
        memory = MarksFile(path, now=lambda: 1_750_000_000.5)
        memory.commit(commitment_to(of("nonce 0")), of("nonce 0"))
        memory.open(commitment_to(of("nonce 0")), run)
        memory.enter(run, 4)
        memory.remember(run, Marks(sealed=0))
        memory.remember(run, Marks(sealed=0, slot=0))
        memory.remember(run, Marks(sealed=1, slot=0, round=0, agreed=0, signed=0), of("weights"))
        memory.commit(commitment_to(of("nonce 1")), of("nonce 1"))
        memory.open(commitment_to(of("nonce 1")), other)
        memory.enter(other, 4)
        memory.remember(other, Marks(sealed=1, slot=1, round=1), of("weights"))
        memory.leave()
        memory.commit(commitment_to(of("nonce 2")), of("nonce 2"))
        memory.open(commitment_to(of("nonce 2")), of("a third run"), excluded=[of("an identity")])
        memory.commit(commitment_to(of("nonce 3")), of("nonce 3"))
        lines = path.read_text().splitlines()
    kept = {one: msgspec.to_builtins(memory.marks(one)) for one in (run, other)}
    found = {"lines": lines, "marks": kept, "released": {of("weights"): memory.released(of("weights"))}}
    return {"files": [found | {"unopened": memory.unopened(), "left": sorted([run, other])}]}


_MAKERS: tuple[Callable[[], Vectors], ...] = (
    *(schedule, plans, ring, rounds, messages, handshake, envelope),
    *(signatures, statement, roster, masks, shares, graph, marks),
)
FILES = {make.__name__: make for make in _MAKERS}


def main() -> None:
    for name, make in FILES.items():
        (HERE / f"{name}.json").write_text(written(plain(make())), encoding="ascii")


if __name__ == "__main__":
    main()
