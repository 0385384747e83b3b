"""The oldest Python that a box may have (JetPack 6): what needs no torch runs there for real.

`make check` holds the rest to 3.10 as well: mypy reads the packages of a box as 3.10 does, its syntax and its standard library.
Name the interpreter in PYTHON310 where it is not on PATH.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

from export import load
from tests.support.commands import data_of
from tests.support.learning.export_models import encoded, picture
from tests.support.serving import PNG, install_versions, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # installs packages
REPOSITORY = Path(__file__).resolve().parents[2]
EXTRAS = "serve,wire"
TESTS = ("fedcg/wire/**/test_*.py", "devices/test_*.py", "edge_client/session/test_*.py", "fedcg/test_event_log.py")
TORCH = ("torch", "safetensors.torch", "sklearn", "torchvision")
IMPORTS = f"""
import importlib, pkgutil
for name in ("fedcg", "edge_client", "export", "devices"):
    for found in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert error.name in {TORCH}, (found.name, error)
"""


def _interpreter() -> str:
    for named in (os.environ.get("PYTHON310"), shutil.which("python3.10")):
        if named and subprocess.run([named, "-c", ""], capture_output=True, check=False).returncode == 0:
            return named
    pytest.skip("no Python 3.10 on PATH or in PYTHON310")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python 3.10 with what a box needs beside torch, and pytest."""
    folder = tmp_path_factory.mktemp("py310")
    _run(_interpreter(), "-m", "venv", folder / "venv")
    made = folder / "venv" / "bin" / "python"
    packages = [f"{REPOSITORY}[{EXTRAS}]", "onnx", "nvidia-ml-py", "pytest", "pytest-timeout", "hypothesis"]
    _run(made, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    return made


def _run(*command: str | Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(one) for one in command],
        cwd=REPOSITORY,
        env={**clean, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_every_module_of_a_box_is_imported_or_lacks_torch_alone(python: Path) -> None:
    assert _run(python, "-c", "import sys; print(sys.version_info[:2])") == "(3, 10)\n"
    _run(python, "-W", "ignore", "-c", IMPORTS)


def test_the_wire_the_session_and_the_versions_of_a_model_pass_their_tests(python: Path) -> None:
    files = [path for pattern in TESTS for path in sorted((REPOSITORY / "tests" / "unit").glob(pattern))]
    chosen = [path for path in files if not any(word in path.read_text() for word in ("torch", "coordinator"))]
    output = _run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not broker", *chosen)
    assert int(output.splitlines()[-1].split()[0]) > 100, output[-500:]


def _requirements(extra: str) -> Iterator[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for one in project["optional-dependencies"][extra]:
        inner = re.fullmatch(r"fedcg-edge\[(.*)\]", one)
        if inner is None:
            yield one.partition(";")[0]
        else:
            yield from (found for name in inner[1].split(",") for found in _requirements(name))


def test_what_a_box_installs_has_a_wheel_for_a_jetsons_python(tmp_path: Path) -> None:
    needed = set(_requirements("edge"))
    without_torch = sorted(one for one in needed if not one.startswith("torch"))  # hundreds of MB; NVIDIA has its own
    assert len(without_torch) >= 10
    target = ("--python-version", "3.10", "--implementation", "cp", "--only-binary=:all:", "--target", tmp_path / "box")
    names = ("manylinux_2_17", "manylinux_2_27", "manylinux_2_28", "manylinux2014")
    platforms = [word for one in names for word in ("--platform", f"{one}_aarch64")]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
    done = subprocess.run(
        [str(one) for one in (*command, *target, *platforms, *without_torch)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if any(word in done.stderr for word in ("NewConnectionError", "Max retries", "Temporary failure")):
        pytest.skip("no package registry can be reached")
    assert done.returncode == 0, done.stderr


def test_a_model_is_classified_optimised_and_served_as_here(python: Path, tmp_path: Path) -> None:
    install_versions(tmp_path / "models", 1)
    content = encoded(picture(1), "PNG")
    (tmp_path / "image.png").write_bytes(content)
    best = load(tmp_path / "models").classify(content)[0]
    fedcg = (str(python.parent / "fedcg"),)
    output = _run(*fedcg, "infer", tmp_path / "image.png", "--model", tmp_path / "models", "--json")
    assert data_of(output)["results"][0]["class"] == best.label
    with serving(tmp_path / "models", command=fedcg) as server:
        answer = server.ask("/predict", content, PNG).document["results"][0]
        assert answer["class"] == best.label
        assert answer["probability"] == pytest.approx(best.probability, abs=1e-5)
    images = tmp_path / "images" / best.label
    images.mkdir(parents=True)
    for number in range(4):
        (images / f"{number}.png").write_bytes(content)
    tried = _run(*fedcg, "model", "optimise", tmp_path / "models", "--images", images.parent, "--json")
    names = [one["name"] for one in data_of(tried)["variants"] if one["latency_ms"]]
    assert names == ["fp32", "ort", "fp16", "int8"]
