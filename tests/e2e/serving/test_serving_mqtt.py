"""`fedcg infer serve-mqtt` on a real Mosquitto: applications ask and are answered, each on topics of its own."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from export.model.runtime import Model, load_image
from export.model.versions import Slots
from fedcg.wire.transport.mqtt import MqttConfig, MqttTransport
from tests.conftest import StartMosquitto
from tests.support.broker.brokers import HOST, Client, Pki, RunningMosquitto
from tests.support.commands import run_fedcg
from tests.support.learning.export_models import encoded, install_model, picture
from tests.support.serving import install_versions
from tests.support.waiting import wait_until

PREFIX = "fedcg-infer/line-1"
ACL = f"""user line-1
topic read {PREFIX}/request/#
topic write {PREFIX}/response/#
topic write {PREFIX}/status
user camera
topic write {PREFIX}/request/camera/+
topic read {PREFIX}/response/camera/+
topic read {PREFIX}/status
user press
topic write {PREFIX}/request/press/+
topic read {PREFIX}/response/press/+
"""


class App:
    """An application with a certificate of its own."""

    def __init__(self, name: str, broker: RunningMosquitto) -> None:
        self.name = name
        config = MqttConfig(HOST, broker.port, name, tls=broker.pki.tls(name))
        self.client = Client(MqttTransport(config))
        self.client.transport.subscribe(f"{PREFIX}/response/+/+")
        self.client.transport.subscribe(f"{PREFIX}/response/{name}/+")
        self.client.transport.subscribe(f"{PREFIX}/status")
        self.client.start().await_link()

    def send(self, payload: bytes, number: str, *, retain: bool = False) -> None:
        self.client.transport.publish(f"{PREFIX}/request/{self.name}/{number}", payload, retain=retain)

    def answers(self, number: str) -> list[Any]:
        return [json.loads(one) for one in self.client.payloads(f"{PREFIX}/response/{self.name}/{number}")]

    def ask(self, payload: bytes, number: str) -> Any:
        self.send(payload, number)
        wait_until(lambda: bool(self.answers(number)), f"an answer to request {number}")
        return self.answers(number)[-1]

    def status(self) -> dict[str, Any]:
        told = self.client.payloads(f"{PREFIX}/status")
        return json.loads(told[-1]) if told else {}


MakeApp = Callable[[str], App]


@pytest.fixture
def broker(mosquitto: StartMosquitto, tmp_path: Path) -> RunningMosquitto:
    return mosquitto(ACL, authority=Pki.create(tmp_path / "pki", ("line-1", "camera", "press")))


@pytest.fixture
def app(broker: RunningMosquitto) -> Iterator[MakeApp]:
    made: list[App] = []

    def start(name: str) -> App:
        made.append(App(name, broker))
        return made[-1]

    yield start
    for one in made:
        one.client.transport.close()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    install_versions(tmp_path / "models", 2)
    return tmp_path / "models"


@contextmanager
def serving(broker: RunningMosquitto, models: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    tls = broker.pki.tls("line-1")
    files = ["--ca", str(tls.ca), "--cert", str(tls.cert), "--key", str(tls.key)]
    command = [sys.executable, "-m", "fedcg", "infer", "serve-mqtt", "--model", str(models), "--name", "line-1"]
    with subprocess.Popen(
        [*command, "--port", str(broker.port), *files, *options], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def test_applications_ask_over_mqtt_and_each_hears_its_own_answers(
    broker: RunningMosquitto, app: MakeApp, models: Path
) -> None:
    camera, press = app("camera"), app("press")
    camera.send(b"left over from before", "old", retain=True)
    image = encoded(picture(1), "PNG")
    with serving(broker, models, "--top", "2", "--max-bytes", "100000", "--watch", "0", "--shadow", "0") as process:
        wait_until(lambda: camera.status().get("online") is True, "the server says that it answers", 60)
        assert camera.status() == {"online": True, "federation": "garden", "round": 2, "version": "0002"}

        answer = camera.ask(image, "1")
        model = Model.load(models, threads=1)
        wanted = {guess.label: guess.probability for guess in model.classify(image, top=2)}
        assert (answer["federation"], answer["round"], answer["version"]) == ("garden", 2, "0002")
        told = {one["class"]: one["probability"] for one in answer["results"][0]["top"]}
        assert told == pytest.approx(wanted, abs=1e-5)
        arrays = [load_image(image, model.manifest.image).tolist()] * 2
        assert len(press.ask(json.dumps({"images": arrays}).encode(), "a.1")["results"]) == 2

        refused = {
            "empty": (b"", "empty_body"),
            "torn": (image[: len(image) // 2], "bad_image"),
            "large": (b"x" * 100_001, "body_too_large"),
            "shape": (b'{"images": [[1, 2]]}', "bad_values"),
        }
        for number, (payload, code) in refused.items():
            assert camera.ask(payload, number)["error"]["code"] == code, number
        assert camera.ask(image, "after")["version"] == "0002"

        Slots(models).use("0001")
        wait_until(lambda: camera.status().get("version") == "0001", "the status names the new version")
        assert camera.ask(image, "2")["version"] == "0001"

        assert camera.answers("old") == []
        assert not [one for one in camera.client.deliveries if "/press/" in one.topic]
        assert not [one for one in press.client.deliveries if "/camera/" in one.topic]

        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    wait_until(lambda: camera.status() == {"online": False}, "the server says goodbye")


def test_a_new_version_is_compared_before_it_answers(broker: RunningMosquitto, app: MakeApp, tmp_path: Path) -> None:
    models, camera = tmp_path / "models", app("camera")
    install_model(models, seed=1, round_number=1)
    image = encoded(picture(1), "PNG")
    answers: list[str] = []
    with serving(broker, models, "--shadow", "20", "--shadow-share", "1"):
        wait_until(lambda: camera.status().get("version") == "0001", "the server answers", 60)
        install_model(models, seed=1, round_number=2)  # of the same weights
        wait_until(lambda: camera.status().get("candidate") == "0002", "the status names the candidate")
        assert camera.status()["version"] == "0001"

        def is_served() -> bool:
            answers.append(camera.ask(image, str(len(answers)))["version"])
            return bool(answers[-1] == "0002")

        wait_until(is_served, "version 0002 answers", 60)
        wait_until(lambda: camera.status().get("version") == "0002", "the status names the new version")
        assert "candidate" not in camera.status()
    assert len(answers) > 20
    assert set(answers[:-1]) == {"0001"}


def test_a_server_that_dies_is_reported_by_the_broker(broker: RunningMosquitto, app: MakeApp, models: Path) -> None:
    camera = app("camera")
    with serving(broker, models) as process:
        wait_until(lambda: camera.status().get("online") is True, "the server answers", 60)
        process.kill()
        wait_until(lambda: camera.status() == {"online": False}, "its will is heard")


def test_more_requests_than_the_queue_takes_are_refused_by_name(
    broker: RunningMosquitto, app: MakeApp, models: Path
) -> None:
    camera = app("camera")
    image = encoded(Image.new("RGB", (3000, 3000), (200, 30, 90)), "PNG")  # small to send, long to decode
    with serving(broker, models, "--queue", "1"):
        wait_until(lambda: camera.status().get("online") is True, "the server answers", 60)
        for number in range(12):
            camera.send(image, str(number))
        wait_until(lambda: all(camera.answers(str(number)) for number in range(12)), "every request is answered", 60)
    codes = [camera.answers(str(number))[0].get("error", {}).get("code") for number in range(12)]
    assert None in codes
    assert "queue_full" in codes


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--name", "no/slash"], "can't be part of a topic"),
        (["--name", "line-1", "--ca", "ca.pem"], "all of --ca, --cert and --key"),
        (["--name", "line-1"], "no TLS files for the broker"),
        (["--name", "line-1", "--insecure", "--host", "broker.example"], "loopback"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path: Path, options: list[str], told: str) -> None:
    done = run_fedcg("infer", "serve-mqtt", "--model", tmp_path, *options)
    assert done.exit_code == 2
    assert told in done.stderr
