"""The coordinator's configuration file: its schema, reading it with all errors at once, writing a commented one."""

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
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - devices are on other machines; TLS and a token are asked of each
KEEP_ROUNDS = 10
Port = Annotated[int, Field(ge=1, le=65535)]


class BrokerSettings(Settings):
    """The address of the broker, its protocol, and the limits of the link.

    Attributes:
        preset: limits of a known broker or service.
        chunk_bytes, window_chunks, window_bytes: single limits in place of the preset's.
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
        """The limits of the preset, with this section's own settings in their place."""
        return limits_for(self.preset, self.chunk_bytes, self.window_chunks, self.window_bytes)


class ApiSettings(Settings):
    """The address of the HTTP interface.

    Attributes:
        host: a loopback address; another one only with a certificate or a proxy.
        port: where it listens.
        names: further host names that requests may name in their Host header.
        certificate, key: PEM files with which it speaks HTTPS itself; both or none. A relative path starts at coordinator.toml.
        proxy: the address of a reverse proxy that speaks HTTPS in front of it; only it and loopback may connect.
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
            raise ValueError("name both, certificate and key, or none of them")
        return self

    @property
    def url(self) -> str:
        """Where commands on this machine reach it."""
        host = "127.0.0.1" if self.host == EVERY_ADDRESS else self.host
        return f"{'http' if self.certificate is None else 'https'}://{f'[{host}]' if ':' in host else host}:{self.port}"


class ConnectionSettings(Settings):
    """How many TCP connections may be open at once; see `fedcg.listening.Caps`.

    Attributes:
        total: at the HTTP interface, the enrolment listener and the carrier together; half of the descriptors is a bound too.
        per_address: of one address at one listener, before it shows a certificate. Sites behind one NAT share it.
        per_device: with the certificate of one device.
    """

    total: Annotated[int, Field(ge=16, le=32_768)] = 2048
    per_address: Annotated[int, Field(ge=1, le=32_768)] = 512
    per_device: Annotated[int, Field(ge=2, le=64)] = 8


class ListenerSettings(Settings):
    """An HTTPS listener for devices; off without a port.

    Attributes:
        port: where it listens.
        listen: the address it listens on; default 127.0.0.1 when devices reach it there, else every address.
        host: name or address under which devices reach it; default `broker.host`.
    """

    port: Port | None = None
    listen: Annotated[str, Field(min_length=1)] | None = None
    host: Host | None = None

    def address(self, host: str) -> str:
        """The address that it listens on, when devices reach it under `host`."""
        return self.listen or ("127.0.0.1" if host in LOOPBACK_HOSTS else EVERY_ADDRESS)


class CarrierSettings(ListenerSettings):
    """The HTTPS listener that carries artifacts of devices with `carrier = "https"`."""


class EnrolmentSettings(ListenerSettings):
    """The HTTPS listener at which devices enrol by token and renew their certificates.

    Attributes:
        certificate_days: life of a device's certificate; it is renewed in the last third.
    """

    certificate_days: Annotated[float, Field(gt=0, le=825)] = 30.0


class AggregationSettings(Settings):
    """The settings of the aggregation worker.

    Attributes:
        threads: torch threads; another number gives other bits from the seventh digit on.
        device: "cpu", "cuda", or "auto" for a GPU when there is one.
        public_data: unlabelled images for methods that distil on some (FedDF): a folder, or an .npz; relative to this file.
        public_images: at most so many of them are read.
        stall_s: seconds without a sign of life after which the worker is replaced.
    """

    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    public_data: Annotated[str, Field(min_length=1)] | None = None
    public_images: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    stall_s: Annotated[float, Field(ge=1, le=86_400)] = STALL_S


Action = Literal["warn", "down-weight", "quarantine"]


class FigureRule(Settings):
    """From where on a figure of an update is odd, and what is done then.

    Attributes:
        bound: of `norm`: at most so many medians; of `direction`: at most so far below the median cosine.
        action: `warn`: an event; `down-weight`: the update counts for `down_weight` of its examples; `quarantine`: it is stored and
            receipted, and not merged.
    """

    bound: Annotated[float, Field(ge=0, le=1e9)]
    action: Action


class RobustnessSettings(Settings):
    """How much one device may weigh in a merge; a large number switches a bound off.

    Attributes:
        weight_medians: a device counts for at most so many times the median number of examples of the attempt.
        max_share: a device counts for at most this share of all examples.
        examples: numbers of examples by device that stand in the place of what the devices report; they are not capped.
        clip_medians: an update farther from the base than so many times the median of the last closed round (in the first: of its
            own) is scaled back.
        norm, direction: what is done about an update whose step is unlike the others' (`updates.robustness.Figures`).
        down_weight: share of its examples that an update counts for when a policy says `down-weight`.
        below_quorum: what is done with updates in quarantine when fewer than the quorum are left without them; `fail`: the attempt fails.
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
    """Where the state is stored, and how long artifacts stay.

    Attributes:
        database: URL of a PostgreSQL database; without one the database is a file of SQLite in the coordinator's directory.
        database_password_file: holds its password; the environment variable FEDCG_DATABASE_PASSWORD goes before it.
        artifacts: bucket and prefix in S3 where artifacts are stored durably; the directory is a cache then.
        keep_rounds: closed rounds whose updates and aggregates stay; older ones are deleted when a round closes.
        audit_days: days that a line of the audit log stays at least.
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
    """How long rounds wait before they open.

    Attributes:
        gather_s: with the quorum online, for further enrolled devices after the last one came. Devices that are started together differ by
            this much until they have a session: imports, TLS, the back-off of the link.
        retry_s: after a failed attempt; doubles with each failed attempt of the round, up to 10 minutes. Long enough for a share that is
            mounted again or a broker that is started again.
    """

    gather_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    retry_s: Annotated[float, Field(ge=0, le=600)] = 10.0


class PageSettings(Settings):
    """The page for people.

    Attributes:
        webhook: gets a JSON object by POST when a problem opens or closes.
    """

    webhook: Annotated[str | None, Field(pattern=r"^https?://[^\s]{1,500}$", description="https://HOST/PATH")] = None


class CoordinatorConfig(Settings):
    """coordinator.toml.

    Attributes:
        track: where figures of closed rounds are sent; a relative directory is relative to this file.
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
    page: PageSettings = PageSettings()

    def host_of(self, listener: ListenerSettings) -> str:
        """The name under which devices reach a listener."""
        return listener.host or self.broker.host

    def url_of(self, listener: ListenerSettings) -> str | None:
        """The URL under which devices reach a listener; None where it is off."""
        host = self.host_of(listener)
        return None if listener.port is None else f"https://{f'[{host}]' if ':' in host else host}:{listener.port}"


def load_config(path: Path) -> CoordinatorConfig:
    """Read coordinator.toml.

    Raises:
        ConfigError: not TOML, or values out of their bounds; names every error. Or nothing is set, as after a write that was cut off.
    """
    config = read_toml(path, CoordinatorConfig, ConfigError)
    if not config.model_fields_set:
        advice = "restore it from a backup, or take that of a new `fedcg coordinator init` in another directory"
        raise ConfigError(listed(str(path), [f"line 1: nothing is set, as after a write that was cut off: {advice}"]))
    return config


def check_api_host(api: ApiSettings) -> None:
    """Refuse to show the HTTP interface to a network without encryption: tokens travel in its requests.

    Raises:
        ConfigError: the host is not a loopback address, and there is neither a certificate nor a proxy.
    """
    if api.host not in LOOPBACK_HOSTS and api.certificate is None and api.proxy is None:
        raise ConfigError(
            f"api.host = {api.host!r}: tokens would travel in the clear; set `certificate` and `key` under [api], or name the "
            "reverse proxy in front of it as `proxy`, or use 127.0.0.1 and reach it through an SSH tunnel"
        )


def render_config(config: CoordinatorConfig) -> str:
    """coordinator.toml with comments; a setting without a value is a comment with the one that the template shows."""
    template = files("coordinator").joinpath("coordinator.toml.template").read_text(encoding="utf-8")
    values = config.model_dump(mode="json")

    def line(setting: re.Match[str]) -> str:
        section, name, example = setting.groups()
        value = values[name] if section == "top" else values[section][name]
        return f"# {name} = {example}" if value is None else f"{name} = {_toml(value)}"

    return re.sub(r"(?m)^\$([a-z]+)\.(\w+)(?: = (.*))?$", line, template)


def _toml(value: object) -> str:
    """A value in TOML, whose strings, numbers and lists are those of JSON."""
    if not isinstance(value, dict):
        return json.dumps(value)
    return f"{{{', '.join(f'{json.dumps(name)} = {_toml(item)}' for name, item in value.items())}}}"
