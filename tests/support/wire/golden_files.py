"""Writes the golden frames of this version: `python -m tests.support.wire.golden_files`. Only writes missing files.

Later versions must read the frames of this version, so existing files never change.
"""

import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import SigningKey, make_link, seal
from tests.support.wire.artifact_chunks import frames_for, make_ref

GOLDEN = Path(__file__).parents[2] / "golden"
FEDERATION, DEVICE = "shapes", "site-1"


CONDITION = schemas.DeviceCondition(
    findings=(
        schemas.DoctorFinding(check="data", state="warning"),
        schemas.DoctorFinding(check="disk", state="failed"),
    ),
    model=schemas.ServedModel(
        version="0003",
        round=2,
        serves="int8",
        accuracy=0.5,
        before=0.25,
        forms=(
            schemas.FormEvidence(name="fp32", size=90_000, latency_ms=1.5, accuracy=0.5, agreement=1.0, images=40),
            schemas.FormEvidence(name="int8", size=30_000, latency_ms=0.5, accuracy=0.475, agreement=0.95, images=40),
        ),
    ),
)


def known_key(number: int) -> SigningKey:
    """Return a reproducible key; Ed25519 signatures are a function of key and bytes."""
    return SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32))


COORDINATOR_KEY, DEVICE_KEY, NEW_KEY = known_key(1), known_key(2), known_key(3)


def key_of(message: schemas.AnyMessage) -> SigningKey:
    """Return the signer of a message of the golden files."""
    if isinstance(message, schemas.KeyChain):
        return NEW_KEY
    return COORDINATOR_KEY if message.sender == schemas.COORDINATOR else DEVICE_KEY


def messages() -> tuple[schemas.AnyMessage, ...]:
    """Return one message of every kind, with every field set."""
    ref = schemas.ArtifactRef(id="a" * 64, size=12_345, chunk_bytes=1024)
    where: dict[str, Any] = {"federation": FEDERATION, "epoch": 3, "round": 2, "attempt": 1}
    everyone = {**where, "sender": schemas.COORDINATOR, "recipient": schemas.EVERYONE}
    greeting = {**where, "sender": schemas.COORDINATOR, "recipient": DEVICE}
    down = {**greeting, "session": "5" * 64, "counter": 7}
    up = {**where, "sender": DEVICE, "recipient": schemas.COORDINATOR, "session": "5" * 64, "counter": 8}
    hello = {**where, "sender": DEVICE, "recipient": schemas.COORDINATOR}
    return (
        schemas.Offer(**everyone, spec=ref, aggregate=ref, rounds=9, deadline_at=1.5),
        schemas.Finished(**everyone, spec=ref, aggregate=ref),
        schemas.CoordinatorStatus(**everyone, online=True),
        schemas.KeyChain(**everyone, links=(make_link(FEDERATION, 1, 2, COORDINATOR_KEY, NEW_KEY.public),)),
        schemas.DeviceStatus(**hello, online=False),
        schemas.Hello(
            **hello,
            nonce="0" * 32,
            versions=(schemas.PROTOCOL_VERSION,),
            agent="0.1.0",
            cohort="1" * 32,
            heartbeat_s=30,
        ),
        schemas.Heartbeat(**up, phase="classify", step=30, steps=120),
        schemas.SelfReport(**up, boot="3" * 32, clock=2.5, condition=CONDITION),
        schemas.Welcome(
            **greeting,
            version=schemas.PROTOCOL_VERSION,
            device_nonce="0" * 32,
            nonce="2" * 32,
            server_time=2.5,
            cohort=schemas.CohortVerdict.SAME,
        ),
        schemas.Refusal(**greeting, device_nonce="0" * 32, versions=(2, 3), device_versions=(1,), update="device"),
        schemas.Invite(**down, cohort=schemas.CohortVerdict.DIFFERENT),
        schemas.Accept(**up),
        schemas.Decline(**up, reason=schemas.DeclineReason.NO_DATA),
        schemas.Manifest(**up, artifact=ref),
        schemas.Need(**down, artifact="a" * 64, ranges=((0, 3), (7, 1))),
        schemas.Leave(**up),
        schemas.Left(**down),
        schemas.Revoked(**greeting, key="6" * 64),
        schemas.Receipt(**down, artifact="a" * 64, outcome=schemas.Outcome.REJECTED, reason="not finite"),
        schemas.SumUp(**up, body=schemas.SumShares(sealed={"line-1": "a" * 96})),
        schemas.SumDown(**down, body=schemas.SumSurvivors(names=("line-1", "line-2"))),
    )


def write_missing() -> None:
    """Write missing golden files."""
    frames = GOLDEN / "frames" / f"protocol-{schemas.PROTOCOL_VERSION}.json"
    known = json.loads(frames.read_text()) if frames.exists() else {}
    chunk = next(frames_for(b"golden" * 100, make_ref(b"golden" * 100, 256)))
    made = {message.kind: seal(message, key_of(message)).hex() for message in messages()}
    frames.parent.mkdir(exist_ok=True)
    frames.write_text(json.dumps({"chunk": chunk.hex(), **made, **known}, indent=1) + "\n")


if __name__ == "__main__":
    write_missing()
