"""The owner's files and the record of what was sent: laws of each, what damage does to them, and that people can read everything that leaves."""

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from coordinator.facts.sent import COMMON, SENT, own_fields
from edge_client.config import PolicySection
from edge_client.errors import StoreError
from edge_client.firewall import FACTS, check_spec, widened
from edge_client.store.checked_files import SENT_FILE, SentRecord, checked_text, read_lines, sent_items, totals
from edge_client.store.owner_record import MOST_WAITING, Consent, TrafficCounter
from fedcg.wire.messages.envelopes import read_envelope
from fedcg.wire.messages.schemas import DeclineReason, RoundAttempt
from fedcg.wire.messages.topics import TopicKind
from fedcg.wire.parts import Part, ReportField
from tests.support.edge.world import MakeWorld, toy_spec, update_of

NOON = 1_790_000_000.0 - 1_790_000_000.0 % 86_400 + 43_200
DIGEST = "a" * 64


def test_a_spec_waits_once_and_is_approved_until_it_is_revoked(tmp_path: Path) -> None:
    consent = Consent(tmp_path)
    assert consent.wait_for(DIGEST, DeclineReason.NEEDS_APPROVAL, "why", NOON)
    assert not consent.wait_for(DIGEST, DeclineReason.NEEDS_APPROVAL, "why", NOON + 1)
    consent.approve(DIGEST, NOON)
    assert (consent.read().waiting, consent.read().approved) == ({}, {DIGEST: NOON})
    assert consent.revoke(DIGEST)
    assert not consent.revoke(DIGEST)
    assert (tmp_path / "consent.json").stat().st_mode & 0o777 == 0o600


def test_specs_that_wait_are_bounded_and_the_newest_stay(tmp_path: Path) -> None:
    consent = Consent(tmp_path)
    for number in range(MOST_WAITING + 5):
        consent.wait_for(f"{number:064x}", DeclineReason.NEEDS_APPROVAL, "x" * 5000, NOON + number)
    waiting = consent.read().waiting
    assert len(waiting) == MOST_WAITING
    assert f"{MOST_WAITING + 4:064x}" in waiting
    assert f"{0:064x}" not in waiting


def test_an_approval_widens_the_policy_by_what_the_spec_asks_for_and_no_more() -> None:
    spec = toy_spec(
        upload=(Part.EXTRACTOR,),
        report=(ReportField.EXAMPLES, ReportField.ACCURACY),
        params={"epochs": 300, "steps": 5},
    )
    policy = PolicySection(allow_report=frozenset(), methods=frozenset({"other"}))
    wide = widened(policy, spec)
    assert check_spec(spec, policy) is not None
    assert check_spec(spec, wide) is None
    assert wide.allow_upload == policy.allow_upload | {Part.EXTRACTOR}
    assert wide.allow_report == {ReportField.EXAMPLES}  # accuracy is for people: no method needs it
    assert (wide.max_epochs, wide.max_steps, wide.max_batch) == (300, policy.max_steps, policy.max_batch)
    assert wide.max_download_mb == policy.max_download_mb


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"more": 1}',
        b" " * (2 << 20),
        *(checked_text({name: {"x": {}}}).encode() for name in ("waiting", "more")),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it_and_the_next_step(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "consent.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"consent\.json is damaged\. It holds .*: delete it"):
        Consent(tmp_path).read()


def test_the_bytes_of_the_day_outlive_a_restart_and_begin_anew_at_midnight_utc(tmp_path: Path) -> None:
    now = NOON
    counter = TrafficCounter(tmp_path, lambda: now)
    counter.sent(5)
    counter.received(10)  # kept in memory until there is 1 MB
    assert TrafficCounter(tmp_path, lambda: now).today().down == 0
    counter.received(1_000_000)
    again = TrafficCounter(tmp_path, lambda: now).today()
    assert (again.up, again.down) == (5, 1_000_010)
    now = NOON + 43_200  # midnight
    assert (counter.today().up, counter.today().down) == (0, 0)


def record(root: Path) -> SentRecord:
    return SentRecord(root, "shapes", lambda: NOON)


def test_an_update_is_recorded_once_also_after_a_restart(tmp_path: Path) -> None:
    update = update_of(toy_spec(), RoundAttempt(1, 1))
    for is_new in (True, False):
        one = record(tmp_path)
        assert one.update(update) is is_new
        assert not one.update(update)
    one.receipt(sent_items(tmp_path / SENT_FILE)[0]["artifact"], "accepted")
    one.self_report({"paused": True, "model": None})
    one.self_report({"paused": True, "model": None})
    one.self_report({"paused": None, "model": None})
    items = sent_items(tmp_path / SENT_FILE)
    assert [item["kind"] for item in items] == ["update", "self_report"]
    assert totals(items) == {
        "shapes": {"updates": 1, "bytes": len(update), "receipts": 1, "self_reports": 1, "message_bytes": 0}
    }
    assert sent_items(tmp_path / SENT_FILE, since=NOON + 1) == []


@given(cut=st.integers(min_value=0, max_value=400), noise=st.binary(max_size=30))
def test_a_torn_line_costs_itself_alone(tmp_path_factory: pytest.TempPathFactory, cut: int, noise: bytes) -> None:
    root = tmp_path_factory.mktemp("torn")
    record(root).receipt("first", "accepted")
    record(root).self_report({"number": 1})
    path = root / SENT_FILE
    torn = path.read_bytes()
    path.write_bytes(torn + torn.splitlines()[1][:cut] + noise.replace(b"\n", b""))
    record(root).self_report({"number": 2})
    numbers = [item["report"]["number"] for item in sent_items(path)]
    assert (numbers[0], numbers[-1]) == (1, 2)


LEAVES = Path(__file__).parents[4] / "docs" / "explanation" / "what-leaves.md"
ROWS = re.findall(r"^\| .*$", LEAVES.read_text().partition("## Everything else")[2].partition("\n## ")[0], re.MULTILINE)


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


def test_every_report_field_is_said_in_plain_words() -> None:
    page = LEAVES.read_text()
    assert all(field.meaning for field in ReportField)
    assert [name for name in (*FACTS, *(one.value for one in ReportField)) if f"`{name}`" not in page] == []


def test_the_record_has_the_bytes_of_every_message_that_left_by_kind(make_world: MakeWorld) -> None:
    world, crossed = make_world(), Counter[str]()

    def note(identity: str, topic: str, payload: bytes) -> None:
        parsed = world.coordinator.topics.parse(topic)
        if identity == world.config.device and parsed is not None and parsed.kind is not TopicKind.UP_CHUNK:
            crossed[read_envelope(payload).message.kind] += len(payload)

    world.broker.record = note
    world.connect()
    world.open_round()
    payload = world.deliver()
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
