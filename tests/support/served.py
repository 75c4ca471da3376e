"""A server and clients as `baffle serve` and `baffle join` run them, on threads over a real link; their authority."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from baffle.cli.join import take_part
from baffle.network.keys.authority import ServerKeys, add_clients, renew_roster, revoke_clients
from baffle.network.keys.folders import ClientKeys
from baffle.network.keys.rosters import ROSTER, Reread, Roster, load_roster
from baffle.network.link.server import Link
from baffle.network.server.serve import serve
from baffle.server.recorder import Progress, Summary
from tests.support.clocks import FastClock
from tests.support.lines_in_memory import Federation
from tests.support.links import PATIENCE, until


class Joined:
    """A client as `baffle join` runs it, on a thread."""

    def __init__(self, federation: Federation, number: int, address: str) -> None:
        self.log = list[str]()
        self.fault: BaseException | None = None
        own = federation.keys[number]
        member = federation.member(number, tell=self.log.append)

        def run() -> None:
            try:
                take_part(address, own, member, self.log.append, insecure=True, stay=False)
            except BaseException as fault:
                self.fault = fault

        self.thread = Thread(target=run, daemon=True)
        self.thread.start()

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()


class Served:
    """A server as `baffle serve` runs it, on a thread. After the round `hold_at` it waits until that changes."""

    hold_at = -1

    def __init__(self, federation: Federation, own: ServerKeys, link: Link) -> None:
        self.federation, self.address, self.rounds = federation, f"localhost:{link.port}", 0.0
        self.summary: Summary | None = None

        def watch(progress: Progress) -> None:
            self.rounds = progress.rounds_done
            until(lambda: self.rounds != self.hold_at)

        def run() -> None:
            self.summary = serve(
                federation.plan,
                federation.run,
                link,
                own.roster,
                reread=own.rereading(),
                watch=watch,
                tell=federation.told.append,
                clock=FastClock(),
            )

        self.thread = Thread(target=run, daemon=True)
        self.thread.start()

    def join(self, number: int) -> Joined:
        return Joined(self.federation, number, self.address)

    def end(self) -> Summary:
        until(lambda: not self.thread.is_alive(), 3 * PATIENCE)
        assert self.summary is not None
        return self.summary


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
        return ServerKeys.load(self.server).rereading()

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
