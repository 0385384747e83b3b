"""`fedcg.audit`: attacks on what a client of a program's own federation sent."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedcg
from fedcg.errors import BadInputError
from tests.unit.experiments.test_face import QUICK, clients

SIDE = 16


def pictures(seed: int, count: int = 80) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise [1, 16, 16], dark or with a bright half."""
    pixels = torch.randint(0, 120, (count, 1, SIDE, SIDE), generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(count) % 2
    pixels[labels == 1, :, : SIDE // 2] += 130
    return pixels.to(torch.uint8), labels


def of_pictures(seed: int) -> fedcg.Client:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body, head = nn.Conv2d(1, 4, 3, stride=2), nn.Linear(4 * 7 * 7, 2)
    halves = fedcg.Split(nn.Sequential(body, nn.ReLU()), nn.Sequential(nn.Flatten(), head))
    return fedcg.Client(halves, pictures(seed), ("dark", "bright"), test=pictures(seed + 10))


def results(audited: fedcg.Audit) -> dict[str, tuple[Any, int]]:
    """Why an attack was not tried, and the number of its figures."""
    return {one["name"]: (one["skipped"], len(one["figures"])) for one in audited.report["attacks"]}


def test_a_client_with_tensors_is_audited_and_what_takes_images_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fedcg.simulate(clients(), "fedavg", 1, out=tmp_path, **QUICK)
    run = fedcg.simulate(clients(), "fedavg", 1, out=tmp_path, keep_updates="all", **QUICK)  # again, now recorded
    audited = fedcg.audit(run, "a", attacks=("labels", "reidentification", "inversion", "memorisation"), effort="quick")
    found, subject = results(audited), audited.report["subject"]
    assert found["inversion"] == ("inversion works on images, and the inputs are tensors of shape [2, 32]", 0)
    assert found["memorisation"] == ("memorisation works on images, and the inputs are tensors of shape [2, 32]", 0)
    assert [found[name][0] for name in ("labels", "reidentification")] == [None, None]
    assert min(found[name][1] for name in ("labels", "reidentification")) > 0
    assert (subject["client"], subject["round"], subject["command"]) == ("a", 1, "fedcg.audit(run, 'a')")
    data = run.party.datasets["a"]
    assert (subject["images"], subject["auxiliary"]) == ((len(data.train), len(data.val) + 30), 60)
    capsys.readouterr()
    audited.show()
    assert "not tried (inversion works" in " ".join(capsys.readouterr().out.split())
    assert "<td>Label distribution</td>" in audited._repr_html_()
    assert json.loads(audited.save(tmp_path / "a.json").read_text()) == json.loads(json.dumps(audited.report))
    assert audited.save(tmp_path / "a.html").read_text().startswith("<!doctype html>")
    with pytest.raises(BadInputError, match=r"a\.pdf: a report is written as \.json or \.html"):
        audited.save(tmp_path / "a.pdf")


@pytest.mark.slow
def test_a_client_with_pixels_is_audited_as_one_with_images() -> None:
    run = fedcg.simulate({name: of_pictures(seed) for seed, name in enumerate("abc")}, "fedcg", 1, keep_updates="1",
                         params={"server_iterations": 3}, **QUICK)  # fmt: skip
    audited = fedcg.audit(
        run, "b", attacks=("labels", "class_inference", "epsilon"), effort="quick", auxiliary=pictures(99)
    )
    found = results(audited)
    assert (found["class_inference"][0], found["labels"][0]) == (None, None)
    assert min(found[name][1] for name in ("labels", "class_inference")) > 0
    assert found["epsilon"] == ("it needs a whole local round: run it with default or thorough effort", 0)
    assert audited.report["subject"]["auxiliary"] == 80


def test_an_attack_whose_networks_need_larger_images_is_not_tried() -> None:
    halves = fedcg.Split(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU()), nn.Linear(8, 2))
    small = {
        name: fedcg.Client(halves, (pictures(seed)[0][..., 4:12, 4:12], pictures(seed)[1]), ("dark", "bright"))
        for seed, name in enumerate("ab")
    }
    run = fedcg.simulate(small, "fedavg", 1, keep_updates="all", **QUICK)
    found = results(fedcg.audit(run, "a", attacks=("inversion", "labels"), effort="quick"))
    assert found["inversion"] == ("inversion works on images of at least 16 x 16 pixels, not 8 x 8", 0)
    assert found["labels"][0] is None


def test_what_cannot_be_audited_is_one_sentence(tmp_path: Path) -> None:
    run = fedcg.simulate(clients(), "local", 1, **QUICK)
    with pytest.raises(BadInputError, match=r'no updates recorded: run fedcg.simulate\(..., keep_updates="all"'):
        fedcg.audit(run, "a")
    with pytest.raises(BadInputError, match="client 'd': choose a, b, c"):
        fedcg.audit(run, "d")
    with pytest.raises(BadInputError, match="effort 'much': choose quick, default, thorough"):
        fedcg.audit(run, "a", effort="much")
