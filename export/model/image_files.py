"""Finds images (with labels from `CLASS/*.png` folders) and tensors, classifies them, and formats the results. Torch-free."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from export.errors import InputError
from export.model.runtime import Floats, Guess, Model, Sample, labelled_tensors, load_all, load_inputs
from fedcg.errors import NOT_FOUND
from fedcg.event_log import log_text
from fedcg.imaging import is_named_as_image
from fedcg.input_form import InputForm, TensorForm
from fedcg.text_output import aligned
from fedcg.values import Value

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
TENSOR_SUFFIXES = frozenset({".npy", ".npz"})
BAR_FROM = 50  # with fewer images a progress bar only flickers
_BATCH = 64


class Classified(Value):
    """The classes of one file, likeliest first; for a model without classes, its output."""

    file: str
    guesses: tuple[Guess, ...]
    output: object = None

    @staticmethod
    def of(model: Model, name: str, row: Floats, top: int) -> Classified:
        """The result for a file from its `row` of the model's probabilities or outputs."""
        if not model.manifest.classes:
            return Classified(name, (), row.tolist())
        return Classified(name, model.top(row, top))

    def as_json(self) -> dict[str, object]:
        """The result as `fedcg infer --json` prints it."""
        if not self.guesses:
            return {"file": self.file, "output": self.output}
        best = self.guesses[0]
        top = [{"class": guess.label, "probability": guess.probability} for guess in self.guesses]
        return {"file": self.file, "class": best.label, "probability": best.probability, "top": top}


def expand(arguments: Sequence[str], suffixes: frozenset[str] = IMAGE_SUFFIXES) -> list[Path]:
    """Expand arguments to files: a file itself, all files with these suffixes under a folder, the matches of a pattern.

    An argument without a match is kept and is later reported as missing.
    """
    return [path for argument in arguments for path in _expand_one(argument, suffixes)]


def _expand_one(argument: str, suffixes: frozenset[str]) -> list[Path]:
    path = Path(argument)
    if path.is_dir():
        found = (one for one in path.rglob("*") if is_named_as_image(one, suffixes) and not one.is_dir())
        return sorted(found) or [path]
    if path.exists():
        return [path]
    matches = glob.glob(argument, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    return [Path(match) for match in sorted(matches)] or [path]


def classify_files(
    model: Model, files: Sequence[Path], *, top: int, max_pixels: int
) -> tuple[list[Classified], list[InputError]]:
    """Classify files in batches, with a progress bar on stderr if there are many.

    Returns:
        The results in the order of the files, and the errors of the other files. A file of several tensors has several results: `FILE#0`, ….
    """
    results: list[Classified] = []
    failures: list[InputError] = []
    console = Console(stderr=True)
    hidden = len(files) < BAR_FROM or not console.is_terminal
    with Progress(console=console, disable=hidden, transient=True) as progress:
        task = progress.add_task("classifying", total=len(files))
        for start in range(0, len(files), _BATCH):
            batch = files[start : start + _BATCH]
            loaded: list[tuple[str, Sample]] = []
            for file in batch:
                try:
                    inputs = load_inputs(file, model.manifest.input, max_pixels)
                except InputError as error:
                    failures.append(error)
                    continue
                names = [str(file)] if len(inputs) == 1 else [f"{file}#{row}" for row in range(len(inputs))]
                loaded += zip(names, inputs, strict=True)
            if loaded:
                probabilities = model.predict([one for _, one in loaded])
                results += [
                    Classified.of(model, name, row, top) for (name, _), row in zip(loaded, probabilities, strict=True)
                ]
            progress.advance(task, len(batch))
    return results, failures


def table_lines(results: Sequence[Classified]) -> list[str]:
    """Results for a person: one line per file, columns aligned, never truncated to the terminal's width."""
    rows = [
        (
            log_text(one.file),
            *([f"{guess.label} {guess.probability:.3f}" for guess in one.guesses] or [json.dumps(one.output)]),
        )
        for one in results
    ]
    return aligned(rows)


def labelled_files(
    folder: Path, classes: Sequence[str], form: InputForm
) -> tuple[Sequence[Path | Sample], Sequence[int]]:
    """Image files under `folder/CLASS/`, or the tensors of an `.npz`, and their class indices, in order of class and path.

    Args:
        folder: one folder per class; a class may be missing. If `folder/test/CLASS/` exists, only that is read. For tensors, the file.
        classes: the model's class names.
        form: what the model takes.

    Raises:
        InputError: no such folder, a folder that is not a class, or no image; or as `labelled_tensors`.
    """
    if isinstance(form, TensorForm):
        return labelled_tensors(folder, form, classes)
    if not folder.is_dir():
        raise InputError(str(folder), "no such folder", exit_code=NOT_FOUND)
    root = folder / "test" if (folder / "test").is_dir() and "test" not in classes else folder
    unknown = sorted(one for one in root.iterdir() if one.is_dir() and one.name not in classes)
    if unknown:
        raise InputError(str(unknown[0]), f"the model has no such class; its classes are {', '.join(classes[:20])}")
    found = [
        (path, label)
        for label, name in enumerate(classes)
        if (root / name).is_dir()
        for path in expand([str(root / name)])
        if path.is_file()
    ]
    if not found:
        raise InputError(str(folder), f"no images; expected {folder}/CLASS/*.png or .jpg")
    return [path for path, _ in found], [label for _, label in found]


def labelled_inputs(folder: Path, classes: Sequence[str], form: InputForm) -> tuple[list[Sample], Sequence[int]]:
    """The decoded inputs that `labelled_files` finds, and their class indices; arguments as there.

    Raises:
        InputError: as `labelled_files`, or a file that is not an image.
    """
    files, labels = labelled_files(folder, classes, form)
    return load_all(files, form), labels
