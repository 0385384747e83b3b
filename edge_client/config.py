"""The agent's configuration: `agent.toml` plus `FEDCG_AGENT_*` environment variables. All problems are reported at once.

Relative paths are relative to the file. Independent of networks and training. Reading it reads no other file.
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
    """The address of the MQTT broker. Without TLS only on this machine, with `insecure`.

    Attributes:
        protocol: MQTT version; auto tries 5 first, then 3.1.1.
        keepalive_s: seconds between heartbeats to the coordinator, also the keepalive of MQTT.
        insecure: connect without TLS; only if the broker is on this machine.
        preset: limits of this kind of broker; use the coordinator's value.
        chunk_bytes: largest chunk in bytes, small for slow links. Default: the preset's.
        window_chunks: maximum number of chunks in transit. Default: the preset's.
        window_bytes: maximum number of bytes in transit. Default: the preset's.
    """

    host: Annotated[Host, Field(description="host name or address of the broker")]
    port: Annotated[int, Field(ge=1, le=65535, description="usually 8883")] = 8883
    protocol: Annotated[Literal["auto", "5", "3.1.1"], Field(description="MQTT version")] = "auto"
    keepalive_s: Annotated[int, Field(ge=5, le=3600)] = 30
    insecure: Annotated[bool, Field(description="no TLS; loopback only")] = False
    preset: Annotated[PresetName, Field(description="limits of mosquitto, aws-iot, azure-event-grid or emqx")] = (
        DEFAULT_PRESET
    )
    chunk_bytes: Annotated[
        int | None,
        Field(ge=1024, le=MAX_CHUNK_BYTES, description="largest chunk in bytes; use small chunks on slow links"),
    ] = None
    window_chunks: Annotated[int | None, Field(ge=1, le=256, description="maximum number of chunks in transit")] = None
    window_bytes: Annotated[
        int | None, Field(ge=1024, le=64_000_000, description="maximum number of bytes in transit")
    ] = None

    @property
    def limits(self) -> LinkLimits:
        """The limits of the preset, overridden by this section's settings."""
        return limits_for(self.preset, self.chunk_bytes, self.window_chunks, self.window_bytes)

    @model_validator(mode="after")
    def _plain_text_stays_on_this_machine(self) -> BrokerSection:
        if self.insecure and not is_loopback(self.host):
            raise ValueError(f"insecure = true is only for a broker on this machine, not for {self.host!r}: use TLS")
        return self


class TlsSection(Settings):
    """Files of the mutual TLS connection.

    Attributes:
        ca: PEM file with the CA certificate against which this device checks broker and coordinator.
        cert: PEM file with this device's certificate.
        key: PEM file with its private key.
    """

    ca: Path
    cert: Path
    key: Path

    @property
    def files(self) -> TlsFiles:
        """The files in the form that a connection needs."""
        return TlsFiles(self.ca, self.cert, self.key)


class KeysSection(Settings):
    """Ed25519 keys for signed envelopes: this device's key, and the coordinator's public key.

    Attributes:
        signing: file with this device's private Ed25519 key, which signs its messages.
        coordinator: file with the coordinator's public key, which checks the coordinator's messages.
    """

    signing: Path = Path("signing.key")
    coordinator: Path = Path("coordinator.pub")


class EnrolmentSection(Settings):
    """Where the agent renews its certificate. Without a URL, a person installs new certificates.

    Attributes:
        url: https://HOST:PORT of the coordinator's enrolment listener, for renewals of the certificate. Default: no automatic renewal.
    """

    url: Annotated[str | None, Field(pattern=URL_PATTERN, description="https://HOST:PORT of the coordinator")] = None


class DataSection(Settings):
    """This device's images: `class/*.png|jpg`, `train/` and `test/` folders with classes, or an `.npz`.

    docs/how-to/data.md describes all forms.

    Attributes:
        root: folder or .npz file with this device's data (docs/how-to/data.md); not used with `program` under [training].
        common_test: test data that all devices share, in the same forms; only for demos. Default: none.
        defence: antigan, ats or etc rewrites the training images before the method uses them (docs/how-to/protect.md). Default: none.
        defence_params: parameters of the defence, in the table [data.defence_params] (docs/reference/defences.md).
        defence_stem: file with the weights of the pretrained convolution that antigan uses. Default: those of an installed package.
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
    """The data that may leave this device, and the largest cost of a round, for all specs.

    The published settings need 20 epochs or 20 steps per round. ResNet-18 with its generator downloads 57 MB. A spec that exceeds the policy
    waits for `fedcg agent approve`. The two daily limits and `max_download_mb` also apply to approved specs.

    Attributes:
        federations: ids of the federations whose specs need no approval; empty: only `federation` above.
        methods: names of the methods that need no approval; empty: all.
        allow_upload: parts that may leave this device (docs/explanation/what-leaves.md).
        allow_report: report fields that may leave this device (docs/explanation/what-leaves.md).
        least_share: decline a round with a sealed sum that trains less than this share of the usual local steps.
    """

    federations: frozenset[Identifier] = frozenset()
    methods: frozenset[Annotated[str, Field(pattern=METHOD_PATTERN)]] = frozenset()

    allow_upload: frozenset[Part] = DEFAULT_ALLOW_UPLOAD
    allow_report: frozenset[ReportField] = DEFAULT_ALLOW_REPORT
    max_epochs: Annotated[int, Field(ge=1, le=1 << 31, description="maximum number of local epochs per round")] = 200
    max_steps: Annotated[
        int, Field(ge=1, le=1 << 31, description="maximum number of local steps per round, if a spec sets steps")
    ] = 100_000
    max_batch: Annotated[int, Field(ge=2, le=1 << 31, description="largest local batch")] = 4096
    max_download_mb: Annotated[
        int, Field(ge=1, le=MAX_ARTIFACT_BYTES // 1_000_000, description="largest aggregate, in MB")
    ] = 128
    least_sum: Annotated[
        int, Field(ge=MIN_SUM_DEVICES, le=MAX_SUM_DEVICES, description="minimum number of devices in a sealed sum")
    ] = MIN_SUM_DEVICES
    least_share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="minimum share of the local steps in a round with a sealed sum, so that the numbers change enough",
        ),
    ] = 0.05
    max_upload_mb_per_day: Annotated[
        int | None, Field(ge=1, le=1 << 31, description="most MB of updates to send per day (UTC)")
    ] = None
    max_download_mb_per_day: Annotated[
        int | None, Field(ge=1, le=1 << 31, description="most MB of chunks to receive per day (UTC)")
    ] = None


AUTO = "auto"


class TrainingSection(Settings):
    """Where training runs, and how often a local-only model is also trained for comparison.

    Attributes:
        shadow_every: train the local-only model in the first round and in every n-th after it, for comparison; 0: never.
        device: cpu, cuda (a GPU), or auto for a GPU if there is one.
        program: module:function that defines network and data (docs/how-to/programs.md), from an installed package or the folder of this
            file; used instead of `root` under [data].
    """

    shadow_every: Annotated[
        int, Field(ge=0, le=1000, description="rounds between trainings of the local-only model; 0 = never")
    ] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto, cpu or cuda")] = "auto"
    threads: Annotated[int, Field(ge=0, le=256, description="CPU threads; 0 = chosen for this device")] = 0
    priority: Annotated[
        Literal["normal", "low", "idle"],
        Field(
            description="priority of the training process: like other programs, lower (nice 10), or only in idle CPU time"
        ),
    ] = "low"
    duty_cycle: Annotated[
        float, Field(gt=0.01, le=1.0, description="share of time for training; the process sleeps for the rest")
    ] = 1.0
    stall_s: Annotated[
        float, Field(ge=1, le=86_400, description="seconds without progress after which training is restarted")
    ] = STALL_S
    program: Annotated[
        str | None,
        Field(
            pattern=PROGRAM_PATTERN,
            description="module:function that defines network and data (docs/how-to/python.md), from an installed package or the folder of this "
            "file; used instead of [data] root",
        ),
    ] = None
    weights: Annotated[
        Path | None, Field(description="file or folder with weights that specs pin; not needed for installed packages")
    ] = None
    backbone: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9_.:@]{1,160}$",
            description="one of the backbones that the federation allows; auto: chosen by this device's hardware",
        ),
    ] = AUTO
    checkpoint_s: Annotated[
        float, Field(ge=0, le=86_400, description="seconds between checkpoints inside a round; 0 = none")
    ] = 60.0


class AuditSection(Settings):
    """Whether this device attacks its own update before sending it, and the gate that can withhold an update.

    Attributes:
        before_publish: quick: attack each update before it is sent, at most 3 minutes per round; off: do not.
        gate: conditions on the figures, as in `fedcg audit run --gate`, such as mia_auc<0.75. If one is not met, nothing is sent.
        auxiliary: labelled images that an attacker could have, as under [data]. Without them, attacks that need them are skipped.
        attacks: names from `fedcg audit attacks`; empty: all.
    """

    before_publish: Annotated[
        Literal["off", "quick"], Field(description="off, or quick: at most 3 minutes per round")
    ] = "off"
    gate: Annotated[str, Field(description="e.g. mia_auc<0.75; take bounds from your own reports")] = ""
    auxiliary: Path | None = None
    attacks: tuple[str, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether updates are audited."""
        return self.before_publish != "off"

    @property
    def obstacle(self) -> str:
        """Why this device can't run its audit, with the remedy; empty if it can."""
        missing = missing_packages() if self.is_on else ()
        if missing:
            return f"[audit] before_publish = \"{self.before_publish}\" needs {' and '.join(missing)}: pip install '{EXTRA}'"
        if self.is_on and self.auxiliary is not None and not self.auxiliary.exists():
            return f"[audit] auxiliary: {self.auxiliary} not found; correct or omit the path"
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
            raise ValueError(f"unknown attack {strange[0]!r}; available: {', '.join(ATTACKS)}")
        return attacks

    @model_validator(mode="after")
    def _a_gate_is_applied(self) -> AuditSection:
        if self.gate and not self.is_on:
            raise ValueError('gate has no effect while before_publish is "off": set "quick", or omit the gate')
        return self


class ExportSection(Settings):
    """Export of the personal model to ONNX.

    Attributes:
        enabled: export the personal model to ONNX.
        each_best: export after every round that improved the model, not only at the end.
        variants: try float16 and int8 variants of the last model.
        gate_points: percentage points of accuracy on this device's test images that a new model may lose against the deployed one.
    """

    enabled: bool = True
    each_best: bool = True
    variants: bool = True
    gate_points: Annotated[float, Field(ge=0, le=100)] = 1.0


class AgentConfig(Settings):
    """`fedcg enrol` writes the configuration of a device, and its owner edits it. Restart the agent after a change.

    Paths are relative to the file. An environment variable such as `FEDCG_AGENT_BROKER_HOST` replaces a value. The defaults are those of absent
    lines. `fedcg enrol` writes three other values: `balance = "logits"`, `shadow_every = 4`, and `allow_report` with `shadow`.

    Attributes:
        federation: id of the federation; another federation needs another file.
        device: id of this device, as in its certificate.
        store: folder of this device's private store: networks, secrets, and the record of what left.
        carrier: how updates and aggregates travel: mqtt (over the broker) or https (to and from the coordinator).
        carrier_url: https://HOST:PORT of the coordinator's carrier; required for carrier https.
    """

    federation: Identifier
    device: Identifier
    store: Path = Path("store")
    carrier: Annotated[
        Carrier, Field(description="how artifacts are sent: mqtt (over the broker) or https (to the coordinator)")
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
            raise ValueError('use a separate, new folder, such as "store"')
        return store

    @property
    def privacy_obstacle(self) -> str:
        """Why this device can't train with its privacy mechanisms, with the remedy; empty if it can."""
        is_missing = self.privacy.dp_sgd is not None and find_spec("opacus") is None
        return "[privacy.dp_sgd] needs opacus: pip install 'fedcg-edge[privacy]'" if is_missing else ""

    @property
    def training_lock(self) -> Path:
        """Lock file held during training. It is next to the identity files, so all federations of a device share it."""
        beside = self.keys.signing if self.tls is None else self.tls.cert
        return beside.with_name(".training.lock")

    @model_validator(mode="after")
    def _sections_fit(self) -> AgentConfig:
        check_defence(self.data.defence, self.data.defence_params, dp_sgd=self.privacy.dp_sgd is not None)
        if self.tls is None and not self.broker.insecure:
            raise ValueError(
                "a [tls] table with ca, cert and key is missing (only broker.insecure = true works without it)"
            )
        if self.tls is not None and self.broker.insecure:
            raise ValueError(
                "broker.insecure = true would send in plain text although there is a [tls] table; remove one of them"
            )
        if self.carrier is Carrier.HTTPS and (self.carrier_url is None or self.tls is None):
            missing = "carrier_url" if self.tls is not None else "a [tls] table"
            raise ValueError(
                f'carrier = "https" needs {missing}: the operator knows the address (`fedcg coordinator run` prints it)'
            )
        return self


SettingsT = TypeVar("SettingsT", bound=Settings)


def _anchored(settings: SettingsT, base: Path) -> SettingsT:
    """The same settings with every relative path resolved against `base`."""
    changed: dict[str, object] = {}
    for name, value in settings:
        if isinstance(value, Path):
            changed[name] = base / value
        elif isinstance(value, Settings):
            changed[name] = _anchored(value, base)
    return settings.model_copy(update=changed)


def load_config(path: Path, environment: Mapping[str, str]) -> AgentConfig:
    """Read `agent.toml`; settings in `environment` (`FEDCG_AGENT_BROKER_HOST`, ...) override the file.

    Raises:
        ConfigError: lists every problem with its line or variable and a hint.
    """
    config = read_toml(path, AgentConfig, ConfigError, lambda values: _apply_environment(values, environment))
    return _anchored(config, path.resolve().parent)


def environment_names() -> dict[str, tuple[str, ...]]:
    """All supported environment variables and their settings."""
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
