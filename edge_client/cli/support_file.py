"""The content of `fedcg agent diagnose`: the state of a device for support, without private data. Torch-free.

Included: the configuration (paths of keys, never their content), versions and the sizes of the store's files. From status, the doctor's
findings and the newest events only what `_without_text` lets through: any other text may contain a name or a secret.
"""

import json
import os
import platform
import sys
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import distributions
from io import BytesIO
from itertools import chain
from typing import Any

from edge_client.cli.doctor.checks import examine
from edge_client.cli.status import read_status
from edge_client.config import AgentConfig
from edge_client.errors import StoreError
from edge_client.store.private_store import PrivateStore, open_store
from fedcg.event_log import read_events

MOST_FILES = 10_000
WORDS = frozenset({"check", "state", "event", "phase", "what", "outcome", "way", "others"})
"""Fields whose text is one of this program's own words."""
CODED = frozenset({"declined", "refused", "round_failed", "paused", "approval_needed"})
"""Events whose `reason` is one of this program's own words too."""


def support_file(config: AgentConfig, newest_events: int) -> tuple[bytes, tuple[str, ...]]:
    """The support file as zip bytes, and the names of its members.

    Args:
        config: of the device.
        newest_events: number of log events to include.
    """
    logs = chain.from_iterable(read_events(config.store / name) for name in ("events.old.jsonl", "events.jsonl"))
    members: dict[str, object] = {
        "about.json": _about(),
        "configuration.json": config.model_dump(mode="json"),
        "status.json": _status(config),
        "doctor.json": [_without_text(asdict(one)) for one in examine(config, datetime.now(timezone.utc))],
        "files.json": dict(_sizes(_store(config))),
        "events.json": [_without_text(one) for one in deque(logs, maxlen=newest_events)],
    }
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in members.items():
            archive.writestr(name, json.dumps(value, indent=1, default=str))
    return packed.getvalue(), tuple(members)


def _without_text(values: Mapping[str, object]) -> dict[str, object]:
    """Only numbers, truth values and this program's own words."""
    words = WORDS | {"reason"} if values.get("event") in CODED else WORDS
    return {
        name: one
        for name, one in values.items()
        if isinstance(one, bool | int | float) or (name in words and str(one).replace(" ", "_").isidentifier())
    }


def _about() -> dict[str, Any]:
    packages = {str(one.metadata["Name"]): one.version for one in distributions()}
    return {
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": sys.version,
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items())),
        "environment": sorted(name for name in os.environ if name.startswith("FEDCG_")),
    }


def _status(config: AgentConfig) -> dict[str, object]:
    try:
        return _without_text(read_status(config))
    except StoreError:
        return {"is_readable": False}


def _sizes(store: PrivateStore) -> Iterator[tuple[str, int]]:
    found = chain.from_iterable((path, *sorted(path.rglob("*"))) for path in store.own())
    files = (path for path in found if path.is_file() and not path.is_symlink())
    for _, path in zip(range(MOST_FILES), files, strict=False):
        with suppress(OSError):  # deleted meanwhile
            yield str(path.relative_to(store.root)), path.stat().st_size


def _store(config: AgentConfig) -> PrivateStore:
    try:
        return open_store(config)
    except StoreError:  # support files are written for damaged stores too; intact parts are readable
        return PrivateStore(config.store)
