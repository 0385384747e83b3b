"""A new version is a candidate first: what starts, ends and resumes the stage, on a clock of the test."""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from export.errors import SlotError
from export.model.manifest import read_manifest, write_manifest
from export.model.runtime import Floats, Model
from export.model.versions import Slots
from export.serving.judge import FAILURES, Progress, Stage, Verdict
from export.serving.live_model import PENDING, RECORD_NAME, Candidate, ServedModel
from fedcg.imaging import Pixels
from tests.support.learning.export_models import CLASSES, install_model, make_spec
from tests.support.waiting import wait_until

IMAGES = [np.full((20, 24, 3), level, dtype=np.uint8) for level in (40, 90, 200)]


class Clock:
    """Seconds that only a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 0001 to 0003 of the same weights; 0001 is in use, and nothing was before it."""
    root = tmp_path_factory.mktemp("three") / "models"
    for number in (1, 2, 3):
        install_model(root, seed=1, round_number=number)
    for _ in range(2):
        Slots(root).rollback()
    return root


@pytest.fixture
def root(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "models"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _started(root: Path, clock: Clock, *, watch: int = 0) -> ServedModel:
    """A server that has looked once."""
    stage = Stage(images=6, share=1.0, limit_s=600.0)
    models = ServedModel(root, threads=1, warm_up=(1,), stage=stage, watch=watch, clock=clock)
    models.refresh()
    return models


def _states(models: ServedModel) -> tuple[str | None, str | None]:
    """The version in service, and the candidate's."""
    current, candidate = models.current, models.candidate
    return current.version if current else None, candidate.model.version if candidate else None


def _choose(models: ServedModel, root: Path, version: str) -> tuple[str | None, str | None]:
    Slots(root).use(version)
    models.refresh()
    return _states(models)


def _compare(models: ServedModel, requests: int) -> None:
    """Requests that are answered and compared, one after the other."""
    candidate, served = models.candidate, models.current
    assert candidate is not None
    assert served is not None
    for _ in range(requests):
        models.answered(served, IMAGES, served.predict(IMAGES))
        _wait_for_progress(candidate, candidate.progress)


def _wait_for_progress(candidate: Candidate, before: Progress) -> None:
    wait_until(lambda: (candidate.verdict(), candidate.progress)[1] != before, "a further request is compared")


def _fail(_: Model, images: Sequence[Pixels]) -> Floats:
    raise RuntimeError("out of order")


def test_a_successor_is_compared_on_the_answered_images_and_then_takes_the_requests(root: Path, clock: Clock) -> None:
    models = _started(root, clock)
    assert _states(models) == ("0001", None)
    assert _choose(models, root, "0002") == ("0001", "0002")
    _compare(models, 9)
    assert models.candidate is not None
    assert models.candidate.progress == Progress(images=27, agreement=1.0, failures=0)
    assert (root / RECORD_NAME).exists()
    models.refresh()
    assert _states(models) == ("0002", None)
    assert not (root / RECORD_NAME).exists()
    assert Slots(root).current().name == "0002"


def test_nobody_is_answered_by_the_candidate_before_the_end_of_its_stage_is_on_disk(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = _started(root, clock)
    _choose(models, root, "0002")
    _compare(models, 9)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("export.serving.live_model.note_serving", die)
    with pytest.raises(KeyboardInterrupt):
        models.refresh()
    assert _states(models)[0] == "0001"


def test_a_candidate_that_fails_is_taken_back_and_serves_at_once_when_it_is_chosen_again_and_is_not_judged_twice(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = _started(root, clock, watch=len(IMAGES))
    assert models.current is not None
    models.answered(models.current, IMAGES, models.current.predict(IMAGES))
    assert models.look() == []  # enough to compare a later version with
    _choose(models, root, "0002")
    sound, bad = Model.predict, models.candidate
    assert bad is not None
    with monkeypatch.context() as patch:
        patch.setattr(Model, "predict", lambda self, images: (_fail if self is bad.model else sound)(self, images))
        _compare(models, FAILURES)
    [verdict] = models.look()
    assert (verdict.version, verdict.kind) == ("0002", "errors")
    assert _states(models) == ("0001", None)
    assert Slots(root).current().name == "0001"
    assert models.taken_back == f"version 0002: {verdict.reason}"
    assert models.look() == []
    assert not (root / RECORD_NAME).exists()
    assert _choose(models, root, "0002") == ("0002", None)
    for _ in range(FAILURES):
        models.failed(models.current)
    assert models.look() == []
    assert _states(models) == ("0002", None)


def test_a_version_that_does_badly_in_service_is_taken_back_by_a_look(root: Path, clock: Clock) -> None:
    models = _started(root, clock, watch=len(IMAGES))
    assert models.current is not None
    models.answered(models.current, IMAGES, models.current.predict(IMAGES))
    assert models.look() == []
    _choose(models, root, "0002")
    clock.now_s += 600
    assert models.look() == []
    assert _states(models) == ("0002", None)
    for _ in range(FAILURES):
        models.failed(models.current)
    assert models.look() == [Verdict("0002", "errors", f"{FAILURES} of its first {FAILURES} requests failed")]
    assert _states(models) == ("0001", None)


def test_a_candidate_whose_values_are_not_numbers_counts_as_failing(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = _started(root, clock)
    _choose(models, root, "0002")
    sound, bad = Model.predict, models.candidate
    assert bad is not None
    monkeypatch.setattr(
        Model, "predict", lambda self, images: sound(self, images) * (np.nan if self is bad.model else 1)
    )
    _compare(models, 2)
    assert bad.progress == Progress(images=0, agreement=None, failures=2)


def test_a_bad_candidate_does_not_serve_where_the_pointer_cannot_be_moved(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = _started(root, clock)
    _choose(models, root, "0002")
    assert models.candidate is not None
    verdict = Verdict("0002", "latency", "it takes too long")
    monkeypatch.setattr(models.candidate, "verdict", lambda: verdict)

    def full(_: Slots) -> Path:
        raise SlotError("the disk is full")

    monkeypatch.setattr(Slots, "rollback", full)
    for _ in range(2):
        assert models.refresh() is None
        assert _states(models) == ("0001", None)
    assert models.refused == "version 0002: it takes too long"


def test_with_little_traffic_it_takes_the_requests_when_the_time_is_up(root: Path, clock: Clock) -> None:
    models = _started(root, clock)
    _choose(models, root, "0002")
    clock.now_s += 599
    models.refresh()
    assert _states(models) == ("0001", "0002")
    clock.now_s += 1
    models.refresh()
    assert _states(models) == ("0002", None)


def test_a_newer_version_replaces_the_candidate_and_has_the_rest_of_its_time(root: Path, clock: Clock) -> None:
    models = _started(root, clock)
    _choose(models, root, "0002")
    _compare(models, 1)
    clock.now_s += 400
    assert _choose(models, root, "0003") == ("0001", "0003")
    assert models.candidate is not None
    assert models.candidate.progress.images == 0
    clock.now_s += 199
    models.refresh()
    assert _states(models) == ("0001", "0003")
    clock.now_s += 1
    models.refresh()
    assert _states(models) == ("0003", None)


def test_a_stage_after_another_has_its_whole_time(root: Path, clock: Clock) -> None:
    models = _started(root, clock)
    _choose(models, root, "0002")
    clock.now_s += 600
    models.refresh()
    assert _choose(models, root, "0003") == ("0002", "0003")
    clock.now_s += 599
    models.refresh()
    assert _states(models) == ("0002", "0003")


def test_the_candidate_is_dropped_when_the_pointer_returns_to_the_version_in_service(root: Path, clock: Clock) -> None:
    models = _started(root, clock)
    served = models.current
    _choose(models, root, "0002")
    Slots(root).rollback()
    models.refresh()
    assert _states(models) == ("0001", None)
    assert models.current is served  # it was not loaded again
    assert not (root / RECORD_NAME).exists()


def test_a_rollback_from_the_version_in_service_takes_effect_at_once(root: Path, clock: Clock) -> None:
    models = _started(root, clock)
    _choose(models, root, "0002")
    clock.now_s += 600
    models.refresh()
    assert _states(models) == ("0002", None)
    Slots(root).rollback()
    models.refresh()
    assert _states(models) == ("0001", None)


@pytest.mark.parametrize("classes", [("ant", "bee", "dog"), ("bee", "cat", "ant")], ids=["others", "in another order"])
def test_a_version_that_cannot_be_compared_waits_until_a_person_chooses_it(
    root: Path, clock: Clock, classes: tuple[str, ...]
) -> None:
    models = _started(root, clock)
    install_model(root, spec=make_spec().model_copy(update={"classes": classes}))
    rejected = models.refresh()
    assert rejected is not None
    assert (rejected.version, rejected.kind) == ("0004", "incomparable")
    assert _states(models) == ("0001", None)
    assert Slots(root).current().name == "0001"
    assert f"`fedcg model use {root} 0004` puts it in service" in models.taken_back
    assert models.refresh() is None
    assert _choose(models, root, "0004") == ("0004", None)


@pytest.mark.parametrize("is_renamed", [True, False], ids=["only its names are permuted", "its outputs are too"])
def test_classes_in_another_order_are_compared_by_their_names(root: Path, clock: Clock, is_renamed: bool) -> None:
    for version in Slots(root).versions():
        _rewrite(version.directory, accuracy_onnx=0.95)
    models = _started(root, clock)
    permuted = ("bee", "cat", "ant")
    directory = Path(shutil.copytree(root / "0003", root / "0004"))
    _rewrite(directory, classes=permuted)
    assert _choose(models, root, "0004") == ("0001", "0004")
    candidate = models.candidate
    assert candidate is not None
    if not is_renamed:  # a sound export of the same weights with the spec's classes in another order
        order, plain = [CLASSES.index(name) for name in permuted], candidate.model.predict
        object.__setattr__(candidate.model, "predict", lambda images: plain(images)[:, order])
    _compare(models, 9)
    verdict = models.refresh()
    if is_renamed:
        assert verdict is not None
        assert (verdict.kind, _states(models)) == ("drift", ("0001", None))
    else:
        assert (verdict, candidate.progress.agreement, _states(models)) == (None, 1.0, ("0004", None))


def _rewrite(directory: Path, *, accuracy_onnx: float = 0.95, **fields: object) -> None:
    manifest = read_manifest(directory)
    verification = manifest.verification.model_copy(update={"accuracy_onnx": accuracy_onnx})
    write_manifest(directory, manifest.model_copy(update={"verification": verification, **fields}))


def test_memory_that_is_too_small_for_two_models_refuses_the_candidate(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = _started(root, clock)

    def too_large(*_: object, **__: object) -> Model:
        raise MemoryError

    monkeypatch.setattr(Model, "load", too_large)
    assert _choose(models, root, "0002") == ("0001", None)
    assert "not enough memory for it beside the one in service" in models.refused


def test_when_the_version_in_service_does_badly_itself_the_candidate_takes_the_requests(
    root: Path, clock: Clock
) -> None:
    models = _started(root, clock)
    _choose(models, root, "0002")
    assert not models.take_back(Verdict("0001", "errors", "5 of its first 9 requests failed"))
    assert _states(models) == ("0002", None)
    assert Slots(root).current().name == "0002"


def test_a_restart_in_the_stage_goes_on_with_the_version_that_answered(root: Path, clock: Clock) -> None:
    models = _started(root, clock)
    _choose(models, root, "0002")
    models.close()
    again = _started(root, clock)
    assert _states(again) == ("0001", "0002")
    _compare(again, 9)
    again.refresh()
    assert _states(_started(root, clock)) == ("0002", None)


@pytest.mark.parametrize("what", ["its version is gone", "the record is damaged", "a rollback in between", "no stage"])
def test_a_restart_serves_the_version_in_use_where_the_stage_cannot_go_on(root: Path, clock: Clock, what: str) -> None:
    models = _started(root, clock)
    _choose(models, root, "0003")
    models.close()
    if what == "its version is gone":
        shutil.rmtree(root / "0001")
    elif what == "the record is damaged":
        (root / RECORD_NAME).write_text('{"format": 1, "version": "../0001"}')
    elif what == "a rollback in between":
        Slots(root).rollback()
    if what == "no stage":
        again = ServedModel(root, threads=1, warm_up=(1,))
        again.refresh()
    else:
        again = _started(root, clock)
    assert _states(again) == ("0001" if what == "a rollback in between" else "0003", None)
    assert not (root / RECORD_NAME).exists()


def test_offering_images_never_waits_and_leaves_out_what_comes_while_the_candidate_is_busy(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, model = (Model.load(root / version, threads=1) for version in ("0001", "0002"))
    sound, opened, running = Model.predict, threading.Event(), threading.Event()

    def gated(self: Model, images: Sequence[Pixels]) -> Floats:
        running.set()
        assert opened.wait(30)
        return sound(self, images)

    monkeypatch.setattr(Model, "predict", gated)
    chances = iter([0.5, 0.49, *[0.0] * 6])
    candidate = Candidate(model, current, Stage(share=0.5), 0.0, clock=lambda: 1.0, chance=lambda: next(chances))
    candidate.offer(current, IMAGES)
    assert not running.is_set()  # not in the share
    candidate.offer(model, IMAGES)  # answered by another model
    for _ in range(6):
        candidate.offer(current, IMAGES)
    opened.set()
    wait_until(lambda: (candidate.verdict(), candidate.progress.images)[1] == PENDING * 3, "what was kept is compared")
    candidate.close()
    candidate.offer(current, IMAGES)
    assert next(chances, None) is None
    assert candidate.verdict() is None
    assert candidate.progress.images == PENDING * 3
