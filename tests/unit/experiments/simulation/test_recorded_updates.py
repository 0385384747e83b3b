"""`--keep-updates` records what a simulated federation sent, with the truth beside it, so that the audit can attack it."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from audit.evidence.device_data import read_private
from audit.evidence.updates import read_updates
from audit.recording.leakage import check_recording
from experiments.data.client_datasets import Cohort, build_cohort, unheld_images
from experiments.data.source import Source
from experiments.settings import root_secret
from experiments.simulation.batch import PlannedRun, RunSetting
from experiments.simulation.checkpoints import Checkpoints
from experiments.simulation.party_builder import coding_of, party_of
from experiments.simulation.single_run import Runs
from fedcg.learning.data.image_folder import read_images, split_source
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Aggregate, ServerState, Update
from fedcg.learning.methods.ppidsg import SCRAMBLING
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import spec_root
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulate
from fedcg.learning.simulation.tasks import MemorySpill, SerialRunner
from fedcg.learning.spec import FederationSpec, plan_from_mapping
from fedcg.learning.tensor_conversion import to_weights
from fedcg.wire.artifacts.artifacts import Artifact, Base, codecs_for, unpack
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import same_parts

SMALL = RunSetting(
    clients=2,
    partition="iid",
    images_per_client=60,
    rounds=2,
    local_epochs=1,
    image_size=16,
    params={"server_iterations": 3},
    shadow=False,
)
AVERAGED = SMALL.model_copy(update={"method": "fedavg", "params": {}})
CLIENTS = ("client-1", "client-2")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def ignore(_planned: PlannedRun, _now: Simulation) -> None:
    pass


def recorded(setting: RunSetting, folder: Path, rounds: str = "all", simulator: Any = simulate) -> Path:
    """The recording of a run."""
    folder.mkdir(exist_ok=True)
    runs, planned = Runs(folder, simulator, ignore), PlannedRun(setting=setting, keep_updates=rounds)
    runs.run(planned)
    return runs.recording(planned)


def spec_of(setting: RunSetting, source: Source) -> FederationSpec:
    return complete_spec(plan_from_mapping(setting.plan(source)))


def cohort_of(setting: RunSetting) -> tuple[FederationSpec, Cohort]:
    source = setting.source()
    spec = spec_of(setting, source)
    return spec, build_cohort(source, spec.image, setting.deal())


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def listed(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "wire.json").read_text())["artifacts"]
    return found


def ids(folder: Path, kind: str, number: int) -> dict[str, str]:
    """By sender, the artifacts of a kind and round."""
    return {seen["sender"]: seen["id"] for seen in listed(folder) if (seen["kind"], seen["round"]) == (kind, number)}


def aggregate_in(folder: Path, spec: FederationSpec, number: int) -> tuple[str, Artifact]:
    ((_, artifact),) = ids(folder, "aggregate", number).items()
    layouts = {part: spec.layouts[part] for part in sorted(get_method(spec.method).payload.down)}
    data = (folder / "artifacts" / artifact).read_bytes()
    return artifact, unpack(data, layouts, codecs=codecs_for(layouts, spec.aggregate_codec))


def updates_in(folder: Path, spec: FederationSpec, number: int, base: Base) -> dict[str, Artifact]:
    layouts = {part: spec.layouts[part] for part in spec.upload}
    codecs = codecs_for(layouts, spec.codec, spec.with_base)
    return {
        client: unpack((folder / "artifacts" / artifact).read_bytes(), layouts, codecs=codecs, base=base)
        for client, artifact in ids(folder, "update", number).items()
    }


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
def test_the_recorded_updates_of_a_round_merge_to_the_recorded_aggregate_after_it(
    codecs: tuple[str, str], tmp_path: Path
) -> None:
    setting = AVERAGED.model_copy(update={"codec": codecs[0], "aggregate_codec": codecs[1]})
    folder, (spec, cohort) = recorded(setting, tmp_path), cohort_of(setting)
    for number in (1, 2):
        name, before = aggregate_in(folder, spec, number - 1)
        updates = updates_in(folder, spec, number, Base(name, before.parts))
        assert tuple(updates) == CLIENTS
        assert {update.header.base for update in updates.values()} == {name}
        state, ctx = (
            ServerState(Aggregate(to_weights(before.parts))),
            party_of(setting, spec, cohort).server_context(number),
        )
        merge = get_method(spec.method).aggregator(state, ctx, MemorySpill())
        decoded = {
            client: Update(client, to_weights(one.parts), len(cohort.clients[client].train))
            for client, one in updates.items()
        }
        merged = merge.finish({client: partial(decoded.__getitem__, client) for client in decoded})[0].parts
        coding = coding_of(spec)
        expected = merged if coding is None else coding.aggregate(merged)[0]
        assert same_parts(to_weights(aggregate_in(folder, spec, number)[1].parts), expected)


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
    assert FederationSpec.parse((folder / "artifacts" / name).read_bytes()) == spec
    base, aggregate = aggregate_in(folder, spec, 1)
    report = updates_in(folder, spec, 2, Base(base, aggregate.parts))["client-1"].header.report
    assert report is not None
    assert report.label_counts == cohort.clients["client-1"].train.label_counts()
    curves = {
        client["id"]: client["curve"] for client in json.loads(next(tmp_path.glob("*.json")).read_text())["clients"]
    }
    assert round(report.accuracy or 0, 5) == curves["client-1"]["accuracy"][1]
    assert check_recording(folder, sorted((folder / "truth").glob("*.safetensors"))).matches == ()


@pytest.mark.parametrize("data", ["digits", "digits-domains"])
@pytest.mark.parametrize("validation", ["share", "test-half"])
def test_a_clients_npz_gives_the_very_pixels_that_it_trained_on_and_those_it_did_not(
    data: str, validation: str, tmp_path: Path
) -> None:
    setting = AVERAGED.model_copy(update={"data": data, "validation": validation, "rounds": 1})
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


def test_the_private_parts_before_a_round_are_those_after_the_one_before(tmp_path: Path) -> None:
    folder, (spec, _) = recorded(SMALL, tmp_path), cohort_of(SMALL)
    initial = initial_parts(spec, root_secret(0, "cohort"))
    for client in CLIENTS:
        start = private_parts(folder, client, 1, "before")
        assert same_parts(start, {part: initial[part] for part in (Part.DISCRIMINATOR, Part.EXTRACTOR)})
        assert same_parts(private_parts(folder, client, 2, "before"), private_parts(folder, client, 1, "after"))
        assert not same_parts(private_parts(folder, client, 2, "after"), private_parts(folder, client, 2, "before"))


def test_of_a_shared_extractor_the_truth_is_what_came_down_and_what_was_sent(tmp_path: Path) -> None:
    folder, (spec, _) = recorded(AVERAGED, tmp_path), cohort_of(AVERAGED)
    name, before = aggregate_in(folder, spec, 1)
    sent = updates_in(folder, spec, 2, Base(name, before.parts))
    for client in CLIENTS:
        for when, parts in (("before", before.parts), ("after", sent[client].parts)):
            expected: Mapping[Part, Any] = {Part.EXTRACTOR: to_weights(parts)[Part.EXTRACTOR]}
            assert same_parts(private_parts(folder, client, 2, when), expected)
    leaks = check_recording(folder, [folder / "truth" / "client-1-round-2.safetensors"]).matches
    assert {match.how for match in leaks} >= {"value"}


@pytest.mark.parametrize("start", ["cohort", "public", "random"])
def test_the_start_decides_where_private_parts_begin_and_the_shared_ones_are_public_always(
    start: str, tmp_path: Path
) -> None:
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
    shared = to_weights(aggregate_in(folder, spec, 0)[1].parts)
    assert same_parts(shared, {part: public[part] for part in shared})
    known = root_secret(0, "cohort").hex() if start == "cohort" else None
    assert json.loads((folder / "initial.json").read_text()) == {"format": 1, "start": start, "cohort_root": known}


def pixels(*sets: ImageSet) -> list[bytes]:
    return [image.numpy().tobytes() for images in sets for image in images.images]


def test_auxiliary_images_are_all_that_no_client_holds_or_the_common_test_set(tmp_path: Path) -> None:
    folder, (spec, cohort) = recorded(AVERAGED.model_copy(update={"rounds": 1}), tmp_path), cohort_of(AVERAGED)
    found = read_images(folder / "auxiliary.npz", spec.classes, spec.image).images
    held = pixels(*(images for own in cohort.clients.values() for images in (own.train, own.val, own.test)))
    source = AVERAGED.source()
    assert len(found) + len(held) == 1797
    assert not set(pixels(found)) & set(held)
    whole = AVERAGED.model_copy(update={"images_per_client": None})
    common = cohort_of(whole)[1].common
    spare = unheld_images(source, spec.image, whole.deal(), 10_000)
    assert sorted(zip(pixels(spare), spare.labels.tolist(), strict=True)) == sorted(
        zip(pixels(common), common.labels.tolist(), strict=True)
    )
    even = whole.model_copy(update={"test": "even"})
    assert len(unheld_images(source, spec.image, even.deal(), 10_000)) == len(cohort_of(even)[1].common)
    few, others = (
        unheld_images(source, spec.image, setting.deal(), 50)
        for setting in (AVERAGED, AVERAGED.model_copy(update={"seed": 1}))
    )
    assert len(few) == 50
    assert pixels(few) == pixels(unheld_images(source, spec.image, AVERAGED.deal(), 50))
    assert pixels(few) != pixels(others)


class StopError(Exception):
    """Ends a simulation after a round."""


@pytest.mark.slow
def test_a_run_that_stops_between_recording_and_checkpoint_goes_on_to_the_recording_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = SMALL.model_copy(update={"rounds": 3, "codec": "i8-delta", "aggregate_codec": "f16"})
    planned, disturbed = PlannedRun(setting=setting, keep_updates="all"), tmp_path / "disturbed"
    runs, save = Runs(disturbed, simulate, ignore), Checkpoints.save
    stale = runs.recording(planned) / "artifacts"
    stale.mkdir(parents=True)
    (stale / ("0" * 64)).touch()  # of an earlier run of this name

    def save_but_once(self: Checkpoints, now: Simulation, seconds: float) -> None:
        if now.rounds == 2:
            raise StopError
        save(self, now, seconds)

    monkeypatch.setattr(Checkpoints, "save", save_but_once)
    with pytest.raises(StopError):
        runs.run(planned)
    monkeypatch.undo()
    assert runs.done_rounds(planned) == 1
    stood = tree(runs.recording(planned))
    assert "truth/client-1-round-2.safetensors" in stood
    runs.run(planned)
    undisturbed = tree(recorded(setting, tmp_path / "undisturbed"))
    assert tree(runs.recording(planned)) == undisturbed
    assert {name for name in stood if stood[name] != undisturbed.get(name)} == {"wire.json"}


def test_recording_changes_no_figure_of_a_run(tmp_path: Path) -> None:
    recorded(SMALL, tmp_path / "kept")
    (tmp_path / "plain").mkdir()
    plain = Runs(tmp_path / "plain", simulate, ignore).run(PlannedRun(setting=SMALL))
    kept = json.loads((tmp_path / "kept" / f"{SMALL.name}.json").read_text())
    assert {**kept, "seconds": None} == {**json.loads(json.dumps(plain)), "seconds": None}
    assert not (tmp_path / "plain" / "updates").exists()


def test_only_the_rounds_asked_for_are_recorded_and_clients_trained_together_give_the_same_files(
    tmp_path: Path,
) -> None:
    setting = AVERAGED.model_copy(update={"rounds": 3, "batched_clients": True})
    together = SerialRunner(batched=True)

    def batched(party: Any, schedule: Schedule, **more: Any) -> Simulation:
        return simulate(party, schedule, runner=together, **more)

    folder = recorded(setting, tmp_path, "2", batched)
    assert {seen["round"] for seen in listed(folder) if seen["kind"] == "update"} == {2}
    assert {seen["round"] for seen in listed(folder) if seen["kind"] == "aggregate"} == {1, 2}
    assert sorted(path.name for path in (folder / "truth").glob("*.safetensors")) == [
        f"{client}-round-2.safetensors" for client in CLIENTS
    ]
    assert json.loads((folder / "wire.json").read_text())["finished"] is False


def test_clients_that_are_absent_or_cannot_train_have_no_update(tmp_path: Path) -> None:
    setting = AVERAGED.model_copy(update={"participation": 0.5})
    folder = recorded(setting, tmp_path)
    for number in (1, 2):
        (sender,) = ids(folder, "update", number)
        files = [path.name for path in (folder / "truth").glob(f"*-round-{number}.safetensors")]
        assert files == [f"{sender}-round-{number}.safetensors"]
