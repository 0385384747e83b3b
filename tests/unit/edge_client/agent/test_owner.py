"""The owner's requests and a running agent: who may make them, pause, approval, limits of a day, the record of what leaves."""

import json
import time
from pathlib import Path

import pytest

from edge_client.agent import owner
from edge_client.cli.status import read_status
from edge_client.config import PolicySection
from edge_client.errors import NotRunningError, OwnerRequestError, StoreError
from edge_client.session.signals import ReleaseTrainer
from edge_client.store.checked_files import SENT_FILE, sent_items, write_json
from edge_client.store.owner_record import Consent, DayTraffic, Pause, PauseFile
from edge_client.store.private_store import open_store
from fedcg.wire.artifacts.artifacts import artifact_id
from fedcg.wire.messages.schemas import Accept, Decline, DeclineReason, Hello, Manifest, RoundAttempt, SelfReport
from fedcg.wire.parts import Part
from tests.support.edge.answering_agent import answering_agent
from tests.support.edge.world import MakeWorld, World, connected, in_round, in_training, toy_spec
from tests.support.waiting import wait_until

CLASSIFIER_ONLY = PolicySection(allow_upload=frozenset({Part.CLASSIFIER}))


def status(world: World) -> dict[str, object]:
    return owner.ask_agent(world.config.store, owner.StatusRequest())


def test_a_round_under_way_is_finished_and_delivered_before_the_pause(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    owner.ask_agent(world.config.store, owner.PauseRequest())
    world.coordinator.work_until(lambda: status(world)["obstacle"] == "paused", "the pause counts")
    assert world.trainer.starts == 1
    (command,) = world.trainer.commands
    world.trainer.work(command)
    world.deliver()
    wait_until(lambda: world.trainer.commands[-1] == ReleaseTrainer("paused"), "then the training process is to end")
    world.trainer.work(world.trainer.commands[-1])
    wait_until(lambda: bool(world.events("trainer_released")), "it has ended")
    assert not world.events("trainer_died")
    assert not any(isinstance(message, Decline) for message in world.coordinator.heard)
    owner.ask_agent(world.config.store, owner.ResumeRequest())
    wait_until(lambda: world.trainer.starts == 2, "it starts again with the end of the pause")


def test_a_pause_at_once_abandons_the_round_under_way(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    owner.ask_agent(world.config.store, owner.PauseRequest(now=True))
    assert world.coordinator.wait(Decline).reason is DeclineReason.PAUSED
    assert status(world)["trainer"] == "gone"
    owner.ask_agent(world.config.store, owner.ResumeRequest())
    world.open_round(1, attempt=2)
    world.coordinator.work_until(lambda: len(world.trainer.rounds()) == 2, "the next attempt is trained")
    assert world.trainer.rounds()[-1] == RoundAttempt(1, 2)


def test_a_round_that_was_committed_just_before_a_pause_at_once_is_delivered(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    world.trainer.commit(world.trainer.commands[0])  # type: ignore[arg-type]  # and its report is lost
    owner.ask_agent(world.config.store, owner.PauseRequest(now=True))
    assert world.coordinator.wait(Manifest).round == 1


def test_a_pause_outlives_the_agent_and_ends_by_itself(make_world: MakeWorld) -> None:
    world = connected(make_world)
    owner.ask_agent(world.config.store, owner.PauseRequest(for_s=3600))
    world.stop_agent()
    world.start_agent()
    world.coordinator.wait(Hello)
    assert status(world)["obstacle"] == "paused"
    world.stop_agent()
    PauseFile(world.config.store).write(Pause(since=time.time() - 7200, until=time.time() - 3600))
    world.start_agent()
    world.coordinator.wait(Hello)
    assert status(world)["obstacle"] is None
    assert PauseFile(world.config.store).read() is None
    assert world.events("agent_resumed")[-1]["reason"] == "the pause is over"
    world.open_round()
    world.coordinator.wait(Accept)


def test_the_device_reports_that_it_is_paused(make_world: MakeWorld) -> None:
    world = connected(make_world)
    assert world.coordinator.wait(SelfReport).condition.paused is None
    owner.ask_agent(world.config.store, owner.PauseRequest())
    assert world.coordinator.wait(SelfReport).condition.paused is True
    owner.ask_agent(world.config.store, owner.ResumeRequest())
    assert world.coordinator.wait(SelfReport).condition.paused is None


def test_an_update_that_waits_is_withheld_when_its_approval_is_revoked(make_world: MakeWorld) -> None:
    world = in_round(make_world, policy=CLASSIFIER_ONLY)
    world.coordinator.wait(Decline)
    assert read_status(world.config)["bytes_today"] == {"up": 0, "down": len(world.spec.canonical())}
    owner.ask_agent(world.config.store, owner.DecisionRequest(command="approve", spec=world.spec.digest))
    world.open_round(1, attempt=2)
    world.coordinator.wait(Manifest)
    owner.ask_agent(world.config.store, owner.DecisionRequest(command="revoke", spec=world.spec.digest))
    assert world.store.deliveries()[-1].outcome == "withheld"
    assert status(world)["now"] == "waiting for a round"
    world.open_round(1, attempt=3)
    assert world.coordinator.wait(Decline).reason is DeclineReason.UPLOAD_NOT_ALLOWED
    with pytest.raises(OwnerRequestError, match="not approved"):
        owner.ask_agent(world.config.store, owner.DecisionRequest(command="revoke", spec=world.spec.digest))


def test_a_spec_that_no_approval_would_admit_does_not_wait_for_one(make_world: MakeWorld) -> None:
    world = in_round(make_world, policy=CLASSIFIER_ONLY, spec=toy_spec(method="telepathy"))
    assert world.coordinator.wait(Decline).reason is DeclineReason.UNKNOWN_METHOD
    assert Consent(world.config.store).read().waiting == {}


@pytest.mark.parametrize(
    ("limit", "used", "is_declined"),
    [
        ("max_upload_mb_per_day", {"up": 1_000_000}, True),
        ("max_download_mb_per_day", {"down": 999_999}, True),
        ("max_download_mb_per_day", {"up": 5_000_000, "down": 900_000}, False),
    ],
)
def test_a_round_beyond_the_days_bytes_is_declined_until_midnight(
    make_world: MakeWorld, limit: str, used: dict[str, int], *, is_declined: bool
) -> None:
    world = make_world(policy=PolicySection.model_validate({limit: 1}))
    open_store(world.config, make=True)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    counted = world.config.store / "traffic.json"
    write_json(counted, DayTraffic.model_validate({"day": today, **used}).model_dump())
    world.connect()
    world.open_round()
    if not is_declined:
        world.coordinator.wait(Manifest)
        return
    while world.coordinator.wait(Decline).reason is not DeclineReason.DAILY_LIMIT:
        pass
    wait_until(lambda: bool(world.events("declined")), "the decline is recorded")
    assert f"policy.{limit} is 1" in str(world.events("declined")[0]["detail"])
    assert "midnight UTC" in str(world.events("declined")[0]["detail"])
    world.stop_agent()
    write_json(counted, DayTraffic.model_validate({"day": "2026-01-01", **used}).model_dump())
    world.start_agent()
    world.coordinator.wait(Hello)
    world.open_round(1, attempt=2)
    world.coordinator.wait(Manifest)


@pytest.mark.parametrize("name", ["consent.json", "pause.json", "traffic.json", "delivered.json"])
def test_an_agent_does_not_start_on_damaged_decisions_or_receipts(make_world: MakeWorld, name: str) -> None:
    world = connected(make_world)
    world.stop_agent()
    (world.config.store / name).write_text("{")
    with pytest.raises(StoreError, match=rf"{name} is damaged\. It holds .*: delete it"):
        world.start_agent()


def test_an_agent_whose_folder_for_requests_cannot_be_made_reports_that_and_trains(make_world: MakeWorld) -> None:
    world = make_world()
    (open_store(world.config, make=True).root / "control").touch()
    world.connect()
    world.open_round()
    world.coordinator.wait(Manifest)
    assert "the owner's commands can't reach this agent" in str(world.events("agent_error")[0]["detail"])


def test_what_leaves_is_recorded_before_its_first_byte_and_gets_its_receipt(make_world: MakeWorld) -> None:
    world = in_round(make_world)
    manifest = world.coordinator.wait(Manifest)
    path = world.config.store / SENT_FILE
    assert [item["kind"] for item in sent_items(path)] in ([], ["self_report"])
    payload = world.coordinator.collect(manifest)
    item = sent_items(path)[-1]
    assert (item["kind"], item["artifact"], item["bytes"]) == ("update", artifact_id(payload), len(payload))
    assert item["parts"] == {"classifier": 4 * (3 + 12), "generator": 8 + 4 * 8}  # bytes of its numbers
    assert (item["report"], item["receipt"]) == ({"examples": 3, "accuracy": 0.5}, None)
    world.coordinator.receipt(manifest)
    wait_until(lambda: sent_items(path)[-1]["receipt"] == "accepted", "the receipt is recorded")
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_update_whose_record_cannot_be_written_stays_and_the_reason_names_the_store(make_world: MakeWorld) -> None:
    world = connected(make_world)
    (world.config.store / SENT_FILE).mkdir()
    world.open_round()
    world.coordinator.grant(world.coordinator.wait(Manifest), ((0, 1),))

    def is_reported() -> bool:
        return any("send chunks: " in str(event["detail"]) for event in world.events("agent_error"))

    world.coordinator.work_until(is_reported, "the error is recorded")
    assert not world.events("sending")
    assert f"Free space on, or repair, {world.config.store}" in str(world.events("agent_error")[0]["detail"])


VALID = {"v": 1, "command": "pause", "for_s": 60.0, "reason": "", "now": False}


def reply_to(store: Path, text: bytes) -> dict[str, object]:
    """The reply of an agent to a raw request."""
    requests = owner.OwnerRequests(store)
    requests.open()
    (store / "control" / "1.request").write_bytes(text)
    requests.answer_all(lambda request: pytest.fail(f"{request} was carried out"))
    requests.close()
    assert not (store / "control" / "1.request").exists()
    reply: dict[str, object] = json.loads((store / "control" / "1.answer").read_text())
    return reply


def test_a_request_reaches_the_agent_and_gets_its_answer_and_no_file_is_left(tmp_path: Path) -> None:
    with answering_agent(tmp_path, owner.success({"answered": True})) as taken:
        assert owner.ask_agent(tmp_path, owner.PauseRequest(for_s=60)) == {"answered": True}
    assert taken == [owner.PauseRequest(for_s=60)]
    assert [path.name for path in (tmp_path / "control").iterdir()] == ["lock"]
    assert (tmp_path / "control").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"for_s": "60"}, "for_s"),
        ({"for_s": 0}, "for_s"),
        ({"for_s": 1e12}, "for_s"),
        ({"reason": "x" * 201}, "reason"),
        ({"now": 1}, "now"),
        ({"more": 1}, "more"),
        ({"v": 2}, "v"),
        ({"command": "erase"}, "root"),
        ({"reason": "x" * owner.MAX_REQUEST_BYTES}, str(owner.MAX_REQUEST_BYTES)),
    ],
)
def test_an_odd_request_is_refused_by_field(tmp_path: Path, change: dict[str, object], field: str) -> None:
    reply = reply_to(tmp_path, json.dumps({**VALID, **change}).encode())
    assert reply["ok"] is False
    assert field in str(reply["error"])


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b'{"command": "status"'])
def test_bytes_that_are_no_request_are_refused(tmp_path: Path, text: bytes) -> None:
    assert reply_to(tmp_path, text)["ok"] is False


def test_a_request_that_cannot_be_read_is_reported_once_and_holds_up_no_other_one(tmp_path: Path) -> None:
    requests, taken = owner.OwnerRequests(tmp_path), []
    requests.open()
    (tmp_path / "control" / "1.request").mkdir()
    (tmp_path / "control" / "2.request").write_text(owner.StatusRequest().model_dump_json())

    def answer(request: owner.OwnerRequest) -> owner.Reply:
        taken.append(request)
        return owner.success({})

    with pytest.raises(IsADirectoryError):
        requests.answer_all(answer)
    for _ in range(2):
        requests.answer_all(answer)
    assert taken == [owner.StatusRequest()]
    requests.close()


def test_without_an_agent_the_error_names_the_store_and_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "left" / "control").mkdir(parents=True)
    for name in ("lock", "1.request"):
        (tmp_path / "left" / "control" / name).touch()  # by an agent that was killed
    for store in (tmp_path / "absent", tmp_path / "left"):
        with pytest.raises(NotRunningError, match=f"{store.name}: start it with `fedcg agent run`"):
            owner.ask_agent(store, owner.ResumeRequest())
    with answering_agent(tmp_path / "left", owner.success({})) as taken:  # what was left is not carried out
        assert owner.ask_agent(tmp_path / "left", owner.StatusRequest()) == {}
    assert taken == [owner.StatusRequest()]


def test_a_loop_that_does_not_answer_in_time_is_named_and_the_request_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "ANSWER_S", 0.1)
    requests = owner.OwnerRequests(tmp_path)
    requests.open()
    with pytest.raises(OwnerRequestError, match="busy"):
        owner.ask_agent(tmp_path, owner.PauseRequest())
    requests.answer_all(lambda request: pytest.fail(f"{request} was carried out"))
    requests.close()


@pytest.mark.parametrize("reply", [[], {"ok": True, "data": 1}, owner.failure("why")])
def test_an_answer_of_another_form_is_an_error(tmp_path: Path, reply: object) -> None:
    with answering_agent(tmp_path, reply), pytest.raises(OwnerRequestError):
        owner.ask_agent(tmp_path, owner.StatusRequest())
