"""A box that leaves for good: a signed goodbye that the coordinator confirms, and what is erased afterwards."""

import shutil
import stat
from pathlib import Path

import pytest

from edge_client.config import AgentConfig, DataSection, load_config
from edge_client.errors import EnrolError, NoAnswerError, StoreLockedError
from edge_client.identity.conversation import leave
from edge_client.identity.enrol import enrol
from edge_client.store.private_store import PrivateStore
from fedcg.config_file import set_values
from fedcg.errors import BAD_INPUT, NOT_FOUND
from fedcg.wire.messages.envelopes import SigningKey, seal
from fedcg.wire.messages.schemas import Left
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transport.transport import Delivery
from tests.support.broker.memory import MemoryTransport
from tests.support.commands import data_of, run_fedcg, succeeds
from tests.support.coordinator.enrolments import open_home, running_desk
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.coordinator.world import World
from tests.support.edge.conversations import talk
from tests.support.edge.filled_store import files_of

TOPICS = Topics(FEDERATION)


def test_a_coordinators_confirmation_that_is_forged_is_not_believed(service_world: World, tmp_path: Path) -> None:
    """Nobody answers but somebody with another key."""
    forger = MemoryTransport(service_world.broker, "coordinator")
    forged = Left(federation=FEDERATION, sender="coordinator", recipient="a")
    forger.subscribe(TOPICS.up_control("a"))
    key = SigningKey.generate()

    def answer(_delivery: Delivery) -> None:
        forger.publish(TOPICS.down_control("a"), seal(forged, key))

    forger.start(answer, lambda _up: None)
    with pytest.raises(NoAnswerError, match="the broker delivers nothing"):
        talk(service_world, tmp_path, service_world.devices["a"].key, 1.0, is_leaving=True)
    forger.close()


# ------------------------------------------------------------------ what is erased


@pytest.fixture
def enrolled(tmp_path: Path) -> AgentConfig:
    """A box with keys, certificates, a private store with a model, and images."""
    (tmp_path / "images" / "bar").mkdir(parents=True)
    (tmp_path / "images" / "bar" / "1.png").write_bytes(b"image")
    with running_desk(open_home(tmp_path / "home")) as desk:
        enrol(desk.token("line-4"), tmp_path / "box", data=str(tmp_path / "images"))
    config = load_config(tmp_path / "box" / "agent.toml", {})
    store = PrivateStore.open(config.store, config.federation, config.device)
    store.device_secret()
    (store.root / "models" / "0001").mkdir()
    (store.root / "models" / "0001" / "model.onnx").write_bytes(b"model")
    return config


def erased(box: Path) -> str:
    """What the command prints that erases a box without its coordinator."""
    words = ("leave", "--config", box / "agent.toml", "--erase", "--without-coordinator", "--yes")
    return succeeds("agent", *words)


def test_without_erase_everything_stays(enrolled: AgentConfig, tmp_path: Path) -> None:
    before = files_of(tmp_path / "box")
    assert leave(enrolled, erase=False, notify=False, timeout_s=1.0).erased == ()
    assert before.items() <= files_of(tmp_path / "box").items()
    assert stat.S_IMODE((tmp_path / "box" / "signing.key").stat().st_mode) == 0o600


def test_nothing_is_erased_when_nobody_confirms_or_an_agent_runs_or_the_images_lie_in_the_store(
    enrolled: AgentConfig, tmp_path: Path
) -> None:
    with pytest.raises(EnrolError, match=r"did not confirm.*Nothing was erased.*fedcg device revoke line-4"):
        leave(enrolled, erase=True, notify=True, timeout_s=1.0)
    before = files_of(tmp_path / "box")
    store = PrivateStore.open(enrolled.store, enrolled.federation, enrolled.device)
    with store.locked(), pytest.raises(StoreLockedError):
        leave(enrolled, erase=True, notify=False, timeout_s=1.0)
    inside = enrolled.model_copy(update={"data": DataSection(root=enrolled.store / "images")})
    with pytest.raises(EnrolError, match="move them first"):
        leave(inside, erase=True, notify=False, timeout_s=1.0)
    assert files_of(tmp_path / "box") == before


def test_an_erasure_that_was_cut_off_can_be_finished(enrolled: AgentConfig, tmp_path: Path) -> None:
    enrolled.keys.signing.unlink()
    (enrolled.store / "secrets" / "device.key").unlink()
    leave(enrolled, erase=True, notify=False, timeout_s=1.0)
    assert set(files_of(tmp_path / "box")) == {"agent.toml"}


def test_the_command_asks_first_and_says_what_happened(enrolled: AgentConfig, tmp_path: Path) -> None:
    config = str(tmp_path / "box" / "agent.toml")
    arguments = ["leave", "--config", config, "--erase", "--without-coordinator"]
    before = files_of(tmp_path / "box")
    for typed in ("n\n", ""):
        refused = run_fedcg("agent", *arguments, typed=typed)
        assert (refused.exit_code, "personal models" in refused.output) == (2, True)
    assert files_of(tmp_path / "box") == before
    unheard = run_fedcg("agent", "leave", "--config", config, "--erase", "--yes", "--timeout", "1s")
    assert unheard.exit_code == 3
    assert "--without-coordinator" in unheard.output
    told = data_of(succeeds("agent", *arguments, "--yes", "--json"))
    assert (told["device"], told["confirmed"]) == ("line-4", False)
    assert str(enrolled.store) in told["erased"]
    again = run_fedcg("agent", *arguments, "--yes")
    assert again.exit_code == NOT_FOUND
    assert "no private store: nothing to leave" in again.output


def test_files_that_this_program_did_not_make_stay_and_are_named(enrolled: AgentConfig, tmp_path: Path) -> None:
    strangers = {"notes.txt", "notes.json", "photos/cat.png"}
    (enrolled.store / ".left_out.json.k2_x9a1b.new").write_text("half of it, when the power was cut")
    (enrolled.store / "photos").mkdir()
    for name in strangers:
        (enrolled.store / name).write_text("the owner's")
    (tmp_path / "box" / "tls" / "plans.next").write_text("the owner's")
    told = erased(tmp_path / "box")
    assert (set(files_of(enrolled.store)), set(files_of(tmp_path / "box" / "tls"))) == (strangers, {"plans.next"})
    for name in ("notes.json", "notes.txt", "photos"):
        assert f"kept {enrolled.store / name}: not created by this program" in told


def test_a_store_moved_aside_is_named_with_the_command_that_removes_it(enrolled: AgentConfig, tmp_path: Path) -> None:
    before = enrolled.store.with_name("store.before")
    enrolled.store.rename(before)
    (tmp_path / "box" / "store.txt").write_text("the owner's")
    PrivateStore.open(enrolled.store, enrolled.federation, enrolled.device)
    told = erased(tmp_path / "box")
    assert f"rm -r {before}\n" in told
    assert "store.txt" not in told
    assert (before / "models" / "0001" / "model.onnx").exists()


def test_the_certificates_of_the_system_stay(enrolled: AgentConfig, tmp_path: Path) -> None:
    assert enrolled.tls is not None
    bundle = enrolled.tls.ca.rename(tmp_path / "ca-certificates.crt")
    file = tmp_path / "box" / "agent.toml"
    file.write_text(file.read_text().replace("tls/ca.pem", str(bundle)))
    leave(load_config(file, {}), erase=True, notify=False, timeout_s=1.0)
    assert bundle.exists()
    assert set(files_of(tmp_path / "box")) == {"agent.toml"}


def test_no_command_that_fails_or_only_reads_makes_a_store(enrolled: AgentConfig, tmp_path: Path) -> None:
    config = str(tmp_path / "box" / "agent.toml")
    erased(tmp_path / "box")
    (tmp_path / "empty").touch()
    for words in (
        ("agent", "leave", "--config", config, "--yes"),
        ("agent", "leave", "--config", config, "--yes", "--erase"),
        ("agent", "run", "--config", config),
        ("agent", "approve", "--config", config, "--yes"),
        ("agent", "status", "--config", config),
        ("cohort", "status", "--config", config),
        ("cohort", "join", "--config", config, "--code-file", tmp_path / "empty"),
        ("cohort", "roster", "--config", config, tmp_path / "empty"),
    ):
        assert run_fedcg(*words).exit_code > 0, words
        assert not enrolled.store.exists(), words
    assert run_fedcg("agent", "diagnose", "--config", config, "--out", tmp_path / "a.zip").exit_code == 0
    run_fedcg("doctor", "--config", config)
    assert not enrolled.store.exists()


def test_a_box_that_never_ran_leaves_without_a_store(enrolled: AgentConfig) -> None:
    shutil.rmtree(enrolled.store)
    with pytest.raises(EnrolError, match="did not confirm"):
        leave(enrolled, erase=True, notify=True, timeout_s=0.5)
    assert enrolled.keys.signing.exists()
    assert not enrolled.store.exists()


@pytest.mark.parametrize("place", ["", ".", "tls"])
def test_a_store_is_only_made_in_a_folder_of_its_own(enrolled: AgentConfig, tmp_path: Path, place: str) -> None:
    shutil.rmtree(enrolled.store)
    config, before = tmp_path / "box" / "agent.toml", set(files_of(tmp_path / "box"))
    config.write_text(set_values(config.read_text(), {("", "store"): place}))
    refused = run_fedcg("agent", "run", "--config", config)
    assert (refused.exit_code, "store" in refused.stderr, "new" in refused.stderr) == (BAD_INPUT, True, True)
    examined = run_fedcg("doctor", "--config", config)
    assert examined.exit_code > 0
    assert "store" in examined.output
    assert run_fedcg("agent", "leave", "--erase", "--yes", "--without-coordinator", "--config", config).exit_code > 0
    assert set(files_of(tmp_path / "box")) == before


def test_a_store_is_made_beside_the_folder_of_models_and_on_a_disk_of_its_own(tmp_path: Path) -> None:
    for name in ("models", "lost+found", "secrets"):
        (tmp_path / name).mkdir()
    assert PrivateStore.open(tmp_path, "shapes", "line-4").is_made


def test_a_store_whose_making_was_cut_off_is_made(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    for name in (".format.json.abcd1234.new", ".sum_gate.json.abcd1234.new", ".counter.json.abcd1234.new"):
        (tmp_path / "store" / name).touch()
    store = PrivateStore.open(tmp_path / "store", FEDERATION, "line-4")
    assert (store.is_made, len(store.own())) == (True, 11)
