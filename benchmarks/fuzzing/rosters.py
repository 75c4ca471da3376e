"""Damaged rosters: handed over, or in a folder of keys. Half of them are signed by the authority all
the same, so that everything behind the signature is reached; what the authority signed it must not have signed."""

import json
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from baffle.network.keys.authority import make_keys
from baffle.network.keys.folders import ClientKeys, load_identity
from baffle.network.keys.rosters import ROSTER, Roster, newer_roster, read_roster
from fuzzing.checks import Tried, tried
from fuzzing.damage import Mutations
from fuzzing.texts import damaged_text

SECONDS = 1.0
VALUES: tuple[Any, ...] = (
    None, True, 0, 1, 2, -1, 2**53, 2**53 + 1, 2**64, 1e308, 1.0, "", "x", "0" * 64, "f" * 64, "F" * 64, "0" * 128,
    "0" * 127, "é" * 64, "\ud800", "\u202e", "\0", "x" * 301, "ssh-ed25519 AAAA", [], [[]], {}, {"identity": "0" * 64},
    "0000-00-00T00:00:00Z", "9999-99-99T99:99:99Z", "2999-02-30T00:00:00Z", "9999-12-31T24:00:00Z", "2999-01-01",
    "2999-01-01T00:00:60Z", "²999-01-01T00:00:00Z", "2999-01-01T00:00:00Z\n", "0001-01-01T00:00:00Z",
)  # fmt: skip


def rosters(count: int, seed: int) -> Iterator[Tried]:
    """Malformed rosters."""
    draw = Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "keys"
        make_keys(folder, 3, ["localhost"])
        client = folder / "client-0"
        keys, authority = ClientKeys.load(client), load_identity(folder / "authority.key")
        sound = keys.roster.encode()
        mutations = Mutations(draw, [sound])

        def sign(tree: Any) -> bytes:
            """A roster as the authority would sign it, if it has the form of one."""
            try:
                roster = msgspec.json.decode(msgspec.json.encode(tree), type=Roster)
                tree["signature"] = authority.sign(roster.signed_text()).hex()
            except (msgspec.MsgspecError, UnicodeEncodeError):
                pass
            return json.dumps(tree, separators=(",", ":"), ensure_ascii=draw.random() < 0.3).encode(errors="replace")

        def handed_over(data: bytes) -> bool:
            roster = newer_roster(keys.roster, keys.authority, data)
            keys.under(roster)
            return False

        def in_folder(load: Callable[[Path], object]) -> Callable[[bytes], bool]:
            def read(data: bytes) -> bool:
                (client / ROSTER).write_bytes(data)
                load(client)
                return False

            return read

        readers = {
            "roster handed over": handed_over,
            "roster in a folder": in_folder(read_roster),
            "roster of a client": in_folder(ClientKeys.load),
        }
        for _ in range(count):
            where = draw.choice(list(readers))
            match draw.randrange(4):
                case 0:
                    data = mutations.bytes_of(sound)
                case 1:
                    data = damaged_text(draw, sound.decode().replace(",", ",\n")).encode()
                case _:
                    data = sign(_changed(draw, json.loads(sound)))
            yield tried(where, data, partial(readers[where], data), SECONDS)


def _changed(draw: Random, tree: dict[str, Any]) -> dict[str, Any]:
    """A roster with something else in one or two places."""
    for _ in range(draw.choice((1, 1, 2))):
        clients = tree.get("clients")
        places: list[Any] = [tree]
        if isinstance(clients, list) and clients:
            places += [clients, *(client for client in clients if isinstance(client, dict) and client)]
        place = draw.choice(places)
        key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        match draw.randrange(6):
            case 0:
                del place[key]
            case 1 if isinstance(place, list):
                place.insert(key, deepcopy(draw.choice(place)))
            case 1:
                place[f"{key}s"] = deepcopy(place[key])
            case 2 if isinstance(place, list):
                place.reverse()
            case 3:
                place[key] = place[key] + 1 if isinstance(place[key], int) else deepcopy(draw.choice(VALUES))
            case _:
                place[key] = deepcopy(draw.choice(VALUES))
    return tree
