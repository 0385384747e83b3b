"""Sealed parts over a real broker: the coordinator adds what it can't read, and boxes open the exact mean, or none, whoever is killed when."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from coordinator.paths import Home
from coordinator.storage.store import Store
from edge_client.store.private_store import FINALISED_FILE, PrivateStore
from fedcg.files import checked_secret
from fedcg.learning.heads.classifiers import USUAL_TEMPERATURE, lda_head
from fedcg.learning.heads.moments import class_gaussians
from fedcg.learning.spec import FederationSpec
from fedcg.learning.split_names import WEIGHTS_VARIABLE, weights_digest
from fedcg.learning.tensor_conversion import to_weights
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import Base, unpack
from fedcg.wire.artifacts.payload import Array
from fedcg.wire.errors import SumError
from fedcg.wire.messages.schemas import RoundAttempt
from fedcg.wire.parts import Part
from fedcg.wire.sealed_numbers import Numbers, from_numbers
from fedcg.wire.sums import SumRound, opened, unsealed
from tests.support.commands import fails
from tests.support.learning.networks import SPLIT, write_tiny_weights
from tests.support.stack import Stack, wait_for, write_images

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]

DEVICES = tuple(f"site-{number}" for number in range(1, 6))
SECRET = b"c" * 32
SHARED = ("classifier", "sealed")


def made(root: Path, devices: tuple[str, ...] = DEVICES, *, without_roster: str = "", **wishes: Any) -> Stack:
    """Devices that know each other's keys for sums by their owners' files."""
    wishes = {"method": "fedavg", "params": {"epochs": 12}, "sealed": ("extractor",), **wishes}
    stack = Stack(root=root, devices=devices, allow_upload=dict.fromkeys(devices, SHARED), **wishes)
    stack.prepare()
    stack.share_cards(but=without_roster)
    return stack


def add_images(stack: Stack, device: str, per_class: int) -> None:
    """Gives a device more training images."""
    more = stack.root / f"more-{device}"
    write_images(more, per_class=per_class, seed=300 + DEVICES.index(device))
    for image in more.rglob("*.png"):
        image.rename(stack.root / "data" / device / "train" / image.parent.name / f"more-{image.name}")


def ended(stack: Stack) -> list[tuple[str, int]]:
    found = [(event["event"], event["round"]) for event in stack.events("coordinator") if "round" in event]
    return [one for one in found if one[0] in ("sum_opened", "sum_off")]


@dataclass
class Seen:
    """A round as it crossed: the sum that the coordinator published, numbers and images of each update, and the mean that a secret opens.

    `bare` are the numbers of each update as a member sees them who has the secret.
    """

    total: Numbers
    told: dict[str, Numbers]
    bare: dict[str, Numbers]
    images: dict[str, int]
    mean: Mapping[str, Array]


def of_round(stack: Stack, number: int, secret: bytes = SECRET, part: Part = Part.EXTRACTOR) -> Seen:
    artifacts = ArtifactStore(Home(stack.home).artifacts)
    with contextlib.closing(Store.of(Home(stack.home))) as store:
        spec = FederationSpec.parse(artifacts.get(store.federation("shapes").spec))
        before, aggregate = store.aggregate("shapes", number - 1), store.aggregate("shapes", number)
        assert before is not None
        assert aggregate is not None
        updates = store.updates("shapes", RoundAttempt(number, aggregate.attempt))
    layouts = {part: spec.layouts[part] for part in spec.upload}
    base = Base(before.artifact, unpack(artifacts.get(before.artifact), layouts).parts)
    told = {update.client: unpack(artifacts.get(update.artifact), layouts, base=base) for update in updates}
    merged = unpack(artifacts.get(aggregate.artifact), layouts)
    (one,) = merged.header.sums
    assert (one.round, one.parts) == (number, spec.sealed)
    numbers = cast("dict[str, Numbers]", merged.parts[Part.SEALED])
    assert spec.sealed_range is not None
    found = opened(numbers, [one], "shapes", secret)[part]
    mean = from_numbers(found, spec.layouts[part], spec.sealed_range)
    crossed = {name: cast("Numbers", each.parts[Part.SEALED][part.value]) for name, each in told.items()}
    at = SumRound("shapes", one.round, one.attempt)
    bare = {name: unsealed(each, at, one.digest, [name], secret) for name, each in crossed.items()}
    return Seen(numbers[part.value], crossed, bare, images_of(stack, told), mean)


def images_of(stack: Stack, devices: Iterable[str]) -> dict[str, int]:
    """The training images of devices, as their own logs have them."""
    last = {name: [event for event in stack.events(name) if event["event"] == "committed"][-1] for name in devices}
    return {name: int(event["train_images"]) for name, event in last.items()}


def own_part(stack: Stack, device: str, part: Part = Part.EXTRACTOR) -> dict[str, Array]:
    """A device's part of its last round, as it never leaves it."""
    stored = PrivateStore.open(stack.store(device), "shapes", device).generations.load()
    assert stored is not None
    return dict(stored.slots["personal"][part])


def check_mean(stack: Stack, seen: Seen, devices: tuple[str, ...]) -> None:
    """That the opened mean is that of the private extractors of these devices, by their images, where none has over two fifths of it."""
    private = [own_part(stack, device) for device in devices]
    total = sum(seen.images.values())
    images = [min(seen.images[device], (total - seen.images[device]) * 0.4 / 0.6) for device in devices]
    for name, mean in seen.mean.items():
        wanted = np.average(np.stack([one[name] for one in private]), axis=0, weights=images)
        assert np.abs(mean - wanted).max() < 7e-6


def looks_uniform(numbers: Numbers) -> bool:
    ones = [float(np.mean(numbers >> bit & 1)) for bit in range(32)]
    return bool(max(abs(share - 0.5) for share in ones) < 4.5 * 0.5 / len(numbers) ** 0.5)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A finished federation that nobody disturbed."""
    stack = made(tmp_path_factory.mktemp("undisturbed"))
    with stack.up(agents=True):
        stack.wait_finished()
        yield stack


def test_holders_of_the_secret_open_the_mean_of_all_extractors_and_for_others_all_that_crosses_looks_like_chance(
    undisturbed: Stack,
) -> None:
    assert ended(undisturbed) == [("sum_opened", 1), ("sum_opened", 2)]
    seen = of_round(undisturbed, 2)
    check_mean(undisturbed, seen, DEVICES)
    assert looks_uniform(seen.total), "the coordinator's own sum"
    assert all(looks_uniform(numbers) for numbers in [*seen.told.values(), *seen.bare.values()])
    with pytest.raises(SumError, match="another secret"):
        of_round(undisturbed, 2, b"d" * 32)


def test_with_everything_sealed_counts_are_of_the_boxes_alone_and_the_mean_is_weighted_by_them(tmp_path: Path) -> None:
    stack = made(tmp_path, sealed=("extractor", "classifier"), rounds=1)
    for image in sorted((tmp_path / "data" / "site-1" / "train").rglob("*.png"))[::3]:
        image.unlink()
    add_images(stack, "site-5", per_class=200)
    with stack.up(agents=True):
        stack.wait_finished()
    assert ended(stack) == [("sum_opened", 1)]
    seen = of_round(stack, 1)
    assert seen.images["site-5"] > 0.7 * sum(seen.images.values()), (
        "without the bound the mean would be this one's extractor"
    )
    check_mean(stack, seen, DEVICES)
    with contextlib.closing(Store.of(Home(stack.home))) as store:
        kept = json.loads(store.sealed_sums.of("shapes", RoundAttempt(1, 1)) or "")
        updates = store.updates("shapes", RoundAttempt(1, 1))
    assert {keys["weight"] for record in kept.values() for keys in record["keys"].values()} == {1}
    reports = [json.loads(update.report or "{}") for update in updates]
    assert not any("examples" in report for report in reports)
    twentieths = [20 * report["accuracy"] for report in reports]
    assert twentieths == pytest.approx([round(number) for number in twentieths]), "no fraction of the test images"


def test_a_killed_agent_and_a_killed_coordinator_go_on_to_the_same_mean(tmp_path: Path, undisturbed: Stack) -> None:
    stack = made(tmp_path)
    with stack.up(agents=True):
        stack.wait_event("site-2", lambda event: is_training(event, 1), "its training is under way")
        stack.kill("site-2")
        stack.start_agent("site-2")
        stack.wait_event("coordinator", lambda event: event["event"] == "update_stored", "an update is stored")
        stack.kill("coordinator")
        stack.start_coordinator()
        stack.wait_event("site-3", lambda event: is_training(event, 2), "its training of round 2 is under way")
        stack.kill("site-3")
        stack.start_agent("site-3")
        stack.wait_finished()
        assert ended(stack) == [("sum_opened", 1), ("sum_opened", 2)]
        undisturbed_mean = of_round(undisturbed, 2).mean
        for name, mean in of_round(stack, 2).mean.items():
            assert np.array_equal(mean, undisturbed_mean[name])


def test_a_device_that_is_lost_after_its_masks_costs_the_others_nothing(tmp_path: Path) -> None:
    stack = made(tmp_path, min_clients=4, deadline_s=25.0)
    with stack.up(agents=True):
        stack.wait_event("site-5", lambda event: is_training(event, 2), "its training of round 2 is under way")
        stack.kill("site-5")
        wait_for(lambda: ("sum_opened", 2) in ended(stack), "the sum of those that are left, who have moved, is opened")
        wait_for(lambda: any(event["event"] == "finished" for event in stack.events("coordinator")), "it is over")
    check_mean(stack, of_round(stack, 2), DEVICES[:4])


def refusals(stack: Stack, device: str) -> list[str]:
    return [event["detail"] for event in stack.events(device) if event["event"] == "refused" and event["what"] == "sum"]


def test_a_device_is_forgotten_by_the_exact_sum_of_the_rest_once_its_owner_consents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists of rounds 1 and 3 differ by site-5, whose owner consented in between; in round 2 nobody signs."""
    weights = write_tiny_weights(tmp_path / "weights")
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(weights.parent))
    frozen: dict[str, Any] = {"split": SPLIT, "weights": weights_digest(weights)}
    stack = made(tmp_path, method="analytic", params={}, sealed=(), rounds=1, **frozen)
    rest, home = DEVICES[:4], ("--dir", str(stack.home))

    def await_end(rounds: int) -> None:
        def is_over() -> bool:
            return len([event for event in stack.events("coordinator") if event["event"] == "finished"]) == rounds

        wait_for(is_over, f"round {rounds} is over: {stack.tail('coordinator')}")

    def outcomes(number: int) -> list[tuple[float, float]]:
        found = [PrivateStore(stack.store(device)) for device in rest[1:]]
        wait_for(
            lambda: all(one.record(FINALISED_FILE).get("round") == number for one in found),
            "they have chosen their models",
        )
        return [
            (one.record(FINALISED_FILE)["loss_val_own"], one.record(FINALISED_FILE)["loss_val_downloaded"])
            for one in found
        ]

    with stack.up():
        for device in DEVICES:
            stack.start(device, "agent", "run", "--config", str(stack.config(device)))
        await_end(1)
        before = outcomes(1)
        assert all(own != downloaded for own, downloaded in before)
        first, images = of_round(stack, 1, part=Part.STATISTICS), images_of(stack, DEVICES)
        own = {device: own_part(stack, device, Part.STATISTICS) for device in DEVICES}
        check_moments(first.mean, own, images)
        add_images(stack, "site-1", per_class=3)
        stack.command("federation", "set", "shapes", "min_clients=4", *home)
        told = stack.command("federation", "forget", "shapes", "site-5", "--yes", *home)
        assert "round 2 of 2" in told
        assert "`fedcg cohort card --alone`" in told
        await_end(2)
        assert ended(stack) == [("sum_opened", 1), ("sum_off", 2)]
        assert outcomes(2) == before, "without a new sum the last one counts"
        for device in rest:
            assert any("only by site-5" in why and "card --alone" in why for why in refusals(stack, device))

        card = stack.command("cohort", "card", "--alone", "--config", str(stack.config("site-5")))
        lines = [line for line in (tmp_path / "roster.txt").read_text().splitlines() if not line.startswith("site-5 ")]
        (tmp_path / "roster.txt").write_text("\n".join([*lines, card]))
        for device in rest:
            stack.command("cohort", "roster", str(tmp_path / "roster.txt"), "--config", str(stack.config(device)))
        stack.command("federation", "extend", "shapes", "--rounds", "1", *home)
        await_end(3)
    assert ended(stack)[2:] == [("sum_opened", 3)]
    (grown,) = [event["detail"] for event in stack.events("site-1") if event["event"] == "method_warning"]
    assert "are not used" in grown
    seen = of_round(stack, 3, part=Part.STATISTICS)
    assert sorted(seen.told) == list(rest)
    check_moments(seen.mean, {device: own[device] for device in rest}, images)


def check_moments(mean: Mapping[str, Array], own: Mapping[str, Mapping[str, Array]], images: Mapping[str, int]) -> None:
    """That an opened mean is that of the pooled images of these devices, and so is the head that it gives."""
    weights = [images[device] for device in own]
    pooled = {name: np.average([one[name] for one in own.values()], axis=0, weights=weights) for name in mean}
    for name, numbers in mean.items():
        assert np.abs(numbers - pooled[name]).max() < 1e-5
    found, wanted = (class_gaussians(to_weights({Part.STATISTICS: one})[Part.STATISTICS]) for one in (mean, pooled))
    assert found is not None
    assert wanted is not None
    heads = [lda_head(one, torch.zeros(3), 0.5, USUAL_TEMPERATURE, "") for one in (found, wanted)]
    for name, weight in heads[0].items():
        assert torch.allclose(weight, heads[1][name], rtol=1e-3, atol=1e-3 * float(weight.abs().max()))


def test_a_device_declines_to_train_less_than_its_owner_wants(tmp_path: Path) -> None:
    stack = made(tmp_path, attack="hurry", params={"epochs": 4}, rounds=1)
    with stack.up(agents=True):
        declined = stack.wait_event("site-1", lambda event: event["event"] == "declined", "it declines")
        assert (declined["reason"], "policy.least_share" in declined["detail"]) == ("no_sum", True), declined


def test_a_sum_in_which_the_coordinator_changed_one_number_is_used_by_nobody(tmp_path: Path) -> None:
    stack = made(tmp_path, attack="changed")
    with stack.up(agents=True):
        stack.wait_finished()
        assert ended(stack) == [("sum_opened", 1), ("sum_opened", 2)]
        assert all(any("was altered in transit" in text for text in refusals(stack, one)) for one in DEVICES)


def test_a_mean_that_a_lying_device_makes_useless_costs_a_round_and_no_model(tmp_path: Path) -> None:
    stack = made(tmp_path, liar="site-5", params={"epochs": 4})
    for device in DEVICES:
        add_images(stack, device, per_class=80)  # enough of them to judge by
    with stack.up(agents=True):
        stack.wait_finished(deadline_s=120.0)
        assert ended(stack) == [("sum_opened", 1), ("sum_opened", 2)]
        for device in DEVICES[:4]:
            assert any("is useless on" in text for text in refusals(stack, device))
            kept = [event["accuracy_personal"] for event in stack.events(device) if event["event"] == "committed"]
            assert kept[1] >= kept[0] - 0.05


def test_a_device_without_the_roster_declines_and_one_with_another_cohort_secret_is_in_no_sum(tmp_path: Path) -> None:
    rest = ("site-2", "site-3", "site-4", "site-6")
    stack = made(tmp_path, (*DEVICES, "site-6"), without_roster="site-1", min_clients=4, rounds=1)
    lines = (tmp_path / "roster.txt").read_text().splitlines()
    (tmp_path / "forged.txt").write_text(
        "\n".join([lines[0].replace(lines[0].split()[2], lines[1].split()[2]), *lines[1:]])
    )
    forged = fails(2, "cohort", "roster", tmp_path / "forged.txt", "--config", stack.config("site-1"))
    assert "the card of site-1 is not signed by its own key" in forged
    (stack.store("site-5") / "secrets" / "cohort.key").write_bytes(checked_secret(b"d" * 32))
    with stack.up(agents=True):
        stack.wait_finished(deadline_s=90.0)
        declined = [event for event in stack.events("site-1") if event["event"] == "declined"]
        assert "fedcg cohort card" in declined[0]["detail"]
        barred = [event["clients"] for event in stack.events("coordinator") if event["event"] == "barred"]
        assert ["site-5: its cohort secret differs from that of most devices"] in barred, "once most have come"
        assert ended(stack) == [("sum_opened", 1)]
        seen = of_round(stack, 1)
        assert sorted(seen.told) == list(rest)
        check_mean(stack, seen, rest)


def is_training(event: dict[str, Any], number: int) -> bool:
    """Progress inside the classifier's training of a round."""
    return bool(event["event"] == "progress" and event["phase"] == "classify" and event["round"] == number)


def test_moments_are_of_fresh_halves_once_a_device_is_gone_so_their_sums_go_on(tmp_path: Path) -> None:
    stack = made(tmp_path, (*DEVICES, "site-6"), method="fedseal", params={"epochs": 2}, rounds=8, min_clients=4)
    for device in DEVICES:
        add_images(stack, device, per_class=20)
    with stack.up(agents=True):
        stack.wait_event("coordinator", lambda one: (one["event"], one.get("round")) == ("sum_opened", 4), "four sums")
        stack.kill("site-6")
        stack.wait_event("coordinator", lambda one: one["event"] == "finished", "the end")
        assert {("sum_opened", 6), ("sum_opened", 8)} & set(ended(stack))
