"""The words of events and problems for a person: one sentence per event of agent and coordinator, and what to do about a problem.

`sentences.toml` has what to do, and the sentences of events whose words are always the same. Worded once for the log, `fedcg doctor`,
`fedcg agent status` and the coordinator's page. A sentence holds no more than its event does; events without an entry have no sentence.
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
    "On the device that differs: stop the agent, `fedcg cohort join --config AGENT.TOML` with the code of `fedcg cohort create` on the "
    "first one, start the agent. With `--replace` where it has another secret and has not trained, and for the code of `fedcg cohort renew`: "
    "while that goes round, the devices still without it are those to change. One that has trained without that secret or a renewed one needs"
    " an empty store before `join`: `mv STORE STORE.before`. Its private networks begin anew then"
)
REVOKED_ADVICE = (
    "the coordinator has revoked this device; to take part again, it is enrolled anew with a token of the operator: "
    "`fedcg token create --replaces DEVICE`"
)


DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR
LEVELS = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR}
Event = Mapping[str, Any]

_OPTIONAL = re.compile(r"<([^<>|]*)(?:\|([^<>]*))?>")
NORMAL_REFUSALS = frozenset({"replayed", "older_epoch", "other_session"})
"""Reasons of refusals that every restart of a coordinator or a device causes."""


class Sentence(NamedTuple):
    """A sentence and its level, one of the numbers of `logging`."""

    level: int
    text: str


def sentence_of(event: Event) -> Sentence | None:
    """The sentence of an event, or None.

    Args:
        event: its fields, with its name under `event`.
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
    """The round of an event; the attempt is named from the second one on."""
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
"""Which of its sentences an event has, where there are several: their names in `sentences.toml` end with it."""


class Texts(Settings):
    """The content of `sentences.toml`: the text of each event, by level, and what a person does about problems.

    Attributes:
        declined: about a device that declines, by its reason.
        findings: what a device's own doctor found and the remedy, by check and state; an empty one: see the doctor.
        audit_figures: what each figure of a device's audit is.
        health: about a device that reports this of its health.
        problems: the fact and the remedy of an open problem of the coordinator, by its kind.
        ended: kind and remedy of a device whose update was rejected, or which was dropped.
        lost_sums: about a round without a sealed sum, by the phase in which that ended, or `other`.
        sum_obstacles: why a device takes no part in sums, and what to do, by `SumObstacle`.
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
    ended: dict[str, tuple[str, str]]
    lost_sums: dict[str, str]
    sum_obstacles: dict[str, tuple[str, str]]
    lost_files: dict[str, str]


@cache
def texts() -> Texts:
    """What `sentences.toml` holds."""
    return read_toml(Path(__file__).with_name("sentences.toml"), Texts, FedcgError)


@cache
def _lines() -> dict[str, Line]:
    """The sentences of `sentences.toml`, by event."""
    return {event: (LEVELS[level], text) for level in LEVELS for event, text in getattr(texts(), level).items()}
