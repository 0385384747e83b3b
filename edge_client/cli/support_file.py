"""The content of `fedcg agent diagnose`: the state of a device for support, without private data. Torch-free.

Included: the configuration (paths of keys, never their content), status, the doctor's findings, the newest events, versions and the sizes of
the store's files. Texts about images and the owner's own words are left out. The content of secret files and the values of secret environment
variables are replaced in every text. Names of images, folders and (by default) classes are replaced in every text that may contain one
(`PrivateNames`). This program's own keys and fields stay.
"""

import base64
import json
import os
import platform
import re
import sys
import zipfile
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import distributions
from io import BytesIO
from itertools import chain
from pathlib import PurePath
from typing import Any
from urllib.parse import quote, quote_plus

from pydantic import BaseModel

from edge_client.cli.doctor.checks import examine
from edge_client.cli.status import read_status
from edge_client.config import AgentConfig
from edge_client.errors import StoreError
from edge_client.store.generations import SPLITS
from edge_client.store.private_store import PrivateStore, open_store
from fedcg.event_log import EventValue, log_text, read_events
from fedcg.files import SECRET_BYTES

IMAGE, FOLDER = "[image]", "[folder]"
_SMALL_NUMBER = re.compile(r"\d{1,3}")  # reveals nothing as a name
_EDGE = r"(?:(?<![A-Za-z0-9_])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt]))"  # where a name may begin
_END = r"(?![A-Za-z0-9_])"
_OPENED = r"(?:^|(?<=[\"'`])|(?<=[:;] ))"  # before an image's name, where a longer name can't continue
_SLASH = r"(?:/|%2[Ff])"
_CLOSED = rf"(?={_SLASH}|$|[:;,]|[\"'`](?!\w))"  # after a path, where a longer name can't continue
_UP_TO_IMAGE = r"(?s:.*)\.(?i:png|jpe?g|bmp|webp|tiff?|gif)(?![A-Za-z0-9])"


class PrivateNames:
    """Names that texts must not show, from the image folders and the specs of this device.

    For a deleted image, the end of its name can't be found. So the text is removed from the name's possible start to its possible end. The
    start is after the image folder, or at the start of the text. The end is the last image suffix, or the end of the text.

    Args:
        config: of the device.
        store: its private store, which may not exist yet.
        texts: JSON of all texts to search for names.
        with_class_names: class names are not private.
    """

    def __init__(self, config: AgentConfig, store: PrivateStore, texts: str, *, with_class_names: bool) -> None:
        roots = [one for one in (config.data.root, config.data.common_test, config.audit.auxiliary) if one is not None]
        walked = [(PurePath(at).relative_to(root), names) for root in roots for at, _, names in os.walk(root)]
        words = {part: FOLDER for folder, _ in walked for part in folder.parts}
        ours = {*SPLITS, *filter(_SMALL_NUMBER.fullmatch, words)}
        classes = {folder.name for folder, _ in walked if folder.parent.name in ("", *SPLITS)} - {""}
        classes = classes.union(*(spec.classes for spec in map(store.spec, store.spec_digests()) if spec is not None))
        numbered = enumerate(sorted(name for name in classes - ours if not _SMALL_NUMBER.fullmatch(name)), 1)
        words |= {name: name if with_class_names else f"class-{number}" for number, name in numbered}
        words |= {name: name for name in ours}
        files = dict.fromkeys((name for _, names in walked for name in names), IMAGE)
        self._begun = sorted(form for name in (*words, *files) for form in _forms_of(name))
        self._words, self._files = _occurring(words, texts), _occurring(files, texts)
        self._shown = self._files | self._words
        sections = (config, *(section for _, section in config if isinstance(section, BaseModel)))
        own = [str(one) for section in sections for _, one in section if isinstance(one, PurePath)]
        own += [config.device, config.federation, config.broker.host]
        root = _any_of(_occurring(dict.fromkeys(map(str, roots), ""), texts))
        known = f"(?:{_SLASH}{_any_of(self._shown)}{_CLOSED})*"
        below = f"(?P<root>{root})(?P<known>{known})(?P<gone>{_SLASH}(?:{_UP_TO_IMAGE}|(?s:.*)))?"
        own_forms = _any_of(_occurring(dict.fromkeys(own, ""), texts))
        kept = f"(?:{re.escape(str(config.store))}(?:/[A-Za-z0-9_.-]+)*|{own_forms})(?:[.:-][0-9]+)*"
        opened = f"{_OPENED}(?P<file>{_any_of(self._files)})"
        self._path = re.compile(f"{_EDGE}(?:{below}|(?P<own>{kept})|{opened}){_END}")
        self._part, self._word = (re.compile(f"{_EDGE}{_any_of(one)}{_END}") for one in (self._shown, self._words))

    def hidden_in(self, text: str) -> str:
        """The text with all private names replaced."""
        if text.endswith("…"):  # cut, maybe inside a name
            edges = (edge.start() for edge in re.finditer(f"{_EDGE}(?=..)", text))
            text = f"{text[: next((at for at in edges if self._begins(text[at:-1])), -1)]}…"
        pieces, done = list[str](), 0
        for found in self._path.finditer(text):
            pieces += [self._between(text[done : found.start()]), self._instead(found)]
            done = found.end()
        return "".join((*pieces, self._between(text[done:])))

    def _begins(self, text: str) -> bool:
        return self._begun[min(bisect_left(self._begun, text), len(self._begun) - 1)].startswith(text)

    def _instead(self, found: re.Match[str]) -> str:
        if found["root"] is None:
            return found["own"] or self._files[found["file"]]
        known = self._part.sub(lambda part: self._shown[part[0]], found["known"])
        return f"{found['root']}{known}{'' if found['gone'] is None else f'/{IMAGE}'}"

    def _between(self, text: str) -> str:
        unknown = re.match(_UP_TO_IMAGE, text)
        rest = text if unknown is None else text[unknown.end() :]
        return ("" if unknown is None else IMAGE) + self._word.sub(lambda word: self._words[word[0]], rest)


def _occurring(names: Mapping[str, str], texts: str) -> dict[str, str]:
    """The replacement for each form of each name that occurs in the texts."""
    forms = ((form, instead) for name, instead in names.items() for form in _forms_of(name))
    return {form: instead for form, instead in forms if json.dumps(form, ensure_ascii=False)[1:-1] in texts}


def _any_of(forms: Iterable[str]) -> str:
    """A pattern that matches the longest of these forms. Numbers inside addresses, times and versions don't match."""
    longest_first = sorted(forms, key=len, reverse=True)
    patterns = (rf"(?<!\d[.:-]){one}(?![.:-]\d)" if one.isdecimal() else re.escape(one) for one in longest_first)
    return f"(?:{'|'.join(patterns) or '(?!)'})"


def _forms_of(name: str) -> set[str]:
    """A name in plain form, and as logs, errors, JSON and URLs write it."""
    raw = os.fsencode(name)
    forms = {name, log_text(name, len(name)), repr(name)[1:-1], repr(f"{name}\"'")[1:-4], ascii(name)[1:-1]}
    forms |= {repr(raw)[2:-1], json.dumps(name)[1:-1], json.dumps(name, ensure_ascii=False)[1:-1]}
    return forms | {quote(raw), quote(raw, safe=""), quote_plus(raw)}


MOST_FILES = 10_000
MAX_SECRET_BYTES = 64 * 1024
LEAST_SECRET = 6  # characters; shorter values occur by chance
REMOVED = "[removed]"
VERBATIM = frozenset({"about.json", "configuration.json", "files.json"})
"""Members with only this program's words and the owner's paths. They contain no names of images or classes."""
OURS = frozenset({"check", "state", "event", "phase", "what", "outcome", "way", "others", "device", "federation"})
"""Fields of the other members with only this program's words. Any other text may contain a name."""
NAMING = "data"
"""The only check of the doctor that names images and classes."""
CODED = frozenset({"declined", "refused", "round_failed", "paused", "approval_needed"})
"""Events whose `reason` is from a closed list."""
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
"""Events whose `detail` is included. The `detail` of other events may be about images, even of a folder configured earlier."""
OWNERS = frozenset({"pause_reason", "last_declined", "images_left_out"})
"""Status fields with such texts, or with the owner's words."""
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH", re.IGNORECASE)


def support_file(config: AgentConfig, newest_events: int, *, with_class_names: bool) -> tuple[bytes, tuple[str, ...]]:
    """The support file as zip bytes, and the names of its members.

    Args:
        config: of the device.
        newest_events: number of log events to include.
        with_class_names: keep class names.
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
            # bytes that are not valid text become JSON escapes
            archive.writestr(name, text.encode("utf-8", "backslashreplace"))
    return packed.getvalue(), tuple(texts)


def _without_private_text(event: Mapping[str, EventValue]) -> dict[str, EventValue]:
    name = str(event.get("event"))
    dropped = {"reason"} if name == "agent_paused" else set() if name in DETAILED else {"detail"}
    return {key: value for key, value in event.items() if key not in dropped}


def _cleaned(value: Any, hide: Callable[[str], str], secrets: tuple[str, ...]) -> Any:
    """A JSON value without secrets, and without private names in texts that may contain one."""
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
    except StoreError:  # support files are written for damaged stores too; intact parts are readable
        return PrivateStore(config.store)


def _secrets(config: AgentConfig) -> Iterator[str]:
    """All secrets, in every form in which a text could contain them."""
    for path in (config.keys.signing, *(() if config.tls is None else (config.tls.key,))):
        with suppress(OSError), path.open("rb") as file:
            yield from _forms(file.read(MAX_SECRET_BYTES))
    for path in sorted((config.store / "secrets").glob("*")):
        with suppress(OSError):
            yield from _forms(path.read_bytes()[:SECRET_BYTES])  # the file's checksum follows
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= LEAST_SECRET:
            yield from (value, json.dumps(value)[1:-1])


def _forms(content: bytes) -> Iterator[str]:
    text = content.decode("utf-8", errors="replace").strip()
    lines = [line.strip() for line in text.splitlines() if not line.startswith(("-----", "#"))]
    for form in (text, json.dumps(text)[1:-1], *lines, content.hex(), base64.b64encode(content).decode()):
        if len(form) >= LEAST_SECRET:
            yield form
