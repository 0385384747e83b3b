"""The cohort's secret: its code, where it is kept, what a device shows of it, and the commands that carry it."""

import json
import re
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.messaging.incoming import Cohorts
from edge_client.config import load_config
from edge_client.errors import CohortError, StoreError
from edge_client.store.cohort_secret import code_of, create, mark_of, secret_of
from edge_client.store.private_store import PrivateStore
from edge_client.store.roster import Roster, card_of, roster_mark, roster_of
from edge_client.store.sum_keeper import SumKeeper
from fedcg.errors import ALREADY_RUNNING, BAD_INPUT, EXISTS, NOT_FOUND
from fedcg.sentences import sentence_of
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.sums import SumRound, SumSecrets
from tests.support.commands import data_of, fails, run_fedcg
from tests.support.edge.world import DEVICE, FEDERATION, MakeWorld, newest, toy_generation, toy_spec, write_device
from tests.support.present import present

SECRETS = st.binary(min_size=32, max_size=32)


def open_store(folder: Path, device: str = "site-1") -> PrivateStore:
    return PrivateStore.open(folder / device, FEDERATION, device)


@given(SECRETS)
def test_a_code_gives_its_secret_back_however_it_is_written(secret: bytes) -> None:
    code = code_of(secret)
    assert secret_of(code) == secret_of(f" {code.lower().replace('-', ' ')}\n") == secret
    assert secret_of(code.replace("O", "0").replace("I", "1").replace("B", "8")) == secret
    assert len(code.split("-")) == 14


@given(SECRETS, st.integers(0, 55), st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
def test_a_mistyped_letter_is_noticed(secret: bytes, place: int, letter: str) -> None:
    letters = code_of(secret).replace("-", "")
    wrong = letters[:place] + letter + letters[place + 1 :]
    if wrong != letters:
        with pytest.raises(CohortError, match="checksum is wrong"):
            secret_of(wrong)


def test_a_mark_is_equal_for_equal_secrets_of_a_federation_alone() -> None:
    first, other = bytes(32), bytes(31) + b"\1"
    assert mark_of(first, "shapes") == mark_of(first, "shapes")
    assert len({mark_of(first, "shapes"), mark_of(other, "shapes"), mark_of(first, "herbs")}) == 3


def test_a_store_whose_private_networks_have_started_takes_no_secret(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.generations.commit(toy_generation(toy_spec(), schemas.RoundAttempt(1, 1)))
    with pytest.raises(StoreError, match="have started here without a cohort secret"):
        create(store)
    assert store.cohort_secret() is None


def test_a_box_that_trained_without_the_secret_or_with_another_joins_by_the_refusals_commands(tmp_path: Path) -> None:
    config = write_device(tmp_path / "box", DEVICE)
    store = PrivateStore.open(load_config(config, {}).store, FEDERATION, DEVICE)
    store.generations.commit(toy_generation(toy_spec(), schemas.RoundAttempt(1, 1)))
    for number, ends in enumerate((BAD_INPUT, EXISTS)):
        code = tmp_path / "code"
        code.write_text(code_of(bytes([number]) * 32))
        join = ("cohort", "join", "--config", config, "--code-file", code)
        refusal = fails(ends, *join)
        command = re.search(r"stop the agent, `(mv [^`]+)`, repeat this command, start the agent", refusal)
        assert command is not None, refusal
        subprocess.run(command[1].replace(".before", f".before-{number}").split(), check=True)
        assert "Joined; mark" in run_fedcg(*join).stdout


def test_a_lost_code_is_replaced_by_the_file_of_another_box(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path, "site-2")
    code = create(first)
    (second.root / "secrets" / "cohort.key").write_bytes((first.root / "secrets" / "cohort.key").read_bytes())
    assert second.cohort_secret() == secret_of(code)


def test_devices_without_a_secret_are_alike_and_unlike_one_that_has_it() -> None:
    cohorts = Cohorts()
    cohorts.note("site-1", None)
    assert cohorts.note("site-2", None) == ()
    assert cohorts.verdict("site-1") is schemas.CohortVerdict.SAME
    assert cohorts.note("mine", "m") == ("site-1", "site-2")
    assert cohorts.verdict("mine") is schemas.CohortVerdict.LACKING
    assert cohorts.verdict("site-1") is schemas.CohortVerdict.DIFFERENT
    cohorts.note("like mine", "m")
    assert cohorts.verdict("mine") is schemas.CohortVerdict.LACKING
    assert "another device has no cohort secret" in str(sentence_of({"event": "cohort", "others": "lacking"}))
    cohorts.note("site-2", "another")
    assert cohorts.verdict("mine") is schemas.CohortVerdict.DIFFERENT


def test_the_commands_carry_a_secret_from_the_first_device_to_another(tmp_path: Path) -> None:
    first, second = (write_device(tmp_path / name, name) for name in ("first", "second"))
    without = run_fedcg("cohort", "status", "--config", first)
    assert without.exit_code == NOT_FOUND
    assert f"No cohort secret.\nNext: on the first device fedcg cohort create --config {first}, on" in without.stdout
    made = data_of(run_fedcg("cohort", "create", "--config", first, "--json").stdout)
    code = tmp_path / "code"
    code.write_text(made["code"] + "\n")
    join = ("cohort", "join", "--config", second, "--code-file", code)
    joined = run_fedcg(*join)
    assert joined.exit_code == 0
    assert f"Joined; mark {made['mark']}\nNext: fedcg cohort card --config {second}\n" in joined.stdout
    for config in (first, second):
        assert store_of(config).cohort_secret() == secret_of(made["code"])
        assert stat.S_IMODE((config.parent / "store" / "secrets" / "cohort.key").stat().st_mode) == 0o600
    nothing: dict[str, object] = {"roster": [], "alone": [], "roster_mark": None, "last_sum_round": 0, "sums": ""}
    status = run_fedcg("cohort", "status", "--config", second, "--json")
    assert data_of(status.stdout) == {"mark": made["mark"], **nothing}
    assert "already has a cohort secret" in fails(EXISTS, "cohort", "create", "--config", first)
    code.write_text("ABCD")
    assert "this one has 4" in fails(BAD_INPUT, *join)
    code.unlink()
    assert str(code) in fails(NOT_FOUND, *join)


def test_every_card_is_signed_by_its_own_key_and_a_bad_line_is_named_with_its_file() -> None:
    keys = [SigningKey.generate() for _ in range(2)]
    lines = [card_of(f"line-{number}", FEDERATION, key) for number, key in enumerate(keys, 1)]
    known = {"line-1": keys[0].public, "line-2": keys[1].public}
    consenting = "\n".join([lines[0], card_of("line-2", FEDERATION, keys[1], alone=True)])
    assert roster_of(consenting, FEDERATION, "roster.txt") == Roster(known, frozenset({"line-2"}))
    assert roster_of("\n".join(["", *lines, ""]), FEDERATION, "roster.txt") == Roster(known)
    device, federation, key, signature = lines[0].split()
    other = SigningKey.generate().public.hex
    for bad, problem in (
        (lines[0], "line-1 or its key occurs twice"),
        (card_of("line-3", FEDERATION, keys[0]), "line-3 or its key occurs twice"),
        (f"line-3 {federation} {key} {signature}", "the card of line-3 is not signed by its own key"),
        (f"{device} {federation} {other} {signature}", "the card of line-1 is not signed by its own key"),
        (f"{device} herbs {key} {signature}", "the card of line-1 is not signed by its own key"),
        (card_of("line-3", "herbs", SigningKey.generate()), f"line-3 is for federation herbs, not for {FEDERATION}"),
        (f"Line-3 {federation} {key} {signature}", "is not a full card of `fedcg cohort card`"),
        (f"{lines[0][:-1]}", "is not a full card"),
        (f"line-3 {key}", "is not a full card"),
        (f"line-1 {federation} {key} alone {signature}", "the card of line-1 is not signed by its own key"),
        (
            card_of("line-3", FEDERATION, SigningKey.generate(), alone=True).replace(" alone", ""),
            "of line-3 is not signed",
        ),
    ):
        with pytest.raises(CohortError, match=f"roster.txt, line 3.*{problem}"):
            roster_of("\n".join([*lines, bad]), FEDERATION, "roster.txt")
    with pytest.raises(CohortError, match=r"roster\.txt contains no card"):
        roster_of("\n", FEDERATION, "roster.txt")


def test_the_mark_of_a_roster_changes_with_every_name_key_and_line_and_not_with_their_order() -> None:
    keys = {f"line-{number}": SigningKey.generate().public for number in range(3)}
    mark = roster_mark(Roster(keys), FEDERATION)
    assert re.fullmatch(r"[0-9a-f]{32}", mark)
    assert roster_mark(Roster(dict(reversed(keys.items()))), FEDERATION) == mark
    consents = {roster_mark(Roster(keys, frozenset(some)), FEDERATION) for some in (["line-1"], ["line-2"], keys)}
    assert len({mark, *consents}) == 4, "and with every consent"
    others = (
        {name: key for name, key in keys.items() if name != "line-2"},
        {**keys, "line-2": SigningKey.generate().public},
        {**keys, "line-3": SigningKey.generate().public},
        {**keys, "line-1": keys["line-2"], "line-2": keys["line-1"]},
    )
    assert (
        len({mark, roster_mark(Roster(keys), "herbs"), *(roster_mark(Roster(other), FEDERATION) for other in others)})
        == 6
    )


def test_the_cards_of_all_devices_give_each_the_same_roster_and_mark(tmp_path: Path) -> None:
    configs = [write_device(tmp_path / name, name) for name in ("first", "second")]
    cards = [run_fedcg("cohort", "card", "--config", config).stdout for config in configs]
    assert cards[0] == run_fedcg("cohort", "card", "--config", configs[0]).stdout, "the key is made once"
    for config, card in zip(configs, cards, strict=True):
        assert SigningKey.load(config.with_name("signing.key")).public.hex not in card
        assert stat.S_IMODE((config.parent / "store" / "secrets" / "sums.key").stat().st_mode) == 0o600
    roster = tmp_path / "roster.txt"
    roster.write_text("".join(cards))
    marks = []
    for config in configs:
        done = run_fedcg("cohort", "roster", roster, "--config", config)
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("2 devices: first, second\nmark of the roster ")
        assert "Compare this mark with every other device's mark" in done.stdout
        assert "A sealed sum needs 4 devices" in done.stdout
        marks.append(done.stdout.split("mark of the roster ")[1].split()[0])
        values = json.loads(run_fedcg("cohort", "status", "--config", config, "--json").stdout)["data"]
        assert (values["roster"], values["roster_mark"]) == (["first", "second"], marks[0])
    roster.write_text(cards[0])
    assert f"lacks this device's own card: {cards[1].strip()}" in fails(
        BAD_INPUT, "cohort", "roster", roster, "--config", configs[1]
    )
    roster.write_text("x" * ((1 << 20) + 1))
    assert "has more than 1048576 characters" in fails(BAD_INPUT, "cohort", "roster", roster, "--config", configs[1])


def test_an_owner_consents_in_the_card_that_members_see_this_device_alone(tmp_path: Path) -> None:
    config = write_device(tmp_path / "first", "first")
    assert run_fedcg("cohort", "create", "--config", config).exit_code == 0
    roster = tmp_path / "roster.txt"
    marks = []
    for words, line in (((), ""), (("--alone",), "Members may see individual numbers of: first")):
        roster.write_text(run_fedcg("cohort", "card", "--config", config, *words).stdout)
        marks.append(data_of(run_fedcg("cohort", "roster", roster, "--config", config, "--json").stdout)["mark"])
        for command in (("roster", roster), ("status",)):
            shown = run_fedcg("cohort", *command, "--config", config).stdout
            assert ("Members may see individual" in shown) == bool(line)
            assert line in shown
    assert marks[0] != marks[1]
    assert PrivateStore(config.parent / "store").roster().alone == {"first"}


def test_two_processes_that_come_to_a_boxs_key_at_once_get_the_same_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        keys = {key.public for key in threads.map(lambda _: PrivateStore(store.root).sum_key(), range(32))}
    assert len(keys) == 1
    assert keys == {PrivateStore(store.root).sum_key().public}


@pytest.fixture
def cohort(tmp_path: Path) -> tuple[Path, Path]:
    """Two devices with one secret that have trained up to round 4."""
    configs = write_device(tmp_path / "first", "first"), write_device(tmp_path / "second", "second")
    for config in configs:
        store = PrivateStore.open(load_config(config, {}).store, FEDERATION, config.parent.name)
        store.keep_cohort_secret(b"c" * 32)
        store.generations.commit(toy_generation(toy_spec(), schemas.RoundAttempt(4, 1)))
        store.save_seen((1, 4, 1))
    return configs


def store_of(config: Path) -> PrivateStore:
    return PrivateStore(load_config(config, {}).store)


def test_a_cohort_gets_another_secret_while_its_federation_runs(cohort: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = cohort
    assert "give --yes" in fails(BAD_INPUT, "cohort", "renew", "--config", first)
    assert store_of(first).cohort_secret() == b"c" * 32
    done = run_fedcg("cohort", "renew", "--config", first, typed="y\n")
    assert done.exit_code == 0, done.output
    assert "This replaces the cohort secret of first." in done.stderr
    patterns = (r"\n  ([A-Z2-7-]{69})\n", r"every device: (\w+)")
    code, mark = (present(re.search(pattern, done.stdout))[1] for pattern in patterns)
    carried = tmp_path / "code"
    carried.write_text(code)
    join = ("cohort", "join", "--config", second, "--code-file", carried)
    assert "`fedcg cohort join --replace` on the others" in fails(EXISTS, *join)
    assert store_of(second).cohort_secret() == b"c" * 32
    with store_of(second).locked():
        assert "stop it first" in fails(ALREADY_RUNNING, *join, "--replace", "--yes")
    joined = run_fedcg(*join, "--replace", "--yes")
    assert joined.stdout.startswith(f"Joined; mark {mark}\n"), joined.output
    assert run_fedcg(*join, "--replace").stdout.startswith("This device had already joined"), "nothing is asked"
    for config in cohort:
        store = store_of(config)
        assert store.cohort_secret() == secret_of(code)
        assert newest(store.generations)[0].round_attempt == schemas.RoundAttempt(4, 1), "networks stay"
        assert store.sum_gate.first_round == 5, "the open round's sum began under the secret before"
        assert store.secrets_of_sum(4) == (secret_of(code), b"c" * 32), "the last sum is still opened"
        assert store.secrets_of_sum(5) == (secret_of(code),), "who has the one before makes no later one"


def test_a_secret_that_is_not_there_or_encrypts_images_is_not_renewed(cohort: tuple[Path, Path]) -> None:
    first, second = cohort
    (store_of(second).root / "secrets" / "cohort.key").unlink()
    assert "has no cohort secret to renew" in fails(NOT_FOUND, "cohort", "renew", "--config", second, "--yes")
    text = first.read_text().replace("[data]\n", '[data]\ndefence = "etc"\ndefence_params = {key = "cohort"}\n')
    first.write_text(text)
    assert "(key = cohort). Trained networks only work with that key" in fails(
        BAD_INPUT, "cohort", "renew", "--config", first, "--yes"
    )
    assert store_of(first).cohort_secret() == b"c" * 32


def test_what_a_store_knows_of_its_sums_decides_from_which_round_on_it_is_in_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    gate = store.sum_gate
    assert (gate.first_round, gate.last_round, gate.obstacle(1)) == (1, 0, "")
    for exchange, number in (("weights", 2), ("parts", 3)):
        store.save_sum_record(cast("schemas.SumExchange", exchange), {"round": number})
    assert (gate.first_round, gate.last_round) == (1, 3)
    gate.block()
    assert (gate.first_round, gate.last_round) == (None, None)
    assert store.sum_record("parts")["round"] == 3, "what it knows of earlier sums stays"
    store.save_sum_record("parts", {"round": 4})
    assert "`fedcg cohort resume-sums ROUND`" in gate.obstacle(99)
    assert gate.resume(2) == 5, "never below what it knows itself"
    assert (gate.obstacle(4), gate.obstacle(5)) == ("this device joins sums from round 5 on", "")


@pytest.mark.parametrize("name", ["sums.json", "weights.json", "sum_gate.json"])
def test_a_record_of_sums_that_is_gone_blocks_them_until_they_are_resumed(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path)
    store.save_sum_record("weights", {"round": 3})
    store.save_sum_record("parts", {"round": 3})
    (store.root / name).unlink()
    store = PrivateStore.open(store.root, FEDERATION, "site-1")
    assert store.check_small_files() == (), "the agent starts"
    assert store.sum_gate.first_round is None
    store.save_sum_record("parts" if name == "weights.json" else "weights", {"round": 4})
    assert store.sum_gate.first_round is None
    assert store.sum_gate.resume(7) == 8
    assert PrivateStore(store.root).sum_gate.obstacle(8) == ""


def test_a_box_whose_record_of_sums_is_gone_says_so_until_its_owner_resumes_them(
    cohort: tuple[Path, Path], tmp_path: Path
) -> None:
    first, _ = cohort
    roster = tmp_path / "roster.txt"
    roster.write_text(run_fedcg("cohort", "card", "--config", first).stdout)
    assert run_fedcg("cohort", "roster", roster, "--config", first).exit_code == 0
    sums = ("cohort", "resume-sums", "17", "--config", first)
    assert "Sums were not blocked" in run_fedcg(*sums).stdout
    (store_of(first).root / "sum_gate.json").unlink()
    shown = (("cohort", "status"), ("agent", "status"), ("doctor",))
    for words in shown:
        output = " ".join(run_fedcg(*words, "--config", first).stdout.split())
        assert "or its record of sums is missing: `fedcg cohort resume-sums ROUND`" in output, words
    assert "last round with a sum: unknown" in run_fedcg("cohort", "status", "--config", first).stdout
    with store_of(first).locked():
        assert "stop it first" in fails(ALREADY_RUNNING, *sums)
    assert "joins sums from round 8 on" in run_fedcg("cohort", "resume-sums", "7", "--config", first).stdout
    assert "joins sums from round 18 on" in run_fedcg(*sums).stdout, "too low a number is corrected"
    assert "last round with a sum: 17" in run_fedcg("cohort", "status", "--config", first).stdout
    for words in shown:
        assert "record of sums is missing" not in " ".join(run_fedcg(*words, "--config", first).stdout.split())


def test_a_box_takes_no_further_step_of_a_sum_that_began_before_its_store_was_restored(make_world: MakeWorld) -> None:
    world = make_world()
    world.connect()
    store, at = PrivateStore(world.config.store), SumRound(FEDERATION, 1, 1, "parts")
    keys = {DEVICE: store.sum_key(), **{f"other-{number}": SigningKey.generate() for number in range(3)}}
    store.save_roster(Roster({name: key.public for name, key in keys.items()}))
    own = present(SumKeeper(store, DEVICE, 4, "parts").announce(at, 5))
    announced = {name: SumSecrets.draw(name).announce(at, 5, key) for name, key in keys.items()}
    members = schemas.SumMembers(announced={**announced, DEVICE: own.model_copy(update={"key": None})})
    asked = schemas.SumDown(**world.coordinator.address(DEVICE, 1, 1), exchange="parts", body=members)
    world.coordinator.tell(asked)
    assert isinstance(world.coordinator.wait(schemas.SumUp).body, schemas.SumShares)
    store.sum_gate.block()
    world.coordinator.tell(asked)
    world.coordinator.work_until(lambda: bool(world.events("refused")), "it refuses")
    assert "the private store was restored" in str(world.events("refused")[0]["detail"])
    refusal, heard = schemas.SumRefused(why=schemas.SumObstacle.BLOCKED), world.coordinator.heard
    world.coordinator.work_until(lambda: refusal in [getattr(message, "body", None) for message in heard], "it says so")
