"""A method of the user's own on a device: what it remembers lies in the private store, its model is what is measured and exported."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from edge_client.config import PolicySection
from edge_client.session.signals import ChooseModel, Chosen, RoundCommitted
from edge_client.training import local_round
from export.model.versions import Slots
from fedcg.learning.methods.fedproto import NearestPrototype
from fedcg.learning.networks.assembly import personal_model
from fedcg.learning.registry import get_method
from fedcg.learning.tensor_conversion import to_weights
from fedcg.wire.artifacts.artifacts import unpack
from fedcg.wire.messages.schemas import DeclineReason
from fedcg.wire.parts import DEFAULT_ALLOW_UPLOAD, Part
from tests.support.edge.training_site import Site, real_spec
from tests.support.installed import importable, register

AVERAGING = '''
"""FedSplit with a moving average of the extractor over all steps, which is what is served; the trained one is remembered."""
from dataclasses import replace

from fedcg.learning.method import ClientState, LocalResult
from fedcg.learning.methods import fedsplit
from fedcg.learning.networks import load_part, weights_of
from fedcg.learning.training.classification import train_classifier
from fedcg.learning.method import SharedResult
from fedcg.wire.parts import Part, Report

import torch


def local_round(state, data, aggregate, ctx):
    weights = {**state.parts, **(aggregate.parts if aggregate else {})}
    raw = state.extras.get("raw", weights[Part.EXTRACTOR])
    extractor = load_part(ctx.spec, Part.EXTRACTOR, raw)
    classifier = load_part(ctx.spec, Part.CLASSIFIER, weights[Part.CLASSIFIER])
    mean = {name: tensor.clone() for name, tensor in weights[Part.EXTRACTOR].items()}
    steps = 0

    def after_step():
        nonlocal steps
        steps += 1
        for name, tensor in extractor.state_dict().items():
            mean[name] = 0.9 * mean[name] + 0.1 * tensor.detach()

    params = fedsplit.METHOD.params_type.model_validate(ctx.spec.params)
    loss = train_classifier(extractor, classifier, data, params, ctx, after=(after_step,))
    kept = {Part.EXTRACTOR: mean, Part.CLASSIFIER: weights_of(classifier)}
    done = state.extras.get("done", {"steps": torch.zeros(1, dtype=torch.int64)})["steps"] + steps
    seen = torch.tensor([len(ctx.validation)])
    extras = {"raw": weights_of(extractor), "done": {"steps": done, "validation": seen}}
    return LocalResult(
        SharedResult({Part.CLASSIFIER: weights_of(classifier)}), ClientState(kept, extras), Report(examples=len(data), loss=loss)
    )


METHOD = replace(fedsplit.METHOD, name="averaging", title="averaging", local_round=local_round, local_rounds=None)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "packages"
    place.mkdir()
    yield from importable(place, monkeypatch)


def test_what_a_method_remembers_is_kept_from_round_to_round_and_never_sent(folder: Path, tmp_path: Path) -> None:
    (folder / "our_averaging.py").write_text(AVERAGING)
    register(folder, "ours", "fedcg.methods", "averaging", "our_averaging:METHOD")
    site = Site(tmp_path, real_spec("averaging"))
    steps = []
    for number in (1, 2):
        site.train(number)
        stored = site.state()
        assert set(stored.extras) == {"raw", "done"}
        steps.append(int(stored.extras["done"]["steps"][0]))
        raw, served = stored.extras["raw"]["0.weight"], stored.slots["personal"][Part.EXTRACTOR]["0.weight"]
        assert not np.array_equal(raw, served)
        layouts = {part: site.spec.layouts[part] for part in site.spec.upload}
        base = unpack(site.store.artifacts.get(site.aggregate), layouts)
        assert base.parts.keys() == {Part.CLASSIFIER}
    assert steps[1] == 2 * steps[0] > 0
    counts = site.store.generations.snapshot(stored.generation).counts()
    assert int(stored.extras["done"]["validation"][0]) == counts["val"] > 0


def allowing(site: Site) -> Site:
    policy = PolicySection(allow_upload=DEFAULT_ALLOW_UPLOAD | get_method(site.spec.method).payload.up)
    site.configure(policy=policy)
    return site


def test_statistics_leave_only_with_the_owners_word(tmp_path: Path) -> None:
    report = Site(tmp_path, real_spec("fedproto")).declined()
    assert report.reason is DeclineReason.UPLOAD_NOT_ALLOWED
    assert "statistics" in report.detail


def test_a_spec_without_masks_is_declined_for_a_method_that_has_some_and_so_is_one_without_the_cohort_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = allowing(Site(tmp_path, real_spec("fedprobe")))
    method = get_method("fedprobe")
    plain = replace(method, payload=replace(method.payload, is_summed=False))
    monkeypatch.setattr(local_round, "get_method", lambda _name: plain)
    report = site.declined()
    assert (report.reason, report.detail) == (
        DeclineReason.SPEC_REFUSED,
        "method fedprobe has other parts that leave behind masks only",
    )
    monkeypatch.undo()
    report = site.declined()
    assert report.reason is DeclineReason.SPEC_REFUSED
    assert report.detail.startswith(
        "method fedprobe needs the cohort secret: `fedcg cohort create` on the first device"
    )


def test_a_spec_with_another_number_of_probes_than_its_statistics_have_rows_is_declined(tmp_path: Path) -> None:
    spec = real_spec("fedprobe", probes=4)
    site = allowing(Site(tmp_path, spec.model_copy(update={"params": {**spec.params, "probes": 8}})))
    site.share_cohort_secret()
    report = site.declined()
    assert (report.reason, report.detail) == (
        DeclineReason.SPEC_REFUSED,
        "the spec's tensor layouts are not those of its networks",
    )


def test_image_generators_leave_only_with_the_owners_word(tmp_path: Path) -> None:
    report = Site(tmp_path, real_spec("ppidsg")).declined()
    assert report.reason is DeclineReason.UPLOAD_NOT_ALLOWED
    assert "image_generator" in report.detail


@pytest.mark.parametrize(
    ("method", "kind", "parts"),
    [
        ("fedproto", NearestPrototype, {Part.EXTRACTOR, Part.STATISTICS}),
        ("ppidsg", nn.Sequential, {Part.IMAGE_GENERATOR, Part.EXTRACTOR, Part.CLASSIFIER}),
    ],
)
def test_the_exported_model_is_the_methods_own(
    tmp_path: Path, method: str, kind: type[nn.Module], parts: set[Part]
) -> None:
    spec = real_spec(method, epochs=3)
    site = allowing(Site(tmp_path, spec, shadow=1, export=True))
    trainer = site.trainer()
    assert isinstance(trainer.do(site.round()), RoundCommitted)
    done = trainer.do(ChooseModel(spec=spec.digest, aggregate=site.aggregate))
    assert isinstance(done, Chosen)
    assert done.succeeded, site.events("finalise_failed")
    (final,) = site.events("finalised")
    slots, layouts = site.state().slots, {part: spec.layouts[part] for part in spec.upload}
    best = to_weights(slots["best"])
    assert set(best) == parts
    incoming = to_weights(unpack(site.store.artifacts.get(site.aggregate), layouts).parts)
    candidates = {"own": best, "downloaded": {**to_weights(slots["personal"]), **incoming}}
    chosen = candidates[str(final["candidate"])]
    network = personal_model(spec, chosen)
    assert type(network) is kind
    session = onnxruntime.InferenceSession(Slots(site.store.root / "models").current() / "model.onnx")
    pixels = np.random.default_rng(0).integers(0, 256, (2, *spec.image.shape), dtype=np.uint8)
    logits = session.run(["logits"], {session.get_inputs()[0].name: pixels})[0]
    scaled = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()).float() / 255
    mean, std = (torch.tensor(one).view(1, -1, 1, 1) for one in (spec.image.mean, spec.image.std))
    images = (scaled - mean) / std
    assert np.allclose(logits, network(images).detach().numpy(), atol=1e-4)
    for part in parts:  # all of them are in the one graph
        without = {**chosen, part: {name: torch.zeros_like(tensor) for name, tensor in chosen[part].items()}}
        assert not np.allclose(logits, personal_model(spec, without)(images).detach().numpy(), atol=1e-2)
