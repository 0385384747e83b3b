"""Publishes a few messages to any broker, over a separate connection."""

import time
from queue import Empty, Queue
from urllib.parse import SplitResult

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

TIMEOUT_S = 5.0


def publish(server: SplitResult, password: str, messages: list[tuple[str, str, bool]]) -> None:
    """Publish (topic, text, retained) with acknowledgement, over a separate connection.

    Raises:
        OSError: the broker is not there, refuses the connection or acknowledges too late.
    """
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.connect_timeout = TIMEOUT_S
    if server.username:
        client.username_pw_set(server.username, password)
    if server.scheme == "mqtts":
        client.tls_set()
    answers: Queue[ReasonCode] = Queue()
    client.on_connect = lambda _client, _data, _flags, code, _properties: answers.put(code)
    client.connect(server.hostname or "", server.port or (8883 if server.scheme == "mqtts" else 1883))
    client.loop_start()
    try:
        if (answer := answers.get(timeout=TIMEOUT_S)).is_failure:
            raise ConnectionError(str(answer))
        end = time.monotonic() + TIMEOUT_S
        for one in [client.publish(name, text, qos=1, retain=kept) for name, text, kept in messages]:
            one.wait_for_publish(max(0.0, end - time.monotonic()))
            if not one.is_published():
                raise TimeoutError(f"no acknowledgement within {TIMEOUT_S:g} s")
    except (Empty, RuntimeError, ValueError) as error:
        raise ConnectionError(f"the broker did not answer: {error}") from error
    finally:
        client.disconnect()
        client.loop_stop()
