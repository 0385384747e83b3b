"""The agent's configuration: `agent.toml` plus `FEDCG_AGENT_*` from the environment, all problems listed at once.

Relative paths are relative to the file. Knows nothing of networks or training; reading it reads no other file.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from audit.choices import ATTACKS, EXTRA, missing_packages, parse_gate
from audit.errors import GateFormError
from devices.eligibility import EligibilitySettings
from edge_client.errors import ConfigError
from fedcg.config_file import Settings, from_text, nearest, read_toml, section_of
from fedcg.learning.defences.defence import check_defence
from fedcg.learning.privacy import OFF, PrivacySettings
from fedcg.learning.program import PREFIX, PROGRAM_PATTERN
from fedcg.learning.spec import METHOD_PATTERN, ParameterValue
from fedcg.wire.messages.enrolment_messages import URL_PATTERN, Host, PresetName
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES, MAX_CHUNK_BYTES, Carrier, Identifier
from fedcg.wire.parts import (
    DEFAULT_ALLOW_REPORT,
    DEFAULT_ALLOW_UPLOAD,
    MAX_SUM_DEVICES,
    MIN_SUM_DEVICES,
    Part,
    ReportField,
)
from fedcg.wire.transfer.windows import DEFAULT_PRESET, LinkLimits, limits_for
from fedcg.wire.transport.mqtt_config import TlsFiles, is_loopback
from fedcg.worker_process import STALL_S

ENVIRONMENT_PREFIX = "FEDCG_AGENT_"


class BrokerSection(Settings):
    """The address of the MQTT broker; without TLS only on this machine and only with `insecure`."""

    host: Annotated[Host, Field(description="host name or address of the broker")]
    port: Annotated[int, Field(ge=1, le=65535, description="usually 8883")] = 8883
    protocol: Annotated[Literal["auto", "5", "3.1.1"], Field(description="MQTT version")] = "auto"
    keepalive_s: Annotated[int, Field(ge=5, le=3600)] = 30
    insecure: Annotated[bool, Field(description="no TLS; loopback only")] = False
    preset: Annotated[PresetName, Field(description="limits of mosquitto, aws-iot, azure-event-grid or emqx")] = (
        DEFAULT_PRESET
    )
    chunk_bytes: Annotated[
        int | None, Field(ge=1024, le=MAX_CHUNK_BYTES, description="largest chunk; small ones suit slow links")
    ] = None
    window_chunks: Annotated[int | None, Field(ge=1, le=256, description="chunks under way at most")] = None
    window_bytes: Annotated[int | None, Field(ge=1024, le=64_000_000, description="bytes under way at most")] = None

    @property
    def limits(self) -> LinkLimits:
        """The limits of the preset, with this section's own settings in their place."""
        return limits_for(self.preset, self.chunk_bytes, self.window_chunks, self.window_bytes)

    @model_validator(mode="after")
    def _plain_text_stays_on_this_machine(self) -> BrokerSection:
        if self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"insecure = true is only for a broker on this machine, {self.host!r} is another one: use TLS"
            )
        return self


class TlsSection(Settings):
    """Files of the mutual TLS connection."""

    ca: Path
    cert: Path
    key: Path

    @property
    def files(self) -> TlsFiles:
        """The same for a connection."""
        return TlsFiles(self.ca, self.cert, self.key)


class KeysSection(Settings):
    """Ed25519 keys of the signed envelopes: this device's own, and the coordinator's public one."""

    signing: Path = Path("signing.key")
    coordinator: Path = Path("coordinator.pub")


class EnrolmentSection(Settings):
    """Where the agent renews its certificate; without a URL a person brings a new one."""

    url: Annotated[str | None, Field(pattern=URL_PATTERN, description="https://HOST:PORT of the coordinator")] = None


class DataSection(Settings):
    """This device's images: `class/*.png|jpg`, `train/` and `test/` of such, or an `.npz`.

    docs/how-to/data.md has every form. `common_test` is for demos.

    Attributes:
        defence: what rewrites the training images before any method sees them; None: nothing does.
        defence_params: its parameters.
        defence_stem: file with weights for its pretrained convolution; None: the installed package's.
    """

    root: Path
    common_test: Path | None = None
    defence: Annotated[str | None, Field(description="a data defence: antigan, ats, etc")] = None
    defence_params: dict[str, ParameterValue] = Field(default_factory=dict)
    defence_stem: Path | None = None

    @model_validator(mode="after")
    def _defence_can_be_had(self) -> DataSection:
        check_defence(self.defence, self.defence_params, dp_sgd=False)
        return self


class PolicySection(Settings):
    """The data that may ever leave this device, and the largest cost of a round, for every spec.

    The published settings need 20 epochs or 20 steps a round; ResNet-18 with its generator downloads 57 MB. A spec beyond it waits
    for `fedcg agent approve`; the two limits of a day, and `max_download_mb`, hold for an approved one too.

    Attributes:
        federations, methods: names that are accepted without approval; empty: the configured federation, every method.
    """

    federations: frozenset[Identifier] = frozenset()
    methods: frozenset[Annotated[str, Field(pattern=METHOD_PATTERN)]] = frozenset()

    allow_upload: frozenset[Part] = DEFAULT_ALLOW_UPLOAD
    allow_report: frozenset[ReportField] = DEFAULT_ALLOW_REPORT
    max_epochs: Annotated[int, Field(ge=1, le=1 << 31, description="local epochs of one round at most")] = 200
    max_steps: Annotated[
        int, Field(ge=1, le=1 << 31, description="local steps of one round at most, where steps are asked for")
    ] = 100_000
    max_batch: Annotated[int, Field(ge=2, le=1 << 31, description="largest local batch")] = 4096
    max_download_mb: Annotated[
        int, Field(ge=1, le=MAX_ARTIFACT_BYTES // 1_000_000, description="largest aggregate, in MB")
    ] = 128
    least_sum: Annotated[
        int,
        Field(ge=MIN_SUM_DEVICES, le=MAX_SUM_DEVICES, description="fewest devices of a sealed sum that this one is in"),
    ] = MIN_SUM_DEVICES
    least_share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="least share of the local steps of a round with a sealed sum: one that trains less stands still",
        ),
    ] = 0.05
    max_upload_mb_per_day: Annotated[
        int | None, Field(ge=1, le=1 << 31, description="updates sent in a day (UTC), in MB")
    ] = None
    max_download_mb_per_day: Annotated[
        int | None, Field(ge=1, le=1 << 31, description="chunks received in a day (UTC), in MB")
    ] = None


AUTO = "auto"


class TrainingSection(Settings):
    """Where training runs, and how often a local-only shadow is trained beside it for comparison."""

    shadow_every: Annotated[
        int,
        Field(ge=0, le=1000, description="rounds from one training of the local-only shadow to the next; 0 = never"),
    ] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto, cpu or cuda")] = "auto"
    threads: Annotated[int, Field(ge=0, le=256, description="0 = chosen for this device")] = 0
    precision: Annotated[
        Literal["f32", "bf16"],
        Field(description="of training steps: f32, or bf16 where the CPU or GPU has instructions for it"),
    ] = "f32"
    priority: Annotated[
        Literal["normal", "low", "idle"],
        Field(
            description="of the training process: as other programs, after them (nice 10), or only with the time that they leave"
        ),
    ] = "low"
    duty_cycle: Annotated[
        float,
        Field(gt=0.01, le=1.0, description="share of the time that training may take; the process sleeps for the rest"),
    ] = 1.0
    stall_s: Annotated[
        float, Field(ge=1, le=86_400, description="seconds without progress after which training is started again")
    ] = STALL_S
    program: Annotated[
        str | None,
        Field(
            pattern=PROGRAM_PATTERN,
            description="module:function that states network and data (docs/how-to/python.md), from an installed package or the folder of this "
            "file; it takes the place of [data] root",
        ),
    ] = None
    weights: Annotated[
        Path | None,
        Field(description="file or folder with weights that specs pin; installed packages are found without it"),
    ] = None
    backbone: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9_.:@]{1,160}$",
            description="of those that the federation allows; auto: by this device's hardware",
        ),
    ] = AUTO
    checkpoint_s: Annotated[
        float, Field(ge=0, le=86_400, description="seconds between checkpoints inside a round; 0 = none")
    ] = 60.0


class AuditSection(Settings):
    """Whether this device attacks its own update before it sends it, and the gate that keeps an update back.

    Attributes:
        gate: conditions on the figures, in the form of `fedcg audit run --gate`; where one does not hold, nothing is sent.
        auxiliary: labelled images that an attacker could have; without them, attacks that need them are not tried.
        attacks: names of `fedcg audit attacks`; all where none is named.
    """

    before_publish: Annotated[Literal["off", "quick"], Field(description="off, or quick: about a minute a round")] = (
        "off"
    )
    gate: Annotated[str, Field(description="e.g. label_l1_gain<0.05,reid_gain<0.02")] = ""
    auxiliary: Path | None = None
    attacks: tuple[str, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether updates are audited."""
        return self.before_publish != "off"

    @property
    def obstacle(self) -> str:
        """Why this device can't make its audit, with the remedy; empty where it can."""
        missing = missing_packages() if self.is_on else ()
        if missing:
            return f"[audit] before_publish = \"{self.before_publish}\" needs {' and '.join(missing)}: pip install '{EXTRA}'"
        if self.is_on and self.auxiliary is not None and not self.auxiliary.exists():
            return f"[audit] auxiliary: there is no {self.auxiliary}; correct the path, or leave it out"
        return ""

    @field_validator("gate")
    @classmethod
    def _gate_is_readable(cls, gate: str) -> str:
        try:
            parse_gate(gate)
        except GateFormError as error:
            raise ValueError(str(error)) from error
        return gate

    @field_validator("attacks")
    @classmethod
    def _attacks_exist(cls, attacks: tuple[str, ...]) -> tuple[str, ...]:
        if strange := [name for name in attacks if name not in ATTACKS]:
            raise ValueError(f"no attack {strange[0]!r}; there are {', '.join(ATTACKS)}")
        return attacks

    @model_validator(mode="after")
    def _a_gate_is_applied(self) -> AuditSection:
        if self.gate and not self.is_on:
            raise ValueError('gate has no effect while before_publish is "off": set "quick", or leave the gate out')
        return self


class ExportSection(Settings):
    """How the personal model becomes an ONNX model.

    Attributes:
        enabled: at all.
        each_best: after every round that made it better, not only at the end.
        variants: try float16 and int8 forms of the last one.
        gate_points: points of accuracy on this device's test images that a new model may lose against the one in use.
    """

    enabled: bool = True
    each_best: bool = True
    variants: bool = True
    gate_points: Annotated[float, Field(ge=0, le=100)] = 1.0


class AgentConfig(Settings):
    """Everything in `agent.toml`."""

    federation: Identifier
    device: Identifier
    store: Path = Path("store")
    carrier: Annotated[
        Carrier, Field(description="how artifacts travel: mqtt (over the broker) or https (to the coordinator)")
    ] = Carrier.MQTT
    carrier_url: Annotated[
        str | None, Field(pattern=URL_PATTERN, description="https://HOST:PORT of the coordinator's carrier")
    ] = None
    broker: BrokerSection
    tls: TlsSection | None = None
    enrolment: EnrolmentSection = EnrolmentSection()
    keys: KeysSection = KeysSection()
    data: DataSection
    policy: PolicySection = PolicySection()
    training: TrainingSection = TrainingSection()
    export: ExportSection = ExportSection()
    audit: AuditSection = AuditSection()
    privacy: PrivacySettings = OFF
    eligibility: EligibilitySettings = EligibilitySettings()
    metrics_folder: Annotated[
        Path | None, Field(description="readings for Prometheus: the folder of the node exporter's textfile collector")
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _data_is_the_programs(cls, values: Any) -> Any:
        training: Any = values.get("training") if isinstance(values, dict) else None
        if not isinstance(training, dict) or not isinstance(training.get("program"), str):
            return values
        data = values.get("data")
        return {**values, "data": {**(data if isinstance(data, dict) else {}), "root": PREFIX + training["program"]}}

    @field_validator("store")
    @classmethod
    def _store_has_a_folder(cls, store: Path) -> Path:
        if store == Path():
            raise ValueError('it names no folder of its own: set a new one, such as "store"')
        return store

    @property
    def privacy_obstacle(self) -> str:
        """Why this device can't train with its mechanisms, with the remedy; empty where it can."""
        is_missing = self.privacy.dp_sgd is not None and find_spec("opacus") is None
        return "[privacy.dp_sgd] needs opacus: pip install 'fedcg-edge[privacy]'" if is_missing else ""

    @property
    def training_lock(self) -> Path:
        """Held by a training process at work; the federations of one device share it, like the identity that it lies beside."""
        beside = self.keys.signing if self.tls is None else self.tls.cert
        return beside.with_name(".training.lock")

    @model_validator(mode="after")
    def _epsilon_covers_the_images(self) -> AgentConfig:
        check_defence(self.data.defence, self.data.defence_params, dp_sgd=self.privacy.dp_sgd is not None)
        return self

    @model_validator(mode="after")
    def _tls_unless_insecure(self) -> AgentConfig:
        if self.tls is None and not self.broker.insecure:
            raise ValueError(
                "a [tls] table with ca, cert and key is missing (only broker.insecure = true does without it)"
            )
        if self.tls is not None and self.broker.insecure:
            raise ValueError(
                "broker.insecure = true would send in plain text although there is a [tls] table; leave one out"
            )
        if self.carrier is Carrier.HTTPS and (self.carrier_url is None or self.tls is None):
            missing = "carrier_url" if self.tls is not None else "a [tls] table"
            raise ValueError(
                f'carrier = "https" needs {missing}: the operator knows the address (`fedcg coordinator run` prints it)'
            )
        return self


SettingsT = TypeVar("SettingsT", bound=Settings)


def _anchored(settings: SettingsT, base: Path) -> SettingsT:
    """The same settings with every relative path taken relative to `base`."""
    changed: dict[str, object] = {}
    for name, value in settings:
        if isinstance(value, Path):
            changed[name] = base / value
        elif isinstance(value, Settings):
            changed[name] = _anchored(value, base)
    return settings.model_copy(update=changed)


def load_config(path: Path, environment: Mapping[str, str]) -> AgentConfig:
    """Read `agent.toml`; settings in `environment` (`FEDCG_AGENT_BROKER_HOST`, ...) win over the file.

    Raises:
        ConfigError: lists every problem with its line or variable and a hint.
    """
    config = read_toml(path, AgentConfig, ConfigError, lambda values: _apply_environment(values, environment))
    return _anchored(config, path.resolve().parent)


def environment_names() -> dict[str, tuple[str, ...]]:
    """Every environment variable that is understood, and the setting it stands for."""
    names: dict[str, tuple[str, ...]] = {}
    for key in AgentConfig.model_fields:
        section = section_of(AgentConfig, (key,))
        settings = [(key,)] if section is AgentConfig else [(key, inner) for inner in section.model_fields]
        names |= {f"{ENVIRONMENT_PREFIX}{'_'.join(setting).upper()}": setting for setting in settings}
    return names


def _apply_environment(
    values: dict[str, Any], environment: Mapping[str, str]
) -> tuple[dict[tuple[str, ...], str], list[str]]:
    known = environment_names()
    origins: dict[tuple[str, ...], str] = {}
    problems: list[str] = []
    for name, text in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        setting = known.get(name)
        if setting is None:
            problems.append(f"environment: {name}: there is no such setting ({nearest(name, tuple(known))})")
            continue
        table: Any = values
        for step in setting[:-1]:
            table = table.setdefault(step, {})
        if isinstance(table, dict):
            table[setting[-1]] = from_text(section_of(AgentConfig, setting[:-1]), setting[-1], text)
            origins[setting] = f"${name}"
    return origins, problems
