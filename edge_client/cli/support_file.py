"""The content of `fedcg agent diagnose`: what support needs to know of a device, and nothing private.

Chosen by name: the configuration (paths of keys, never their content), status, the doctor's findings, the newest events, versions and the
sizes of the store's files. Then searched: content of secret files, values of secret environment variables, names of images and, unless
asked for, of classes are replaced wherever they occur.
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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import distributions
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from edge_client.cli.doctor.checks import examine
from edge_client.cli.status import read_status
from edge_client.config import AgentConfig
from edge_client.errors import StoreError
from edge_client.store.private_store import PrivateStore, open_store
from fedcg.event_log import read_events
from fedcg.files import SECRET_BYTES

MOST_FILES = 10_000
MAX_SECRET_BYTES = 64 * 1024
LEAST_SECRET = 6  # characters; shorter values occur by chance
REMOVED, IMAGE = "[removed]", "[image]"
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
_SMALL_NUMBER = re.compile(r"\d{1,3}")
_IMAGE_NAME = re.compile(r"[^\s\"'/]+\.(?:png|jpe?g|bmp|webp|tiff?|gif)\b", re.IGNORECASE)


def support_file(config: AgentConfig, newest_events: int, *, with_class_names: bool) -> tuple[bytes, tuple[str, ...]]:
    """A zip file with everything, and the names of its members.

    Args:
        config: of the device.
        newest_events: how many events of the log go into it.
        with_class_names: leave names of classes as they are.
    """
    members: dict[str, object] = {
        "about.json": _about(),
        "configuration.json": config.model_dump(mode="json"),
        "status.json": _status(config),
        "doctor.json": [asdict(finding) for finding in examine(config, datetime.now(timezone.utc))],
        "files.json": dict(_sizes(config.store)),
    }
    names = () if with_class_names else _class_names(config)
    members = {name: _without_classes(value, names) for name, value in members.items()}
    texts = {name: json.dumps(value, indent=1, default=str, ensure_ascii=False) for name, value in members.items()}
    logs = chain.from_iterable(read_events(config.store / name) for name in ("events.old.jsonl", "events.jsonl"))
    texts["events.jsonl"] = "".join(
        f"{json.dumps(_without_classes(one, names), ensure_ascii=False)}\n" for one in deque(logs, maxlen=newest_events)
    )
    replaced = dict.fromkeys(_secrets(config), REMOVED)
    written = BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(name, _cleaned(text, replaced))
    return written.getvalue(), tuple(texts)


def _cleaned(text: str, replaced: dict[str, str]) -> str:
    for secret, instead in replaced.items():
        text = text.replace(secret, instead)
    return _IMAGE_NAME.sub(IMAGE, text)


def _without_classes(value: Any, classes: tuple[str, ...]) -> Any:
    """A JSON value whose texts name no class; numbers stay, and so do a text's addresses, times and versions."""
    if isinstance(value, Mapping):
        return {_without_classes(str(key), classes): _without_classes(one, classes) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_classes(one, classes) for one in value]
    if not classes or isinstance(value, int | float | None):
        return value
    numbers = {name: f"class-{number}" for number, name in enumerate(classes, 1)}
    longest_first = sorted(map(re.escape, classes), key=len, reverse=True)
    pattern = rf"(?<![A-Za-z0-9_])(?<!\d[.:-])(?:{'|'.join(longest_first)})(?![A-Za-z0-9_]|[.:-]\d)"
    return re.sub(pattern, lambda found: numbers[found[0]], str(value))


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
        return read_status(config)
    except StoreError as error:
        return {"problem": str(error)}


def _sizes(root: Path) -> Iterator[tuple[str, int]]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink())
    for _, path in zip(range(MOST_FILES), files, strict=False):
        with suppress(OSError):  # deleted meanwhile
            yield str(path.relative_to(root)), path.stat().st_size


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


def _class_names(config: AgentConfig) -> tuple[str, ...]:
    """Names of classes that this device knows: of specs, and of the folders of its images; without those that say no more than a number."""
    store, found = _store(config), set[str]()
    for path in (config.store / "specs").glob("*.json"):
        if (spec := store.spec(path.stem)) is not None:
            found.update(spec.classes)
    for folder in (config.data.root, config.data.root / "train", config.data.root / "test"):
        with suppress(OSError):
            found.update(path.name for path in folder.iterdir() if path.is_dir())
    return tuple(sorted(name for name in found - {"", "train", "test"} if not _SMALL_NUMBER.fullmatch(name)))
