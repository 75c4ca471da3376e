"""A client of BAFFLE that was written from docs/protocol.md and shares no code with the package.

It takes part in plans for softmax regression at batch level with shared directions, in secure sums: nearly what the
page calls a minimal client.

    python -m tests.protocol.client HOST:PORT KEYS SAMPLES.npz [--abstain ROUND] [--slow-until FILE] [--entered FILE]

With `--abstain` it sends no vector in that round, as if it dropped out. With `--slow-until` it takes 0.4 seconds for
each round until that file exists. It makes the file of `--entered` when it enters a run. When the run is over it prints
the hash of its weights, and what it contributed to each round.
"""

import argparse
import json
import secrets
import ssl
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import connect

from tests.protocol import learning, wire
from tests.protocol.learning import F32, Epoch, Replica
from tests.protocol.marks import Marks, write_durably
from tests.protocol.plans import OTHERS, Plan, digest, read_plan
from tests.protocol.sums import Session, Terms, Vector, quorum, state_text
from tests.protocol.wire import Message, RefusedError, cut, decode, encode, is_signed, prefixed, require, u64

NOTHING = bytes(32)
CAN_DO = {
    "estimator": ("probe",),
    "task.augment": (False,),
    "task.validation": (False,),
    "task.loss": ("cross_entropy", "cross-entropy"),
    "task.init": ("numpy",),
    "task.model": ({"name": "softmax"},),
    "federation.level": ("batch",),
    "federation.seeds": ("shared",),
    "probe.distribution": ("rademacher", "gaussian", "sphere", "outer"),
    "probe.supports": ("dense", "layers"),
    "update.optimizer": ("sgd", "momentum", "adam"),
    "update.schedule": ("constant", "warm-up", "cosine", "steps"),
    "secure.mode": ("on", "malicious-server"),
    "privacy.noise": (0.0,),
    "privacy.epsilon": (0.0,),
    "run.downlink": ("scalars",),
}
"""The plans that this client can compute: setting → the values that it knows."""


def tell(words: str) -> None:
    sys.stderr.write(f"{words}\n")


# Rosters


def roster_text(roster: dict[str, Any]) -> bytes:
    fields = [str(roster["number"]).encode(), roster["expires"].encode(), bytes.fromhex(roster["server"])]
    for client in roster["clients"]:
        fields += [bytes.fromhex(client["identity"]), client["node"].encode()] if client else [b"", b""]
    return b"baffle/roster/2" + prefixed(*fields)


def read_roster(data: bytes, authority: bytes) -> dict[str, Any]:
    try:
        roster: dict[str, Any] = json.loads(data)
        require(list(roster) == ["number", "expires", "server", "clients", "signature"], "not the fields of a roster")
        require(json.dumps(roster, separators=(",", ":")).encode() == data, "a roster that is written otherwise")
        require(is_signed(authority, bytes.fromhex(roster["signature"]), roster_text(roster)), "not the authority's")
        identities = [roster["server"], *(client["identity"] for client in roster["clients"] if client)]
        require(len(set(identities)) == len(identities) > 1, "a roster with a key twice, or without clients")
    except (ValueError, KeyError, TypeError):
        raise RefusedError("not a roster") from None
    require_valid(roster)
    return roster


def require_valid(roster: dict[str, Any]) -> None:
    require(datetime.now(UTC) < datetime.fromisoformat(roster["expires"]), "a roster that has expired")


def directory_of(roster: dict[str, Any]) -> dict[int, bytes]:
    return {i: bytes.fromhex(client["identity"]) for i, client in enumerate(roster["clients"]) if client}


# Statements


def commitment_to(nonce: bytes) -> bytes:
    return sha256(b"baffle/nonce/2" + nonce).digest()


def commitment_text(server: bytes, plan: str, roster_hash: bytes, epoch: int, commitment: bytes) -> bytes:
    plan_hash = sha256(plan.encode()).digest()
    return b"baffle/commitment/2" + prefixed(server, plan_hash, roster_hash, u64(epoch), commitment)


def run_of(statement: bytes) -> bytes:
    return sha256(b"baffle/statement/3" + statement).digest()


def ready_text(run: bytes) -> bytes:
    return b"baffle/ready/2" + prefixed(run)


def salt_of(run: bytes, statement: Any, nonces: bytes) -> bytes:
    opened = [commitment_to(nonce) for nonce in cut(nonces, 32, len(statement.commitments))]
    require(opened == [one.commitment for one in statement.commitments], "nonces of other commitments")
    return sha256(b"baffle/salt/2" + run + nonces).digest()


class Member:
    """A request's body in, a reply's body out."""

    def __init__(self, keys: Path, x: F32, y: Any, before: Callable[[Any], None] = lambda _asked: None) -> None:
        """`before` is called with every message, and may refuse it."""
        self.keys, self.x, self.y, self.before = keys, x, y, before
        identity = load_pem_private_key((keys / "identity.key").read_bytes(), None)
        assert isinstance(identity, Ed25519PrivateKey)
        self.identity, self.authority = identity, bytes.fromhex((keys / "authority.pub").read_text())
        self.marks = Marks(keys / "marks")
        self._use(read_roster((keys / "roster.json").read_bytes(), self.authority))
        self.sent: dict[int, list[int]] = {}  # round → this client's vector before it was masked
        self.catch_ups: set[str] = set()  # the kinds that it has seen
        self.over = False
        self._begun: tuple[Any, Any, Plan, bytes] | None = None  # begin, statement, plan and run that it agreed to
        self.replica: Replica | None = None
        self._session: Session | None = None
        self._run, self._roster_of_run, self._snapshots, self._k = b"", 0, True, 0

    def _use(self, roster: dict[str, Any]) -> None:
        self.roster, self.directory = roster, directory_of(roster)
        self.server, self.roster_hash = bytes.fromhex(roster["server"]), sha256(roster_text(roster)).digest()
        numbers = {key: number for number, key in self.directory.items()}
        require(wire.public_of(self.identity) in numbers, "this key was revoked")
        self.number = numbers[wire.public_of(self.identity)]

    def answer(self, body: bytes) -> bytes:
        try:
            asked = decode(body, *self._ANSWERS)
            self.before(asked)
            reply: Message = self._ANSWERS[asked.tag](self, asked)
            return encode(reply)
        except _AstrayError:
            return encode(Message("unready"))
        except Exception as why:  # nothing that a server sends ends this process
            tell(f"abstained: {why}")
            return wire.abstention(body)

    # Joining

    def _introduce(self, asked: Any) -> Message:
        require_valid(self.roster)
        if asked.roster > self.roster["number"]:
            return Message("behind")
        require((asked.roster, asked.roster_hash) == (self.roster["number"], self.roster_hash), "another roster")
        self._accepted(asked.plan)
        nonce = secrets.token_bytes(32)
        commitment = self.marks.commit(lambda: (commitment_to(nonce), nonce))
        text = commitment_text(self.server, asked.plan, self.roster_hash, asked.epoch, commitment)
        return Message("introduction", 0, commitment, self.identity.sign(text))

    def _accepted(self, text: str) -> Plan:
        plan = read_plan(text)
        for setting, known in CAN_DO.items():
            require(plan[setting] in known, f"this client cannot do {setting} = {plan[setting]!r}")
        alone = plan["secure.groups"] == 1 and plan["federation.participation"] == 1
        require(alone or plan["secure.mode"] == "on", "sums in which chance may gather liars")
        require(plan["federation.clients"] == len(self.roster["clients"]), "not a place for every client")
        for setting, (_, default) in OTHERS.items():
            free = not setting.startswith("run.") or setting in ("run.downlink", "run.deadline_seconds")
            require(free or plan[setting] == default, f"{setting} of the server's own machine")
        return plan

    def _take_roster(self, asked: Any) -> Message:
        roster, known = read_roster(asked.roster, self.authority), directory_of(self.roster)
        if roster != self.roster:
            require(roster["number"] > self.roster["number"], "an older roster")
            require(roster["server"] == self.roster["server"], "another server")
            numbers = {key: number for number, key in known.items()}
            require(all(numbers.get(key, i) == i for i, key in directory_of(roster).items()), "other numbers")
            write_durably(self.keys / "roster.json.new", asked.roster, "wb").replace(self.keys / "roster.json")
            self._use(roster)
        return Message("roster-taken")

    def _begin(self, asked: Any) -> Message:
        require_valid(self.roster)
        statement = decode(asked.statement, "statement")
        if statement.roster > self.roster["number"]:
            return Message("behind")
        plan, run = self._accepted(statement.plan), run_of(asked.statement)
        own = self._checked(asked, statement, plan)
        shown = learning.initial_state(plan, self._initial(plan))
        require(learning.state_digest(shown) == statement.initial, "a run that begins with other weights")
        slot = self.marks.of(run)["slot"]
        require(asked.answered <= max(statement.first, slot + 1), "marks that were lost")
        require(run.hex() not in self.marks.left, "a run that this client has left")
        excluded = [self.directory[one.client] for one in statement.unopened]
        nonce = self.marks.open(own, run, limited=True, excluded=excluded)
        self._begun = asked, statement, plan, run
        known = self.replica is not None and self._run in (run, *(one.run for one in asked.past))
        held = self.replica.round if known and self.replica else 0
        return Message("ready", nonce, self.identity.sign(ready_text(run)), held, slot + 1)

    def _checked(self, begin: Any, statement: Any, plan: Plan) -> bytes:
        """This client's own commitment in a statement that it may enter."""
        require(encode(statement) == begin.statement and statement.protocol == 3, "a statement in another form")
        require((statement.roster, statement.roster_hash) == (self.roster["number"], self.roster_hash), "the roster")
        clients, past, may_lie = plan["federation.clients"], begin.past, plan["secure.mode"] == "malicious-server"
        require(plan["ring.n_max"] and len(statement.tiers) == clients, "a plan that is not resolved, or its tiers")
        equal = not plan["federation.tiers"] and set(statement.tiers) == {plan["probe.k"]}
        require(equal or not may_lie, "directions that only some clients evaluate")
        require(plan["federation.weighting"] == "uniform" or not may_lie, "clients that do not count the same")
        previous = past[-1].run if past else NOTHING
        require((len(past), previous) == (statement.epoch, statement.previous), "other epochs before")
        firsts = [*(one.first for one in past), statement.first]
        require(firsts[0] == 0 and firsts == sorted(firsts), "epochs that do not follow each other")
        salters = [one.client for one in statement.commitments]
        least = quorum(clients, plan["secure.liars"]) if may_lie else clients // 3 + 1
        require(salters == sorted(set(salters)) and len(salters) >= least, "too few commitments")
        against = [one.client for one in statement.unopened]
        require(
            against == sorted(set(against)) and not {*against} & {*salters}, "evidence against a client of the epoch"
        )
        for one in (*(statement.commitments if may_lie else ()), *statement.unopened):
            text = commitment_text(self.server, statement.plan, self.roster_hash, statement.epoch, one.commitment)
            require(one.client in self.directory, "an unknown client")
            require(is_signed(self.directory[one.client], one.signature, text), "an unsigned commitment")
        if begin.certificate:
            least = quorum(learning.clients_of_round(plan), plan["secure.liars"])
            self._check_certificate(begin.certificate, statement, least)
        own = [one.commitment for one in statement.commitments if one.client == self.number]
        require(own, "a statement without this client; it waits for the next epoch")
        return bytes(own[0])

    def _check_certificate(self, certificate: Any, statement: Any, least: int) -> None:
        about = certificate.run, certificate.round, certificate.chain
        require(about == (statement.previous, statement.first, statement.chain), "a certificate about another state")
        signatures = cut(certificate.signatures, 64, len(certificate.signers))
        require(len(set(certificate.signers)) == len(signatures) >= least, "too few signatures")
        for signer, signature in zip(certificate.signers, signatures, strict=True):
            known = self.directory.get(signer, b"")
            require(is_signed(known, signature, state_text(*about)), "a certificate that is not signed")

    def _open(self, asked: Any) -> Message:
        if self._begun is None or self._begun[3] != asked.run:
            return Message("unready")
        begin, statement, plan, run = self._begun
        salt = salt_of(run, statement, asked.nonces)
        if self._session is None or self._run != run:
            self.marks.enter(run, plan["federation.clients"])
            past = (Epoch(one.first, one.run, one.salt, None) for one in begin.past)
            epochs = (*past, Epoch(statement.first, run, salt, statement.chain))
            known = self.replica if self._run in [epoch.run for epoch in epochs] else None
            self.replica = known.in_epochs(epochs) if known else Replica.beginning(plan, self._initial(plan), epochs)
            may_lie = plan["secure.mode"] == "malicious-server"
            self._snapshots = not may_lie or begin.certificate is not None
            self._run, self._roster_of_run, self._k = run, self.roster["number"], statement.tiers[self.number]
            groups = partial(learning.groups_of_round, plan, salt)
            told = plan["secure.floor"], plan["secure.threshold"], may_lie, plan["secure.liars"]
            terms = Terms(*told, salt, statement.tiers, groups)
            self._session = Session(self.number, self.identity, self.directory, run, terms, self.marks)
        return Message("salted", salt)

    # Rounds

    def _in_round(self, asked: Any) -> Message:
        session = self._session
        if session is None or self._roster_of_run != self.roster["number"]:
            return Message("unready")
        require_valid(self.roster)
        match asked.tag:
            case "hello":
                return session.advertise(asked.slot)
            case "agree":
                return session.agree(asked)
            case "turn":
                parts = ((session.unmask, asked.unmask), (session.seal, asked.opening))
                return Message("turned", *(_tried(act, part) for act, part in parts))
            case "request":
                raise RefusedError("a request for values that are not masked")
            case _:
                masked = session.mask(asked, lambda: self._vector(asked.request))
                return Message("contribution", asked.request.round, masked.astype("<u4").tobytes())

    def _vector(self, request: Any) -> Vector:
        replica = self._caught_up(request)
        plan, number = replica.plan, request.round
        salt = replica.epochs[-1].salt
        key_number = number
        if plan["secure.group_seeds"] == "own":
            groups = learning.groups_of_round(plan, salt, number)
            key_number = number * len(groups) + next(i for i, group in enumerate(groups) if self.number in group)
        vectors, samples, finite = list[Vector](), len(self.y), True
        for step in range(learning.steps_in(plan, number)):
            chosen = learning.batch(plan, salt, self.number, samples, number, step)
            loss = partial(loss_of, x=self.x[chosen], y=self.y[chosen])
            totals = learning.joined(plan, vectors)[:-4].tobytes() if vectors else b""
            group = Message("group", key_number, totals, learning.weight_of(plan, samples))
            weights = replica.walked([group], step)[0]
            values, base = learning.probe(plan, loss, weights, replica.directions(key_number, step), self._k)
            finite = finite and bool(np.isfinite([*values, base]).all())
            vectors.append(learning.vector(plan, values, samples, base))
        found = learning.joined(plan, vectors) if finite else learning.nothing(plan, samples)
        self.sent[number] = found.tolist()
        return found

    def _caught_up(self, request: Any) -> Replica:
        """The replica at the place that a request is about. If there is no way there, this client leaves the run."""
        assert self.replica
        self.catch_ups.add(request.catch_up.kind)
        require(request.trajectory == digest(self.replica.plan), "another plan")
        require(request.catch_up.kind not in ("delta", "weights"), "weights that nothing proves")
        try:
            self.replica = self.replica.caught_up(request, snapshots=self._snapshots)
        except RefusedError as why:
            tell(f"leaves the run: {why}")
            self.marks.leave()
            self.replica = self._session = None
            raise _AstrayError from None
        return self.replica

    def _end(self, asked: Any) -> Message:
        about = asked.request
        if self._session is None:
            return Message("unready")
        require(
            self.replica is not None and about.round <= self.replica.plan["rounds"], "a state beyond the last round"
        )
        self._caught_up(about)
        require(about.round >= self.marks.of(self._run)["signed"], "a state before one that was signed")
        self.marks.note(self._run, signed=about.round)
        if asked.tag == "over":
            self.marks.leave()
            self.over = True
        return Message("done", about.weights_hash, self.identity.sign(state_text(self._run, about.round, about.chain)))

    def _initial(self, plan: Plan) -> F32:
        return learning.initial_weights(plan, [(10, self.x.shape[1]), (10,)])

    _ANSWERS = {  # noqa: RUF012
        "introduce": _introduce,
        "new-roster": _take_roster,
        "begin": _begin,
        "openings": _open,
        **dict.fromkeys(("halt", "over"), _end),
        **dict.fromkeys(("hello", "turn", "request", "masked-request", "agree"), _in_round),
    }


class _AstrayError(Exception):
    """The server's outcomes do not lead to its weights."""


def _tried(act: Any, part: Any) -> Message | None:
    try:
        return None if part is None else act(part)
    except RefusedError as why:
        tell(f"abstained: {why}")
        return None


def loss_of(weights: F32, x: F32, y: Any) -> float:
    """Softmax regression: the mean cross-entropy of a batch."""
    classes = len(weights) // (x.shape[1] + 1)
    w, b = weights[: classes * x.shape[1]].reshape(classes, -1), weights[classes * x.shape[1] :]
    logits = (x @ w.T + b).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(y)), y]))


# The connection


def take_part(address: str, member: Member) -> None:
    """Answer the server's requests until the run is over. A broken connection is opened again."""
    host, _, port = address.rpartition(":")
    tls = ssl.create_default_context(cafile=str(member.keys / "ca.pem"))
    process, answered, pause = secrets.token_bytes(16), (b"", b""), 0.2
    while not member.over:
        try:
            with connect(f"wss://{host}:{port}/link", ssl=tls, compression=None, max_size=1 << 24) as link:
                greeting = encode(Message("link/2/greeting", secrets.token_bytes(32), host))
                link.send(greeting)
                link.send(wire.proof(member.identity, member.server, process, greeting, _bytes(link.recv(10))))
                decode(_bytes(link.recv(10)), "link/2/accepted")
                while not member.over:
                    frame = _bytes(link.recv())
                    pause = 0.2
                    if sha256(frame).digest() != answered[0]:
                        request = wire.read_request(member.server, wire.public_of(member.identity), frame)
                        reply = wire.reply(member.identity, member.server, request, member.answer(request.body))
                        answered = sha256(frame).digest(), reply
                    link.send(answered[1])
                link.ping().wait(10)  # until the server has the last answer
                link.close(1001)
        except (WebSocketException, RefusedError, OSError, TimeoutError) as why:
            code = why.rcvd.code if isinstance(why, ConnectionClosed) and why.rcvd else 0
            if code in (4001, 4003, 4004):
                raise
            time.sleep(secrets.SystemRandom().uniform(pause / 2, pause))
            pause = min(2 * pause, 30.0)


def _bytes(frame: str | bytes) -> bytes:
    require(isinstance(frame, bytes), "a frame of text")
    assert isinstance(frame, bytes)
    return frame


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    for path in ("keys", "samples", "--slow-until", "--entered"):
        parser.add_argument(path, type=Path)
    parser.add_argument("--abstain", type=int, default=-1)
    options = parser.parse_args()

    def before(asked: Any) -> None:
        if asked.tag == "masked-request":
            require(asked.request.round != options.abstain, "it drops out of this round on purpose")
            if options.slow_until and not options.slow_until.exists():
                time.sleep(0.4)
        if asked.tag == "hello" and options.entered:
            options.entered.touch()

    with np.load(options.samples) as samples:
        member = Member(options.keys, samples["x"], samples["y"], before)
    take_part(options.address, member)
    assert member.replica
    weights = learning.state_digest(member.replica.state[:1]).hex()
    sys.stdout.write(json.dumps({"weights": weights, "sent": member.sent, "catch_ups": sorted(member.catch_ups)}))


if __name__ == "__main__":
    main()
