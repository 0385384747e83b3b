"""All that operators can do with a coordinator, in one place: the API, the page and the commands without a coordinator call it.

Blocks; from any thread. Changes are made one after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coordinator.broker.access_lists import publish_access
from coordinator.errors import StoppingError
from coordinator.members.revocation import Revoked, revoke
from coordinator.members.tokens import create_token, revoke_token
from coordinator.operations import create_federation
from coordinator.operations.open_federation import open_federation
from coordinator.operations.steering import Follow, Steering, bounded_reason, federation_of
from coordinator.paths import Home
from coordinator.rounds.records import FederationRecord, FederationStatus, TokenRecord
from coordinator.storage.locks import changing_members
from coordinator.storage.object_store import artifacts_of
from coordinator.storage.store import Store
from fedcg.event_log import EventLog
from fedcg.learning.spec import FederationPlan, FederationSpec, RoundPolicy

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class MadeToken:
    """A new enrolment token; `token` is shown this once."""

    id: str
    token: str
    device: str | None
    replaces: bool
    url: str | None
    expires_at: float


@dataclass(frozen=True)
class Operations:
    """What an operator can change.

    Attributes:
        home: the coordinator's directory.
        store: its database.
        events: the event log.
        follow: of the running coordinator, or one that does nothing.
        clock: unix time.
        stopping: set when the program ends: nothing is created any more.
    """

    home: Home
    store: Store
    events: EventLog
    follow: Follow
    clock: Callable[[], float] = time.time
    stopping: threading.Event = field(default_factory=threading.Event)
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def steer(self, change: Callable[[Steering], ResultT]) -> ResultT:
        """Make a change of `Steering`.

        Raises:
            SteeringError: it can't be made now.
        """
        with self._changing:
            return change(Steering(self.store, self._spec, self.events, self.follow, self.clock))

    def _spec(self, record: FederationRecord) -> FederationSpec:
        return FederationSpec.parse(artifacts_of(self.home).get(record.spec))

    def change_policy(
        self, federation: str, changes: Mapping[str, Any], check: Callable[[RoundPolicy], None] = lambda policy: None
    ) -> FederationRecord:
        """Change fields of a policy, when `check` lets the present one pass.

        Raises:
            SteeringError: a field or a value that can't be; names all of them.
        """

        def changed(steering: Steering) -> FederationRecord:
            check(federation_of(self.store, federation).policy)
            return steering.change_policy(federation, changes)

        return self.steer(changed)

    def create_federation(
        self, plan: FederationPlan, *, start: bool = True, continued_from: str | None = None
    ) -> FederationRecord:
        """Open a federation, and start it unless that comes later. Takes seconds: a process with torch makes the first weights.

        Args:
            plan: the operator's plan.
            start: else it is only created.
            continued_from: a federation whose last aggregate has the initial weights.

        Raises:
            PlanError: the name is taken, or the method or the networks refuse the plan.
            NotFoundError: there is no federation `continued_from`.
            StoppingError: the coordinator ends.
        """
        if continued_from is not None:
            federation_of(self.store, continued_from)
        record = open_federation(
            self.home,
            self.store,
            plan,
            start=start,
            continued_from=continued_from,
            complete=self.complete,
            registering=self._registering(),
        )
        with changing_members(self.home):
            publish_access(self.home)
        self.events.write("federation_created", federation=record.id, started=start, continued_from=continued_from)
        if record.status is FederationStatus.RUNNING:
            self.follow(record.id)
        return record

    @contextmanager
    def _registering(self) -> Iterator[None]:
        with changing_members(self.home):
            if self.stopping.is_set():
                raise StoppingError(create_federation.STOPPING)
            yield

    def complete(self, request: str) -> tuple[int, str]:
        """Complete a plan in a process, which ends with this program."""
        return create_federation.in_a_process(request, self.stopping)

    def revoke_device(self, device: str, reason: str = "") -> Revoked:
        """Cut a device off: certificates, keys and the session that it may have. Repeating it repeats the steps that failed.

        Raises:
            NotFoundError: there is none of that id.
        """
        done = revoke(self.home, self.store, device, bounded_reason(reason), self.clock())
        self.events.write(
            "device_revoked",
            client=device,
            reason=reason,
            certificates=done.certificates,
            reloaded=done.broker_reloaded,
        )
        return done

    def create_enrolment_token(
        self,
        *,
        device: str | None = None,
        replaces: str | None = None,
        hours: float = 24.0,
        url: str | None = None,
        federation: str | None = None,
    ) -> MadeToken:
        """Make a one-time token with which a device enrols; for the arguments see `members.tokens.create_token`.

        Raises:
            EnrolmentError: nothing listens for it, or the device can't be enrolled or replaced.
        """
        now = self.clock()
        made = create_token(
            self.home, self.store, now, device=device, replaces=replaces, hours=hours, url=url, federation=federation
        )
        expires_at = now + hours * 3600
        self.events.write("token_created", token=made.id, client=made.device or "", until=expires_at)
        return MadeToken(made.id, made.text, made.device, replaces is not None, made.url, expires_at)

    def revoke_enrolment_token(self, token: str) -> TokenRecord:
        """Make a token that was not used yet unusable.

        Raises:
            NotFoundError: there is none of that id.
            EnrolmentError: it was used already.
        """
        revoked = revoke_token(self.store, token, self.clock())
        self.events.write("token_revoked", token=token)
        return revoked
