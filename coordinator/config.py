"""The coordinator's configuration file: schema, reading with all errors at once, and writing with comments."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, IPvAnyAddress, PlainSerializer, model_validator
from typing_extensions import Self

from coordinator.errors import ConfigError
from fedcg.config_file import Settings, listed, read_toml
from fedcg.tracking import TRACK_FORMS, TRACK_PATTERN
from fedcg.wire.messages.enrolment_messages import Host, PresetName
from fedcg.wire.messages.schemas import MAX_CHUNK_BYTES
from fedcg.wire.transfer.windows import DEFAULT_PRESET, LinkLimits, limits_for
from fedcg.worker_process import STALL_S

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - devices are on other machines, and need TLS and a token
KEEP_ROUNDS = 10
Port = Annotated[int, Field(ge=1, le=65535)]
SECURE_URL = r"^(https://[^\s/?#@\\]{1,255}|http://(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?)(/[^\s#]{0,500})?$"
"""HTTPS, or HTTP on this machine."""
_SERVER = r"^{}://([^\s@/:]{{1,128}}@)?([A-Za-z0-9.-]{{1,255}}|\[[0-9a-fA-F:]{{2,39}}\])(:\d{{1,5}})?$"


class BrokerSettings(Settings):
    """The address of the broker, its protocol, and the limits of the link.

    Attributes:
        host: host name or address of the broker, at which coordinator and devices reach it.
        port: its port for MQTT over TLS.
        protocol: MQTT version; auto tries 5 first, then 3.1.1.
        preset: limits of this kind of broker.
        chunk_bytes: largest chunk in bytes. Default: the preset's.
        window_chunks: maximum number of chunks in transit. Default: the preset's.
        window_bytes: maximum number of bytes in transit. Default: the preset's.
    """

    host: Host = "127.0.0.1"
    port: Port = 8883
    protocol: Literal["auto", "5", "3.1.1"] = "auto"
    preset: PresetName = DEFAULT_PRESET
    chunk_bytes: Annotated[int, Field(ge=1024, le=MAX_CHUNK_BYTES)] | None = None
    window_chunks: Annotated[int, Field(ge=1, le=256)] | None = None
    window_bytes: Annotated[int, Field(ge=1024, le=64_000_000)] | None = None

    @property
    def limits(self) -> LinkLimits:
        """The limits of the preset, overridden by this section's own settings."""
        return limits_for(self.preset, self.chunk_bytes, self.window_chunks, self.window_bytes)


class ApiSettings(Settings):
    """The address of the HTTP interface.

    Attributes:
        host: a loopback address; other addresses need a certificate or a proxy.
        port: port to listen on.
        names: further host names accepted in the Host header of requests.
        certificate: PEM file with the certificate for HTTPS, which also needs `key`. A relative path starts at the folder of this file.
        key: PEM file with the private key of `certificate`.
        proxy: address of an HTTPS reverse proxy in front; only the proxy and loopback may connect.
    """

    host: str = "127.0.0.1"
    port: Port = 8440
    names: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    certificate: Annotated[str, Field(min_length=1)] | None = None
    key: Annotated[str, Field(min_length=1)] | None = None
    proxy: Annotated[IPvAnyAddress, PlainSerializer(str, return_type=str)] | None = None

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("set both certificate and key, or none of them")
        return self

    @property
    def url(self) -> str:
        """The URL for commands on this machine."""
        host = "127.0.0.1" if self.host == EVERY_ADDRESS else self.host
        return f"{'http' if self.certificate is None else 'https'}://{f'[{host}]' if ':' in host else host}:{self.port}"


class ConnectionSettings(Settings):
    """Limits on open TCP connections; see `fedcg.listening.Caps`.

    Attributes:
        total: for HTTP interface, enrolment listener and carrier together; half of the file descriptors is another limit.
        per_address: for one address at one listener, before it presents a certificate. Sites behind one NAT share this limit.
        per_device: for the certificate of one device.
    """

    total: Annotated[int, Field(ge=16, le=32_768)] = 2048
    per_address: Annotated[int, Field(ge=1, le=32_768)] = 512
    per_device: Annotated[int, Field(ge=2, le=64)] = 8


class ListenerSettings(Settings):
    """An HTTPS listener for devices; off without a port."""

    port: Port | None = None
    listen: Annotated[str, Field(min_length=1)] | None = None
    host: Host | None = None

    def address(self, host: str) -> str:
        """The address to listen on if devices reach it at `host`."""
        return self.listen or ("127.0.0.1" if host in LOOPBACK_HOSTS else EVERY_ADDRESS)


class CarrierSettings(ListenerSettings):
    """The HTTPS listener that carries artifacts of devices with `carrier = "https"`.

    Attributes:
        port: port of the HTTPS listener for updates and aggregates, usually 8445. Default: off.
        listen: address to listen on. Default: 127.0.0.1 if `host` is a loopback address, else all addresses.
        host: name or address at which devices reach it. Default: `host` under [broker].
    """


class EnrolmentSettings(ListenerSettings):
    """The HTTPS listener at which devices enrol by token and renew their certificates.

    Attributes:
        port: port of the HTTPS listener for enrolment and renewal, usually 8444. Default: off.
        listen: address to listen on. Default: 127.0.0.1 if `host` is a loopback address, else all addresses.
        host: name or address at which devices reach it. Default: `host` under [broker].
        certificate_days: validity of a device's certificate in days; it is renewed in the last third.
    """

    certificate_days: Annotated[float, Field(gt=0, le=825)] = 30.0


class AggregationSettings(Settings):
    """The settings of the aggregation worker.

    Attributes:
        threads: number of torch threads; results differ from the seventh digit on if it changes.
        device: "cpu", "cuda", or "auto" for a GPU if there is one.
        public_data: unlabelled images for methods that distil on public data (FedDF): a folder or an .npz file; relative to this file.
        public_images: maximum number of these images to read.
        stall_s: seconds without a sign of life after which a busy worker is replaced.
    """

    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    public_data: Annotated[str, Field(min_length=1)] | None = None
    public_images: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    stall_s: Annotated[float, Field(ge=1, le=86_400)] = STALL_S


Action = Literal["warn", "down-weight", "quarantine"]


class FigureRule(Settings):
    """The bound beyond which a figure of an update is odd, and the action for odd updates.

    Attributes:
        bound: for `norm`: maximum distance, as a multiple of the median; for `direction`: maximum distance below the median cosine.
        action: `warn` writes an event. `down-weight` counts the update with `down_weight` of its examples. `quarantine` stores and
            acknowledges the update, but does not merge it.
    """

    bound: Annotated[float, Field(ge=0, le=1e9)]
    action: Action


class RobustnessSettings(Settings):
    """Limits on the influence of one device in a merge; a large number switches a limit off.

    Attributes:
        weight_medians: maximum weight of a device, as a multiple of the median number of examples in the attempt.
        max_share: maximum share of all examples for one device.
        examples: number of examples by device, used instead of the reported number and without a cap.
        clip_medians: an update is scaled back if its distance from the base exceeds this multiple of the median of the last closed
            round (in the first round: of its median).
        norm, direction: rules for an update whose step is unlike the others' (`updates.robustness.Figures`).
        down_weight: share of its examples that an update counts for with the action `down-weight`.
        below_quorum: treatment of quarantined updates if fewer than the quorum remain without them; `fail` fails the attempt.
    """

    weight_medians: Annotated[float, Field(ge=1, le=1e9)] = 3.0
    max_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    examples: dict[str, Annotated[int, Field(ge=1, le=1 << 40)]] = Field(default_factory=dict)
    clip_medians: Annotated[float, Field(ge=1, le=1e9)] = 2.5
    norm: FigureRule = FigureRule(bound=3.0, action="quarantine")
    direction: FigureRule = FigureRule(bound=0.3, action="quarantine")
    down_weight: Annotated[float, Field(gt=0, le=1)] = 0.1
    below_quorum: Literal["warn", "down-weight", "fail"] = "down-weight"


class StorageSettings(Settings):
    """Storage locations and retention.

    Attributes:
        database: postgresql+psycopg://user@host/database of a PostgreSQL database. Default: a SQLite file in the coordinator's directory.
        database_password_file: file with its password; the environment variable FEDCG_DATABASE_PASSWORD takes precedence.
        artifacts: s3://bucket/prefix for durable storage of artifacts; the local directory is then a cache. Default: only that directory.
        keep_rounds: number of closed rounds whose updates and aggregates are kept; older ones are deleted when a round closes.
        audit_days: minimum days to keep a line of the audit log.
    """

    database: Annotated[
        str | None, Field(pattern=r"^postgresql\+psycopg://", description="postgresql+psycopg://user@host/database")
    ] = None
    database_password_file: str | None = None
    artifacts: Annotated[
        str | None,
        Field(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]*)?$", description="s3://bucket/prefix"),
    ] = None
    keep_rounds: Annotated[int, Field(ge=1, le=1_000_000)] = KEEP_ROUNDS
    audit_days: Annotated[int, Field(ge=1, le=36_500)] = 365


class RoundSettings(Settings):
    """Waiting times before rounds open.

    Attributes:
        gather_s: with the quorum online, seconds to wait for further enrolled devices after the last one connected. Devices that start
            together connect within about this time (imports, TLS, back-off of the link).
        retry_s: seconds after a failed attempt. Doubles with each failed attempt of the round, up to 10 minutes. Long enough to remount a
            network share or restart a broker.
    """

    gather_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    retry_s: Annotated[float, Field(ge=0, le=600)] = 10.0


Address = Annotated[str, Field(pattern=r"^[^\s@,<>]{1,128}@[A-Za-z0-9.-]{1,255}$")]


class NotifySettings(Settings):
    """Who is notified when a problem opens or closes. Each channel is off without its address.

    Attributes:
        webhook: https://HOST/PATH that receives a JSON object by POST.
        smtp: mail server: smtps://USER@HOST:PORT, or smtp://USER@HOST:PORT for STARTTLS (unencrypted only on this machine).
        smtp_password_file: file with the password of USER.
        mail_from: sender of the e-mails.
        mail_to: receivers of the e-mails.
        mail_minutes: minimum minutes between two e-mails; the later one lists everything since then.
        mqtt: mqtts://USER@HOST:PORT or mqtt://USER@HOST:PORT of a broker where Home Assistant discovers the fleet.
        mqtt_password_file: file with the password of USER.
        mqtt_topic: first level of all topics.
    """

    webhook: Annotated[str | None, Field(pattern=r"^https?://[^\s]{1,500}$", description="https://HOST/PATH")] = None
    smtp: Annotated[str | None, Field(pattern=_SERVER.format("smtps?"), description="smtps://USER@HOST:PORT")] = None
    smtp_password_file: str | None = None
    mail_from: Annotated[Address | None, Field(description="NAME@HOST")] = None
    mail_to: Annotated[tuple[Address, ...], Field(max_length=20, description="NAME@HOST")] = ()
    mail_minutes: Annotated[float, Field(ge=0, le=1440)] = 15.0
    mqtt: Annotated[str | None, Field(pattern=_SERVER.format("mqtts?"), description="mqtts://USER@HOST:PORT")] = None
    mqtt_password_file: str | None = None
    mqtt_topic: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,32}$", description="a-z, 0-9, _ and -")] = "fedcg"

    @model_validator(mode="after")
    def _mail_has_its_addresses(self) -> Self:
        if self.smtp is not None and not (self.mail_from and self.mail_to):
            raise ValueError("smtp also needs mail_from and mail_to")
        return self


class OidcSettings(Settings):
    """Sign-in to the page with accounts of an OpenID Connect provider. Off without `issuer`. Tokens always work too.

    Attributes:
        issuer: the provider, exactly as it names itself: https://HOST/PATH (http only on this machine).
        page_url: address of the page in browsers. The redirect URI at the provider is PAGE_URL/login/oidc/callback.
        client_id: id of this coordinator at the provider.
        client_secret_file: file with its secret (client_secret_basic); relative to this file.
        scopes: requested scopes.
        claim: claim with the groups or roles of a person.
        roles: role for each value of the claim. The highest one counts; people without any are refused.
    """

    issuer: Annotated[str | None, Field(pattern=SECURE_URL, description="https://HOST/PATH")] = None
    page_url: Annotated[str | None, Field(pattern=SECURE_URL, description="https://HOST")] = None
    client_id: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    client_secret_file: str | None = None
    scopes: Annotated[str, Field(pattern=r"^openid( [!-~]{1,100}){0,20}$", description="openid SCOPE ...")] = (
        "openid profile email"
    )
    claim: Annotated[str, Field(min_length=1, max_length=255)] = "groups"
    roles: dict[str, Literal["viewer", "operator", "admin"]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _issuer_has_its_client(self) -> Self:
        if self.issuer and not (self.page_url and self.client_id and self.client_secret_file and self.roles):
            raise ValueError("issuer also needs page_url, client_id, client_secret_file and roles")
        return self


class CoordinatorConfig(Settings):
    """`fedcg coordinator init` writes the configuration of a coordinator, and the operator edits it. Restart the coordinator after a change.

    Attributes:
        track: destination for metrics of closed rounds: mlflow:URI or tensorboard:DIR. Default: none.
    """

    track: Annotated[str | None, Field(pattern=TRACK_PATTERN, description=TRACK_FORMS)] = None
    broker: BrokerSettings = BrokerSettings()
    api: ApiSettings = ApiSettings()
    enrolment: EnrolmentSettings = EnrolmentSettings()
    carrier: CarrierSettings = CarrierSettings()
    connections: ConnectionSettings = ConnectionSettings()
    aggregation: AggregationSettings = AggregationSettings()
    robustness: RobustnessSettings = RobustnessSettings()
    storage: StorageSettings = StorageSettings()
    rounds: RoundSettings = RoundSettings()
    notify: NotifySettings = NotifySettings()
    oidc: OidcSettings = OidcSettings()

    def host_of(self, listener: ListenerSettings) -> str:
        """The host name at which devices reach a listener."""
        return listener.host or self.broker.host

    def url_of(self, listener: ListenerSettings) -> str | None:
        """The URL at which devices reach a listener; None if it is off."""
        host = self.host_of(listener)
        return None if listener.port is None else f"https://{f'[{host}]' if ':' in host else host}:{listener.port}"


def load_config(path: Path) -> CoordinatorConfig:
    """Read coordinator.toml.

    Raises:
        ConfigError: not TOML, or invalid values (the message names all errors), or nothing is set, as after an interrupted write.
    """
    config = read_toml(path, CoordinatorConfig, ConfigError)
    if not config.model_fields_set:
        advice = "restore it from a backup, or copy the file of a new `fedcg coordinator init` in another directory"
        raise ConfigError(listed(str(path), [f"line 1: nothing is set, as after an interrupted write: {advice}"]))
    return config


def check_api_host(api: ApiSettings) -> None:
    """Refuse to serve the HTTP interface to a network without encryption, because requests contain tokens.

    Raises:
        ConfigError: the host is not a loopback address, and neither a certificate nor a proxy is set.
    """
    if api.host not in LOOPBACK_HOSTS and api.certificate is None and api.proxy is None:
        raise ConfigError(
            f"api.host = {api.host!r}: tokens would be sent unencrypted; set `certificate` and `key` under [api], or set `proxy` "
            "to the reverse proxy's address, or use 127.0.0.1 with an SSH tunnel"
        )


def render_config(config: CoordinatorConfig) -> str:
    """coordinator.toml with comments. A setting without a value becomes a comment with the template's example value."""
    template = files("coordinator").joinpath("coordinator.toml.template").read_text(encoding="utf-8")
    values = config.model_dump(mode="json")

    def line(setting: re.Match[str]) -> str:
        section, name, example = setting.groups()
        value = values[name] if section == "top" else values[section][name]
        return f"# {name} = {example}" if value is None else f"{name} = {_toml(value)}"

    return re.sub(r"(?m)^\$([a-z]+)\.(\w+)(?: = (.*))?$", line, template)


def _toml(value: object) -> str:
    """A value as TOML. Strings, numbers and lists are written as in JSON."""
    if not isinstance(value, dict):
        return json.dumps(value)
    return f"{{{', '.join(f'{json.dumps(name)} = {_toml(item)}' for name, item in value.items())}}}"
