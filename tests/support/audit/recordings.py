"""A case's artifacts and data as files, as a coordinator and a device have them."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from audit.evidence.case import Case
from fedcg.learning.image_set import ImageSet
from fedcg.learning.tensor_conversion import to_arrays
from fedcg.wire.artifacts.artifacts import ArtifactHeader, Base, artifact_id, codecs_for, pack, unpack
from fedcg.wire.messages.schemas import COORDINATOR


def write_recording(case: Case, folder: Path) -> dict[str, str]:
    """Spec, both aggregates and all updates of the case's round below `folder/artifacts`; their ids by name."""
    spec, view = case.view.spec, case.view
    assert view.after is not None
    (folder / "artifacts").mkdir(parents=True)

    def keep(data: bytes) -> str:
        (folder / "artifacts" / artifact_id(data)).write_bytes(data)
        return artifact_id(data)

    first = ArtifactHeader(
        kind="aggregate",
        method=spec.method,
        federation=spec.federation,
        round=view.round - 1,
        attempt=1,
        client=COORDINATOR,
    )
    data = pack(first, to_arrays(view.before.parts), spec.aggregate_codec)
    ids = {"spec": keep(spec.canonical()), "before": keep(data)}
    layouts = {part: spec.layouts[part] for part in sorted(view.before.parts)}
    decoded = unpack(data, layouts, codecs=codecs_for(layouts, spec.aggregate_codec))
    base = Base(ids["before"], {part: decoded.parts[part] for part in spec.with_base})
    for client, parts in {view.client: view.update, **view.others}.items():
        report = view.report if client == view.client else None
        made = {"kind": "update", "round": view.round, "client": client, "base": ids["before"], "report": report}
        head = first.model_copy(update=made)
        ids[client] = keep(pack(head, to_arrays(parts), spec.codec, base if spec.with_base else None))
    head = first.model_copy(update={"round": view.round, "base": ids["before"]})
    ids["after"] = keep(pack(head, to_arrays(view.after.parts), spec.aggregate_codec))
    return ids


def write_images(images: ImageSet, held_out: ImageSet | None, file: Path) -> Path:
    """Images as an .npz in which a device finds its own split."""
    arrays = {"train_images": _pixels(images), "train_labels": images.labels.numpy()}
    if held_out is not None:
        rows = torch.arange(len(held_out)) % 2 == 0
        for name, some in (
            ("val", held_out.rows(rows.nonzero()[:, 0])),
            ("test", held_out.rows((~rows).nonzero()[:, 0])),
        ):
            arrays |= {f"{name}_images": _pixels(some), f"{name}_labels": some.labels.numpy()}
    np.savez(file, allow_pickle=False, **arrays)
    return file


def write_private(case: Case, file: Path) -> Path:
    """The private parts before and after the round."""
    tensors = {
        f"{when}/{part.value}/{name}": tensor.contiguous().clone()
        for when, parts in (("before", case.truth.before), ("after", case.truth.after))
        for part, weights in (parts or {}).items()
        for name, tensor in weights.items()
    }
    save_file(tensors, file)
    return file


def _pixels(images: ImageSet) -> np.ndarray:
    return np.ascontiguousarray(images.images.permute(0, 2, 3, 1).squeeze(-1).numpy())


def write_case(case: Case, folder: Path) -> None:
    """A coordinator's artifacts (`home`), a device's images and its private weights."""
    write_recording(case, folder / "home")
    write_images(case.truth.train, case.truth.held_out, folder / "data.npz")
    write_private(case, folder / "private.safetensors")


def audit_command(place: Path, out: Path, *more: object) -> tuple[object, ...]:
    """The words of `fedcg audit run` on what `write_case` wrote."""
    given = ("--updates", place / "home", "--data", place / "data.npz", "--private", place / "private.safetensors")
    return ("audit", "run", *given, "--client", "client-1", "--effort", "quick", "--processes", 1, "--out", out, *more)
