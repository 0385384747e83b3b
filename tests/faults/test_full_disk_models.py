"""A disk that is full at any write of a new version: the one in use stays, nothing half-written stays, the next try works.

The disk is the system's own refusal: a file that may not grow (RLIMIT_FSIZE) from the moment on at which one certain file is
opened.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from export.model.versions import POINTER_NAME
from fedcg.wire.messages.envelopes import SigningKey
from tests.support.learning.export_models import encoded, make_parts, make_spec, picture, write_images
from tests.support.serving import PNG, install_versions, serving

FULL_AT = """
import re, resource, sys
written = re.compile("[.](staging-|CURRENT[.])[^/]*" + sys.argv.pop(1) + "$")
def full(event, arguments):
    if event == "open" and written.search(str(arguments[0])) and arguments[2] & 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
sys.addaudithook(full)
"""
"""From the moment on at which this file of a version is opened for writing (none named: the pointer), no file can grow."""

COMMAND = f"""{FULL_AT}
from export.build import variants
variants._objection = lambda *_: ""  # every variant is kept
variants._latencies = lambda predictors, _: [1.0 / (1 + number) for number in range(len(predictors))]  # and the last is best
from fedcg.cli import main
main()
"""


def _python(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def _left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def _advises(message: str, root: Path) -> None:
    assert f"Free space on, or repair, {root}, then try again" in message, message
    assert "the version in use stays" in message


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `fedcg export` and `fedcg model optimise` are given."""
    folder, spec = tmp_path_factory.mktemp("checkpoint"), make_spec()
    (folder / "spec.json").write_bytes(spec.canonical())
    tensors = {
        f"{part.value}/{name}": tensor for part, found in make_parts(spec).items() for name, tensor in found.items()
    }
    save_file(tensors, folder / "weights.safetensors")
    SigningKey.generate().save(folder / "signing.key")
    write_images(folder / "images")
    return folder


def _export(folder: Path, root: Path) -> list[str]:
    given = ["--spec", folder / "spec.json", "--weights", folder / "weights.safetensors", "--out", root]
    return ["export", *map(str, given), "--sign", str(folder / "signing.key")]


def _optimise(folder: Path, root: Path) -> list[str]:
    given = [str(root), "--images", str(folder / "images"), "--budget", "100", "--sign", str(folder / "signing.key")]
    return ["model", "optimise", *given]


WRITES = [(_export, part) for part in ("/model.onnx", "")] + [
    (_optimise, part) for part in ("/model.onnx", "/model-.*[.]onnx", "/manifest.json", "/manifest.sig", "")
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "part"), WRITES)
def test_each_write_of_a_command_that_finds_no_room_is_reported_and_the_server_goes_on(
    tmp_path: Path, checkpoint: Path, command: Callable[[Path, Path], list[str]], part: str
) -> None:
    root = tmp_path / "models"
    install_versions(root, 1)
    served = encoded(picture(1), "PNG")
    with serving(root, "--shadow", 0) as server:
        done = _python(COMMAND, part, *command(checkpoint, root))
        assert done.returncode == 2, done.stdout + done.stderr
        _advises(done.stderr, root)
        assert "Traceback" not in done.stderr
        assert _left(root) == [".lock", "0001", POINTER_NAME]
        answer = server.ask("/predict", served, PNG)
        assert (answer.status, answer.document["version"]) == (200, "0001")
        done = _python(COMMAND, "/nowhere", *command(checkpoint, root))
        assert done.returncode == 0, done.stderr
        server.wait_for_version("0002")
