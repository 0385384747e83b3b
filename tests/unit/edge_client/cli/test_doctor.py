"""`fedcg doctor`: the coordinator is asked, the images are opened, and nothing is broken on the way to the eye."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_client.cli.doctor.checks import Finding, examine
from edge_client.config import AgentConfig, PolicySection, load_config
from edge_client.errors import NoAnswerError
from edge_client.store.owner_record import Consent
from edge_client.store.private_store import PrivateStore, open_store
from fedcg.event_log import EventLog
from fedcg.learning.networks.plans import complete_spec
from fedcg.wire.messages.envelopes import SigningKey
from tests.support.commands import data_of, run_fedcg
from tests.support.coordinator.toy_artifacts import FEDERATION, tiny_spec
from tests.support.coordinator.world import RunningService, World
from tests.support.edge.conversations import box_config, talk
from tests.support.edge.world import write_device
from tests.support.learning.learning_cases import usual_plan

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="fedcg-doctor-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_member_is_answered_and_neither_joins_nor_leaves(service_world: World, tmp_path: Path) -> None:
    with RunningService(service_world):
        ahead_s = talk(service_world, tmp_path, service_world.devices["a"].key, 20.0)
        assert ahead_s is not None
        assert abs(ahead_s) < 20.0
        service_world.devices["b"].start()
        assert service_world.wait_event("online")["client"] == "b"
    assert [event["client"] for event in service_world.events("online")] == ["b"]
    assert "a" not in [event["client"] for event in service_world.events("offline")]
    assert service_world.events("attempt_opened") == []


def test_a_device_that_gets_no_answer_learns_the_likely_causes(service_world: World, tmp_path: Path) -> None:
    own = service_world.devices["a"].key
    causes = "federation is not started .*federation start.*coordinator run.*missing in the broker's access list .*device show"
    with pytest.raises(NoAnswerError, match=causes):
        talk(service_world, tmp_path, own, 0.5)
    with RunningService(service_world), pytest.raises(NoAnswerError, match="revoked or enrolled again"):
        talk(service_world, tmp_path, SigningKey.generate(), 1.0)
    config = box_config(tmp_path / "ahead")
    PrivateStore.open(config.store, config.federation, "a").save_seen((10**15, 1, 1))
    with RunningService(service_world), pytest.raises(NoAnswerError, match=f"behind epoch {10**15} that this device"):
        talk(service_world, tmp_path / "ahead", own, 1.0)
    with pytest.raises(NoAnswerError, match="the coordinator is not running"):
        talk(service_world, tmp_path, own, 0.5)


def data_finding(config: AgentConfig) -> Finding:
    return examine(config, datetime.now(timezone.utc), ("data",))[0]


def draw(root: Path) -> None:
    for name in ("good", "crack"):
        (root / name).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(np.full((8, 8), 40 * number, dtype=np.uint8)).save(root / name / f"{number}.png")


NO_IMAGE = b"\x89PNG\r\n\x1a\n"
CRACKS, GOOD = (tuple(f"{name}/{number}.png" for number in range(3)) for name in ("crack", "good"))


@pytest.mark.parametrize(
    ("damaged", "gone", "state", "detail", "advice"),
    [
        ((), (), "ok", "6 images in {root} (crack 3, good 3), 6 of them opened", ""),
        (GOOD[1:2], (), "warning", "1 can't be used: {root}/good/1.png", "repair or remove them; training skips them"),
        (CRACKS + GOOD, (), "failed", ", 0 of them opened; 6 can't be used: ", "`root` under [data]"),
        ((), CRACKS[1:], "warning", "crack with one image: too few for training, validation and test", ""),
        ((), CRACKS, "warning", "all of them are of one class, 'good'", "add images of the other classes"),
    ],
)
def test_every_image_is_opened_and_what_training_will_miss_is_named(
    tmp_path: Path, damaged: tuple[str, ...], gone: tuple[str, ...], state: str, detail: str, advice: str
) -> None:
    config = box_config(tmp_path)
    draw(config.data.root)
    for name in damaged:
        (config.data.root / name).write_bytes(NO_IMAGE)
    for name in gone:
        (config.data.root / name).unlink()
    found = data_finding(config)
    named = detail.format(root=config.data.root) in found.detail
    assert (found.state, named, advice in found.advice) == (state, True, True), found


def test_a_name_that_would_steer_the_terminal_is_escaped_by_doctor_and_status(tmp_path: Path) -> None:
    config = write_device(tmp_path)
    draw(tmp_path / "data")
    bad = tmp_path / "data" / "good" / "\x1b[31m\nfailed \u202e\u2066.png"
    bad.write_bytes(b"no image")
    open_store(load_config(config, {}), make=True).save_left_out({bad.name: f"{bad}: not an image"})
    for words in (("doctor",), ("agent", "status")):
        told = run_fedcg(*words, "--config", config).stdout
        assert r"\x1b[31m\nfailed \u202e\u2066.png: not an image" in told
        assert all(line.isprintable() for line in told.split("\n"))


def doctor(config: Path) -> dict[str, dict[str, str]]:
    told = run_fedcg("doctor", "--config", config, "--json")
    assert told.exit_code == 1
    return {one["check"]: one for one in data_of(told.stdout)["findings"]}


@pytest.mark.parametrize(
    ("line", "detail", "next_step"),
    [
        ('store = "/etc/passwd"', "store: /etc/passwd is not a folder", "correct `store`"),
        ('store = "/etc/passwd/box"', "store: /etc/passwd is not a folder", "correct `store`"),
        ('store = "/sys/kernel"', "store: the user with id 65534 can't write to /sys/kernel", "chown"),
        ('store = "/sys/box"', "store: the user with id 65534 can't write to /sys", "correct `store`"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user that may not write")
def test_an_unusable_path_of_the_settings_is_named(open_folder: Path, line: str, detail: str, next_step: str) -> None:
    config = write_device(open_folder)
    text = config.read_text()
    config.write_text(f"{line}\n{text}")
    for path in open_folder.iterdir():
        os.chown(path, NOBODY, -1)
    os.chown(open_folder, NOBODY, -1)
    os.seteuid(NOBODY)
    try:
        found = doctor(config)["paths"]
    finally:
        os.seteuid(0)
    assert (found["state"], detail in found["detail"], next_step in found["advice"]) == ("failed", True, True), found


@pytest.mark.parametrize("place", [".", "train"])
def test_images_in_the_folder_itself_are_named_as_such_not_as_a_class_of_its_name(tmp_path: Path, place: str) -> None:
    config = box_config(tmp_path)
    folders = config.data.root / place
    draw(folders)
    (folders / "good" / "1.png").rename(folders / "1.png")
    found = data_finding(config)
    assert found.state == "warning"
    assert "(crack 3, good 2)" in found.detail
    assert "1 more are directly in this folder instead of a class folder" in found.detail
    for name in ("good", "crack"):
        shutil.rmtree(folders / name)
    found = data_finding(config)
    assert (found.state, "all 1 images are directly in this folder" in found.detail) == ("failed", True)
    assert config.data.root.name not in found.detail.replace(str(config.data.root), "")
    assert found.advice.startswith("move each image into a folder named after its class")


@pytest.mark.parametrize("what", ["crack", "crack/1.png"])
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user that may not read")
def test_a_class_folder_or_image_that_cannot_be_read_is_named(open_folder: Path, what: str) -> None:
    config = box_config(open_folder)
    draw(config.data.root)
    (config.data.root / what).chmod(0)
    os.seteuid(NOBODY)
    try:
        found = data_finding(config)
    finally:
        os.seteuid(0)
    assert found.state == "failed"
    assert f"e.g. {config.data.root / what}: Permission denied" in found.detail
    assert "chown, chmod" in found.advice


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 99
shift
"$@" agent status --config agent.toml --json >status.json; echo $? >status.code
"$@" doctor --config agent.toml --json >doctor.json; echo $? >doctor.code
"$@" agent diagnose --config agent.toml --out support.zip; echo $? >diagnose.code
"$@" agent run --config agent.toml 2>run.txt; echo $? >run.code
"""
NAMESPACE = ("unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)), "sh", "-c")


@pytest.mark.slow
def test_a_read_only_store_is_named_by_doctor_and_agent_and_status_and_diagnose_need_no_more(tmp_path: Path) -> None:
    probe = subprocess.run((*NAMESPACE, "mount --bind /tmp /opt"), capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mount namespace can be made: {probe.stderr.decode()}")
    fedcg = Path(sys.executable).with_name("fedcg")
    with socket.create_server(("127.0.0.1", 0)) as broker:
        config = write_device(tmp_path, port=broker.getsockname()[1])
        draw(tmp_path / "data")
        store = open_store(load_config(config, {}), make=True)
        with store.locked(), store.locked("trainer.lock"):
            pass
        done = subprocess.run((*NAMESPACE, READ_ONLY, "sh", store.root, fedcg), cwd=tmp_path, check=False)
    assert done.returncode == 0
    codes = {name: int((tmp_path / f"{name}.code").read_text()) for name in ("status", "doctor", "diagnose", "run")}
    assert codes == {"status": 0, "doctor": 1, "diagnose": 0, "run": 2}
    assert json.loads((tmp_path / "status.json").read_text())["data"]["running"] is False
    found = {one["check"]: one for one in data_of((tmp_path / "doctor.json").read_text())["findings"]}
    assert set(found) == {one.check for one in examine(load_config(config, {}), datetime.now(timezone.utc))}
    assert {name for name, one in found.items() if one["state"] == "failed"} == {"paths"}
    assert f"can't write to {store.root}, which is on a read-only disk" in found["paths"]["detail"]
    assert "mount it writable" in found["paths"]["advice"]
    assert found["coordinator"]["detail"].startswith("not checked: ")
    ended = (tmp_path / "run.txt").read_text()
    assert f"the private store {store.root} can't be written (Read-only file system)" in ended
    assert f"Mount the disk of {store.root} writable" in ended


def test_a_check_that_the_system_breaks_off_is_a_finding_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Finding:
        raise OSError(errno.EIO, "Input/output error", "/srv/disk")

    monkeypatch.setattr("shutil.disk_usage", broken)
    monkeypatch.setattr("edge_client.cli.doctor.checks.is_revoked", broken)
    found = {one.check: one for one in examine(box_config(tmp_path), datetime.now(timezone.utc))}
    assert (found["disk"].state, found["disk"].detail) == ("failed", "/srv/disk: Input/output error")
    assert "repair" in found["disk"].advice
    assert (found["coordinator"].state, "/srv/disk" in found["coordinator"].detail) == ("failed", True)
    assert "data" in found


def test_an_agent_is_undisturbed_and_what_it_knows_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = box_config(tmp_path)
    store = PrivateStore.open(config.store, FEDERATION, "a")
    events = EventLog(config.store / "events.jsonl", lambda: 1.0)

    def coordinator() -> Finding:
        with store.locked(), socket.create_server(("127.0.0.1", 0)) as broker:
            answering = config.broker.model_copy(update={"port": broker.getsockname()[1]})
            found = examine(config.model_copy(update={"broker": answering}), datetime.now(timezone.utc))
        return next(finding for finding in found if finding.check == "coordinator")

    events.write("agent_started")
    assert coordinator().detail == "the agent runs, but has no answer: it is not connected"
    events.write("link", up=True)
    events.write("welcomed", epoch=1)
    assert coordinator() == Finding("coordinator", "ok", "the agent runs, and the coordinator answered it")
    with monkeypatch.context() as answer:
        answer.setattr("edge_client.cli.status.ask_agent", lambda *_: {"in_session": False})
        assert coordinator().detail == "the agent runs, but has no answer: it has no session"
    events.write("link_problem", detail="not authorized")
    assert coordinator().detail == "the agent runs, but has no answer: not authorized"
    events.write("agent_started")
    assert coordinator().state == "failed"


def test_a_policy_that_refuses_what_the_federation_asks_for_is_a_finding_until_approval(tmp_path: Path) -> None:
    config = box_config(tmp_path)
    store = PrivateStore.open(config.store, FEDERATION, "a")

    def policy() -> Finding:
        return examine(config, datetime.now(timezone.utc), ("policy",))[0]

    assert policy().detail == "not checked: no federation spec yet"
    spec = tiny_spec()
    store.save_spec(spec.canonical())
    assert policy() == Finding("policy", "ok", f"it allows what {FEDERATION} asks for")
    config = config.model_copy(update={"policy": PolicySection(methods=frozenset({"fedprox"}))})
    assert (policy().state, f"does not list {spec.method}" in policy().detail) == ("warning", True)
    Consent(store.root).approve(spec.digest, 0.0)
    assert policy().state == "ok"
    (store.root / "consent.json").write_text("{")
    assert policy().state == "failed"
    sealing = config.model_copy(update={"store": tmp_path / "sealing"})
    PrivateStore.open(sealing.store, FEDERATION, "a").save_spec(complete_spec(usual_plan("fedseal")).canonical())
    (sums,) = examine(sealing, datetime.now(timezone.utc), ("sums",))
    assert (sums.state, "no roster of the cohort" in sums.detail) == ("warning", True), sums
    assert "`fedcg cohort roster FILE` on every device" in sums.advice
