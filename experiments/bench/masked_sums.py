"""One masked sum after the other, every device in this process: bytes that cross and processor time, by the number of devices.

Each sum is compared with the plain one: a wrong number ends the measurement.
"""

import time
from dataclasses import dataclass

import numpy as np

from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.sums import (
    Members,
    SumRound,
    SumSecrets,
    Survivors,
    added,
    masked,
    reveal,
    share_out,
    sign_survivors,
    unmask,
)

_AT = SumRound("bench", 1, 1)
_SIGNATURE_BYTES = 64
_KEYS_BYTES = 3 * 32 + _SIGNATURE_BYTES


@dataclass(frozen=True)
class SumCost:
    """The cost of one sum.

    Attributes:
        devices: that began it.
        lost: that vanished between keys and numbers.
        numbers: of each device.
        numbers_bytes: of one device's masked numbers; `control_up`, `control_down` of all else that it sends and gets, before JSON and base64.
        device_ms: processor time of one device; `coordinator_ms` of the coordinator.
    """

    devices: int
    lost: int
    numbers: int
    numbers_bytes: int
    control_up: int
    control_down: int
    device_ms: float
    coordinator_ms: float


def measure_sum(devices: int, lost: int, size: int) -> SumCost:
    """Run one.

    Raises:
        RuntimeError: the sum is wrong.
        SumError: too many are lost.
    """
    names = [f"device-{number:04}" for number in range(devices)]
    keys = {name: SigningKey.generate() for name in names}
    roster = {name: key.public for name, key in keys.items()}
    stream = np.random.default_rng(0)
    numbers = {name: stream.integers(0, 1 << 20, size, dtype=np.uint32) for name in names}
    began = time.process_time()
    secrets = {name: SumSecrets.draw(name) for name in names}
    announced = {name: secrets[name].announce(_AT, 1, keys[name]) for name in names}
    members = Members(_AT, announced)
    for _ in names:
        members.check(roster)
    dealt = {name: share_out(secrets[name], members) for name in names}
    there = names[: devices - lost]
    sent = {name: masked(secrets[name], members, names, numbers[name]) for name in there}
    signatures = {name: sign_survivors(_AT, names, there, keys[name]) for name in there}
    survivors = Survivors(tuple(names), tuple(there), signatures)
    revealed = {
        name: reveal(secrets[name], members, {peer: dealt[peer][name] for peer in names}, survivors, roster)
        for name in there
    }
    device_ms = 1000.0 * (time.process_time() - began) / devices
    began = time.process_time()
    total = added(list(sent.values()))
    found = unmask(total, members, survivors, revealed)
    coordinator_ms = 1000.0 * (time.process_time() - began)
    if not np.array_equal(found, added([numbers[name] for name in there])):
        raise RuntimeError(f"the sum of {devices} devices is wrong")
    sealed = sum(map(len, dealt[names[0]].values()))
    shares = sum(map(len, revealed[names[0]].values()))
    return SumCost(
        devices,
        lost,
        size,
        sent[names[0]].nbytes,
        _KEYS_BYTES + sealed + _SIGNATURE_BYTES + shares,
        devices * _KEYS_BYTES + sealed + len(there) * _SIGNATURE_BYTES,
        device_ms,
        coordinator_ms,
    )
