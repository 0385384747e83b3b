"""The agent's control socket: how commands on this device reach the running agent.

A unix socket `control.sock` (0600) in the private store (0700). One JSON object a line in both directions: a request of a strict schema,
at most 4 KB, and its reply, `{"ok": true, "data": …}` or `{"ok": false, "error": …}`. A thread reads requests and hands them to the agent's
loop, which answers; it serves one connection at a time. Only the agent's own user and root are served.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from edge_client.errors import NotRunningError, OwnerRequestError
from edge_client.messaging.owner_requests import REQUESTS, Asked, OwnerRequest, Reply, failure
from fedcg.text_output import wrong_value

SOCKET_NAME = "control.sock"
MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 1 << 20
ANSWER_S = 15.0
"""The loop answers within a quarter of a second, unless its disk is slow."""
IDLE_S = 5.0
"""A connection without a request for so long is closed."""
_MAX_PATH_BYTES = 107  # of a unix socket's address, less its end
_MAX_REQUESTS = 64  # of one connection


class ControlSocket:
    """Serves the control socket of one private store.

    Args:
        root: of the store.
        put: hands a request to the loop; must only enqueue.
    """

    def __init__(self, root: Path, put: Callable[[Asked], None]) -> None:
        self._path = root / SOCKET_NAME
        self._put = put
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen; the caller holds the store's lock, so a socket that is there was left by a killed agent.

        Raises:
            OSError: the address can't be used.
        """
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address(self._path) as address:
                listener.bind(address)
            self._path.chmod(0o600)
            listener.listen(4)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="control-socket", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listener.close()
        self._listener = None
        self._path.unlink(missing_ok=True)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError):
                connection.settimeout(IDLE_S)
                if _peer(connection) in (0, os.geteuid()):
                    self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            for _ in range(_MAX_REQUESTS):
                line = lines.readline(MAX_REQUEST_BYTES + 1)
                if not line:
                    return
                reply = self._reply_to(line)
                connection.sendall(json.dumps(reply).encode() + b"\n")
                if len(line) > MAX_REQUEST_BYTES:
                    return  # the rest of it is no request

    def _reply_to(self, line: bytes) -> Reply:
        if len(line) > MAX_REQUEST_BYTES:
            return failure(f"a request has at most {MAX_REQUEST_BYTES} bytes")
        try:
            asked = Asked(REQUESTS.validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return failure(f"request field {'.'.join(map(str, first['loc'])) or '(root)'}: {wrong_value(first)}")
        try:
            self._put(asked)
            return asked.answer.get(timeout=ANSWER_S)
        except (queue.Empty, queue.Full):
            return failure(f"the agent is busy and did not answer within {ANSWER_S:g} s; try again")


def ask_agent(root: Path, request: OwnerRequest) -> Reply:
    """Ask the running agent of a private store; returns the data of its reply.

    Raises:
        NotRunningError: no agent runs with this store.
        OwnerRequestError: it does not carry the request out, or gives no readable answer in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S + IDLE_S)
        try:
            with _address(root / SOCKET_NAME) as address:
                connection.connect(address)
        except PermissionError as error:
            raise OwnerRequestError(
                f"{root / SOCKET_NAME} belongs to the agent's user: run this as that user or root"
            ) from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotRunningError(f"no agent runs with the store {root}: start it with `fedcg agent run`") from error
        try:
            connection.sendall(request.model_dump_json().encode() + b"\n")
            with connection.makefile("rb") as lines:
                reply = json.loads(lines.readline(MAX_REPLY_BYTES))
        except (OSError, ValueError) as error:
            raise OwnerRequestError(
                f"the agent of {root} gives no readable answer ({error}); look at `fedcg agent logs`"
            ) from error
    if not isinstance(reply, dict) or reply.get("ok") is not True or not isinstance(reply.get("data"), dict):
        raise OwnerRequestError(str(reply.get("error") if isinstance(reply, dict) else reply))
    return dict(reply["data"])


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """A path that fits into a socket's address: itself, or through a descriptor of its folder where it is too long (Linux)."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _peer(connection: socket.socket) -> int:
    """The user id of the other side."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
