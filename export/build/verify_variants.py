"""The forms of a model that were chosen, once more on held-out image files that had no part in choosing them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from export.build.variants import BUDGET, best
from export.model.manifest import Manifest, Variant, VariantCheck, read_manifest, read_model, write_manifest
from export.model.preprocess import load_image
from export.model.runtime import Floats, predictor_of
from fedcg.imaging import Pixels


def verify_variants(
    directory: Path, files: Sequence[Path], labels: Sequence[int], *, budget: float = BUDGET, threads: int = 0
) -> Manifest:
    """Compare each form that was kept with the model as exported, from the encoded files on, and record it in the manifest.

    One that loses more than the budget on these files is not kept after all.

    Args:
        directory: a model, its variants and its manifest, not in use yet.
        files: held-out image files; without any nothing is compared.
        labels: index of the right class per file.
        budget: accuracy that a variant may lose, as a share of the files.
        threads: threads of one prediction; 0 lets onnxruntime choose.

    Returns:
        The manifest as written.

    Raises:
        InputError: a file that cannot be read as an image.
        ModelError: a form that does not run.
    """
    manifest = read_manifest(directory)
    tried = [one for one in manifest.variants if one.file is not None and one.name != "fp32"]
    if not files or not tried:
        return manifest
    pictures, right = [load_image(file, manifest.image) for file in files], np.asarray(labels)
    plain = _logits(directory, manifest, Variant(name="fp32", file=manifest.model), pictures, threads)
    checks = {
        one.name: _check(one, _logits(directory, manifest, one, pictures, threads), plain, right) for one in tried
    }
    variants = tuple(_judged(one, checks.get(one.name), budget) for one in manifest.variants)
    verification = manifest.verification.model_copy(update={"variants": tuple(checks.values())})
    verified = manifest.model_copy(
        update={"variants": variants, "serves": best(variants).name, "verification": verification}
    )
    for gone in set(manifest.files) - set(verified.files):
        (directory / gone.name).unlink()
    write_manifest(directory, verified)
    return verified


def _logits(directory: Path, manifest: Manifest, form: Variant, pictures: Sequence[Pixels], threads: int) -> Floats:
    content = read_model(directory, manifest, form.file)
    return predictor_of(manifest, form, content, threads=threads).run(pictures).logits


def _check(form: Variant, logits: Floats, plain: Floats, right: np.ndarray) -> VariantCheck:
    return VariantCheck(
        name=form.name,
        accuracy=float((logits.argmax(axis=1) == right).mean()),
        accuracy_fp32=float((plain.argmax(axis=1) == right).mean()),
        top1_agreement=float((logits.argmax(axis=1) == plain.argmax(axis=1)).mean()),
        max_abs_difference=float(np.abs(logits - plain).max()),
        images=len(right),
    )


def _judged(form: Variant, check: VariantCheck | None, budget: float) -> Variant:
    if check is None or check.accuracy_fp32 - check.accuracy <= budget:
        return form
    reason = (
        f"loses {check.accuracy_fp32 - check.accuracy:.1%} of accuracy on {check.images} held-out files that had no part "
        f"in choosing it, more than the {budget:.1%} that it may"
    )
    return form.model_copy(update={"file": None, "reason": reason})
