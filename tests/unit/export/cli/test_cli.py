"""`fedcg infer`, `fedcg model` and `fedcg export`, as a person and a script see them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from export.model.image_files import expand
from export.model.runtime import Model, load_all
from export.model.versions import ModelVersions
from fedcg.errors import NOT_FOUND
from fedcg.wire.parts import Part
from tests.support.commands import data_of, fails, run_fedcg, succeeds
from tests.support.learning.export_models import LOADED_PROBE, TestImages, install_model, make_parts, make_spec


@pytest.fixture
def slots_root(tmp_path: Path, images: TestImages) -> Path:
    for number in (1, 2):
        install_model(tmp_path / "models", seed=number, images=images)
    return tmp_path / "models"


def test_infer_prints_every_image_with_its_likeliest_classes(slots_root: Path, images: TestImages) -> None:
    done = succeeds("infer", "--model", slots_root, *images.files[:3])
    model = Model.load(slots_root)
    rows = model.predict(load_all(images.files[:3], model.manifest.input))
    lines = done.splitlines()
    assert len(lines) == 3
    for file, row, line in zip(images.files, rows, lines, strict=False):
        guesses = [f"{guess.label} {guess.probability:.3f}" for guess in model.top(row, 3)]
        assert line.split() == [str(file), *" ".join(guesses).split()]


def test_bad_files_are_named_on_stderr_and_others_done(slots_root: Path, images: TestImages, tmp_path: Path) -> None:
    text = tmp_path / "notes.png"
    text.write_text("not an image at all")
    done = run_fedcg(
        "infer", "--model", slots_root, "--json", images.files[0], tmp_path / "gone.png", text, images.files[1]
    )
    envelope = json.loads(done.stdout)
    assert (done.exit_code, envelope["ok"]) == (2, False)
    assert envelope["error"]["message"].startswith("2 of 4 inputs were not classified")
    document = envelope["data"]
    assert [one["file"] for one in document["results"]] == [str(images.files[0]), str(images.files[1])]
    assert [one["file"] for one in document["errors"]] == [str(tmp_path / "gone.png"), str(text)]
    assert f"{tmp_path / 'gone.png'}: no such file" in done.stderr
    assert f"{text}: not an image" in done.stderr


def test_what_is_no_regular_file_in_a_folder_is_named_the_others_are_classified_and_hidden_files_are_none(
    slots_root: Path, images: TestImages, tmp_path: Path
) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "1.png").write_bytes(images.files[1].read_bytes())
    (folder / "gone.png").symlink_to("no-such-file")
    (folder / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(folder / "fifo.png")
    (folder / "._1.png").write_bytes(b"of macOS")
    done = run_fedcg("infer", "--model", slots_root, "--json", folder)
    document = json.loads(done.stdout)["data"]
    assert done.exit_code == 2
    assert [one["file"] for one in document["results"]] == [str(folder / "1.png")]
    assert {Path(one["file"]).name: one["error"] for one in document["errors"]} == {
        "gone.png": "a link to a file that does not exist",
        "zero.png": "not a regular file",
        "fifo.png": "not a regular file",
    }


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("model", "use", "ROOT", "0009"), "no version '0009'"),
        (("model", "list", "EMPTY"), "no model is installed"),
        (("infer", "--model", "ROOT", "nix.png"), "nix.png: no such file"),
        (("export", "--spec", "nix.json", "--weights", "nix", "--out", "out"), "nix.json: no such file"),
        (("export", "--spec", "SPEC", "--weights", "nix.safetensors", "--out", "out"), "nix.safetensors"),
        (("export", "--spec", "SPEC", "--weights", "nix", "--out", "out", "--images", "nix"), "nix: no such folder"),
        (("model", "optimise", "ROOT", "--images", "nix"), "nix: no such folder"),
    ],
)
def test_what_was_named_and_is_not_there_ends_a_command_with_code_7(
    slots_root: Path, tmp_path: Path, words: tuple[str, ...], missing: str
) -> None:
    (tmp_path / "spec.json").write_bytes(make_spec().canonical())
    (tmp_path / "empty").mkdir()
    places = {"ROOT": str(slots_root), "SPEC": str(tmp_path / "spec.json"), "EMPTY": str(tmp_path / "empty")}
    assert missing in fails(NOT_FOUND, *(places.get(word, word) for word in words))


def test_a_name_that_would_steer_the_terminal_is_escaped(slots_root: Path, images: TestImages, tmp_path: Path) -> None:
    for name, content in (("a", images.files[1].read_bytes()), ("b", b"no image")):
        (tmp_path / f"{name}\x1b[31m\n\u202e.png").write_bytes(content)
    done = run_fedcg("infer", "--model", slots_root, tmp_path)
    assert r"a\x1b[31m\n\u202e.png" in done.stdout
    assert r"b\x1b[31m\n\u202e.png: not an image" in done.stderr
    assert all(line.isprintable() for line in done.output.split("\n"))
    done = run_fedcg("infer", "--model", slots_root, tmp_path, "--json")
    assert done.stdout.rstrip("\n").isprintable()
    assert r"\u001b[31m\n\u202e.png" in done.stdout


def test_an_image_over_the_pixel_limit_is_refused_without_an_empty_table(slots_root: Path, images: TestImages) -> None:
    done = run_fedcg("infer", "--model", slots_root, "--max-pixels", "10", images.files[0])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "over the limit of 10" in done.stderr


def test_a_folder_and_a_pattern_mean_the_images_in_them(folder: Path, images: TestImages, tmp_path: Path) -> None:
    (folder / "ant" / "notes.txt").write_text("no image")
    assert sorted(expand([str(folder)])) == sorted(images.files)
    assert expand([f"{folder}/bee/*.png"]) == sorted((folder / "bee").glob("*.png"))
    assert len(expand([f"{folder}/**/*.jpg"])) == 12
    odd = tmp_path / "a[1].png"
    odd.write_bytes(images.files[1].read_bytes())
    assert expand([str(odd), str(tmp_path / "*.tif")]) == [odd, tmp_path / "*.tif"]


def test_versions_are_listed_chosen_and_rolled_back(slots_root: Path) -> None:
    listed = succeeds("model", "list", slots_root)
    head, first, second = (line.split() for line in listed.splitlines()[:3])
    assert head == ["VERSION", "IN", "USE", "FEDERATION", "ROUND", "ACCURACY", "CREATED", "REMARKS"]
    assert first[:4] == ["0001", "-", "garden", "1"]
    assert second[:4] == ["0002", "yes", "garden", "2"]
    assert run_fedcg("model", "use", slots_root, "0001").exit_code == 0
    rows = data_of(run_fedcg("model", "list", slots_root, "--json").stdout)
    assert [(row["version"], row["current"], row["round"]) for row in rows] == [("0001", True, 1), ("0002", False, 2)]
    assert "0002" in run_fedcg("model", "rollback", slots_root).stdout
    ModelVersions(slots_root).note_answering("0001")
    text = succeeds("model", "list", slots_root)
    assert "\n0001 was rolled back: operator\n0001 answers until the comparison ends\nNext:" in text
    assert "no earlier version" in fails(NOT_FOUND, "model", "rollback", slots_root)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Path]:
    spec = make_spec()
    (tmp_path / "spec.json").write_bytes(spec.canonical())
    tensors = {
        f"{slot}/{part.value}/{name}": tensor
        for slot, parts in {"best": make_parts(spec, seed=1), "personal": make_parts(spec, seed=2)}.items()
        for part, weights in parts.items()
        for name, tensor in weights.items()
    }
    save_file(tensors, tmp_path / "state.safetensors")
    return tmp_path / "spec.json", tmp_path / "state.safetensors"


def test_export_makes_a_verified_model_of_a_slot(checkpoint: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    spec, weights = checkpoint
    out = tmp_path / "out"
    common = ("--spec", spec, "--weights", weights, "--out", out)
    done = succeeds("export", *common, "--slot", "best", "--images", folder, "--round", "3", "--json")
    assert data_of(done)["verification"]["source"] == "files"
    manifest = Model.load(out).manifest
    assert (manifest.round, manifest.verification.images) == (3, 24)
    assert "0002: verified on 64 inputs (noise)" in succeeds("export", *common, "--slot", "personal")
    assert len(data_of(succeeds("model", "list", out, "--json"))) == 2
    assert len(data_of(succeeds("infer", "--model", out, "--json", folder))["results"]) == 24


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("spec", "spec.json"),
        ("weights", "state.safetensors"),
        ("unfitting weights", "do not fit"),
        ("slot", "--slot: best, personal"),
    ],
)
def test_export_names_the_bad_input(checkpoint: tuple[Path, Path], tmp_path: Path, broken: str, named: str) -> None:
    spec, weights = checkpoint
    if broken == "unfitting weights":
        save_file({f"best/{part.value}/x": torch.zeros(1) for part in Part}, weights)
    elif broken != "slot":
        (spec if broken == "spec" else weights).write_text('{"format": 1}')
    slot = () if broken == "slot" else ("--slot", "best")
    assert named in fails(2, "export", "--spec", spec, "--weights", weights, *slot, "--out", tmp_path / "out")
    assert broken != "slot" or not (tmp_path / "out").exists()


def _loaded(*arguments: str | Path) -> str:
    """What of the learning core and the wire `fedcg` with these arguments loads."""
    command = [sys.executable, "-c", LOADED_PROBE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["infer", "model list", "model use", "model rollback"])
def test_inference_and_versions_load_neither_torch_nor_paho_nor_the_wire(
    slots_root: Path, images: TestImages, command: str
) -> None:
    arguments: list[str | Path] = [*command.split(), slots_root]
    if command == "infer":
        arguments = ["infer", "--model", slots_root, images.files[0], "--json"]
    elif command == "model use":
        arguments.append("0001")
    assert _loaded(*arguments) == "LOADED []"


def test_variants_need_onnx_and_nothing_that_trains(slots_root: Path, folder: Path) -> None:
    assert _loaded("model", "optimise", slots_root, "--images", folder, "--threads", "1") == "LOADED ['onnx']"


def test_the_probe_sees_what_an_export_loads(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    spec, weights = checkpoint
    assert "'torch'" in _loaded(
        "export", "--spec", spec, "--weights", weights, "--slot", "best", "--out", tmp_path / "o"
    )
