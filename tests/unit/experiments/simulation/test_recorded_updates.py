"""`--keep-updates` records what a simulated federation sent, with the truth beside it, so that the audit can attack it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from audit.errors import DecodeError
from audit.evidence.case import read_secret
from audit.evidence.device_data import read_private
from audit.evidence.updates import read_updates
from audit.recording.leakage import check_recording
from experiments.data.client_datasets import Cohort, build_cohort, unheld_images
from experiments.settings import root_secret
from experiments.simulation.batch import RunSetting
from experiments.simulation.party_builder import coding_of, party_of
from experiments.simulation.recorded_updates import UPDATES_FOLDER
from fedcg.learning.data.image_folder import read_images, split_source
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import ServerState, Update
from fedcg.learning.methods.ppidsg import SCRAMBLING
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import spec_root
from fedcg.learning.simulation.simulation import simulate
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.learning.spec import FederationSpec, plan_from_mapping
from fedcg.learning.tensor_conversion import to_weights
from fedcg.wire.artifacts.artifacts import codecs_for, unpack
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import same_parts
from tests.support.simulations import SMALL, SMALL_AVERAGED, run_of

CLIENTS = ("client-1", "client-2")


def recorded(setting: RunSetting, folder: Path, rounds: str = "all", simulator: Any = simulate) -> Path:
    """The recording of a run."""
    run_of(setting, folder, simulator, rounds)
    return folder / UPDATES_FOLDER / setting.name


def cohort_of(setting: RunSetting) -> tuple[FederationSpec, Cohort]:
    source = setting.source()
    spec = complete_spec(plan_from_mapping(setting.plan(source)))
    return spec, build_cohort(source, spec.image, setting.deal())


def listed(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "wire.json").read_text())["artifacts"]
    return found


def ids(folder: Path, kind: str, number: int) -> dict[str, str]:
    """By sender, the artifacts of a kind and round."""
    return {seen["sender"]: seen["id"] for seen in listed(folder) if (seen["kind"], seen["round"]) == (kind, number)}


def private_parts(folder: Path, client: str, number: int, when: str) -> dict[Part, dict[str, torch.Tensor]]:
    parts: dict[Part, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(folder / "truth" / f"{client}-round-{number}.safetensors").items():
        moment, part, name = key.split("/", 2)
        if moment == when:
            parts.setdefault(Part(part), {})[name] = tensor
    return parts


def test_what_a_method_keeps_at_the_client_is_recorded_as_truth_and_crosses_nowhere(tmp_path: Path) -> None:
    setting = SMALL.model_copy(update={"method": "ppidsg", "network": "image_small", "quick": False, "params": {}})
    folder = recorded(setting, tmp_path)
    view = read_updates(folder).view("client-1", 2, None)
    _, after, extras = read_private(view, folder / "truth" / "client-1-round-2.safetensors")
    assert after is not None
    assert extras[SCRAMBLING].keys() == {"rotation", "complement", "flip", "channels", "shuffle"}
    assert extras["discriminator"]
    another = read_private(view, folder / "truth" / "client-2-round-2.safetensors")[2]
    assert not torch.equal(extras[SCRAMBLING]["shuffle"], another[SCRAMBLING]["shuffle"])
    assert set(view.update) == {Part.IMAGE_GENERATOR}


@pytest.mark.parametrize("codecs", [("f32", "f32"), ("i8-delta", "f16")])
def test_the_recorded_updates_of_a_round_merge_to_its_aggregate(codecs: tuple[str, str], tmp_path: Path) -> None:
    setting = SMALL_AVERAGED.model_copy(update={"codec": codecs[0], "aggregate_codec": codecs[1]})
    folder, (spec, cohort) = recorded(setting, tmp_path), cohort_of(setting)
    for number in (1, 2):
        recording = read_updates(folder)
        view = recording.view("client-1", number)
        ((_, base),) = ids(folder, "aggregate", number - 1).items()
        assert recording.headers[view.artifact].base == base
        sent = {"client-1": view.update, **view.others}
        assert tuple(sent) == CLIENTS
        ctx = party_of(setting, spec, cohort).server_context(number)
        merge = get_method(spec.method).aggregator(ServerState(view.before), ctx, MemorySpill())
        decoded = {name: Update(name, parts, len(cohort.clients[name].train)) for name, parts in sent.items()}
        merged = merge.finish({name: partial(decoded.__getitem__, name) for name in decoded})[0].parts
        coding = coding_of(spec)
        expected = merged if coding is None else coding.aggregate(merged)[0]
        (after,) = ids(folder, "aggregate", number).values()
        layouts = {part: spec.layouts[part] for part in sorted(expected)}
        codecs_down = codecs_for(layouts, spec.aggregate_codec)
        came = unpack((folder / "artifacts" / after).read_bytes(), layouts, codecs=codecs_down).parts
        assert same_parts(to_weights(came), expected)


def test_sealed_means_of_a_recording_are_read_with_the_cohorts_secret_alone(tmp_path: Path) -> None:
    setting = SMALL_AVERAGED.model_copy(update={"method": "fedseal", "params": {}, "rounds": 3, "start": "cohort"})
    folder = recorded(setting, tmp_path)
    secret = read_secret(folder / "initial.json")
    outsider, helped = (read_updates(folder).view("client-1", 3, None, known) for known in (None, secret))
    assert set(outsider.before.parts) == set(outsider.update) == {Part.CLASSIFIER}
    came = private_parts(folder, "client-1", 3, "before")[Part.EXTRACTOR]
    assert all(torch.allclose(helped.before.parts[Part.EXTRACTOR][name], one, atol=1e-5) for name, one in came.items())
    assert helped.colluder is not None
    assert helped.colluder.extractor == helped.before.parts[Part.EXTRACTOR]
    with pytest.raises(DecodeError, match="the sealed sum in the aggregate of round 2"):
        read_updates(folder).view("client-1", 3, None, bytes(32))
    check = check_recording(folder, sorted((folder / "truth").glob("*.safetensors")))
    assert check.sealed.tensors
    assert check.is_clean


def test_a_recording_is_an_observers_folder_with_what_a_device_reports_by_default_and_the_spec(tmp_path: Path) -> None:
    folder, (spec, cohort) = recorded(SMALL, tmp_path), cohort_of(SMALL)
    record = json.loads((folder / "wire.json").read_text())
    assert record["finished"] is True
    assert record["parts_on_wire"] == ["classifier", "generator"]
    assert record["fields_on_wire"] == ["accuracy", "examples", "label_counts", "loss"]
    assert (record["bases_not_seen"], record["undecoded"], record["incomplete"]) == ([], [], [])
    assert set(record["bytes"]) == {"*", *CLIENTS}
    (update,) = [seen for seen in listed(folder) if (seen["sender"], seen["round"]) == ("client-1", 2)]
    assert record["bytes"]["client-1"]["up"]["2"] == update["size"]
    ((_, name),) = ids(folder, "spec", 0).items()
    assert name == spec.digest
    recording = read_updates(folder)
    assert recording.spec == spec
    report = recording.view("client-1", 2).report
    assert report.label_counts == cohort.clients["client-1"].train.label_counts()
    run = json.loads((tmp_path / f"{SMALL.name}.json").read_text())
    assert round(report.accuracy or 0, 5) == run["clients"][0]["curve"]["accuracy"][1]
    assert check_recording(folder, sorted((folder / "truth").glob("*.safetensors"))).matches == ()


@pytest.mark.parametrize("data", ["digits", "digits-domains"])
@pytest.mark.parametrize("validation", ["share", "test-half"])
def test_a_clients_npz_gives_the_very_pixels_that_it_trained_on_and_those_it_did_not(
    data: str, validation: str, tmp_path: Path
) -> None:
    setting = SMALL_AVERAGED.model_copy(update={"data": data, "validation": validation, "rounds": 1})
    folder, (spec, cohort) = recorded(setting, tmp_path), cohort_of(setting)
    for client, own in cohort.clients.items():
        found = read_images(folder / "truth" / f"{client}.npz", spec.classes, spec.image)
        where = split_source(folder / "truth" / f"{client}.npz", found.entries, spec.classes)
        split = [where[entry.path] for entry in found.entries]  # as a device divides its images
        assert not found.skipped
        for parts, expected in ((("train",), [own.train]), (("val", "test"), [own.val, own.test])):
            rows = found.images.rows([row for part in parts for row, name in enumerate(split) if name == part])
            assert torch.equal(rows.images, torch.cat([one.images for one in expected]))
            assert torch.equal(rows.labels, torch.cat([one.labels for one in expected]))


@pytest.mark.parametrize("start", ["cohort", "public", "random"])
def test_the_start_decides_where_private_parts_begin_and_shared_ones_are_public(start: str, tmp_path: Path) -> None:
    setting = SMALL.model_copy(update={"start": start, "rounds": 1})
    folder, (spec, _) = recorded(setting, tmp_path), cohort_of(setting)
    roots = {
        "cohort": dict.fromkeys(CLIENTS, root_secret(0, "cohort")),
        "public": dict.fromkeys(CLIENTS, spec_root(spec.seed)),
        "random": {client: root_secret(0, f"device {client}") for client in CLIENTS},
    }[start]
    for client, root in roots.items():
        initial = initial_parts(spec, root)
        begun = private_parts(folder, client, 1, "before")
        assert same_parts(begun, {part: initial[part] for part in (Part.DISCRIMINATOR, Part.EXTRACTOR)})
    public = initial_parts(spec, spec_root(spec.seed))
    shared = read_updates(folder).view("client-1", 1).before.parts
    assert same_parts(shared, {part: public[part] for part in shared})
    known = root_secret(0, "cohort").hex() if start == "cohort" else None
    assert json.loads((folder / "initial.json").read_text()) == {"format": 1, "start": start, "cohort_root": known}


def pixels(*sets: ImageSet) -> list[bytes]:
    return [image.numpy().tobytes() for images in sets for image in images.images]


def labelled(images: ImageSet) -> list[tuple[bytes, int]]:
    return sorted(zip(pixels(images), images.labels.tolist(), strict=True))


def test_auxiliary_images_are_all_that_no_client_holds_or_the_common_test_set(tmp_path: Path) -> None:
    folder = recorded(SMALL_AVERAGED.model_copy(update={"rounds": 1}), tmp_path)
    spec, cohort = cohort_of(SMALL_AVERAGED)
    found = read_images(folder / "auxiliary.npz", spec.classes, spec.image).images
    held = pixels(*(images for own in cohort.clients.values() for images in (own.train, own.val, own.test)))
    source = SMALL_AVERAGED.source()
    assert len(found) + len(held) == 1797
    assert not set(pixels(found)) & set(held)
    whole = SMALL_AVERAGED.model_copy(update={"images_per_client": None})
    common = cohort_of(whole)[1].common
    assert labelled(unheld_images(source, spec.image, whole.deal(), 10_000)) == labelled(common)
    even = whole.model_copy(update={"test": "even"})
    assert len(unheld_images(source, spec.image, even.deal(), 10_000)) == len(cohort_of(even)[1].common)


def test_recording_changes_no_figure_of_a_run(tmp_path: Path) -> None:
    recorded(SMALL, tmp_path / "kept")
    plain = run_of(SMALL, tmp_path / "plain")
    kept = json.loads((tmp_path / "kept" / f"{SMALL.name}.json").read_text())
    assert {**kept, "seconds": None} == {**json.loads(json.dumps(plain)), "seconds": None}
    assert not (tmp_path / "plain" / "updates").exists()


def test_only_the_rounds_asked_for_are_recorded(tmp_path: Path) -> None:
    folder = recorded(SMALL_AVERAGED.model_copy(update={"rounds": 3}), tmp_path, "2")
    assert {seen["round"] for seen in listed(folder) if seen["kind"] == "update"} == {2}
    assert {seen["round"] for seen in listed(folder) if seen["kind"] == "aggregate"} == {1, 2}
    assert sorted(path.name for path in (folder / "truth").glob("*.safetensors")) == [
        f"{client}-round-2.safetensors" for client in CLIENTS
    ]
    assert json.loads((folder / "wire.json").read_text())["finished"] is False


def test_clients_that_are_absent_or_cannot_train_have_no_update(tmp_path: Path) -> None:
    folder = recorded(SMALL_AVERAGED.model_copy(update={"participation": 0.5}), tmp_path)
    for number in (1, 2):
        (sender,) = ids(folder, "update", number)
        files = [path.name for path in (folder / "truth").glob(f"*-round-{number}.safetensors")]
        assert files == [f"{sender}-round-{number}.safetensors"]
