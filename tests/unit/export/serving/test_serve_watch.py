"""A new version that does badly in service is taken back: failures, other classes, less confidence."""

from pathlib import Path

import numpy as np
import pytest

from export.errors import ExportError
from export.model.runtime import Floats
from export.model.versions import Slots
from export.serving.judge import FAILURES, Verdict, Watch
from export.serving.live_model import ServedModel
from tests.support.learning.export_models import encoded, picture
from tests.support.serving import PNG, Server, install_one_that_names_one_class, install_versions, serving
from tests.watch_rates import DAMAGE, TRAFFIC, taken_back

WINDOW = 40


def _rows(classes: list[int], confidence: float = 0.9, count: int = 4) -> Floats:
    rows = np.full((len(classes), count), (1.0 - confidence) / (count - 1), dtype=np.float32)
    rows[np.arange(len(classes)), classes] = confidence
    return rows


def _even(watch: Watch, version: str, confidence: float = 0.9) -> None:
    for _ in range(WINDOW // 4):
        watch.answered(version, _rows([0, 1, 2, 3], confidence))


def _watch() -> Watch:
    watch = Watch(WINDOW)
    _even(watch, "0001")
    assert watch.verdict() is None  # nothing to compare the first one with
    return watch


def test_a_version_like_the_one_before_it_stays() -> None:
    watch = _watch()
    _even(watch, "0002", confidence=0.8)
    assert watch.verdict() is None


def test_a_version_that_names_one_class_for_nearly_everything_goes_once() -> None:
    watch = _watch()
    watch.answered("0002", _rows([0] * (WINDOW - 1)))
    assert watch.verdict() is None  # too few to judge it
    watch.answered("0002", _rows([1]))
    verdict = watch.verdict()
    assert verdict is not None
    assert (verdict.version, verdict.kind) == ("0002", "drift")
    assert "from those of version 0001" in verdict.reason
    assert watch.verdict() is None


def test_a_version_that_is_much_less_sure_goes() -> None:
    watch = _watch()
    _even(watch, "0002", confidence=0.6)
    verdict = watch.verdict()
    assert verdict is not None
    assert verdict.reason == "its confidence is 60% on average where version 0001 had 90%"


def test_a_version_that_fails_goes_before_it_has_predicted_much() -> None:
    watch = _watch()
    for _ in range(FAILURES - 1):
        watch.failed("0002")
        assert watch.verdict() is None
    watch.failed("0002")
    assert watch.verdict() == Verdict("0002", "errors", f"{FAILURES} of its first {FAILURES} requests failed")


def test_few_failures_among_many_requests_are_borne() -> None:
    watch = _watch()
    for number in range(200):
        watch.answered("0002", _rows([number % 4]))
    for _ in range(FAILURES):
        watch.failed("0002")
    assert watch.verdict() is None


def test_what_was_taken_back_is_no_measure_for_the_next_version() -> None:
    watch = _watch()
    watch.answered("0002", _rows([0] * WINDOW))
    assert watch.verdict() is not None
    _even(watch, "0001")
    assert watch.verdict() is None
    _even(watch, "0003")
    assert watch.verdict() is None  # like 0001, although 0002 was between
    watch.answered("0004", _rows([0] * WINDOW))
    assert watch.verdict() is not None


def test_a_version_that_is_accepted_is_not_judged() -> None:
    watch = _watch()
    watch.accept("0002")
    watch.answered("0002", _rows([0] * WINDOW))
    assert watch.verdict() is None


def test_a_window_of_0_watches_nothing() -> None:
    watch = Watch(0)
    watch.answered("0001", _rows([0]))
    watch.failed("0001")
    assert watch.verdict() is None


def _ask(server: Server, images: int) -> None:
    for seed in range(images):
        assert server.ask("/predict", encoded(picture(seed), "PNG"), PNG).status == 200


def test_the_server_returns_to_the_version_before_one_that_drifts(tmp_path: Path) -> None:
    install_versions(tmp_path, 1)
    with serving(tmp_path, "--watch", "20", "--shadow", 0) as server:
        _ask(server, 24)
        install_one_that_names_one_class(tmp_path)
        server.wait_for_version("0002")
        _ask(server, 24)
        server.wait_for_version("0001")
        assert Slots(tmp_path).current().name == "0001"
        assert "version 0002: its predicted classes" in server.ask("/model").document["taken_back"]
        assert server.metric('fedcg_serve_rollbacks_total{reason="drift"}') == 1
        _ask(server, 24)
        assert server.ask("/readyz").document["version"] == "0001"


def test_a_single_model_has_nothing_to_return_to(tmp_path: Path) -> None:
    install_versions(tmp_path, 1)
    models = ServedModel(tmp_path, threads=1, warm_up=(1,))
    models.refresh()
    assert not models.take_back(Verdict("0001", "drift", "told so"))
    assert not models.take_back(Verdict("0007", "drift", "another one is in use"))
    assert models.taken_back == ""
    with pytest.raises(ExportError):
        Slots(tmp_path).rollback()
    assert Slots(tmp_path).current().name == "0001"


@pytest.mark.parametrize("how", ["each image for itself", "in runs of 20"])
def test_good_versions_stay_and_one_that_names_one_class_goes_also_where_images_repeat(how: str) -> None:
    traffic = TRAFFIC[f"10 classes, {how}"]
    good, _ = taken_back(traffic, traffic, 6)
    assert good <= 1 / 6
    bad, after = taken_back(traffic, DAMAGE["one class for every image"](traffic), 3)
    assert bad == 1.0
    assert after <= 2 * 200


def test_failures_that_the_version_before_had_as_well_are_no_reason() -> None:
    watch = Watch(WINDOW)
    for version in ("0001", "0002"):
        for number in range(100):
            watch.answered(version, _rows([number % 4]))
            if number % 10 == 0:
                watch.failed(version)
            assert watch.verdict() is None
