"""The test vectors of docs/protocol.md: the package makes them again, and a client without its code agrees."""

import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from baffle.client.abstaining import abstention
from tests.protocol import client, learning, marks, plans, sums, wire
from tests.protocol.directions import written
from tests.vectors.make import FILES, HERE, message_types, plain

LARGEST = 200_000


def rows(name: str, part: str) -> list[Any]:
    return list(json.loads((HERE / f"{name}.json").read_text())[part])


unhex = bytes.fromhex


def raw(row: dict[str, Any], *names: str) -> list[bytes]:
    return [unhex(row[name]) for name in names]


def private(digits: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(unhex(digits))


def message(value: Any) -> Any:
    """A message as the independent client has it, in the form of the vectors."""
    if isinstance(value, wire.Message):
        return {"tag": value.tag} | {name: message(field) for name, field in value.values.items()}
    if isinstance(value, list):
        return [message(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


@pytest.mark.parametrize("name", FILES)
def test_the_package_makes_the_same_vectors_again(name: str) -> None:
    assert written(plain(FILES[name]())) == (HERE / f"{name}.json").read_text()


def test_the_vectors_are_small_and_complete() -> None:
    files = sorted(HERE.glob("*.json"))
    assert {file.stem for file in files} == {*FILES, "directions"}
    assert sum(file.stat().st_size for file in files) < LARGEST
    assert [row["message"]["tag"] for row in rows("messages", "messages")] == [
        kind.__struct_config__.tag for kind in message_types()
    ]


def test_messages() -> None:
    for row in rows("messages", "messages"):
        (data,) = raw(row, "bytes")
        decoded = wire.decode(data, row["message"]["tag"])
        assert message(decoded) == row["message"]
        assert wire.encode(decoded) == data
        assert wire.abstention(data) == abstention(data)
        with pytest.raises(wire.RefusedError):
            wire.decode(data + b"\xc0", row["message"]["tag"])


def test_the_handshake() -> None:
    (row,) = rows("handshake", "handshakes")
    process, greeting, challenge, proof = raw(row, "process", "greeting", "challenge", "proof")
    own, public = private(row["client private"]), wire.public_of(private(row["server private"]))
    assert wire.proof(own, public, process, greeting, challenge) == proof
    with pytest.raises(wire.RefusedError, match="not the server"):
        wire.proof(own, wire.public_of(own), process, greeting, challenge)


def test_requests_and_replies() -> None:
    for row in rows("envelope", "exchanges"):
        own, server = private(row["client private"]), wire.public_of(private(row["server private"]))
        frame, answer, reply = raw(row, "request", "answer", "reply")
        request = wire.read_request(server, wire.public_of(own), frame)
        assert wire.reply(own, server, request, answer) == reply
        assert (frame[:32].hex(), int.from_bytes(frame[48:52], "big")) == (row["run"], row["round"])
        with pytest.raises(wire.RefusedError):
            wire.read_request(server, wire.public_of(own), frame + b"!")


def test_signed_texts() -> None:
    made = {
        "ready": lambda of: client.ready_text(unhex(of["run"])),
        "state": lambda of: sums.state_text(unhex(of["run"]), of["round"], unhex(of["chain"])),
        "survivors": lambda of: sums.survivors_text(unhex(of["run"]), unhex(of["context"]), of["alive"]),
        "commitment": lambda of: client.commitment_text(
            unhex(of["server"]), of["plan"], unhex(of["roster hash"]), of["epoch"], unhex(of["commitment"])
        ),
    }
    for row in rows("signatures", "texts"):
        text = made[row["name"]](row["of"])
        assert text.hex() == row["text"]
        assert private(row["private"]).sign(text).hex() == row["signature"]
    for row in rows("signatures", "advertisements"):
        run, data = raw(row, "run", "bytes")
        *unsigned, signature = wire.decode(data, "advertisement").values.values()
        assert private(row["private"]).sign(sums.advertisement_text(run, unsigned)) == signature


def test_statements() -> None:
    for row in rows("statement", "statements"):
        server, data, nonces = raw(row, "server", "statement", "nonces")
        statement, run = wire.decode(data, "statement"), client.run_of(data)
        assert wire.encode(statement) == data
        assert (run.hex(), client.salt_of(run, statement, nonces).hex()) == (row["run"], row["salt"])
        assert statement.unopened
        for one in (*statement.commitments, *statement.unopened):
            text = client.commitment_text(server, statement.plan, statement.roster_hash, 0, one.commitment)
            assert wire.is_signed(_identity_of(one.client), one.signature, text)


def _identity_of(number: int) -> bytes:
    return wire.public_of(Ed25519PrivateKey.from_private_bytes(sha256(f"client {number} 0".encode()).digest()))


def test_rosters() -> None:
    for row in rows("roster", "rosters"):
        authority, file, text = raw(row, "authority", "file", "text")
        roster = client.read_roster(file, authority)
        assert client.roster_text(roster) == text
        assert sha256(text).hexdigest() == row["hash"]
        with pytest.raises(wire.RefusedError):
            client.read_roster(file.replace(b'"number":12', b'"number":13'), authority)


def test_plans() -> None:
    for row in rows("plans", "plans"):
        assert plans.digest(plans.read_plan(row["plan"])).hex() == row["digest"], row["plan"]


def test_the_schedule() -> None:
    for row in rows("schedule", "permutations"):
        assert learning.permutation(unhex(row["key"]), row["n"]).tolist() == row["order"]
    for row in rows("schedule", "batches"):
        of = plans.read_plan(row["plan"]), unhex(row["salt"]), row["client"], row["samples"], row["round"]
        assert learning.batch(*of).tolist() == row["batch"]
    for row in rows("schedule", "groups"):
        assert learning.groups_of_round(plans.read_plan(row["plan"]), unhex(row["salt"]), row["round"]) == row["groups"]
    for row in rows("schedule", "initial weights"):
        shapes = [tuple(shape) for shape in row["shapes"]]
        drawn = learning.initial_weights(plans.read_plan(row["plan"]), shapes)
        assert drawn.astype("<f4").tobytes().hex() == row["weights"]


def test_the_ring() -> None:
    for row in rows("ring", "vectors"):
        plan, values = plans.read_plan(row["plan"]), [float.fromhex(value) for value in row["values"]]
        assert learning.value_scale(plan).hex() == row["scale"]
        assert learning.vector(plan, values, row["samples"], float.fromhex(row["loss"])).tolist() == row["vector"]


def test_private_rings() -> None:
    for row in rows("ring", "private"):
        plan = plans.read_plan(row["plan"])
        m, length, norm = learning.clients_of_round(plan), plan["probe.k"], plan["privacy.clip"]
        b = 0.6931471805599454 * (41 + length.bit_length())

        def most(bound: float, plan: plans.Plan = plan, m: int = m, b: float = b) -> float:
            noise = m * (plan["privacy.noise"] * bound) ** 2 / plan["privacy.sharers"]
            return m * bound + b / 3 + math.sqrt(b * b / 9 + 2 * noise * b)

        scale = max(2.0**e for e in range(-60, 60) if most(norm * 2.0**e) < 2**29)
        bound = math.floor(norm * scale)
        assert (scale.hex(), bound, math.ceil(most(bound))) == (row["scale"], row["bound"], row["most"])


def test_rounds() -> None:
    for row in rows("rounds", "runs"):
        plan, weights = plans.read_plan(row["plan"]), np.frombuffer(unhex(row["weights"]), "<f4")
        epochs = tuple(
            learning.Epoch(one["first"], unhex(one["run"]), unhex(one["salt"]), None) for one in row["epochs"]
        )
        replica = learning.Replica.beginning(plan, weights, epochs)
        for step in row["steps"]:
            if step["outcome"]:
                replica = replica.after(unhex(step["outcome"]))
            assert (learning.state_digest(replica.state).hex(), replica.chain.hex()) == (step["state"], step["chain"])


def test_masks() -> None:
    keys = rows("masks", "mask keys")
    own = {}
    for row in keys:
        run, session, secret, context = raw(row, "run", "session", "secret", "context")
        assert sums.key_context(run, session, row["owner"], row["slot"]) == context
        own[row["owner"]] = sums.mask_key(secret, context)
        assert own[row["owner"]].public_key().public_bytes_raw().hex() == row["public"]
    (about,) = rows("masks", "rounds")
    opening, request = _message(about["opening"]), _message(about["request"])
    context = sums.round_context(unhex(about["keys"]), opening, request, [1, 4, 9])
    assert context.hex() == about["context"]
    assert sha256(b"".join(unhex(row["context"]) for row in keys)).hexdigest() == about["keys"]
    for row in rows("masks", "masked"):
        own_mask = sums.mask(unhex(row["seed"]), context, "self-mask", len(row["vector"]))
        total = np.array(row["vector"], np.uint32) + own_mask
        for peer in (1, 9):
            secret = sums.agreed(own[4], own[peer].public_key().public_bytes_raw())
            pair = sums.mask(secret, context, "pair-mask", len(total))
            total = total + pair if peer > 4 else total - pair
        assert total.tolist() == row["masked"]
    for row in rows("masks", "commitments"):
        run, seed = raw(row, "run", "seed")
        assert sums.seed_commitment(run, row["slot"], row["sender"], seed).hex() == row["commitment"]


def _message(value: dict[str, Any]) -> wire.Message:
    """A message from its form in the vectors, as far as masks need it."""
    fields = wire.fields_of(value["tag"]).items()
    values = (unhex(value[name]) if kind in wire.SIZES else value[name] for name, kind in fields)
    return wire.Message(value["tag"], *values)


def test_boxes() -> None:
    for row in rows("masks", "boxes"):
        run, session, secret, public, text, box = raw(row, "run", "session", "private", "public", "text", "box")
        slot, sender, receiver = row["slot"], row["sender"], row["receiver"]
        channel = sums.derive(sums.agreed(X25519PrivateKey.from_private_bytes(secret), public), b"", "channel")
        assert channel.hex() == row["channel"]
        key = sums.box_key(channel, sums.key_context(run, session, sender, slot), sender, receiver)
        assert key.encrypt(bytes(12), text, None) + sums.digests(run, slot, sender, receiver, text) == box


def test_shares() -> None:
    for row in rows("shares", "shares"):
        coefficients = [int(number, 16) for number in row["coefficients"]]
        assert [sums.share_at(point, coefficients).hex() for point in row["points"]] == row["shares"]


def test_graphs() -> None:
    for row in rows("graph", "graphs"):
        n, may_lie = row["members"], row["may lie"]
        members = list(range(row["first"], row["first"] + row["step"] * n, row["step"]))
        near = sums.neighbours(members, row["client"], unhex(row["salt"]), row["slot"], complete=may_lie)
        assert len(near) == row["k"]
        assert near == (row["neighbours"] or [member for member in members if member != row["client"]])
        assert sums.least_threshold(n, len(near), row["liars"], may_lie=may_lie) == row["threshold"]


def test_marks(tmp_path: Path) -> None:
    for row in rows("marks", "files"):
        (tmp_path / "marks").write_text("\n".join(row["lines"]) + '\n{"is":"mar')  # the last line was cut off
        known = marks.Marks(tmp_path / "marks")
        assert {run: known.of(unhex(run)) for run in row["marks"]} == row["marks"]
        assert dict(known.released) == row["released"]
        assert known.commit(lambda: (b"", b"")).hex() == row["unopened"]
        assert sorted(known.left) == row["left"]
        assert (tmp_path / "marks").read_text() == "\n".join(row["lines"]) + "\n"


def test_marks_that_the_independent_client_writes_are_the_packages(tmp_path: Path) -> None:
    (row,) = rows("marks", "files")
    (tmp_path / "marks").touch()
    own = marks.Marks(tmp_path / "marks", now=lambda: 1_750_000_000.5)
    lines, excluded = [json.loads(line) for line in row["lines"]], list[bytes]()
    for line in lines:
        run = unhex(line.get("run", ""))
        match line["is"]:
            case "committed":
                pair = unhex(line["commitment"]), unhex(line["nonce"])
                own.commit(lambda pair=pair: pair)  # type: ignore[misc]
            case "opened":
                own.open(unhex(line["commitment"]), run, limited=True, excluded=excluded)
            case "excluded":  # written with the opening that follows
                excluded = [unhex(line["identity"])]
            case "entered":
                own.enter(run, line["places"])
            case "left":
                own.leave()
            case _:
                own.note(run, unhex(line.get("released", "")), **line["marks"])
    assert (tmp_path / "marks").read_text().splitlines() == row["lines"]
