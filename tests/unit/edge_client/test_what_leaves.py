"""Everything that a device sends is in the lists that people read: docs/security.md, the device's own record, `fedcg agent sent`."""

import re
from collections import Counter
from pathlib import Path

from pydantic import BaseModel, create_model

from edge_client.firewall import FACTS
from edge_client.store.checked_files import SENT_FILE, SentRecord, read_lines, sent_items, totals
from fedcg.wire.leaving import COMMON, SENT, own_fields
from fedcg.wire.messages.envelopes import read_envelope
from fedcg.wire.messages.schemas import Heartbeat, Manifest
from fedcg.wire.messages.topics import TopicKind
from fedcg.wire.parts import ReportField
from tests.support.edge.world import MakeWorld

SECURITY = Path(__file__).parents[3] / "docs" / "security.md"
ROWS = re.findall(
    r"^\| .*$",
    SECURITY.read_text().partition("### Everything that leaves a box")[2].partition("\n## ")[0],
    re.MULTILINE,
)


def missing(model: type[BaseModel], row: str) -> set[str]:
    """The fields of something that is sent which a row of the table does not name, with the fields around them."""
    names = {name for path in own_fields(model) for name in (path.rpartition(".")[0], path.rpartition(".")[2])}
    return {name for name in names if name and f"`{name}`" not in row}


def test_the_table_of_everything_that_leaves_a_box_names_every_field_of_every_schema() -> None:
    rows = ROWS[1:]
    assert len(rows) == len(SENT) + 2
    assert {
        model.__name__: missing(model, row) for model, row in zip(SENT, rows, strict=False) if missing(model, row)
    } == {}
    assert [name for name in FACTS if f"`{name}`" not in rows[-2]] == []
    assert [name for name in COMMON if f"`{name}`" not in rows[-1]] == []


def test_a_field_that_is_added_to_a_schema_is_missed_in_the_table() -> None:
    inner = create_model("Inner", mood=(str, ""))
    row = ROWS[1 + SENT.index(Heartbeat)]
    assert missing(create_model("Moody", __base__=Heartbeat, mind=(tuple[inner, ...] | None, None)), row) == {
        "mind",
        "mood",
    }


def test_every_report_field_is_said_in_plain_words() -> None:
    operations = (SECURITY.parent / "operations.md").read_text()
    for field in ReportField:
        assert field.meaning
        assert f"`{field.value}`" in operations
    whole = (
        (SECURITY.parents[1] / "README.md").read_text().partition("What leaves a box, in whole")[2].partition("\n- ")[0]
    )
    assert [name for name in (*FACTS, *(one.value for one in ReportField)) if f"`{name}`" not in whole] == []


def test_the_record_has_the_bytes_of_every_message_that_left_by_kind(make_world: MakeWorld) -> None:
    world, crossed = make_world(), Counter[str]()

    def note(identity: str, topic: str, payload: bytes) -> None:
        parsed = world.coordinator.topics.parse(topic)
        if identity == world.config.device and parsed is not None and parsed.kind is not TopicKind.UP_CHUNK:
            crossed[read_envelope(payload).message.kind] += len(payload)

    world.broker.record = note
    world.connect()
    world.coordinator.offer(world.spec, world.aggregate(), 1)
    world.coordinator.invite(1)
    manifest = world.coordinator.wait(Manifest)
    payload = world.coordinator.collect(manifest)
    world.coordinator.receipt(manifest)
    world.stop_agent()
    recorded = Counter[str]()
    for line in read_lines(world.config.store / SENT_FILE):
        recorded.update(line.get("messages", {}))
    assert {"hello", "self_report", "accept", "manifest", "need", "device_status"} <= recorded.keys()
    assert recorded == crossed
    sums = totals(sent_items(world.config.store / SENT_FILE))[world.spec.federation]
    assert (sums["bytes"], sums["message_bytes"]) == (len(payload), crossed.total())


def test_messages_without_updates_are_recorded_now_and_then_and_a_full_disk_stops_none(tmp_path: Path) -> None:
    record = SentRecord(tmp_path, "shapes", lambda: 1e9)
    for _ in range(250):
        record.message("heartbeat", 500)
    assert [line["messages"] for line in read_lines(tmp_path / SENT_FILE)] == [{"heartbeat": 100_000}]
    blocked = SentRecord(tmp_path / "missing", "shapes", lambda: 1e9)
    for _ in range(250):
        blocked.message("heartbeat", 500)
    (tmp_path / "missing").mkdir()
    blocked.close()
    assert [line["messages"] for line in read_lines(tmp_path / "missing" / SENT_FILE)] == [{"heartbeat": 125_000}]
