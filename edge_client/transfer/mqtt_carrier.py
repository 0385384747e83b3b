"""Carries artifacts between this device and its coordinator over the broker, as chunks that the receiving side has granted."""

from __future__ import annotations

from collections.abc import Callable

from fedcg.wire.messages.messages import ArtifactRef
from fedcg.wire.transfer.chunk_sender import ChunkFile, ChunkSender
from fedcg.wire.transfer.chunk_window import Ranges
from fedcg.wire.transport.transport import Transport


class MqttCarrier:
    """Moves chunks; every call but `close` returns soon. Chunks that come are delivered by the transport.

    Args:
        transport: the connection to the broker.
        topic: of this device's chunks.
        ask: sends the coordinator a `need` for chunks of an artifact.
    """

    is_answered_in_session = True

    def __init__(self, transport: Transport, topic: str, ask: Callable[[ArtifactRef, Ranges], None]) -> None:
        self._topic = topic
        self._sender = ChunkSender(transport, "chunks")
        self.fetch = ask

    def start(self) -> None:
        """Begin to send."""
        self._sender.start()

    def close(self) -> None:
        """Stop sending."""
        self._sender.close()

    def send(self, update: ChunkFile, ranges: Ranges) -> None:
        """Send granted chunks of the update, as the link takes them."""
        self._sender.serve(self._topic, update, ranges)

    @property
    def is_sending(self) -> bool:
        """Whether granted chunks still wait for the link."""
        return self._sender.is_busy

    def end(self, artifact: str) -> int:
        """Send nothing more of an update; returns how many chunks of it were sent."""
        sent = self._sender.sent[artifact]
        self._sender.forget(artifact)
        return sent
