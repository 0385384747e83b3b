"""Who may take part, as the running service sees it.

Reads the register, drops whoever is no member any more, lets devices leave, and silences those that send too much.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from coordinator.broker.access_lists import RELOAD_BY_HAND
from coordinator.errors import BrokerError
from coordinator.messaging.cohort_marks import Cohorts
from coordinator.messaging.flood_limits import FLOOD_PER_S, SILENCE_S
from coordinator.messaging.message_checks import Ingest
from coordinator.messaging.publisher import Publisher
from coordinator.rounds.pacing import Expected
from coordinator.rounds.records import DeviceState, ParticipantState
from coordinator.rounds.round_engine import Departed, Phase
from coordinator.service.round_driver import RoundDriver
from coordinator.service.service_context import Setup
from coordinator.service.threads import Threads
from coordinator.updates.receipts import Uplink

REFRESH_S = 2.0
FAREWELL_S = 3.0
"""So long after a device left its access at the broker ends: its confirmation needs time to arrive."""

log = logging.getLogger(__name__)


class Membership:
    """Keeps the service's view of its devices.

    Args:
        setup: what the service was given.
        ingest: holds the keys that count.
        uplink: holds what devices are sending.
        conductor: drives the rounds.
        publisher: the coordinator's voice.
        cohorts: the marks of cohort secrets.
    """

    def __init__(
        self,
        setup: Setup,
        ingest: Ingest,
        uplink: Uplink,
        round_driver: RoundDriver,
        publisher: Publisher,
        cohorts: Cohorts,
    ) -> None:
        self._setup = setup
        self._ingest = ingest
        self._uplink = uplink
        self._round_driver = round_driver
        self._publisher = publisher
        self._threads = Threads(1, "members")
        self._cohorts = cohorts
        self._silenced: frozenset[str] = frozenset()
        self._read_at = 0.0

    def is_older_than(self, age_s: float) -> bool:
        """Whether the register was read longer ago than this."""
        return time.monotonic() - self._read_at >= age_s

    async def refresh(self) -> None:
        """Learn who may take part now; whoever may not any more is waited for no longer."""
        self._read_at = time.monotonic()
        members = await asyncio.to_thread(self._setup.store.members)
        await self._round_driver.apply(Expected(frozenset(member.id for member in members)))
        for device in sorted(self._ingest.learn_keys((member.id, member.public_key) for member in members)):
            self._setup.events.write("departed", client=device)
            self._cohorts.forget(device)
            await self._departed(device)

    async def drop_strangers(self) -> None:
        """After a restart: who departed while nobody looked holds up no round."""
        for device in sorted(self._round_driver.state.outstanding):
            if not self._ingest.knows(device):
                await self._departed(device)

    async def leaves(self, device: str) -> bool:
        """A device says goodbye for good: durable first, then confirmed.

        Returns:
            Whether it was a member until now; then `shut_out` must follow.
        """
        ended = partial(self._setup.store.register.end_membership, device, DeviceState.LEFT, "it left")
        was_member = await asyncio.to_thread(ended, self._setup.clock())
        if was_member:
            self._setup.events.write("left", client=device)
        self._publisher.left(device)
        return was_member

    async def shut_out(self) -> None:
        """Take devices that left off the broker's lists, once their confirmation had time to arrive."""
        await asyncio.sleep(FAREWELL_S)
        await self._publish()

    async def follow_floods(self, silenced: frozenset[str]) -> frozenset[str]:
        """Wait no longer for devices that sent too much, and tell whose silence is over.

        Returns:
            The devices whose silence begins or ends; with some, `silence` must follow.
        """
        changed = silenced ^ self._silenced
        self._silenced = silenced
        reason = f"it sent more than {FLOOD_PER_S:.0f} messages a second for some seconds"
        for device in sorted(changed - silenced):
            self._setup.events.write("silence_ended", client=device)
        for device in sorted(changed & silenced):
            log.warning("%s is silenced for %.0f minutes: %s", device, SILENCE_S / 60, reason)
            self._setup.events.write("silenced", client=device, seconds=SILENCE_S, reason=reason)
            await self._departed(device, "the device is silenced: " + reason)
        return changed

    async def silence(self, changed: frozenset[str]) -> None:
        """Bring the broker's access list up to date, and leave behind what of a new flood waits at the broker."""
        names = ", ".join(sorted(changed))
        try:
            is_applied = await self._publish()
        except (BrokerError, OSError) as error:
            log.warning("the broker's access list could not be changed for %s: %s", names, error)
        else:
            if not is_applied:
                log.warning("%s: no broker was reached that applies the new access list; %s", names, RELOAD_BY_HAND)
        if changed & self._silenced:
            self._publisher.connect_anew()

    async def _publish(self) -> bool:
        """Have the broker apply who may take part; waits for the lock of the members."""
        return await self._threads.run(self._setup.publish_access, self._silenced)

    async def _departed(self, device: str, reason: str = "the device is no member any more") -> None:
        state = self._round_driver.state
        self._uplink.forget(device)
        if state.phase is Phase.COLLECTING and device in state.outstanding:
            key = (self._setup.federation.id, state.round, state.attempt)
            await asyncio.to_thread(self._setup.store.answer, key, device, ParticipantState.DECLINED, reason)
        await self._round_driver.apply(Departed(device))
