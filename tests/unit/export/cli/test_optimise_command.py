"""`fedcg model optimise`: what it puts in use, and what it leaves alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from export.errors import SlotError
from export.model.manifest import read_manifest, required, signer_of
from export.model.versions import Slots
from fedcg.wire.messages.envelopes import SigningKey
from tests.support.commands import data_of, run_fedcg
from tests.support.learning.export_models import install_model

Clock = Callable[..., None]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    SigningKey.generate().save(tmp_path / "signing.key")
    return tmp_path / "signing.key"


def _optimise(root: Path, folder: Path, *more: str) -> Result:
    return run_fedcg("model", "optimise", root, "--images", folder, "--threads", "1", "--budget", "100", *more)


def test_nothing_is_installed_or_pruned_when_no_form_is_faster(tmp_path: Path, folder: Path, clock: Clock) -> None:
    for _ in range(3):
        root = install_model(tmp_path).parent
    before = Slots(root).versions()
    clock()
    told = _optimise(root, folder)
    assert told.exit_code == 0, told.output
    assert Slots(root).versions() == before
    assert f"nothing is faster here: {root / '0003'} stays in use" in told.stdout
    assert "at least 1.05 is asked for" in told.stdout


def test_the_form_in_use_is_not_installed_a_second_time(tmp_path: Path, folder: Path, clock: Clock) -> None:
    root = install_model(tmp_path).parent
    clock(fp16=10.0)
    first = data_of(_optimise(root, folder, "--json").stdout)
    assert (first["model"], first["installed"], first["serves"]) == (str(root / "0002"), True, "fp16")
    again = data_of(_optimise(root, folder, "--json").stdout)
    assert (again["model"], again["installed"], again["serves"]) == (str(root / "0002"), False, "fp16")
    clock()  # on another machine it does not pay any more
    slower = data_of(_optimise(root, folder, "--json").stdout)
    assert (slower["model"], slower["installed"], slower["serves"]) == (str(root / "0003"), True, "fp32")


def test_an_unsigned_version_is_never_put_in_use_over_a_signed_one(
    tmp_path: Path, folder: Path, key: Path, clock: Clock
) -> None:
    root = install_model(tmp_path, key=key).parent
    clock(fp16=10.0)
    told = _optimise(root, folder)
    assert told.exit_code == 2
    assert "--sign" in told.stderr
    assert "signing.key" in told.stderr
    assert [one.name for one in Slots(root).versions()] == ["0001"]
    done = _optimise(root, folder, "--sign", str(key))
    assert done.exit_code == 0, done.output
    assert read_manifest(root / "0002", required(str(key))).serves == "fp16"


def test_no_other_writer_puts_an_unsigned_version_over_a_signed_one(tmp_path: Path, key: Path) -> None:
    root = install_model(tmp_path, key=key).parent
    with pytest.raises(SlotError, match="--sign"):
        install_model(root)
    assert [one.name for one in Slots(root).versions()] == ["0001"]
    assert signer_of(Slots(root).current()) is not None
