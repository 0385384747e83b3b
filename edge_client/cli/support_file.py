"""The content of `fedcg agent diagnose`: what support needs to know of a device, and nothing private.

Chosen by name: the configuration (paths of keys, never their content), status, the doctor's findings, the newest events, versions and the
sizes of the store's files. Texts about images, and the owner's own words, are left out. Then content of secret files and values of secret environment variables are replaced in every text, and names of
images, folders and, unless asked for, classes in every text that may hold one (`PrivateNames`). Keys and fields of ours stay.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import re
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import distributions
from io import BytesIO
from itertools import chain
from typing import Any

from edge_client.cli.doctor.checks import examine
from edge_client.cli.private_names import PrivateNames
from edge_client.cli.status import read_status
from edge_client.config import AgentConfig
from edge_client.errors import StoreError
from edge_client.store.private_store import PrivateStore, open_store
from fedcg.event_log import EventValue, read_events
from fedcg.files import SECRET_BYTES

MOST_FILES = 10_000
MAX_SECRET_BYTES = 64 * 1024
LEAST_SECRET = 6  # characters; shorter values occur by chance
REMOVED = "[removed]"
VERBATIM = frozenset({"about.json", "configuration.json", "files.json"})
"""Members with words of this program and the owner's paths alone: no image or class is named there."""
OURS = frozenset({"check", "state", "event", "phase", "what", "outcome", "way", "others", "device", "federation"})
"""Fields of the other members with words of this program; any other text may hold a name."""
NAMING = "data"
"""The one check of the doctor that names images and classes."""
CODED = frozenset({"declined", "refused", "round_failed", "paused", "approval_needed"})
"""Events whose `reason` is one of a closed list."""
DETAILED = frozenset(
    {
        "link_problem",
        "agent_error",
        "renewal_failed",
        "carrier",
        "revoked",
        "refused",
        "approval_needed",
        "audited",
        "paused",
    }
)
"""Events whose `detail` goes in. That of any other one may be about images, also of a folder that was set earlier."""
OWNERS = frozenset({"pause_reason", "last_declined", "images_left_out"})
"""Fields of the status that hold such texts, or words of the owner."""
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH", re.IGNORECASE)


def support_file(config: AgentConfig, newest_events: int, *, with_class_names: bool) -> tuple[bytes, tuple[str, ...]]:
    """A zip file with everything, and the names of its members.

    Args:
        config: of the device.
        newest_events: how many events of the log go into it.
        with_class_names: leave names of classes as they are.
    """
    store = _store(config)
    members: dict[str, object] = {
        "about.json": _about(),
        "configuration.json": config.model_dump(mode="json"),
        "status.json": _status(config),
        "doctor.json": [asdict(finding) for finding in examine(config, datetime.now(timezone.utc))],
        "files.json": dict(_sizes(store)),
    }
    logs = chain.from_iterable(read_events(config.store / name) for name in ("events.old.jsonl", "events.jsonl"))
    events = [_without_private_text(one) for one in deque(logs, maxlen=newest_events)]
    secrets, searched = tuple(_secrets(config)), json.dumps([members, *events], default=str, ensure_ascii=False)
    names = PrivateNames(config, store, searched, with_class_names=with_class_names)

    def written(member: str, value: object, indent: int | None = 1) -> str:
        hide = str if member in VERBATIM else names.hidden_in
        return json.dumps(_cleaned(value, hide, secrets), indent=indent, default=str, ensure_ascii=False)

    texts = {name: written(name, value) for name, value in members.items()}
    texts["events.jsonl"] = "".join(f"{written('', one, None)}\n" for one in events)
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(
                name, text.encode("utf-8", "backslashreplace")
            )  # bytes that are no text, as JSON escapes them
    return packed.getvalue(), tuple(texts)


def _without_private_text(event: Mapping[str, EventValue]) -> dict[str, EventValue]:
    name = str(event.get("event"))
    dropped = {"reason"} if name == "agent_paused" else set() if name in DETAILED else {"detail"}
    return {key: value for key, value in event.items() if key not in dropped}


def _cleaned(value: Any, hide: Callable[[str], str], secrets: tuple[str, ...]) -> Any:
    """A JSON value whose texts hold no secret and, where they may, no name."""
    if isinstance(value, Mapping):
        hide = str if value.get("check", NAMING) != NAMING else hide
        ours = OURS | {"reason"} if value.get("event") in CODED else OURS
        return {key: _cleaned(one, str if key in ours else hide, secrets) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(one, hide, secrets) for one in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, REMOVED)
    return hide(value)


def _about() -> dict[str, Any]:
    packages = {str(one.metadata["Name"]): one.version for one in distributions()}
    return {
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": sys.version,
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items())),
        "environment": sorted(name for name in os.environ if name.startswith("FEDCG_")),
    }


def _status(config: AgentConfig) -> object:
    try:
        return {name: value for name, value in read_status(config).items() if name not in OWNERS}
    except StoreError as error:
        return {"problem": str(error)}


def _sizes(store: PrivateStore) -> Iterator[tuple[str, int]]:
    found = chain.from_iterable((path, *sorted(path.rglob("*"))) for path in store.own())
    files = (path for path in found if path.is_file() and not path.is_symlink())
    for _, path in zip(range(MOST_FILES), files, strict=False):
        with suppress(OSError):  # deleted meanwhile
            yield str(path.relative_to(store.root)), path.stat().st_size


def _store(config: AgentConfig) -> PrivateStore:
    try:
        return open_store(config)
    except StoreError:  # a reason to write this file; what is whole can be read all the same
        return PrivateStore(config.store)


def _secrets(config: AgentConfig) -> Iterator[str]:
    """Everything that must not be in the file, in each form in which it could be."""
    for path in (config.keys.signing, *(() if config.tls is None else (config.tls.key,))):
        with suppress(OSError), path.open("rb") as file:
            yield from _forms(file.read(MAX_SECRET_BYTES))
    for path in sorted((config.store / "secrets").glob("*")):
        with suppress(OSError):
            yield from _forms(path.read_bytes()[:SECRET_BYTES])  # behind it is the file's check
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= LEAST_SECRET:
            yield from (value, json.dumps(value)[1:-1])


def _forms(content: bytes) -> Iterator[str]:
    text = content.decode("utf-8", errors="replace").strip()
    lines = [line.strip() for line in text.splitlines() if not line.startswith(("-----", "#"))]
    for form in (text, json.dumps(text)[1:-1], *lines, content.hex(), base64.b64encode(content).decode()):
        if len(form) >= LEAST_SECRET:
            yield form
