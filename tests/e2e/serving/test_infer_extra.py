"""A box that only predicts: the `infer` extra alone, in a fresh environment, classifies an image; with `serve` also over HTTP."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from export.model.runtime import Model, load_image
from fedcg.wire.messages.envelopes import SigningKey
from tests.support.commands import data_of
from tests.support.learning.export_models import CLASSES, install_model, write_images
from tests.support.serving import serving

pytestmark = (
    pytest.mark.slow
)  # installs packages; what it imports is held by the quick tests of export.cli.infer_commands
REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGES = ("fedcg", "edge_client", "coordinator", "export", "devices", "audit", "experiments")
FILES = ("pyproject.toml", "README.md", "LICENSE", "constraints.txt")


@dataclass(frozen=True)
class Box:
    """A fresh environment with the `infer` extra, outside the checkout."""

    python: Path
    home: Path

    def run(self, *command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            [str(one) for one in command],
            cwd=self.home,
            env=clean,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def fedcg(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(self.python.parent / "fedcg", *arguments, check=check)


def _installed(home: Path, extra: str) -> Box:
    source = home / "source"
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        if (REPOSITORY / name).is_file():
            shutil.copy(REPOSITORY / name, source)
    subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True, timeout=120)
    made = Box(home / "venv" / "bin" / "python", home)
    pinned = ("-c", source / "constraints.txt") if (source / "constraints.txt").is_file() else ()
    quietly = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    made.run(made.python, *quietly, *pinned, f"{source}[{extra}]")
    shutil.rmtree(source)  # from here on only what was installed
    return made


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    return _installed(tmp_path_factory.mktemp("box"), "infer")


@pytest.fixture(scope="module")
def model_root(box: Box) -> Path:
    install_model(box.home / "models")
    return box.home / "models"


def test_a_box_with_only_the_infer_extra_classifies_images_as_the_trained_model_does(
    box: Box, model_root: Path
) -> None:
    images = write_images(box.home / "images")
    document = data_of(box.fedcg("infer", "--model", model_root, "--json", "--top", "3", box.home / "images").stdout)
    model = Model.load(model_root)
    rows = model.predict([load_image(file, model.manifest.image) for file in images.files])
    here = dict(zip(map(str, images.files), rows, strict=True))
    assert len(document["results"]) == len(images.files)
    for result in document["results"]:
        told = {one["class"]: one["probability"] for one in result["top"]}
        assert [told[name] for name in CLASSES] == pytest.approx(here[result["file"]].tolist(), abs=1e-5)


@pytest.mark.parametrize("name", ["torch", "onnx", "safetensors", "sqlalchemy", "fastapi"])
def test_the_box_has_none_of_what_only_training_or_the_wire_need(box: Box, name: str) -> None:
    done = box.run(box.python, "-c", f"import {name}", check=False)
    assert done.returncode == 1
    assert f"No module named '{name}'" in done.stderr


def test_a_signed_model_is_checked_there(box: Box, tmp_path: Path) -> None:
    SigningKey.generate().save(tmp_path / "signing.key")
    manifest = install_model(tmp_path / "models", key=tmp_path / "signing.key") / "manifest.json"
    command = ("infer", "--model", tmp_path / "models", write_images(tmp_path / "images", 1).files[0])
    assert box.fedcg(*command).returncode == 0
    assert "0001" in box.fedcg("model", "verify", tmp_path / "models").stdout
    manifest.write_text(manifest.read_text().replace('"round": 1', '"round": 2'))
    altered = box.fedcg(*command, check=False)
    assert (altered.returncode, altered.stdout, "altered" in altered.stderr) == (2, "", True)


def test_the_help_shows_every_command_and_says_which_are_not_installed(box: Box) -> None:
    shown = box.fedcg("--help").stdout
    assert "infer" in shown
    lines = {line.split()[1]: line for line in shown.splitlines() if line.startswith("│ ") and len(line.split()) > 2}
    assert "not installed" not in lines["infer"] + lines["model"] + lines["export"]
    for words, told in (
        (("export", "--spec", "s", "--weights", "w", "--out", "o"), "not installed here"),
        (("infer", "serve", "--model", "m"), "pip install 'fedcg-edge[serve]'"),
        (("infer", "serve-mqtt", "--model", "m", "--name", "line-1", "--ca", "c"), "TLS needs all of --ca, --cert"),
    ):
        done = box.fedcg(*words, check=False)
        assert (done.returncode, told in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


@pytest.mark.slow
def test_with_the_serve_extra_it_answers_over_http_without_torch_installed(tmp_path: Path, model_root: Path) -> None:
    serving_box = _installed(tmp_path, "infer,serve")
    [file, *_] = write_images(tmp_path / "images").files
    wanted = data_of(serving_box.fedcg("infer", "--model", model_root, "--json", file).stdout)["results"][0]
    with serving(model_root, command=(str(serving_box.python.parent / "fedcg"),)) as server:
        answer = server.ask("/predict", file.read_bytes(), {"Content-Type": "image/jpeg"})
        code, _ = server.stop()
    assert answer.document["results"] == [{**wanted, "file": "image"}]
    assert code == 0
    for name in ("torch", "onnx"):
        assert serving_box.run(serving_box.python, "-c", f"import {name}", check=False).returncode == 1
