"""The coordinator's configuration file: its schema, reading it with all errors at once, writing a commented one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from coordinator.errors import ConfigError
from coordinator.pacing import GATHER_S, RETRY_S
from fedcg.toml_problems import read_toml
from fedcg.watchdog import STALL_S
from fedcg.wire.messages import MAX_CHUNK_BYTES
from fedcg.wire.presets import DEFAULT_PRESET, LinkLimits, PresetName, limits_for

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - boxes are on other machines; TLS and a token are asked of each
KEEP_ROUNDS = 10
Port = Annotated[int, Field(ge=1, le=65535)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BrokerSettings(_Section):
    """Where the broker is and how it is spoken to.

    Attributes:
        lists: for a broker of the operator's own: a directory that gets access list and revocation list after every change.
        pid_file: for such a broker on this machine: where its process id is, to send it SIGHUP after every change.
        preset: limits of a known broker or service.
        chunk_bytes, window_chunks, window_bytes: single limits in place of the preset's.
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Port = 8883
    protocol: Literal["auto", "5", "3.1.1"] = "auto"
    lists: Annotated[str, Field(min_length=1)] | None = None
    pid_file: Annotated[str, Field(min_length=1)] | None = None
    preset: PresetName = DEFAULT_PRESET
    chunk_bytes: Annotated[int, Field(ge=1024, le=MAX_CHUNK_BYTES)] | None = None
    window_chunks: Annotated[int, Field(ge=1, le=256)] | None = None
    window_bytes: Annotated[int, Field(ge=1024, le=64_000_000)] | None = None

    @property
    def limits(self) -> LinkLimits:
        """The limits of the preset, with this section's own settings in their place."""
        return limits_for(self.preset, self.chunk_bytes, self.window_chunks, self.window_bytes)


class ApiSettings(_Section):
    """Where the HTTP interface listens.

    Attributes:
        host: a loopback address.
        port: where it listens.
        names: further host names that requests may name in their Host header.
    """

    host: str = "127.0.0.1"
    port: Port = 8440
    names: tuple[Annotated[str, Field(min_length=1)], ...] = ()


class ConnectionSettings(_Section):
    """How many TCP connections may be open at once; see `fedcg.listening.Caps`.

    Attributes:
        total: at the HTTP interface, the enrolment listener and the carrier together; half of the descriptors is a bound too.
        per_address: of one address at one listener, before it shows a certificate. Sites behind one NAT share it.
        per_device: with the certificate of one device.
    """

    total: Annotated[int, Field(ge=16, le=32_768)] = 2048
    per_address: Annotated[int, Field(ge=1, le=32_768)] = 512
    per_device: Annotated[int, Field(ge=2, le=64)] = 8


class ListenerSettings(_Section):
    """An HTTPS listener for boxes; off without a port.

    Attributes:
        port: where it listens.
        listen: the address it listens on; default 127.0.0.1 when boxes reach it there, else every address.
        host: name or address under which boxes reach it; default `broker.host`.
    """

    port: Port | None = None
    listen: Annotated[str, Field(min_length=1)] | None = None
    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:_-]{1,253}$")] | None = None

    def address(self, host: str) -> str:
        """The address that it listens on, when boxes reach it under `host`."""
        return self.listen or ("127.0.0.1" if host in LOOPBACK_HOSTS else EVERY_ADDRESS)

    def url(self, host: str) -> str | None:
        """Where boxes reach it, under `host`; None when nothing listens."""
        if self.port is None:
            return None
        return f"https://{f'[{host}]' if ':' in host else host}:{self.port}"


class CarrierSettings(ListenerSettings):
    """The HTTPS listener that carries artifacts of devices with `carrier = "https"`."""


class EnrolmentSettings(ListenerSettings):
    """The HTTPS listener at which boxes enrol by token and renew their certificates.

    Attributes:
        certificate_days: life of a device's certificate; it is renewed in the last third.
    """

    certificate_days: Annotated[float, Field(gt=0, le=825)] = 30.0


class AggregationSettings(_Section):
    """What the aggregation worker may use.

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


class RobustnessSettings(_Section):
    """How much one device may weigh in a merge; a large number switches a bound off.

    Attributes:
        weight_medians: a device counts for at most so many times the median number of examples of the attempt.
        max_share: a device counts for at most this share of all examples.
        examples: numbers of examples by device that stand in the place of what the devices report; they are not capped.
        clip_medians: an update farther from the base than so many times the median of the last closed round (in the first: of its
            own) is scaled back.
    """

    weight_medians: Annotated[float, Field(ge=1, le=1e9)] = 3.0
    max_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    examples: dict[str, Annotated[int, Field(ge=1, le=1 << 40)]] = {}
    clip_medians: Annotated[float, Field(ge=1, le=1e9)] = 2.5


class StorageSettings(_Section):
    """What stays on the disk.

    Attributes:
        keep_rounds: closed rounds whose updates and aggregates stay; older ones are deleted when a round closes.
    """

    keep_rounds: Annotated[int, Field(ge=1, le=1_000_000)] = KEEP_ROUNDS


class RoundSettings(_Section):
    """How long rounds wait before they open.

    Attributes:
        gather_s: with the quorum online, for further enrolled devices after the last one came.
        retry_s: after a failed attempt; doubles with each failed attempt of the round, up to 10 minutes.
    """

    gather_s: Annotated[float, Field(ge=0, le=3600)] = GATHER_S
    retry_s: Annotated[float, Field(ge=0, le=600)] = RETRY_S


class CoordinatorConfig(_Section):
    """coordinator.toml."""

    broker: BrokerSettings = BrokerSettings()
    api: ApiSettings = ApiSettings()
    enrolment: EnrolmentSettings = EnrolmentSettings()
    carrier: CarrierSettings = CarrierSettings()
    connections: ConnectionSettings = ConnectionSettings()
    aggregation: AggregationSettings = AggregationSettings()
    robustness: RobustnessSettings = RobustnessSettings()
    storage: StorageSettings = StorageSettings()
    rounds: RoundSettings = RoundSettings()

    @property
    def enrolment_host(self) -> str:
        """The name under which boxes reach the enrolment listener."""
        return self.enrolment.host or self.broker.host

    @property
    def enrolment_url(self) -> str | None:
        """Where boxes enrol and renew; None when nothing listens."""
        return self.enrolment.url(self.enrolment_host)

    @property
    def carrier_host(self) -> str:
        """The name under which boxes reach the carrier's listener."""
        return self.carrier.host or self.broker.host

    @property
    def carrier_url(self) -> str | None:
        """Where artifacts of devices with `carrier = "https"` are fetched and put; None when nothing listens."""
        return self.carrier.url(self.carrier_host)


def load_config(path: Path) -> CoordinatorConfig:
    """Read coordinator.toml.

    Raises:
        ConfigError: not TOML, or values out of their bounds; names every error.
    """
    return read_toml(path, CoordinatorConfig, ConfigError)


def check_api_host(host: str) -> None:
    """Refuse to show the HTTP interface to a network.

    Raises:
        ConfigError: the host is not a loopback address.
    """
    if host not in LOOPBACK_HOSTS:
        raise ConfigError(
            f"api.host = {host!r}: the HTTP interface has no authentication yet, so it listens on loopback only; "
            "use 127.0.0.1 and reach it through an SSH tunnel"
        )


def _line(name: str, value: int | None, example: int) -> str:
    return f"# {name} = {example}" if value is None else f"{name} = {value}"


def _listener(settings: ListenerSettings, usual_port: int) -> str:
    listen, host = settings.listen or EVERY_ADDRESS, settings.host or "coordinator.example"
    return f"""{_line("port", settings.port, usual_port)}
# The address to listen on; default 127.0.0.1 when the name below is this machine's own, else every address.
{"" if settings.listen else "# "}listen = {json.dumps(listen)}
# The name under which boxes reach it; default broker.host.
{"" if settings.host else "# "}host = {json.dumps(host)}"""


def render_config(config: CoordinatorConfig) -> str:
    """coordinator.toml with comments."""
    public = config.aggregation.public_data
    enrolment, broker = config.enrolment, config.broker
    lists_line = f"lists = {json.dumps(broker.lists)}" if broker.lists else '# lists = "/etc/mosquitto/fedcg"'
    pid_line = f"pid_file = {json.dumps(broker.pid_file)}" if broker.pid_file else '# pid_file = "/run/mosquitto.pid"'
    public_line = f"public_data = {json.dumps(public)}" if public else '# public_data = "public"'
    return f"""# Configuration of a FedCG Edge coordinator.

[broker]
host = "{config.broker.host}"
port = {config.broker.port}
# "auto" tries MQTT 5 first, then 3.1.1.
protocol = "{config.broker.protocol}"
# For a Mosquitto of your own (`fedcg deploy mosquitto`): where its access list and revocation list are kept up to date, and
# where its process id is, so that it reads them after every change. `fedcg broker run` needs neither.
{lists_line}
{pid_line}
# What the broker takes: "mosquitto", "aws-iot", "azure-event-grid" or "emqx".
preset = "{config.broker.preset}"
{_line("chunk_bytes", config.broker.chunk_bytes, 32_768)}
{_line("window_chunks", config.broker.window_chunks, 16)}
{_line("window_bytes", config.broker.window_bytes, 1_900_000)}

[api]
# Loopback only: the HTTP interface has no authentication.
host = "{config.api.host}"
port = {config.api.port}
# Further host names under which it is asked, e.g. by a proxy on this machine: others in the Host header are refused.
names = {json.dumps(config.api.names)}

[enrolment]
# HTTPS for boxes: enrolment by token (`fedcg token create`) and renewal of certificates. Off without a port.
{_listener(enrolment, 8444)}
# Life of a device's certificate; the agent renews it in the last third.
certificate_days = {enrolment.certificate_days}

[carrier]
# HTTPS that carries the artifacts of boxes with `carrier = "https"` in their agent.toml. Off without a port.
{_listener(config.carrier, 8445)}

[connections]
# Open TCP connections: of all three listeners together (at most half of the process's descriptors), of one address at one
# listener before it shows a certificate (sites behind one NAT share it), and with one device's certificate.
total = {config.connections.total}
per_address = {config.connections.per_address}
per_device = {config.connections.per_device}

[aggregation]
# Results repeat bit for bit only with the same number of threads on the same device.
threads = {config.aggregation.threads}
device = "{config.aggregation.device}"
# Unlabelled images, a folder or an .npz, for methods that distil on some (feddf); must stay as they are while a round runs.
{public_line}
public_images = {config.aggregation.public_images}
# The worker is replaced when it has work and gives no sign of life for so many seconds.
stall_s = {config.aggregation.stall_s}

[robustness]
# A device counts for at most so many times the median number of examples, and for at most this share of all examples.
weight_medians = {config.robustness.weight_medians}
max_share = {config.robustness.max_share}
# Numbers of examples that stand in the place of what these devices report; they are not capped.
examples = {{{", ".join(f"{json.dumps(name)} = {count}" for name, count in config.robustness.examples.items())}}}
# An update farther from the base than so many times the last round's median is scaled back. A large number switches this off.
clip_medians = {config.robustness.clip_medians}

[storage]
# Updates and aggregates of so many closed rounds stay on the disk; older ones are deleted. What a restart needs always stays.
keep_rounds = {config.storage.keep_rounds}

[rounds]
# A round opens when all enrolled devices are online, or min_clients are and no further one came for so many seconds.
gather_s = {config.rounds.gather_s}
# Seconds until the next attempt after a failed one; doubles with each failed attempt of a round, up to 600.
retry_s = {config.rounds.retry_s}
"""
