"""A real server in front of a new version: callers have the answers of the old one until the new one was compared, and none fails."""

import re
import signal
from itertools import cycle
from pathlib import Path

import pytest

from export.model.versions import Slots
from tests.support.learning.export_models import encoded, install_model, picture
from tests.support.serving import PNG, Server, install_one_that_names_one_class, install_versions, serving
from tests.support.stack import wait_for

"""The command with a version 0002 that does badly from its first real image on."""
NEXT = cycle([encoded(picture(seed), "PNG") for seed in range(24)])
ALL = ("--shadow-share", 1)


def _ask_until(server: Server, version: str, deadline_s: float = 60) -> list[str]:
    """Ask until an answer is of this version; the versions of all answers, none of which fails."""
    seen: list[str] = []

    def is_answered() -> bool:
        answer = server.ask("/predict", next(NEXT), PNG)
        assert answer.status == 200, answer.text
        seen.append(answer.document["version"])
        return seen[-1] == version

    wait_for(is_answered, f"an answer of version {version}", deadline_s)
    return seen


def _candidate(server: Server) -> str | None:
    candidate = server.ask("/model").document["candidate"]
    return candidate and str(candidate["version"])


def _wait_for_candidate(server: Server, version: str) -> None:
    wait_for(lambda: _candidate(server) == version, f"version {version} is the candidate", 30)


def test_a_good_version_serves_after_it_was_compared_and_the_stage_is_shown(tmp_path: Path) -> None:
    install_versions(tmp_path, 1)
    with serving(tmp_path, "--shadow", 30, *ALL) as server:
        assert _ask_until(server, "0001") == ["0001"]
        assert _candidate(server) is None
        install_model(tmp_path, seed=1, round_number=2)  # of the same weights
        _wait_for_candidate(server, "0002")
        stage = server.ask("/model").document["candidate"]
        assert (stage["round"], stage["images"], stage["of_images"], stage["failures"]) == (2, 0, 30, 0)
        assert server.ask("/readyz").document["version"] == "0001"
        assert 'fedcg_serve_candidate_images{version="0002"} 0.0' in server.ask("/metrics").text
        *before, after = _ask_until(server, "0002")
        assert after == "0002"
        assert set(before) == {"0001"}
        assert len(before) >= 30
        assert _candidate(server) is None
        assert "fedcg_serve_candidate_images{" not in server.ask("/metrics").text
        code, errors = server.stop()
    assert code == 0
    told = r"version 0002 takes all requests: (\d+) images compared, 100% of them got the same class, 0 requests failed"
    found = re.search(told, errors)
    assert found is not None, errors
    assert int(found[1]) >= 30


def test_a_bad_version_is_taken_back_and_no_caller_has_its_answer(tmp_path: Path) -> None:
    install_versions(tmp_path, 1)
    with serving(tmp_path, "--shadow", 24, *ALL) as server:
        install_one_that_names_one_class(tmp_path)
        _wait_for_candidate(server, "0002")
        rollbacks = 'fedcg_serve_rollbacks_total{reason="drift"}'

        def is_taken_back() -> bool:
            answer = server.ask("/predict", next(NEXT), PNG)
            assert (answer.status, answer.document["version"]) == (200, "0001"), answer.text
            return server.metric(rollbacks) == 1

        wait_for(is_taken_back, "version 0002 is taken back", 60)
        assert Slots(tmp_path).current().name == "0001"
        told_by = server.ask("/model").document
        assert (told_by["version"], told_by["candidate"], told_by["refused"]) == ("0001", None, None)
        assert told_by["taken_back"].startswith("version 0002: its predicted classes are")
        code, errors = server.stop()
    assert code == 0
    assert "version 0002 is taken back to 0001: " in errors


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_stage_goes_on_with_the_version_that_answered(tmp_path: Path) -> None:
    install_versions(tmp_path, 1)
    with serving(tmp_path, "--shadow", 1000) as server:
        install_model(tmp_path, seed=1, round_number=2)
        _wait_for_candidate(server, "0002")
        server.stop(signal.SIGKILL)
    with serving(tmp_path, "--shadow", 20, *ALL) as server:
        assert server.ask("/readyz").document["version"] == "0001"
        assert _candidate(server) == "0002"
        assert set(_ask_until(server, "0002")[:-1]) == {"0001"}
    with serving(tmp_path) as server:
        assert server.ask("/readyz").document["version"] == "0002"
        assert _candidate(server) is None
