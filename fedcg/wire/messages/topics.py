"""The only module that spells topics and defines which identity may write or read which topic.

Brokers' access lists (Mosquitto's file, the in-process brokers' rules) are generated from it. It does not connect to a broker.
"""

import re
from collections.abc import Iterable, Mapping
from enum import Enum

from fedcg.values import Value
from fedcg.wire.messages.schemas import COORDINATOR

OBSERVER = "observer"
LISTS_WRITER = "lists-writer"
LISTS_READER = "lists-reader"
"""The identities at both ends of the broker's lists of devices: the coordinator's side, and the program next to the broker."""
LISTS = "fedcg/lists/1/wanted"
"""Retained: the lists of devices that the broker must apply."""
LISTS_APPLIED = "fedcg/lists/1/applied"
"""The lists that the program next to the broker has applied."""
_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
ANY_DEVICE = "+"
"""Instead of a device's id: the filter for all devices."""


class TopicKind(str, Enum):
    """The kind of a topic; the value is its tail under the federation or under the device."""

    OFFER = "offer"
    COORDINATOR = "coordinator"
    KEYS = "keys"
    AGGREGATE = "aggregate"
    UP_CONTROL = "up/control"
    UP_CHUNK = "up/chunk"
    DOWN_CONTROL = "down/control"
    DOWN_CHUNK = "down/chunk"
    STATUS = "status"


class Role(str, Enum):
    """The role of an identity in the federation."""

    COORDINATOR = "coordinator"
    OBSERVER = "observer"
    LISTS = "lists"
    DEVICE = "device"


BROADCASTS = (TopicKind.OFFER, TopicKind.COORDINATOR, TopicKind.KEYS, TopicKind.AGGREGATE)
FROM_DEVICE = (TopicKind.UP_CONTROL, TopicKind.UP_CHUNK, TopicKind.STATUS)
TO_DEVICE = (TopicKind.DOWN_CONTROL, TopicKind.DOWN_CHUNK)

_OF_DEVICES = {kind.value: kind for kind in FROM_DEVICE + TO_DEVICE}

_Rights = Mapping[Role, tuple[TopicKind, ...]]
_WRITES: _Rights = {Role.COORDINATOR: BROADCASTS + TO_DEVICE, Role.DEVICE: FROM_DEVICE}
_READS: _Rights = {
    Role.COORDINATOR: BROADCASTS + FROM_DEVICE,
    Role.OBSERVER: tuple(TopicKind),
    Role.DEVICE: BROADCASTS + TO_DEVICE,
}


class ParsedTopic(Value):
    """The fields of a topic; `device` is None for broadcasts."""

    kind: TopicKind
    device: str | None


def role_of(identity: str) -> Role:
    """The role of an identity (a certificate's common name).

    "coordinator", the two ends of the lists, and names that are or start with "observer" are reserved, so no device can have them.
    """
    if identity == COORDINATOR:
        return Role.COORDINATOR
    if identity == OBSERVER or identity.startswith(f"{OBSERVER}-"):
        return Role.OBSERVER
    if identity in (LISTS_WRITER, LISTS_READER):
        return Role.LISTS
    return Role.DEVICE


def lists_acl() -> str:
    """The sections of Mosquitto's access list for the transfer of its lists, independent of federations."""
    ends = ((LISTS_WRITER, LISTS, LISTS_APPLIED), (LISTS_READER, LISTS_APPLIED, LISTS))
    return "\n".join(f"user {own}\ntopic write {written}\ntopic read {read}\n" for own, written, read in ends)


def check_device_id(identity: str) -> str:
    """Return the identity if a device may have it.

    Raises:
        ValueError: reserved, or not lower-case letters, digits and dashes (1 to 63 of them).
    """
    _check_identifier("device id", identity)
    if role_of(identity) is not Role.DEVICE:
        raise ValueError(f"device id {identity!r} is reserved; choose another")
    return identity


def _check_identifier(what: str, name: str) -> None:
    if not _IDENTIFIER.fullmatch(name):
        raise ValueError(f"{what} {name!r}: use 1 to 63 lower-case letters, digits and dashes, not a dash first")


class Topics(Value):
    """All topics of one federation."""

    federation: str

    def __post_init__(self) -> None:
        _check_identifier("federation", self.federation)

    @property
    def prefix(self) -> str:
        """The prefix of all topics of the federation, slash included."""
        return f"fedcg/1/{self.federation}/"

    @property
    def offer(self) -> str:
        """Retained broadcast: the open round, or the end of the federation."""
        return self._spell(TopicKind.OFFER)

    @property
    def coordinator(self) -> str:
        """Retained broadcast and will: whether a coordinator runs."""
        return self._spell(TopicKind.COORDINATOR)

    @property
    def keys(self) -> str:
        """Retained broadcast: how the coordinator's message key was replaced."""
        return self._spell(TopicKind.KEYS)

    @property
    def aggregate(self) -> str:
        """Broadcast of an aggregate's chunks."""
        return self._spell(TopicKind.AGGREGATE)

    def up_control(self, device: str) -> str:
        """Messages of a device to the coordinator."""
        return self._spell(TopicKind.UP_CONTROL, device)

    def up_chunk(self, device: str) -> str:
        """Chunks of a device's update."""
        return self._spell(TopicKind.UP_CHUNK, device)

    def down_control(self, device: str) -> str:
        """Messages of the coordinator to one device."""
        return self._spell(TopicKind.DOWN_CONTROL, device)

    def down_chunk(self, device: str) -> str:
        """Chunks that one device requested."""
        return self._spell(TopicKind.DOWN_CHUNK, device)

    def status(self, device: str) -> str:
        """Retained and will: whether a device's agent is connected."""
        return self._spell(TopicKind.STATUS, device)

    def everything(self) -> str:
        """Filter: the whole federation, for an observer."""
        return f"{self.prefix}#"

    def parse(self, topic: str) -> ParsedTopic | None:
        """The fields of a concrete topic, or None if it is not of this federation."""
        parsed = self._parse_filter(topic)
        return None if parsed is None or parsed.device == ANY_DEVICE else parsed

    def may_publish(self, identity: str, topic: str) -> bool:
        """Whether an identity may publish on a concrete topic."""
        return self._allowed(_WRITES, identity, self.parse(topic))

    def may_read(self, identity: str, topic: str) -> bool:
        """Whether an identity may receive a topic, or all topics of a filter."""
        if topic == self.everything():
            return role_of(identity) is Role.OBSERVER
        return self._allowed(_READS, identity, self._parse_filter(topic))

    def mosquitto_acl(
        self, device_ids: Iterable[str], observers: Iterable[str] = (), revoked: Iterable[str] = ()
    ) -> str:
        """Mosquitto's access list: one `user` section per identity, and no access for others.

        A revoked device whose session outlives the change may only read its own topic, where the coordinator announces the revocation.

        Each device has an explicit section instead of a pattern. Rewriting the file and sending SIGHUP then silences a revoked
        device even during its session.

        Raises:
            ValueError: a device id that is reserved, or an observer that is not named as one.
        """
        sections = [self._section(COORDINATOR, ANY_DEVICE)]
        for observer in sorted(set(observers)):
            if role_of(observer) is not Role.OBSERVER:
                raise ValueError(f"observer {observer!r}: name it {OBSERVER!r} or {OBSERVER + '-...'!r}")
            sections.append(f"user {observer}\ntopic read {self.everything()}\n")
        sections.extend(self._section(check_device_id(device), device) for device in sorted(set(device_ids)))
        told = (check_device_id(device) for device in sorted(set(revoked)))
        sections.extend(f"user {device}\ntopic read {self.down_control(device)}\n" for device in told)
        return "\n".join(sections)

    def _section(self, identity: str, device: str) -> str:
        role = role_of(identity)
        lines = [f"user {identity}"]
        lines += [f"topic write {self._spell(kind, device)}" for kind in _WRITES[role] if kind not in _READS[role]]
        lines += [f"topic readwrite {self._spell(kind, device)}" for kind in _WRITES[role] if kind in _READS[role]]
        lines += [f"topic read {self._spell(kind, device)}" for kind in _READS[role] if kind not in _WRITES[role]]
        return "\n".join(lines) + "\n"

    def _spell(self, kind: TopicKind, device: str = "") -> str:
        if kind in BROADCASTS:
            return f"{self.prefix}{kind.value}"
        if device != ANY_DEVICE:
            _check_identifier("device id", device)
        return f"{self.prefix}devices/{device}/{kind.value}"

    def _parse_filter(self, topic: str) -> ParsedTopic | None:
        if not topic.startswith(self.prefix):
            return None
        head, _, tail = topic[len(self.prefix) :].partition("/")
        if head != "devices":
            kind = next((kind for kind in BROADCASTS if topic == self._spell(kind)), None)
            return None if kind is None else ParsedTopic(kind, None)
        device, _, name = tail.partition("/")
        kind = _OF_DEVICES.get(name)
        if kind is None or not (device == ANY_DEVICE or _IDENTIFIER.fullmatch(device)):
            return None
        return ParsedTopic(kind, device)

    @staticmethod
    def _allowed(rights: _Rights, identity: str, parsed: ParsedTopic | None) -> bool:
        role = role_of(identity)
        if parsed is None or parsed.kind not in rights.get(role, ()):
            return False
        return role is not Role.DEVICE or parsed.device is None or parsed.device == identity
