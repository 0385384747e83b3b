"""The state of a private store for the device's owner, read without disturbing the running agent."""

import contextlib
import time
from collections import Counter
from pathlib import Path

from pydantic import ValidationError

from edge_client import errors
from edge_client.agent.owner import StatusRequest, ask_agent
from edge_client.config import AgentConfig
from edge_client.identity.credentials import load_keys, mqtt_config, read_certificate
from edge_client.store.generations import Generation
from edge_client.store.own_backbone import private_start
from edge_client.store.owner_record import Consent, PauseFile, TrafficCounter
from edge_client.store.private_store import PRIVACY_FILE, PrivateStore, existing_store, open_store
from export.errors import ExportError
from export.model.manifest import read_manifest
from export.model.versions import ModelVersions
from fedcg.errors import in_words
from fedcg.event_log import EventValue, log_text, read_events
from fedcg.files import is_locked
from fedcg.sentences import REVOKED_ADVICE
from fedcg.text_output import moment, table
from fedcg.wire.messages.schemas import Outcome
from fedcg.wire.parts import PrivacySpent

Status = dict[str, EventValue]
LISTED = 20
LEFT_OUT_ADVICE = "repair or remove them; training skips them"
WAITS = "waits for another federation's training on this device"
ENDS_OF_TRAINING = frozenset(
    {"agent_started", "committed", "round_failed", "trainer_died", "finalised", "finalise_failed"}
)
_SHOWN = {  # events of which one field is shown unchanged
    "link": ("last_link", "up"),
    "link_problem": ("link_problem", "detail"),
    "welcomed": ("last_welcomed", "t"),
    "refused": ("last_refused", "detail"),
    "agent_error": ("last_agent_error", "detail"),
    "cohort": ("last_cohort", "others"),
    "finished": ("finished", "summary"),
}
# An invitation after the end means that the federation was extended.
_ENDS = {"link": "link_problem", "welcomed": "link_problem", "invited": "finished"}


def read_status(config: AgentConfig) -> Status:
    """The state of a device's store. Damaged files are listed as problems, and the other fields are still read.

    Raises:
        StoreFormatError: no private store at the configured path, or it is another device's.
    """
    root, store = config.store, existing_store(config)
    status: Status = {
        "device": config.device,
        "federation": config.federation,
        "running": is_locked(root / "lock"),
        "training_process": is_locked(root / "trainer.lock"),
        "certificate_until": _certificate_end(config),
    }
    generation, problems = _newest(store)
    for read in (
        lambda: {"store": str(open_store(config).root)},
        lambda: {"private_parts_start": private_start(config, store)},
        lambda: {"revoked": REVOKED_ADVICE if is_revoked(config) else None},
        lambda: _trained(store, generation),
        lambda: _images(store, generation),
        lambda: _receipts(store, generation),
        lambda: _latest(root / "events.jsonl"),
        lambda: _pause(root),
        lambda: _consent(root),
        lambda: _traffic(root),
        lambda: {"sums": store.sum_gate.obstacle(store.seen()[1] + 1) or None} if store.roster().keys else {},
        lambda: _live(root),
        lambda: _model(root),
    ):
        try:
            status |= read()
        except errors.DamagedFileError as error:  # noqa: PERF203 - the other fields are still shown
            problems.append(str(error))
    problems += damage_that_matters(config, store)
    # The file lags behind a running agent.
    if (today := status.pop("agent_bytes_today", None)) is not None:
        status["bytes_today"] = today
    return status | {"problem": "; ".join(dict.fromkeys(problems)) or None}


def damage_that_matters(config: AgentConfig, store: PrivateStore) -> list[str]:
    """Problems with files that the device needs to continue: keys, certificates, secrets and the private store. Each has a remedy."""
    found: list[str] = []
    for check in (lambda: load_keys(config), lambda: mqtt_config(config), store.take_over, store.check_small_files):
        try:
            check()
        except (errors.EdgeError, OSError) as error:  # noqa: PERF203 - all are listed
            found.append(in_words(error))
    return found


def status_table(status: Status) -> str:
    """The state as a table with a line for each field that has a value."""
    shown = {name.replace("_", " "): _in_words(name, value) for name, value in status.items()}
    rows = [(name, log_text(text, len(text))) for name, text in shown.items() if text]
    return table(("about", "state"), rows, "")


def _in_words(name: str, value: EventValue) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {count}" for key, count in value.items())
    if isinstance(value, list):
        return "; ".join(value)
    if isinstance(value, float):
        if name == "last_welcomed":
            return moment(value)
        return f"{value:.1%}" if name.endswith("accuracy") else f"{value:g}"
    return "" if value is None else str(value)


def is_revoked(config: AgentConfig) -> bool:
    """Whether the coordinator has revoked this device, by its last statement."""
    try:
        key = load_keys(config).signing.public.hex
    except errors.EdgeError:
        return False  # without a key, no device can be revoked
    return PrivateStore(config.store).is_revoked(key)


def _pause(root: Path) -> Status:
    pause = PauseFile(root).read()
    if pause is None or pause.is_over(time.time()):
        return {"paused": None, "pause_reason": None}
    until = "resumed" if pause.until is None else moment(pause.until)
    return {"paused": f"until {until}", "pause_reason": pause.reason or None}


def _consent(root: Path) -> Status:
    kept = Consent(root).read()
    return {
        "waits_for_approval": [f"{digest[:12]}: {one.detail}" for digest, one in kept.waiting.items()] or None,
        "approved": [digest[:12] for digest in kept.approved] or None,
    }


def _traffic(root: Path) -> Status:
    traffic = TrafficCounter(root, time.time).today()
    return {"bytes_today": {"up": traffic.up, "down": traffic.down}}


def _model(root: Path) -> Status:
    with contextlib.suppress(ExportError):
        current = ModelVersions(root / "models").current()
        return {"model": str(current), "model_accuracy": read_manifest(current).verification.accuracy_onnx}
    return {"model": ""}


def _live(root: Path) -> Status:
    """The running agent's own answer about its state. Empty if no agent runs."""
    try:
        return {f"agent_{name}": value for name, value in ask_agent(root, StatusRequest()).items()}
    except errors.NotRunningError:
        return {}
    except errors.OwnerRequestError as error:
        return {"agent_now": f"unknown: {error}"}


def _certificate_end(config: AgentConfig) -> str | None:
    if config.tls is None:
        return None
    try:
        certificate = read_certificate(config.tls.cert)
    except errors.EnrolError:
        return None
    return f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"


def _newest(store: PrivateStore) -> tuple[Generation | None, list[str]]:
    try:
        generation, problems = store.generations.current()
    except errors.StoreDamagedError as error:
        return None, [str(error)]
    return generation, list(problems)


def _trained(store: PrivateStore, generation: Generation | None) -> Status:
    return {
        "privacy_spent": _spent(store),
        "round": None if generation is None else generation.round_attempt.round,
        "attempt": None if generation is None else generation.round_attempt.attempt,
        "spec": None if generation is None else generation.spec,
        "backbone": None if generation is None else generation.backbone or None,
        "best_round": None if generation is None else generation.scores.get("best.round"),
    }


def _receipts(store: PrivateStore, generation: Generation | None) -> Status:
    outbox = store.outbox(generation)
    deliveries = store.deliveries()
    odd = [each for each in deliveries if each.outcome == Outcome.ACCEPTED.value and each.reason]
    found: Status = {"update_waiting": None if outbox is None else outbox.artifact}
    found |= {"last_receipt": None, "odd_updates": None}
    if deliveries:
        last = deliveries[-1]
        found["last_receipt"] = f"round {last.round}.{last.attempt}: {last.outcome} {last.reason}".strip()
    if odd:
        where = f"round {odd[-1].round}.{odd[-1].attempt}: {odd[-1].reason}"
        found["odd_updates"] = f"{len(odd)} of the last {len(deliveries)}; {where}"
    return found


def _images(store: PrivateStore, generation: Generation | None) -> Status:
    """Images of the last trained round by class, and skipped images with reasons."""
    count, reasons = store.left_out()
    more = f" and {count - LISTED} more" if count > LISTED else ""
    named = f"{count}: {'; '.join(list(reasons.values())[:LISTED])}{more}; {LEFT_OUT_ADVICE}"
    found: Status = {"images": None, "images_left_out": named if count else None}
    spec = None if generation is None else store.spec(generation.spec)
    if generation is not None and spec is not None:
        labels = Counter(file.label for file in store.generations.snapshot(generation).files)
        found["images"] = ", ".join(f"{name} {labels[label]}" for label, name in enumerate(spec.classes))
    return found


def _spent(store: PrivateStore) -> str | None:
    try:
        record = store.record(PRIVACY_FILE)
    except errors.DamagedFileError as error:
        return f"unknown: {error}"
    if not record:
        return None
    try:
        found = PrivacySpent.model_validate({name: record.get(name) for name in PrivacySpent.model_fields})
    except ValidationError:
        return f"unknown: {PRIVACY_FILE} in the store is damaged"
    budget = "" if found.budget is None else f" of {found.budget:g}"
    rest = "" if record.get("covered") else "; updates sent without DP-SGD are not covered"
    return f"epsilon {found.epsilon:.3g}{budget} at delta {found.delta:g}{rest}"


def _latest(path: Path) -> Status:
    found: Status = {}
    refused: dict[str, int] = {}
    for event in read_events(path):
        name, about = str(event.get("event")), f"round {event.get('round')}, attempt {event.get('attempt')}"
        if name == "agent_started":
            refused = {}
            found |= {"last_link": None, "link_problem": None, "last_welcomed": None}
        elif name == "refused" and isinstance(count := event.get("count"), int):
            refused[str(event.get("reason"))] = count
        elif name == "declined":
            found["last_declined"] = f"{about}: {event.get('reason')}: {event.get('detail', '')}".rstrip(": ")
        elif name == "phase_started":
            phase = event.get("phase")
            found["training"] = WAITS if phase == "wait" else f"{about}: {phase}"
        elif name in ("paused", "resumed"):
            found["training"] = f"{about}: {name}" + (f": {event.get('detail')}" if name == "paused" else "")
        elif name == "audited":
            verdict = "may be sent" if event.get("passed") else "withheld"
            found["last_audit"] = f"{about}: {verdict}; {event.get('report')}"
        elif name == "trainer_died":
            found["last_trainer_death"] = f"exit code {event.get('exit_code')} {event.get('reason')}".strip()
        if name in ENDS_OF_TRAINING:
            found["training"] = None
        if name in _ENDS:
            found[_ENDS[name]] = None
        if name in _SHOWN:
            key, field = _SHOWN[name]
            found[key] = event.get(field)
    return {"refused": refused, **found}
