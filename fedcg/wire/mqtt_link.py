"""One connection to a broker: TCP, TLS, packets out and in, keepalive. No thread of its own, no policy; never blocks once it stands."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Iterator

from fedcg.wire.mqtt_config import MqttConfig
from fedcg.wire.mqtt_packets import Packet, PacketReader, ping

HANDSHAKE_S = 10.0
HANG_UP_S = 0.8  # how long `hang_up` waits for the broker
MAX_UNSENT = 65_536  # packets; as many acknowledgements as there are packet ids, and a ping
READ_BYTES = 1 << 18  # taken in one go before the other direction has its turn
RECORD_BYTES = 16 * 1024  # TLS gives at most so much at once
_NOTHING = memoryview(b"")
_AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class MqttLink:
    """A connection; whoever has it sends packets, reads packets and waits, all on one thread.

    Args:
        config: the broker.
        context: for TLS; None for plain text.
        protocol: the version to speak.

    Raises:
        OSError: no connection, or no handshake, within its time (`ssl.SSLError` is one).
    """

    def __init__(self, config: MqttConfig, context: ssl.SSLContext | None, protocol: str) -> None:
        self.keepalive_s = config.keepalive_s
        self._reader = PacketReader(protocol, config.max_inbound)
        self._unsent: list[bytes] = []
        self._leaving = _NOTHING
        self._pinged = False
        self._watched = -1
        self._sent_at = self._heard_at = time.monotonic()
        sock = socket.create_connection((config.host, config.port), config.connect_timeout_s)
        try:
            # Without this a grant waits for a delayed ACK and stalls a whole window.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                sock.settimeout(HANDSHAKE_S)
                sock = context.wrap_socket(sock, server_hostname=config.host)
            sock.settimeout(0.0)
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._waits_to_write = False

    def watch(self, descriptor: int) -> None:
        """End `wait` also when this can be read."""
        self._watched = descriptor
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait until something can be done; whether the watched descriptor can be read."""
        return any(descriptor == self._watched for descriptor, _ in self._poll.poll(1000.0 * seconds))

    @property
    def has_room(self) -> bool:
        """Whether everything sent so far has left."""
        return not self._unsent and not self._leaving

    def send(self, packet: bytes) -> None:
        """Queue a packet; `flush` lets it leave.

        Raises:
            OSError: the broker reads nothing, and sends more than it may without.
        """
        if len(self._unsent) >= MAX_UNSENT:
            raise ConnectionError("it does not read what is sent to it")
        self._unsent.append(packet)

    def flush(self) -> None:
        """Let leave what the socket takes.

        Raises:
            OSError: the connection is gone.
        """
        while self._leaving or self._unsent:
            if not self._leaving:
                self._leaving = memoryview(self._unsent[0] if len(self._unsent) == 1 else b"".join(self._unsent))
                self._unsent.clear()
            try:
                count = self._sock.send(self._leaving)
            except _AGAIN:
                break
            self._leaving = self._leaving[count:] or _NOTHING  # an empty view would hold the packet
            self._sent_at = time.monotonic()
        if self._waits_to_write == self.has_room:
            self._waits_to_write = not self.has_room
            self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if self._waits_to_write else 0))

    def read(self) -> Iterator[Packet]:
        """The packets that have come, at most some of them where many wait; read on until there are none.

        Raises:
            OSError: the connection is gone.
            MalformedError: bytes that a broker may not send.
        """
        taken, count = 0, RECORD_BYTES
        while taken < READ_BYTES and count >= RECORD_BYTES:
            try:
                count = self._sock.recv_into(self._reader.room)
            except _AGAIN:
                break
            if count == 0:
                raise ConnectionError("it closed the connection")
            taken += count
            if self._reader.add(count):
                yield from self._reader.packets()
            # A short read has most likely emptied the socket; `wait` tells if not.
        if taken:
            self._heard_at, self._pinged = time.monotonic(), False

    @property
    def holds_more(self) -> bool:
        """Whether TLS holds decrypted bytes that no `wait` will announce."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def look_after(self, now: float) -> None:
        """Ping where a direction was silent for the keepalive.

        Raises:
            TimeoutError: a ping was not answered for as long again.
        """
        if not self.keepalive_s or now - min(self._sent_at, self._heard_at) < self.keepalive_s:
            return
        if not self._pinged:
            self._pinged = True
            self._sent_at = self._heard_at = now
            self.send(ping())
            self.flush()
        elif now - self._heard_at >= self.keepalive_s:
            raise TimeoutError(f"nothing came for {self.keepalive_s} s after a ping")

    def hang_up(self, goodbye: bytes) -> None:
        """End the packet that is on its way, send a last one, and give the broker a moment to close the connection.

        Who closes while bytes wait to be read resets the connection, and the broker may never read the last packet.
        """
        poll, give_up_at = select.poll(), time.monotonic() + HANG_UP_S
        try:
            self.send(goodbye)
            while (left_s := give_up_at - time.monotonic()) > 0:
                self.flush()
                poll.register(self._sock, select.POLLIN | (0 if self.has_room else select.POLLOUT))
                try:
                    if not self._sock.recv(READ_BYTES):
                        return
                except _AGAIN:
                    poll.poll(1000.0 * left_s)
        except OSError:
            return  # the broker closed it

    def close(self) -> None:
        """Drop the connection."""
        self._sock.close()
