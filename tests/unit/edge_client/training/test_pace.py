"""A round of which a device takes a share of the local steps (policy `pace` of the coordinator)."""

from dataclasses import replace
from pathlib import Path

import pytest

from edge_client.agent.hardware import HardwareWatch
from edge_client.config import PolicySection, TrainingSection
from edge_client.store.checked_files import LEDGER_FILE, append_line, read_lines
from fedcg.learning.privacy import DpSgdSettings, PrivacySettings
from fedcg.learning.spec import NetworkChoice
from fedcg.wire.parts import DEFAULT_ALLOW_REPORT, ReportField
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import FEDERATION, make_config

STEPS = {"classify": 16, "generate": 16, "shadow-classify": 16}


def steps_of(site: Site) -> dict[str, int]:
    """The last step of each phase that was reported."""
    return {event["phase"]: event["steps"] for event in site.events("progress") if event["phase"] in STEPS}


def test_half_of_the_steps_are_taken_in_every_stage_and_by_the_shadow_and_told_the_ledger(tmp_path: Path) -> None:
    whole = Site(tmp_path / "whole", real_spec(epochs=8), shadow=1)
    half = Site(tmp_path / "half", real_spec(epochs=8), shadow=1)
    whole.train()
    half.trainer().do(replace(half.round(), share=0.5))
    assert steps_of(whole).keys() == STEPS.keys()
    assert steps_of(half) == {phase: (steps + 1) // 2 for phase, steps in steps_of(whole).items()}
    assert [line["share"] for site in (whole, half) for line in read_lines(site.store.root / LEDGER_FILE)] == [1.0, 0.5]
    assert [event.get("share") for site in (whole, half) for event in site.events("committed")] == [None, 0.5]


def test_a_share_of_all_steps_ends_in_the_bytes_of_before_there_were_shares(tmp_path: Path) -> None:
    sites = [Site(tmp_path / name, real_spec()) for name in ("a", "b")]
    sites[0].train()
    sites[1].trainer().do(replace(sites[1].round(), share=1.0))
    assert sites[0].update() == sites[1].update()


def test_differentially_private_training_counts_the_steps_that_are_taken(tmp_path: Path) -> None:
    spent = []
    for share in (1.0, 0.5):
        site = Site(
            tmp_path / str(share), real_spec(epochs=8, network=NetworkChoice(noise_dim=8, discriminator="mlp_plain"))
        )
        site.configure(
            privacy=PrivacySettings(dp_sgd=DpSgdSettings(noise_multiplier=1.0, clip=1.0)),
            training=TrainingSection(device="cpu", threads=1),
        )
        site.trainer().do(replace(site.round(), share=share))
        spent.append(site.store.privacy()["epsilon"])
    assert 0 < spent[1] < spent[0]


def test_the_time_of_a_round_is_predicted_from_the_ledger_after_a_restart_and_told_only_where_health_is_allowed(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path, policy=PolicySection(allow_report=DEFAULT_ALLOW_REPORT))
    config.store.mkdir(parents=True)
    assert HardwareWatch(config).predicted_s(1.0) is None  # nothing was trained here
    line = {"t": 1.0, "kind": "round", "federation": FEDERATION, "seconds": 30.0, "share": 0.5}
    append_line(config.store / LEDGER_FILE, {**line, "seconds": 8.0})
    append_line(config.store / LEDGER_FILE, line)
    append_line(config.store / LEDGER_FILE, {**line, "federation": "another", "seconds": 500.0})
    append_line(config.store / LEDGER_FILE, {**line, "seconds": "?"})
    watch = HardwareWatch(config)
    assert watch.predicted_s(1.0) == 60.0  # half of the steps took 30 s
    assert watch.predicted_s(0.25) == 15.0
    watch.noted({"event": "committed", "seconds": 5.0, "share": 0.25})
    assert watch.predicted_s(1.0) == pytest.approx(20.0)
    silent = config.model_copy(
        update={"policy": PolicySection(allow_report=DEFAULT_ALLOW_REPORT - {ReportField.HEALTH})}
    )
    assert HardwareWatch(silent).predicted_s(1.0) is None
