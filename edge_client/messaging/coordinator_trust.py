"""The state of the coordinator that a device keeps across restarts: its highest broadcast, and the key that its messages must have."""

from __future__ import annotations

from edge_client.store.private_store import PrivateStore
from fedcg.wire.messages.key_chain import PinnedKey, open_key_chain
from fedcg.wire.messages.messages import KeyChain
from fedcg.wire.messages.ordering import BroadcastOrder
from fedcg.wire.messages.signing import VerifyKey, read_envelope


class CoordinatorTrust:
    """Order and key; a change counts at once and is made durable by `save`.

    A key that was followed and not saved before a crash is followed again: the coordinator keeps the whole chain.

    Args:
        store: where it is kept.
        federation: the federation's id.
        enrolled: the coordinator's key as it came at enrolment. Another one than before means that the device was enrolled
            anew, and keys that were followed from the earlier one are void.
    """

    def __init__(self, store: PrivateStore, federation: str, enrolled: VerifyKey) -> None:
        self._store = store
        self._federation = federation
        self._enrolled = enrolled
        self.order = BroadcastOrder(store.seen())
        self._saved = (self.order.highest, store.pinned_key(enrolled))
        self._pinned = self._saved[1]
        self._replaced: frozenset[str] = frozenset()

    @property
    def key(self) -> VerifyKey:
        """The coordinator's key that counts now."""
        return self._pinned.key

    def follow(self, data: bytes) -> PinnedKey | None:
        """Take an envelope with the coordinator's chain of keys; returns the key that is pinned now when it is another one.

        Raises:
            WireError: it is refused, with the reason.
        """
        before, self._pinned = self._pinned, open_key_chain(data, self._federation, self._pinned)
        chain = read_envelope(data).message
        assert isinstance(chain, KeyChain)
        self._replaced = frozenset(link.old for link in chain.links)
        return None if before.key == self._pinned.key else self._pinned

    def is_of_replaced_key(self, data: bytes) -> bool:
        """Whether an envelope is signed by a key that the pinned one has replaced: it counts no more, and is no forgery.

        Raises:
            WireError: it is no envelope.
        """
        envelope = read_envelope(data)
        return not envelope.is_signed_by(self.key) and any(
            envelope.is_signed_by(VerifyKey.from_hex(key)) for key in self._replaced
        )

    def save(self) -> None:
        """Make changes durable.

        Raises:
            OSError: the disk did not take it; the next call tries again.
        """
        highest, pinned = self._saved
        if self._pinned != pinned:
            self._store.save_pinned_key(self._enrolled, self._pinned)
            self._saved = (highest, self._pinned)
        if self.order.highest != highest:
            self._store.save_seen(self.order.highest)
            self._saved = (self.order.highest, self._pinned)
