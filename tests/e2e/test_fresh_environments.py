"""Fresh environments: the `infer` extra alone classifies and serves, and what needs no torch runs on the oldest Python that a box may have.

That Python is 3.10 (JetPack 6); `make check` holds the rest to it as well: mypy reads the packages of a box as 3.10 does.
Name the interpreter in PYTHON310 where it is not on PATH.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from export import load
from export.model.runtime import Model, load_all
from fedcg.wire.messages.envelopes import SigningKey
from tests.support.commands import data_of
from tests.support.learning.export_models import CLASSES, encoded, install_model, picture, write_images
from tests.support.serving import PNG, install_versions, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # installs packages
REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("fedcg", "edge_client", "coordinator", "export", "devices", "audit", "experiments")
FILES = ("pyproject.toml", "README.md", "LICENSE", "constraints.txt")
INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
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
    _run(made, *INSTALL, f"{REPOSITORY}[{EXTRAS}]", "onnx", "nvidia-ml-py", "pytest", "pytest-timeout", "hypothesis")
    return made


def _clean() -> dict[str, str]:
    """This process's environment without its import path."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**clean, "PYTHONDONTWRITEBYTECODE": "1"}


def _run(*command: str | Path, cwd: Path = REPOSITORY, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A command in a clean environment, which must end with this code."""
    words = [str(one) for one in command]
    done = subprocess.run(words, cwd=cwd, env=_clean(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def test_every_module_of_a_box_is_imported_or_lacks_torch_alone(python: Path) -> None:
    assert _run(python, "-c", "import sys; print(sys.version_info[:2])").stdout == "(3, 10)\n"
    _run(python, "-W", "ignore", "-c", IMPORTS)


def test_the_wire_the_session_and_the_versions_of_a_model_pass_their_tests(python: Path) -> None:
    files = [path for pattern in TESTS for path in sorted((REPOSITORY / "tests" / "unit").glob(pattern))]
    chosen = [path for path in files if not any(word in path.read_text() for word in ("torch", "coordinator"))]
    output = _run(
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not broker", *chosen
    ).stdout
    assert int(output.splitlines()[-1].split()[0]) > 100, output[-500:]


def test_a_model_is_classified_optimised_and_served_as_here(python: Path, tmp_path: Path) -> None:
    install_versions(tmp_path / "models", 1)
    content = encoded(picture(1), "PNG")
    (tmp_path / "image.png").write_bytes(content)
    best = load(tmp_path / "models").classify(content)[0]
    fedcg = (str(python.parent / "fedcg"),)
    output = _run(*fedcg, "infer", tmp_path / "image.png", "--model", tmp_path / "models", "--json").stdout
    assert data_of(output)["results"][0]["class"] == best.label
    with serving(tmp_path / "models", command=fedcg) as server:
        answer = server.ask("/predict", content, PNG).document["results"][0]
        assert (answer["class"], answer["probability"]) == (best.label, pytest.approx(best.probability, abs=1e-5))
    images = tmp_path / "images" / best.label
    images.mkdir(parents=True)
    for number in range(4):
        (images / f"{number}.png").write_bytes(content)
    tried = _run(*fedcg, "model", "optimise", tmp_path / "models", "--images", images.parent, "--json").stdout
    assert [one["name"] for one in data_of(tried)["variants"] if one["latency_ms"]] == ["fp32", "fp16", "int8"]


@dataclass(frozen=True)
class Box:
    """A fresh environment with the `infer` extra, outside the checkout."""

    python: Path
    home: Path

    def run(self, *command: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        return _run(*command, cwd=self.home, code=code)

    def fedcg(self, *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.run(self.python.parent / "fedcg", *arguments, code=code)


def _installed(home: Path, extra: str) -> Box:
    source = home / "source"
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(REPOSITORY / name, source)
    subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True, timeout=120)
    made = Box(home / "venv" / "bin" / "python", home)
    made.run(made.python, *INSTALL, "-c", source / "constraints.txt", f"{source}[{extra}]")
    shutil.rmtree(source)  # from here on only what was installed
    return made


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    return _installed(tmp_path_factory.mktemp("box"), "infer")


@pytest.fixture(scope="module")
def model_root(box: Box) -> Path:
    install_model(box.home / "models")
    return box.home / "models"


def test_a_box_with_only_the_infer_extra_classifies_as_the_trained_model_does(box: Box, model_root: Path) -> None:
    images = write_images(box.home / "images")
    document = data_of(box.fedcg("infer", "--model", model_root, "--json", "--top", "3", box.home / "images").stdout)
    model = Model.load(model_root)
    rows = model.predict(load_all(images.files, model.manifest.input))
    here = dict(zip(map(str, images.files), rows, strict=True))
    assert len(document["results"]) == len(images.files)
    for result in document["results"]:
        told = {one["class"]: one["probability"] for one in result["top"]}
        assert [told[name] for name in CLASSES] == pytest.approx(here[result["file"]].tolist(), abs=1e-5)


def _lacks(box: Box, *names: str) -> None:
    for name in names:
        assert f"No module named '{name}'" in box.run(box.python, "-c", f"import {name}", code=1).stderr


def test_the_box_has_none_of_what_only_training_or_the_wire_need(box: Box) -> None:
    _lacks(box, "torch", "onnx", "safetensors", "sqlalchemy", "fastapi")


def test_a_signed_model_is_checked_there_and_refused_where_that_cannot_be_done(box: Box, tmp_path: Path) -> None:
    SigningKey.generate().save(tmp_path / "signing.key")
    manifest = install_model(tmp_path / "models", key=tmp_path / "signing.key") / "manifest.json"
    command = ("infer", "--model", tmp_path / "models", write_images(tmp_path / "images", 1).files[0])
    box.fedcg(*command)
    program = "import sys; sys.modules['cryptography'] = None; from fedcg.cli import main; main()"
    unable = box.run(box.python, "-c", program, *command, code=2)
    manifest.write_text(manifest.read_text().replace('"round": 1', '"round": 2'))
    for refused, told in ((unable, "pip install cryptography"), (box.fedcg(*command, code=2), "altered")):
        assert refused.stdout == ""
        assert told in refused.stderr
        assert "Traceback" not in refused.stderr


def test_the_help_shows_every_command_and_says_which_are_not_installed(box: Box) -> None:
    shown = box.fedcg("--help").stdout
    assert "infer" in shown
    lines = {line.split()[1]: line for line in shown.splitlines() if line.startswith("│ ") and len(line.split()) > 2}
    assert "not installed" not in lines["infer"] + lines["model"] + lines["export"]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("export", "--spec", "s", "--weights", "w", "--out", "o"), "not installed here"),
        (("infer", "serve", "--model", "models"), "pip install 'fedcg-edge[serve]'"),
        (  # over MQTT it needs no other extra
            ("infer", "serve-mqtt", "--model", "models", "--name", "line-1", "--ca", "ca.pem"),
            "TLS needs all of --ca, --cert and --key",
        ),
    ],
)
def test_a_command_that_can_not_run_there_says_why(
    box: Box, model_root: Path, command: tuple[str, ...], told: str
) -> None:
    refused = box.fedcg(*command, code=2)
    assert told in refused.stderr
    assert "Traceback" not in refused.stderr


def test_with_the_serve_extra_it_answers_over_http_without_torch_installed(tmp_path: Path, model_root: Path) -> None:
    serving_box = _installed(tmp_path, "infer,serve")
    [file, *_] = write_images(tmp_path / "images").files
    wanted = data_of(serving_box.fedcg("infer", "--model", model_root, "--json", file).stdout)["results"][0]
    with serving(model_root, command=(str(serving_box.python.parent / "fedcg"),)) as server:
        answer = server.ask("/predict", file.read_bytes(), {"Content-Type": "image/jpeg"})
        code, _ = server.stop()
    assert answer.document["results"] == [{**wanted, "file": "image"}]
    assert code == 0
    _lacks(serving_box, "torch", "onnx")
