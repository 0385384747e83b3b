"""Devices whose extractor is a private projection on a public, frozen backbone, as an audit sees them."""

from pathlib import Path

import pytest

from audit.evidence.networks import with_lenet5
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.split_names import WEIGHTS_VARIABLE
from fedcg.wire.parts import Part
from tests.support.audit.cases import carried_out, simulated_case
from tests.support.learning.networks import SPLIT, write_tiny_weights


@pytest.mark.slow
def test_positive_controls_have_their_own_network_and_attacks_work_on_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_tiny_weights(tmp_path)
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(tmp_path))
    case = simulated_case(
        network=SPLIT,
        weights=str(weights),
        freeze="all",
        image_size=64,
        normalise="imagenet",
        images_per_client=40,
        auxiliary=60,
    )
    assert set(initial_parts(case.view.spec, bytes(32))[Part.EXTRACTOR]) == {"project.bias", "project.weight"}
    assert all("project" not in name for name in initial_parts(with_lenet5(case.view.spec), bytes(32))[Part.EXTRACTOR])
    labels = carried_out("labels", case)
    assert labels.skipped is None
    assert labels.controls[0].passed
