"""The training process and what it does: one commit per round, the same bytes after a kill, the best model at the end."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_client.config import DataSection, ExportSection, KeysSection
from edge_client.session.events import ChooseModel, Chosen, TrainRound
from edge_client.store.generations import StoredState
from edge_client.store.private_store import PrivateStore
from edge_client.training import local_round as training
from edge_client.training.evaluation import Measured
from edge_client.training.messages import Committed, Failed
from edge_client.training.trainer_child import Trainer, reason_for
from export.errors import GateError
from export.model.manifest import read_manifest
from export.model.signature import required
from export.model.versions import Slots
from fedcg.event_log import EventLog, read_events
from fedcg.learning.method import ClientState, LocalResult, Method
from fedcg.learning.networks.initial_weights import complete_spec, initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import spec_root
from fedcg.learning.spec import FederationPlan, FederationSpec, NetworkChoice, ParameterValue
from fedcg.learning.tensor_conversion import to_arrays
from fedcg.wire.artifacts.artifacts import Base, codecs_for, unpack
from fedcg.wire.artifacts.inspection import inspect
from fedcg.wire.errors import CodecError
from fedcg.wire.messages.messages import DeclineReason, RoundAttempt
from fedcg.wire.messages.signing import SigningKey
from fedcg.wire.parts import Part, ReportField, TensorLayout, is_delta
from tests.support.edge_worlds import (
    CLASSES,
    DEVICE,
    FEDERATION,
    FORM,
    aggregate_of,
    draw_images,
    make_config,
    wait_until,
)

DEVICE_KEY, COHORT_KEY = b"d" * 32, b"c" * 32
FAST: dict[str, ParameterValue] = {"epochs": 1, "server_iterations": 2, "ramp_rounds": 1}


def real_spec(method: str = "fedcg", **params: ParameterValue) -> FederationSpec:
    known = FAST if method == "fedcg" else {"epochs": 1}
    return complete_spec(
        FederationPlan(
            federation=FEDERATION,
            classes=CLASSES,
            image=FORM,
            network=NetworkChoice(noise_dim=8),
            method=method,
            params={**known, **params},
            rounds=3,
            seed=7,
        )
    )


class Site:
    """A device's folder with images, secrets, a spec and the first aggregate, and a trainer in this process."""

    def __init__(self, root: Path, spec: FederationSpec, *, shadow: bool = False, export: bool = False) -> None:
        self.root, self.spec = root, spec
        draw_images(root / "data" / "train", 12, seed=1)
        draw_images(root / "data" / "test", 5, seed=2)
        draw_images(root / "common", 4, seed=3)
        self.key = SigningKey.generate()
        self.key.save(root / "signing.key")
        config = make_config(root, shadow=shadow, export=export)
        self.config = config.model_copy(
            update={
                "data": DataSection(root=root / "data", common_test=root / "common"),
                "keys": KeysSection(signing=root / "signing.key"),
            }
        )
        (root / "store" / "secrets").mkdir(parents=True)
        (root / "store" / "secrets" / "device.key").write_bytes(DEVICE_KEY)
        self.store = PrivateStore.open(root / "store", FEDERATION, DEVICE)
        self.store.save_spec(spec.canonical())
        method = get_method(spec.method)
        first = method.init_server(spec, initial_parts(spec, spec_root(spec.seed))).aggregate
        self.aggregate = self.store.artifacts.put(aggregate_of(to_arrays(first.parts), spec, 0))
        self.events_path = root / "store" / "events.jsonl"

    def round(self, number: int = 1, attempt: int = 1) -> TrainRound:
        return TrainRound(RoundAttempt(number, attempt), self.spec.digest, self.aggregate)

    def trainer(self) -> Trainer:
        return Trainer(self.config, self.store, EventLog(self.events_path, time.time))

    def declined(self) -> Failed:
        report = self.trainer().do(self.round())
        assert isinstance(report, Failed)
        return report

    def state(self) -> StoredState:
        state = self.store.generations.load()
        assert state is not None
        return state

    def update(self) -> bytes:
        return self.store.generations.update_bytes(self.state().generation)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [dict(event) for event in read_events(self.events_path) if event["event"] == name]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, real_spec())


def test_a_round_commits_private_state_snapshot_scores_and_update_together(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec(), shadow=True)
    assert site.trainer().do(site.round()) == Committed(RoundAttempt(1, 1))
    state = site.state()
    assert set(state.slots) == {"personal", "shadow", "best", "best_shadow"}
    assert set(state.slots["personal"]) == set(Part)
    assert state.generation.cursor == RoundAttempt(1, 1)
    snapshot = site.store.generations.snapshot(state.generation)
    assert snapshot.counts()["test"] == 15
    assert snapshot.counts()["train"] + snapshot.counts()["val"] == 36
    spec = site.spec
    shared = {part: spec.layouts[part] for part in spec.upload}
    base = Base(site.aggregate, unpack(site.store.artifacts.get(site.aggregate), shared).parts)
    artifact = unpack(site.update(), shared, codecs=codecs_for(shared, "i8-delta", spec.upload), base=base)
    assert set(artifact.parts) == {Part.CLASSIFIER, Part.GENERATOR}
    for part, tensors in artifact.parts.items():
        for name, tensor in tensors.items():
            own, start = state.slots["personal"][part][name], base.parts[part][name]
            exact = artifact.header.codecs[f"{part.value}/{name}"] in ("f32", "i64")
            # A channel's scale is its largest step by 127, and half of it is the most that a number can be off.
            assert np.abs(tensor - own).max() <= (0.0 if exact else np.abs(own - start).max() / 127 * 0.51)
    assert artifact.header.base == site.aggregate
    assert artifact.header.report is not None
    assert artifact.header.report.examples == snapshot.counts()["train"]
    (told,) = site.events("committed")
    assert told["accuracy_personal"] == artifact.header.report.accuracy
    assert {"accuracy_local", "accuracy_common_local", "accuracy_common_personal", "consistency", "spread"} <= set(told)
    phases = [event["phase"] for event in site.events("phase_started")]
    assert phases == ["load", "classify", "generate", "shadow-classify", "evaluate"]
    assert all(event["step"] > 0 and event["pid"] == os.getpid() for event in site.events("progress"))


def test_the_shadow_trains_as_if_alone_and_leaves_the_update_unchanged(tmp_path: Path) -> None:
    with_shadow, without = Site(tmp_path / "a", real_spec(), shadow=True), Site(tmp_path / "b", real_spec())
    alone = Site(tmp_path / "c", real_spec("local"))
    for site in (with_shadow, without, alone):
        site.trainer().do(site.round())
    assert with_shadow.update() == without.update()
    assert set(without.state().slots) == {"personal", "best"}
    assert without.events("committed")[0]["accuracy_local"] is None
    shadow, only = with_shadow.state().slots["shadow"], alone.state().slots["personal"]
    for part in (Part.EXTRACTOR, Part.CLASSIFIER):
        for name, tensor in only[part].items():
            assert np.array_equal(tensor, shadow[part][name]), (part, name)


def test_a_committed_round_is_never_trained_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.trainer().do(site.round())
    before = site.state().generation

    def never(name: str) -> object:
        raise AssertionError(f"{name} was about to train again")

    trainer = site.trainer()
    monkeypatch.setattr(training, "initial_parts", never)
    monkeypatch.setattr(site.store.artifacts, "get", never)
    assert trainer.do(site.round()) == Committed(RoundAttempt(1, 1))
    assert site.state().generation == before
    assert len(site.events("committed")) == 1


def test_the_next_round_starts_from_the_committed_state(site: Site) -> None:
    trainer = site.trainer()
    trainer.do(site.round(1))
    first = site.state().slots["personal"][Part.EXTRACTOR]
    trainer.do(site.round(2))
    second = site.state().slots["personal"][Part.EXTRACTOR]
    fresh = to_arrays(initial_parts(site.spec, spec_root(site.spec.seed)))[Part.EXTRACTOR]

    def distance(one: Any, other: Any) -> float:
        return float(sum(np.abs(one[name] - other[name]).sum() for name in one))

    assert 0 < distance(second, first) < distance(second, fresh)
    assert [event["round"] for event in site.events("committed")] == [1, 2]


def test_a_restarted_process_continues_with_the_same_bits(tmp_path: Path) -> None:
    through, restarted = Site(tmp_path / "a", real_spec(), shadow=True), Site(tmp_path / "b", real_spec(), shadow=True)
    trainer = through.trainer()
    for number in (1, 2):
        trainer.do(through.round(number))
        restarted.trainer().do(restarted.round(number))
    assert through.update() == restarted.update()
    assert dict(through.state().generation.checksums) == dict(restarted.state().generation.checksums)


def test_devices_differ_by_their_secret_and_a_repetition_by_its_attempt(tmp_path: Path) -> None:
    sites = {name: Site(tmp_path / name, real_spec()) for name in ("a", "other secret", "other attempt")}
    (sites["other secret"].store.root / "secrets" / "device.key").write_bytes(b"e" * 32)
    for name, site in sites.items():
        site.trainer().do(site.round(1, 2 if name == "other attempt" else 1))
    weights = {name: site.state().slots["personal"][Part.EXTRACTOR] for name, site in sites.items()}
    for name in ("other secret", "other attempt"):
        assert any(not np.array_equal(weights["a"][key], weights[name][key]) for key in weights["a"])


def test_the_cohort_secret_decides_where_private_parts_start_and_only_those(tmp_path: Path) -> None:
    spec = real_spec(lr=1e-12, gan_lr=1e-12, weight_decay=0.0)
    plain, cohort = Site(tmp_path / "a", spec), Site(tmp_path / "b", spec)
    (cohort.store.root / "secrets" / "cohort.key").write_bytes(COHORT_KEY)
    for site in (plain, cohort):
        site.trainer().do(site.round())
    slots = [site.state().slots["personal"] for site in (plain, cohort)]

    def same(part: Part, name: str) -> bool:
        return bool(np.allclose(slots[0][part][name], slots[1][part][name], atol=1e-6))

    assert not any(same(Part.EXTRACTOR, name) for name in slots[0][Part.EXTRACTOR])
    assert all(same(Part.CLASSIFIER, name) for name in slots[0][Part.CLASSIFIER])


def test_a_method_that_shares_nothing_sends_only_its_report(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec("local"))
    assert site.trainer().do(site.round()) == Committed(RoundAttempt(1, 1))
    seen = inspect(site.update())
    assert seen.tensors == {}
    assert seen.report_fields == {"examples", "accuracy", "loss", "health"}


def test_a_store_that_may_not_be_written_fails_the_attempt_with_the_fix_and_no_traceback(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/srv/store/accepted.json")

    monkeypatch.setattr(PrivateStore, "accept_snapshot", forbidden)
    report = site.declined()
    assert report.reason is DeclineReason.TRAINING_FAILED
    assert "read and write /srv/store/accepted.json (chown, chmod)" in report.detail
    assert "Traceback" not in caplog.text


def test_an_end_that_finds_the_disk_full_is_told_with_the_fix_and_the_process_lives(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PrivateStore, "save_finalised", full)
    chosen = site.trainer().do(ChooseModel(site.spec.digest, site.aggregate))
    assert chosen == Chosen(site.aggregate, succeeded=False)
    assert f"Free space on, or repair, {site.store.root}" in site.events("finalise_failed")[0]["detail"]
    assert f"Free space on, or repair, {site.store.root}" in caplog.text


def test_a_round_that_diverges_changes_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec(lr=1e6))
    assert site.declined().reason is DeclineReason.DIVERGED
    assert reason_for(CodecError("tensor classifier/w holds 70000")) is DeclineReason.DIVERGED
    assert site.store.generations.current() == (None, ())


def _spoilt(result: LocalResult) -> LocalResult:
    parts = {
        part: {name: some / 0.0 for name, some in tensors.items()} for part, tensors in result.private.parts.items()
    }
    return replace(result, private=ClientState(parts))


def test_private_weights_that_are_no_numbers_after_the_last_step_count_as_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, real_spec("local"))
    method = get_method("local")

    def broken(*arguments: Any) -> LocalResult:
        return _spoilt(method.local_round(*arguments))

    monkeypatch.setattr(training, "get_method", lambda _name: replace(method, local_round=broken))
    assert site.declined().reason is DeclineReason.DIVERGED
    assert site.store.generations.current() == (None, ())


def test_a_shadow_that_diverges_stands_still_and_the_round_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, real_spec("fedsplit"), shadow=True)
    site.trainer().do(site.round(1))
    before = site.state().slots["shadow"]
    alone = get_method("local")

    def lookup(name: str) -> Method:
        def broken(*arguments: Any) -> LocalResult:
            return _spoilt(alone.local_round(*arguments))

        return replace(alone, local_round=broken) if name == "local" else get_method(name)

    monkeypatch.setattr(training, "get_method", lookup)
    assert site.trainer().do(site.round(2)) == Committed(RoundAttempt(2, 1))
    after = site.state().slots["shadow"]
    assert all(np.array_equal(after[part][name], before[part][name]) for part in before for name in before[part])
    assert [event["what"] for event in site.events("refused")] == ["shadow"]


@pytest.mark.parametrize(
    "changes",
    [
        {"layouts": {Part.CLASSIFIER: (TensorLayout(name="extra", dtype="float32", shape=(2,)),)}},
        {"upload": (Part.CLASSIFIER, Part.EXTRACTOR, Part.GENERATOR)},
        {"with_base": ()},
        {"codec": "i8"},
    ],
)
def test_a_spec_that_is_not_what_its_method_and_networks_need_is_refused(site: Site, changes: dict[str, Any]) -> None:
    site.spec = site.spec.model_copy(update={**changes, "layouts": {**site.spec.layouts, **changes.get("layouts", {})}})
    site.store.save_spec(site.spec.canonical())
    assert site.declined().reason is DeclineReason.SPEC_REFUSED


@pytest.mark.parametrize(
    ("changes", "why"), [({"federation": "letters"}, "letters"), ({"aggregate_codec": "f32"}, "coded")]
)
def test_an_aggregate_of_another_federation_or_codec_is_not_loaded(
    site: Site, changes: dict[str, Any], why: str
) -> None:
    shared = {part: site.spec.layouts[part] for part in site.spec.upload}
    parts = unpack(site.store.artifacts.get(site.aggregate), shared).parts
    other = site.spec.model_copy(update=changes)
    site.aggregate = site.store.artifacts.put(aggregate_of(parts, other, 0))
    assert why in site.declined().detail


def test_images_that_come_after_a_round_was_accepted_count_from_the_next_round_on(tmp_path: Path) -> None:
    calm, growing = Site(tmp_path / "a", real_spec()), Site(tmp_path / "b", real_spec())
    site = growing
    kept = site.store.accept_snapshot(
        site.spec.digest, 1, lambda: site.trainer()._work.data._take(site.spec).snapshot
    )  # as a trainer does that is killed right after
    draw_images(site.root / "data" / "train", 4, seed=9)
    for one in (calm, growing):
        one.trainer().do(one.round(1))
    assert calm.update() == growing.update()
    growing.trainer().do(growing.round(2))
    grown = site.store.generations.snapshot(site.state().generation)
    assert len(grown.files) == len(kept.files) + 12
    before = {file.path: file.split for file in kept.files}
    assert all(before.get(file.path, file.split) == file.split for file in grown.files)


def test_a_changed_file_of_the_snapshot_fails_the_attempt_and_the_next_takes_a_new_snapshot(site: Site) -> None:
    trainer = site.trainer()
    site.store.accept_snapshot(site.spec.digest, 1, lambda: trainer._work.data._take(site.spec).snapshot)
    victim = next((site.root / "data" / "train" / CLASSES[0]).glob("*.png"))
    victim.write_bytes((site.root / "data" / "test" / CLASSES[1] / "2-000.png").read_bytes())
    report = site.declined()
    assert report.reason is DeclineReason.NO_DATA
    assert victim.name in report.detail
    assert site.trainer().do(site.round(1, 2)) == Committed(RoundAttempt(1, 2))


def test_the_best_model_by_validation_is_kept_with_the_loss_deciding_between_equals() -> None:
    best = Measured(val=0.5, val_loss=1.0, test=0.9)
    assert Measured(val=0.6, val_loss=9.0, test=0.1).beats(best)
    assert Measured(val=0.5, val_loss=0.9).beats(best)
    assert not Measured(val=0.5, val_loss=1.0, test=1.0).beats(best)
    assert not Measured(val=0.4, val_loss=0.1).beats(best)
    assert Measured(test=0.1).beats(best)  # without validation images the newer one counts
    assert best.beats(None)
    assert Measured.from_scores(best.as_scores("best"), "best") == best


def test_at_the_end_the_best_candidate_is_exported_and_described_once(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec(), shadow=True, export=True)
    trainer = site.trainer()
    for number in (1, 2):
        trainer.do(site.round(number))
    command = ChooseModel(site.spec.digest, site.aggregate)
    assert trainer.do(command) == Chosen(site.aggregate, succeeded=True)
    outcome = site.store.finalised()
    assert outcome["accuracy_personal"] == outcome[f"accuracy_{outcome['candidate']}"]
    assert outcome["accuracy_common_personal"] == outcome[f"accuracy_common_{outcome['candidate']}"]
    assert outcome["accuracy_onnx"] == pytest.approx(outcome["accuracy_personal"])
    assert outcome["accuracy_common_onnx"] == pytest.approx(outcome["accuracy_common_personal"])
    scores = site.state().generation.scores
    assert outcome["accuracy_local"] == scores["best_shadow.test"]
    assert outcome["accuracy_own"] == scores["best.test"]
    assert (outcome["test_images"], Path(outcome["onnx_model"]).is_file()) == (15, True)
    assert read_manifest(Path(outcome["model_dir"]), required(site.key.public.hex))
    assert site.trainer().do(command) == Chosen(site.aggregate, succeeded=True)
    assert [path.name for path in sorted((site.store.root / "models").glob("0*"))] == ["0001"]


def test_each_round_that_made_the_model_better_is_exported(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec(), export=True)
    site.config = site.config.model_copy(update={"export": ExportSection(variants=False, gate_points=100.0)})
    trainer, models = site.trainer(), site.store.root / "models"
    best = []
    for number in (1, 2, 3):
        trainer.afterwards(trainer.do(site.round(number)))
        best.append(int(site.state().generation.scores["best.round"]))
        assert read_manifest(Slots(models).current()).round == best[-1]
    exported = site.events("exported")
    assert [event["round"] for event in exported] == sorted(set(best))
    assert [event["model_dir"] for event in exported] == [
        str(models / f"{version:04}") for version in range(1, len(exported) + 1)
    ]
    assert trainer.do(ChooseModel(site.spec.digest, site.aggregate)) == Chosen(site.aggregate, succeeded=True)
    assert site.store.finalised()["model_dir"] == str(models / f"{len(exported) + 1:04}")


def test_an_export_that_finds_the_disk_full_is_told_and_the_version_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, real_spec(), export=True)
    trainer, models = site.trainer(), site.store.root / "models"
    report = trainer.do(site.round(1))
    trainer.afterwards(report)
    before = Slots(models).versions()

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("export.model.versions.fsync_path", full)
        trainer.afterwards(report)
    assert Slots(models).versions() == before
    (failed,) = site.events("export_failed")
    assert failed["round"] == 1
    assert "No space left" in str(failed["detail"])
    trainer.afterwards(report)
    assert len(Slots(models).versions()) == len(before) + 1


def test_a_model_that_the_gate_refuses_leaves_the_one_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, real_spec(), export=True)
    trainer = site.trainer()
    trainer.afterwards(trainer.do(site.round(1)))

    def refuse(*_: object, **__: object) -> None:
        raise GateError("worse than version 0001")

    monkeypatch.setattr("export.build.install_model.pass_gate", refuse)
    assert trainer.do(ChooseModel(site.spec.digest, site.aggregate)) == Chosen(site.aggregate, succeeded=True)
    outcome = site.store.finalised()
    assert outcome["gate"] == "worse than version 0001"
    assert outcome["model_dir"] == str(site.store.root / "models" / "0001")
    assert outcome["accuracy_onnx"] == read_manifest(Path(str(outcome["model_dir"]))).verification.accuracy_onnx


def test_variants_of_the_chosen_model_are_judged_by_validation_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, real_spec(), export=True)
    site.config = site.config.model_copy(update={"export": ExportSection()})
    monkeypatch.setattr("export.build.variants.TIMING_S", 0.02)
    trainer = site.trainer()
    trainer.do(site.round(1))
    assert trainer.do(ChooseModel(site.spec.digest, site.aggregate)) == Chosen(site.aggregate, succeeded=True)
    outcome = site.store.finalised()
    manifest = read_manifest(Path(str(outcome["model_dir"])))
    assert sorted(one.name for one in manifest.variants) == ["fp16", "fp32", "int8", "ort", "trt_fp16"]
    assert {one.images for one in manifest.variants if one.accuracy is not None} == {outcome["val_images"]}
    checked = [one.name for one in manifest.variants if one.file is not None and one.name != "fp32"]
    assert {one.images for one in manifest.verification.variants} <= {manifest.verification.images}
    assert set(checked) <= {one.name for one in manifest.verification.variants}
    assert outcome["served_variant"] == manifest.serves


def test_a_device_that_never_trained_has_no_model_and_says_so(site: Site) -> None:
    assert site.trainer().do(ChooseModel(site.spec.digest, site.aggregate)) == Chosen(site.aggregate, succeeded=True)
    assert site.events("finalised")[0]["candidate"] is None


@pytest.fixture
def slow_site(tmp_path: Path) -> Site:
    return Site(tmp_path, real_spec(epochs=16))


def test_a_training_process_dies_with_its_agent(slow_site: Site) -> None:
    code = (
        "import pickle, sys\nfrom edge_client.training.trainer_handle import trainer_process\n"
        "config, command = pickle.loads(sys.stdin.buffer.read())\n"
        "import queue; reports = queue.SimpleQueue(); process = trainer_process(config, reports.put)\n"
        "print(process.start(), flush=True); reports.get(); process.send(command); reports.get()\n"
    )
    import pickle

    agent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdin is not None
    assert agent.stdout is not None
    with agent:
        agent.stdin.write(pickle.dumps((slow_site.config, slow_site.round())))
        agent.stdin.close()
        child = int(agent.stdout.readline())
        wait_until(lambda: len(slow_site.events("progress")) > 0, "training is under way", 60)
        agent.kill()
    wait_until(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child), "the child is gone", 10)
    with slow_site.store.locked("trainer.lock", wait_s=5.0):
        assert slow_site.store.generations.current() == (None, ())


def _is_zombie(pid: int) -> bool:
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_a_part_that_the_method_does_not_load_from_the_aggregate_goes_by_value(tmp_path: Path) -> None:
    spec = real_spec("fedmd_cg")
    assert (spec.upload, spec.with_base) == ((Part.CLASSIFIER, Part.GENERATOR), (Part.CLASSIFIER,))
    site = Site(tmp_path, spec)
    policy = site.config.policy.model_copy(update={"allow_report": frozenset(ReportField)})
    site.config = site.config.model_copy(update={"policy": policy})
    assert site.trainer().do(site.round()) == Committed(RoundAttempt(1, 1))
    codecs = inspect(site.update()).codecs
    assert codecs["classifier/1.weight"] == "i8-delta"
    assert codecs["generator/body.0.weight"] == "i8"
    assert {codec for codec in codecs.values() if is_delta(codec)} == {"i8-delta"}
