import random
import ssl
from pathlib import Path

import pytest

from fedcg.wire.errors import TransportError
from fedcg.wire.transport.mqtt import BACKOFF_CAP_S, MqttTransport, backoff_s, probe
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles, explain_failure
from tests.support.broker.brokers import HOST, Pki
from tests.support.waiting import free_port


@pytest.mark.parametrize("host", ["broker.example.org", "192.168.1.5", "0.0.0.0"])  # noqa: S104 - refused here
def test_plain_text_never_leaves_the_machine(host: str) -> None:
    with pytest.raises(ValueError, match="loopback"):
        MqttConfig(host, 1883, "a", insecure=True)


def test_plain_text_must_be_asked_for() -> None:
    with pytest.raises(ValueError, match="insecure"):
        MqttConfig(HOST, 1883, "a")
    for here in (HOST, "127.0.0.2", "::1", "localhost"):
        assert MqttConfig(here, 1883, "a", insecure=True).tls is None


def test_insecure_and_tls_contradict_each_other(pki: Pki) -> None:
    with pytest.raises(ValueError, match="contradicts"):
        MqttConfig(HOST, 1883, "a", tls=pki.tls("a"), insecure=True)


def test_the_tls_context_asks_for_1_3_and_checks_the_broker(pki: Pki) -> None:
    context = pki.tls("a").context()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


def test_a_missing_tls_file_is_named_at_start(pki: Pki, tmp_path: Path) -> None:
    files = TlsFiles(pki.ca, tmp_path / "gone.pem", pki.tls("a").key)
    transport = MqttTransport(MqttConfig(HOST, 1, "a", tls=files))
    with pytest.raises(TransportError, match=r"gone\.pem"):
        transport.start(print, print)
    transport.close()


def test_a_key_of_another_certificate_is_refused_at_start(pki: Pki) -> None:
    mixed = TlsFiles(pki.ca, pki.tls("a").cert, pki.tls("b").key)
    with pytest.raises(TransportError, match=r"a\.pem or .*b\.key is damaged, or the key is not the certificate's\."):
        mixed.context()


def test_nobody_listening_is_said_so(pki: Pki) -> None:
    with pytest.raises(TransportError, match="is the broker running"):
        probe(MqttConfig(HOST, free_port(), "a", tls=pki.tls("a"), protocol="5"), timeout_s=10)


@pytest.mark.parametrize(
    ("error", "hint"),
    [(TimeoutError(), "firewall"), (OSError("odd"), "odd"), (ssl.SSLError(1, "handshake"), "TLS")],
)
def test_every_failure_has_an_explanation(error: OSError, hint: str) -> None:
    assert hint in explain_failure(MqttConfig(HOST, 1, "a", insecure=True), error)


def test_the_backoff_doubles_from_a_fifth_of_a_second_to_half_a_minute_with_jitter() -> None:
    rng = random.Random(0)
    for failures, ceiling in ((1, 0.2), (2, 0.4), (3, 0.8), (8, 25.6), (9, BACKOFF_CAP_S), (10_000, BACKOFF_CAP_S)):
        drawn = [backoff_s(failures, rng) for _ in range(200)]
        assert ceiling / 2 <= min(drawn) < max(drawn) <= ceiling
        assert max(drawn) - min(drawn) > ceiling / 4
