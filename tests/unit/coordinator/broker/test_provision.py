"""What the coordinator generates: certificates, homes, bundles, broker configuration; and the lists of devices that a broker applies or refuses."""

import json
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from coordinator.broker.access_lists import NOT_APPLIED, publish_lists, refresh_access
from coordinator.broker.broker_folder import MAX_BYTES, Lists, parse_lists, write_config
from coordinator.cli.opening import create_home
from coordinator.config import BrokerSettings, CoordinatorConfig, EnrolmentSettings, load_config
from coordinator.errors import BrokerError, HomeError
from coordinator.paths import Home
from coordinator.pki import authority as pki
from coordinator.pki.authority import CA_NAME, create_ca, credential_of, issue, observers_of, write_revocations
from coordinator.rounds.records import FederationStatus
from coordinator.storage.locks import changing_members
from coordinator.storage.store import Store
from edge_client.config import load_config as load_agent_config
from fedcg.errors import BAD_INPUT, EXISTS, NOT_FOUND
from fedcg.wire.errors import TransportError
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey
from tests.support.broker.brokers import QueueLimits
from tests.support.commands import data_of, fails, succeeds
from tests.support.coordinator.homes import add_federation, call
from tests.support.coordinator.toy_artifacts import tiny_spec
from tests.support.waiting import free_port

AS_WHOEVER_RUNS_THIS = ["user root"] if os.geteuid() == 0 else []


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def certificate(directory: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(credential_of(directory, name).certificate.read_bytes())


def test_certificates_name_their_identity_their_use_and_are_signed_by_the_authority(tmp_path: Path) -> None:
    create_ca(tmp_path)
    issue(tmp_path, "broker", server=True, sans=("127.0.0.1", "broker.example"))
    issue(tmp_path, "line4")
    ca, server, client = (certificate(tmp_path, name) for name in ("ca", "broker", "line4"))
    for leaf, name, use in (
        (server, "broker", ExtendedKeyUsageOID.SERVER_AUTH),
        (client, "line4", ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        leaf.verify_directly_issued_by(ca)
        assert leaf.subject.rfc4514_string() == f"CN={name}"
        assert list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [use]
        assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
        key = leaf.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"
        assert mode(credential_of(tmp_path, name).key) == 0o600
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["broker.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert server.not_valid_before_utc < datetime.now(timezone.utc) < server.not_valid_after_utc


def test_an_authority_is_never_replaced_and_names_that_leave_the_directory_are_refused(tmp_path: Path) -> None:
    create_ca(tmp_path)
    with pytest.raises(FileExistsError, match="cut off"):
        create_ca(tmp_path)
    for name in ("../x", "ca", ".hidden"):
        with pytest.raises(ValueError, match="name"):
            issue(tmp_path, name)
    with pytest.raises(FileNotFoundError, match="authority"):
        issue(tmp_path / "elsewhere", "a")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return create_home(tmp_path / "home", CoordinatorConfig(), observers=("observer",))


def with_federation(home: Home) -> None:
    add_federation(home, "casting", spec=tiny_spec().model_copy(update={"codec": "i8-delta"}))


@pytest.fixture
def deployed(home: Home, tmp_path: Path) -> Path:
    """The folder of a broker for another machine, with a federation to serve."""
    with_federation(home)
    folder = (tmp_path / "broker").resolve()
    assert call("deploy", "mosquitto", "--dir", home.root, "--out", folder)[0] == 0
    return folder


def test_a_home_holds_everything_and_shows_no_secret_to_others(home: Home) -> None:
    assert mode(home.root) == 0o700
    for secret in (home.secret_file, home.signing_key, *home.pki.glob("*.key")):
        assert mode(secret) == 0o600
    assert len(home.secret()) == 32
    assert SigningKey.load(home.signing_key).public.raw
    assert observers_of(home) == ["observer"]
    assert load_config(home.config_file) == CoordinatorConfig()
    other = create_home(home.root.parent / "other", CoordinatorConfig())
    assert other.secret() != home.secret()
    assert observers_of(other) == []


def test_a_servers_certificate_names_this_machine_only_where_its_clients_are(home: Home) -> None:
    for host, names in (
        ("localhost", {"localhost", "127.0.0.1"}),
        ("broker.example", {"broker.example"}),
        ("192.0.2.7", {"192.0.2.7"}),
    ):
        for role in ("broker", "enrolment"):
            pki.server_credential(home.pki, role, host)
            found = certificate(home.pki, role).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            assert {str(name.value) for name in found} == names


def test_a_directory_that_is_no_home_is_refused_with_the_next_step(home: Home) -> None:
    with pytest.raises(HomeError, match="coordinator init"):
        Home(home.root.parent / "nowhere").require()


def test_a_secret_with_a_flipped_bit_too_few_bytes_or_no_check_is_refused(home: Home) -> None:
    whole = home.secret_file.read_bytes()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        home.secret_file.write_bytes(data)
        with pytest.raises(HomeError, match=rf"{home.secret_file} is damaged.*fedcg coordinator restore"):
            home.secret()
    for other in (b"short", b"s" * 32):
        home.secret_file.write_bytes(other)
        with pytest.raises(HomeError, match="is damaged"):
            home.secret()


def test_a_damaged_file_of_the_authority_is_refused_by_name_before_the_coordinator_starts(home: Home) -> None:
    pki.check_pki(home.pki)
    draws = random.Random(3)
    names = {"ca.pem", "ca.key", "coordinator.pem", "coordinator.key", "observer.pem", "observer.key", "crl.pem"}
    assert names <= {path.name for path in home.pki.iterdir()}
    for path in (home.pki / name for name in sorted(names)):
        whole = path.read_bytes()
        for at in (5, *draws.sample(range(40, len(whole) - 40), 6)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draws.randrange(7)]) + whole[at + 1 :])
            with pytest.raises(HomeError, match=rf"pki/{path.stem}\.(pem|key) is damaged"):
                pki.check_pki(home.pki)
        path.write_bytes(whole)
    (home.pki / "coordinator.key").unlink()
    assert f"{home.pki / 'coordinator.key'} is damaged" in fails(2, "coordinator", "run", "--dir", home.root)


def test_a_damaged_pair_of_a_server_is_named_and_issued_anew(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    pair = pki.server_credential(home.pki, "broker", "127.0.0.1")
    other = issue(home.pki, "other").key.read_bytes()  # as after a kill between key and certificate
    for path, content in ((pair.certificate, b"x"), (pair.key, b"x"), (pair.key, other)):
        path.write_bytes(content)
        caplog.clear()
        pki.server_credential(home.pki, "broker", "127.0.0.1")
        assert f"{path} is damaged" in caplog.text
        caplog.clear()
        pki.server_credential(home.pki, "broker", "127.0.0.1")
        assert caplog.text == ""


def test_mosquitto_is_configured_for_mutual_tls_bounded_queues_and_loopback_for_a_loopback_host(deployed: Path) -> None:
    lines = write_config(deployed).read_text().splitlines()
    for line in (
        "allow_anonymous false",
        "require_certificate true",
        "use_identity_as_username true",
        "tls_version tlsv1.3",
        "listener 8883 127.0.0.1",
        *QueueLimits().lines(),
    ):
        assert line in lines
    assert [line for line in lines if line.startswith("user")] == AS_WHOEVER_RUNS_THIS


def test_init_refuses_a_directory_in_use_with_the_exit_code_of_things_that_exist(tmp_path: Path) -> None:
    output = succeeds("coordinator", "init", "--dir", tmp_path / "home", "--broker-port", 18884, "--json")
    assert data_of(output)["dir"] == str(tmp_path / "home")
    assert load_config(tmp_path / "home" / "coordinator.toml").broker.port == 18884
    assert "not an empty directory" in fails(EXISTS, "coordinator", "init", "--dir", tmp_path / "home")


@pytest.mark.parametrize(("port", "days"), [(8444, 30), (None, 825)])
def test_a_bundles_certificate_lives_long_where_it_is_not_renewed(tmp_path: Path, port: int | None, days: int) -> None:
    home = create_home(tmp_path / "home", CoordinatorConfig(enrolment=EnrolmentSettings(port=port)))
    add_federation(home, "casting", ["line4"])
    leaf = x509.load_pem_x509_certificate((tmp_path / "bundles" / "line4" / "tls" / "device.pem").read_bytes())
    assert (leaf.not_valid_after_utc - datetime.now(timezone.utc)).days in (days - 1, days)
    renews = load_agent_config(tmp_path / "bundles" / "line4" / "agent.toml", {}).enrolment.url
    assert (renews is not None) == (port is not None)


def test_devices_are_added_with_bundles_that_fit_together(home: Home, tmp_path: Path) -> None:
    with_federation(home)
    output = succeeds("device", "add", "line4", "line5", "--dir", home.root, "--out", tmp_path / "out", "--json")
    assert data_of(output)["broker_reloaded"] is False
    bundle = tmp_path / "out" / "line4"
    files = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    assert files == {"agent.toml", "coordinator.pub", "signing.key", "tls/ca.pem", "tls/device.key", "tls/device.pem"}
    assert mode(bundle) == 0o700
    assert mode(bundle / "signing.key") == mode(bundle / "tls" / "device.key") == 0o600
    leaf = x509.load_pem_x509_certificate((bundle / "tls" / "device.pem").read_bytes())
    leaf.verify_directly_issued_by(certificate(home.pki, "ca"))
    assert leaf.subject.rfc4514_string() == "CN=line4"
    assert VerifyKey.load_all(bundle / "coordinator.pub")[0] == SigningKey.load(home.signing_key).public
    with closing(Store(home.database)) as store:
        keys = {device.id: device.public_key for device in store.devices()}
    assert keys["line4"] == SigningKey.load(bundle / "signing.key").public.hex
    assert not credential_of(home.pki, "line4").key.exists()
    with changing_members(home):
        assert "line4" in refresh_access(home).devices
    assert data_of(call("device", "list", "--dir", home.root, "--json")[1])[1]["id"] == "line5"
    config = load_agent_config(bundle / "agent.toml", {})
    assert (config.federation, config.device) == ("casting", "line4")
    assert (config.broker.host, config.broker.port) == ("127.0.0.1", 8883)
    assert config.tls is not None
    for path in (config.tls.ca, config.tls.cert, config.tls.key, config.keys.signing, config.keys.coordinator):
        assert path.is_file()


RESERVED = ("coordinator", "observer-2", "lists-writer", "lists-reader")
IMPOSSIBLE = {"Line4": "lower-case", "../up": "lower-case", "x x": "twice", "taken": "already"}
IMPOSSIBLE |= dict.fromkeys(RESERVED, "reserved")


@pytest.mark.parametrize("ids", IMPOSSIBLE)
def test_impossible_ids_are_refused_and_nothing_is_written(home: Home, tmp_path: Path, ids: str) -> None:
    with_federation(home)
    call("device", "add", "taken", "--dir", home.root, "--out", tmp_path / "first")
    words = ("device", "add", "good", *ids.split(), "--dir", home.root, "--out", tmp_path / "out")
    assert IMPOSSIBLE[ids] in fails(EXISTS if ids == "taken" else BAD_INPUT, *words)
    assert not (tmp_path / "out").exists()


def test_a_device_needs_a_federation_to_join(home: Home, tmp_path: Path) -> None:
    assert "federation create" in fails(2, "device", "add", "a", "--dir", home.root, "--out", tmp_path)


def test_a_home_has_several_federations_and_shows_where_each_stands(home: Home) -> None:
    with_federation(home)
    add_federation(home, "second")
    shown = data_of(call("federation", "list", "--dir", home.root, "--json")[1])
    assert [(each["federation"], each["phase"], each["round"]) for each in shown] == [
        ("casting", "waiting", 1),
        ("second", "waiting", 1),
    ]
    shown = call("federation", "show", "casting", "--dir", home.root)[1]
    assert "updates: i8-delta, of aggregates: f32" in shown
    assert "updates 0 of 2 (quorum 2), 0 of 0 devices online" in shown
    assert "there are: casting, second" in fails(2, "federation", "show", "--dir", home.root)


def test_no_command_changes_a_directory_that_a_coordinator_holds(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.cli.client.STARTING_S", 0.0)
    with_federation(home)
    with home.locked():
        assert "no connection to http://127.0.0.1:" in fails(4, "federation", "pause", "--dir", home.root)
    with closing(Store(home.database)) as store:
        assert store.federation("casting").status is FederationStatus.RUNNING


def test_the_folder_of_a_broker_elsewhere_lacks_the_authoritys_key(home: Home, deployed: Path, tmp_path: Path) -> None:
    held = {path.name: path.read_bytes() for path in deployed.iterdir()}
    pairs = {f"{name}.{kind}" for name in ("broker", "lists-reader") for kind in ("pem", "key")}
    assert set(held) == {*pairs, "ca.pem", "crl.pem", "acl", "broker.json"}
    authority = (home.pki / "ca.key").read_bytes()
    for name, content in held.items():
        assert authority not in content
        assert bytes(tmp_path) not in content, f"{name} depends on a place"
    assert mode(deployed) == 0o700
    assert mode(deployed / "broker.key") == mode(deployed / "lists-reader.key") == 0o600
    for name in ("broker", "lists-reader"):
        certificate(deployed, name).verify_directly_issued_by(certificate(home.pki, "ca"))
    x509.load_pem_x509_crl(held["crl.pem"])


@pytest.mark.parametrize(
    ("name", "content", "code", "why"),
    [
        ("missing", None, NOT_FOUND, "deploy mosquitto` writes one"),
        ("", None, NOT_FOUND, "deploy mosquitto` writes one"),
        ("", "{", BAD_INPUT, "deploy mosquitto` again"),
        ("", '{"version":2,"host":"h","port":1}', BAD_INPUT, "upgrade it"),
    ],
)
def test_a_broker_is_run_in_a_real_folder(tmp_path: Path, name: str, content: str | None, code: int, why: str) -> None:
    if content is not None:
        (tmp_path / "broker.json").write_text(content)
    ended, output = call("broker", "run", "--dir", tmp_path / name)
    assert (ended, why in output) == (code, True), output


def test_a_brokers_machine_needs_no_more_than_the_extra_for_the_wire(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('sqlalchemy', 'torch', 'fastapi', 'uvicorn', 'starlette', 'PIL', 'onnxruntime'):\n"
        "    sys.modules[name] = None\n"
        "import coordinator.broker.broker_process\n"
        f"sys.argv = ['fedcg', 'broker', 'run', '--dir', {str(tmp_path)!r}]\n"
        "from fedcg.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == NOT_FOUND, done.stderr
    assert "deploy mosquitto` writes one" in done.stderr


def test_a_device_may_have_the_name_of_a_server_and_no_broker_may_run(home: Home, tmp_path: Path) -> None:
    with_federation(home)
    before = credential_of(home.pki, "broker").certificate.read_bytes()
    code, output = call("device", "add", "broker", "--dir", home.root, "--out", tmp_path / "out")
    assert (code, NOT_APPLIED in output) == (0, True)
    assert credential_of(home.pki, "broker").certificate.read_bytes() == before


Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def listed(tmp_path: Path) -> Home:
    made = create_home(tmp_path / "home", CoordinatorConfig(broker=BrokerSettings(port=free_port())))
    Store(made.database).close()
    return made


def authority(listed: Home) -> bytes:
    return credential_of(listed.pki, CA_NAME).certificate.read_bytes()


def test_the_latest_lists_are_taken_and_taken_again(listed: Home) -> None:
    lists = refresh_access(listed)
    payload = lists.model_dump_json().encode()
    for _ in range(2):  # the retained message comes again after every reconnect
        assert parse_lists(payload, authority(listed), lists.revocations.encode()) == lists


def test_earlier_lists_than_those_in_use_are_refused(listed: Home) -> None:
    """A broker that lost its last minutes in a crash delivers an earlier message."""
    earlier, later = refresh_access(listed), refresh_access(listed)
    with pytest.raises(BrokerError, match="older than those in use"):
        parse_lists(earlier.model_dump_json().encode(), authority(listed), later.revocations.encode())


def test_a_revocation_list_of_another_authority_is_refused(listed: Home, tmp_path: Path) -> None:
    lists = refresh_access(listed)
    create_ca(tmp_path / "other")
    foreign = write_revocations(tmp_path / "other", [(7, datetime.now(timezone.utc))]).read_text()
    payload = lists.model_copy(update={"revocations": foreign}).model_dump_json().encode()
    with pytest.raises(BrokerError, match=r"not signed by this broker's authority.*deploy mosquitto"):
        parse_lists(payload, authority(listed), lists.revocations.encode())


BROKEN: dict[str, Change] = {
    "version": lambda fields: fields.update(version=2),
    "device": lambda fields: fields.update(device=["a"]),
    "devices.0": lambda fields: fields.update(devices=["a\nuser mallory\ntopic readwrite #"]),
    "observers.0": lambda fields: fields.update(observers=["observer-\nuser mallory"]),
    "observer 'a'": lambda fields: fields.update(observers=["a"]),
    "reserved": lambda fields: fields.update(devices=["coordinator"]),
    "federations.0": lambda fields: fields.update(federations=["+"]),
    "revocations": lambda fields: fields.pop("revocations"),
    "PEM": lambda fields: fields.update(revocations="none"),
}


@pytest.mark.parametrize("why", BROKEN)
def test_anything_else_is_refused_by_name(listed: Home, why: str) -> None:
    lists = refresh_access(listed)
    fields = {**json.loads(lists.model_dump_json()), "federations": ["casting"]}
    BROKEN[why](fields)
    with pytest.raises(BrokerError, match="not lists of devices") as refused:
        parse_lists(json.dumps(fields).encode(), authority(listed), lists.revocations.encode())
    assert why in str(refused.value)


def test_lists_over_the_limit_are_refused_unread(listed: Home) -> None:
    with pytest.raises(BrokerError, match=str(MAX_BYTES)):
        parse_lists(b"[" * (MAX_BYTES + 1), authority(listed), b"")


def test_a_thousand_devices_and_revocations_fit_many_times(listed: Home) -> None:
    names = tuple(f"{number:04}" + "x" * 59 for number in range(1000))
    serials = [(2**158 + number, datetime.now(timezone.utc)) for number in range(1000)]
    revocations = write_revocations(listed.pki, serials).read_text()
    lists = Lists(federations=("casting",), devices=names, observers=(), revocations=revocations)
    assert len(lists.model_dump_json()) < MAX_BYTES / 10


def test_no_broker_is_reported_at_once(listed: Home) -> None:
    with pytest.raises(TransportError, match="the connection was refused"):
        publish_lists(listed, refresh_access(listed), timeout_s=60.0)
    assert not list(listed.root.glob("lists-*"))
