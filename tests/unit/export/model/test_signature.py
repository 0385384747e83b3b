"""A manifest's signature: which box made a model, that nothing was altered since, and what a server does not serve."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from export import load
from export.errors import ExportError, InputError, ManifestError, TamperedError
from export.model.manifest import note_signer, read_manifest, required, sign_manifest, signer_of, write_manifest
from export.model.runtime import Model
from export.model.versions import ModelVersions
from export.serving.judge import VersionFault
from export.serving.live_model import ServedModel
from fedcg.errors import NOT_FOUND
from fedcg.wire.messages.envelopes import SigningKey
from tests.support.commands import data_of, fails, run_fedcg
from tests.support.learning.export_models import encoded, flip_bit, install_model, picture, write_images
from tests.support.serving import PNG, serving


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    made = SigningKey.generate()
    made.save(tmp_path / "signing.key")
    return made


@pytest.fixture
def directory(tmp_path: Path, key: SigningKey) -> Path:
    return install_model(tmp_path / "models", key=tmp_path / "signing.key")


def test_the_list_says_which_signature_was_checked_with_which_key_and_what_is_refused(
    directory: Path, key: SigningKey, tmp_path: Path
) -> None:
    root, fingerprint = directory.parent, key.public.hex[:16]
    words = ("--signed-by", key.public.hex)
    by_whom = f"signature checked with its own key, signer not verified (fingerprint {fingerprint})"
    assert by_whom in run_fedcg("model", "list", root).stdout
    by_key = f"signature checked with {key.public.hex} (fingerprint {fingerprint})"
    assert by_key in run_fedcg("model", "list", root, *words).stdout
    note_signer(tmp_path, key.public.hex)
    named = f"signature checked with {tmp_path / 'signing.pub'} (fingerprint {fingerprint})"
    [listed] = data_of(run_fedcg("model", "list", root, "--json").stdout)
    assert (listed["state"], listed["signed_by"], listed["signature"]) == ("sound", key.public.hex, named)
    flip_bit(directory / "model.onnx", 1000)
    damaged = run_fedcg("model", "list", root)
    assert (damaged.exit_code, "the file does not match" in damaged.stderr) == (2, True)
    assert "refused: " in damaged.stdout
    (directory / "manifest.sig").unlink()
    assert "the model is not signed" in run_fedcg("model", "list", root).stdout
    assert "the model is not signed" in run_fedcg("model", "use", root, "0001", *words).stderr
    assert run_fedcg("model", "rollback", root, *words).exit_code == NOT_FOUND


def _alter_manifest(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"round": 1', '"round": 2'))


def _alter_signature(directory: Path) -> None:
    path = directory / "manifest.sig"
    told = json.loads(path.read_text())
    told["signature"] = ("0" if told["signature"][0] != "0" else "1") + told["signature"][1:]
    path.write_text(json.dumps(told))


def _sign_by_another(directory: Path) -> None:
    SigningKey.generate().save(directory.parent / "other.key")
    sign_manifest(directory, directory.parent / "other.key")


@pytest.mark.parametrize(
    ("alter", "told", "is_intact"),
    [
        (_alter_manifest, "does not match this manifest", False),
        (_alter_signature, "does not match this manifest", False),
        (_sign_by_another, "another device's model", True),
        (lambda directory: (directory / "manifest.sig").unlink(), "not signed", True),
    ],
)
def test_what_the_box_did_not_sign_is_refused_by_the_command(
    directory: Path, key: SigningKey, alter: Callable[[Path], None], told: str, is_intact: bool
) -> None:
    command = ["list", str(directory.parent), "--signed-by", key.public.hex]
    assert run_fedcg("model", *command).exit_code == 0
    alter(directory)
    with pytest.raises(TamperedError, match=told):
        read_manifest(directory, required(key.public.hex))
    assert told in fails(2, "model", *command)
    if is_intact:  # running asks for no signature
        assert Model.load(directory, threads=1).manifest.federation == "garden"
    else:  # but what is there must be right
        with pytest.raises(TamperedError, match=told):
            Model.load(directory, threads=1)


def _remove_signature(directory: Path) -> None:
    (directory / "manifest.sig").unlink()


@pytest.mark.parametrize("alter", [_alter_manifest, _sign_by_another, _remove_signature])
@pytest.mark.parametrize("place", ["store", "models"])
def test_beside_the_boxs_own_key_only_its_models_are_used_without_an_option(
    directory: Path, key: SigningKey, alter: Callable[[Path], None], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = directory.parent
    note_signer(root.parent if place == "store" else root, key.public.hex)
    write_images(root.parent / "images", 1)
    classify = ["infer", "--model", "models", "images"]
    monkeypatch.chdir(root.parent)
    assert run_fedcg(*classify).exit_code == 0
    assert run_fedcg("model", "use", "models", "0001").exit_code == 0
    assert load("models").manifest.round == 1
    alter(directory)
    for command in (classify, ["model", "use", "models", "0001"]):
        refused = run_fedcg(*command)
        assert (refused.exit_code, refused.stdout) == (2, "")
    assert run_fedcg("model", "list", "models").exit_code == 2
    with pytest.raises(TamperedError):
        load("models")


def test_a_box_that_was_enrolled_anew_uses_the_models_that_it_signed_before(directory: Path, key: SigningKey) -> None:
    store = directory.parent.parent
    for one in (key, SigningKey.generate(), key):
        note_signer(store, one.public.hex)
    assert load(directory).manifest.round == 1
    (store / "signing.pub").write_text("no key")
    with pytest.raises(ExportError, match=r"signing\.pub: .*64 hex digits"):
        load(directory)


def test_where_the_folder_of_versions_may_be_written_the_key_above_it_decides(directory: Path, key: SigningKey) -> None:
    note_signer(directory.parent.parent, key.public.hex)
    _sign_by_another(directory)
    note_signer(directory.parent, signer_of(directory) or "")
    with pytest.raises(TamperedError, match="another device's model"):
        load(directory)


def test_a_file_that_is_no_signature_is_named(directory: Path, key: SigningKey) -> None:
    (directory / "manifest.sig").write_text("{}")
    with pytest.raises(ManifestError, match=r"manifest\.sig: not a manifest signature"):
        read_manifest(directory, required(key.public.hex))


def test_a_key_is_given_as_digits_or_as_a_file_of_either_half(directory: Path, key: SigningKey, tmp_path: Path) -> None:
    public = tmp_path / "box.pub"
    public.write_text(key.public.hex + "\n")
    for told in (key.public.hex, str(public), str(tmp_path / "signing.key")):
        assert read_manifest(directory, required(told)).federation == "garden"


@pytest.mark.parametrize("content", [None, b"-----BEGIN RUBBISH", b"\xff\x00", b"abc"])
def test_what_is_no_key_is_named_with_where_to_find_one(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "odd.key").write_bytes(content)
    with pytest.raises(ExportError, match=r"odd\.key: .*64 hex digits.*fedcg device show"):
        required(str(tmp_path / "odd.key"))


@pytest.mark.parametrize("content", [None, b"no key"])
def test_a_key_file_that_cannot_sign_is_named_and_nothing_is_installed(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.key"):
        install_model(tmp_path / "models", key=path)
    assert list((tmp_path / "models").glob("0*")) == []


Alter = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def home(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions under `models`, both signed by `own.key`."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("own.key", "other.key"):
        SigningKey.generate().save(folder / name)
    shutil.copytree(installed, folder / "models")
    for version in ModelVersions(folder / "models").versions():
        sign_manifest(version.directory, folder / "own.key")
    ModelVersions(folder / "models").use("0001")
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
    (lambda directory, _: flip_bit(directory / "model.onnx", 1000), "the file does not match"),
    (lambda directory, _: flip_bit(directory / "manifest.json", -8), "one of them was altered"),
    (lambda directory, _: (directory / "manifest.sig").unlink(), "the model is not signed"),
    (_of_another_box, "another device's model"),
    (_of_another_federation, "a model of federation meadow, but this server serves garden"),
)


@pytest.mark.parametrize(("alter", "told"), ALTERED)
def test_a_version_that_the_box_did_not_sign_as_it_is_never_comes_into_service(
    home: Path, root: Path, alter: Alter, told: str
) -> None:
    models = ServedModel(root, threads=1, warm_up=(1,), accept=required(str(home / "own.key")))
    if alter is not _of_another_federation:  # which is known from the first model on
        alter(root / "0001", home)
        models.refresh()
        assert models.current is None
        shutil.rmtree(root / "0001")
        shutil.copytree(home / "models" / "0001", root / "0001")
    models.refresh()
    alter(root / "0002", home)
    ModelVersions(root)._point_to("0002")  # `use` would refuse some of them
    models.refresh()
    assert told in models.refused
    assert models.current is not None
    assert models.current.version == "0001"


@pytest.mark.parametrize("is_named", [True, False], ids=["by a named key", "by the box's own key"])
def test_a_server_says_which_key_it_checks_with_and_refuses_what_another_box_signed(
    home: Path, root: Path, tmp_path: Path, is_named: bool
) -> None:
    note_signer(tmp_path, SigningKey.load(home / ("other.key" if is_named else "own.key")).public.hex)
    options = ("--signed-by", str(home / "own.key")) if is_named else ()
    _of_another_box(root / "0002", home)
    with serving(root, *options, "--shadow", 0) as server:
        ModelVersions(root)._point_to("0002")
        server.wait_for_metric('fedcg_serve_model_loads_total{outcome="refused"}', 1)
        assert "another device's model" in server.ask("/model").document["refused"]
        assert server.ask("/predict", encoded(picture(1), "PNG"), PNG).document["version"] == "0001"
        first = server.stop()[1].splitlines()[0]
    fingerprint = SigningKey.load(home / "own.key").public.hex[:16]
    named = home / "own.key" if is_named else tmp_path / "signing.pub"
    assert f"; signature checked with {named} (fingerprint {fingerprint})" in first


def test_a_version_is_not_taken_back_to_one_that_the_box_did_not_sign(home: Path, root: Path) -> None:
    (root / "0001" / "manifest.sig").unlink()
    ModelVersions(root).use("0002")
    models = ServedModel(root, threads=1, warm_up=(1,), accept=required(str(home / "own.key")))
    models.refresh()
    assert not models.take_back(VersionFault("0002", "drift", "told so"))
    assert ModelVersions(root).current().name == "0002"


def test_the_command_classifies_with_a_signed_model_only(home: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(encoded(picture(1), "PNG"))
    command = [str(tmp_path / "image.png"), "--model", str(root), "--signed-by"]
    assert run_fedcg("infer", *command, str(home / "own.key")).exit_code == 0
    refused = run_fedcg("infer", *command, str(home / "other.key"))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "another device's model" in refused.stderr
