"""Keys: new ones can be used, a damaged file is named in one line, and nobody but the authority changes a roster."""

import shutil
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from hypothesis import given, strategies as st
from msgspec.structs import replace

from baffle.errors import KeysError
from baffle.network.keys.authority import DAYS, ServerKeys, load_private, make_keys, renew_certificate, sign_roster
from baffle.network.keys.certificates import hosts_in, load_certificate, new_ca, new_certificate
from baffle.network.keys.folders import MARKS_FILE, ClientKeys, OperatorKeys, load_identity, load_token
from baffle.network.keys.rosters import MOST_ROSTER_BYTES, Roster, load_roster

OFFLINE = ("authority.key", "ca.key", "ca.pem")
SERVER = ("identity.key", "ca.pem", "server.pem", "server.key", "operator.token", "authority.pub", "roster.json")
CLIENT = ("identity.key", "ca.pem", "authority.pub", "roster.json")
PRIVATE = (
    *("authority.key", "ca.key", "operator/operator.token", "client-0/identity.key"),
    *(f"server/{name}" for name in ("identity.key", "server.key", "operator.token")),
)
OPERATOR = ("ca.pem", "operator.token")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of another federation."""
    folder = tmp_path_factory.mktemp("keys") / "others"
    make_keys(folder, 3, ["localhost"])
    return folder


def test_each_client_has_its_number_and_everybody_the_same_roster(federation: Path) -> None:
    server = ServerKeys.load(federation / "server")
    clients = [ClientKeys.load(federation / f"client-{number}") for number in range(3)]
    assert [client.number for client in clients] == [0, 1, 2]
    assert all(client.roster == server.roster for client in clients)
    assert len(set(server.roster.directory().values())) == 3
    assert server.identity.public_key().public_bytes_raw() == server.roster.server_key
    assert server.roster.server_key not in server.roster.directory().values()
    assert server.roster.number == 1
    assert abs(server.roster.expiry - datetime.now(UTC) - timedelta(days=DAYS)) < timedelta(hours=1)
    assert all(client.marks == federation / f"client-{client.number}" / MARKS_FILE for client in clients)
    assert {client.marks.read_bytes() for client in clients} == {b""}
    private = [path.read_bytes() for path in federation.rglob("*.key")]
    assert len(private) == len(set(private)) == 2 + 2 + 2 * 3
    for number in range(3):  # a SuperNode's key can be registered at a SuperLink
        public = load_ssh_public_key((federation / "server" / "nodes" / f"client-{number}.pub").read_bytes())
        node = load_ssh_private_key((federation / f"client-{number}" / "node.key").read_bytes(), None)
        assert node.public_key() == public


def test_the_server_knows_its_hosts_and_the_operators_token(federation: Path, others: Path) -> None:
    server = ServerKeys.load(federation / "server")
    assert server.hosts == ("localhost", "127.0.0.1", "::1")
    assert server.token == load_token(federation / "operator")
    assert server.token != load_token(others / "operator")
    assert len(server.token) == 64


def test_only_the_owner_can_read_them(federation: Path) -> None:
    files = {str(path.relative_to(federation)): path for path in federation.rglob("*") if path.is_file()}
    assert set(files) == {
        *OFFLINE,
        *(f"server/{name}" for name in SERVER),
        *(f"server/nodes/client-{number}.pub" for number in range(3)),
        *(f"client-{number}/{name}" for number in range(3) for name in (*CLIENT, MARKS_FILE, "node.key")),
        *(f"operator/{name}" for name in OPERATOR),
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    folders = [federation, *(path for path in federation.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_key_that_others_can_read_is_refused(keys: Path, name: str) -> None:
    load: Callable[[], object] = {
        "authority.key": lambda: load_identity(keys / name),
        "ca.key": lambda: renew_certificate(keys),
        "operator/operator.token": lambda: OperatorKeys.load(keys / "operator"),
    }.get(name, lambda: _load(keys, name))
    load()
    path = keys / name
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(KeysError) as fault:
            load()
        words = f"{path} can be read or changed by others than its owner; make it private: chmod 600 {path}"
        assert str(fault.value) == words
    path.chmod(0o400)
    load()


def test_the_other_files_may_be_read_by_others(keys: Path) -> None:
    for path in keys.rglob("*"):
        if path.is_file() and str(path.relative_to(keys)) not in PRIVATE:
            path.chmod(0o644)
    _load(keys, "server/roster.json")
    _load(keys, "client-0/roster.json")


def test_without_its_marks_a_key_is_of_no_use(keys: Path) -> None:
    own = ClientKeys.load(keys / "client-0")
    own.marks.write_bytes(b"anything")
    ClientKeys.load(own.folder)
    own.marks.unlink()
    with pytest.raises(KeysError) as fault:
        ClientKeys.load(own.folder)
    assert str(fault.value) == (
        f"{own.marks} is missing, and without its marks this key could be asked twice; the federation's authority must"
        " make a new key: `baffle keys revoke`, then `baffle keys add`"
    )
    own.marks.mkdir()
    with pytest.raises(KeysError, match="could be asked twice"):
        ClientKeys.load(own.folder)


def test_a_servers_folder_of_version_0_2_has_one_more_file(keys: Path) -> None:
    (keys / "server" / "secret").write_text("0" * 64)
    ServerKeys.load(keys / "server")


def test_a_client_trusts_its_own_server_and_its_names_alone(federation: Path, others: Path) -> None:
    for name in ("localhost", "127.0.0.1"):
        assert _greeting(federation, federation / "client-1" / "ca.pem", name) == b"hello"
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
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*(f"server/{name}" for name in SERVER), *(f"client-0/{name}" for name in CLIENT)])
def test_a_damaged_file_is_named_in_one_line(keys: Path, name: str, damage: str) -> None:
    DAMAGES[damage](keys / name)
    with pytest.raises(KeysError) as fault:
        _load(keys, name)
    assert Path(name).name in str(fault.value)
    assert len(str(fault.value).splitlines()) == 1


@pytest.mark.parametrize("name", [f"server/{name}" for name in SERVER if name != "operator.token"])
def test_a_file_of_another_federation_is_refused(keys: Path, others: Path, name: str) -> None:
    shutil.copy(others / name, keys / name)
    with pytest.raises(KeysError, match=r"roster\.json|issued by|is not the"):
        _load(keys, name)


def test_a_certificate_with_letters_beyond_ascii_is_refused(keys: Path) -> None:
    path = keys / "client-0" / "ca.pem"
    data = path.read_bytes()
    path.write_bytes(data[:100] + "é".encode() + data[100:])
    with pytest.raises(KeysError, match=r"ca\.pem is not a certificate"):
        ClientKeys.load(path.parent)


def test_a_certificate_of_no_known_version_is_refused(keys: Path) -> None:
    """Its reader raises another error for this than for everything else."""
    path = keys / "client-0" / "ca.pem"
    der = ssl.PEM_cert_to_DER_cert(path.read_text())
    third, unknown = b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x22"
    assert third in der
    path.write_text(ssl.DER_cert_to_PEM_cert(der.replace(third, unknown)))
    with pytest.raises(KeysError, match=r"ca\.pem is not a certificate: 34 is not a valid"):
        load_certificate(path)


@pytest.mark.parametrize("name", ["ca.pem", "server.pem"])
def test_a_certificate_with_a_key_on_an_unknown_curve_is_refused(keys: Path, name: str) -> None:
    path, curve = keys / "server" / name, bytes.fromhex("06082a8648ce3d030107")
    der = ssl.PEM_cert_to_DER_cert(path.read_text())
    assert curve in der
    path.write_text(ssl.DER_cert_to_PEM_cert(der.replace(curve, curve[:-1] + b"\x63")))
    with pytest.raises(KeysError, match=r"server\.pem was not issued by"):
        ServerKeys.load(keys / "server")


def test_one_cannot_take_the_place_of_another(keys: Path) -> None:
    """A client's identity does not make a server, nor the server's a client."""
    mine, servers = keys / "client-0" / "identity.key", keys / "server" / "identity.key"
    client, server = mine.read_bytes(), servers.read_bytes()
    mine.write_bytes(server)
    servers.write_bytes(client)
    for name in ("client-0", "server"):
        with pytest.raises(KeysError, match=r"identity\.key is not (a client|the server)'s in"):
            _load(keys, f"{name}/identity.key")
    other = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    mine.write_bytes(other)
    with pytest.raises(KeysError, match="expected an Ed25519 key"):
        ClientKeys.load(mine.parent)


@pytest.fixture(scope="module")
def roster(federation: Path) -> Roster:
    return load_roster(federation / "server")


@pytest.fixture(scope="module")
def handed_out(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A client's folder in which each example of a property replaces the roster."""
    return Path(shutil.copytree(federation / "client-0", tmp_path_factory.mktemp("keys") / "client-0"))


HEX = st.binary(min_size=32, max_size=32).map(bytes.hex)
MOMENTS = st.datetimes(min_value=datetime(2030, 1, 1), max_value=datetime(9999, 1, 1))


@given(st.data())
def test_a_roster_with_any_changed_field_is_refused(roster: Roster, handed_out: Path, data: st.DataObject) -> None:
    """Whoever holds no authority.key may write any well-formed roster: another number, a later end, another server,
    clients added, left out, renamed or in another order."""
    clients = st.sampled_from(roster.clients)
    made_up = st.none() | st.builds(lambda client, identity: replace(client, identity=identity), clients, HEX)
    fields = {
        "number": st.integers(1, 2**53),
        "expires": MOMENTS.map(lambda moment: f"{moment:%Y-%m-%dT%H:%M:%SZ}"),
        "server": HEX,
        "clients": st.lists(clients | made_up, min_size=1, max_size=5).map(tuple),
        "signature": st.binary(min_size=64, max_size=64).map(bytes.hex),
    }
    assert fields.keys() == set(Roster.__struct_fields__)
    name = data.draw(st.sampled_from(sorted(fields)))
    forged = replace(roster, **{name: data.draw(fields[name])})
    (handed_out / "roster.json").write_bytes(forged.encode())
    if forged == roster:
        assert load_roster(handed_out) == roster
    else:
        with pytest.raises(KeysError, match="is not signed by the authority"):
            load_roster(handed_out)
        assert (forged.hash() == roster.hash()) == (name == "signature")


@pytest.mark.parametrize("name", ["server/roster.json", "client-0/roster.json"])
def test_an_expired_roster_is_refused_with_moment_and_remedy(keys: Path, roster: Roster, name: str) -> None:
    now = datetime.now(UTC)
    _sign(keys, name, replace(roster, expires=f"{now + timedelta(minutes=1):%Y-%m-%dT%H:%M:%SZ}"))
    _load(keys, name)
    _sign(keys, name, replace(roster, expires=f"{now:%Y-%m-%dT%H:%M:%SZ}"))
    with pytest.raises(KeysError, match=rf"expired at {now:%Y-%m-%dT%H:%M:%SZ}, .* clock .* `baffle keys renew`"):
        _load(keys, name)


def test_a_client_without_a_place_is_refused(keys: Path, roster: Roster) -> None:
    _sign(keys, "client-1/roster.json", replace(roster, clients=(roster.clients[0], None, roster.clients[2])))
    with pytest.raises(KeysError, match=r"identity\.key is not a client's in .*; if it was not revoked, take both"):
        ClientKeys.load(keys / "client-1")


WRONG: dict[str, tuple[object, ...]] = {
    "number": (0, -1, 2**53 + 1, 2**64),
    "expires": ("2099-01-01", "2099-01-01T00:00:00Z\n", "2099-01-01T00:00:00+00:00"),
    "server": ("0" * 63, "0" * 64 + "\n", "A" * 64),
    "clients": ((), ({"identity": "", "node": ""},), (0,)),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_roster_of_another_form_is_refused(keys: Path, roster: Roster, field: str) -> None:
    for value in WRONG[field]:
        changes: dict[str, object] = {field: value}
        (keys / "client-0" / "roster.json").write_bytes(replace(roster, **changes).encode())
        with pytest.raises(KeysError, match=rf"is not a roster: .*{field}"):
            ClientKeys.load(keys / "client-0")


def test_a_roster_that_never_ends_is_not_read(keys: Path) -> None:
    path = keys / "client-0" / "roster.json"
    with path.open("wb") as file:
        file.truncate(MOST_ROSTER_BYTES + 1)
    with pytest.raises(KeysError, match=f"longer than {MOST_ROSTER_BYTES:,} bytes"):
        ClientKeys.load(path.parent)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(KeysError, match="it is not a file"):
        ClientKeys.load(path.parent)


def test_reading_a_clients_keys_loads_no_library_for_certificates() -> None:
    code = "import sys, baffle.network.keys.folders; sys.exit('cryptography.x509' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _sign(keys: Path, name: str, roster: Roster) -> None:
    """Put this roster into the file, signed by the federation's authority."""
    (keys / name).write_bytes(sign_roster(roster, load_identity(keys / "authority.key")).encode())


def _load(keys: Path, name: str) -> object:
    """Load the folder of this file as the server or the client does that it belongs to."""
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
    with pytest.raises(KeysError, match="at least one host"):
        make_keys(tmp_path / "nowhere", 1, [])
    for days in (0, -1, 36_501, 10**9):
        with pytest.raises(KeysError, match="days, got"):
            make_keys(tmp_path / "days", 1, ["localhost"], days)
    assert not any((tmp_path / name).exists() for name in ("none", "name", "nowhere", "days"))


def test_certificate_and_roster_end_after_the_given_days(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 1, ["localhost"], days=7)
    server = ServerKeys.load(tmp_path / "keys" / "server")
    expiry = load_certificate(server.certificate).not_valid_after_utc
    assert expiry == server.roster.expiry
    assert abs(expiry - datetime.now(UTC) - timedelta(days=7)) < timedelta(hours=1)
    assert load_certificate(server.ca).not_valid_after_utc.year == 9999


def test_a_renewed_certificate_needs_nothing_new_at_clients(keys: Path) -> None:
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    (keys / "server" / ".server.key.new").touch(mode=0o644)  # left behind by a renewal that was killed
    renew_certificate(keys, days=7)
    after = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    renewed = {keys / "server" / "server.pem", keys / "server" / "server.key"}
    assert {path for path in after if after[path] != before.get(path)} == renewed
    assert before.keys() == after.keys()
    assert {stat.S_IMODE(path.stat().st_mode) for path in renewed} == {0o600}
    assert ServerKeys.load(keys / "server").hosts == ("localhost", "127.0.0.1", "::1")
    for name in ("localhost", "127.0.0.1"):
        assert _greeting(keys, keys / "client-1" / "ca.pem", name) == b"hello"


def test_a_renewed_certificate_may_be_for_other_hosts(keys: Path) -> None:
    (keys / "server" / "server.pem").unlink()
    with pytest.raises(KeysError, match=r"server\.pem is missing, .* give the server's names and addresses"):
        renew_certificate(keys)
    renew_certificate(keys, ["fl.example.org"])
    assert ServerKeys.load(keys / "server").hosts == ("fl.example.org",)
    assert _greeting(keys, keys / "client-1" / "ca.pem", "fl.example.org") == b"hello"
    with pytest.raises(ssl.SSLCertVerificationError):
        _greeting(keys, keys / "client-1" / "ca.pem", "localhost")


def test_only_the_cas_own_key_renews_a_certificate(keys: Path, others: Path) -> None:
    before = {path: path.read_bytes() for path in (keys / "server").rglob("*") if path.is_file()}
    with pytest.raises(KeysError, match="days, got 0"):
        renew_certificate(keys, days=0)
    shutil.copy(others / "ca.key", keys / "ca.key")
    with pytest.raises(KeysError, match=r"ca\.key is not the key of"):
        renew_certificate(keys)
    (keys / "ca.key").unlink()
    with pytest.raises(KeysError, match=r"ca\.key cannot be read"):
        renew_certificate(keys)
    assert before == {path: path.read_bytes() for path in (keys / "server").rglob("*") if path.is_file()}


def test_a_server_says_that_its_certificate_has_expired(keys: Path) -> None:
    key, moment = load_private(keys / "ca.key"), datetime.now(UTC) - timedelta(hours=1)
    own = load_private(keys / "server" / "server.key")
    assert isinstance(key, EllipticCurvePrivateKey)
    assert isinstance(own, EllipticCurvePrivateKey)
    expired = new_certificate(own, load_certificate(keys / "ca.pem"), key, ["localhost"], moment)
    (keys / "server" / "server.pem").write_bytes(expired.public_bytes(Encoding.PEM))
    with pytest.raises(KeysError, match=rf"expired at {moment:%Y-%m-%dT%H:%M:%SZ}; .*`baffle keys certificate`"):
        ServerKeys.load(keys / "server")
    renew_certificate(keys)
    ServerKeys.load(keys / "server")


def _hosts_of_a_certificate_for(*hosts: str) -> tuple[str, ...]:
    key = generate_private_key(SECP256R1())
    return hosts_in(new_certificate(key, new_ca(key), key, hosts, datetime.now(UTC) + timedelta(days=1)))


def test_hosts_are_names_and_addresses_in_their_order() -> None:
    hosts = ("fl.example.org", "192.0.2.10", "xn--bcher-kva.example", "2001:db8::1", "*.example.org", "a" * 63 + ".b")
    assert _hosts_of_a_certificate_for(*hosts) == hosts
    assert hosts_in(new_ca(generate_private_key(SECP256R1()))) == ()


@pytest.mark.parametrize(
    "host",
    [
        *("", " ", "bücher.example", "fl.example.org:9092", "[::1]", "https://fl.example.org", "fl..example"),
        *(".example", "fl.example.org\n", "a" * 64, "a." * 127 + "a"),
    ],
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(KeysError, match="is not a host: expected an address, or a name in ASCII"):
        _hosts_of_a_certificate_for("localhost", host)
    with pytest.raises(KeysError, match="is not a host"):
        _hosts_of_a_certificate_for(host)
