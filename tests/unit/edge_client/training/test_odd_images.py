"""The training process on a box whose images are odd: it trains where it can, and says what is wrong where it can't."""

import os
import shutil
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_client.cli.doctor.checks import examine
from edge_client.cli.status import read_status
from edge_client.config import PolicySection
from edge_client.firewall import check_spec
from edge_client.session.signals import RoundCommitted
from fedcg.imaging import MAX_FILE_BYTES
from fedcg.wire.messages.schemas import DeclineReason, RoundAttempt
from fedcg.wire.parts import DEFAULT_ALLOW_REPORT, ReportField
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import CLASSES


@pytest.mark.parametrize(
    "method",
    ["fedmd_cg", *(pytest.param(one, marks=pytest.mark.slow) for one in ("fedcg", "fedsplit", "fedgen", "local"))],
)
def test_a_box_of_one_class_with_an_empty_one_a_broken_file_and_mixed_colours_trains_and_tells(
    method: str, tmp_path: Path
) -> None:
    site = Site(tmp_path, real_spec(method))
    told = PolicySection(allow_report=DEFAULT_ALLOW_REPORT | {ReportField.LABEL_COUNTS})
    site.configure(policy=told)
    train = site.root / "data" / "train"
    for path in (train / CLASSES[0]).iterdir():
        path.unlink()  # an empty class
    shutil.rmtree(train / CLASSES[2])  # one that is not there
    own = sorted((train / CLASSES[1]).iterdir())
    own[0].write_bytes(b"\x89PNG and no more")
    Image.fromarray(np.full((32, 32, 3), 90, dtype=np.uint8)).save(own[1])
    site.train()
    (skipped,) = site.events("images_skipped")
    assert skipped["count"] == 1
    assert own[0].name not in site.events_path.read_text()
    snapshot = site.store.generations.snapshot(site.state().generation)
    trained = [file for file in snapshot.files if file.split in {"train", "val"}]
    assert {file.label for file in trained} == {1}
    assert len(trained) == len(own) - 1


@pytest.mark.parametrize(
    ("kept", "stranger", "why"),
    [(1, None, "training images after the split; at least 2"), (12, "cow", "no class 'cow'")],
)
def test_a_box_that_can_not_train_on_its_images_declines_and_names_what_is_wrong(
    kept: int, stranger: str | None, why: str, tmp_path: Path
) -> None:
    site = Site(tmp_path, real_spec())
    train = site.root / "data" / "train"
    for label, name in enumerate(CLASSES):
        for path in sorted((train / name).iterdir())[kept if label == 0 else 0 if kept == 1 else kept :]:
            path.unlink()
    if stranger is not None:
        (train / CLASSES[2]).rename(train / stranger)
    report = site.declined()
    assert report.reason is DeclineReason.NO_DATA
    assert why in report.detail
    assert str(site.root / "data") in report.detail
    assert site.store.generations.current() == (None, ())


@pytest.mark.parametrize(
    ("method", "aggregation", "takes_part"),
    [("fedcg", "kd", True), ("fedcg", "crossed_kd", False), ("fedmd_cg", "average", False)],
)
def test_a_box_that_keeps_its_label_counts_declines_before_it_trains_what_can_not_do_without(
    method: str, aggregation: str, takes_part: bool
) -> None:
    spec = real_spec(method, aggregation=aggregation)
    refusal = check_spec(spec, PolicySection())
    assert (refusal is None) is takes_part
    if refusal is not None:
        assert refusal[0] is DeclineReason.REPORT_NOT_ALLOWED
        assert "label_counts" in refusal[1]
    assert check_spec(spec, PolicySection(allow_report=DEFAULT_ALLOW_REPORT | {ReportField.LABEL_COUNTS})) is None


@pytest.mark.timeout(60)
def test_what_is_named_as_an_image_and_is_no_file_is_left_out_and_named_by_agent_and_doctor_alike(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, real_spec())
    folder = site.root / "data" / "train" / CLASSES[0]
    (folder / "gone.png").symlink_to("no-such-file")
    (folder / "self.png").symlink_to("self.png")
    os.mkfifo(folder / "fifo.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "folder.png").mkdir()
    with (folder / "huge.png").open("wb") as huge:
        huge.truncate(MAX_FILE_BYTES + 1)
    (folder / ".hidden.png").write_bytes(b"no image")  # as macOS leaves beside every file
    reasons = {
        "gone.png": "a link to a file that is not there",
        "self.png": "a link to a file that is not there",
        "fifo.png": "not a regular file",
        "zero.png": "not a regular file",
        "folder.png": "not a regular file",
        "huge.png": f"{MAX_FILE_BYTES + 1} bytes is over the limit of 256 MiB",
    }
    trainer = site.trainer()
    for number in (1, 2):
        assert trainer.do(site.round(number)) == RoundCommitted(RoundAttempt(number, 1))
    assert [event["count"] for event in site.events("images_skipped")] == [6]
    told = str(read_status(site.config)["images_left_out"])
    finding = {one.check: one for one in examine(site.config, datetime.now(timezone.utc))}["data"]
    assert told.startswith("6: ")
    assert told.endswith("repair or remove them; training leaves them out")
    assert (finding.state, finding.advice) == ("warning", "repair or remove them; training leaves them out")
    assert "6 can't be used" in finding.detail
    for name, reason in reasons.items():
        assert f"{folder / name}: {reason}" in told
        assert f"{folder / name}: {reason}" in finding.detail
    images = len([*(site.root / "data").glob("*/*/*")])
    assert finding.detail.startswith(f"{images - 1} images in ")
    (folder / "gone.png").unlink()
    site.train(3)
    assert str(read_status(site.config)["images_left_out"]).startswith("5: ")
