"""A server that lies about who belongs: it cannot sign a roster, and whatever it does with those that the authority has
signed, no client goes back, is summed with a key that it knows to be revoked, or is picked out among few."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from baffle.aggregation.context import state_text
from baffle.core.messages import CatchUp, Outcome, RoundRequest, decode, encode, tag_of
from baffle.core.ring import EXTRAS, RingVector, add
from baffle.core.state import chain_epoch, chain_next, pack
from baffle.errors import KeysError
from baffle.network.joining import Begin, Halt, Introduce, NewRoster, Ready
from baffle.network.keys.authority import NewClient, add_clients, make_keys, revoke_clients, sign_roster
from baffle.network.keys.folders import ClientKeys, load_identity
from baffle.network.keys.rosters import Roster, load_roster
from baffle.network.member.equipment import Equip, Equipment
from baffle.network.settling import with_places
from baffle.plan import Plan
from baffle.plan.sections import LARGEST
from baffle.privacy.skellam import Randomness
from baffle.statement import Certificate, Commitment, PastEpoch, Statement, run_of, shared_plan
from tests.attacks.hostile_server import PLANS_OWN, HostileServer, RefusedError, refused

Attack = Callable[..., HostileServer]
VICTIM, THIEF = 2, 3
STRICT = "secure.mode=malicious-server"


def signed(hostile: HostileServer, number: int, /, **changes: object) -> Roster:
    """A roster that the federation's authority has signed."""
    authority = load_identity(hostile.victims.folder / "keys" / "authority.key")
    return sign_roster(msgspec.structs.replace(hostile.roster, number=number, signature="", **changes), authority)


def without(server: HostileServer, *gone: int) -> tuple[object, ...]:
    return tuple(None if number in gone else client for number, client in enumerate(server.roster.clients))


def hand(server: HostileServer, roster: Roster, *clients: int) -> None:
    for client in clients:
        server.victims.ask(client, NewRoster(roster.encode()))


def on_disk(server: HostileServer, client: int) -> Roster:
    return load_roster(server.victims.keys[client].folder)


def other_authority(server: HostileServer) -> Roster:
    make_keys(server.victims.folder / "other", 5, ["localhost"])
    return load_roster(server.victims.folder / "other" / "server")


def resigned(server: HostileServer) -> Roster:
    """The server's own signature instead of the authority's."""
    server_key = load_identity(server.victims.folder / "keys" / "server" / "identity.key")
    return sign_roster(msgspec.structs.replace(server.roster, number=3, signature=""), server_key)


def moved(server: HostileServer) -> Roster:
    first, second, *others = server.roster.clients
    return signed(server, 3, clients=(second, first, *others))


LIES: dict[str, tuple[Callable[[HostileServer], Roster], str]] = {
    "an older one": (lambda server: server.roster, "has number 1, but roster 2 is known here already"),
    "of another authority": (other_authority, "is not signed by the authority"),
    "signed by the server": (resigned, "is not signed by the authority"),
    "the same number": (lambda s: signed(s, 2, clients=without(s, 0)), "has number 2, but roster 2 is known here"),
    "clients that change places": (moved, "but a client keeps its number"),
    "another server": (lambda s: signed(s, 3, server=secrets.token_hex(32)), "names another server"),
    "expired": (lambda s: signed(s, 3, expires="2020-01-01T00:00:00Z"), "expired at"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_false_roster_is_refused(attack: Attack, lie: str) -> None:
    server = attack()
    second = signed(server, 2)
    hand(server, second, VICTIM)
    make, words = LIES[lie]
    with refused(server, VICTIM, words):
        hand(server, make(server), VICTIM)
    assert on_disk(server, VICTIM) == second


def test_a_client_never_goes_back_to_an_earlier_roster(attack: Attack) -> None:
    server = attack()
    hand(server, signed(server, 2), VICTIM)
    with refused(server, VICTIM, "has roster 1, but this client has roster 2 and never goes back"):
        server.introductions([VICTIM])
    server.victims.keys[VICTIM] = ClientKeys.load(server.victims.keys[VICTIM].folder)
    server.victims.start(VICTIM)
    with refused(server, VICTIM, "never goes back"):
        server.introductions([VICTIM])


def test_another_roster_of_the_same_number_is_refused(attack: Attack) -> None:
    server = attack()
    asked = Introduce(server.plan.to_toml(), 1, signed(server, 1, clients=without(server, THIEF)).hash(), 0)
    with refused(server, VICTIM, "roster 1 of the server is not this client's roster 1"):
        server.victims.ask(VICTIM, asked)


def test_a_handed_roster_does_not_replace_a_later_one_in_the_folder(attack: Attack) -> None:
    """Roster 3 was put there while the client runs. The server sends roster 2."""
    server = attack()
    third = signed(server, 3)
    (server.victims.keys[VICTIM].folder / "roster.json").write_bytes(third.encode())
    with refused(server, VICTIM, "has number 2, but roster 3 is known here already"):
        hand(server, signed(server, 2), VICTIM)
    assert on_disk(server, VICTIM) == third


def test_a_client_that_was_revoked_takes_no_further_part(attack: Attack) -> None:
    server = attack()
    server.begin()
    with refused(server, VICTIM, "this client's key is not in roster 2: it was revoked"):
        hand(server, signed(server, 2, clients=without(server, VICTIM)), VICTIM)
    assert server.victims.members[VICTIM].revoked
    with pytest.raises(RefusedError):
        server.introductions([VICTIM])
    with pytest.raises(KeysError):
        ClientKeys.load(server.victims.keys[VICTIM].folder)


def test_no_round_is_played_under_a_roster_that_is_over(attack: Attack) -> None:
    """The server hands the later roster on, and would go on with the epoch in which the thief takes part."""
    server = attack(STRICT)
    view = server.begin()
    server.play(view)
    hand(server, signed(server, 2, clients=without(server, THIEF)), VICTIM)
    with pytest.raises(RefusedError):
        server.play(view)


def test_a_revoked_key_salts_no_statement(attack: Attack) -> None:
    server = attack(STRICT)
    thief = server.introductions([THIEF], epoch=0)
    server.roster = signed(server, 2, clients=without(server, THIEF))
    others = [client for client in server.everybody if client != THIEF]
    hand(server, server.roster, *others)
    statement = server.statement(server.introductions(others) | thief)
    with refused(server, VICTIM, f"commitment of client {THIEF} is not signed by it"):
        server.nonce(VICTIM, statement)


def second_epoch(
    server: HostileServer, clients: Sequence[int], chain: bytes = b""
) -> tuple[bytes, bytes, Statement, tuple[PastEpoch, ...]]:
    """The first epoch's run and chain, which nobody has played, a statement that goes on from there, and the past."""
    run, chain = secrets.token_bytes(32), chain or secrets.token_bytes(32)
    first = server.statement(server.introductions(clients, epoch=1))
    statement = msgspec.structs.replace(first, epoch=1, previous=run, first=1, chain=chain)
    return run, chain, statement, (PastEpoch(0, run, secrets.token_bytes(32)),)


def test_a_certificate_of_revoked_keys_convinces_nobody(attack: Attack) -> None:
    """A newcomer knows the later roster alone: what the keys of the one before have signed is nothing to it."""
    server = attack(STRICT)
    old = {client: server.victims.keys[client].identity for client in server.everybody}
    new = NewClient.generate()
    places = list(without(server, THIEF))
    places[THIEF] = new.participant()
    server.roster = signed(server, 2, clients=tuple(places))
    others = [client for client in server.everybody if client != THIEF]
    hand(server, server.roster, *others)
    run, chain, statement, past = second_epoch(server, others)

    def certificate(*signers: int) -> Certificate:
        text = state_text(run, 1, chain)
        return Certificate(run, 1, chain, signers, b"".join(old[signer].sign(text) for signer in signers))

    with refused(server, VICTIM, f"client {THIEF} has not signed the state before round 1"):
        server.victims.ask(VICTIM, Begin(encode(statement), past, certificate(0, 1, THIEF, 4)))
    with refused(server, VICTIM, "3 clients have signed, expected at least 4"):
        server.victims.ask(VICTIM, Begin(encode(statement), past, certificate(0, 1, 4)))
    server.victims.ask(VICTIM, Begin(encode(statement), past, certificate(0, 1, 2, 4)))  # those who stayed


@pytest.mark.parametrize("about", ["another run", "another round", "another past"])
def test_a_certificate_about_anything_else_convinces_nobody(attack: Attack, about: str) -> None:
    """Everybody has signed, but not the state that the statement begins with."""
    server = attack(STRICT)
    run, chain, statement, past = second_epoch(server, server.everybody)
    other = secrets.token_bytes(32)
    lies = {"another run": (other, 1, chain), "another round": (run, 2, chain), "another past": (run, 1, other)}
    signed_about = lies[about]
    text, everybody = state_text(*signed_about), server.everybody
    signatures = b"".join(server.victims.keys[client].identity.sign(text) for client in everybody)
    with refused(server, VICTIM, "certificate"):
        server.victims.ask(VICTIM, Begin(encode(statement), past, Certificate(*signed_about, everybody, signatures)))


@pytest.mark.parametrize("is_certified", [False, True])
def test_no_state_is_taken_without_a_certificate(attack: Attack, *, is_certified: bool) -> None:
    """A newcomer would begin at weights of the server's choice, which lead to the statement's chain as they should."""
    server, everybody = attack(STRICT), range(5)
    trap = server.bare.rule.start(server.state.weights + np.float32(1))
    before, skipped = secrets.token_bytes(32), encode(Outcome(0, "skipped", ()))
    run, chain, statement, past = second_epoch(server, everybody, chain_next(before, skipped, trap))
    signatures = b"".join(server.victims.keys[client].identity.sign(state_text(run, 1, chain)) for client in everybody)
    certificate = Certificate(run, 1, chain, tuple(everybody), signatures) if is_certified else None
    begin = Begin(encode(statement), past, certificate)
    nonces = b"".join(decode(server.victims.ask(client, begin), Ready).nonce for client in everybody)
    server.enter(VICTIM, statement, nonces)
    now, state = chain_epoch(chain, run_of(encode(statement))), CatchUp("snapshot", 1, (pack(trap), before, skipped))
    halt = Halt(RoundRequest(1, server.bare.digest, now, trap.weights_hash(), state))
    if is_certified:
        assert tag_of(server.victims.ask(VICTIM, halt)) == "done"
        return
    with refused(server, VICTIM, "this client takes no further part in this run"):
        server.victims.ask(VICTIM, halt)


def surrounded(server: HostileServer) -> tuple[RingVector, RingVector]:
    """The authority works with the server: all clients but the victim are replaced by their own. Returns the sum less
    what these have sent, and what the victim has computed, without its noise."""
    victims, others = server.victims, [client for client in server.everybody if client != VICTIM]
    revoke_clients(victims.folder / "keys", others)
    add_clients(victims.folder / "keys", len(others))
    server.roster = load_roster(victims.folder / "keys" / "server")
    for number in others:
        victims.keys[number] = ClientKeys.load(victims.folder / "keys" / f"client-{number}")
        victims.start(number)
    hand(server, server.roster, VICTIM)
    view = server.begin()
    vectors = [server.own_vector(client, view, 0, view.present.state.weights) for client in server.everybody]
    return (server.play(view).astype(np.uint32) - add(vectors) + vectors[VICTIM]), vectors[VICTIM]


def test_an_authority_that_works_with_the_server_surrounds_a_client(attack: Attack) -> None:
    """Nothing forbids it: who belongs, the authority alone says. The client's own log tells how many keys are new."""
    server = attack(STRICT)
    exposed, own = surrounded(server)
    assert np.array_equal(exposed, own)
    assert any("new keys: 4 of 5" in line for line in server.victims.logs[VICTIM])


def test_a_client_that_is_surrounded_keeps_its_own_part_of_the_noise(attack: Attack) -> None:
    """Its accomplices know the noise that they have added, so one part in `sharers` of the variance is left."""
    server = attack(STRICT, "privacy.noise=20", "privacy.clip=1.0", "probe.k=40", "secure.floor=3")
    noise = np.random.default_rng(7).bytes
    server.victims.equip = with_noise_from(noise)
    server.victims.start(VICTIM)
    server.victims.equip = with_noise_from(bytes)  # of zeros: the accomplices add none
    exposed, own = surrounded(server)
    left = (exposed - own).view(np.int32)[:-EXTRAS].astype(np.float64)
    private = server.bare.private
    assert private is not None
    assert left @ left / len(left) == pytest.approx(float(private.share), rel=0.9)
    assert float(private.share) * private.sharers == pytest.approx(float(private.variance))


def with_noise_from(random: Randomness) -> Callable[[int], Equip]:
    def equip(number: int) -> Equip:
        def equipped(plan: Plan, most_weights: int = LARGEST) -> Equipment:
            equipment = PLANS_OWN(number)(plan, most_weights)
            return equipment._replace(worker=replace(equipment.worker, random=random))

        return equipped

    return equip


def smaller(server: HostileServer, clients: int, statement: Statement) -> Statement:
    """The statement of a run with fewer clients."""
    plan = shared_plan(with_places(server.plan, clients)).to_toml()
    tiers = statement.tiers[:clients]
    return msgspec.structs.replace(statement, plan=plan, tiers=tiers, commitments=statement.commitments[:clients])


def test_a_run_for_few_of_the_roster_is_refused(attack: Attack) -> None:
    """With the server's own clients all around it, the victim's vector would be the rest of the sum."""
    server = attack(STRICT)
    few = shared_plan(with_places(server.plan, 3)).to_toml()
    with refused(server, VICTIM, "a run of 3 clients, but the roster has 5"):
        server.victims.ask(VICTIM, Introduce(few, server.roster.number, server.roster.hash(), 0))
    introductions = server.introductions(server.everybody)
    with refused(server, VICTIM, "a run of 3 clients, but the roster has 5"):
        server.nonce(VICTIM, smaller(server, 3, server.statement(introductions)))


def grown(server: HostileServer) -> Roster:
    return signed(server, 2, clients=(*server.roster.clients, NewClient.generate().participant()))


def test_a_run_with_fewer_places_than_the_roster_is_refused_by_clients_outside_it(attack: Attack) -> None:
    server = attack(STRICT)
    server.roster = grown(server)
    hand(server, server.roster, *server.everybody)
    with refused(server, VICTIM, "a run of 5 clients, but the roster has 6"):
        server.introductions([VICTIM])


def test_a_client_goes_on_with_fewer_places_in_its_own_run_alone(attack: Attack) -> None:
    server = attack(STRICT)
    view = server.begin()
    server.play(view)
    server.roster = grown(server)
    hand(server, server.roster, *server.everybody)
    few = shared_plan(with_places(server.plan, 3)).to_toml()
    with refused(server, VICTIM, "a run of 3 clients, but the roster has 6"):
        server.victims.ask(VICTIM, Introduce(few, server.roster.number, server.roster.hash(), 1))
    introductions = server.introductions(server.everybody, epoch=0)
    with refused(server, VICTIM, "not the one that this client is in"):
        server.nonce(VICTIM, server.statement(introductions))  # another run, with as many places as the first
    again = server.introductions(server.everybody, epoch=1)
    commitments = tuple(Commitment(client, one.commitment, one.signature) for client, one in sorted(again.items()))
    statement = msgspec.structs.replace(
        server.statement(introductions), epoch=1, previous=view.run, commitments=commitments, chain=view.present.chain
    )
    reply = server.victims.ask(VICTIM, Begin(encode(statement), (PastEpoch(0, view.run, view.salt),)))
    assert tag_of(reply) == "ready"
