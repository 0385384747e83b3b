"""What the pages on serving tell people to type does what it says, new versions come into service while callers ask, and so it is over MQTT on a real Mosquitto."""

import ast
import itertools
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from export import load
from export.errors import InputError
from export.model.runtime import Model, load_all, load_inputs
from export.model.versions import ModelVersions
from export.serving.app import OF_STATUS, OTHER_STATUS
from fedcg.input_form import TensorForm
from fedcg.wire.transport.mqtt import MqttConfig, MqttTransport
from tests.conftest import StartMosquitto
from tests.support.broker.brokers import HOST, Client, Pki, RunningMosquitto
from tests.support.commands import fails
from tests.support.learning.export_models import encoded, image_form, install_model, make_spec, picture
from tests.support.serving import JSON, Server, install_versions, serving
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
PAGES = ("how-to/serve.md", "how-to/optimise.md", "reference/http-predict.md")
PAGE = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
ADDRESS = "http://127.0.0.1:8080"
OURS = ("export", "fedcg", "edge_client", "coordinator", "devices", "torch", "paho")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `models`, `image.png` and `pixels.json`, as the page has them."""
    folder = tmp_path_factory.mktemp("home")
    install_versions(folder / "models", 1)
    (folder / "image.png").write_bytes(encoded(picture(1), "PNG"))
    pixels = load_inputs(folder / "image.png", Model.load(folder / "models").manifest.input)[0]
    (folder / "pixels.json").write_text(json.dumps({"images": pixels.tolist()}))
    return folder


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    with serving(home / "models") as running:
        yield running


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def _snippet(word: str) -> str:
    [found] = [block for block in _blocks("python") if word in block]
    return found


def _python(code: str, home: Path) -> str:
    """Run it in a fresh process, which then says on stderr what of ours it loaded."""
    program = f"{code}\nimport sys\nprint([name for name in {OURS!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_model_runs_in_plain_onnxruntime_without_our_code_and_gives_the_same_answer(home: Path) -> None:
    best = load(home / "models").classify(home / "image.png")[0]
    told, loaded = _python(_snippet("InferenceSession"), home).splitlines()
    assert loaded == "[]"
    label, probability = told.split()
    assert label == best.label
    assert float(probability) == pytest.approx(best.probability, abs=1e-6)
    onnx.checker.check_model(str(home / "models" / "0001" / "model.onnx"), full_check=True)


@pytest.mark.slow
def test_the_three_lines_of_python_classify_an_image(home: Path) -> None:
    told, loaded = _python(_snippet("from export import load"), home).splitlines()
    assert told == str(load(home / "models").classify(home / "image.png"))
    assert loaded == "['export', 'fedcg']"  # of which the torch-free files, and no wire


def _codes() -> set[tuple[str, str]]:
    """Status and code of every refusal that the sources make."""
    found = set()
    for file in (ROOT / "export").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("RefusedError", "super().__init__"):
                status, code = [*map(ast.unparse, node.args), "", ""][:2]
                if status.isdecimal():
                    found.add((status, ast.literal_eval(code)))
    return found | {(str(status), code) for status, code in OF_STATUS.items()} | {("other", OTHER_STATUS)}


def test_every_code_with_which_a_request_is_refused_stands_in_the_table_with_its_status() -> None:
    rows = re.findall(r"^\| (\d{3}|other) \| (`.*?`) \|", PAGE, re.MULTILINE)
    table = {(status, code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert {("404", "not_found"), ("405", "wrong_method"), ("429", "queue_full"), ("422", "bad_json")} <= _codes()
    assert table == _codes()


def test_importing_the_package_loads_no_runtime(home: Path) -> None:
    code = "import export, sys\nassert not {'numpy', 'onnxruntime', 'PIL', 'pydantic'} & set(sys.modules)"
    assert "export" in _python(code, home)


def test_a_file_its_bytes_and_its_name_are_classified_alike_and_a_missing_one_is_named(home: Path) -> None:
    model, path = load(str(home / "models"), threads=1), home / "image.png"
    guesses = model.classify(path, top=2)
    assert guesses == model.classify(str(path), top=2) == model.classify(path.read_bytes(), top=2)
    row = model.predict(load_inputs(path, model.manifest.input))[0]
    assert [guess.probability for guess in guesses] == np.sort(row)[::-1][:2].tolist()
    with pytest.raises(InputError, match=r"gone\.png: no such file"):
        model.classify(home / "gone.png")
    with pytest.raises(InputError, match="over the limit of 9"):
        model.classify(path, max_pixels=9)


@pytest.mark.slow
def test_the_documented_requests_are_answered(server: Server, home: Path) -> None:
    lines = [line for block in _blocks("sh") for line in block.splitlines() if line.startswith("curl ")]
    best = load(home / "models").classify(home / "image.png")[0]
    counts = []
    for line in lines[:2]:
        words = shlex.split(line.replace(ADDRESS, f"http://127.0.0.1:{server.port}"))
        curl = shutil.which("curl") or pytest.skip("curl is not installed")
        done = subprocess.run([curl, "-sS", "--fail", *words[1:]], cwd=home, capture_output=True, text=True, check=True)
        results = json.loads(done.stdout)["results"]
        assert {result["class"] for result in results} == {best.label}
        counts.append(len(results))
    assert counts == [1, 1]
    code = _snippet("urllib").replace(ADDRESS, f"http://127.0.0.1:{server.port}")
    assert _python(code, home).splitlines() == [best.label, "[]"]


CALLERS = 6
IMAGES = [encoded(picture(seed), "PNG") for seed in range(3)]
Answers = dict[str, list[dict[str, float]]]


def _expected(root: Path) -> Answers:
    """Probabilities by class of each image, by version."""
    found: Answers = {}
    for version in ModelVersions(root).versions():
        model = Model.load(version.directory, threads=1)
        rows = model.predict(load_all(IMAGES, model.manifest.input))
        found[version.name] = [{guess.label: guess.probability for guess in model.top(row, 3)} for row in rows]
    return found


def _ask_until(done: threading.Event, server: Server, expected: Answers, *, keeps_alive: bool) -> Counter[str]:
    """Ask as long as nothing says stop; how many answers each version gave."""
    body = json.dumps({"images": [one.tolist() for one in load_all(IMAGES, image_form())]})
    seen: Counter[str] = Counter()
    with closing(server.connect()) as connection:
        while not done.is_set() or not seen:
            connection.request("POST", "/predict", body, JSON)
            response = connection.getresponse()
            _check(response.status, response.read(), expected, seen)
            if not keeps_alive:
                connection.close()  # the next request opens it again
    return seen


def _check(status: int, text: bytes, expected: Answers, seen: Counter[str]) -> None:
    """The answer is all one version's, and that of the version which it names."""
    assert status == 200, text
    document = json.loads(text)
    assert document["round"] == int(document["version"])
    for result, wanted in zip(document["results"], expected[document["version"]], strict=True):
        assert {one["class"]: one["probability"] for one in result["top"]} == pytest.approx(wanted, abs=1e-5)
    seen[document["version"]] += 1


def _point_to_a_damaged_version(server: Server, installed: ModelVersions) -> None:
    """As when the disk fails after the switch: `use` would have refused it."""
    content = (installed.root / "0001" / "model.onnx").read_bytes()
    damaged = installed.root / "0009"
    damaged.mkdir()
    (damaged / "manifest.json").write_bytes((installed.root / "0001" / "manifest.json").read_bytes())
    (damaged / "model.onnx").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    installed._point_to("0009")
    server.wait_for_metric('fedcg_serve_model_loads_total{outcome="refused"}', 1)
    assert "0009" in server.ask("/model").document["refused"]
    assert server.ask("/readyz").status == 200


@pytest.mark.parametrize("swaps", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_no_request_fails_and_no_answer_is_mixed_while_versions_change(tmp_path: Path, swaps: int) -> None:
    root = tmp_path / "models"
    install_versions(root, 3)
    expected, installed, done = _expected(root), ModelVersions(root), threading.Event()
    with serving(root, "--watch", 0, "--shadow", 0) as server, ThreadPoolExecutor(CALLERS) as pool:
        callers = [
            pool.submit(_ask_until, done, server, expected, keeps_alive=number % 2 == 0) for number in range(CALLERS)
        ]
        try:
            names = [version.name for version in installed.versions()]
            for number in range(swaps):
                installed.use(names[number % len(names)])
                server.wait_for_version(names[number % len(names)])
            _point_to_a_damaged_version(server, installed)
        finally:
            done.set()
        seen = sum((caller.result() for caller in callers), Counter[str]())
        asked = server.metric('fedcg_serve_requests_total{outcome="ok"}')
        assert server.metric('fedcg_serve_model_loads_total{outcome="loaded"}') == 1 + swaps
        code, errors = server.stop()
    assert set(seen) == {"0003", *list(expected)[:swaps]}
    assert asked == seen.total() > swaps
    assert code == 0
    assert "Traceback" not in errors


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
        self.client = Client(MqttTransport(MqttConfig(HOST, broker.port, name, tls=broker.pki.tls(name))))
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
def serving_mqtt(broker: RunningMosquitto, models: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
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


def test_tensors_are_asked_about_over_mqtt(broker: RunningMosquitto, app: MakeApp, tmp_path: Path) -> None:
    form = TensorForm(kind="tensor", shape=(2, 20, 24), mean=(3.0, -2.0), std=(2.0, 0.5))
    install_model(tmp_path / "models", spec=make_spec(form))
    np.save(tmp_path / "two.npy", np.random.default_rng(0).normal(1, 2, (2, *form.shape)).astype(np.float32))
    camera, wanted = app("camera"), load(tmp_path / "models").predict(np.load(tmp_path / "two.npy"))
    with serving_mqtt(broker, tmp_path / "models"):
        wait_until(lambda: camera.status().get("online") is True, "the server says that it answers", 60)
        answers = camera.ask((tmp_path / "two.npy").read_bytes(), "1")["results"]
        assert [one["probability"] for one in answers] == pytest.approx(wanted.max(axis=1), abs=1e-5)
        refused = camera.ask(encoded(picture(1), "PNG"), "2")["error"]
    assert refused["code"] == "bad_npy"
    assert "the model takes tensors [2, 20, 24] of float32" in refused["message"]


def test_programs_ask_over_mqtt_and_get_their_own_answers(broker: RunningMosquitto, app: MakeApp, models: Path) -> None:
    camera, press = app("camera"), app("press")
    camera.send(b"left over from before", "old", retain=True)
    image = encoded(picture(1), "PNG")
    with serving_mqtt(
        broker, models, "--top", "2", "--max-bytes", "100000", "--watch", "0", "--shadow", "0"
    ) as process:
        wait_until(lambda: camera.status().get("online") is True, "the server says that it answers", 60)
        assert camera.status() == {"online": True, "federation": "garden", "round": 2, "version": "0002"}

        answer = camera.ask(image, "1")
        model = Model.load(models, threads=1)
        wanted = model.top(model.predict(load_inputs(image, model.manifest.input))[0], 2)
        assert (answer["federation"], answer["round"], answer["version"]) == ("garden", 2, "0002")
        assert [one["class"] for one in answer["results"][0]["top"]] == [guess.label for guess in wanted]
        assert [one["probability"] for one in answer["results"][0]["top"]] == pytest.approx(
            [guess.probability for guess in wanted], abs=1e-5
        )
        arrays = [load_inputs(image, model.manifest.input)[0].tolist()] * 2
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

        ModelVersions(models).use("0001")
        wait_until(lambda: camera.status().get("version") == "0001", "the status names the new version")
        assert camera.ask(image, "2")["version"] == "0001"

        assert camera.answers("old") == []
        assert not [one for one in camera.client.deliveries if "/press/" in one.topic]
        assert not [one for one in press.client.deliveries if "/camera/" in one.topic]

        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    wait_until(lambda: camera.status() == {"online": False}, "the server says goodbye")


def test_a_new_version_is_compared_before_it_answers(broker: RunningMosquitto, app: MakeApp, tmp_path: Path) -> None:
    models, camera, image = tmp_path / "models", app("camera"), encoded(picture(1), "PNG")
    numbers = map(str, itertools.count())
    install_versions(models, 1)
    with serving_mqtt(broker, models, "--shadow", "20", "--shadow-share", "1"):
        wait_until(lambda: camera.status().get("version") == "0001", "the server answers", 60)
        install_model(models, seed=1, round_number=2)  # of the same weights
        wait_until(lambda: camera.status().get("candidate") == "0002", "the status names the candidate")
        assert {camera.ask(image, next(numbers))["version"] for _ in range(19)} == {"0001"}
        wait_until(lambda: camera.ask(image, next(numbers))["version"] == "0002", "version 0002 answers", 60)


def test_a_server_that_dies_is_reported_by_the_broker(broker: RunningMosquitto, app: MakeApp, models: Path) -> None:
    camera = app("camera")
    with serving_mqtt(broker, models) as process:
        wait_until(lambda: camera.status().get("online") is True, "the server answers", 60)
        process.kill()
        wait_until(lambda: camera.status() == {"online": False}, "its will is heard")


def test_requests_beyond_the_queue_are_refused_by_name(broker: RunningMosquitto, app: MakeApp, models: Path) -> None:
    camera = app("camera")
    image = encoded(Image.new("RGB", (3000, 3000), (200, 30, 90)), "PNG")  # small to send, long to decode
    with serving_mqtt(broker, models, "--queue", "1"):
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
        (["--name", "no/slash"], "is not a valid topic level"),
        (["--name", "line-1", "--ca", "ca.pem"], "all of --ca, --cert and --key"),
        (["--name", "line-1"], "no TLS files for the broker"),
        (["--name", "line-1", "--insecure", "--host", "broker.example"], "loopback"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path: Path, options: list[str], told: str) -> None:
    assert told in fails(2, "infer", "serve-mqtt", "--model", tmp_path, *options)
