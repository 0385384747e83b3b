"""A server that is told whose models to serve: what that device did not sign, as it signed it, never comes into service."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from export.model.manifest import note_signer, read_manifest, required, sign_manifest, write_manifest
from export.model.versions import Slots
from export.serving.judge import Verdict
from export.serving.live_model import ServedModel
from fedcg.wire.messages.envelopes import SigningKey
from tests.support.commands import run_fedcg
from tests.support.learning.export_models import encoded, flip_bit, picture
from tests.support.serving import PNG, serving
from tests.support.stack import wait_for

Alter = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def home(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions under `models`, both signed by `own.key`."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("own.key", "other.key"):
        SigningKey.generate().save(folder / name)
    shutil.copytree(installed, folder / "models")
    for version in Slots(folder / "models").versions():
        sign_manifest(version.directory, folder / "own.key")
    Slots(folder / "models").use("0001")
    return folder


@pytest.fixture
def root(home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(home / "models", tmp_path / "models"))


def _of_another_federation(directory: Path, home: Path) -> None:
    write_manifest(directory, read_manifest(directory).model_copy(update={"federation": "meadow"}))
    sign_manifest(directory, home / "own.key")


def _of_another_box(directory: Path, home: Path) -> None:
    sign_manifest(directory, home / "other.key")


ALTERED: tuple[tuple[Alter, str], ...] = (
    (lambda directory, _: flip_bit(directory / "model.onnx", 1000), "the bytes are not the ones"),
    (lambda directory, _: flip_bit(directory / "manifest.json", -8), "one of them was altered"),
    (lambda directory, _: (directory / "manifest.sig").unlink(), "the model is not signed"),
    (_of_another_box, "the model of another box"),
    (_of_another_federation, "a model of federation meadow, and this server serves garden"),
)


@pytest.mark.parametrize(
    ("altered", "is_named"),
    [(ALTERED[1:3], False), pytest.param(ALTERED, True, marks=pytest.mark.slow)],
    ids=["some, by the box's own key", "all, by a named key"],
)
def test_over_http_each_refused_version_is_told_and_the_last_good_one_goes_on_answering(
    home: Path, root: Path, tmp_path: Path, altered: Sequence[tuple[Alter, str]], is_named: bool
) -> None:
    sound = Path(shutil.copytree(root / "0002", tmp_path / "sound"))
    note_signer(tmp_path, SigningKey.load(home / ("other.key" if is_named else "own.key")).public.hex)
    options = ("--signed-by", str(home / "own.key")) if is_named else ()
    with serving(root, *options, "--shadow", 0) as server:
        for number, (alter, told) in enumerate(altered, 1):
            shutil.rmtree(root / "0002")
            alter(Path(shutil.copytree(sound, root / "0002")), home)
            Slots(root)._point_to("0002")  # `use` would refuse some of them
            server.wait_for_metric('fedcg_serve_model_loads_total{outcome="refused"}', number)
            assert told in server.ask("/model").document["refused"]
            answer = server.ask("/predict", encoded(picture(1), "PNG"), PNG)
            assert (answer.status, answer.document["version"]) == (200, "0001")
            Slots(root)._point_to("0001")
            wait_for(lambda: server.ask("/model").document["refused"] is None, "0001 is chosen again")
        shutil.rmtree(root / "0002")
        shutil.copytree(sound, root / "0002")
        Slots(root).use("0002")
        server.wait_for_version("0002")
        first = server.stop()[1].splitlines()[0]
        fingerprint = SigningKey.load(home / "own.key").public.hex[:16]
        named = home / "own.key" if is_named else tmp_path / "signing.pub"
        assert f"; signature checked with {named} (fingerprint {fingerprint})" in first


def test_a_server_begins_without_a_model_rather_than_with_one_that_is_not_signed(home: Path, root: Path) -> None:
    flip_bit(root / "0001" / "manifest.json", -8)
    models = ServedModel(root, threads=1, warm_up=(1,), accept=required(str(home / "own.key")))
    models.refresh()
    assert models.current is None
    assert "altered" in models.refused


def test_a_version_is_not_taken_back_to_one_that_the_box_did_not_sign(home: Path, root: Path) -> None:
    (root / "0001" / "manifest.sig").unlink()
    Slots(root).use("0002")
    models = ServedModel(root, threads=1, warm_up=(1,), accept=required(str(home / "own.key")))
    models.refresh()
    assert not models.take_back(Verdict("0002", "drift", "told so"))
    assert Slots(root).current().name == "0002"


def test_the_command_classifies_with_a_signed_model_only(home: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(encoded(picture(1), "PNG"))
    command = [str(tmp_path / "image.png"), "--model", str(root), "--signed-by"]
    assert run_fedcg("infer", *command, str(home / "own.key")).exit_code == 0
    refused = run_fedcg("infer", *command, str(home / "other.key"))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "the model of another box" in refused.stderr
