"""What the page states of a federation's updates, and of what an attacker knows beforehand."""

from coordinator.facts.known import Known
from coordinator.facts.sent import sent
from fedcg.wire.parts import Part, ReportField, TensorLayout
from tests.support.coordinator.world import MakeWorld


def test_a_public_backbone_is_stated_with_what_is_private_beside_it(make_world: MakeWorld) -> None:
    world = make_world(rounds=1, clients=())
    network = world.spec.network.model_copy(
        update={"split": "resnet18+project:16", "weights": "ab" * 32, "freeze": "all-but:layer4"}
    )
    spec = world.spec.model_copy(update={"network": network})
    facts = sent(Known(world.store, lambda record: spec, world.root), "tiny")
    assert facts.start == (
        "backbone public (sha256 abababababab, frozen before layer4), projection from the cohort secret, or the public spec seed on a "
        "device without one"
    )
    assert facts.open_start == []


def test_a_report_field_is_stated_with_who_decides_that_it_leaves(make_world: MakeWorld) -> None:
    world = make_world(rounds=1, clients=())
    spec = world.spec.model_copy(
        update={
            "report": (*world.spec.report, ReportField.LABEL_COUNTS),
            "optional_report": (ReportField.LABEL_COUNTS,),
        }
    )
    when = {
        field: why
        for field, (_, why) in sent(Known(world.store, lambda record: spec, world.root), "tiny").fields.items()
    }
    assert when["examples"] == "the method needs it; a device whose owner does not allow it declines"
    assert when["label_counts"] == "where a device's owner allows it; the method uses it then"
    assert {when[name] for name in ("accuracy", "health", "shadow", "telemetry")} == {
        "where a device's owner allows it"
    }
    known = Known(world.store, lambda record: world.spec, world.root)
    assert sent(known, "tiny").fields["label_counts"][1] == "never: the method does not use it"
    needed = spec.model_copy(update={"optional_report": ()})
    fields = sent(Known(world.store, lambda record: needed, world.root), "tiny").fields
    assert fields["label_counts"][1] == when["examples"]


def test_a_part_of_whole_numbers_is_not_said_to_be_coded_as_weights_are(make_world: MakeWorld) -> None:
    world = make_world(rounds=1, clients=())
    counts = (TensorLayout(name="outputs", dtype="int64", shape=(2, 3), low=0.0, high=9.0),)
    changes = {"upload": (*world.spec.upload, Part.STATISTICS), "codec": "i8-delta"}
    layouts = {**world.spec.layouts, Part.STATISTICS: counts}
    spec = world.spec.model_copy(update={**changes, "layouts": layouts})
    parts = {one.part: one for one in sent(Known(world.store, lambda record: spec, world.root), "tiny").parts}
    assert (parts["statistics"].codec, parts["statistics"].numbers) == ("whole numbers", 6)
    assert parts["classifier"].codec.startswith("i8")
