"""The running service's view of its members.

Reads the register, drops devices that are no longer members, lets devices leave, and silences those that send too much.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from coordinator.broker.access_lists import NOT_APPLIED
from coordinator.errors import BrokerError
from coordinator.messaging.floods import FLOOD_PER_S, SILENCE_S
from coordinator.messaging.message_checks import Cohorts, MessageChecks
from coordinator.messaging.publisher import Publisher
from coordinator.rounds.events import Barred, Departed, Expected
from coordinator.rounds.records import DeviceState, ParticipantState
from coordinator.rounds.round_engine import Phase
from coordinator.service.liveness import Liveness
from coordinator.service.round_driver import RoundDriver
from coordinator.service.service_context import ServiceContext
from coordinator.updates.receiver import Receiver

REFRESH_S = 2.0
FAREWELL_S = 3.0
"""Time from a device's leave to the end of its access at the broker: its confirmation needs time to arrive."""
RunInBackground = Callable[[Callable[[], object]], None]

log = logging.getLogger(__name__)


class MemberRefresh:
    """Keeps the service's view of its devices.

    Args:
        context: the dependencies of the service.
        message_checks: holds the keys that count.
        receiver: holds what devices are sending.
        round_driver: drives the rounds.
        publisher: publishes.
        cohorts: the marks of cohort secrets.
        liveness: stores when devices went.
        run_in_background: does work that waits for the lock of the members or for the broker, in order.
    """

    def __init__(
        self,
        context: ServiceContext,
        message_checks: MessageChecks,
        receiver: Receiver,
        round_driver: RoundDriver,
        publisher: Publisher,
        cohorts: Cohorts,
        liveness: Liveness,
        run_in_background: RunInBackground,
    ) -> None:
        self._context = context
        self._message_checks = message_checks
        self._receiver = receiver
        self._round_driver = round_driver
        self._publisher = publisher
        self._run_in_background = run_in_background
        self._cohorts = cohorts
        self._liveness = liveness
        self._silenced: frozenset[str] = frozenset()
        self._read_at = 0.0
        self._shut_out_at: float | None = None

    def is_older_than(self, age_s: float) -> bool:
        """Whether the register was read longer ago than this."""
        return time.monotonic() - self._read_at >= age_s

    def refresh(self) -> None:
        """Read the current members; rounds stop waiting for a device that is no longer one."""
        self._read_at = time.monotonic()
        members = self._context.store.members()
        self._round_driver.apply(Expected(frozenset(member.id for member in members)))
        barred = {
            member.id: f"disabled by an operator: {member.disabled_because}".removesuffix(": ")
            for member in members
            if member.disabled_at is not None
        }
        if self._round_driver.requires_cohort_secret:
            barred |= self._cohorts.outsiders()
        if barred != self._round_driver.state.barred:
            self._context.events.write("barred", clients=[f"{name}: {why}" for name, why in sorted(barred.items())])
            self._round_driver.apply(Barred(barred))
        departed = self._message_checks.learn_keys((member.id, member.public_key) for member in members)
        for device in sorted(departed):
            self._context.events.write("departed", client=device)
            self._cohorts.forget(device)
            self._departed(device)
        if departed:
            self.tell_revoked()

    def tell_revoked(self) -> None:
        """Tell revoked devices so: one whose session at the broker outlives its membership would go on asking for ever."""
        for device, key in self._context.store.register.revoked_devices(self._context.clock()).items():
            self._publisher.revoked(device, key)

    def drop_strangers(self) -> None:
        """After a restart: devices that departed while the coordinator was down hold up no round."""
        for device in sorted(self._round_driver.state.outstanding):
            if not self._message_checks.knows(device):
                self._departed(device)

    def leaves(self, device: str) -> None:
        """End the membership of a device that leaves: durable first, then confirmed; its access at the broker ends a little later."""
        ended = partial(self._context.store.register.end_membership, device, DeviceState.LEFT, "it left")
        if ended(self._context.clock()):
            self._context.events.write("left", client=device)
            self._shut_out_at = time.monotonic() + FAREWELL_S
        self._publisher.left(device)

    def tick(self, silenced: frozenset[str]) -> None:
        """Read the register every `REFRESH_S`, and end the access of devices that left or that send too much."""
        if self.is_older_than(REFRESH_S):
            self.refresh()
            if self._context.are_lists_pending():
                self.publish_lists()
        if self._shut_out_at is not None and time.monotonic() >= self._shut_out_at:
            self._shut_out_at = None
            self.publish_lists()
        if silenced != self._silenced:
            self._follow_floods(silenced)

    def publish_lists(self) -> None:
        """Bring the lists of devices to the broker, in the background: whatever it missed while there was no link."""
        self._run_in_background(self._publish)

    def _follow_floods(self, silenced: frozenset[str]) -> None:
        """Stop waiting for devices that sent too much, and readmit those whose silence is over."""
        before, self._silenced = self._silenced, silenced
        reason = f"it sent more than {FLOOD_PER_S:.0f} messages a second for some seconds"
        for device in sorted(before - silenced):
            self._context.events.write("silence_ended", client=device)
        for device in sorted(silenced - before):
            self._context.events.write("silenced", client=device, seconds=SILENCE_S, reason=reason)
            self._departed(device, "the device is silenced: " + reason)
        self._run_in_background(partial(self._apply_silence, before ^ silenced))

    def _apply_silence(self, changed: frozenset[str]) -> None:
        """Update the broker's access list, and discard the messages of a new flood that wait at the broker."""
        names = ", ".join(sorted(changed))
        try:
            is_applied = self._publish()
        except (BrokerError, OSError) as error:
            log.warning("the broker's access list could not be changed for %s: %s", names, error)
        else:
            if not is_applied:
                log.warning("%s: %s", names, NOT_APPLIED)
        if changed & self._silenced:
            self._publisher.connect_anew()

    def _publish(self) -> bool:
        """Make the broker apply the current access list; waits for the lock of the members."""
        return self._context.publish_access(self._silenced)

    def _departed(self, device: str, reason: str = "") -> None:
        is_replaced = self._message_checks.knows(device)
        reason = reason or ("another box replaces it" if is_replaced else "the device is no member any more")
        state = self._round_driver.state
        self._receiver.forget(device)
        self._liveness.note_gone(device, reason, time.monotonic())
        if state.phase is Phase.COLLECTING and device in state.outstanding:
            about = (self._context.federation.id, state.at, device)
            self._context.store.answer(*about, ParticipantState.DECLINED, reason)
        self._round_driver.apply(Departed(device))
