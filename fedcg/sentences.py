"""Sentences for events of agent and coordinator, and remedies for problems.

`sentences.toml` holds the texts; this module chooses and fills in a sentence. The log, `fedcg doctor`, `fedcg agent status` and the
coordinator's page share them. A sentence shows only fields of its event; events without an entry have no sentence.
"""

import logging
import re
import string
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedcg.config_file import Settings, read_toml
from fedcg.errors import FedcgError, in_words

COHORT_ADVICE = (
    "On the device that differs: stop the agent, run `fedcg cohort join --config AGENT.TOML` with the code of `fedcg cohort create` on the "
    "first device, and start the agent. Add `--replace` if the device has another secret and has not trained, or for the code of `fedcg cohort "
    "renew`. While a renewed secret is distributed, change the devices that do not have it yet. A device that has trained with neither this "
    "secret nor a renewed one needs an empty store before `join`: `mv STORE STORE.before`. Its private networks then start again"
)
REVOKED_ADVICE = (
    "the coordinator has revoked this device. To rejoin, enrol it again with a token from the operator: "
    "`fedcg token create --replaces DEVICE`"
)


DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR
LEVELS = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR}
LEVEL_NAMES = {number: name for name, number in LEVELS.items()}
Event = Mapping[str, Any]

_OPTIONAL = re.compile(r"<([^<>|]*)(?:\|([^<>]*))?>")
NORMAL_REFUSALS = frozenset({"replayed", "older_epoch", "other_session"})
"""Reasons of refusals that every restart of a coordinator or a device causes."""


class Sentence(NamedTuple):
    """A sentence and its level, a number of `logging`."""

    level: int
    text: str


def sentence_of(event: Event) -> Sentence | None:
    """The sentence of an event, or None.

    Args:
        event: its fields, including its name under `event`.
    """
    name = str(event.get("event"))
    case = _CASES[name](event) if name in _CASES else ""
    found = _lines().get(f"{name}_{case}", _lines().get(name))
    if found is None:
        return None
    level, template = found
    advice = COHORT_ADVICE if name == "cohort" else texts().declined.get(str(event.get("reason")))
    fields = {**event, "at": _at(event), "advice": advice}
    template = _OPTIONAL.sub(lambda part: part[1] if _are_there(part[1], fields) else part[2] or "", template)
    text = in_words(_FORMATTER.vformat(template.replace("{advice}", str(advice)), (), fields))
    federation = event.get("federation")
    is_prefixed = isinstance(federation, str) and event.get("event") != "agent_started"
    return Sentence(level, f"{federation}: {text}" if is_prefixed else text)


def _are_there(template: str, fields: Event) -> bool:
    return all(fields.get(name) not in (None, "") for _, name, _, _ in _FORMATTER.parse(template) if name)


class _Formatter(string.Formatter):
    """Templates over events: a missing field is empty; `!b` is a size, `!p` a share, `!t` a time, `!n` the number of items, `!l` a list."""

    def get_value(self, key: int | str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        value = kwargs.get(str(key))
        return "" if value is None else value

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion in _CONVERSIONS:
            return _CONVERSIONS[conversion](value) if isinstance(value, int | float | list) else str(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        return str(super().format_field(value, format_spec)) if value != "" else ""


def _size(count: float) -> str:
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


_CONVERSIONS: dict[str | None, Callable[[Any], str]] = {
    "b": _size,
    "p": lambda share: f"{share:.1%}",
    "t": lambda seconds: f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M} UTC",
    "n": lambda items: str(len(items)),
    "l": ", ".join,
}
_FORMATTER = _Formatter()


def _at(event: Event) -> str:
    """The round of an event, with the attempt from the second one on."""
    rounds, attempt = event.get("rounds"), event.get("attempt")
    of = f" of {rounds}" if rounds else ""
    return f"round {event.get('round')}{of}" + (
        f", attempt {attempt}" if isinstance(attempt, int) and attempt > 1 else ""
    )


Line = tuple[int, str]


def _case_of_receipt(event: Event) -> str:
    if event.get("outcome") in ("accepted", "duplicate"):
        return "odd" if event.get("reason") else "accepted"
    return "conflict" if event.get("outcome") == "conflict" else ""


def _case_of_refused(event: Event) -> str:
    if event.get("what") in ("store", "spec"):
        return str(event["what"])
    return "usual" if event.get("reason") in NORMAL_REFUSALS else ""


def _case_of_artifact(event: Event) -> str:
    return "spec" if event.get("what") != "aggregate" else "" if event.get("round") else "final"


_CASES: dict[str, Callable[[Event], str]] = {
    "link": lambda event: "" if event.get("up") else "lost",
    "resumed": lambda event: "" if event.get("seconds") is None else "training",
    "audited": lambda event: "" if event.get("passed") else "withheld",
    "receipt": _case_of_receipt,
    "update_refused": lambda event: "conflict" if event.get("outcome") == "conflict" else "",
    "finished": lambda event: {None: "", True: "well"}.get(event.get("succeeded"), "badly"),
    "refused": _case_of_refused,
    "phase_started": lambda event: "waiting" if event.get("phase") == "wait" else "",
    "artifact_stored": _case_of_artifact,
    "cohort": lambda event: str(event.get("others")),
    "steered": lambda event: str(event.get("status")),
    "artifact_store": lambda event: "" if event.get("reachable") else "away",
    "carrier": lambda event: "" if event.get("works") else "failed",
}
"""For events with several sentences: the function that chooses one. Its result is the suffix of the entry in `sentences.toml`."""


class Texts(Settings):
    """The content of `sentences.toml`: the text of each event, by level, and the remedies for problems.

    Attributes:
        declined: what to do about a device that declines, by its reason.
        findings: a finding of a device's own doctor and its remedy, by check and state; an empty remedy refers to the doctor.
        audit_figures: the meaning of each figure of a device's audit.
        health: what to do about a device that reports this health.
        problems: the fact and the remedy of an open problem of the coordinator, by its kind.
        operations: an operator's change: name, effect, and the same as a command.
        ended: kind and remedy for a device whose update was rejected, or which was dropped.
        lost_sums: what to do about a round without a sealed sum, by the phase in which the sum ended, or `other`.
        sum_obstacles: why a device is in no sum, and what to do, by `SumObstacle`.
        lost_files: what is lost with a damaged file of a device's store, and what to do, by its name.
    """

    debug: dict[str, str]
    info: dict[str, str]
    warning: dict[str, str]
    error: dict[str, str]
    declined: dict[str, str]
    findings: dict[str, dict[str, tuple[str, str]]]
    audit_figures: dict[str, str]
    health: dict[str, str]
    problems: dict[str, tuple[str, str]]
    operations: dict[str, tuple[str, str, str]]
    ended: dict[str, tuple[str, str]]
    lost_sums: dict[str, str]
    sum_obstacles: dict[str, tuple[str, str]]
    lost_files: dict[str, str]


@cache
def texts() -> Texts:
    """The content of `sentences.toml`, read once."""
    return read_toml(Path(__file__).with_name("sentences.toml"), Texts, FedcgError)


@cache
def _lines() -> dict[str, Line]:
    """The sentences of `sentences.toml`, by event."""
    return {event: (LEVELS[level], text) for level in LEVELS for event, text in getattr(texts(), level).items()}
