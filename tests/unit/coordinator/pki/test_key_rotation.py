"""The coordinator replaces its message key: killed at any point, the key that counts can be loaded, and devices learn of it."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.cli.opening import create_home
from coordinator.config import CoordinatorConfig
from coordinator.errors import HomeError, PlanError
from coordinator.members.enrolment import enrol
from coordinator.paths import Home
from coordinator.pki.signing_keys import SigningIdentity, key_file, load_signing_identity, rotate_key
from coordinator.storage.database import make_engine
from coordinator.storage.store import Store
from edge_client.identity.enrol import enrol as enrol_box
from fedcg.wire.messages.envelopes import PinnedKey, SigningKey, VerifyKey, make_link, open_envelope, open_key_chain
from fedcg.wire.messages.schemas import COORDINATOR, Offer, Receipt
from fedcg.wire.messages.topics import Topics
from tests.support.commands import data_of, run_fedcg
from tests.support.coordinator.enrolments import open_home, running_desk
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.coordinator.world import MakeWorld, RunningService
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return open_home(tmp_path_factory.mktemp("rotating") / "home")


@pytest.fixture
def opened(made: Home) -> Iterator[tuple[Home, Store]]:
    """A home before any rotation."""
    store = Store(made.database)
    yield made, store
    engine = make_engine(made.database)
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM key_links")
    engine.dispose()
    for path in made.root.glob("signing-*.key"):
        path.unlink()
    store.close()


def test_a_rotation_makes_a_key_that_the_old_one_signs_and_keeps_the_old_one(opened: tuple[Home, Store]) -> None:
    home, store = opened
    first = load_signing_identity(home, store)
    links = [rotate_key(home, store, 1.0), rotate_key(home, store, 2.0)]
    now = load_signing_identity(home, store)
    assert now.links == tuple(links)
    assert [link.serial for link in links] == [1, 2]
    assert (links[0].old, links[0].new) == (first.key.public.hex, links[1].old)
    assert now.key.public.hex == links[1].new
    assert SigningKey.load(home.signing_key).public == first.key.public
    for serial in (1, 2):
        assert stat.S_IMODE(key_file(home, serial).stat().st_mode) == 0o600


class CutError(BaseException):
    """Stands for the end of the process."""


def test_killed_before_the_commit_the_old_key_counts_and_the_next_try_uses_the_same_file(
    opened: tuple[Home, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, store = opened
    first = load_signing_identity(home, store)

    def cut(*_: object) -> None:
        raise CutError

    with monkeypatch.context() as patched:
        patched.setattr(store, "add_key_links", cut)
        with pytest.raises(CutError):
            rotate_key(home, store, 1.0)
    assert load_signing_identity(home, store).key.public == first.key.public
    left = SigningKey.load(key_file(home, 1)).public
    assert rotate_key(home, store, 2.0).new == left.hex
    assert load_signing_identity(home, store).key.public == left


def test_killed_while_the_key_was_written_the_torn_file_is_replaced(opened: tuple[Home, Store]) -> None:
    home, store = opened
    key_file(home, 1).write_bytes(home.signing_key.read_bytes()[:40])
    link = rotate_key(home, store, 1.0)
    assert load_signing_identity(home, store).key.public.hex == link.new


def test_a_directory_without_the_key_that_devices_know_says_what_to_do(opened: tuple[Home, Store]) -> None:
    home, store = opened
    rotate_key(home, store, 1.0)
    path = key_file(home, 1)
    path.unlink()
    with pytest.raises(HomeError, match=r"restore .*signing-1\.key from a backup"):
        load_signing_identity(home, store)
    SigningKey.generate().save(path)
    with pytest.raises(HomeError, match="not the key that devices know"):
        load_signing_identity(home, store)


def test_new_boxes_get_the_current_key_by_bundle_and_by_token(opened: tuple[Home, Store], tmp_path: Path) -> None:
    home, store = opened
    link = rotate_key(home, store, 1.0)
    bundles = enrol(home, store, ["line-8"], tmp_path, 2.0)
    assert VerifyKey.load_all(bundles["line-8"] / "coordinator.pub")[0].hex == link.new
    with running_desk(home) as desk:
        box = enrol_box(desk.token("line-9"), tmp_path / "box")
        assert VerifyKey.load_all(box.config.parent / "coordinator.pub")[0].hex == link.new


def test_the_command_tells_what_it_did_and_refuses_where_nobody_knows_the_key(
    opened: tuple[Home, Store], tmp_path: Path
) -> None:
    home, store = opened
    result = run_fedcg("coordinator", "rotate-key", "--dir", str(home.root), "--json")
    assert result.exit_code == 0, result.output
    told = data_of(result.stdout)
    assert (told["serial"], told["key"]) == (1, load_signing_identity(home, store).key.public.hex)
    empty = create_home(tmp_path / "empty", CoordinatorConfig())
    result = run_fedcg("coordinator", "rotate-key", "--dir", str(empty.root))
    assert result.exit_code == 2
    fresh = Store(empty.database)
    with pytest.raises(PlanError, match="no federation yet"):
        rotate_key(empty, fresh, 1.0)
    fresh.close()


def test_a_running_coordinator_publishes_the_new_key_first_and_then_everything_signed_by_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.service.service.REFRESH_S", 0.1)
    world = make_world(rounds=1)
    world.devices["b"].silent = True
    topics, sent = Topics(FEDERATION), list[tuple[str, bytes]]()
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: len(world.devices["a"].of(Receipt)) == 1, "a has delivered")
        world.broker.record = lambda _identity, topic, payload: sent.append((topic, payload))
        old, new = world.key, SigningKey.generate()
        world.signing_identity = SigningIdentity(new, (make_link(FEDERATION, 1, 1, old, new.public),))
        for device in world.devices.values():
            device.coordinator = new
        world.wait_event("key_rotated")
        wait_until(lambda: topics.offer in dict(sent), "the offer is published again")
        first, chain = next((topic, data) for topic, data in sent if topic in (topics.keys, topics.offer))
        assert first == topics.keys
        assert open_key_chain(chain, FEDERATION, PinnedKey(old.public)) == PinnedKey(new.public, 1)
        assert isinstance(open_envelope(dict(sent)[topics.offer], lambda _: new.public), Offer)
        world.devices["b"].silent = False
        world.devices["b"].act()
        world.wait_event("finished")
        sent.clear()
        world.broker.drop(COORDINATOR)  # the broker publishes its will
        wait_until(lambda: topics.coordinator in dict(sent), "the will")
        status = open_envelope(dict(sent)[topics.coordinator], lambda _: new.public)
        assert (status.kind, status.sender) == ("coordinator_status", COORDINATOR)
