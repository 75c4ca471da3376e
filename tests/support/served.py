"""A server and clients as `baffle serve` and `baffle join` run them, on threads, over a real link."""

from threading import Thread

from baffle.cli.join import _over_link
from baffle.network import serve
from baffle.network.authority import ServerKeys
from baffle.network.link.server import Link
from baffle.network.succession import rereading
from baffle.server.recorder import Progress, Summary
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
                _over_link(address, own, member, self.log.append, insecure=True, stay=False)  # type: ignore[arg-type]
            except BaseException as fault:
                self.fault = fault

        self.thread = Thread(target=run, daemon=True)
        self.thread.start()

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()


class Served:
    """A server as `baffle serve` runs it, on a thread."""

    def __init__(self, federation: Federation, own: ServerKeys, link: Link) -> None:
        self.federation, self.address, self.rounds = federation, f"localhost:{link.port}", 0.0
        self.summary: Summary | None = None

        def watch(progress: Progress) -> None:
            self.rounds = progress.rounds_done

        def run() -> None:
            self.summary = serve.serve(
                federation.plan,
                federation.run,
                link,
                own.roster,
                reread=rereading(own),
                watch=watch,
                tell=federation.told.append,
            )

        self.thread = Thread(target=run, daemon=True)
        self.thread.start()

    def join(self, number: int) -> Joined:
        return Joined(self.federation, number, self.address)

    def end(self) -> Summary:
        until(lambda: not self.thread.is_alive(), 3 * PATIENCE)
        assert self.summary is not None
        return self.summary
