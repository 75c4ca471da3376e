"""An authority away from the federation: what it signs reaches the server alone, and clients only through it."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baffle.network.authority import ServerKeys
from baffle.network.keys import ClientKeys
from baffle.network.membership import add_clients, renew_roster, revoke_clients
from baffle.network.rosters import ROSTER, Reread, Roster, load_roster
from baffle.network.succession import rereading


@dataclass(frozen=True)
class Authority:
    """`folder` is its own copy of the federation's keys; `server` is the server's folder, as the server reads it."""

    folder: Path
    server: Path

    @classmethod
    def over(cls, keys: Path) -> "Authority":
        """Part the authority from a federation whose keys lie in a folder."""
        own = keys.parent / "authority"
        shutil.copytree(keys, own)
        return cls(own, keys / "server")

    def reread(self) -> Reread:
        return rereading(ServerKeys.load(self.server))

    def revoke(self, *numbers: int) -> None:
        revoke_clients(self.folder, numbers)
        self.publish()

    def add(self, count: int = 1) -> list[ClientKeys]:
        """New clients, each with a folder of its own."""
        added = add_clients(self.folder, count)
        self.publish()
        return [self.keys_of(number) for number in added.numbers]

    def replace(self, *numbers: int) -> list[ClientKeys]:
        """New clients in place of others, in one step as far as the server sees."""
        revoke_clients(self.folder, numbers)
        return self.add(len(numbers))

    def renew(self) -> None:
        renew_roster(self.folder, 5000)
        self.publish()

    def publish(self) -> None:
        """Copy the newest roster to the server."""
        shutil.copy(self.folder / "server" / ROSTER, self.server / ROSTER)

    def keys_of(self, number: int) -> ClientKeys:
        """A new client's keys, in a folder that is handed to it."""
        away = self.folder.parent / f"handed-{number}-{self.roster.number}"
        shutil.copytree(self.folder / f"client-{number}", away)
        return ClientKeys.load(away)

    @property
    def roster(self) -> Roster:
        return load_roster(self.folder / "server")


def at(exchange: int, *do: Callable[[], object]) -> Callable[[int], None]:
    """Does something before this exchange."""

    def before(number: int) -> None:
        if number == exchange:
            for one in do:
                one()

    return before
