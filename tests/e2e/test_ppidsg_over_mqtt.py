"""PPIDSG over a real broker: the image generator alone leaves, from devices whose owners list it; each exports its whole model."""

import json
from collections.abc import Iterator

import numpy as np
import onnxruntime
import pytest

from export.model.versions import Slots
from tests.support.edge.toml_edit import set_values
from tests.support.stack import CLASSES, Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]
WILLING, STRICT = "site-1", "site-2"
GENERATOR = "image_generator"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two devices, of which one lists the image generator, up to where the federation waits for the other's owner."""
    stack = Stack(
        root=tmp_path_factory.mktemp("ppidsg"),
        devices=(WILLING, STRICT),
        method="ppidsg",
        split="image_small",
        params={"epochs": 1},
        rounds=1,
        allow_upload={WILLING: (GENERATOR,)},
    )
    stack.prepare()
    for device in stack.devices:
        set_values(stack.config(device), {("export", "enabled"): True, ("export", "variants"): False})
    with stack.up(agents=True, observer=()):
        stack.wait_event("coordinator", lambda event: event["event"] == "declined", "the federation waits for an owner")
        yield stack


def crossed(stack: Stack) -> dict[str, set[str]]:
    """Which parts of each sender the observer saw cross."""
    path = stack.root / "wire" / "wire.json"
    artifacts = json.loads(path.read_text())["artifacts"] if path.exists() else []
    parts: dict[str, set[str]] = {}
    for entry in artifacts:
        parts.setdefault(entry["sender"], set()).update(entry["parts"])
    return parts


def test_by_default_a_device_declines_and_says_what_an_image_generator_is(stack: Stack) -> None:
    declined = [event for event in stack.events(STRICT) if event["event"] == "declined"]
    assert {event["reason"] for event in declined} == {"upload_not_allowed"}
    assert all(GENERATOR in event["detail"] for event in declined)
    assert STRICT not in crossed(stack)


def test_the_generator_alone_crosses_once_its_owner_lists_it_and_each_device_has_one_model(stack: Stack) -> None:
    for name in ("coordinator", STRICT):
        stack.running[name].terminate()
        stack.running[name].wait(timeout=30)
    set_values(stack.config(STRICT), {("policy", "allow_upload"): [GENERATOR]})
    stack.start_coordinator()
    stack.start_agent(STRICT)
    stack.wait_finished()
    wait_for(lambda: {WILLING, STRICT} <= crossed(stack).keys(), "the observer has written both updates", 20)
    assert set().union(*crossed(stack).values()) == {GENERATOR}
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 1), dtype=np.uint8)
    for device in stack.devices:
        session = onnxruntime.InferenceSession(Slots(stack.store(device) / "models").current() / "model.onnx")
        (logits,) = session.run(["logits"], {session.get_inputs()[0].name: pixels})
        assert logits.shape == (3, len(CLASSES))
        assert np.isfinite(logits).all()
