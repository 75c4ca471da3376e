"""Keys: new ones can be used, and a damaged file is named in one line."""

import shutil
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import msgspec
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from baffle.errors import KeysError
from baffle.network.authority import ServerKeys, make_keys, sign_roster
from baffle.network.keys import ClientKeys, Roster, load_identity

OFFLINE = ("authority.key", "ca.key", "ca.pem")
SERVER = (
    "identity.key",
    "ca.pem",
    "server.pem",
    "server.key",
    "secret",
    "operator.token",
    "authority.pub",
    "roster.json",
)
CLIENT = ("identity.key", "node.key", "ca.pem", "authority.pub", "roster.json")
OPERATOR = ("ca.pem", "operator.token")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder, 3, ["localhost", "127.0.0.1", "::1"])
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of another federation."""
    folder = tmp_path_factory.mktemp("keys") / "others"
    make_keys(folder, 3, ["localhost"])
    return folder


@pytest.fixture
def keys(federation: Path, tmp_path: Path) -> Path:
    """A copy of the keys that a test may damage."""
    return Path(shutil.copytree(federation, tmp_path / "keys"))


def test_each_client_has_its_number_and_everybody_the_same_roster(federation: Path) -> None:
    server = ServerKeys.load(federation / "server")
    clients = [ClientKeys.load(federation / f"client-{number}") for number in range(3)]
    assert [client.number for client in clients] == [0, 1, 2]
    assert all(client.roster == server.roster for client in clients)
    assert len(set(server.roster.node_keys())) == len(set(server.roster.directory().values())) == 3


def test_only_the_owner_can_read_them(federation: Path) -> None:
    files = {str(path.relative_to(federation)): path for path in federation.rglob("*") if path.is_file()}
    assert set(files) == {
        *OFFLINE,
        *(f"server/{name}" for name in SERVER),
        *(f"server/nodes/client-{number}.pub" for number in range(3)),
        *(f"client-{number}/{name}" for number in range(3) for name in CLIENT),
        *(f"operator/{name}" for name in OPERATOR),
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    folders = [federation, *(path for path in federation.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_the_node_keys_can_be_registered_at_another_superlink(federation: Path) -> None:
    for number in range(3):
        public = load_ssh_public_key((federation / "server" / "nodes" / f"client-{number}.pub").read_bytes())
        assert public == ClientKeys.load(federation / f"client-{number}").node.public_key()


def test_no_private_key_is_in_two_places(federation: Path) -> None:
    private = [path.read_bytes() for path in federation.rglob("*.key")]
    assert len(private) == len(set(private)) == 2 + 2 + 2 * 3


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_a_client_trusts_the_servers_certificate(federation: Path, name: str) -> None:
    assert _greeting(federation, federation / "client-1" / "ca.pem", name) == b"hello"


def test_a_client_trusts_no_other_server_and_no_other_name(federation: Path, others: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        _greeting(federation, others / "client-1" / "ca.pem", "localhost")
    with pytest.raises(ssl.SSLCertVerificationError):
        _greeting(federation, federation / "client-1" / "ca.pem", "elsewhere.example")


def _greeting(keys: Path, roots: Path, name: str) -> bytes:
    """What a client that trusts `roots` receives over TLS from a server with these keys."""
    own = ServerKeys.load(keys / "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            with context.wrap_socket(far, server_side=True) as stream:
                stream.sendall(b"hello")
        except (ssl.SSLError, OSError):
            far.close()

    thread = Thread(target=serve)
    thread.start()
    try:
        trusting = ssl.create_default_context(cafile=str(roots))
        with near, trusting.wrap_socket(near, server_hostname=name) as stream:
            return stream.recv(16)
    finally:
        thread.join()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: 30 if path.name == "secret" else -40]),
    "binary": lambda path: path.write_bytes(bytes(range(256)) if path.name != "secret" else b"\xff"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*(f"server/{name}" for name in SERVER), *(f"client-0/{name}" for name in CLIENT)])
def test_a_damaged_file_is_named_in_one_line(keys: Path, name: str, damage: str) -> None:
    DAMAGES[damage](keys / name)
    with pytest.raises(KeysError) as fault:
        _load(keys, name)
    assert Path(name).name in str(fault.value)
    assert len(str(fault.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["server/ca.pem", "server/server.pem", "server/server.key", *(f"client-0/{name}" for name in CLIENT[:2])]
)
def test_a_file_of_another_federation_is_refused(keys: Path, others: Path, name: str) -> None:
    shutil.copy(others / name, keys / name)
    with pytest.raises(KeysError, match=r"roster\.json|issued by|is not the"):
        _load(keys, name)


@pytest.mark.parametrize("node", ["", "ssh-rsa nonsense", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA" + "A" * 42])
@pytest.mark.parametrize("name", ["server/roster.json", "client-0/roster.json"])
def test_a_roster_with_an_invalid_node_key_is_refused(keys: Path, name: str, node: str) -> None:
    roster = ServerKeys.load(keys / "server").roster
    first = msgspec.structs.replace(roster.clients[0], node=node)
    _sign(keys, name, msgspec.structs.replace(roster, clients=(first, *roster.clients[1:])))
    with pytest.raises(KeysError, match="node key of client 0"):
        _load(keys, name)


def _sign(keys: Path, name: str, roster: Roster) -> None:
    """Put this roster into the file, signed by the federation's authority."""
    (keys / name).write_bytes(sign_roster(roster, load_identity(keys / "authority.key")).encode())


def _load(keys: Path, name: str) -> object:
    folder = (keys / name).parent
    return ServerKeys.load(folder) if folder.name == "server" else ClientKeys.load(folder)


def test_keys_are_made_once(federation: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in federation.rglob("*") if path.is_file()}
    with pytest.raises(KeysError, match="not empty"):
        make_keys(federation, 3, ["localhost"])
    assert before == {path: path.read_bytes() for path in federation.rglob("*") if path.is_file()}
    (tmp_path / "file").touch()
    with pytest.raises(KeysError, match="cannot be used"):
        make_keys(tmp_path / "file", 3, ["localhost"])
    with pytest.raises(KeysError, match="got 0"):
        make_keys(tmp_path / "none", 0, ["localhost"])
    with pytest.raises(KeysError, match="not a host"):
        make_keys(tmp_path / "name", 1, ["bücher.example"])
