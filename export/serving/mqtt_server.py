"""`fedcg infer serve-mqtt`: serves predictions to MQTT applications, by request and response. No torch.

Clients publish requests on `PREFIX/NAME/request/CLIENT/ID`, with the bytes of an image or npy file, or JSON arrays, as payload. The response
on `PREFIX/NAME/response/CLIENT/ID` is the document of `POST /predict` or `{"error": …}`. The request topic determines the response topic, so
MQTT 3.1.1 is enough, and an access list can separate applications. `PREFIX/NAME/status` is retained and is the topic of the will.

If the queue is full, the response is an error. A request delivered twice is answered twice. Retained requests are ignored: the broker
delivers them again after every reconnect.
"""

import contextlib
import json
import logging
import queue
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from export.errors import ExportError, QueueFullError, RefusedError
from export.model.image_files import Classified
from export.serving.live_model import ServedModel
from export.serving.request_bodies import BYTES_TYPE, JSON_TYPE, Limits, read_inputs
from fedcg.values import Value
from fedcg.wire.errors import TransportError
from fedcg.wire.transport.transport import Delivery, Transport, Will

POLL_S = 0.5
INBOUND_FACTOR = 4  # a request of up to 4 times the limit gets an error; a larger one closes the connection
MAX_IMAGES = 32  # of one request, in JSON
LEVEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Allowed NAME, CLIENT and ID; a prefix is one or more of these."""
log = logging.getLogger(__name__)


class Place(Value):
    """The topics of a model on the broker.

    Attributes:
        prefix: one or more topic levels.
        name: name of this server.
    """

    prefix: str
    name: str

    def __post_init__(self) -> None:
        for level in (*self.prefix.split("/"), self.name):
            if not LEVEL.fullmatch(level):
                raise ExportError(
                    f"{level!r} is not a valid topic level: use 1 to 64 letters, digits, dots, dashes and underscores"
                )

    @property
    def requests(self) -> str:
        """Topic filter for the requests of all clients."""
        return f"{self.prefix}/{self.name}/request/+/+"

    @property
    def status(self) -> str:
        """Retained topic: whether predictions are served, and by which model."""
        return f"{self.prefix}/{self.name}/status"

    def response_to(self, topic: str) -> str | None:
        """The response topic of a request topic; None for any other topic."""
        begin = f"{self.prefix}/{self.name}/request/"
        levels = topic.removeprefix(begin).split("/")
        if not topic.startswith(begin) or len(levels) != 2 or not all(LEVEL.fullmatch(level) for level in levels):
            return None
        return f"{self.prefix}/{self.name}/response/{levels[0]}/{levels[1]}"

    def will(self) -> Will:
        """The message that the broker publishes if the server disconnects."""
        return Will(self.status, json.dumps({"online": False}).encode())


@dataclass(eq=False)
class MqttServer:
    """Answers requests from one broker.

    Args:
        models: the model in service.
        place: the server's topics.
        connect: creates the transport for a will.
        limits: limits of one request.
        capacity: most waiting requests; more are refused.
        top: number of classes per image.
    """

    models: ServedModel
    place: Place
    connect: Callable[[Will], Transport]
    limits: Limits
    capacity: int
    top: int

    def __post_init__(self) -> None:
        self._transport = self.connect(self.place.will())
        self._waiting: queue.Queue[tuple[str, bytes]] = queue.Queue(self.capacity)
        self._stopping = threading.Event()
        self._published: dict[str, object] = {}

    def stop(self) -> None:
        """End `run` after the waiting requests are answered; safe in any thread or signal handler."""
        self._stopping.set()

    def run(self) -> None:
        """Answer requests until stopped."""
        self.models.refresh()
        self._transport.subscribe(self.place.requests)
        self._transport.start(self._received, self._link)
        looked_at = time.monotonic()
        try:
            while not (self._stopping.is_set() and self._waiting.empty()):
                with contextlib.suppress(queue.Empty):
                    self._answer(*self._waiting.get(timeout=POLL_S / 5))
                if time.monotonic() - looked_at >= POLL_S:
                    looked_at = time.monotonic()
                    self._look()
        finally:
            self.models.close()
            self._publish(self.place.status, {"online": False}, retain=True)
            self._transport.close()

    def _received(self, delivery: Delivery) -> None:
        """On the transport's thread: enqueue, or refuse."""
        reply_to = self.place.response_to(delivery.topic)
        if reply_to is None or delivery.retained:
            return
        refusal = self._objection(delivery)
        if refusal is None:
            try:
                self._waiting.put_nowait((reply_to, delivery.payload))
            except queue.Full:
                refusal = QueueFullError(f"{self._waiting.maxsize} requests are waiting")
        if refusal is not None:
            self._publish(reply_to, refusal.as_json())

    def _objection(self, delivery: Delivery) -> RefusedError | None:
        """Why a request is refused; None if it is queued."""
        if self._stopping.is_set():
            return RefusedError(503, "draining", "the server is shutting down; retry after its restart")
        if len(delivery.payload) > self.limits.max_bytes:
            message = f"the request is larger than {self.limits.max_bytes} bytes; send a smaller input, or raise --max-bytes of the server"
            return RefusedError(413, "body_too_large", message)
        return None

    def _link(self, up: bool) -> None:
        self._published = {}  # the status is published again after a reconnect

    def _look(self) -> None:
        self.models.look()
        served, candidate = self.models.current, self.models.candidate
        status: dict[str, object] = {"online": served is not None and not self._stopping.is_set()}
        status |= served.identity() if served is not None else {"reason": self.models.refused}
        status |= {} if candidate is None else {"candidate": candidate.model.version}
        if status != self._published and self._publish(self.place.status, status, retain=True):
            self._published = status

    def _answer(self, reply_to: str, payload: bytes) -> None:
        try:
            document = self._predict(payload)
        except RefusedError as error:
            document = error.as_json()
        except Exception:
            log.exception("a prediction failed")
            message = "the prediction failed; see the server's log"
            document = RefusedError(500, "internal", message).as_json()
        self._publish(reply_to, document)

    def _predict(self, payload: bytes) -> dict[str, object]:
        served = self.models.current
        if served is None:
            raise RefusedError(503, "no_model", f"{self.models.refused}; the status topic shows when a model is ready")
        if not payload:
            raise RefusedError(
                400, "empty_body", "the payload is empty; send the bytes of an image or of an npy file, or JSON"
            )
        kind = JSON_TYPE if payload[:1] in (b"{", b"[") else BYTES_TYPE
        inputs = read_inputs(payload, kind, served.manifest.input, self.limits)
        samples = [one for _, one in inputs]
        try:
            rows = served.predict(samples)
        except Exception:
            self.models.failed(served)
            raise
        self.models.answered(served, samples, rows)
        results = [Classified.of(served, name, row, self.top) for (name, _), row in zip(inputs, rows, strict=True)]
        return {**served.identity(), "results": [one.as_json() for one in results]}

    def _publish(self, topic: str, document: dict[str, object], *, retain: bool = False) -> bool:
        try:
            self._transport.publish(topic, json.dumps(document).encode(), retain=retain)
        except TransportError as error:
            log.warning("response on %s not published: %s", topic, error)  # the application repeats its request
            return False
        return True
