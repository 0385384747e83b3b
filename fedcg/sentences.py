"""The words of events and problems for a person: one sentence per event of agent and coordinator, and what to do about a problem.

`sentences.toml` has those of events whose words are always the same. Worded once for the log, `fedcg doctor`, `fedcg agent status` and
the coordinator's page. A sentence holds no more than its event does; events without an entry have no sentence.
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
    "first one, start the agent; after `fedcg cohort renew` with its code and `--replace`. One that has trained without that secret or a "
    "renewed one needs an empty store before `join`: `mv STORE STORE.before`. Its private networks begin anew then"
)
DECLINE_ADVICE = {
    "upload_not_allowed": "the device's owner approves it with `fedcg agent approve`, or allows the part under [policy] allow_upload in agent.toml",
    "report_not_allowed": "the device's owner approves it with `fedcg agent approve`, or allows the field under [policy] allow_report in agent.toml",
    "not_eligible": "nothing, if it has trained this round or a later one already; otherwise `fedcg doctor --hardware` on the device names the reason: disk, temperature, power, memory or the hours of its schedule",
    "no_data": "put images where [data] root in the device's agent.toml names them; `fedcg doctor` there shows what it finds",
    "unknown_method": "update the agent on the device, or install the method's package there",
    "spec_refused": "the log of the device names what it refuses in the spec; `fedcg doctor` there shows its own bounds ([policy])",
    "training_failed": "`fedcg agent status` on the device names the cause: memory, disk or private store; `fedcg doctor` there tries a short training",
    "diverged": "look at the device's images: wrong labels, or an empty class; where several devices diverge: `fedcg federation continue PLAN {federation}`, with a lower learning rate",
    "withheld": "its owner decides: the gate of [audit] or the budget of [privacy] held it back; `fedcg agent status` there names it",
    "paused": "nothing: its owner paused it; `fedcg agent resume` on the device ends that",
    "needs_approval": "the device's owner looks with `fedcg agent approve` at what the spec asks for, beyond [policy] in agent.toml",
    "daily_limit": "nothing: it takes part again after midnight UTC; [policy] max_upload_mb_per_day and max_download_mb_per_day there set the limit",
    "interrupted": "nothing: its agent was stopped, and takes part again when it runs",
    "reserved": "nothing: the device's application keeps it busy, and releases its lock_file or stop_file when it is done",
    "serving": "nothing: its inference server is busy, and it trains when fewer requests come; [eligibility] max_requests_per_s there sets the limit",
    "hot": "nothing, if it is rare: it takes part when it has cooled; otherwise improve its cooling or lower its power mode",
    "throttled": "look at the device's power supply and cooling: one of them slows it down",
    "on_battery": "connect the device to mains power, or set on_mains = false under [eligibility] in its agent.toml",
    "power_mode": "set a power mode on the device (`sudo nvpmodel -m ID`) that [eligibility] power_modes in its agent.toml lists",
    "quiet_hours": "nothing: it takes part when its quiet hours are over; [eligibility] quiet_hours there has the spans",
    "low_disk": "free some space on the device, or lower [eligibility] min_free_disk_mb in its agent.toml",
    "low_memory": "end other programs on the device, or lower [eligibility] min_free_memory_mb in its agent.toml",
    "metered": "nothing: it takes part when it has a link that is not metered; [eligibility] metered_interfaces there names those that are",
    "no_time": "give rounds more time: `fedcg federation set {federation} deadline_s=SECONDS` at the coordinator",
}
"""What a person does about a device that declines, by its reason; `{federation}` stands for the id of the federation."""

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
    advice = DECLINE_ADVICE.get(str(event.get("reason")))
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
    return WARNING, f"{{refused}} requests to change something were refused, the last of {{address}}: {who}, {{route}}"


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


class _Sentences(Settings):
    """The content of `sentences.toml`: the text of each event, by level."""

    debug: dict[str, str]
    info: dict[str, str]
    warning: dict[str, str]
    error: dict[str, str]


@cache
def _plain() -> dict[str, Line]:
    """The sentences of `sentences.toml`, by event."""
    levels = read_toml(Path(__file__).with_name("sentences.toml"), _Sentences, FedcgError)
    return {event: (LEVELS[level], text) for level, texts in levels for event, text in texts.items()}
