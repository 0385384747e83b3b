"""Sealed sums: exact whoever is lost at whichever step, and never opened for a coordinator that cheats."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from audit.recording.capture import worst_bit
from fedcg.learning.heads.classifiers import lda_head
from fedcg.learning.heads.moments import class_gaussians, moments_of
from fedcg.wire import sums
from fedcg.wire.errors import SignatureError, SumError
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey
from fedcg.wire.messages.schemas import SumKeys
from fedcg.wire.parts import TensorLayout
from fedcg.wire.sealed_numbers import Numbers, added, clipped, from_numbers, to_numbers

AT = sums.SumRound("shapes", 3, 1)
SIZE = 7
SECRET = bytes(range(32))


@dataclass
class World:
    """Devices after the first two steps: keys announced, shares dealt out."""

    keys: dict[str, SigningKey]
    secrets: dict[str, sums.SumSecrets]
    members: sums.Members
    dealt: dict[str, dict[str, bytes]]
    numbers: dict[str, Numbers]

    @property
    def roster(self) -> dict[str, VerifyKey]:
        return {name: key.public for name, key in self.keys.items()}

    @property
    def names(self) -> list[str]:
        return sorted(self.keys)

    def received(self, name: str, peers: list[str]) -> dict[str, bytes]:
        """What the coordinator passes on to a device."""
        return {peer: self.dealt[peer][name] for peer in peers}

    def total(self, peers: list[str], survivors: list[str]) -> Numbers:
        """The sum of what the survivors sent."""
        return added([self.masked(name, peers, self.numbers[name]) for name in survivors])

    def masked(self, name: str, peers: list[str], numbers: Numbers) -> Numbers:
        return sums.masked(self.secrets[name], self.members, peers, numbers, SECRET)

    def published(self, survivors: sums.Survivors, revealed: Mapping[str, Mapping[str, bytes]]) -> Numbers:
        """What the coordinator has once it has opened the sum of the survivors' numbers."""
        return sums.unmask(self.total(list(survivors.peers), list(survivors.names)), self.members, survivors, revealed)

    def opened(self, survivors: sums.Survivors, revealed: Mapping[str, Mapping[str, bytes]]) -> Numbers:
        """What a device of the cohort reads in that."""
        published = self.published(survivors, revealed)
        return sums.unsealed(published, self.members.at, self.members.digest, survivors.names, SECRET)

    def signed(self, peers: list[str], survivors: list[str]) -> sums.Survivors:
        signatures = {name: sums.sign_survivors(self.members, peers, survivors, self.keys[name]) for name in survivors}
        return sums.Survivors(tuple(peers), tuple(survivors), signatures)

    def revealed(self, survivors: sums.Survivors, holders: list[str]) -> dict[str, dict[str, bytes]]:
        peers = list(survivors.peers)
        return {
            name: sums.reveal(self.secrets[name], self.members, self.received(name, peers), survivors, self.roster)
            for name in holders
        }

    def plain(self, survivors: list[str]) -> Numbers:
        return added([self.numbers[name] for name in survivors])


def world_of(count: int, at: sums.SumRound = AT) -> World:
    """Of the same secrets each time: so are the masks, and what is measured of them."""
    names = [f"box-{number:02}" for number in range(count)]
    drawn = np.random.default_rng(count)
    keys = {name: SigningKey(Ed25519PrivateKey.from_private_bytes(drawn.bytes(32))) for name in names}
    secrets = {name: sums.SumSecrets(name, drawn.bytes(16), drawn.bytes(16), drawn.bytes(16)) for name in names}
    members = sums.Members(at, {name: secrets[name].announce(at, 5, keys[name]) for name in names})
    members.check({name: key.public for name, key in keys.items()})
    stream = np.random.default_rng(0)
    numbers = {name: stream.integers(0, 1 << 20, SIZE, dtype=np.uint32) for name in names}
    return World(keys, secrets, members, {name: sums.share_out(secrets[name], members) for name in names}, numbers)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans(), st.integers(5, 6))
def test_heads_of_sealed_moments_are_those_of_pooled_images_however_dealt_and_whoever_comes_leaves_or_adds_some(
    seed: int, is_sorted: bool, count: int
) -> None:
    stream, rows = np.random.default_rng(seed), 60 * count
    labels = torch.from_numpy(stream.integers(0, 3, rows))
    labels = labels.sort().values if is_sorted else labels
    features = (torch.from_numpy(stream.random((rows, 6))) + 0.2 * labels[:, None]).clamp(0, 1).float()
    # A device that has over two fifths is clipped: then the mean is not that of pooled images.
    shares = 0.5 / count + 0.5 * stream.dirichlet(np.full(count, 5.0)).clip(max=0.3)
    ends = np.rint(rows * np.cumsum(shares) / shares.sum()).astype(int).tolist()
    dealt = [range(*one) for one in pairwise([0, *ends])]
    grown = [range(dealt[0].start, (dealt[0].start + dealt[0].stop) // 2), *dealt[1:]]
    for now in (dealt, dealt[1:], dealt[:-1], grown):  # of all; one came or left; before one had its last images
        world, total = world_of(len(now)), sum(map(len, now))
        for name, own in zip(world.names, now, strict=True):
            moments = {key: one.numpy() for key, one in moments_of(features[own], labels[own], 3).items()}
            world.numbers[name] = to_numbers(moments, MOMENTS, 1.0, clipped(len(own), total) / total)
        signed = world.signed(world.names, world.names)
        mean = from_numbers(world.opened(signed, world.revealed(signed, world.names)), MOMENTS, 1.0)
        together = [row for own in now for row in own]
        found = head_of({name: torch.from_numpy(one) for name, one in mean.items()})
        wanted = head_of(moments_of(features[together], labels[together], 3))
        for name, weight in wanted.items():
            assert float((found[name] - weight).abs().max()) < 1e-5 * max(1.0, float(weight.abs().max()))


MOMENTS = tuple(
    TensorLayout(name=name, dtype="float32", shape=shape, low=0.0, high=1.0)
    for name, shape in (("counts", (3,)), ("sums", (3, 6)), ("moment", (21,)))
)


def head_of(moments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    classes = class_gaussians(moments)
    assert classes is not None
    return lda_head(classes, torch.zeros(3), 0.5, 1.0, "")


def test_too_few_shares_open_nothing() -> None:
    world = world_of(5)
    assert (sums.threshold_of(4), sums.threshold_of(5), sums.threshold_of(16)) == (3, 4, 9)
    signed = world.signed(world.names, world.names)
    answers = world.revealed(signed, world.names[:3])
    with pytest.raises(SumError, match="box-00: 3 of 4 shares of its masks arrived"):
        world.opened(signed, answers)
    with pytest.raises(SumError, match="needs 4 devices, not 3"):
        world_of(3)


def test_a_masked_number_says_nothing_without_the_masks() -> None:
    world = world_of(4)
    zeros = np.zeros(4096, np.uint32)
    sent = world.masked("box-00", world.names, zeros)
    counts = np.bincount(sent >> 28, minlength=16)
    assert counts.min() > 180  # 256 each, if uniform
    assert counts.max() < 340
    # An honest coordinator without the device's own mask: pair masks of all others do not open it.
    others = added([world.masked(name, world.names, zeros) for name in world.names[1:]])
    assert np.count_nonzero(sent + others) > 4000
    assert np.array_equal(sent, world.masked("box-00", world.names, zeros))  # a resend is byte-identical


def test_a_cohorts_mask_is_another_one_for_each_device_secret_view_of_the_members_and_sum() -> None:
    digest, name = "d" * 64, "box-00"
    masks = [
        sums.cohort_mask(AT, SECRET, digest, name, 256),
        sums.cohort_mask(AT, SECRET, digest, "box-01", 256),
        sums.cohort_mask(AT, bytes(32), digest, name, 256),
        sums.cohort_mask(AT, SECRET, "e" * 64, name, 256),
        sums.cohort_mask(replace(AT, round=4), SECRET, digest, name, 256),
        sums.cohort_mask(replace(AT, attempt=2), SECRET, digest, name, 256),
        sums.cohort_mask(replace(AT, federation="other"), SECRET, digest, name, 256),
        sums.cohort_mask(replace(AT, exchange="weights"), SECRET, digest, name, 256),
    ]
    assert np.array_equal(masks[0], sums.cohort_mask(AT, SECRET, digest, name, 256))
    for first, second in combinations(masks, 2):
        assert np.count_nonzero(first == second) == 0  # each pair by a chance of 2^-24


@pytest.mark.parametrize("count", [4, 8])
def test_every_bit_of_the_sum_that_a_coordinator_opens_is_a_fair_coin_unless_the_cohorts_mask_is_missing(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(count)
    names, masks = world.names, sums.cohort_mask
    layouts = (TensorLayout(name="weight", dtype="float32", shape=(20_000,)),)
    tensors = {"weight": np.linspace(-0.125, 0.125, 20_000, dtype=np.float32)}  # all alike, as after the first round
    world.numbers = dict.fromkeys(names, to_numbers(tensors, layouts, 8.0, 1 / count))
    signed = world.signed(names, names)
    revealed = world.revealed(signed, names)
    assert worst_bit(world.published(signed, revealed)) < 4
    assert np.abs(from_numbers(world.opened(signed, revealed), layouts, 8.0)["weight"] - tensors["weight"]).max() < 7e-6

    def one_for_all(at: sums.SumRound, secret: bytes, digest: str, device: str, size: int) -> Numbers:
        return masks(at, secret, digest, names[0], size)

    monkeypatch.setattr(sums, "cohort_mask", one_for_all)
    assert worst_bit(world.published(signed, revealed)) > 4, "n times the same mask shows the low bits"
    monkeypatch.setattr(sums, "cohort_mask", lambda *of: np.zeros(of[-1], np.uint32))
    assert worst_bit(world.published(signed, revealed)) > 100


def test_a_coordinator_can_neither_invent_devices_nor_change_what_they_announced() -> None:
    world, invented = world_of(4), SigningKey.generate()
    roster = world.roster
    sybil = sums.SumSecrets.draw("box-99").announce(AT, 5, invented)
    with pytest.raises(SumError, match="box-99 is not on this device's roster"):
        sums.Members(AT, {**world.members.announced, "box-99": sybil}).check(roster)
    posing = sums.SumSecrets.draw("box-01").announce(AT, 5, invented)
    with pytest.raises(SignatureError, match="box-01: its keys for a sealed sum are not signed by its key for sums"):
        sums.Members(AT, {**world.members.announced, "box-01": posing}).check(roster)
    one = world.members.announced["box-02"]
    changes: list[Any] = [{"weight": 6}, {"mask": bytes(32)}, {"cipher": one.mask}, {"mark": bytes(32)}]
    for change in changes:
        with pytest.raises(SignatureError):
            sums.check_keys(AT, "box-02", one.model_copy(update=change), roster["box-02"])
    for other in (sums.SumRound("shapes", 3, 2), sums.SumRound("shapes", 4, 1), sums.SumRound("other", 3, 1)):
        with pytest.raises(SignatureError):
            sums.check_keys(other, "box-02", one, roster["box-02"])
    told = one.model_dump(mode="json")
    assert SumKeys.model_validate_json(json.dumps(told), strict=True) == one
    for mask in ("ab" * 31, "ab" * 33, "AB" * 32, " ab" * 32, "zz" * 32):
        with pytest.raises(ValidationError):
            SumKeys.model_validate_json(json.dumps({**told, "mask": mask}), strict=True)


def test_a_device_opens_only_a_list_that_enough_of_its_cohort_signed() -> None:
    world = world_of(6)  # threshold 4
    peers, name = world.names, "box-00"
    received = world.received(name, peers)

    def opened(survivors: sums.Survivors, given: Mapping[str, bytes] = received) -> dict[str, bytes]:
        return sums.reveal(world.secrets[name], world.members, given, survivors, world.roster)

    good = world.signed(peers, peers[:5])
    assert opened(good).keys() == set(peers)
    few = {one: good.signatures[one] for one in peers[:3]}
    with pytest.raises(SumError, match="3 of 4 required devices have signed the list of survivors"):
        opened(replace(good, signatures=few))
    # Signatures over another list: the coordinator shows the sum of five to some and that of six to others.
    other = world.signed(peers, peers)
    with pytest.raises(SumError, match="0 of 4 required devices"):
        opened(replace(good, signatures=other.signatures))
    forged = {one: sums.sign_survivors(world.members, peers, peers[:5], SigningKey.generate()) for one in peers[:5]}
    with pytest.raises(SumError, match="0 of 4 required devices"):
        opened(replace(good, signatures=forged))
    with pytest.raises(SumError, match="3 devices are too few to open a sum: 4 are needed"):
        opened(world.signed(peers, peers[:3]))
    with pytest.raises(SumError, match="lacks this device"):
        opened(world.signed(peers, peers[1:]))
    with pytest.raises(SumError, match="not members of this sum"):
        opened(world.signed([*peers, "box-99"], peers))
    with pytest.raises(SumError, match="names other devices than those whose shares arrived"):
        opened(good, {one: received[one] for one in peers[:5]})


def test_one_dishonest_device_and_the_coordinator_cannot_have_two_lists_opened() -> None:
    for count in range(4, 12):
        world = world_of(count)
        honest, dishonest = world.names[:-1], world.names[-1]
        half = len(honest) // 2
        lists = [world.names, world.names[1:]]
        signers = [[*honest[half:], dishonest], [*honest[:half], dishonest]]
        enough = [len(set(who) & set(of)) >= world.members.threshold for who, of in zip(signers, lists, strict=True)]
        assert not all(enough)


def test_a_device_never_gives_both_shares_of_another_one() -> None:
    world = world_of(5)
    peers, name = world.names, "box-01"
    received = world.received(name, peers)
    lists = world.signed(peers, peers), world.signed(peers, peers[:4])
    shares = [sums.reveal(world.secrets[name], world.members, received, signed, world.roster) for signed in lists]
    assert [len(share) for share in shares[0].values()] == [16] * 5
    assert shares[0]["box-04"] != shares[1]["box-04"]
    assert {one for one in peers if shares[0][one] != shares[1][one]} == {"box-04"}


def test_shares_that_can_not_be_opened_are_not_given_and_the_sum_is_opened_with_others() -> None:
    world = world_of(4)
    peers = world.names
    signed, received = world.signed(peers, peers), world.received("box-00", peers)
    changed = received["box-02"][:-1] + bytes([received["box-02"][-1] ^ 1])
    for bad in (changed, world.dealt["box-02"]["box-01"]):
        given = sums.reveal(world.secrets["box-00"], world.members, {**received, "box-02": bad}, signed, world.roster)
        assert given.keys() == {"box-00", "box-01", "box-03"}
        answers = {**world.revealed(signed, peers), "box-00": given}
        assert np.array_equal(world.opened(signed, answers), world.plain(peers))
    world.dealt["box-02"] = dict.fromkeys(peers, changed)
    with pytest.raises(SumError, match="box-02: 0 of 3 shares of its masks arrived"):
        world.opened(signed, world.revealed(signed, peers))


def test_one_holder_with_wrong_shares_is_found_out_where_one_more_than_needed_answered() -> None:
    world = world_of(5)
    peers, survivors = world.names, world.names[:4]
    signed = world.signed(peers, survivors)
    for liar in survivors:
        answers = world.revealed(signed, survivors)
        answers[liar] = dict.fromkeys(peers, bytes(16))
        with pytest.raises(SumError, match=r"don't match its announcement.*or other devices sent wrong ones"):
            # exactly as many as are needed: nobody can tell which is wrong
            world.opened(signed, answers)
    signed = world.signed(peers, peers)
    for liar in peers:
        answers = world.revealed(signed, peers)
        answers[liar] = dict.fromkeys(peers, bytes(16))
        assert np.array_equal(world.opened(signed, answers), world.plain(peers))


def test_shares_of_other_secrets_than_were_announced_are_noticed() -> None:
    world = world_of(4)
    peers = world.names
    signed = world.signed(peers, peers)
    world.dealt["box-03"] = sums.share_out(replace(world.secrets["box-03"], own=bytes(16)), world.members)
    with pytest.raises(SumError, match="box-03: the shares of its own mask don't match its announcement"):
        world.opened(signed, world.revealed(signed, peers))
    world = world_of(5)
    world.dealt["box-04"] = sums.share_out(replace(world.secrets["box-04"], mask=bytes(16)), world.members)
    lost = world.signed(world.names, world.names[:4])
    with pytest.raises(SumError, match="box-04: the shares of its pair masks don't match its announcement"):
        world.opened(lost, world.revealed(lost, world.names[:4]))
