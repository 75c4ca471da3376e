"""Signed messages: whatever is changed, moved or swapped is refused before the body is read. Sizes are limited."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings, strategies as st

from baffle.aggregation.messages import MOST_KEYS, Advertisement
from baffle.core.messages import Abstention, Contribution, encode
from baffle.errors import MessageError
from baffle.network.joining import MOST_EPOCHS, Begin, Introduce
from baffle.network.link import envelope
from baffle.network.link.envelope import PHASES, Request, answered_id, ask, most_bytes, read_reply, read_request, reply
from baffle.statement import MOST_PLAN, PROTOCOL, Commitment, PastEpoch, Statement

SERVER, CLIENT, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


@st.composite
def asked(draw: st.DrawFn) -> Request:
    run, number = draw(st.binary(min_size=32, max_size=32)), draw(st.integers(0, 2**32 - 1))
    return ask(SERVER, public(CLIENT), run, number, draw(st.sampled_from(PHASES)), draw(st.binary(max_size=200)))


bodies = st.binary(max_size=200)


@given(asked(), bodies)
def test_what_is_sent_is_what_is_read(request: Request, body: bytes) -> None:
    assert read_request(public(SERVER), public(CLIENT), request.frame) == request
    frame = reply(CLIENT, public(SERVER), request, body)
    assert read_reply(public(CLIENT), public(SERVER), request, frame) == body
    assert answered_id(frame) == request.short_id
    assert reply(CLIENT, public(SERVER), request, body) == frame, "a repeated answer is the same bytes"
    assert len(request.frame) - len(request.body) == envelope.REQUEST_BYTES == 117
    assert len(frame) - len(body) == envelope.REPLY_BYTES == 68


@settings(max_examples=1, deadline=None)
@given(asked(), st.binary(max_size=20))
def test_a_message_with_any_bit_flipped_is_refused(request: Request, body: bytes) -> None:
    for changed in _with_one_bit_flipped(request.frame):
        with pytest.raises(MessageError):
            read_request(public(SERVER), public(CLIENT), changed)
    for changed in _with_one_bit_flipped(reply(CLIENT, public(SERVER), request, body)):
        with pytest.raises(MessageError):
            read_reply(public(CLIENT), public(SERVER), request, changed)


@given(asked(), bodies, st.data())
def test_a_message_that_is_cut_or_lengthened_is_refused(request: Request, body: bytes, data: st.DataObject) -> None:
    frame = reply(CLIENT, public(SERVER), request, body)
    for whole, read in (
        (request.frame, lambda changed: read_request(public(SERVER), public(CLIENT), changed)),
        (frame, lambda changed: read_reply(public(CLIENT), public(SERVER), request, changed)),
    ):
        shorter = whole[: data.draw(st.integers(0, len(whole) - 1))]
        for changed in (shorter, whole + data.draw(st.binary(min_size=1, max_size=9))):
            with pytest.raises(MessageError):
                read(changed)


@given(asked(), bodies)
def test_a_message_is_for_one_receiver_and_from_one_sender(request: Request, body: bytes) -> None:
    for sender, receiver in ((OTHER, CLIENT), (SERVER, OTHER), (CLIENT, SERVER), (CLIENT, CLIENT), (SERVER, SERVER)):
        with pytest.raises(MessageError, match="not signed"):
            read_request(public(sender), public(receiver), request.frame)
    frame = reply(CLIENT, public(SERVER), request, body)
    for sender, receiver in ((OTHER, SERVER), (CLIENT, OTHER), (SERVER, CLIENT)):
        with pytest.raises(MessageError, match="not signed"):
            read_reply(public(sender), public(receiver), request, frame)


@given(asked(), bodies, st.data())
def test_a_reply_answers_one_request_of_one_run(request: Request, body: bytes, data: st.DataObject) -> None:
    """Also if the other request has the same id, which a server that lies could choose."""
    frame = reply(CLIENT, public(SERVER), request, body)
    run = data.draw(st.binary(min_size=32, max_size=32).filter(lambda other: other != request.run))
    number = data.draw(st.integers(0, 2**32 - 1).filter(lambda other: other != request.round))
    phase = data.draw(st.sampled_from(PHASES).filter(lambda other: other != request.phase))
    for other in (
        ask(SERVER, public(CLIENT), run, request.round, request.phase, request.body),
        ask(SERVER, public(CLIENT), request.run, number, request.phase, request.body),
        ask(SERVER, public(CLIENT), request.run, request.round, phase, request.body),
        ask(SERVER, public(CLIENT), request.run, request.round, request.phase, request.body + b"!"),
        ask(SERVER, public(CLIENT), request.run, request.round, request.phase, request.body),
    ):
        for mistaken in (other, _with_id(other, request.id)):
            if mistaken.frame != request.frame:
                with pytest.raises(MessageError):
                    read_reply(public(CLIENT), public(SERVER), mistaken, frame)


@given(asked(), bodies)
def test_neither_direction_passes_for_the_other(request: Request, body: bytes) -> None:
    frame = reply(CLIENT, public(SERVER), request, body)
    for mirrored in (request.frame, frame):
        with pytest.raises(MessageError):
            read_request(public(CLIENT), public(SERVER), mirrored)
    echoed = request.short_id + request.frame[53:117] + request.body
    with pytest.raises(MessageError):
        read_reply(public(SERVER), public(CLIENT), request, echoed)


def test_a_kind_that_is_not_known_is_refused_even_if_signed() -> None:
    """A later server may sign kinds of requests that this client does not know."""
    header = envelope._HEADER.pack(bytes(32), bytes(16), 0, len(PHASES))
    signature = SERVER.sign(envelope._text(envelope.TO_CLIENT, public(SERVER), public(CLIENT), header, b"", b""))
    with pytest.raises(MessageError, match=f"kind {len(PHASES)}"):
        read_request(public(SERVER), public(CLIENT), header + signature)


@pytest.mark.parametrize(("number", "phase"), [(2**32, "hello"), (-1, "hello"), (0, "contribution"), (0, "")])
def test_what_is_no_request_is_not_signed(number: int, phase: str) -> None:
    with pytest.raises(MessageError, match="expected"):
        ask(SERVER, public(CLIENT), bytes(32), number, phase, b"")


# Limits let every honest message through, and follow the plan otherwise


def test_limits_follow_from_the_run() -> None:
    size, keys = 4 * 100_000, tuple(bytes([n % 256]) * 32 for n in range(MOST_KEYS))
    for phase in ("request", "masked-request"):
        assert len(encode(Contribution(7, bytes(size)))) <= most_bytes(phase, 10, size)
        assert len(encode(Contribution(7, bytes(2 * size)))) > most_bytes(phase, 10, size)
    advertisement = Advertisement(2**40, bytes(16), bytes(32), 2**40, keys, bytes(64))
    assert len(encode(advertisement)) <= most_bytes("hello", 2, 0)
    assert all(len(encode(Abstention(2**63 - 1))) <= most_bytes(phase, 2, 0) for phase in PHASES)
    for phase in ("introduce", "begin", "openings", "halt", "over", "agree"):  # answers without vectors
        assert most_bytes(phase, 100_000, 10**9) == envelope.SMALL
    assert len(encode(Introduce("𝄞" * MOST_PLAN, 2**53, bytes(32), 2**40))) <= envelope.PLAN_BYTES
    for weights in (1, 10**6):  # a whole state
        assert envelope.most_request_bytes(10, weights, 0) >= envelope.PLAN_BYTES + 4 * 4 * weights + 200


@pytest.mark.parametrize("clients", [1, 1000])
def test_the_largest_statement_fits_before_a_client_is_in_a_run(clients: int) -> None:
    commitments = tuple(Commitment(client, bytes(32), bytes(64)) for client in range(clients))
    hashes, plan, tiers = bytes(32), "x" * MOST_PLAN, (2**40,) * clients
    statement = Statement(
        PROTOCOL,
        plan,
        hashes,
        2**53,
        hashes,
        tiers,
        MOST_EPOCHS,
        hashes,
        2**40,
        hashes,
        commitments[1:],
        commitments[:1],
    )
    past = (PastEpoch(2**40, bytes(32), bytes(32)),) * MOST_EPOCHS
    assert len(encode(Begin(encode(statement), past, answered=2**40))) <= envelope.most_joining_bytes(clients)


def _with_one_bit_flipped(frame: bytes) -> Iterator[bytes]:
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def _with_id(request: Request, other: bytes) -> Request:
    return replace(request, header=request.header[:32] + other + request.header[48:])
