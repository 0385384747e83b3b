"""The command `fedcg model optimise`: try float16 and int8 on this device, and serve the fastest form."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from export.cli.infer_commands import Root, Threads, model_app
from export.model.manifest import MANIFEST_NAME, Manifest, read_all
from export.model.versions import ModelVersions
from fedcg.terminal import Result, command

if TYPE_CHECKING:
    from export.build.variants import HeldOut

__all__ = ["model_app", "optimise_command"]

Images = Annotated[
    Path,
    typer.Option(
        "--images", help="Held-out images as CLASS/*.png or .jpg, or an .npz of tensors. Never use training data."
    ),
]


@command(model_app, "optimise")
def optimise_command(
    root: Root,
    images: Images,
    threads: Threads = 0,
    sign: Annotated[
        Path | None, typer.Option("--sign", metavar="KEY", help="Sign the new version with a device's message key.")
    ] = None,
) -> Result:
    """Try float16 and int8 variants of the model in use. Install the fastest one that loses at most 0.5 points of accuracy as a new version.

    The new version's manifest records measurements and decisions. The previous version stays for `fedcg model rollback`.
    If no variant is better than the one in use, nothing is installed. If the version in use is signed, --sign is required.

    Example: fedcg model optimise /var/lib/fedcg/casting/models --images held-out
    """
    with Console(stderr=True).status("trying variants of the model"):
        directory, manifest, is_new = _optimise(root, _held_out(root, images), threads, sign)
    from export.model.runtime import available_providers, in_words

    providers = available_providers()
    lines = [f"  on {in_words(providers)}"]
    for one in manifest.variants:
        star = "*" if one.name == manifest.serves else " "
        measured = "" if one.latency_ms is None else f"{one.latency_ms:.3f} ms, accuracy {one.accuracy or 0.0:.1%}; "
        lines.append(f"{star} {one.name}  {'' if one.file else 'not kept: '}{measured}{one.reason}")
    taken = f"in use: {directory}\nNext: to undo this, fedcg model rollback {root}"
    lines.append(taken if is_new else f"no variant is faster on this device: {directory} stays in use")
    tried = [one.model_dump(mode="json") for one in manifest.variants]
    chosen = {"model": str(directory), "installed": is_new, "serves": manifest.serves}
    return {**chosen, "providers": providers, "variants": tried}, "\n".join(lines)


def _held_out(root: Path, images: Path) -> HeldOut:
    """The inputs that evaluate the variants, and those that calibrate int8: every fourth one."""
    from export.build.variants import HeldOut
    from export.model.image_files import labelled_inputs

    manifest, _ = read_all(ModelVersions(root).current())
    pictures, labels = labelled_inputs(images, manifest.classes, manifest.input)
    judging = [number for number in range(len(pictures)) if number % 4]
    return HeldOut([pictures[number] for number in judging], [labels[number] for number in judging], pictures[::4])


def _optimise(root: Path, held_out: HeldOut, threads: int, sign: Path | None) -> tuple[Path, Manifest, bool]:
    """Directory of the version in use afterwards, the manifest with the measurements, and whether that version is new."""
    from export.build.variants import add_variants
    from export.model.manifest import sign_manifest

    installed = ModelVersions(root)
    installed.check_signed(is_signed=sign is not None)
    source = installed.current()
    before, _ = read_all(source)
    with tempfile.TemporaryDirectory(prefix="fedcg-optimise-") as folder:
        for name in (MANIFEST_NAME, before.model.name):
            shutil.copy2(source / name, folder)
        after = add_variants(Path(folder), held_out, threads=threads)
        in_use, chosen = before.served, after.served
        if (in_use.name, in_use.file) == (chosen.name, chosen.file):
            return source, after, False

        def fill(directory: Path) -> None:
            shutil.copytree(folder, directory, dirs_exist_ok=True)
            if sign is not None:
                sign_manifest(directory, sign)

        return installed.install(fill), after, True
