"""The address and limits of a broker, and the messages for an operator if it can't be reached. Must not know an MQTT library."""

import hashlib
import ipaddress
import socket
import ssl
from pathlib import Path
from typing import Literal

from fedcg.errors import BAD_INPUT, in_words
from fedcg.values import Value
from fedcg.wire.errors import TransportError
from fedcg.wire.tls import SET_CLOCK, ServerRole, ServerRoleError, clock_time, expect_role, explain_dates

Protocol = Literal["5", "3.1.1", "auto"]
PROTOCOL_MAX_PACKET = 268_435_455
MAX_INBOUND = 2 << 20  # bytes; the limit of the generated broker configuration, many times a chunk
# a control message of 16 KB with signature, topic and header: a link with a smaller limit is unusable
MIN_PACKET_BYTES = 17 * 1024
IN_FLIGHT = 20  # unacknowledged QoS 1 publishes; Mosquitto's own default bound


def is_loopback(host: str) -> bool:
    """Whether `host` can only be this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TlsFiles(Value):
    """PEM files of mutual TLS: the authority that signed the server's certificate, and this side's own pair."""

    ca: Path
    cert: Path
    key: Path

    def context(self, role: ServerRole = ServerRole.BROKER) -> ssl.SSLContext:
        """A TLS 1.3 client context that checks the server's certificate, name and role, and sends this side's certificate.

        Raises:
            TransportError: names the file that is missing or unusable.
        """
        for path in (self.ca, self.cert, self.key):
            if not path.is_file():
                problem = f"the TLS file {path} is missing; enrol the device again or correct the configuration (an observer's come from `fedcg coordinator init --observer`)"
                raise TransportError(problem, exit_code=BAD_INPUT)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        files = str(self.ca)
        try:
            context.load_verify_locations(self.ca)
            files = f"{self.cert} or {self.key}"
            context.load_cert_chain(self.cert, self.key)
        except PermissionError as error:
            raise TransportError(f"this user may not read the TLS file {files}", exit_code=BAD_INPUT) from error
        except (ssl.SSLError, OSError) as error:
            raise TransportError(
                f"the TLS file {files} is damaged, or the key is not the certificate's. Restore it from a backup, or enrol the device again",
                exit_code=BAD_INPUT,
            ) from error
        expect_role(context, role)
        return context


class MqttConfig(Value):
    """A broker and this client's identity on it.

    Attributes:
        identity: over TLS, the certificate's common name must be the same.
        tls: mutual TLS; None only with `insecure` and a loopback host.
        protocol: "auto" tries MQTT 5 first and falls back to 3.1.1 when the broker refuses it.
        assumed_max_packet: largest packet in bytes for a broker that does not announce its own (any with 3.1.1); the
            smallest limit among the known brokers is 128 KB.
        max_packet: largest packet in bytes even if the broker announces more, for services that accept less than they announce.
        max_inbound: largest packet in bytes that is accepted from the broker; a larger one ends the link before it is read.
        connection: distinguishes the connections of one identity (`connection_name`); "" for its only one.
        in_flight: the most QoS 1 publishes that are sent and not acknowledged; fewer if the broker announces fewer.
    """

    host: str
    port: int
    identity: str
    tls: TlsFiles | None = None
    insecure: bool = False
    protocol: Protocol = "auto"
    keepalive_s: int = 30
    connect_timeout_s: float = 5.0
    assumed_max_packet: int = 128 * 1024
    max_packet: int = PROTOCOL_MAX_PACKET
    max_inbound: int = MAX_INBOUND
    in_flight: int = IN_FLIGHT
    connection: str = ""

    def __post_init__(self) -> None:
        if self.tls is None and not (self.insecure and is_loopback(self.host)):
            raise ValueError(
                f"no TLS files for the broker at {self.host}:{self.port}: name them (ca, cert and key); only a broker at a loopback address does without, with `insecure`"
            )
        if self.tls is not None and self.insecure:
            raise ValueError("`insecure` contradicts the TLS files; leave one of them out")

    @property
    def client_id(self) -> str:
        """The MQTT client id; the part before the dot is the identity."""
        return f"{self.identity}.{self.connection}" if self.connection else self.identity

    @property
    def address(self) -> str:
        """Host and port for messages to people."""
        return f"{self.host}:{self.port}"


def connection_name(federation: str, secret: bytes) -> str:
    """The name of an identity's connection for a federation: the same at every start, and secret.

    A broker ends the session of a client id if another client connects with the same id. With a secret id only the identity itself and the
    coordinator can cause that.

    Args:
        federation: that the connection serves.
        secret: known to the identity and, for a device, to the coordinator: the device's public message key.
    """
    return hashlib.sha256(b"fedcg/1 client id\0" + federation.encode() + b"\0" + secret).hexdigest()[:32]


def explain_failure(config: MqttConfig, error: OSError) -> str:
    """The message for an operator when connecting failed, with the cause to check."""
    if isinstance(error, ServerRoleError):
        cause = f"its certificate was not accepted: {error.verify_message}. Check host and port; otherwise the connection may be intercepted"
    elif isinstance(error, ssl.SSLCertVerificationError):
        cause = explain_dates(error) or (
            f"its certificate was not accepted ({error.verify_message}): it must be signed by the configured CA and name "
            f"{config.host}"
        )
    elif isinstance(error, ssl.SSLError):
        cause = f"TLS failed ({in_words(error)}): the port may not speak TLS 1.3, or it refuses this certificate"
    elif isinstance(error, ConnectionRefusedError):
        cause = "the connection was refused: is the broker running, is the port right, does a firewall block it?"
    elif isinstance(error, socket.gaierror):
        cause = f"the name can't be resolved ({error.strerror}): check the host name and DNS"
    elif isinstance(error, TimeoutError):
        cause = "no answer in time: check the address, the route and firewalls"
    else:
        cause = in_words(error)
    return f"no connection to the broker at {config.address}: {cause}"


def explain_refusal(config: MqttConfig, reason: str) -> str:
    """The message for an operator when the broker answered with a refusal."""
    return (
        f"the broker at {config.address} refused {config.identity!r}: {reason}. Likely causes: the identity is not in the "
        "broker's access list, it is not the certificate's common name, or the protocol version is not supported"
    )


def explain_silence(config: MqttConfig, reason: str) -> str:
    """The message for an operator when the broker closed the connection before it answered; TLS 1.3 gives no better reason."""
    causes = "the protocol version is not supported"
    if config.tls is not None:
        causes = (
            f"the broker does not accept the certificate {config.tls.cert} (signed by another CA, expired, revoked, or a clock "
            f"is wrong: this machine's shows {clock_time()}; {SET_CLOCK}, and the broker's), or {causes}"
        )
    return f"the broker at {config.address} closed the connection before answering ({reason}). Likely causes: {causes}"


def explain_break(config: MqttConfig, error: OSError, *, reached: bool, accepted: bool) -> str:
    """The message for an operator when a link broke, depending on its progress."""
    if not reached:
        return explain_failure(config, error)
    if not accepted:
        return explain_silence(config, in_words(error))
    return f"the link to the broker at {config.address} broke: {in_words(error)}"


def explain_small_packets(config: MqttConfig, largest: int) -> str:
    """The message for an operator when the broker's packet limit is too small for this protocol."""
    return (
        f"the broker at {config.address} takes packets of at most {largest} bytes, but {MIN_PACKET_BYTES} are needed: raise its "
        "maximum packet size (Mosquitto: max_packet_size)"
    )


def explain_subscription(config: MqttConfig, topics: list[str], answers: list[str]) -> str:
    """The message for an operator when a subscription was not granted.

    Args:
        config: the broker.
        topics: the requested topics.
        answers: per topic why it was refused, "" if it was granted; a broker may send too few or too many.
    """
    refused = [f"{topic}: {answer}" for topic, answer in zip(topics, answers) if answer]  # noqa: B905 - of other lengths
    what = "; ".join(refused) or f"it answered {len(answers)} of {len(topics)} subscriptions"
    return f"the broker at {config.address} refused {config.identity!r} a subscription: {what}. Allow it in its access list"
