"""New versions come into service while callers ask: nobody notices but by the version that the answer names."""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from export.model.runtime import Model, load_image
from export.model.versions import Slots
from tests.support.learning.export_models import encoded, picture
from tests.support.serving import Server, install_versions, multipart, serving

CALLERS = 6
IMAGES = {f"{seed}.png": encoded(picture(seed), "PNG") for seed in range(3)}
Answers = dict[str, list[dict[str, float]]]


def _expected(root: Path) -> Answers:
    """Probabilities by class of each image, by version."""
    found: Answers = {}
    for version in Slots(root).versions():
        model = Model.load(version.directory, threads=1)
        rows = model.predict([load_image(content, model.manifest.image) for content in IMAGES.values()])
        found[version.name] = [{guess.label: guess.probability for guess in model.top(row, 3)} for row in rows]
    return found


def _ask_until(done: threading.Event, server: Server, expected: Answers, *, keeps_alive: bool) -> Counter[str]:
    """Ask as long as nothing says stop; how many answers each version gave."""
    body, headers = multipart(IMAGES)
    seen: Counter[str] = Counter()
    with closing(server.connect()) as connection:
        while not done.is_set() or not seen:
            connection.request("POST", "/predict", body, headers)
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


def _swap(server: Server, slots: Slots, swaps: int) -> None:
    names = [version.name for version in slots.versions()]
    for number in range(swaps):
        slots.use(names[number % len(names)])
        server.wait_for_version(names[number % len(names)])


def _point_to_a_damaged_version(server: Server, slots: Slots) -> None:
    """As when the disk fails after the switch: `use` would have refused it."""
    content = (slots.root / "0001" / "model.onnx").read_bytes()
    damaged = slots.root / "0009"
    damaged.mkdir()
    (damaged / "manifest.json").write_bytes((slots.root / "0001" / "manifest.json").read_bytes())
    (damaged / "model.onnx").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    slots._point_to("0009")
    server.wait_for_metric('fedcg_serve_model_loads_total{outcome="refused"}', 1)
    assert "0009" in server.ask("/model").document["refused"]
    assert server.ask("/readyz").status == 200


@pytest.mark.parametrize("swaps", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_no_request_fails_and_no_answer_is_mixed_while_versions_change(tmp_path: Path, swaps: int) -> None:
    root = tmp_path / "models"
    install_versions(root, 3)
    expected, slots, done = _expected(root), Slots(root), threading.Event()
    with serving(root, "--watch", 0, "--shadow", 0) as server, ThreadPoolExecutor(CALLERS) as pool:
        callers = [
            pool.submit(_ask_until, done, server, expected, keeps_alive=number % 2 == 0) for number in range(CALLERS)
        ]
        try:
            _swap(server, slots, swaps)
            _point_to_a_damaged_version(server, slots)
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
