"""An MQTT 3.1.1 broker in this process (amqtt 0.12.1), for machines without Mosquitto; identities by certificate.

amqtt alone is not safe for this. What is done here instead of by it:

* our own TLS listener (TLS 1.3, a client certificate is REQUIRED; amqtt's listener makes it optional);
* the CONNECT packet is checked before amqtt sees it: amqtt deletes or takes over the session of the claimed
  client id BEFORE it authenticates, and for a resumed session its plugins see the OLD connection's certificate;
* a revoked certificate is refused by its serial number;
* the topic of the will is checked (amqtt publishes wills without asking the topic plugin);
* a second connection with the same id ends the first one;
* keep-alive, a time limit for CONNECT and a limit on packet size (amqtt has none of them);
* retained messages pass the `receive` rule and go only to whoever has just subscribed (amqtt sends them unfiltered,
  and on every connect also those that match the subscriptions of OTHER clients).

Rules are asked again for every publish and every delivery, so a rule that turns false silences a live session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amqtt.adapters import BufferReader, StreamReaderAdapter, StreamWriterAdapter
from amqtt.mqtt.connack import NOT_AUTHORIZED, UNACCEPTABLE_PROTOCOL_VERSION, ConnackPacket
from amqtt.mqtt.connect import ConnectPacket

from coordinator.broker.amqtt_plugin import (
    LISTENER,
    DeviceBroker,
    Rules,
    common_name,
    serial_number,
    will_permitted,
)

CONNECT_TIMEOUT_S = 10.0
"""Seconds for the TLS handshake, and again for the CONNECT packet."""
MAX_CONNECT_BYTES = 64 * 1024
MAX_PACKET_BYTES = 2_000_000
MQTT_3_1_1 = 4

Admits = Callable[[str, int], bool]
"""admits(identity, serial number of its certificate)."""

log = logging.getLogger(__name__)


def everybody(_identity: str, _serial: int) -> bool:
    """Admits whoever has a certificate of the authority; the rules still decide on topics."""
    return True


class DeviceReader(StreamReaderAdapter):  # type: ignore[misc]
    """Replays the CONNECT packet, then reads from the network within keep-alive and size limits."""

    def __init__(self, reader: asyncio.StreamReader, replay: bytes, keep_alive_s: int) -> None:
        super().__init__(reader)
        self._replay = replay
        self._patience = 1.5 * keep_alive_s if keep_alive_s > 0 else None
        self._last = asyncio.get_running_loop().time()
        self._ended = False

    async def read(self, n: int = -1) -> bytes:
        """Exactly n bytes, or fewer (amqtt's sign for a closed connection) at EOF and beyond a limit."""
        if self._replay:
            data, self._replay = self._replay[:n], self._replay[n:]
            return data
        if n < 0 or n > MAX_PACKET_BYTES:
            log.warning("packet of %d bytes refused, limit %d", n, MAX_PACKET_BYTES)
            self._ended = True
        clock = asyncio.get_running_loop().time
        parts = bytearray()
        while len(parts) < n and not self._ended:
            left = None if self._patience is None else max(0.001, self._last + self._patience - clock())
            try:
                chunk = await asyncio.wait_for(self._reader.read(n - len(parts)), left)
            except (asyncio.TimeoutError, OSError):  # ssl.SSLError is an OSError
                chunk = b""
            if not chunk:
                self._ended = True
            self._last = clock()
            parts += chunk
        return bytes(parts)


async def read_first_packet(reader: asyncio.StreamReader) -> bytes:
    """The raw bytes of one CONNECT packet. Raises ValueError for anything else."""
    raw = bytearray(await reader.readexactly(1))
    if raw[0] != 0x10:
        raise ValueError("the first packet is not CONNECT")
    length = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        raw.append(byte)
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 21:
            raise ValueError("invalid length")
    if length > MAX_CONNECT_BYTES:
        raise ValueError("the CONNECT packet is too long")
    return bytes(raw) + await reader.readexactly(length)


class Gate:
    """Accepts TLS connections and lets amqtt see only those whose CONNECT packet fits their certificate."""

    def __init__(self, broker: DeviceBroker, rules: Rules, admits: Admits) -> None:
        self._broker = broker
        self._rules = rules
        self._admits = admits
        self._live: dict[str, tuple[asyncio.Task[Any], asyncio.StreamWriter]] = {}

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends (the callback of asyncio.start_server)."""
        try:
            await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, OSError, ValueError) as error:
            log.info("connection dropped: %r", error)
        except Exception:
            log.exception("connection dropped")
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tls: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
        device = common_name(tls)
        raw = await asyncio.wait_for(read_first_packet(reader), CONNECT_TIMEOUT_S)
        # name length (2), name, level: looked at first, for the rest of an MQTT 5 packet reads differently
        body = raw[next(i for i in range(1, 5) if not raw[i] & 0x80) + 1 :]
        if body[:6] != b"\x00\x04MQTT" or body[6:7] != bytes([MQTT_3_1_1]):
            await self._refuse(writer, UNACCEPTABLE_PROTOCOL_VERSION, f"{device}: not MQTT 3.1.1")
            return
        connect = await ConnectPacket.from_stream(BufferReader(raw))
        if device is None or connect.client_id != device:
            await self._refuse(writer, NOT_AUTHORIZED, f"certificate {device!r}, client id {connect.client_id!r}")
            return
        if not self._admits(device, serial_number(tls)):
            await self._refuse(writer, NOT_AUTHORIZED, f"{device} is not enrolled, or its certificate is revoked")
            return
        if connect.will_flag and not will_permitted(self._rules, device, connect.will_topic):
            await self._refuse(writer, NOT_AUTHORIZED, f"{device}: will on {connect.will_topic!r} not allowed")
            return

        await self._replace_previous(device, writer)
        try:
            previous = self._broker.sessions.get(device, (None, None))[0]
            if previous is not None:  # amqtt does not take these over when it resumes a session
                previous.ssl_object = tls
                previous.will_retain = connect.will_retain_flag
            await self._broker.external_connected(
                DeviceReader(reader, raw, connect.keep_alive), StreamWriterAdapter(writer), LISTENER
            )
        finally:
            if self._live.get(device, (None,))[0] is asyncio.current_task():
                del self._live[device]
            await self._broker.end_session(device)

    async def _replace_previous(self, device: str, writer: asyncio.StreamWriter) -> None:
        """MQTT-3.1.4-2: a device that connects again ends its previous connection (whose will is then sent)."""
        task = asyncio.current_task()
        assert task is not None
        previous = self._live.get(device)
        self._live[device] = (task, writer)
        if previous is None:
            return
        previous[1].transport.abort()
        _, late = await asyncio.wait([previous[0]], timeout=5)
        for old in late:
            old.cancel()
        if late:
            await asyncio.wait(late, timeout=5)

    @staticmethod
    async def _refuse(writer: asyncio.StreamWriter, code: int, why: str) -> None:
        log.warning("connection refused: %s", why)
        writer.write(ConnackPacket.build(0, code).to_bytes())
        await writer.drain()

    async def close(self) -> None:
        """End every connection."""
        live = list(self._live.values())
        for _, writer in live:
            writer.transport.abort()
        if live:
            _, late = await asyncio.wait([task for task, _ in live], timeout=5)
            for task in late:
                task.cancel()


def server_tls(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.3 with client certificates required, and no certificate authority trusted but ours."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cafile=ca)
    context.load_cert_chain(cert, key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def serve_amqtt(
    port: int,
    ca: Path,
    cert: Path,
    key: Path,
    rules: Rules,
    ready: Callable[[], None],
    stop: asyncio.Event,
    admits: Admits = everybody,
) -> None:
    """Serve on 127.0.0.1 until `stop` is set. Call `ready` when connections are accepted."""
    broker = DeviceBroker(rules)
    gate = Gate(broker, rules, admits)
    await broker.start()
    try:
        server = await asyncio.start_server(
            gate.connected,
            "127.0.0.1",
            port,
            ssl=server_tls(ca, cert, key),
            ssl_handshake_timeout=CONNECT_TIMEOUT_S,
        )
        try:
            ready()
            await stop.wait()
        finally:
            server.close()
            await gate.close()
            await server.wait_closed()
    finally:
        await broker.shutdown()


def run_amqtt(
    port: int,
    ca: Path,
    cert: Path,
    key: Path,
    rules: Rules,
    ready: Callable[[], None],
    stop: threading.Event | None = None,
    admits: Admits = everybody,
) -> None:
    """Run the broker in this thread until `stop` is set or, in the main thread, SIGINT or SIGTERM arrives."""

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(NotImplementedError):  # Windows
                    loop.add_signal_handler(number, ended.set)

        def watch(stopping: threading.Event) -> None:
            stopping.wait()
            with contextlib.suppress(RuntimeError):  # the loop has ended for another reason
                loop.call_soon_threadsafe(ended.set)

        if stop is not None:
            threading.Thread(target=watch, args=(stop,), name="amqtt-stop", daemon=True).start()
        await serve_amqtt(port, ca, cert, key, rules, ready, ended, admits)

    asyncio.run(main())
