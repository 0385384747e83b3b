"""What `fedcg simulate --ray` decides before Ray is even imported."""

import importlib.util
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedcg
from experiments.cli.simulate_command import with_address
from experiments.errors import OptionError
from experiments.parallel import ray_cluster
from experiments.parallel.ray_cluster import Build, RayCluster, open_cluster, own_build
from experiments.parallel.ray_runner import MOST_LANES, lanes_for, roots_for, sendable
from experiments.simulation.batch_runner import open_ray_lanes
from fedcg import cli
from fedcg.learning.image_set import ImageSet
from fedcg.learning.simulation.party import Roots

TINY = "--clients 2 --partition iid --images-per-client 20 --rounds 1 --local-epochs 1 --image-size 16 --method local"


@pytest.mark.parametrize(
    ("typed", "understood"),
    [
        ("--ray", "--ray=local"),
        ("--ray --seeds 0,1", "--ray=local --seeds 0,1"),
        ("--seeds 0,1 --ray", "--seeds 0,1 --ray=local"),
        ("--ray auto --force", "--ray auto --force"),
        ("--ray=10.0.0.1:6379", "--ray=10.0.0.1:6379"),
        ("--rounds 2", "--rounds 2"),
    ],
)
def test_an_option_ray_without_an_address_means_this_machine_alone(typed: str, understood: str) -> None:
    assert with_address(typed.split()) == understood.split()


def test_without_the_package_the_command_names_the_extra_and_makes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else found(name, *rest))
    monkeypatch.setattr(sys, "argv", ["fedcg", "simulate", *TINY.split(), "--ray", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "pip install 'fedcg-edge[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_ray_is_imported_neither_for_help_nor_for_a_simulation_without_it(tmp_path: Path) -> None:
    call = f"simulate {TINY} --workers 1 --no-plot --no-tensorboard --out {tmp_path / 'out'}"
    for arguments in ("simulate --help", call):
        code = (
            f"import sys; sys.argv[1:] = {arguments.split()!r}\nfrom fedcg.cli import main\n"
            "try:\n    main()\nfinally:\n    print('loaded:', 'ray' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
        assert "loaded: False" in done.stdout


def test_a_ray_client_address_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(OptionError, match="on a machine of the cluster"), open_cluster("ray://head:10001", print):
        pass


def test_an_address_where_nobody_listens_or_that_is_none_is_refused_at_once() -> None:
    with socket.socket() as held:  # bound, not listening: no other process can come to listen there meanwhile
        held.bind(("127.0.0.1", 0))
        for address, why in (
            (f"127.0.0.1:{held.getsockname()[1]}", "ray start --head"),
            ("head", "HOST:PORT"),
            ("127.0.0.1:99999", "no Ray"),
        ):
            with pytest.raises(OptionError, match=why), open_cluster(address, print):
                pass


def test_every_difference_between_builds_is_told() -> None:
    mine = Build("0.1.0", "2.13.0", "2.3.0", "abc")
    assert mine.differs_from(mine) == []
    other = replace(mine, torch="2.12.0", code="abd")
    assert mine.differs_from(other) == ["torch 2.13.0 instead of 2.12.0", "code abc instead of abd"]


def test_a_changed_source_file_is_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "one.py").write_text("a = 1")
    monkeypatch.setattr(fedcg, "__file__", str(tmp_path / "__init__.py"))
    before = own_build.__wrapped__()
    assert own_build.__wrapped__() == before
    (tmp_path / "one.py").write_text("a = 2")
    assert before.differs_from(own_build.__wrapped__()) != []


def test_enough_runs_side_by_side_to_keep_every_slot_busy_and_no_more() -> None:
    assert lanes_for(runs=1, clients=4, slots=64, gpus=None) == 1
    assert lanes_for(runs=30, clients=4, slots=2, gpus=None) == 2
    assert lanes_for(runs=30, clients=10, slots=64, gpus=None) == 8  # 6 runs fill 60 slots
    assert lanes_for(runs=1000, clients=1, slots=1000, gpus=None) == MOST_LANES
    assert lanes_for(runs=30, clients=4, slots=64, gpus=2) == 2  # each run's server half holds a part of a GPU
    assert lanes_for(runs=30, clients=4, slots=64, gpus=0) == 1  # refused later: there is none


def test_more_threads_than_cpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.simulation.batch import RunSetting

    class Small(RayCluster):
        def slots(self, threads: int) -> int:
            return 2 // threads

    class Opened:
        def __enter__(self) -> RayCluster:
            return Small(print)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(ray_cluster, "open_cluster", lambda *_, **__: Opened())
    with pytest.raises(OptionError, match="fewer CPUs"), open_ray_lanes("auto", [RunSetting(threads=3)], None, print):
        pass
    with open_ray_lanes("auto", [RunSetting(clients=4)] * 9, None, print) as lanes:
        assert lanes.count == 2


def test_a_node_gets_the_secret_of_the_client_that_it_trains_and_no_other() -> None:
    roots = Roots(b"cohort", b"coordinator", {"a": b"one", "b": b"two"})
    assert roots_for(roots, "b") == Roots(b"cohort", b"", {"b": b"two"})


def test_a_part_of_a_larger_tensor_is_sent_without_the_rest() -> None:
    everything = torch.arange(4 * 3 * 8 * 8, dtype=torch.int64).to(torch.uint8).view(4, 3, 8, 8)
    part = ImageSet(everything[1:3], torch.tensor([0, 1]), ("x", "y"))
    sent = sendable(part)
    assert torch.equal(sent.images, part.images)
    assert sent.images.untyped_storage().nbytes() == 2 * 3 * 8 * 8
    assert sendable(sent) is sent
