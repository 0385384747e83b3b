"""One sealed sum after the other, every device in this process: bytes that cross and processor time, by the number of devices.

Each sum is opened by a device and compared with the plain one: a wrong number ends the measurement.
"""

import time
from dataclasses import dataclass, replace

import numpy as np

from coordinator.sums import groups_of
from fedcg.wire import sums
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.sealed_numbers import Numbers, added

_AT = sums.SumRound("bench", 1, 1)
_SECRET = bytes(range(32))
_SIGNATURE_BYTES = 64
_KEYS_BYTES = 3 * 32 + _SIGNATURE_BYTES


@dataclass(frozen=True)
class SumCost:
    """The cost of one sum.

    Attributes:
        devices: that began it, in `groups`.
        lost: that vanished between keys and numbers.
        numbers: of each device.
        numbers_bytes: of one device's numbers; `control_up`, `control_down` of all else that it sends and gets, before JSON and base64.
        device_ms: processor time of one device; `opening_ms` of one that opens the sum; `coordinator_ms` of the coordinator.
    """

    devices: int
    groups: int
    lost: int
    numbers: int
    numbers_bytes: int
    control_up: int
    control_down: int
    device_ms: float
    opening_ms: float
    coordinator_ms: float


def measure_sum(devices: int, lost: float, size: int) -> SumCost:
    """Run one, of so many devices of which a share is lost.

    Raises:
        RuntimeError: the sum is wrong.
        SumError: too many are lost.
    """
    drawn = groups_of(f"device-{number:04}" for number in range(devices))
    stream = np.random.default_rng(0)
    whole, total, opened = np.zeros((3, size), np.uint32)
    costs, lists = [], []
    for names in drawn:
        numbers = {name: stream.integers(0, 1 << 20, size, dtype=np.uint32) for name in names}
        there = names[: len(names) - round(lost * len(names))]
        whole = added([whole, *(sums.tagged(_AT, _SECRET, numbers[name]) for name in there)])
        cost, found, digest = _group(names, there, numbers)
        total = added([total, found])
        costs.append(cost)
        lists.append((digest, there))
    began, opened = time.process_time(), total
    for digest, there in lists:
        opened = sums.unsealed(opened, _AT, digest, there, _SECRET)
    sums.check_tags(_AT, _SECRET, opened)
    opening_ms = 1000.0 * (time.process_time() - began)
    if not np.array_equal(opened, whole):
        raise RuntimeError(f"the sum of {devices} devices is wrong")
    return replace(
        costs[0],
        devices=devices,
        groups=len(drawn),
        lost=sum(one.lost for one in costs),
        device_ms=sum(one.device_ms for one in costs) / len(costs),
        opening_ms=opening_ms,
        coordinator_ms=sum(one.coordinator_ms for one in costs),
    )


def _group(names: list[str], there: list[str], numbers: dict[str, Numbers]) -> tuple[SumCost, Numbers, str]:
    """The cost of one group's sum, the sum as the coordinator has it, and the digest of its members."""
    keys = {name: SigningKey.generate() for name in names}
    roster = {name: key.public for name, key in keys.items()}
    began = time.process_time()
    secrets = {name: sums.SumSecrets.draw(name) for name in names}
    members = sums.Members(_AT, {name: secrets[name].announce(_AT, 1, keys[name]) for name in names})
    for _ in names:
        members.check(roster)
    dealt = {name: sums.share_out(secrets[name], members) for name in names}
    told = {name: sums.tagged(_AT, _SECRET, numbers[name]) for name in there}
    sent = {name: sums.masked(secrets[name], members, names, told[name], _SECRET) for name in there}
    signatures = {name: sums.sign_survivors(members, names, there, keys[name]) for name in there}
    survivors = sums.Survivors(tuple(names), tuple(there), signatures)
    revealed = {
        name: sums.reveal(secrets[name], members, {peer: dealt[peer][name] for peer in names}, survivors, roster)
        for name in there
    }
    device_ms = 1000.0 * (time.process_time() - began) / len(names)
    began = time.process_time()
    found = sums.unmask(added(list(sent.values())), members, survivors, revealed)
    coordinator_ms = 1000.0 * (time.process_time() - began)
    shares, given = sum(map(len, dealt[names[0]].values())), sum(map(len, revealed[names[0]].values()))
    size, count = len(found), len(names)
    control_up = _KEYS_BYTES + shares + _SIGNATURE_BYTES + given
    control_down = count * _KEYS_BYTES + shares + len(there) * _SIGNATURE_BYTES
    cost = SumCost(
        count, 1, count - len(there), size, found.nbytes, control_up, control_down, device_ms, 0.0, coordinator_ms
    )
    return cost, found, members.digest
