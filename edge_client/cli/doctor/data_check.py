"""The check of a device's images: folders, classes, and whether images can be opened. Imports torch only to call a program."""

import random
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

from edge_client.cli.doctor.findings import Result, spec_of
from edge_client.cli.status import LEFT_OUT_ADVICE
from edge_client.config import AgentConfig
from edge_client.errors import EdgeError
from edge_client.store.owner_record import Consent
from fedcg.learning.data import sources
from fedcg.learning.errors import DataError, LearningError, ProgramError
from fedcg.learning.program import Program
from fedcg.learning.spec import ImageForm

DAMAGED_LISTED = 20
DECODE_S = 10.0  # about 5,000 photographs; of more, a sample is checked
LOOSE = "are directly in this folder instead of a class folder,"
SORTED_IN = "move each image into a folder named after its class, e.g. good/ and crack/"
_ANY_FORM = ImageForm(mode="L", height=8, width=8, mean=(0.5,), std=(0.5,))


def check_data(config: AgentConfig, now: datetime, *, calls: bool = True) -> Result:
    """Check that this device's images can be read. A program is only called if `calls` is set and its owner has allowed its code."""
    root = config.data.root
    expected = f"{root}/CLASS/*.png or .jpg, {root}/train and {root}/test of such, or a form of docs/how-to/data.md"
    if (program := Program.of_source(root)) is not None:
        try:
            digest, allowed = program.digest(), Consent(config.store).read().programs.values()
            has_changed = bool(allowed) and digest not in allowed
            if has_changed or not calls:
                told = "its changed code is not approved yet" if has_changed else "called when a round starts"
                advice = "start the agent, then run `fedcg agent approve` when it asks" if has_changed else ""
                return "warning" if has_changed else "ok", f"{program.name}, sha256 {digest}: {told}", advice
            return "ok", _called(program, config), ""
        except ProgramError as error:
            return "failed", str(error), "correct `program` under [training], or install its package"
        except EdgeError as error:
            return "failed", str(error), "the owner's decisions can't be read, so the program is not called"
        except DataError as error:
            return "failed", str(error), f"repair the data, or correct {program.files()[0]}"
        except LearningError as error:
            return "failed", str(error), f"correct {program.files()[0]}, or have the operator create a new plan from it"
    if root.is_file() and sources.is_array_source(root):
        return "ok", str(root), ""
    if not root.is_dir():
        return "failed", f"{root} is not a folder", f"expected {expected}"
    spec = spec_of(config)
    return _images(root, expected, () if spec is None else spec.classes)


def _called(program: Program, config: AgentConfig) -> str:
    """Call this device's program as at the start of a round, and summarise its data. Imports torch.

    Raises:
        LearningError: the program can't be called, its data can't be used, or its network is not the federation's.
    """
    client, spec = program.client(config.device, 0), spec_of(config)
    if client.trainer is None:
        parts = client.arrays(config.device).parts().items()
        has = ", ".join(f"{name} {len(part)}" for name, part in parts)
    else:
        has = "a trainer"
    if spec is not None:
        client.bound(spec.network, spec.input, config.device)
    return f"{program.name}, sha256 {program.digest()}: {has}"


def _by_class(files: list[Path], classes: tuple[str, ...]) -> tuple[str, str, list[str]]:
    """Image counts per class (0 included), the first folder that is not a class, and the classes with a single image."""
    counts = Counter(path.parent.name for path in files)
    unknown = sorted(set(counts) - set(classes)) if classes else []
    named = ", ".join(f"{name} {counts[name]}" for name in sorted(set(classes) | set(counts)))
    return named, unknown[0] if unknown else "", sorted(name for name in counts if counts[name] == 1)


def _images(root: Path, expected: str, classes: tuple[str, ...]) -> Result:
    damaged: list[str] = []
    unreadable: list[str] = []
    files, loose = sources.find_images(root, classes, unreadable.append)
    if not files and not unreadable:
        if not loose:
            return "failed", f"{root} contains no images", f"expected {expected}"
        return "failed", f"{root}: all {len(loose)} images {LOOSE[:-1]}", SORTED_IN
    by_class, unknown, single = _by_class(files, classes)
    random.Random(0).shuffle(files)  # so that a time limit samples all classes
    opened, stop_at = 0, time.monotonic() + DECODE_S
    for path in files:
        try:
            sources.decode_image(sources.read_image(path), _ANY_FORM, str(path))
            opened += 1
        except OSError as error:
            unreadable.append(f"{path}: {error.strerror}")
        except DataError as error:
            damaged.append(str(error))
        if time.monotonic() > stop_at:
            break
    detail = f"{len(files)} images in {root} ({by_class}), {opened} of them opened"
    if unreadable:
        detail = f"{detail}; {len(unreadable)} files or folders can't be read, e.g. {unreadable[0]}"
        return "failed", detail, "let the user that runs the agent read them (chown, chmod)"
    if unknown:
        detail = f"{detail}; the federation has no class {unknown!r}. Its classes are {', '.join(classes)}"
        advice = (
            "rename the folder to one of them, move it away, or have the operator list the class in a new federation"
        )
        return "failed", detail, advice
    if damaged:
        more = f"; and {len(damaged) - DAMAGED_LISTED} more" if len(damaged) > DAMAGED_LISTED else ""
        detail = f"{detail}; {len(damaged)} can't be used: {'; '.join(sorted(damaged)[:DAMAGED_LISTED])}{more}"
        if not opened:
            return "failed", detail, "correct `root` under [data], or repair the images: none can be used for training"
        return "warning", detail, LEFT_OUT_ADVICE
    return _distributed(files, loose, single, detail)


def _distributed(files: list[Path], loose: list[Path], single: list[str], detail: str) -> Result:
    """Check how usable images are distributed over folders and classes."""
    if loose:
        return "warning", f"{detail}; {len(loose)} more {LOOSE} and are skipped", SORTED_IN
    if len(names := {path.parent.name for path in files}) == 1:
        detail = f"{detail}; all of them are of one class, {names.pop()!r}, so classes can't be learned here"
        return "warning", detail, "add images of the other classes, each in a folder named after its class"
    if single:
        detail = f"{detail}; {', '.join(single)} with one image: too few for training, validation and test"
        return "warning", detail, "add images: training and testing a class needs at least three"
    return "ok", detail, ""
