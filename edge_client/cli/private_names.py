"""The names of this device's images, folders and classes, and texts without them, in whatever form a log writes them. Torch-free."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from urllib.parse import quote, quote_plus

from pydantic import BaseModel

from edge_client.config import AgentConfig
from edge_client.store.generations import SPLITS
from edge_client.store.private_store import PrivateStore
from fedcg.event_log import log_text

IMAGE, FOLDER = "[image]", "[folder]"
_SMALL_NUMBER = re.compile(r"\d{1,3}")  # says no more than a number
_EDGE = r"(?:(?<![A-Za-z0-9_])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt]))"  # where a name may begin
_END = r"(?![A-Za-z0-9_])"
_OPENED = r"(?:^|(?<=[\"'`])|(?<=[:;] ))"  # before an image's name: what no longer name has there
_SLASH = r"(?:/|%2[Ff])"
_CLOSED = rf"(?={_SLASH}|$|[:;,]|[\"'`](?!\w))"  # behind a path, where no longer name goes on
_UP_TO_IMAGE = r"(?s:.*)\.(?i:png|jpe?g|bmp|webp|tiff?|gif)(?![A-Za-z0-9])"


class PrivateNames:
    """What texts must not show, by the folders of images and the specs of this device.

    The end of a name that is not known any more, because its image was deleted, can't be found. So everything goes from where it may begin,
    behind the folder of images or at the text's start, to the last suffix of an image, or to the text's end.

    Args:
        config: of the device.
        store: its private store, or where it will be.
        texts: JSON of all texts in which names are looked for.
        with_class_names: names of classes are not private.
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
        """The text without them."""
        if text.endswith("…"):  # it was cut, maybe in a name
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
    """What stands for each name, by each of its forms that the texts hold."""
    forms = ((form, instead) for name, instead in names.items() for form in _forms_of(name))
    return {form: instead for form, instead in forms if json.dumps(form, ensure_ascii=False)[1:-1] in texts}


def _any_of(forms: Iterable[str]) -> str:
    """A pattern of one of these, the longest that fits; a number is no piece of an address, a time or a version."""
    longest_first = sorted(forms, key=len, reverse=True)
    patterns = (rf"(?<!\d[.:-]){one}(?![.:-]\d)" if one.isdecimal() else re.escape(one) for one in longest_first)
    return f"(?:{'|'.join(patterns) or '(?!)'})"


def _forms_of(name: str) -> set[str]:
    """A name as it is, and as logs, errors, JSON and URLs write it."""
    raw = os.fsencode(name)
    forms = {name, log_text(name, len(name)), repr(name)[1:-1], repr(f"{name}\"'")[1:-4], ascii(name)[1:-1]}
    forms |= {repr(raw)[2:-1], json.dumps(name)[1:-1], json.dumps(name, ensure_ascii=False)[1:-1]}
    return forms | {quote(raw), quote(raw, safe=""), quote_plus(raw)}
