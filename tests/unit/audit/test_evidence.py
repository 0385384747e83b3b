"""What an audit reads: only what really crossed, and only what fits the federation."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from audit.errors import CaptureError, DecodeError, TruthError
from audit.evidence.case import Case
from audit.evidence.device_data import read_truth
from audit.evidence.updates import read_updates
from fedcg.wire.artifacts.artifacts import artifact_id, pack, read_header
from fedcg.wire.parts import Part
from tests.support.audit import simulated_case, write_images, write_private, write_recording


def coded_case() -> Case:
    return simulated_case(codec="i8-delta", aggregate_codec="f16")


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    folder = tmp_path / "observer"
    return folder, write_recording(coded_case(), folder)


def respec(folder: Path, old: str = "", **changed: object) -> None:
    """Another federation's spec in the recording, in the place of the `old` one or beside it."""
    if old:
        (folder / "artifacts" / old).unlink()
    other = coded_case().view.spec.model_copy(update=changed)
    (folder / "artifacts" / other.digest).write_bytes(other.canonical())


def test_a_recording_gives_the_update_as_the_server_decodes_it(recorded: tuple[Path, dict[str, str]]) -> None:
    case = coded_case()
    view = read_updates(recorded[0]).view("client-1", 2)
    assert view.update.keys() == {Part.CLASSIFIER, Part.GENERATOR}
    assert sorted(view.others) == ["client-2", "client-3"]
    for name, tensor in view.update[Part.CLASSIFIER].items():
        change = (case.view.update[Part.CLASSIFIER][name] - case.view.before.parts[Part.CLASSIFIER][name]).abs().max()
        assert (tensor - case.view.update[Part.CLASSIFIER][name]).abs().max() <= 0.02 * change + 1e-3  # int8 and f16


@pytest.mark.parametrize(
    ("client", "number", "said"),
    [
        (None, None, "client-1, client-2, client-3: name one with --client"),
        ("client-9", None, "no update of client-9"),
        ("client-1", 7, "no update of client-1 in round 7; it has rounds 2"),
    ],
)
def test_what_is_not_there_is_named(
    recorded: tuple[Path, dict[str, str]], client: str | None, number: int | None, said: str
) -> None:
    with pytest.raises(CaptureError, match=said):
        read_updates(recorded[0]).view(client, number)


def test_a_missing_base_aggregate_is_named(recorded: tuple[Path, dict[str, str]]) -> None:
    folder, ids = recorded
    (folder / "artifacts" / ids["before"]).unlink()
    with pytest.raises(CaptureError, match=f"lacks aggregate {ids['before']}.*start recording before"):
        read_updates(folder).view("client-1")


def test_a_damaged_artifact_is_refused_by_its_name(recorded: tuple[Path, dict[str, str]]) -> None:
    folder, ids = recorded
    path = folder / "artifacts" / ids["client-2"]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DecodeError, match=f"{ids['client-2']} is damaged"):
        read_updates(folder)


def test_another_clients_update_that_can_not_be_read_stops_nobodys_audit(recorded: tuple[Path, dict[str, str]]) -> None:
    folder, ids = recorded
    path = folder / "artifacts" / ids["client-2"]
    other = pack(read_header(path.read_bytes()), {Part.CLASSIFIER: {"weight": np.ones((2, 2), np.float32)}})
    path.unlink()
    (folder / "artifacts" / artifact_id(other)).write_bytes(other)
    assert sorted(read_updates(folder).view("client-1").others) == ["client-3"]
    with pytest.raises(DecodeError, match="the update of client-2"):
        read_updates(folder).view("client-2")


def test_an_update_of_another_codec_is_refused(recorded: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, ids = recorded
    respec(folder, ids["spec"], codec="f32", with_base=())
    with pytest.raises(DecodeError, match=r"the update of client-1 in round 2.*not coded as they must be"):
        read_updates(folder).view("client-1")


def test_updates_of_another_federation_are_refused(recorded: tuple[Path, dict[str, str]]) -> None:
    folder, ids = recorded
    respec(folder, ids["spec"], federation="elsewhere")
    with pytest.raises(CaptureError, match="updates of demo, but the spec of elsewhere"):
        read_updates(folder)


def test_a_folder_without_a_spec_or_with_two_is_refused(recorded: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, _ = recorded
    respec(folder, federation="elsewhere")
    with pytest.raises(CaptureError, match="2 federations: name one with --federation; it holds demo, elsewhere"):
        read_updates(folder)
    assert read_updates(folder, "demo").view("client-1").client == "client-1"
    (tmp_path / "empty").mkdir()
    with pytest.raises(CaptureError, match="holds no spec"):
        read_updates(tmp_path / "empty")
    with pytest.raises(CaptureError, match="no such folder"):
        read_updates(tmp_path / "nowhere")


def test_gaps_of_a_recording_are_told(recorded: tuple[Path, dict[str, str]]) -> None:
    folder, _ = recorded
    (folder / "wire.json").write_text(json.dumps({"lost_frames": 3, "incomplete": ["a", "b"], "damaged_frames": 0}))
    assert set(read_updates(folder).gaps) == {
        "2 incomplete transfers",
        "3 frames dropped because the observer was too slow",
    }


def test_the_truth_is_what_the_device_trained_on(tmp_path: Path) -> None:
    case = simulated_case()
    data = write_images(case.truth.train, case.truth.held_out, tmp_path / "data.npz")
    truth = read_truth(case.view, data, write_private(case, tmp_path / "private.safetensors"))
    assert torch.equal(truth.train.images, case.truth.train.images)
    assert len(truth.held_out) == len(case.truth.held_out)
    assert truth.before is not None
    assert truth.before.keys() == {Part.EXTRACTOR, Part.DISCRIMINATOR}


def test_images_that_the_model_never_saw_are_refused(tmp_path: Path) -> None:
    case = simulated_case()
    fewer = case.truth.train.rows(list(range(40)))
    data = write_images(fewer, case.truth.held_out, tmp_path / "data.npz")
    with pytest.raises(TruthError, match=r"40 training images.*trained on 86.*not the images that the model saw"):
        read_truth(case.view, data)
    counts = tuple(reversed(case.truth.train.label_counts()))
    view = replace(case.view, report=case.view.report.model_copy(update={"label_counts": counts}))
    data = write_images(case.truth.train, case.truth.held_out, tmp_path / "same.npz")
    with pytest.raises(TruthError, match="images per class"):
        read_truth(view, data)


def test_private_weights_of_another_network_or_round_are_refused(tmp_path: Path) -> None:
    case, other = simulated_case(), simulated_case(network="cnn_bn")
    data = write_images(case.truth.train, case.truth.held_out, tmp_path / "data.npz")
    with pytest.raises(TruthError, match="other tensors than the federation's"):
        read_truth(case.view, data, write_private(other, tmp_path / "other.safetensors"))
    (tmp_path / "store" / "generations").mkdir(parents=True)
    with pytest.raises(TruthError, match="rounds none, not of round 2"):
        read_truth(case.view, data, tmp_path / "store")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(DecodeError, match=r"bad\.safetensors can't be read"):
        read_truth(case.view, data, tmp_path / "bad.safetensors")


def write_generation(store: Path, case: Case, number: int, update: str) -> None:
    folder = store / "generations" / str(number)
    folder.mkdir(parents=True)
    described = {"cursor": {"round": number, "attempt": 1}, "outbox": {"artifact": update}}
    (folder / "state.json").write_text(f"{json.dumps(described)}\nits checksum")
    tensors = {
        f"personal/{part.value}/{name}": tensor.contiguous()
        for part, weights in (case.truth.after or {}).items()
        for name, tensor in weights.items()
    }
    save_file(tensors, folder / "state.safetensors")


def test_an_agents_store_gives_the_round_before_and_after_and_no_other_devices(tmp_path: Path) -> None:
    case = simulated_case()
    data = write_images(case.truth.train, case.truth.held_out, tmp_path / "data.npz")
    view = replace(case.view, artifact="ab" * 32)
    write_generation(tmp_path / "store", case, 2, "ab" * 32)
    alone = read_truth(view, data, tmp_path / "store")
    assert alone.before is None
    assert alone.after is not None
    write_generation(tmp_path / "store", case, 1, "")
    assert read_truth(view, data, tmp_path / "store").before is not None
    with pytest.raises(TruthError, match="store of another device: the update of round 2 in it is not cdcd"):
        read_truth(replace(view, artifact="cd" * 32), data, tmp_path / "store")
    snapshot = tmp_path / "store" / "generations" / "2" / "snapshot.json"
    snapshot.write_text(json.dumps([{"sha256": "00", "split": "train"}]))
    with pytest.raises(
        TruthError, match=r"of its 86 training images are not those of round 2, which .*snapshot\.json lists"
    ):
        read_truth(view, data, tmp_path / "store")
    (tmp_path / "store" / "generations" / "2" / "state.json").write_text("[]")
    with pytest.raises(DecodeError, match="not a generation of an agent's store"):
        read_truth(view, data, tmp_path / "store")


def test_more_held_out_images_join_those_of_the_device(tmp_path: Path) -> None:
    case = simulated_case()
    data = write_images(case.truth.train, None, tmp_path / "train.npz")
    view = replace(case.view, report=case.view.report.model_copy(update={"examples": None}))
    more = write_images(case.truth.held_out, None, tmp_path / "more.npz")
    alone, with_more = (read_truth(view, data, held_out=held_out) for held_out in (None, more))
    assert len(with_more.held_out) == len(alone.held_out) + len(case.truth.held_out)
    assert np.array_equal(with_more.held_out.images[-1].numpy(), case.truth.held_out.images[-1].numpy())
