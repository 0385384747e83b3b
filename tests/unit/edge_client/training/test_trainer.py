"""The training process and what it does: one commit per round, the same bytes after a kill, the best model at the end."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.sums import SumBoard
from devices.power import Rail
from edge_client.store.checked_files import LEDGER_FILE, read_lines
from edge_client.store.private_store import PrivateStore
from edge_client.training import local_round as training
from edge_client.training import trainer_child
from edge_client.training.trainer_child import reason_for
from edge_client.training.workplace import Measured
from fedcg.files import checked_secret
from fedcg.learning.aggregation.sealed_means import range_of
from fedcg.learning.method import ClientState, LocalResult, Method
from fedcg.learning.methods.fedseal import TRAINED_FROM
from fedcg.learning.networks import NETWORKS
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import spec_root
from fedcg.learning.tensor_conversion import to_arrays, to_weights
from fedcg.learning.training.evaluation import evaluate
from fedcg.wire.artifacts.artifacts import Base, codecs_for, pack, read_header, unpack
from fedcg.wire.artifacts.inspection import inspect
from fedcg.wire.errors import CodecError
from fedcg.wire.messages.schemas import COORDINATOR, DeclineReason, RoundAttempt, SealedSum
from fedcg.wire.parts import DEFAULT_ALLOW_REPORT, DEFAULT_ALLOW_UPLOAD, Part, ReportField, TensorLayout
from fedcg.wire.sealed_numbers import added, number_count, to_numbers
from fedcg.wire.sums import SumRound, cohort_mask, tagged
from tests.support.coordinator.sum_cohort import Cohort
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import CLASSES, DEVICE, FEDERATION, aggregate_of, draw_images, header_of


def test_a_device_reckons_itself_which_round_a_sum_must_be_of(tmp_path: Path) -> None:
    """An honest aggregate that is served again would bring back numbers that were in another list's sum."""
    spec = real_spec("fedseal")
    site, names, secret, digest = Site(tmp_path, spec), ("a", "b", "c", "d"), b"c" * 32, "0" * 64
    site.share_cohort_secret()
    sealed = {part.value: np.zeros(number_count(spec.layouts[part]), np.uint32) for part in spec.sealed}
    mean = to_arrays(initial_parts(spec, secret, frozenset({Part.EXTRACTOR})))[Part.EXTRACTOR]
    at = SumRound(FEDERATION, 1, 1)
    plain = tagged(at, secret, to_numbers(mean, spec.layouts[Part.EXTRACTOR], range_of(spec), 0.4))
    sealed["extractor"] = added([plain, *(cohort_mask(at, secret, digest, name, len(plain)) for name in names)])
    classifier = to_arrays(initial_parts(spec, secret, frozenset({Part.CLASSIFIER})))
    sums = (SealedSum(round=1, attempt=1, parts=(Part.EXTRACTOR,), digest=digest, names=names),)
    for called in (1, 5):
        header = header_of(spec, RoundAttempt(called, 1), kind="aggregate", client=COORDINATOR)
        header = header.model_copy(update={"sums": sums})
        one = site.store.artifacts.put(pack(header, {**classifier, Part.SEALED: sealed}, spec.aggregate_codec))
        decoded = training.decode_aggregate(site.store, spec, get_method("fedseal"), one)
        for last, is_taken in ((1, True), (2, True), (5, False)):
            found = training.as_aggregate(site.trainer()._work, spec, decoded, last, has_state=True)
            assert (Part.EXTRACTOR in found.parts) == is_taken


def test_the_masks_of_an_attempt_hide_one_set_of_numbers_and_never_another(tmp_path: Path) -> None:
    """Else the difference of two updates is that of their numbers: a coordinator that goes back an attempt reads it without any help."""
    site, cohort, at = Site(tmp_path, real_spec("fedseal")), Cohort(3, DEVICE), SumRound(FEDERATION, 1, 1)
    site.configure(policy={"allow_upload": DEFAULT_ALLOW_UPLOAD | {Part.SEALED}})
    site.share_cohort_secret()
    board = SumBoard(at, cohort.names)
    for name, dealt in cohort.answer(board, cohort.announce(board, set(), at), set(), at):
        cohort.reply(name, dealt, at)
    site.store.save_sum_record("parts", cohort.disks[DEVICE].sum_record("parts"))
    for attempt in (1, 2):
        site.train(1, attempt)
    assert "may have been sent with these masks" in site.declined(DeclineReason.NO_SUM)
    assert {TRAINED_FROM + "classifier", TRAINED_FROM + "extractor"} <= site.state().extras.keys(), "a vote needs both"


def test_a_round_commits_private_state_snapshot_scores_and_update_together(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec(), shadow=1)
    site.train()
    state = site.state()
    assert set(state.slots) == {"personal", "shadow", "best", "best_shadow"}
    assert set(state.slots["personal"]) == set(NETWORKS)
    assert state.generation.round_attempt == RoundAttempt(1, 1)
    snapshot = site.store.generations.snapshot(state.generation)
    assert snapshot.counts()["test"] == 15
    assert snapshot.counts()["train"] + snapshot.counts()["val"] == 36
    base = Base(site.aggregate, site.brought())
    codecs = codecs_for(site.shared, "i8-delta", site.spec.upload)
    artifact = unpack(site.update(), site.shared, codecs=codecs, base=base)
    assert set(artifact.parts) == {Part.CLASSIFIER, Part.GENERATOR}
    for part, tensors in artifact.parts.items():
        for name, tensor in tensors.items():
            own, start = state.slots["personal"][part][name], base.parts[part][name]
            own = (
                np.zeros_like(own) if name.endswith("num_batches_tracked") else own
            )  # it would tell the number of images
            exact = artifact.header.codecs[f"{part.value}/{name}"] in ("f32", "i64")
            # A channel's scale is its largest step by 127, and half of it is the most that a number can be off.
            assert np.abs(tensor - own).max() <= (0.0 if exact else np.abs(own - start).max() / 127 * 0.51)
    assert artifact.header.base == site.aggregate
    assert site.report().examples == snapshot.counts()["train"]
    (told,) = site.events("committed")
    assert told["accuracy_personal"] == site.report().accuracy
    assert {"accuracy_local", "accuracy_common_local", "accuracy_common_personal", "consistency", "spread"} <= set(told)
    phases = [event["phase"] for event in site.events("phase_started")]
    assert phases == ["load", "classify", "generate", "shadow-classify", "evaluate"]
    assert all(event["step"] > 0 and event["pid"] == os.getpid() for event in site.events("progress"))


def test_each_round_that_is_trained_is_in_the_ledger_once_with_its_energy_where_the_board_measures_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, real_spec())
    trainer = site.trainer()
    trainer.do(site.round())
    trainer.do(site.round())  # committed already
    assert site.report().cost is None
    monkeypatch.setattr(trainer_child, "read_power", lambda: Rail("VDD_IN", 5.0))
    site.configure(policy={"allow_report": frozenset({ReportField.EXAMPLES, ReportField.COST})})
    site.train(2)
    first, second = read_lines(site.store.root / LEDGER_FILE)
    assert [line["round"] for line in (first, second)] == [1, 2]
    assert first["joules"] is first["rail"] is None
    assert second["joules"] == pytest.approx(5.0 * second["seconds"], rel=0.2, abs=0.2)
    assert second["update_bytes"] == len(site.update())
    cost = site.report().cost
    assert cost is not None
    assert 0 < cost.seconds <= second["seconds"]
    assert cost.joules == pytest.approx(5.0 * cost.seconds, rel=0.2, abs=0.2)
    assert second["images"] == site.store.generations.snapshot(site.state().generation).counts()["train"]


def test_the_shadow_trains_as_if_alone_and_leaves_the_update_unchanged(tmp_path: Path) -> None:
    with_shadow, without = Site(tmp_path / "a", real_spec(), shadow=1), Site(tmp_path / "b", real_spec())
    alone = Site(tmp_path / "c", real_spec("local"))
    for site in (with_shadow, without, alone):
        site.train()
    sent, reference = (read_header(each.update()) for each in (with_shadow, without))
    assert with_shadow.report().shadow == with_shadow.events("committed")[0]["accuracy_local"] is not None
    same = with_shadow.report().only(DEFAULT_ALLOW_REPORT)  # the device without a shadow allows no more
    assert sent.model_copy(update={"report": same}) == reference
    assert with_shadow.update().endswith(without.update()[-1000:])
    assert set(without.state().slots) == {"personal", "best"}
    assert without.events("committed")[0]["accuracy_local"] is None
    assert with_shadow.weights("shadow") == alone.weights()


def test_a_shadow_of_every_second_round_is_the_model_of_these_rounds_alone_and_reported_in_each(tmp_path: Path) -> None:
    site, alone = Site(tmp_path / "a", real_spec(), shadow=2), Site(tmp_path / "b", real_spec("local"))
    slots, told = [], []
    for number in (1, 2, 3):
        site.trainer().do(site.round(number))  # each time another process
        slots.append(site.weights("shadow"))
        told.append(site.report().shadow)
        if number != 2:
            alone.train(number)
            assert slots[-1] == alone.weights(), number
    assert slots[0] == slots[1]
    assert told == [event["accuracy_local"] for event in site.events("committed")]
    assert None not in told
    assert {event["round"] for event in site.events("progress") if event["phase"] == "shadow-classify"} == {1, 3}


def test_the_downloaded_model_and_accuracies_by_class_are_reported_where_the_owner_allows_them(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec(), shadow=1)

    def allow(fields: frozenset[ReportField]) -> None:
        site.configure(policy={"allow_report": fields})

    allow(DEFAULT_ALLOW_REPORT)
    site.train(1)
    assert site.report().fields() <= DEFAULT_ALLOW_REPORT
    kept = to_weights(site.state().slots["personal"])
    fields = frozenset({ReportField.EXAMPLES, ReportField.DOWNLOADED, ReportField.PER_CLASS})
    allow(fields)
    site.train(2)
    told = site.report()
    assert told.fields() == fields
    # The downloaded model of round 2: the extractor as round 1 left it, with the aggregate's classifier.
    parts = {Part.EXTRACTOR: kept[Part.EXTRACTOR], Part.CLASSIFIER: to_weights(site.brought())[Part.CLASSIFIER]}
    expected = evaluate(site.spec, parts, site.data(2).test)
    assert told.downloaded == expected.accuracy
    assert told.per_class is not None
    shares = [right / every for right, every in zip(expected.correct_per_class, expected.images_per_class, strict=True)]
    assert told.per_class.downloaded == pytest.approx(shares, abs=1e-4)
    assert told.per_class.shadow is None  # `shadow` is not allowed
    assert len(told.per_class.accuracy or ()) == len(site.spec.classes)


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


def test_devices_differ_by_their_secret_and_a_repetition_by_its_attempt(tmp_path: Path) -> None:
    sites = {name: Site(tmp_path / name, real_spec()) for name in ("a", "other secret", "other attempt")}
    (sites["other secret"].store.root / "secrets" / "device.key").write_bytes(checked_secret(b"e" * 32))
    for name, site in sites.items():
        site.train(1, 2 if name == "other attempt" else 1)
    extractors = [site.weights("personal", Part.EXTRACTOR) for site in sites.values()]
    assert extractors[0] not in extractors[1:]


def test_the_cohort_secret_decides_where_private_parts_start_and_only_those(tmp_path: Path) -> None:
    spec = real_spec(lr=1e-12, gan_lr=1e-12, weight_decay=0.0)
    plain, cohort = Site(tmp_path / "a", spec), Site(tmp_path / "b", spec)
    cohort.share_cohort_secret()
    for site in (plain, cohort):
        site.train()
    slots = [site.state().slots["personal"] for site in (plain, cohort)]

    def same(part: Part, name: str) -> bool:
        return bool(np.allclose(slots[0][part][name], slots[1][part][name], atol=1e-6))

    assert not any(same(Part.EXTRACTOR, name) for name in slots[0][Part.EXTRACTOR])
    assert all(same(Part.CLASSIFIER, name) for name in slots[0][Part.CLASSIFIER])


def test_a_method_that_shares_nothing_sends_only_its_report(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec("local"))
    site.train()
    seen = inspect(site.update())
    assert seen.tensors == {}
    assert seen.report_fields == {"examples", "accuracy", "loss", "health"}


def test_a_store_that_may_not_be_written_fails_the_attempt_with_the_fix_and_no_traceback(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/srv/store/accepted.json")

    monkeypatch.setattr(PrivateStore, "accept_snapshot", forbidden)
    detail = site.declined(DeclineReason.TRAINING_FAILED)
    assert "read and write /srv/store/accepted.json (chown, chmod)" in detail
    assert "Traceback" not in caplog.text


def test_a_round_that_diverges_changes_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec(lr=1e6))
    site.declined(DeclineReason.DIVERGED)
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
    site.declined(DeclineReason.DIVERGED)
    assert site.store.generations.current() == (None, ())


def test_a_diverging_shadow_stands_still_and_the_round_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, real_spec("fedsplit"), shadow=1)
    site.train(1)
    before = site.weights("shadow")
    alone = get_method("local")

    def lookup(name: str) -> Method:
        def broken(*arguments: Any) -> LocalResult:
            return _spoilt(alone.local_round(*arguments))

        return replace(alone, local_round=broken) if name == "local" else get_method(name)

    monkeypatch.setattr(training, "get_method", lookup)
    site.train(2)
    assert site.weights("shadow") == before
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
    site.declined(DeclineReason.SPEC_REFUSED)


@pytest.mark.parametrize(
    ("changes", "why"), [({"federation": "letters"}, "letters"), ({"aggregate_codec": "f32"}, "coded")]
)
def test_an_aggregate_of_another_federation_or_codec_stays_out(site: Site, changes: dict[str, Any], why: str) -> None:
    other = site.spec.model_copy(update=changes)
    site.aggregate = site.store.artifacts.put(aggregate_of(site.brought(), other, 0))
    assert why in site.declined(DeclineReason.TRAINING_FAILED)


def test_images_that_come_after_a_round_was_accepted_count_from_the_next_round_on(tmp_path: Path) -> None:
    calm, growing = Site(tmp_path / "a", real_spec()), Site(tmp_path / "b", real_spec())
    site = growing
    kept = site.data(1).snapshot  # as a trainer does that is killed right after
    draw_images(site.root / "data" / "train", 4, seed=9)
    for one in (calm, growing):
        one.train(1)
    assert calm.update() == growing.update()
    growing.train(2)
    grown = site.store.generations.snapshot(site.state().generation)
    assert len(grown.files) == len(kept.files) + 12
    before = {file.path: file.split for file in kept.files}
    assert all(before.get(file.path, file.split) == file.split for file in grown.files)


def test_a_changed_file_of_the_snapshot_fails_the_attempt_and_the_next_takes_a_new_snapshot(site: Site) -> None:
    site.data(1)
    victim = next((site.root / "data" / "train" / CLASSES[0]).glob("*.png"))
    victim.write_bytes((site.root / "data" / "test" / CLASSES[1] / "2-000.png").read_bytes())
    detail = site.declined(DeclineReason.NO_DATA)
    assert "changed since this round was accepted" in detail
    assert victim.name not in detail
    site.train(1, 2)


def test_the_best_model_by_validation_is_kept_with_the_loss_deciding_between_equals() -> None:
    best = Measured(val=0.5, val_loss=1.0, test=0.9)
    assert Measured(val=0.6, val_loss=9.0, test=0.1).beats(best)
    assert Measured(val=0.5, val_loss=0.9).beats(best)
    assert not Measured(val=0.5, val_loss=1.0, test=1.0).beats(best)
    assert not Measured(val=0.4, val_loss=0.1).beats(best)
    assert Measured(test=0.1).beats(best)  # without validation images the newer one counts
    assert best.beats(None)
    assert Measured.from_scores(best.as_scores("best"), "best") == best
