"""`fedcg tables --clients`: the worst client's deployed model against its local-only one, and how many clients lost."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.papers.figures import transfer_of
from experiments.papers.records import ClientRecord
from tests.support.learning.papers_cases import record, write

OWN = "own:iid:cifar10-4x500"


def _client(deployed: float, local: float, **more: Any) -> ClientRecord:
    return ClientRecord(id="c", accuracy_deployed=deployed, accuracy_local=local, **{"test_images": 10_000, **more})


def test_the_worst_client_has_the_interval_of_two_shares() -> None:
    told = transfer_of([_client(0.50, 0.40), _client(0.38, 0.40), _client(0.395, 0.40)])
    assert told is not None
    # 1.96 * sqrt((0.38 * 0.62 + 0.4 * 0.6) / 10,000) = 1.352 points
    assert [told.worst.points, told.worst.margin] == pytest.approx([-2.0, 1.352], abs=1e-3)
    assert (told.clients, told.below, told.beyond) == (3, 2, 1)
    assert told.lost == pytest.approx(-1.25)


def test_common_test_images_go_before_a_clients_own() -> None:
    told = transfer_of(
        [_client(0.9, 0.9, accuracy_common_deployed=0.5, accuracy_common_local=0.4, common_images=2_500)]
    )
    assert told is not None
    assert (told.below, told.lost) == (0, 0.0)
    assert [told.worst.points, told.worst.margin] == pytest.approx([10.0, 100 * 1.96 * (0.49 / 2_500) ** 0.5])


@pytest.mark.parametrize("client", [ClientRecord(id="c"), _client(0.5, 0.4, test_images=None)])
def test_without_both_models_and_their_images_nothing_is_compared(client: ClientRecord) -> None:
    assert transfer_of([client]) is None


def test_the_command_shows_it_and_no_column_of_a_paper_that_prints_nothing(tmp_path: Path) -> None:
    run = record("fedprobe", 3, 0.4, paper=OWN, local=0.41)
    for client, deployed in zip(run["clients"], (0.45, 0.36), strict=True):
        client.update(accuracy_deployed=deployed, accuracy_ema=deployed - 0.1, test_images=10_000)
    write(tmp_path, run)
    command = [
        sys.executable,
        "-m",
        "fedcg",
        "tables",
        "--paper",
        OWN,
        "--runs",
        str(tmp_path),
        "--clients",
        "--markdown",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| fedprobe | -5.0 ± 1.3 | 1 of 2 | 1 | -5.0 |" in shown
    assert "| row | ours after download | ours accuracy | ours moving average | ours deployed |" in shown
    assert "| 30.50 (1) |" in shown, "the mean over clients of 35 and 26"
