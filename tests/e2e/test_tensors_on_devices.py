"""A federation of agents over Mosquitto whose data are tensors in `.npz` files: each ends with a model that answers."""

import io
from pathlib import Path

import numpy as np
import pytest

from export import load
from tests.support.edge.toml_edit import set_values
from tests.support.serving import serving
from tests.support.stack import CLASSES, Stack

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]


class _OfTensors(Stack):
    """Signals around 900 in the place of pictures."""

    def plan(self) -> str:
        before, _, rest = super().plan().partition("[input]\n")
        form = 'kind = "tensor"\nshape = [1, 32, 32]\nmean = [900]\nstd = [40]\n'
        return f"{before}[input]\n{form}[network]{rest.partition('[network]')[2]}"

    def adapt_config(self, device: str, data: Path, config: Path | None = None) -> None:
        super().adapt_config(device, data, config)
        labels, stream = np.arange(66) % len(CLASSES), np.random.default_rng(self.devices.index(device))
        steps = 80 * (np.arange(32) // 11 == labels.reshape(-1, 1, 1, 1))
        signals = stream.normal(870 + steps, 40, (66, 1, 32, 32)).astype(np.float32)
        file = data.with_suffix(".npz")
        np.savez(file, x_train=signals[18:], y_train=labels[18:], x_test=signals[:18], y_test=labels[:18])
        places = {("data", name): str(file) for name in ("root", "common_test")}
        set_values(self.config(device), {**places, ("export", "enabled"): True})


def test_every_device_ends_with_a_model_that_is_verified_signed_in_use_and_answers(tmp_path: Path) -> None:
    params = {"epochs": 20, "lr": 0.02, "server_iterations": 20, "ramp_rounds": 1}
    stack = _OfTensors(tmp_path, devices=("site-1", "site-2"), params=params)
    with stack.up(agents=True):
        stack.wait_finished()
    for device in stack.devices:
        events = {event["event"]: event for event in stack.events(device)}
        assert not {"export_failed", "finalise_failed"} & events.keys(), stack.tail(device)
        chosen, model = events["finalised"], load(stack.store(device))
        assert str(model.directory) == chosen["model_dir"]
        assert "signature checked" in model.signature
        manifest = model.manifest
        assert (manifest.takes, manifest.verification.source, manifest.verification.images) == ("tensors", "files", 18)
        assert chosen["accuracy_onnx"] == pytest.approx(chosen["accuracy_personal"])
        assert chosen["accuracy_common_onnx"] > 0.9
        assert {one.name for one in manifest.variants if one.accuracy is not None} == {"fp32", "fp16", "int8"}

    tensors, body = np.load(stack.root / "data" / "site-2.npz")["x_test"], io.BytesIO()
    np.save(body, tensors)
    with serving(stack.store("site-2") / "models") as server:
        answered = server.ask("/predict?top=1", body.getvalue(), {"Content-Type": "application/x-npy"}).document
    wanted = model.predict(tensors)
    assert [one["class"] for one in answered["results"]] == [CLASSES[row.argmax()] for row in wanted]
    assert [one["probability"] for one in answered["results"]] == pytest.approx(wanted.max(axis=1), abs=1e-5)
