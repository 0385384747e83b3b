"""The coordinator's configuration file: its schema, reading it with all errors at once, writing a commented one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
Port = Annotated[int, Field(ge=1, le=65535)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BrokerSettings(_Section):
    """Where the broker is and how it is spoken to."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Port = 8883
    protocol: Literal["auto", "5", "3.1.1"] = "auto"


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
