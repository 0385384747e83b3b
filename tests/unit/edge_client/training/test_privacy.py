"""`[privacy]` of a device: mechanisms change what is sent, and what DP-SGD spends is counted before it could be published."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opacus.accountants import RDPAccountant

from audit.measures import Outcome
from edge_client.cli.status import read_status
from edge_client.config import AuditSection
from edge_client.store.private_store import PRIVACY_FILE
from edge_client.training import local_round
from fedcg.learning.privacy import DpSgdSettings, PrivacySettings
from fedcg.wire.artifacts.artifacts import unpack
from fedcg.wire.messages.schemas import DeclineReason, RoundAttempt
from fedcg.wire.parts import DEFAULT_ALLOW_REPORT, Part, PrivacySpent, ReportField
from tests.support.edge.training_site import Site, real_spec
from tests.support.present import present
from tests.support.raising import raising
from tests.unit.edge_client.training.test_release_audit import StandIn, figure, install

DELTA = 1e-3
BATCH = 12
DAMAGED = b'{"spent": "{}"}'


def site_with(root: Path, privacy: PrivacySettings, *, shadow: int = 0) -> Site:
    spec = real_spec("fedsplit", batch_size=BATCH).model_copy(update={"codec": "f32", "with_base": ()})
    site = Site(root, spec, shadow=shadow)
    site.configure(privacy=privacy, policy={"allow_report": DEFAULT_ALLOW_REPORT | {ReportField.EPSILON}})
    return site


def dp_sgd(**settings: float) -> PrivacySettings:
    return PrivacySettings(dp_sgd=DpSgdSettings(**{"noise_multiplier": 1.0, "delta": DELTA, **settings}))


def expected_epsilon(site: Site, rounds: int) -> float:
    """By Opacus alone: one epoch of Poisson batches a round, in the one stage of FedSplit."""
    images = site.store.generations.snapshot(site.state().generation).counts()["train"]
    accountant = RDPAccountant()
    accountant.history = [(1.0, BATCH / images, rounds * -(-images // BATCH))]
    return float(accountant.get_epsilon(delta=DELTA))


def test_mechanisms_change_what_is_sent_and_neither_the_private_model_nor_the_shadow(tmp_path: Path) -> None:
    plain = site_with(tmp_path / "a", PrivacySettings(), shadow=1)
    clipped = site_with(tmp_path / "b", PrivacySettings(update_clip=0.01, update_noise=0.001), shadow=1)
    for site in (plain, clipped):
        site.train()
    one, other = (unpack(site.update(), site.shared).parts[Part.CLASSIFIER] for site in (plain, clipped))
    start = plain.brought()[Part.CLASSIFIER]

    def norm(tensors: Any) -> float:
        return float(np.sqrt(sum(np.square(tensors[name] - start[name]).sum() for name in start)))

    numbers = sum(tensor.size for tensor in start.values())
    assert norm(one) > 0.1
    # Orthogonal to the clipped step in expectation: sqrt(clip² + n σ²).
    assert norm(other) == pytest.approx(np.hypot(0.01, 0.001 * np.sqrt(numbers)), rel=0.1)
    for slot in ("personal", "shadow"):
        assert plain.weights(slot) == clipped.weights(slot), slot


def test_mechanisms_inside_local_steps_change_the_model_and_leave_the_shadow_alone(tmp_path: Path) -> None:
    plain = site_with(tmp_path / "a", PrivacySettings(), shadow=1)
    noisy = site_with(tmp_path / "b", PrivacySettings(gradient_noise=0.1), shadow=1)
    for site in (plain, noisy):
        site.train()
    assert plain.weights("personal", Part.EXTRACTOR) != noisy.weights("personal", Part.EXTRACTOR)
    assert plain.weights("shadow") == noisy.weights("shadow")


def test_every_round_of_dp_sgd_counts_and_its_epsilon_is_reported_and_shown(tmp_path: Path) -> None:
    site = site_with(tmp_path, dp_sgd(budget_epsilon=1000.0))
    seen = []
    for number in (1, 2):
        site.train(number)
        assert site.report().epsilon == PrivacySpent(epsilon=expected_epsilon(site, number), delta=DELTA, budget=1000.0)
        seen.append(expected_epsilon(site, number))
    assert 0 < seen[0] < seen[1]
    assert read_status(site.config)["privacy_spent"] == f"epsilon {seen[1]:.3g} of 1000 at delta 0.001"
    site.configure(policy={"allow_report": DEFAULT_ALLOW_REPORT})
    site.train(3)
    assert site.report().epsilon is None


def test_a_round_that_would_exceed_the_budget_is_declined_before_it_trains(tmp_path: Path) -> None:
    site = site_with(tmp_path, dp_sgd())
    site.train(1)
    site.configure(privacy=dp_sgd(budget_epsilon=(expected_epsilon(site, 1) + expected_epsilon(site, 2)) / 2))
    before, phases = site.store.record(PRIVACY_FILE), len(site.events("phase_started"))
    detail = site.declined(DeclineReason.WITHHELD, 2)
    for text in ("budget is exhausted", "budget_epsilon", "Nothing was trained", "fedcg agent leave"):
        assert text in detail
    assert [event["phase"] for event in site.events("phase_started")[phases:]] == ["load"]
    assert (site.store.record(PRIVACY_FILE), site.state().generation.round_attempt) == (before, RoundAttempt(1, 1))
    site.configure(privacy=dp_sgd(budget_epsilon=1000.0))
    site.train(2)


CHILD = """
import pickle, sys, time
from audit.attacks.attack import Attack
from edge_client.store import generations
from edge_client.store.private_store import PrivateStore
from edge_client.training.trainer_child import Trainer
from fedcg.event_log import EventLog
def trained(*_):
    print("trained", flush=True)
    time.sleep(120)
if sys.argv[2] == "audit":
    Attack.run = trained
else:
    generations.Generations.commit = trained
config, command = pickle.load(open(sys.argv[1], "rb"))
store = PrivateStore.open(config.store, config.federation, config.device)
import torch
torch.set_num_threads(1)
Trainer(config, store, EventLog(config.store / "events.jsonl", time.time)).do(command)
"""


@pytest.mark.slow
@pytest.mark.parametrize("during", ["commit", "audit"])
def test_a_process_killed_between_training_and_commit_has_counted_the_round_and_its_repetition_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    install(monkeypatch, StandIn())
    killed, calm = (site_with(tmp_path / name, dp_sgd()) for name in ("killed", "calm"))
    audit = AuditSection(before_publish="quick", attacks=("labels",)) if during == "audit" else AuditSection()
    killed.configure(audit=audit)
    (tmp_path / "work").write_bytes(pickle.dumps((killed.config, killed.round())))
    command = [sys.executable, "-c", CHILD, str(tmp_path / "work"), during]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert present(child.stdout).readline() == "trained\n"
        child.kill()
    assert killed.store.generations.current() == (None, ())
    counted = killed.store.record(PRIVACY_FILE)
    assert counted["epsilon"] > 0
    for site in (killed, calm):
        site.train()
    assert killed.store.record(PRIVACY_FILE) == counted == calm.store.record(PRIVACY_FILE)
    assert killed.update() == calm.update()  # the same noise: the repetition shows nothing that the first one did not
    assert killed.report().epsilon == PrivacySpent(epsilon=expected_epsilon(killed, 1), delta=DELTA)


def test_a_round_that_is_withheld_or_fails_after_its_training_stays_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, StandIn(lambda: Outcome("labels", (figure(),))))
    site = site_with(tmp_path, dp_sgd())
    site.configure(audit=AuditSection(before_publish="quick", gate="label_l1_gain<0.01", attacks=("labels",)))
    site.declined(DeclineReason.WITHHELD)

    with monkeypatch.context() as patch:
        patch.setattr(local_round, "build_update", raising(OSError(28, "No space left on device")))
        site.declined(DeclineReason.TRAINING_FAILED, 1, 2)
    site.configure(audit=AuditSection())
    site.train(1, 3)
    assert site.report().epsilon == PrivacySpent(epsilon=expected_epsilon(site, 3), delta=DELTA)


def test_other_settings_for_the_same_attempt_count_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_with(tmp_path, dp_sgd(noise_multiplier=2.0))
    with monkeypatch.context() as patch:
        patch.setattr(local_round, "build_update", lambda *_, **__: 1 / 0)
        site.declined(DeclineReason.TRAINING_FAILED)
    first = site.store.record(PRIVACY_FILE)["epsilon"]
    site.configure(privacy=dp_sgd(noise_multiplier=1.0))
    site.train()
    both = present(site.report().epsilon)
    assert both.epsilon > max(first, expected_epsilon(site, 1))


def test_no_epsilon_is_claimed_once_a_round_was_sent_without_dp_sgd(tmp_path: Path) -> None:
    site = site_with(tmp_path, PrivacySettings())
    site.train(1)
    assert read_status(site.config)["privacy_spent"] is None
    site.configure(privacy=dp_sgd())
    site.train(2)
    assert site.report().epsilon is None
    assert "not covered" in str(read_status(site.config)["privacy_spent"])


def test_a_record_that_is_gone_or_damaged_ends_participation_and_is_never_a_record_of_nothing(tmp_path: Path) -> None:
    site = site_with(tmp_path, dp_sgd())
    site.train(1)
    path = site.store.root / "privacy.json"
    for content in (None, DAMAGED, b"\0"):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        detail = site.declined(DeclineReason.TRAINING_FAILED, 2)
        assert str(path) in detail
        assert "backup" in detail
        if content == DAMAGED:
            assert "privacy.json is damaged" in str(read_status(site.config)["privacy_spent"])
    assert site.state().generation.round_attempt == RoundAttempt(1, 1)


def test_a_method_that_dp_sgd_does_not_cover_is_declined_with_the_setting_to_change(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec("fedmd_cg"))
    site.configure(privacy=dp_sgd())
    assert "dp_sgd can't cover fedmd_cg" in site.declined(DeclineReason.SPEC_REFUSED)
    assert site.store.record(PRIVACY_FILE) == {}
