"""How a run goes on when another roster takes the place of the present one. Only the authority can sign one, so the
server just looks whether there is a later one, closes its door to whoever is not in it, and hands it on.

A run keeps its number of places, because partition, weights and thresholds follow from it. Another client in an empty
place changes none of this. If the roster gets more places than a run has, that run goes on with those who have been in
it: nobody else could tell it from a run for which a server has picked few clients, all but one its own.
"""

from pathlib import Path

from baffle.errors import KeysError, RunFolderError
from baffle.journal.folder import PLAN
from baffle.network.assembly import Assembly
from baffle.network.authority import ServerKeys
from baffle.network.board import Board
from baffle.network.joining import Lines
from baffle.network.resuming import Tell
from baffle.network.rosters import Reread, Roster, RosterFile
from baffle.plan import load


def rereading(own: ServerKeys) -> Reread:
    """Looks for a later roster in the server's folder of keys."""
    file = RosterFile(own.folder, own.authority, own.roster)

    def reread() -> Roster | None:
        roster = file.reread()
        return own.under(roster).roster if roster else None

    return reread


def places_of(out: Path, roster: Roster) -> int:
    """How many places for clients the run in a folder has; a new one has as many as the roster."""
    places = len(roster.clients)
    return min(load(str(out / PLAN)).federation.clients, places) if (out / PLAN).exists() else places


class Succession:
    """Looks for later rosters, and lets a run go on under them."""

    def __init__(self, reread: Reread, lines: Lines, assembly: Assembly, board: Board, tell: Tell) -> None:
        self._reread, self._lines, self._assembly, self._board, self._tell = reread, lines, assembly, board, tell
        if (grown := self._grown(assembly.roster)) and not self._has_begun:
            raise RunFolderError(f"{grown}; nobody has taken part in it yet: start a new run with another --out")
        if grown:
            tell(self._limited(grown))

    def look(self) -> None:
        """Take a later roster, if there is one. A bad one is told once, and changes nothing."""
        before = self._assembly.roster
        try:
            roster = self._reread()
        except KeysError as fault:
            self._tell(f"{fault}; the run goes on with roster {before.number}")
            return
        if roster is None:
            return
        grown = self._grown(roster)
        if grown and not self._has_begun:
            self._tell(
                f"{grown}, which has not begun and stays with roster {before.number}; for all clients, start a new run "
                "with another --out"
            )
            return
        self._tell(f"roster {roster.number} takes the place of roster {before.number}")
        if grown:
            self._tell(self._limited(grown))
        now = roster.directory()
        self._lines.admit(roster)
        self._assembly.take(roster, [client for client, key in before.directory().items() if now.get(client) != key])
        self._board.count_roster(len(now))

    @property
    def _has_begun(self) -> bool:
        return bool(self._assembly.running.lineage.links)

    def _grown(self, roster: Roster) -> str:
        """In words, that a roster has more places than this run; empty if it has not."""
        here, there = self._assembly.plan.federation.clients, len(roster.clients)
        return f"roster {roster.number} has {there} places, but this run {here}" if there > here else ""

    def _limited(self, grown: str) -> str:
        return f"{grown}: it goes on with clients that have been in it, and all others take part from the next run on"
