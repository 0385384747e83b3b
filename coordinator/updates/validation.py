"""Validates updates: header, report, layouts, codecs, finite decoded numbers, no negative variances.

Torch-free; decides by the spec, never by trust. `robustness` limits the distance from the base.
"""

from coordinator.errors import ValidationError
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts import artifacts
from fedcg.wire.artifacts.payload import PartArrays, assert_finite, assert_within, max_payload_bytes
from fedcg.wire.errors import WireError
from fedcg.wire.messages.schemas import RoundAttempt
from fedcg.wire.parts import VOLUNTARY_REPORT, PartLayouts, Report, TensorCodec

ZSTD_SLACK_BYTES = 4096


def update_codecs(layouts: PartLayouts, spec: FederationSpec) -> dict[str, TensorCodec]:
    """The tensor codecs of this federation's updates."""
    return artifacts.codecs_for(layouts, spec.codec, spec.with_base)


def base_in(data: bytes, spec: FederationSpec, artifact: str) -> artifacts.Base:
    """Decode an aggregate of this federation, as the base of delta-coded updates.

    Args:
        data: the verified bytes of the artifact.
        spec: the federation's spec.
        artifact: its id.

    Raises:
        WireError: it is not an aggregate of this federation.
    """
    parts = {part: spec.layouts[part] for part in sorted(artifacts.parts_in(artifacts.read_header(data)))}
    return artifacts.Base(
        artifact, artifacts.unpack(data, parts, codecs=artifacts.codecs_for(parts, spec.aggregate_codec)).parts
    )


def unpack_update(data: bytes, spec: FederationSpec, base: artifacts.Base) -> artifacts.Artifact:
    """Decode the update in an artifact.

    Raises:
        WireError: it is not a valid update by the federation's spec for its round.
    """
    layouts = spec.update_layouts(artifacts.read_header(data).round)
    return artifacts.unpack(data, layouts, max_update_bytes(spec), codecs=update_codecs(layouts, spec), base=base)


def max_update_bytes(spec: FederationSpec) -> int:
    """The largest size of this federation's updates in bytes; checked before any chunk is requested."""
    every = [spec.update_layouts(number) for number in (1, 2)]
    payload = max(max_payload_bytes(layouts, update_codecs(layouts, spec)) for layouts in every)
    return payload + payload // 128 + ZSTD_SLACK_BYTES + artifacts.MAX_HEADER_BYTES


def validate_update(
    data: bytes, spec: FederationSpec, client: str, at: RoundAttempt, base: artifacts.Base
) -> artifacts.Artifact:
    """Decode and validate an update.

    Args:
        data: the complete bytes of the artifact, with the announced sha256.
        spec: the federation's spec.
        client: the device that its header must name.
        at: the round and attempt that its header must name.
        base: the aggregate that the round started from, which its header must name.

    Raises:
        ValidationError: with the reason for the receipt.
    """
    try:
        _check_header(artifacts.read_header(data), spec, client, at, base.id)
        artifact = unpack_update(data, spec, base)
        assert_finite(artifact.parts)
        assert_within(artifact.parts, spec.update_layouts(at.round))
    except WireError as error:
        raise ValidationError(client, str(error)[:280]) from error
    _check_variances(artifact.parts, client)
    return artifact


def _check_header(
    header: artifacts.ArtifactHeader, spec: FederationSpec, client: str, at: RoundAttempt, base: str
) -> None:
    wanted = {
        "kind": "update",
        "method": spec.method,
        "federation": spec.federation,
        **vars(at),
        "client": client,
        "base": base,
        "label_distribution": None,
    }
    for name, value in wanted.items():
        if getattr(header, name) != value:
            raise ValidationError(client, f"its header has {name} {getattr(header, name)}, not {value}")
    _check_report(header.report or Report(), spec, client)


def _check_report(report: Report, spec: FederationSpec, client: str) -> None:
    allowed = frozenset(spec.report) | VOLUNTARY_REPORT
    strange = sorted(field.value for field in report.fields() - allowed)
    if strange:
        raise ValidationError(client, f"it reports {', '.join(strange)}, which the spec does not request")
    missing = sorted(field.value for field in spec.required_report - report.fields())
    if missing:
        raise ValidationError(client, f"it does not report {', '.join(missing)}, which the merge requires")
    if report.per_class is not None and not report.per_class.fits(spec.class_count):
        raise ValidationError(client, f"its accuracies by class are not for {spec.class_count} classes")
    if report.label_counts is not None:
        if len(report.label_counts) != spec.class_count:
            raise ValidationError(client, f"{len(report.label_counts)} label counts for {spec.class_count} classes")
        if report.examples is not None and sum(report.label_counts) != report.examples:
            raise ValidationError(client, "its label counts do not add up to its examples")


def _check_variances(parts: PartArrays, client: str) -> None:
    for part, arrays in parts.items():
        for name, array in arrays.items():
            if name.rpartition(".")[2] == "running_var" and array.min(initial=0) < 0:
                raise ValidationError(client, f"its {part.value}'s {name} contains a variance below 0")
