"""The operator's console: it shows its token to its own server alone, and refuses whatever is no status in one line."""

import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, settings, strategies as st

from baffle.errors import AwayError, KeysError, TransportError
from baffle.network.console import MOST_BYTES, SECONDS, fetch_status
from baffle.network.keys.authority import ServerKeys, make_keys
from baffle.network.keys.folders import OperatorKeys
from baffle.network.link import door
from baffle.network.link.client import client_tls
from baffle.network.link.server import server_tls
from tests.support.links import Keys, link_with_pages, new_keys, say


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return new_keys(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def keys(served: Keys) -> OperatorKeys:
    return OperatorKeys.load(served.folder / "operator")


class Liar:
    """A server without TLS that reads a request and answers each with the same bytes, whatever they are."""

    def __init__(self, answer: bytes = b"", tls: ssl.SSLContext | None = None) -> None:
        self.answer, self._tls = answer, tls
        self.heard = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                try:
                    with self._tls.wrap_socket(connection, server_side=True) if self._tls else connection as line:
                        self.heard += line.recv(65_536)
                        line.sendall(self.answer)
                except OSError:
                    pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    with closing(Liar()) as liar:
        yield liar


def refused(address: str, keys: OperatorKeys, *, tls: bool = False, seconds: float = SECONDS) -> str:
    with pytest.raises(TransportError) as caught:
        fetch_status(address, keys, tls=tls, seconds=seconds)
    assert keys.token not in str(caught.value)
    assert caught.value.args[0].isprintable()
    return str(caught.value)


@pytest.mark.parametrize("tls", [True, False])
def test_the_operator_is_shown_the_status(served: Keys, keys: OperatorKeys, tls: bool) -> None:
    with link_with_pages(served, tls=tls) as link:
        status = fetch_status(f"127.0.0.1:{link.port}", keys, tls=tls)
        assert (status.doing, status.connected) == ("starting", "")
        assert fetch_status(f"localhost:{link.port}", keys, tls=tls).turned_away == 0


def test_a_wrong_token_is_one_of_two_possibilities(served: Keys, keys: OperatorKeys) -> None:
    with link_with_pages(served) as link:
        wrong = OperatorKeys(keys.ca, "0" * 64)
        words = refused(f"127.0.0.1:{link.port}", wrong, tls=True)
    assert "either the token in this folder is not that server's, or it is no BAFFLE server" in words


def test_a_server_of_another_ca_or_another_host_never_sees_the_token(keys: OperatorKeys, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", 1, ["127.0.0.1"])
    make_keys(tmp_path / "named", 1, ["fl.example.org"])
    for name, own, words in (
        ("other", keys, "was not issued by the CA in this folder"),
        ("named", OperatorKeys.load(tmp_path / "named" / "operator"), "or is for another host"),
    ):
        with closing(Liar(b"", server_tls(ServerKeys.load(tmp_path / name / "server")))) as liar:
            assert words in refused(liar.address, own, tls=True)
            assert liar.heard == b""


def test_tls_on_one_side_only_is_explained(served: Keys, keys: OperatorKeys) -> None:
    with link_with_pages(served) as link:
        assert "try again without --insecure" in refused(f"127.0.0.1:{link.port}", keys, tls=False)
    with link_with_pages(served, tls=False) as link:
        assert "try again with --insecure" in refused(f"127.0.0.1:{link.port}", keys, tls=True)


def test_a_console_that_is_shut_out_is_told_to_wait(served: Keys, keys: OperatorKeys) -> None:
    with link_with_pages(served) as link:
        for _ in range(2 * door.FAILURES):
            with suppress(OSError):
                say(link, b"GET / HTTP/1.1\r\n\r\n", client_tls(served.clients[0]))
        assert "in a minute if many attempts have failed" in refused(f"127.0.0.1:{link.port}", keys, tls=True)


def test_a_server_that_is_away_cannot_be_reached(keys: OperatorKeys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(AwayError, match=r"cannot be reached \(Connection refused\); start the server"):
        fetch_status(f"127.0.0.1:{port}", keys)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for tls in (True, False):
            assert "cannot be reached (" in refused(f"127.0.0.1:{silent.getsockname()[1]}", keys, tls=tls, seconds=0.2)


def page(body: bytes, code: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (code, len(body)) + body


GOOD = b'{"version":"1","run":"r","plan":"p","secure":"on","doing":"playing"}'

LIES: dict[str, bytes] = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a long header": b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100_000,
    "no body": page(b""),
    "a bad length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
    "no JSON": page(b"<html>"),
    "other JSON": page(b'{"version": "1"}'),
    "deep JSON": page(b'{"x":' + b"[" * 100_000),
    "half a character": page(GOOD.replace(b'"r"', b'"\\ud800"')),
    "too long": page(GOOD + b" " * MOST_BYTES + b"x"),
    "a text for a number": page(GOOD.replace(b'"r"', b'"r","rounds":"6"')),
    "a huge fraction": page(GOOD.replace(b'"r"', b'"r","uptime_seconds":1e999')),
    "another word": page(GOOD.replace(b"playing", b"\\u001b[2J")),
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "a fault": page(GOOD, 500),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_status_is_refused_in_one_sentence(liar: Liar, keys: OperatorKeys, lie: str) -> None:
    liar.answer = LIES[lie]
    assert len(refused(liar.address, keys)) < 600


def test_the_liar_could_tell_the_truth(liar: Liar, keys: OperatorKeys) -> None:
    """A status with fields that this version does not know is read all the same."""
    liar.answer = page(GOOD.replace(b'"r"', b'"r","colour":["blue"]'))
    assert fetch_status(liar.address, keys, tls=False).run == "r"


@settings(max_examples=100)
@given(answer=st.one_of(st.binary(max_size=200), st.binary(max_size=100).map(page)))
def test_any_bytes_are_refused(liar: Liar, keys: OperatorKeys, answer: bytes) -> None:
    liar.answer = answer
    refused(liar.address, keys)


def test_the_folder_must_hold_a_ca_and_a_token(served: Keys, tmp_path: Path) -> None:
    spoil: dict[str, Callable[[Path], object]] = {
        "ca.pem cannot be read": lambda own: (own / "ca.pem").unlink(),
        "ca.pem is not a certificate": lambda own: (own / "ca.pem").write_text("none"),
        "operator.token cannot be read": lambda own: (own / "operator.token").unlink(),
        "operator.token is not a token": lambda own: (own / "operator.token").write_text("a b\r\nX: y"),
    }
    for number, (words, damage) in enumerate(spoil.items()):
        own = tmp_path / str(number)
        own.mkdir()
        for file in (served.folder / "operator").iterdir():
            shutil.copy(file, own / file.name)
        assert OperatorKeys.load(own).token not in repr(OperatorKeys.load(own))
        damage(own)
        with pytest.raises(KeysError, match=words):
            OperatorKeys.load(own)
