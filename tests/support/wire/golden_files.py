"""Writes the golden frames of this version: `python -m tests.support.wire.golden_files`. Writes what is missing, and never over what is there.

A frame that a version wrote is what later versions must read: existing files are history.
"""

import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedcg.wire.messages.envelopes import SigningKey, make_link, seal
from fedcg.wire.messages.schemas import (
    COORDINATOR,
    EVERYONE,
    PROTOCOL_VERSION,
    Accept,
    AnyMessage,
    ArtifactRef,
    CohortVerdict,
    CoordinatorStatus,
    Decline,
    DeclineReason,
    DeviceCondition,
    DeviceStatus,
    DoctorFinding,
    Finished,
    FormEvidence,
    Heartbeat,
    Hello,
    Invite,
    KeyChain,
    Leave,
    Left,
    Manifest,
    Need,
    Offer,
    Outcome,
    Receipt,
    Refusal,
    Revoked,
    SelfReport,
    ServedModel,
    SumDown,
    SumShares,
    SumSurvivors,
    SumUp,
    Welcome,
)
from tests.support.wire.artifact_chunks import frames_for, make_ref

GOLDEN = Path(__file__).parents[2] / "golden"
FEDERATION, DEVICE = "shapes", "site-1"


CONDITION = DeviceCondition(
    findings=(DoctorFinding(check="data", state="warning"), DoctorFinding(check="disk", state="failed")),
    model=ServedModel(
        version="0003",
        round=2,
        serves="int8",
        accuracy=0.5,
        before=0.25,
        forms=(
            FormEvidence(name="fp32", size=90_000, latency_ms=1.5, accuracy=0.5, agreement=1.0, images=40),
            FormEvidence(name="int8", size=30_000, latency_ms=0.5, accuracy=0.475, agreement=0.95, images=40),
        ),
    ),
)


def known_key(number: int) -> SigningKey:
    """A key that everybody can make again; signatures of Ed25519 are a function of key and bytes."""
    return SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32))


COORDINATOR_KEY, DEVICE_KEY, NEW_KEY = known_key(1), known_key(2), known_key(3)


def key_of(message: AnyMessage) -> SigningKey:
    """Who signs a message of the golden files."""
    if isinstance(message, KeyChain):
        return NEW_KEY
    return COORDINATOR_KEY if message.sender == COORDINATOR else DEVICE_KEY


def messages() -> tuple[AnyMessage, ...]:
    """One message of every kind, with every field set."""
    ref = ArtifactRef(id="a" * 64, size=12_345, chunk_bytes=1024)
    where: dict[str, Any] = {"federation": FEDERATION, "epoch": 3, "round": 2, "attempt": 1}
    everyone = {**where, "sender": COORDINATOR, "recipient": EVERYONE}
    greeting = {**where, "sender": COORDINATOR, "recipient": DEVICE}
    down = {**greeting, "session": "5" * 64, "counter": 7}
    up = {**where, "sender": DEVICE, "recipient": COORDINATOR, "session": "5" * 64, "counter": 8}
    hello = {**where, "sender": DEVICE, "recipient": COORDINATOR}
    return (
        Offer(**everyone, spec=ref, aggregate=ref, rounds=9, deadline_at=1.5),
        Finished(**everyone, spec=ref, aggregate=ref),
        CoordinatorStatus(**everyone, online=True),
        KeyChain(**everyone, links=(make_link(FEDERATION, 1, 2, COORDINATOR_KEY, NEW_KEY.public),)),
        DeviceStatus(**hello, online=False),
        Hello(**hello, nonce="0" * 32, versions=(PROTOCOL_VERSION,), agent="0.1.0", cohort="1" * 32, heartbeat_s=30),
        Heartbeat(**up, phase="classify", step=30, steps=120),
        SelfReport(**up, boot="3" * 32, clock=2.5, condition=CONDITION),
        Welcome(
            **greeting,
            version=PROTOCOL_VERSION,
            device_nonce="0" * 32,
            nonce="2" * 32,
            server_time=2.5,
            cohort=CohortVerdict.SAME,
        ),
        Refusal(**greeting, device_nonce="0" * 32, versions=(2, 3), device_versions=(1,), update="device"),
        Invite(**down, cohort=CohortVerdict.DIFFERENT),
        Accept(**up),
        Decline(**up, reason=DeclineReason.NO_DATA),
        Manifest(**up, artifact=ref),
        Need(**down, artifact="a" * 64, ranges=((0, 3), (7, 1))),
        Leave(**up),
        Left(**down),
        Revoked(**greeting, key="6" * 64),
        Receipt(**down, artifact="a" * 64, outcome=Outcome.REJECTED, reason="not finite"),
        SumUp(**up, body=SumShares(sealed={"line-1": "a" * 96})),
        SumDown(**down, body=SumSurvivors(names=("line-1", "line-2"))),
    )


def write_missing() -> None:
    """Write the golden files that are not there yet."""
    frames = GOLDEN / "frames" / f"protocol-{PROTOCOL_VERSION}.json"
    known = json.loads(frames.read_text()) if frames.exists() else {}
    chunk = next(frames_for(b"golden" * 100, make_ref(b"golden" * 100, 256)))
    made = {message.kind: seal(message, key_of(message)).hex() for message in messages()}
    frames.parent.mkdir(exist_ok=True)
    frames.write_text(json.dumps({"chunk": chunk.hex(), **made, **known}, indent=1) + "\n")


if __name__ == "__main__":
    write_missing()
