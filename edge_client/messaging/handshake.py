"""The device's side of hello and welcome: nonces, and the session that stamps and admits control messages.

One nonce serves a hello and its repetitions, so a late answer still counts; a coordinator's nonce is taken once,
so a recorded welcome can't bring back an old session.
"""

from __future__ import annotations

import secrets
from typing import TypeVar

from fedcg.wire.errors import OtherSessionError, ReplayError, VersionError
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import Session, session_id
from fedcg.wire.messages.schemas import (
    COORDINATOR,
    NO_ATTEMPT,
    AnyMessage,
    Carrier,
    Hello,
    Refusal,
    RoundAttempt,
    Welcome,
)

MessageT = TypeVar("MessageT", bound=AnyMessage)


class Handshake:
    """Keeps the nonces and the open session of one device.

    Args:
        federation: the federation's id.
        device: this device's id.
        agent: program version for the hello.
        cohort: mark of the cohort secret, None without one.
        heartbeat_s: this device promises that it is never silent for longer.
        carrier: how its artifacts travel.
        is_check: it only wants to know whether it is answered.
    """

    def __init__(
        self,
        federation: str,
        device: str,
        agent: str,
        cohort: str | None = None,
        heartbeat_s: int | None = None,
        carrier: Carrier = Carrier.MQTT,
        *,
        is_check: bool = False,
    ) -> None:
        self._is_check = is_check
        self._carrier = carrier
        self._heartbeat_s = heartbeat_s
        self._federation = federation
        self._device = device
        self._agent = agent
        self._cohort = cohort
        self._nonce: str | None = None
        self._answers: set[str] = set()
        self._session: Session | None = None

    @property
    def is_open(self) -> bool:
        """Whether a session stands."""
        return self._session is not None

    def close(self) -> None:
        """Forget the session; the next hello opens a new one."""
        if self._session is not None:
            self._session, self._nonce = None, None

    def hello(self, epoch: int, committed: RoundAttempt = NO_ATTEMPT, key: str | None = None) -> Hello:
        """The hello to send now: with the highest epoch that came, the last round attempt that was trained, and the coordinator's key that counts."""
        self.close()
        if self._nonce is None:
            self._nonce, self._answers = secrets.token_hex(16), set()
        return Hello(
            federation=self._federation,
            sender=self._device,
            recipient=COORDINATOR,
            epoch=epoch,
            round=committed.round,
            attempt=committed.attempt,
            nonce=self._nonce,
            versions=schemas.SPOKEN,
            agent=self._agent,
            cohort=self._cohort,
            heartbeat_s=self._heartbeat_s,
            carrier=self._carrier,
            check=self._is_check,
            key=key,
        )

    def welcome(self, message: Welcome) -> None:
        """Open the session that a welcome answers.

        Raises:
            ReplayError: it answers no hello of this device, or was used before.
            MalformedError: it picks a version that was not offered.
        """
        if message.device_nonce != self._nonce or message.nonce in self._answers:
            raise ReplayError("a welcome that answers no hello of this device, or answers one again")
        if message.version not in schemas.SPOKEN:
            raise VersionError(f"a welcome for protocol version {message.version}; {schemas.SPOKEN} were offered")
        self._answers.add(message.nonce)
        self._session = Session(session_id(message.device_nonce, message.nonce))

    def refusal(self, message: Refusal) -> str:
        """The reason why a hello was not answered with a welcome, for people.

        Raises:
            ReplayError: it answers no hello of this device.
        """
        if message.device_nonce != self._nonce or self.is_open:
            raise ReplayError("a refusal that answers no hello of this device")
        return schemas.explain_versions(message.device_versions, message.versions)

    def stamp(self, message: MessageT) -> MessageT:
        """The message with session and counter.

        Raises:
            OtherSessionError: there is no session.
        """
        if self._session is None:
            raise OtherSessionError(f"a {message.kind} message can't be sent without a session")
        return self._session.stamp(message)

    def admit(self, message: AnyMessage) -> None:
        """Check that a message belongs to the session and is new.

        Raises:
            OrderError: it does not, is not, or there is no session.
        """
        if self._session is None:
            raise OtherSessionError(f"a {message.kind} message came without a session")
        self._session.admit(message)
