"""`fedcg simulate`: what cannot be simulated ends the command with its reason before anything is written."""

from pathlib import Path

import pytest

from fedcg import tracking
from tests.support.simulations import fedcg_simulate

REFUSED = [
    ("--method nosuch", "unknown method 'nosuch'"),
    ("--method local --set mu=1", "local has no parameter mu; `fedcg method show local`"),
    ("--device nosuch", "--device nosuch"),
    ("--method local --set lr=fast", "local: lr"),
    ("--crop 16", "crop: crops of 16 pixels can miss the whole image; use fewer than its shorter side, 16"),
    ("--generator nope", "unknown generator 'nope'; choose conv"),
    ("--method ppidsg --method local --network lenet5", "network.split must be image_small or image_paper"),
    ("--image-size 12", "lenet5_relu needs images of at least 16x16, not 12x12"),
    ("--codec i4", "--codec"),
    ("--seed 1 --seeds 0-2", "--seed is for a single run, --seeds for several"),
    ("--ray auto --workers 2", "--workers uses processes of this machine"),
    ("--clients 900", "training images can't be split over 900 clients with at least 40 each"),
    # Recorded updates
    ("--keep-updates some", "write all, or comma-separated rounds"),
    ("--rounds 2 --keep-updates 0", "digits-fedcg-seed0 has rounds 1 to 2, not 0"),
    # Published tables
    ("--paper fedcg:table1:digit5", "needs --data with the domain folders"),
    ("--paper fedcg:table1:digits-domains --variant mine", "defines the variants"),
    ("--paper fedcg:table1:digits-domains --rounds 0", "rounds"),
    # Mechanisms and defences
    ("--mechanism dp_sgd.noise_multiplier=1", "network.discriminator = mlp"),
    ("--method fedmd_cg --mechanism dp_sgd.noise_multiplier=1", "can't cover fedmd_cg"),
    ("--mechanism noise=1", "--mechanism noise: there is no such setting"),
    ("--mechanism update_clip", "write KEY=VALUE"),
    ("--defence antigam", "defence: unknown name 'antigam' (did you mean `antigan`?)"),
    ("--defence antigan --defence-set v_e", "--defence-set 'v_e': write key=value"),
    ("--defence-set v_e=1", "defence_params require a defence"),
    ("--defence antigan --mechanism dp_sgd.noise_multiplier=1", "dp_sgd's epsilon does not cover"),
    ("--defence antigan --defence-set window=17", "antigan: window = 17 is larger than the images of 16x16 pixels"),
    ("--track neptune", "track neptune: give mlflow:URI or tensorboard:DIR"),
    ("--defence etc --defence-set key=cohort --start public", "etc: key = cohort needs the cohort secret"),
    ("--method ppidsg --network image_small --set key=cohort --start public", "ppidsg: needs the cohort secret"),
    ("--method ppidsg --network image_small --set key=cohort --start random", "ppidsg: needs the cohort secret"),
]


@pytest.mark.parametrize(("text", "why"), REFUSED)
def test_bad_options_end_the_command_with_a_reason_and_nothing_is_written(text: str, why: str, tmp_path: Path) -> None:
    done = fedcg_simulate(tmp_path / "out", text)
    assert done.exit_code == (7 if text == "--method nosuch" else 2), done.output
    assert why in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_without_tensorboard_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    refused = fedcg_simulate(tmp_path / "out", "--method local --tensorboard")
    assert refused.exit_code == 2
    assert "pip install 'fedcg-edge[tensorboard]', or --no-tensorboard" in " ".join(refused.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_folder_that_nothing_can_be_written_into_ends_the_call_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a letter")
    done = fedcg_simulate(tmp_path / "taken", "--method local")
    assert done.exit_code == 2
    assert "not writable (Not a directory); choose another folder" in done.stderr
