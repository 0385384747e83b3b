"""The words of events and problems for a person: one sentence per event of agent and coordinator, and what to do about a problem.

`sentences.toml` has what to do, and the sentences of events whose words are always the same. Worded once for the log, `fedcg doctor`,
`fedcg agent status` and the coordinator's page. A sentence holds no more than its event does; events without an entry have no sentence.
"""

import logging
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
    found = _WORDED[name](event) if name in _WORDED else _plain().get(name)
    if found is None:
        return None
    level, template = found
    text = in_words(_FORMATTER.vformat(template, (), {**event, "at": _at(event)}))
    federation = event.get("federation")
    is_prefixed = isinstance(federation, str) and event.get("event") != "agent_started"
    return Sentence(level, f"{federation}: {text}" if is_prefixed else text)


class _Formatter(string.Formatter):
    """Templates over events: a missing field is empty; `!b` is a size, `!p` a share, `!t` a time."""

    def get_value(self, key: int | str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        value = kwargs.get(str(key))
        return "" if value is None else value

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion in _CONVERSIONS:
            return _CONVERSIONS[conversion](value) if isinstance(value, int | float) else str(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        return str(super().format_field(value, format_spec)) if value != "" else ""


def _size(count: float) -> str:
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


_CONVERSIONS: dict[str | None, Callable[[float], str]] = {
    "b": _size,
    "p": lambda share: f"{share:.1%}",
    "t": lambda seconds: f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M} UTC",
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


def _link(event: Event) -> Line:
    if not event.get("up"):
        return WARNING, "the link to the broker is lost; it is tried again until it is back"
    down_s = event.get("down_s")
    if down_s is None:
        return INFO, "connected to the broker"
    return INFO, f"the link to the broker is back after {down_s:.0f} s"


def _resumed(event: Event) -> Line:
    if event.get("seconds") is None:
        return DEBUG, "goes on: {phase}, round {round}"
    return INFO, "{at}: training goes on after a pause of {seconds:.0f} s"


def _audited(event: Event) -> Line:
    level, verdict = (INFO, "may be sent") if event.get("passed") else (WARNING, "is withheld")
    failed = "; attacks that did not run: {detail}" if event.get("detail") else ""
    return level, f"{{at}}: the audit took {{seconds:.0f}} s, the update {verdict}{failed}. Report: {{report}}"


def _declined(event: Event) -> Line:
    who = "{client} declined" if event.get("client") else "declined"
    detail = ": {detail}" if event.get("detail") else ""
    advice = texts().declined.get(str(event.get("reason")))
    return WARNING, f"{{at}}: {who} ({{reason}}){detail}" + (f". What to do: {advice}" if advice else "")


def _accepted(event: Event) -> Line:
    return DEBUG, "{at}: {client} takes part" if event.get("client") else "{at}: takes part"


def _committed(event: Event) -> Line:
    alone = " (trained alone: {accuracy_local!p})" if event.get("accuracy_local") is not None else ""
    accuracy = f", accuracy {{accuracy_personal!p}}{alone}" if event.get("accuracy_personal") is not None else ""
    return INFO, f"{{at}}: trained in {{seconds:.1f}} s{accuracy}"


def _receipt(event: Event) -> Line:
    outcome = event.get("outcome")
    if outcome in ("accepted", "duplicate"):
        return (
            (WARNING, "{at}: the update is {reason}") if event.get("reason") else (INFO, "{at}: the update is accepted")
        )
    if outcome == "conflict":
        advice = (
            "another update of this device came first: a copy of it, or of its private store, takes part too. Stop one of them, or "
            "enrol it anew with a token and a store of its own"
        )
        return WARNING, f"{{at}}: the update is a conflict: {advice}"
    return WARNING, "{at}: the update is {outcome}: {reason}"


def _update_refused(event: Event) -> Line:
    if event.get("outcome") == "conflict":
        advice = "two devices seem to use its private store: stop one, or give it an identity of its own with `fedcg token create`"
        return WARNING, f"{{at}}: a second, different update of {{client}} does not count; {advice}"
    return WARNING, "{at}: the update of {client} is {outcome}: {reason}"


def _finished(event: Event) -> Line:
    if "succeeded" in event:
        return (INFO, "{summary}") if event["succeeded"] else (ERROR, "{summary}")
    return INFO, "finished after round {round}: the final aggregate is {aggregate:.12}" + (
        " (stopped: {reason})" if event.get("reason") else ""
    )


def _refused(event: Event) -> Line:
    if event.get("what") == "store":
        return ERROR, "the private store is damaged: {detail}"
    if event.get("what") == "spec":
        return DEBUG, "the spec is refused: {detail}"  # the decline that follows has the reason
    level = DEBUG if event.get("reason") in NORMAL_REFUSALS else WARNING
    return level, "refused {what} ({count} so far): {detail}" if event.get("count") else "refused {what}: {detail}"


def _phase_started(event: Event) -> Line:
    if event.get("phase") == "wait":
        return INFO, "waits until another federation's training on this device is done"
    return DEBUG, "{at}: {phase} begins" + (" ({client})" if event.get("client") else "")


def _artifact_stored(event: Event) -> Line:
    received = "received ({bytes!b} in {seconds:.1f} s)"
    if event.get("what") != "aggregate":
        return DEBUG, f"spec {received}"
    return INFO, f"{{at}}: aggregate {received}" if event.get("round") else f"final aggregate {received}"


def _certificate_renewed(event: Event) -> Line:
    who = "of {client}" if event.get("client") else "of this device"
    return INFO, f"the certificate {who} is renewed, until {{until!t}}"


def _cohort(event: Event) -> Line | None:
    unlike = {
        "lacking": "another device has no cohort secret",
        "different": "other devices have another cohort secret, or this one has none",
    }
    if (found := unlike.get(str(event.get("others")))) is None:
        return None
    advice = "private networks start apart and merge badly; compare `fedcg cohort status` on all devices"
    return WARNING, f"{found}: {advice}. {COHORT_ADVICE}"


def _trainer_died(event: Event) -> Line:
    cause = "{reason}" if event.get("reason") else "code -9 is mostly a lack of memory"
    return WARNING, f"the training process ended with code {{exit_code}} ({cause}); it is started again"


def _agent_paused(event: Event) -> Line:
    until = "until {until!t}" if event.get("until") else "until `fedcg agent resume`"
    return INFO, f"paused {until}" + (": {reason}" if event.get("reason") else "")


def _steered(event: Event) -> Line:
    return INFO, {
        "running": "an operator lets it run",
        "paused": "an operator paused it, and a round that is open ends before: {reason}",
    }.get(str(event.get("status")), "an operator stopped it: {reason}")


def _attempt_opened(event: Event) -> Line:
    return INFO, f"{{at}} opened ({len(event.get('participants') or ())} devices invited)"


def _artifact_store(event: Event) -> Line:
    if event.get("reachable"):
        return INFO, "the store of artifacts answers again"
    return WARNING, "{reason}; rounds wait until it answers"


def _api_refused(event: Event) -> Line:
    who = "{identity}" if event.get("identity") else "somebody without a token"
    return (
        WARNING,
        f"{{refused}} requests were refused since the last such line, the last of {{address}}: {who}, {{route}}",
    )


def _policy_changed(event: Event) -> Line:
    changed = event.get("changed")
    return INFO, f"the policy was changed: {', '.join(changed) if isinstance(changed, list) else ''}"


def _distilling(event: Event) -> Line:
    return DEBUG, f"{{at}}: {len(event.get('clients') or ())} updates are compared"


def _merging(event: Event) -> Line:
    return INFO, f"{{at}}: {len(event.get('clients') or ())} updates are merged"


def _merge_step(event: Event) -> Line:
    loss = "" if event.get("loss") is None else ", loss {loss:.4g}"
    return DEBUG, f"{{at}}: {{phase}}, step {{step}} of {{steps}}{loss}"


def _token_created(event: Event) -> Line:
    return INFO, "an enrolment token" + (" for {client}" if event.get("client") else "") + " is made, until {until!t}"


def _carrier(event: Event) -> Line:
    return (INFO, "HTTPS carrier, {way}: works") if event.get("works") else (WARNING, "HTTPS carrier, {way}: {detail}")


_WORDED: dict[str, Callable[[Event], Line | None]] = {
    "link": _link,
    "accepted": _accepted,
    "declined": _declined,
    "audited": _audited,
    "finished": _finished,
    "refused": _refused,
    "phase_started": _phase_started,
    "resumed": _resumed,
    "certificate_renewed": _certificate_renewed,
    "cohort": _cohort,
    "artifact_stored": _artifact_stored,
    "trainer_died": _trainer_died,
    "agent_paused": _agent_paused,
    "committed": _committed,
    "receipt": _receipt,
    "carrier": _carrier,
    "steered": _steered,
    "artifact_store": _artifact_store,
    "policy_changed": _policy_changed,
    "attempt_opened": _attempt_opened,
    "update_refused": _update_refused,
    "distilling": _distilling,
    "merging": _merging,
    "aggregate_step": _merge_step,
    "token_created": _token_created,
    "api_refused": _api_refused,
}
"""Events whose words depend on their fields; `sentences.toml` has the others."""


class Texts(Settings):
    """The content of `sentences.toml`: the text of each event, by level, and what a person does about problems.

    Attributes:
        declined: about a device that declines, by its reason.
        findings: what a device's own doctor found and the remedy, by check and state; an empty one: see the doctor.
        audit_figures: what each figure of a device's audit is.
        health: about a device that reports this of its health.
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
    lost_sums: dict[str, str]
    sum_obstacles: dict[str, tuple[str, str]]
    lost_files: dict[str, str]


@cache
def texts() -> Texts:
    """What `sentences.toml` holds."""
    return read_toml(Path(__file__).with_name("sentences.toml"), Texts, FedcgError)


@cache
def _plain() -> dict[str, Line]:
    """The sentences of `sentences.toml`, by event."""
    return {event: (LEVELS[level], text) for level in LEVELS for event, text in getattr(texts(), level).items()}
