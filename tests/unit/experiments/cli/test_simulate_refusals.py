"""`fedcg simulate`: what cannot be simulated ends the command with its reason before anything is written."""

from pathlib import Path

import pytest

from experiments.simulation import curves as event_files
from fedcg.learning.split_names import ALLOW_VARIABLE
from tests.support.simulations import fedcg_simulate

REFUSED = [
    ("--method nosuch", "no method 'nosuch'"),
    ("--method local --set mu=1", "local has no parameter mu; `fedcg method show local`"),
    ("--device nosuch", "--device nosuch"),
    ("--method local --set lr=fast", "local: lr"),
    ("--validation never", "validation"),
    ("--crop 16", "crop: crops of 16 pixels can miss the whole image; the shorter side has 16"),
    ("--generator nope", "no generator 'nope'; there are conv"),
    ("--method local --generator fedcg=mlp", "'fedcg' is not one of the methods of this call (local)"),
    ("--network lenet5 --network cnn_bn", "--network cnn_bn: given twice for every method"),
    ("--network fedcg=", "--network 'fedcg=': write NAME, or METHOD=NAME for one method"),
    ("--method local --method fedcg --discriminator fedcg=nope", "no discriminator 'nope'"),
    ("--method ppidsg --method local --network local=image_small", "network.split must be image_small or image_paper"),
    ("--method fedprobe --clients 65", "a round has 65 clients: raise it (--set most_clients=65"),
    ("--image-size 12", "lenet5_relu needs images of at least 16x16, not 12x12"),
    ("--codec i4", "--codec"),
    ("--precision bf16", "needs --device cuda"),
    ("--seed 1 --seeds 0-2", "--seed is one run's root and --seeds those of several"),
    ("--clients 900", "training images can't be split over 900 clients with at least 40 each"),
    ("--batched-clients --workers 2", "leave out --workers"),
    # Recorded updates
    ("--keep-updates some", "write all, or rounds with commas between them"),
    ("--rounds 2 --keep-updates 0", "digits-fedcg-seed0 has rounds 1 to 2, not 0"),
    ("--rounds 2 --keep-updates 1,5,10", "digits-fedcg-seed0 has rounds 1 to 2, not 5"),
    # Published tables
    ("--paper fedcg:table8", "no table 'fedcg:table8'"),
    ("--paper fedcg:table1:digit5", "needs --data with the domain folders"),
    ("--paper fedcg:table1:digits-domains --variant mine", "names the variants itself"),
    ("--paper fedcg:table1:digits-domains --rounds 0", "rounds"),
    ("--paper ppidsg:table7:digits --network fedcg=lenet5", "'fedcg' is not one of the methods of this call"),
    # Mechanisms and defences
    ("--mechanism dp_sgd.noise_multiplier=1", "network.discriminator = mlp"),
    ("--method fedmd_cg --mechanism dp_sgd.noise_multiplier=1", "can't cover fedmd_cg"),
    ("--mechanism noise=1", "--mechanism noise: no such mechanism"),
    ("--mechanism update_clip", "write KEY=VALUE"),
    ("--defence antigam", "defence: there is no 'antigam' (did you mean `antigan`?)"),
    ("--defence antigan --defence-set v_e", "--defence-set 'v_e': write key=value"),
    ("--defence-set v_e=1", "defence_params need a defence"),
    ("--defence antigan --mechanism dp_sgd.noise_multiplier=1", "dp_sgd's epsilon does not cover"),
    ("--defence antigan --defence-set window=17", "antigan: window = 17 is larger than the images of 16x16 pixels"),
    ("--defence etc --defence-set key=cohort --start public", "etc: key = cohort needs the cohort secret"),
]


@pytest.mark.parametrize(("text", "why"), REFUSED)
def test_bad_options_end_the_command_with_their_reason_before_anything_is_written(
    text: str, why: str, tmp_path: Path
) -> None:
    done = fedcg_simulate(tmp_path / "out", text)
    assert done.exit_code == 2, done.output
    assert why in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_without_tensorboard_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "find_spec", lambda name: None)
    refused = fedcg_simulate(tmp_path / "out", "--method local --tensorboard")
    assert refused.exit_code == 2
    assert "or --no-tensorboard" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_nothing_can_be_written_into_ends_the_call_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a letter")
    done = fedcg_simulate(tmp_path / "taken", "--method local")
    assert done.exit_code == 2
    assert "nothing can be written there (Not a directory); choose another folder" in done.stderr


def test_a_network_of_ones_own_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "")  # what a command allows itself ends with the test
    (tmp_path / "own_seven.py").write_text(
        "from torch import nn\nfrom fedcg.learning.networks import FeatureRange, Split\n"
        "def make(): return Split(lambda c: nn.Sequential(nn.Conv2d(c, 2, 3), nn.ReLU()), "
        "lambda s, n: nn.Sequential(nn.Flatten(), nn.Linear(392, 7)), FeatureRange.NON_NEGATIVE)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = fedcg_simulate(tmp_path / "out", "--network own_seven:make")
    assert done.exit_code == 2, done.output
    assert "split own_seven:make: the classifier makes [3, 7] of [3, 2, 14, 14], not [3, 10]" in done.stderr
    assert not (tmp_path / "out").exists()
