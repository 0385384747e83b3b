"""What docs/serving.md tells people to type does what it says, and new versions come into service while callers ask."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest

from export import load
from export.errors import InputError
from export.model.runtime import Model, load_image
from export.model.versions import Slots
from export.serving.app import OF_STATUS, OTHER_STATUS
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


ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "serving.md").read_text()
ADDRESS = "http://127.0.0.1:8080"
OURS = ("export", "fedcg", "edge_client", "coordinator", "devices", "torch", "paho")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `models`, `image.png` and `pixels.json`, as the page has them."""
    folder = tmp_path_factory.mktemp("home")
    install_versions(folder / "models", 1)
    install_versions(folder / "raw", 1, takes="normalised")
    (folder / "image.png").write_bytes(encoded(picture(1), "PNG"))
    pixels = load_image(folder / "image.png", Model.load(folder / "models").manifest.image)
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


@pytest.mark.parametrize("root", ["models", pytest.param("raw", marks=pytest.mark.slow)])
def test_the_model_runs_in_plain_onnxruntime_without_code_of_ours_and_gives_the_same_answer(
    home: Path, root: str
) -> None:
    best = load(home / "models").classify(home / "image.png")[0]
    told, loaded = _python(_snippet(f'InferenceSession("{root}/'), home).splitlines()
    assert loaded == "[]"
    label, probability = told.split()
    assert label == best.label
    assert float(probability) == pytest.approx(best.probability, abs=1e-6)
    onnx.checker.check_model(str(home / root / "0001" / "model.onnx"), full_check=True)


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
    row = model.predict([load_image(path, model.manifest.image)])[0]
    assert [guess.probability for guess in guesses] == np.sort(row)[::-1][:2].tolist()
    with pytest.raises(InputError, match=r"gone\.png: no such file"):
        model.classify(home / "gone.png")
    with pytest.raises(InputError, match="over the limit of 9"):
        model.classify(path, max_pixels=9)


@pytest.mark.slow
def test_the_documented_requests_are_answered(server: Server, home: Path) -> None:
    [block] = _blocks("sh")
    best = load(home / "models").classify(home / "image.png")[0]
    counts = []
    for line in block.splitlines():
        words = shlex.split(line.replace(ADDRESS, f"http://127.0.0.1:{server.port}"))
        assert words[0] == "curl"
        curl = shutil.which("curl") or pytest.skip("curl is not installed")
        done = subprocess.run([curl, "-sS", "--fail", *words[1:]], cwd=home, capture_output=True, text=True, check=True)
        results = json.loads(done.stdout)["results"]
        assert {result["class"] for result in results} == {best.label}
        counts.append(len(results))
    assert counts == [1, 2, 1]
    code = _snippet("urllib").replace(ADDRESS, f"http://127.0.0.1:{server.port}")
    assert _python(code, home).splitlines() == [best.label, "[]"]
