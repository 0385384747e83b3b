"""The doctor's checks of a device, each with advice. Never imports torch."""

import contextlib
import fcntl
import os
import shutil
import socket
import ssl
import stat
import struct
import sys
from collections.abc import Callable, Collection
from datetime import datetime, timedelta, timezone
from functools import partial
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from devices.files import LIVE_ROOT, is_encrypted
from edge_client.cli.doctor.data_check import check_data
from edge_client.cli.doctor.findings import Finding as Finding
from edge_client.cli.doctor.findings import Result, existing_place, finding_of, spec_of
from edge_client.cli.doctor.hardware import check_predictions, check_training
from edge_client.cli.status import is_revoked, read_status
from edge_client.config import AgentConfig
from edge_client.errors import EdgeError, EnrolError, StoreError
from edge_client.firewall import check_spec
from edge_client.identity.conversation import converse
from edge_client.identity.credentials import life_of, load_keys, mqtt_config, read_certificate
from edge_client.identity.enrolment_client import fetch_authority
from edge_client.link.https_client import check_ready
from edge_client.store.owner_record import Consent
from edge_client.store.private_store import DEFENCE_FOLDER, PrivateStore, open_store
from fedcg.files import advice_for, is_locked
from fedcg.learning.defences.defence import SAMPLES_FILE, defence_label
from fedcg.sentences import REVOKED_ADVICE
from fedcg.wire.errors import TransportError, WireError
from fedcg.wire.messages.enrolment_messages import certificate_key_digest, common_name
from fedcg.wire.messages.schemas import Carrier, DoctorCheck, DoctorFinding
from fedcg.wire.tls import AUTHORITY_NAME, MOST_CLOCK_OFF_S, SET_CLOCK, clock_difference, clock_time
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import explain_failure

LEAST_FREE_BYTES = 1 << 30
EXPIRES_SOON = timedelta(days=14)
OVERDUE = 1 / 4  # of its validity left; the agent starts renewing at a third, so renewal must have failed
# A certificate that expired this long ago more likely means a wrong clock than a device that was in storage.
LONG_OFF = timedelta(days=365)
CLOCK_OFF_S = 60.0  # beyond it the coordinator reports a problem too
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0  # connecting takes five round trips, 0.6 s each over a satellite link
ENCRYPT_DISK = "encrypt it: LUKS with the TPM, on a Jetson its own disk encryption; docs/how-to/encrypt-disk.md"
# From linux/fs.h: the ioctl that reads a file's attributes, and the attribute of folders that fscrypt encrypts.
FS_IOC_GETFLAGS = 0x80006601 | struct.calcsize("l") << 16
FS_ENCRYPT_FL = 0x800
ENROL_AGAIN = "enrol the device again, or copy its bundle again"
FOLLOW = "follow the advice in this message"
_REMEDIES = {
    **dict.fromkeys(("keys", "certificate", "authority"), ENROL_AGAIN),
    "store": "the agent can't start until this is repaired",
    "policy": "restore the file from a backup, or delete it and approve again",
    "cohort secret": "delete the file and run `fedcg cohort join`",
}
"""What to do if a check raises an EdgeError, by its name; FOLLOW for the others."""


def examine(config: AgentConfig, now: datetime, only: Collection[str] | None = None) -> tuple[Finding, ...]:
    """Run all checks of a device, or only some, in the order in which to repair what they find."""
    coordinator, ahead_s = _coordinator(config, now) if only is None else (("ok", "", ""), None)
    checks: dict[str, Callable[[AgentConfig, datetime], Result]] = {
        "clock": _clock if only is not None else lambda config, now: _clocks(config, now, ahead_s),
        "paths": _paths,
        "disk": _disk,
        "encrypted disk": lambda config, now: check_encryption(existing_place(config.store)),
        "keys": _keys,
        "certificate": _certificate,
        "broker": _broker,
        "authority": _authority,
        "coordinator": lambda config, now: coordinator,
        "carrier": _carrier,
        "store": _store,
        "data": check_data if only is None else partial(check_data, calls=False),  # the agent imports no torch
        "defence": _defence,
        "policy": _policy,
        "cohort secret": _cohort_secret,
        "sums": _sums,
        "training": check_training,
        "predictions": check_predictions,
        "audit": _audit,
        "privacy": _privacy,
    }
    chosen = checks if only is None else {name: checks[name] for name in only}
    return tuple(finding_of(name, _result(name, check, config, now)) for name, check in chosen.items())


def _result(name: str, check: Callable[[AgentConfig, datetime], Result], config: AgentConfig, now: datetime) -> Result:
    """The result of a check. A check that raises an EdgeError or OSError becomes a failed finding."""
    try:
        return check(config, now)
    except EdgeError as error:
        return "failed", str(error), _REMEDIES.get(name, FOLLOW)
    except OSError as error:
        return "failed", f"{error.filename or config.store}: {error.strerror or error}", advice_for(error, config.store)


def findings_of(config: AgentConfig) -> tuple[DoctorFinding, ...]:
    """The findings of the checks that need no network, as codes that may leave the device. Details contain paths and stay here."""
    found = examine(config, datetime.now(timezone.utc), get_args(DoctorCheck))
    return tuple(
        DoctorFinding.model_validate({"check": one.check, "state": one.state}) for one in found if one.state != "ok"
    )


def _clock(config: AgentConfig, now: datetime) -> Result:
    if config.tls is None:
        return "ok", clock_time(now), ""
    detail, advice = f"it shows {clock_time(now)}", f"{SET_CLOCK}: TLS needs a correct clock"
    with contextlib.suppress(EnrolError):  # reported by the certificate check
        certificate = read_certificate(config.tls.cert)
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now < first:
            return "failed", f"{detail}, before this device's certificate is valid ({first:%Y-%m-%d %H:%M} UTC)", advice
        if now > last + LONG_OFF:
            detail += f", long after this device's certificate expired ({last:%Y-%m-%d})"
            return "failed", detail, f"if it is wrong: {advice}"
    return "ok", clock_time(now), ""


def _clocks(config: AgentConfig, now: datetime, ahead_s: float | None) -> Result:
    """Compare this device's clock with its certificate's dates and the coordinator's clock, from its welcome or its enrolment listener."""
    state, detail, advice = _clock(config, now)
    url = config.enrolment.url
    problem = "no welcome was received over the broker, and agent.toml has no url under [enrolment]"
    if ahead_s is None and url is not None and config.tls is not None:
        try:
            _, ahead_s = fetch_authority(url, certificate_key_digest(read_certificate(config.tls.ca)))
        except (EnrolError, WireError) as error:
            problem = str(error)
    if state != "ok":
        return state, detail, advice
    if ahead_s is None:
        return "warning" if url else "ok", f"{detail}, not compared with the coordinator's: {problem}", ""
    if abs(ahead_s) <= CLOCK_OFF_S:
        return "ok", f"{detail}, matches the coordinator's", ""
    return "failed" if abs(ahead_s) > MOST_CLOCK_OFF_S else "warning", clock_difference(ahead_s), SET_CLOCK


def _paths(config: AgentConfig, now: datetime) -> Result:
    """Folders and files named in agent.toml exist and can be used by the agent."""
    folder = existing_place(config.store)
    if not folder.is_dir():
        return "failed", f"store: {folder} is not a folder", "correct `store` in agent.toml, or create it"
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        detail = f"store: the user with id {os.geteuid()} can't write to {folder}"
        advice = "give the agent's user write access (chown, chmod), or correct `store` in agent.toml"
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            detail, advice = f"{detail}, which is on a read-only disk", f"mount it writable, {advice}"
        return "failed", detail, advice
    return "ok", "folders and files named in agent.toml can be used", ""


def _disk(config: AgentConfig, now: datetime) -> Result:
    place = existing_place(config.store)
    free = shutil.disk_usage(place).free
    detail = f"{free / (1 << 30):.1f} GiB free at {place}"
    if free < LEAST_FREE_BYTES:
        return "failed", detail, f"free disk space: at least {LEAST_FREE_BYTES >> 30} GiB is needed"
    return "ok", detail, ""


def check_encryption(place: Path, root: Path = LIVE_ROOT) -> Result:
    """Whether a folder is on an encrypted block device, as far as Linux reports it below `root`."""
    found = is_encrypted(root, place.stat().st_dev)
    if found:
        return "ok", f"yes: {place} is on an encrypted block device", ""
    if _has_fscrypt(place):
        return "ok", f"unknown: the file system encrypts {place} (fscrypt), but possibly not its whole disk", ""
    if found is None:
        return "ok", f"unknown: Linux reports no disk for {place} (btrfs, a container, a network?)", ""
    detail = f"no: {place} is on an unencrypted disk, so anyone with the disk can read the private store"
    return "warning", detail, ENCRYPT_DISK


def _has_fscrypt(folder: Path) -> bool:
    flags = bytearray(struct.calcsize("l"))
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, flags)
    except OSError:  # a file system without attributes
        return False
    finally:
        os.close(descriptor)
    return bool(int.from_bytes(flags[:4], sys.byteorder) & FS_ENCRYPT_FL)


def _keys(config: AgentConfig, now: datetime) -> Result:
    load_keys(config)
    secrets = [config.keys.signing] + ([config.tls.key] if config.tls is not None else [])
    for path in secrets:
        if path.exists() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return "warning", f"{path} can be read by other users", f"chmod 600 {path}"
    return "ok", "signing key and coordinator's key can be read", ""


def _certificate(config: AgentConfig, now: datetime) -> Result:
    if config.tls is None:
        return "warning", "no TLS", "use only for tests on one machine"
    certificate = read_certificate(config.tls.cert)
    name = common_name(certificate)
    if name != config.device:
        detail = f"it is for {name or 'no device'}, not for {config.device}"
        return "failed", detail, "use this device's bundle, or correct `device`"
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not first <= now <= last:
        advice = f"if the clock is wrong, {SET_CLOCK}; otherwise enrol again with a token from `fedcg token create --replaces`"
        return "failed", f"valid {first:%Y-%m-%d} to {last:%Y-%m-%d}", advice
    renews = config.enrolment.url is not None
    if not renews and last - now < EXPIRES_SOON:
        return "warning", f"expires {last:%Y-%m-%d}", "ask the operator for a new bundle soon"
    if renews and last - now < life_of(certificate) * OVERDUE:
        detail = f"expires {last:%Y-%m-%d %H:%M} UTC, and the agent has not renewed it"
        return "warning", detail, "run `fedcg agent renew` and read its message"
    return "ok", f"{name}, valid until {last:%Y-%m-%d %H:%M} UTC{', renewed by the agent' if renews else ''}", ""


def _broker(config: AgentConfig, now: datetime) -> Result:
    try:
        mqtt = mqtt_config(config)
        context = None if mqtt.tls is None else mqtt.tls.context()
    except (TransportError, EdgeError, ValueError) as error:
        return "failed", str(error), f"{ENROL_AGAIN}, or correct the [tls] files"
    try:
        with socket.create_connection((mqtt.host, mqtt.port), CONNECT_TIMEOUT_S) as plain:
            if context is not None:
                with context.wrap_socket(plain, server_hostname=mqtt.host) as secured:
                    return "ok", f"{mqtt.address} answers, {secured.version()}", ""
    except (OSError, ssl.SSLError) as error:
        return "failed", explain_failure(mqtt, error), "ask the operator of the broker"
    return "ok", f"{mqtt.address} answers, without TLS", ""


def _authority(config: AgentConfig, now: datetime) -> Result:
    if config.tls is None:
        return "ok", "no TLS", ""
    name = common_name(read_certificate(config.tls.ca))
    if name == AUTHORITY_NAME:
        return "ok", f"{name}: the broker must present a certificate issued for a broker", ""
    detail = f"{name!r} is not a coordinator's authority: any holder of its certificate for {config.broker.host} can act as the broker"
    return "ok", detail, ""


def _coordinator(config: AgentConfig, now: datetime) -> tuple[Result, float | None]:
    """Send a hello and wait for the welcome: tests that the broker delivers this device's messages and that the coordinator answers.

    Also returns by how many seconds this device's clock is ahead of the coordinator's, if it answered.
    """
    try:
        if is_revoked(config):
            return ("failed", "it has revoked this device", REVOKED_ADVICE), None
        if _broker(config, now)[0] == "failed":
            return ("warning", "not checked: can't reach the broker", ""), None
        is_made = PrivateStore(config.store).is_made
        if is_made and is_locked(config.store / "lock"):
            return _running(config), None
        # Don't create the store here: it would belong to the user that runs this command.
        with TemporaryDirectory() as empty:
            store, keys = open_store(config) if is_made else PrivateStore(Path(empty)), load_keys(config)
            with store.locked():
                transport = MqttTransport(mqtt_config(config, keys))
                ahead_s = converse(config, keys, store, transport, ANSWER_TIMEOUT_S, is_leaving=False)
    except StoreError as error:
        return ("warning", f"not checked: {error}", ""), None
    except (EdgeError, WireError, OSError) as error:
        advice = f"ask the operator: `fedcg federation show {config.federation}`, `fedcg device show {config.device}`, and whether the broker has read its access list"
        return ("failed", str(error), advice), None
    return ("ok", "it answers this device", ""), ahead_s


def _running(config: AgentConfig) -> Result:
    """Check the running agent's session. A second session under the same name would end it."""
    status = read_status(config)
    problem = status.get("link_problem")
    if not status.get("last_link") or not status.get("last_welcomed"):
        problem = problem or "it is not connected"
    elif status.get("agent_in_session") is False:
        problem = problem or "it has no session"
    if problem:
        detail = f"the agent runs, but has no answer: {problem}"
        return "failed", detail, "stop the agent and run this again: the check then opens its own session"
    return "ok", "the agent runs, and the coordinator answered it", ""


def _carrier(config: AgentConfig, now: datetime) -> Result:
    if config.carrier is not Carrier.HTTPS or config.carrier_url is None or config.tls is None:
        return "ok", "artifacts are sent over the broker", ""
    try:
        check_ready(config.carrier_url, config.tls.files)
    except ssl.SSLError as error:
        detail = f"{config.carrier_url}: TLS failed ({error})"
        return "failed", detail, "check carrier_url and the certificate; use the carrier's port"
    except (WireError, OSError, HTTPException) as error:
        advice = 'ask the operator: `port` under [carrier] in coordinator.toml; or set `carrier = "mqtt"`'
        return "failed", f"{config.carrier_url}: {error}", advice
    return "ok", f"{config.carrier_url} answers and accepts this device", ""


def _store(config: AgentConfig, now: datetime) -> Result:
    """Check that every file of the private store passes its checksum."""
    store = open_store(config)
    if not store.is_made:
        return "ok", "none yet", ""
    store.take_over()
    problems = (*store.generations.current()[1], *store.damage())
    if problems:
        return ("warning", "; ".join(problems), "the agent uses the intact files and restores the others")
    return "ok", "all files pass their checks", ""


def _defence(config: AgentConfig, now: datetime) -> Result:
    label = defence_label(config.data.defence, config.data.defence_params)
    if not label:
        return "ok", "none: models are trained on the real images", ""
    stem = config.data.defence_stem
    if stem is not None and not stem.is_file():
        return "failed", f"{label}: defence_stem {stem} is not a file", "correct or omit it"
    samples = config.store / DEFENCE_FOLDER / SAMPLES_FILE
    if samples.exists():
        return "ok", f"{label}; how real images change (private, never sent): {samples}", ""
    return ("ok", f"{label}; sample pictures will be in {samples} once the first round has started", "")


def _policy(config: AgentConfig, now: datetime) -> Result:
    if (spec := spec_of(config)) is None:
        return "ok", "not checked: no federation spec yet", ""
    refused = check_spec(spec, Consent(open_store(config).root).policy_for(config.policy, spec))
    if refused is None:
        return "ok", f"it allows what {spec.federation} asks for", ""
    detail = f"rounds of {spec.federation} are declined: {refused[1]}"
    return "warning", detail, "review and approve it with `fedcg agent approve`"


def _cohort_secret(config: AgentConfig, now: datetime) -> Result:
    if not (config.store / "secrets" / "cohort.key").exists():
        detail = "none: private networks start from the public spec seed, so a coordinator can compute initial weights"
        advice = "`fedcg cohort create` on the first device, `fedcg cohort join` on the others; after the first round they print the steps"
        return "warning", detail, advice
    open_store(config).cohort_secret()
    return "ok", "present", ""


def _sums(config: AgentConfig, now: datetime) -> Result:
    store = PrivateStore(config.store)
    has_roster, first = store.is_made and bool(store.roster().keys), store.sum_gate.first_round
    if not has_roster and (spec := spec_of(config)) is not None and spec.sealed:
        text = f"{spec.federation} uses sealed sums, and this device has no roster of the cohort, so it declines every round"
        advice = "add the output of `fedcg cohort card` to the roster, then `fedcg cohort roster FILE` on every device"
        return "warning", text, advice
    if not has_roster:
        return "ok", "no roster of the cohort: this device joins no sealed sums", ""
    if first is not None:
        return "ok", f"this device joins sums from round {first} on", ""
    advice = "find the highest `last round with a sum` in `fedcg cohort status` on the other devices, then `fedcg cohort resume-sums ROUND`"
    return "warning", f"this device joins no sealed sums: {store.sum_gate.obstacle(0)}", advice


def _audit(config: AgentConfig, now: datetime) -> Result:
    audit = config.audit
    if not audit.is_on:
        return "ok", "off: updates are sent without an audit", ""
    if problem := audit.obstacle:
        return "failed", problem, 'or set before_publish = "off" to send updates without an audit'
    gate = audit.gate or "none: a report is written, no update is withheld"
    return "ok", f"{audit.before_publish}, {', '.join(audit.attacks) or 'all attacks'}; gate {gate}", ""


def _privacy(config: AgentConfig, now: datetime) -> Result:
    if not config.privacy.is_on:
        return "ok", "no mechanism is on: updates are sent as trained", ""
    if config.privacy_obstacle:
        return "failed", config.privacy_obstacle, "or remove [privacy.dp_sgd] from agent.toml"
    return "ok", config.privacy.label, ""
