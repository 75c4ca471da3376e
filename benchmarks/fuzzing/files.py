"""Files that a server or a client reads when it starts, and that are damaged: keys, certificates, marks, saved
weights, and the record from which a server goes on with a sum after a crash. Where a file begins with its own hash,
most of them have the right one all the same."""

import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np

from baffle.aggregation.client.marks import MarksFile
from baffle.aggregation.server.crash_record import CrashFile
from baffle.client.replica import Replica
from baffle.lineage import Lineage
from baffle.network.keys.authority import ServerKeys, make_keys
from baffle.network.keys.folders import ClientKeys, OperatorKeys
from baffle.plan import parse
from baffle.privacy.accounting import Charge, Release
from baffle.statement import commitment_to
from baffle.trajectory import trajectory_of
from fuzzing.checks import Tried, tried
from fuzzing.damage import Mutations
from fuzzing.members import PLAN
from fuzzing.sums import KEYS_AT_ONCE, Federation, require_plain
from fuzzing.texts import damaged_text

SECONDS = 1.0
HASH = 32

Open = Callable[[], bool]
"""Reads the damaged file in its place, and returns whether it was refused."""


class Files:
    """Sound files by name, where they lie, and who reads them."""

    def __init__(self, folder: Path, draw: Random) -> None:
        self.draw, self._folder = draw, folder
        self.sound: dict[str, tuple[Path, bytes, Open]] = {}
        self.hashed: set[str] = set()
        self._add_keys()
        self._add_marks()
        self._add_replica()
        self._add_crash_record()
        self._mutations = Mutations(draw, [data for _, data, _ in self.sound.values() if data])

    def _add_keys(self) -> None:
        keys = self._folder / "keys"
        make_keys(keys, 2, ["localhost"])
        server, client = keys / "server", keys / "client-0"

        def opening(load: Callable[[Path], object], folder: Path) -> Open:
            def read() -> bool:
                load(folder)
                return False

            return read

        for folder, load in ((server, ServerKeys.load), (client, ClientKeys.load)):
            for path in sorted(folder.iterdir()):
                if path.is_file() and path.name not in ("roster.json", "marks"):
                    self.sound[f"{folder.name}'s {path.name}"] = path, path.read_bytes(), opening(load, folder)
        token = server / "operator.token"
        self.sound["operator's token"] = token, token.read_bytes(), opening(OperatorKeys.load, server)

    def _add_marks(self) -> None:
        path = self._folder / "marks"
        path.touch()
        memory = MarksFile(path)
        for number in range(5):
            run, nonce = bytes([number] * 32), bytes([number + 9] * 32)
            memory.commit(commitment_to(nonce), nonce)
            memory.open(commitment_to(nonce), run)
            memory.enter(run)
            memory.charge(Charge(Release(1000, 4472, 2.5e7)))
            memory.remember(run, memory.marks(run), bytes(32))
        memory.leave()

        def read() -> bool:
            known = MarksFile(path)
            known.unopened()
            known.ledger.epsilon(1e-5)
            if known.lines() != MarksFile(path).lines():
                raise AssertionError("marks that read otherwise the second time")
            return False

        self.sound["marks"] = path, path.read_bytes(), read

    def _add_replica(self) -> None:
        path = self._folder / "replica"
        trajectory = trajectory_of(parse(PLAN, ["ring.n_max=20", 'update.optimizer="adam"']), 5)
        lineage = Lineage(trajectory)
        beginning = lineage.beginning(trajectory.rule.start(np.ones(5, np.float32)))
        Replica(lineage, beginning, path).save()

        def read() -> bool:
            replica = Replica(lineage, beginning, path)
            return replica.round == 0

        self.sound["replica"] = path, path.read_bytes(), read
        self.hashed.add("replica")

    def _add_crash_record(self) -> None:
        path = self._folder / "kept"
        federation = Federation(agreement=False, crash_store=CrashFile(path))

        def read() -> bool:
            again = Federation(agreement=False, crash_store=CrashFile(path), like=federation)
            (total,) = again.collected.sums
            if total:
                require_plain(total, again.contributors)
            return total is None

        self.sound["crash record"] = path, path.read_bytes(), read
        self.hashed.add("crash record")

    def take(self, name: str) -> Tried:
        """Damage a file, read it, and put the sound one back."""
        path, sound, read = self.sound[name]
        data = self._damaged(name, sound)
        path.write_bytes(data)
        try:
            return tried(f"file, {name}", data, read, SECONDS)
        finally:
            path.write_bytes(sound)

    def _damaged(self, name: str, sound: bytes) -> bytes:
        if name in self.hashed:
            body = sound[HASH:]
            body = self._mutations.of(body) if self.draw.random() < 0.7 else self._mutations.bytes_of(body)
            return (sha256(body).digest() if self.draw.random() < 0.9 else sound[:HASH]) + body
        if self.draw.random() < 0.4 and sound.isascii():
            return damaged_text(self.draw, sound.decode()).encode()
        return self._mutations.bytes_of(sound)


def files(count: int, seed: int) -> Iterator[Tried]:
    """Damaged files."""
    draw = Random(seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("baffle.aggregation.client.session.KEYS_AT_ONCE", KEYS_AT_ONCE),
        patch("os.fsync", lambda _file: None),
    ):
        all_files = Files(Path(folder), draw)
        names = list(all_files.sound)
        for _ in range(count):
            yield all_files.take(draw.choice(names))
