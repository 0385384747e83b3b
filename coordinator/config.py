"""The coordinator's configuration file: its schema, reading it with all errors at once, writing a commented one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.errors import ConfigError
from fedcg.wire.messages import MAX_CHUNK_BYTES
from fedcg.wire.presets import DEFAULT_PRESET, LinkLimits, PresetName, limits_for

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
Port = Annotated[int, Field(ge=1, le=65535)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BrokerSettings(_Section):
    """Where the broker is and how it is spoken to.

    Attributes:
        preset: limits of a known broker or service.
        chunk_bytes, window_chunks, window_bytes: single limits in place of the preset's.
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
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


class ApiSettings(_Section):
    """Where the HTTP interface listens."""

    host: str = "127.0.0.1"
    port: Port = 8440


class AggregationSettings(_Section):
    """What the aggregation worker may use.

    Attributes:
        threads: torch threads; another number gives other bits from the seventh digit on.
        device: "cpu", "cuda", or "auto" for a GPU when there is one.
        public_data: unlabelled images for methods that distil on some (FedDF): a folder, or an .npz; relative to this file.
        public_images: at most so many of them are read.
    """

    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    public_data: Annotated[str, Field(min_length=1)] | None = None
    public_images: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000


class CoordinatorConfig(_Section):
    """coordinator.toml."""

    broker: BrokerSettings = BrokerSettings()
    api: ApiSettings = ApiSettings()
    aggregation: AggregationSettings = AggregationSettings()


def load_config(path: Path) -> CoordinatorConfig:
    """Read coordinator.toml.

    Raises:
        ConfigError: not TOML, or values out of their bounds; names every error.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        return CoordinatorConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(path, error)) from error


def explain(source: Path, error: ValidationError) -> str:
    """Every error of a file, one per line."""
    found = error.errors(include_url=False)
    lines = [f"  {'.'.join(str(step) for step in item['loc']) or '(file)'}: {item['msg']}" for item in found]
    return "\n".join([f"{source}:", *lines])


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


def render_config(config: CoordinatorConfig) -> str:
    """coordinator.toml with comments."""
    public = config.aggregation.public_data
    public_line = f"public_data = {json.dumps(public)}" if public else '# public_data = "public"'
    return f"""# Configuration of a FedCG Edge coordinator.

[broker]
host = "{config.broker.host}"
port = {config.broker.port}
# "auto" tries MQTT 5 first, then 3.1.1.
protocol = "{config.broker.protocol}"
# What the broker takes: "mosquitto", "aws-iot", "azure-event-grid" or "emqx".
preset = "{config.broker.preset}"
{_line("chunk_bytes", config.broker.chunk_bytes, 32_768)}
{_line("window_chunks", config.broker.window_chunks, 16)}
{_line("window_bytes", config.broker.window_bytes, 1_900_000)}

[api]
# Loopback only: the HTTP interface has no authentication.
host = "{config.api.host}"
port = {config.api.port}

[aggregation]
# Results repeat bit for bit only with the same number of threads on the same device.
threads = {config.aggregation.threads}
device = "{config.aggregation.device}"
# Unlabelled images, a folder or an .npz, for methods that distil on some (feddf); must stay as they are while a round runs.
{public_line}
public_images = {config.aggregation.public_images}
"""
