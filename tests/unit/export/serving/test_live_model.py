"""The model in service follows the version that is chosen, which is a candidate first; a bad version changes nothing."""

import re
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from export.errors import SlotError
from export.model.manifest import read_manifest, write_manifest
from export.model.runtime import Floats, Model
from export.model.versions import ModelVersions
from export.serving.judge import FAILURES, CandidateStage, Progress, VersionFault
from export.serving.live_model import PENDING, Candidate, ServedModel
from fedcg.imaging import Pixels
from tests.support.clock import Clock
from tests.support.learning.export_models import CLASSES, install_model, make_spec
from tests.support.present import present
from tests.support.raising import raising
from tests.support.waiting import wait_until


@pytest.fixture
def root(installed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(installed, tmp_path / "models"))


class Watched:
    """A served model and what it told of."""

    def __init__(self, directory: Path) -> None:
        self.outcomes: Counter[str] = Counter()
        self.models = ServedModel(directory, threads=1, warm_up=(1, 3), observe=lambda one: self.outcomes.update([one]))

    def refresh(self) -> str:
        """The version in service after a look; "" without one."""
        self.models.refresh()
        return self.models.current.version if self.models.current else ""


def test_a_version_without_numbers_or_that_does_not_run_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Model, images: Sequence[Pixels]) -> Floats:
        raise RuntimeError(f"no memory for {len(images)}")

    for predict, told in (
        (lambda _, images: np.full((len(images), 3), np.nan, dtype=np.float32), "not finite numbers"),
        (fail, "cannot run it .no memory for 1."),
    ):
        watched = Watched(root)
        monkeypatch.setattr(Model, "predict", predict)
        assert watched.refresh() == ""
        assert re.search(told, watched.models.refused)


@pytest.mark.parametrize("missing", ["folder", "versions", "chosen version", "sound bytes"])
def test_a_model_that_comes_later_is_served_then(root: Path, missing: str) -> None:
    aside, path = root.with_name("aside"), root / "0002" / "model.onnx"
    sound = path.read_bytes()
    if missing == "sound bytes":
        path.write_bytes(sound[:-1])
    else:
        (root / "0002" if missing == "chosen version" else root).rename(aside)
    if missing == "versions":
        root.mkdir()
    watched = Watched(root)
    assert [watched.refresh(), watched.refresh()] == ["", ""]
    assert str(root) in watched.models.refused
    assert watched.outcomes == {"refused": 1}
    if missing == "sound bytes":
        path.write_bytes(sound)
    else:
        aside.rename(root / "0002" if missing == "chosen version" else root)
    assert (watched.refresh(), watched.models.refused) == ("0002", "")


def test_one_model_without_versions_is_served_under_its_folders_name(root: Path) -> None:
    assert Watched(root / "0001").refresh() == "0001"


IMAGES = [np.full((20, 24, 3), level, dtype=np.uint8) for level in (40, 90, 200)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 0001 to 0003 of the same weights; 0001 is in use, and nothing was before it."""
    three_root = tmp_path_factory.mktemp("three") / "models"
    for number in (1, 2, 3):
        install_model(three_root, seed=1, round_number=number)
    for _ in range(2):
        ModelVersions(three_root).rollback()
    return three_root


@pytest.fixture
def three_root(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "models"))


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def _started(three_root: Path, clock: Clock, *, watch: int = 0) -> ServedModel:
    """A server that has looked once."""
    stage = CandidateStage(images=6, share=1.0, limit_s=600.0)
    models = ServedModel(three_root, threads=1, warm_up=(1,), stage=stage, watch=watch, clock=clock)
    models.refresh()
    return models


def _states(models: ServedModel) -> tuple[str | None, str | None]:
    """The version in service, and the candidate's."""
    current, candidate = models.current, models.candidate
    return current.version if current else None, candidate.model.version if candidate else None


def _choose(models: ServedModel, three_root: Path, version: str) -> tuple[str | None, str | None]:
    ModelVersions(three_root).use(version)
    models.refresh()
    return _states(models)


def _after(models: ServedModel, clock: Clock, seconds: float) -> tuple[str | None, str | None]:
    clock.now += seconds
    models.refresh()
    return _states(models)


@pytest.fixture
def staged(three_root: Path, clock: Clock) -> ServedModel:
    """A server of version 0001 whose candidate is 0002."""
    models = _started(three_root, clock)
    assert _choose(models, three_root, "0002") == ("0001", "0002")
    return models


def _compare(models: ServedModel, requests: int) -> None:
    """Requests that are answered and compared, one after the other."""
    candidate, served = present(models.candidate), present(models.current)
    for _ in range(requests):
        models.answered(served, IMAGES, served.predict(IMAGES))
        before = candidate.progress
        wait_until(lambda: (candidate.verdict(), candidate.progress)[1] != before, "a further request is compared")  # noqa: B023


def test_a_first_version_has_nothing_to_return_to(three_root: Path, clock: Clock) -> None:
    models = _started(three_root, clock)
    for version in ("0001", "0007"):  # the one in use, and another
        assert not models.take_back(VersionFault(version, "drift", "told so"))
    assert (models.taken_back, ModelVersions(three_root).current().name) == ("", "0001")


def test_nobody_is_answered_by_the_candidate_before_the_end_of_its_stage_is_on_disk(
    staged: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compare(staged, 9)

    assert present(ModelVersions(staged.directory).pointer()).answers == "0001"
    monkeypatch.setattr(ModelVersions, "note_answering", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        staged.refresh()
    assert _states(staged)[0] == "0001"


def test_a_candidate_that_fails_is_taken_back_and_serves_at_once_when_it_is_chosen_again_and_is_not_judged_twice(
    three_root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = _started(three_root, clock, watch=len(IMAGES))
    served = present(models.current)
    models.answered(served, IMAGES, served.predict(IMAGES))
    assert models.look() == []  # enough to compare a later version with
    _choose(models, three_root, "0002")
    sound, bad = Model.predict, present(models.candidate)
    with monkeypatch.context() as patch:
        patch.setattr(
            Model,
            "predict",
            lambda self, images: (raising(RuntimeError("out of order")) if self is bad.model else sound)(self, images),
        )
        _compare(models, FAILURES)
    [verdict] = models.look()
    assert (verdict.version, verdict.kind) == ("0002", "errors")
    assert _states(models) == ("0001", None)
    assert ModelVersions(three_root).current().name == "0001"
    assert models.taken_back == f"version 0002: {verdict.reason}"
    assert models.look() == []
    pointer = present(ModelVersions(three_root).pointer())
    assert (pointer.answers, pointer.returned) == (None, ("0002", "errors"))
    assert _choose(models, three_root, "0002") == ("0002", None)
    for _ in range(FAILURES):
        models.failed(present(models.current))
    assert models.look() == []
    assert _states(models) == ("0002", None)


def test_a_candidate_with_nan_values_counts_as_failing(staged: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, bad = Model.predict, present(staged.candidate)
    monkeypatch.setattr(
        Model, "predict", lambda self, images: sound(self, images) * (np.nan if self is bad.model else 1)
    )
    _compare(staged, 2)
    assert bad.progress == Progress(images=0, agreement=None, failures=2)


def test_a_bad_candidate_does_not_serve_where_the_pointer_cannot_be_moved(
    staged: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = VersionFault("0002", "latency", "it takes too long")
    monkeypatch.setattr(present(staged.candidate), "verdict", lambda: verdict)

    monkeypatch.setattr(ModelVersions, "rollback", raising(SlotError("the disk is full")))
    for _ in range(2):
        assert staged.refresh() is None
        assert _states(staged) == ("0001", None)
    assert staged.refused == "version 0002: it takes too long"


def test_with_little_traffic_it_serves_when_the_time_is_up_a_next_one_has_its_whole_time_and_a_rollback_is_at_once(
    staged: ServedModel, three_root: Path, clock: Clock
) -> None:
    assert _after(staged, clock, 599) == ("0001", "0002")
    assert _after(staged, clock, 1) == ("0002", None)
    assert _choose(staged, three_root, "0003") == ("0002", "0003")
    assert _after(staged, clock, 599) == ("0002", "0003")
    for version in ("0002", "0001"):
        ModelVersions(three_root).rollback()
        assert _after(staged, clock, 0) == (version, None)


def test_a_newer_version_replaces_the_candidate_and_has_the_rest_of_its_time(
    staged: ServedModel, three_root: Path, clock: Clock
) -> None:
    _compare(staged, 1)
    clock.now += 400
    assert _choose(staged, three_root, "0003") == ("0001", "0003")
    assert present(staged.candidate).progress.images == 0
    assert _after(staged, clock, 199) == ("0001", "0003")
    assert _after(staged, clock, 1) == ("0003", None)


def test_a_candidate_is_dropped_when_the_pointer_returns_to_the_version_in_use(three_root: Path, clock: Clock) -> None:
    models = _started(three_root, clock)
    served = models.current
    _choose(models, three_root, "0002")
    ModelVersions(three_root).rollback()
    assert _after(models, clock, 0) == ("0001", None)
    assert models.current is served  # it was not loaded again
    assert present(ModelVersions(three_root).pointer()).answers is None


@pytest.mark.parametrize("classes", [("ant", "bee", "dog"), ("bee", "cat", "ant")], ids=["others", "in another order"])
def test_a_version_that_cannot_be_compared_waits_until_a_person_chooses_it(
    three_root: Path, clock: Clock, classes: tuple[str, ...]
) -> None:
    models = _started(three_root, clock)
    install_model(three_root, spec=make_spec().model_copy(update={"classes": classes}))
    rejected = present(models.refresh())
    assert (rejected.version, rejected.kind) == ("0004", "incomparable")
    assert _states(models) == ("0001", None)
    assert ModelVersions(three_root).current().name == "0001"
    assert f"put it in service with `fedcg model use {three_root} 0004`" in models.taken_back
    assert models.refresh() is None
    assert _choose(models, three_root, "0004") == ("0004", None)


@pytest.mark.parametrize("is_renamed", [True, False], ids=["only its names are permuted", "its outputs are too"])
def test_classes_in_another_order_are_compared_by_their_names(three_root: Path, clock: Clock, is_renamed: bool) -> None:
    for version in ModelVersions(three_root).versions():
        _rewrite(version.directory, accuracy_onnx=0.95)
    models = _started(three_root, clock)
    permuted = ("bee", "cat", "ant")
    _rewrite(Path(shutil.copytree(three_root / "0003", three_root / "0004")), classes=permuted)
    assert _choose(models, three_root, "0004") == ("0001", "0004")
    candidate = present(models.candidate)
    if not is_renamed:  # a sound export of the same weights with the spec's classes in another order
        order, plain = [CLASSES.index(name) for name in permuted], candidate.model.predict
        object.__setattr__(candidate.model, "predict", lambda images: plain(images)[:, order])
    _compare(models, 9)
    verdict = models.refresh()
    if is_renamed:
        assert (present(verdict).kind, _states(models)) == ("drift", ("0001", None))
    else:
        assert (verdict, candidate.progress.agreement, _states(models)) == (None, 1.0, ("0004", None))


def _rewrite(directory: Path, *, accuracy_onnx: float = 0.95, **fields: object) -> None:
    manifest = read_manifest(directory)
    verification = manifest.verification.model_copy(update={"accuracy_onnx": accuracy_onnx})
    write_manifest(directory, manifest.model_copy(update={"verification": verification, **fields}))


def test_memory_that_is_too_small_for_two_models_refuses_the_candidate(
    three_root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = _started(three_root, clock)

    monkeypatch.setattr(Model, "load", raising(MemoryError))
    assert _choose(models, three_root, "0002") == ("0001", None)
    assert "not enough memory for it next to the one in service" in models.refused


def test_when_the_version_in_service_does_badly_itself_the_candidate_takes_the_requests(
    staged: ServedModel, three_root: Path
) -> None:
    assert not staged.take_back(VersionFault("0001", "errors", "5 of its first 9 requests failed"))
    assert _states(staged) == ("0002", None)
    assert ModelVersions(three_root).current().name == "0002"


@pytest.mark.parametrize("what", ["its version is gone", "the record is damaged", "a rollback in between", "no stage"])
def test_a_restart_serves_the_version_in_use_if_no_stage_can_go_on(three_root: Path, clock: Clock, what: str) -> None:
    models = _started(three_root, clock)
    _choose(models, three_root, "0003")
    models.close()
    if what == "its version is gone":
        shutil.rmtree(three_root / "0001")
    elif what == "the record is damaged":
        ModelVersions(three_root).note_answering("../0001")
    elif what == "a rollback in between":
        ModelVersions(three_root).rollback()
    if what == "no stage":
        again = ServedModel(three_root, threads=1, warm_up=(1,))
        again.refresh()
    else:
        again = _started(three_root, clock)
    assert _states(again) == ("0001" if what == "a rollback in between" else "0003", None)
    assert present(ModelVersions(three_root).pointer()).answers is None


def test_offering_images_never_waits_and_leaves_out_what_comes_while_the_candidate_is_busy(
    three_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, model = (Model.load(three_root / version, threads=1) for version in ("0001", "0002"))
    sound, opened, running = Model.predict, threading.Event(), threading.Event()

    def gated(self: Model, images: Sequence[Pixels]) -> Floats:
        running.set()
        assert opened.wait(30)
        return sound(self, images)

    monkeypatch.setattr(Model, "predict", gated)
    chances = iter([0.5, 0.49, *[0.0] * 6])
    candidate = Candidate(
        model, current, CandidateStage(share=0.5), 0.0, clock=lambda: 1.0, chance=lambda: next(chances)
    )
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
    assert (candidate.verdict(), candidate.progress.images) == (None, PENDING * 3)
