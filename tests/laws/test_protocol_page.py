"""docs/protocol.md does not fall behind the code: it names every message, field, tag, limit and default."""

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import baffle
from baffle.aggregation.client import marks, slot
from baffle.aggregation.client.marks import Line, Marks
from baffle.aggregation.client.session import KEYS_AT_ONCE
from baffle.aggregation.client_policy import COMPLETE_UP_TO, DROPOUT, FAILURE
from baffle.aggregation.messages import BOX_BYTES, DIGEST_BYTES, MOST_KEYS, MOST_MEMBERS
from baffle.aggregation.shares import PRIME
from baffle.core.messages import Message
from baffle.core.ring import GUARD, LOSS_MAX
from baffle.core.seeds import SALTED, Purpose
from baffle.network.joining import MOST_EPOCHS
from baffle.network.keys.rosters import MOST_CLIENTS, MOST_NODE_KEY_LETTERS
from baffle.network.link import client, door, envelope, exchanges, handshake, websocket
from baffle.plan import Model, Plan
from baffle.plan.reading import DOTS
from baffle.statement import MOST_PLAN, PROTOCOL
from tests.protocol import plans
from tests.vectors.make import message_types

PAGE = plans.PAGE.read_text()
FLAT = " ".join(PAGE.split())
SOURCE = Path(baffle.__file__).parent
NOT_ON_THE_WIRE = {"baffle/model/1", "baffle/model/2", "baffle/plan/2", "baffle/estimate/1", "baffle/flower-node/1"}


def part_about(tag: str) -> str:
    """The page from the line that introduces a tag to the next line that introduces one."""
    lines = PAGE.splitlines()
    begin = next(i for i, line in enumerate(lines) if re.search(rf"\btag `{re.escape(tag)}`", line))
    end = next((i for i in range(begin + 1, len(lines)) if re.search(r"\btag `", lines[i])), len(lines))
    return "\n".join(lines[begin:end])


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: str(kind.__name__))
def test_every_message_is_described_with_all_its_fields_in_order(kind: type[Message]) -> None:
    part, at = part_about(str(kind.__struct_config__.tag)), 0
    assert f"`{kind.__name__}`" in PAGE
    for field in kind.__struct_fields__:
        assert f"`{field}`" in part[at:], field
        at = part.index(f"`{field}`", at)


def test_every_tag_of_a_hash_or_signature_is_named() -> None:
    code = "\n".join(path.read_text() for path in sorted(SOURCE.rglob("*.py")))
    tags = set(re.findall(r'"((?:baffle/[a-z-]+|link/2|message)/[a-z0-9]+)"', code)) - NOT_ON_THE_WIRE
    purposes = set(re.findall(r'(?<![.\w])(?:derive|expand)\([^\n]*"([a-z-]+)"\)', code))
    assert len(tags) > 20
    assert purposes == {"mask-key", "self-mask", "pair-mask", "channel", "box"}
    for tag in tags | {f"baffle/{purpose}/1" for purpose in purposes}:
        assert f"`{tag}`" in PAGE, tag


def test_every_purpose_of_a_key_has_its_row() -> None:
    rows = dict(re.findall(r"^\| `([a-z]+)` \| [^|]* \| (yes|no) \|", PAGE, re.MULTILINE))
    assert rows == {purpose: "yes" if purpose in SALTED else "no" for purpose in get_args(Purpose)}


def settings_of(struct: type, prefix: str = "") -> dict[str, Any]:
    """Every setting of a section and of those in it, with its default."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        if isinstance(field.default, msgspec.Struct) and field.name != "model":
            found |= settings_of(type(field.default), f"{field.name}.")
        elif field.default is not msgspec.NODEFAULT:
            found[prefix + field.name] = msgspec.json.decode(msgspec.json.encode(field.default))
    return found


def test_the_defaults_are_the_plans() -> None:
    expected = settings_of(Plan)
    model = expected.pop("task.model")
    tables = plans.DETERMINES | plans.OTHERS
    assert model | tables.pop("task.model")[1] == model
    assert {name: default for name, (_, default) in tables.items()} == expected
    models = {
        f"{kind.__struct_config__.tag}.{name}": default
        for kind in get_args(Model)
        for name, default in settings_of(kind).items()
    }
    assert {name: default for name, (_, default) in plans.MODELS.items()} == models


def test_every_kind_of_mark_is_described() -> None:
    about = PAGE[PAGE.index("## Marks") : PAGE.index("## A minimal client")]
    for line in get_args(Line):
        assert f"| `{line.__struct_config__.tag}` |" in about
        assert all(f"`{field}`" in about for field in line.__struct_fields__ if field != "is")
    assert all(f"| `{field}` |" in about for field in Marks.__struct_fields__)


def test_kinds_of_requests_have_their_numbers() -> None:
    assert ", ".join(f"{number} `{phase}`" for number, phase in enumerate(envelope.PHASES)) in FLAT


def test_sizes_of_frames_are_the_codes() -> None:
    clients, contribution, n = 1000, 432, 77
    joining = 8192 + 4 * 2**20 + 512 * clients
    assert envelope.most_bytes("hello", clients, contribution) == 8192 + 1024 * 37
    assert envelope.most_bytes("turn", clients, contribution) == 8192 + clients * (64 + 16)
    assert envelope.most_bytes("masked-request", clients, contribution) == 8192 + contribution
    assert envelope.most_bytes("begin", clients, contribution) == 8192
    assert envelope.most_joining_bytes(clients) == joining
    run = joining + 2 * (16 * n + contribution) + clients * (4 * 9 + 64 + 64 + 256 * 37)
    assert envelope.most_request_bytes(clients, n, contribution) == run
    for words in (
        "8,192 + 1024 · 37",
        "8,192 + clients · (64 + 16)",
        "8,192 + contribution",
        "8,192 + 4·2²⁰ + 512 · clients",
        "2 · (16 · n + contribution) + clients · (4 · 9 + 64 + 64 + 256 · 37)",
    ):
        assert words in FLAT


@pytest.mark.parametrize(
    "words",
    [
        f"version {PROTOCOL}",
        f"{door.SECONDS:g} seconds and {door.BYTES // 1024} KiB",
        f"handshake have at most {handshake.HANDSHAKE_BYTES} bytes",
        f"the path `{handshake.PATH}`",
        f"If nothing comes for {websocket.PING_SECONDS:g} seconds, send a ping",
        f"after {exchanges.QUIET:g} and {exchanges.GONE:g} seconds",
        f"waits {exchanges.GRACE:g} seconds for a client whose connection broke",
        f"after {client.FIRST_PAUSE:g} seconds at first",
        f"double up to {client.LONGEST_PAUSE:g} seconds",
        f"failed the handshake {door.FAILURES} times",
        f"every {door.FORGIVEN:g} seconds one failure is forgotten",
        f"| {handshake.NORMAL}, {handshake.GOODBYE} |",
        f"| {handshake.REPLACED} |",
        f"| {handshake.REFUSED} |",
        f"| {handshake.WRONG} |",
        f"at most 2{str(MOST_PLAN.bit_length() - 1).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))} characters",
        f"at most {MOST_EPOCHS:,} `PastEpoch`",
        f"at most {MOST_MEMBERS:,} numbers",
        f"1 to {MOST_KEYS} keys",
        f"sends {KEYS_AT_ONCE}",
        f"array of 1 to {MOST_CLIENTS:,}",
        f"at most {MOST_NODE_KEY_LETTERS} characters",
        f"more than {DOTS:,} dots",
        f"if {marks.MOST_FRUITLESS} statements of the last day",
        f"Up to {COMPLETE_UP_TO} members",
        f"packed, {BOX_BYTES} bytes each",
        f"first {DIGEST_BYTES} bytes",
        f"S({LOSS_MAX:g})",
    ],
)
def test_limits_are_the_codes(words: str) -> None:
    assert words in FLAT


def test_numbers_that_the_page_spells_out_are_the_codes() -> None:
    assert (PRIME, GUARD, FAILURE, DROPOUT) == (2**128 - 159, 2**29, 2.0**-20, 0.3)
    assert slot.MOST_QUERIES == 3
    assert envelope.KEY_BYTES == 37


def test_links_within_the_page_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\(#([^)]+)\)", PAGE)) <= anchors
    assert all((plans.PAGE.parent / page).exists() for page in re.findall(r"\]\(([a-z-]+\.md)", PAGE))
