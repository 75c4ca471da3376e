"""The server's end of the link: one port, over which it carries requests to the connected clients and their replies
back.

The network lives on a thread of its own, so connections stay alive while the server computes. `carry` is called from
outside that thread and returns when everybody has answered or the deadline has passed; exchanges.py says who is waited
for. A mistake in anything that happens on that thread is told and survived.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar

from baffle.core.messages import first_number, tag_of
from baffle.errors import TransportError, first_line
from baffle.network.authority import ServerKeys
from baffle.network.joining import Reply
from baffle.network.link.connection import CLOSE_SECONDS
from baffle.network.link.envelope import Request, ask
from baffle.network.link.exchanges import Exchanges
from baffle.network.link.pages import Pages
from baffle.network.link.port import Port, listen, server_tls
from baffle.network.rosters import Roster

__all__ = ["Link", "server_tls"]

CHECK_SECONDS = 1.0
"""How often a caller that waits makes sure that the link's thread is alive."""

MOST_MISTAKES = 100
"""How many different mistakes are told."""

T = TypeVar("T")


class Link:
    """Listens at an address, without TLS if `tls` is None. `seconds` is the deadline of an exchange."""

    def __init__(
        self,
        keys: ServerKeys,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        seconds: float,
        pages: Pages | None = None,
        tell: Callable[[str], None] = lambda _words: None,
    ) -> None:
        self._keys, self._tls, self._pages, self._tell = keys, tls, pages or Pages(""), tell
        self._directory = keys.roster.directory()
        self._exchanges = Exchanges(keys.roster, seconds, self._say)
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note_mistake)
        self._stopping = False
        self._mistakes: set[str] = set()
        self._thread = Thread(target=self._run, name="link", daemon=True)

    def __enter__(self) -> "Link":
        self._thread.start()
        self._port = self._call(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say goodbye to everybody, and stop listening."""
        with suppress(TransportError):
            self._call(self._port.stop(), 2 * CLOSE_SECONDS)
        self._stopping = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    @property
    def counts(self) -> Counter[str]:
        return self._exchanges.counts

    def present(self) -> Mapping[int, bytes]:
        """The clients that are connected, each with the name of its process. A client whose line broke a moment ago
        still counts."""
        return self._call(self._present())

    def carry(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, bytes]:
        """Send each client its request and return the replies, in the order of the requests."""
        replies = self._call(self._exchanges.carry(self._signed(requests, run)))
        return {client: replies[client] for client in requests if client in replies}

    def post(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, Reply]:
        """Send each client its request without waiting: each reply, or None, comes in a future of its own."""
        signed = self._signed(requests, run)
        return {client: self._submit(self._ask(client, request)) for client, request in signed.items()}

    async def _ask(self, client: int, request: Request) -> bytes | None:
        return (await self._exchanges.carry({client: request})).get(client)

    def _signed(self, requests: Mapping[int, bytes], run: bytes) -> dict[int, Request]:
        return {
            client: ask(self._keys.identity, self._directory[client], run, first_number(body), tag_of(body), body)
            for client, body in requests.items()
        }

    def admit(self, roster: Roster) -> None:
        """The clients are those of this roster from now on. Whoever is no longer one of them is disconnected."""
        self._call(self._admit(roster))
        self._directory = roster.directory()

    def expect(self, contribution: int) -> None:
        """Accept contributions of at most this many bytes."""
        self._exchanges.contribution = contribution

    async def _open(self) -> Port:
        return Port(self._listener, self._tls, self._keys, self._pages, self._exchanges, self._say)

    async def _admit(self, roster: Roster) -> None:
        self._port.admit(roster)

    async def _present(self) -> dict[int, bytes]:
        return self._exchanges.present()

    # The thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._loop.run_forever()
            except BaseException as fault:
                self._tell_once(f"a mistake in the link: {type(fault).__name__}: {first_line(fault)}")

    def _call(self, work: Coroutine[Any, Any, T], seconds: float = float("inf")) -> T:
        """Have something done on the link's thread, and wait for it."""
        future = self._submit(work)
        try:
            return self._result(future, seconds)
        except CancelledError:
            raise TransportError("the link was closed while clients were asked") from None
        except BaseException:
            future.cancel()  # the caller was interrupted and no longer waits
            raise

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise TransportError("the link is closed; nobody can be asked any more") from None

    def _result(self, future: Future[T], seconds: float) -> T:
        waited = 0.0
        while True:
            try:
                return future.result(CHECK_SECONDS)
            except TimeoutError:
                waited += CHECK_SECONDS
                if future.done():
                    raise
                if waited >= seconds or not self._thread.is_alive():
                    raise TransportError("the link's thread does not answer") from None

    def _say(self, words: str) -> None:
        """Tell something. If it cannot be told, the link still goes on."""
        with suppress(BaseException):
            self._tell(words)

    def _note_mistake(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        fault = context.get("exception")
        self._tell_once(f"a mistake in the link: {context['message']}" + (f": {first_line(fault)}" if fault else ""))

    def _tell_once(self, words: str) -> None:
        """Tell of a mistake once: whoever found out how to cause it could fill a log."""
        if words not in self._mistakes and len(self._mistakes) < MOST_MISTAKES:
            self._mistakes.add(words)
            self._say(words)
