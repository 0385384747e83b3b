"""Who may take part, as the running service sees it.

Reads the register, drops whoever is no member any more, lets devices leave, and silences those that send too much.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from coordinator.brokers import RELOAD_BY_HAND
from coordinator.cohorts import Cohorts
from coordinator.conductor import Conductor
from coordinator.errors import BrokerError
from coordinator.floods import FLOOD_PER_S, SILENCE_S
from coordinator.ingest import Ingest
from coordinator.pacing import Expected
from coordinator.publishing import Publisher
from coordinator.records import DeviceState, ParticipantState
from coordinator.rounds import Departed, Phase
from coordinator.setup import Setup
from coordinator.threads import Threads
from coordinator.uplink import Uplink

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
        conductor: Conductor,
        publisher: Publisher,
        cohorts: Cohorts,
    ) -> None:
        self._setup = setup
        self._ingest = ingest
        self._uplink = uplink
        self._conductor = conductor
        self._publisher = publisher
        self._threads = Threads(1, "members")
        self._cohorts = cohorts
        self._read_at = 0.0

    def is_older_than(self, age_s: float) -> bool:
        """Whether the register was read longer ago than this."""
        return time.monotonic() - self._read_at >= age_s

    async def refresh(self) -> None:
        """Learn who may take part now; whoever may not any more is waited for no longer."""
        self._read_at = time.monotonic()
        members = await asyncio.to_thread(self._setup.store.members)
        await self._conductor.apply(Expected(frozenset(member.id for member in members)))
        for device in sorted(self._ingest.learn_keys((member.id, member.public_key) for member in members)):
            self._setup.events.write("departed", client=device)
            self._cohorts.forget(device)
            await self._departed(device)

    async def drop_strangers(self) -> None:
        """After a restart: who departed while nobody looked holds up no round."""
        for device in sorted(self._conductor.state.outstanding):
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
        await self._threads.run(self._setup.publish_access)  # waits for the lock of the members

    async def flooded(self, device: str) -> None:
        """A device sent too much: nobody waits for it. `silence` must follow."""
        reason = f"it sent more than {FLOOD_PER_S:.0f} messages a second for some seconds"
        log.warning("%s is silenced for %.0f minutes: %s", device, SILENCE_S / 60, reason)
        self._setup.events.write("silenced", client=device, seconds=SILENCE_S, reason=reason)
        await self._departed(device, "the device is silenced: " + reason)

    async def silence(self, device: str) -> None:
        """Take a device off the broker's access list for a while, and leave behind what of its flood waits at the broker."""
        await self._limit(device, self._setup.clock() + SILENCE_S)
        self._publisher.connect_anew()

    async def release(self, device: str) -> None:
        """Put a device that was silenced on the broker's access list again."""
        self._setup.events.write("silence_ended", client=device)
        await self._limit(device, None)

    async def _limit(self, device: str, until: float | None) -> None:
        try:
            is_applied = await self._threads.run(self._setup.silence, device, until)
        except (BrokerError, OSError) as error:
            log.warning("the broker's access list could not be changed for %s: %s", device, error)
        else:
            if not is_applied:
                log.warning("%s: no broker was reached that applies the new access list; %s", device, RELOAD_BY_HAND)

    async def _departed(self, device: str, reason: str = "the device is no member any more") -> None:
        state = self._conductor.state
        self._uplink.forget(device)
        if state.phase is Phase.COLLECTING and device in state.outstanding:
            key = (self._setup.federation.id, state.round, state.attempt)
            await asyncio.to_thread(self._setup.store.answer, key, device, ParticipantState.DECLINED, reason)
        await self._conductor.apply(Departed(device))
