"""A device whose images change between rounds: new ones join, damaged ones are listed and left out, classes are agreed with the spec."""

from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

import pytest

from edge_client.cli.doctor.checks import Finding, examine
from edge_client.cli.status import read_status
from fedcg.wire.messages.schemas import DeclineReason
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import CLASSES, draw_images

FEWER = CLASSES[0]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, real_spec("fedcg"))


def trained(site: Site, number: int) -> Counter[str]:
    site.train(number)
    files = site.store.generations.snapshot(site.state().generation).files
    return Counter(CLASSES[file.label] for file in files)


def data_finding(site: Site) -> Finding:
    return {one.check: one for one in examine(site.config, datetime.now(timezone.utc))}["data"]


def test_new_images_join_with_the_next_rounds_snapshot_and_status_counts_them(site: Site) -> None:
    first = trained(site, 1)
    assert first == dict.fromkeys(CLASSES, 17)
    draw_images(site.root / "data" / "train", 4, seed=9)
    assert read_status(site.config)["images"] == ", ".join(f"{name} 17" for name in CLASSES)
    assert trained(site, 2) == dict.fromkeys(CLASSES, 21)
    assert read_status(site.config)["images"] == ", ".join(f"{name} 21" for name in CLASSES)


def test_damaged_images_are_left_out_and_listed_with_their_reasons_until_they_are_mended(site: Site) -> None:
    folder = site.root / "data" / "train" / FEWER
    damaged = sorted(folder.iterdir())[:2]
    whole = [path.read_bytes() for path in damaged]
    damaged[0].write_bytes(b"a letter")
    damaged[1].write_bytes(whole[1][:60])
    assert trained(site, 1)[FEWER] == 15
    told = str(read_status(site.config)["images_left_out"])
    assert told.startswith("2: ")
    for path in damaged:
        assert path.relative_to(site.root / "data").as_posix() in told
    assert "not an image" in told
    assert "damaged image" in told
    found = data_finding(site)
    assert found.state == "warning"
    assert "2 can't be used: " in found.detail
    assert all(str(path) in found.detail for path in damaged)
    assert all(path.name not in site.events_path.read_text() for path in damaged), "names stay out of the event log"
    for path, content in zip(damaged, whole, strict=True):
        path.write_bytes(content)
    assert trained(site, 2)[FEWER] == 17
    assert read_status(site.config)["images_left_out"] is None


def test_a_class_may_be_missing_and_an_unknown_one_is_an_error_with_the_fix(site: Site) -> None:
    for path in sorted((site.root / "data").glob(f"*/{FEWER}")):
        path.rename(site.root / f"{path.parent.name}-{FEWER}")
    assert trained(site, 1)[FEWER] == 0
    assert f"{FEWER} 0" in str(read_status(site.config)["images"])
    found = data_finding(site)
    assert found.state == "ok"
    assert f"{FEWER} 0" in found.detail
    (site.root / f"train-{FEWER}").rename(site.root / "data" / "train" / "cow")
    report = site.declined(2)
    assert report.reason is DeclineReason.NO_DATA
    found = data_finding(site)
    assert found.state == "failed"
    for text in (report.detail, f"{found.detail}; {found.advice}"):
        assert "class 'cow'" in text
        assert ", ".join(CLASSES) in text
        assert "ename the folder to one of them" in text
        assert "list the class" in text
