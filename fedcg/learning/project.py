"""A project folder: `client.py` with the user's program, `plan.toml` and the package files. Torch-free until a program is called.

`fedcg simulate FOLDER` runs it on one machine, `fedcg federation create FOLDER/plan.toml` on devices whose agent.toml names the program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from fedcg.config_file import read_values
from fedcg.errors import EXISTS
from fedcg.learning.errors import ProgramError
from fedcg.learning.program import Program
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.spec import FederationPlan, ImageForm

PLAN_FILE = "plan.toml"
PROGRAM_NAME = "client:client"
_ROUNDS = 10
_MEASURED, _LONGEST = 200, 32


def program_of(folder: Path) -> Program:
    """The program of a project.

    Raises:
        ProgramError: the folder has no program.
    """
    if not (folder / "client.py").is_file():
        raise ProgramError(f"{folder}: no client.py with a function client(site); `fedcg new NAME` creates a project")
    return Program(PROGRAM_NAME, folder.resolve())


def written_plan(folder: Path) -> dict[str, Any]:
    """The fields of the project's plan; empty if there is no plan.

    Raises:
        ProgramError: it is not TOML.
    """
    path = folder / PLAN_FILE
    return read_values(path, ProgramError)[1] if path.is_file() else {}


def _id_of(folder: Path) -> str:
    return re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:63] or "federation"


def project_plan(folder: Path) -> dict[str, Any]:
    """The plan of a project: the fields of `plan.toml`, with classes, input and network taken from the current program.

    This calls the program for the first site and runs some of its samples through the network.

    Raises:
        ProgramError: the program can't be used.
        LearningError: its data or network can't be used.
        ValueError: other fields of the plan can't be used.
    """
    from fedcg.learning.networks.plans import complete_spec  # imports torch
    from fedcg.learning.registry import get_method

    program, kept = program_of(folder), written_plan(folder)
    site, seed = program.sites()[0], kept.get("seed", 0)
    federation = str(kept.get("federation", _id_of(folder)))
    client = program.client(site, Streams(spec_root(seed)).at(federation, "initial").seed("program"))
    data = client.data(site)
    chosen = {key: value for key, value in kept.get("network", {}).items() if key in CHOSEN}
    network = client.network(data, **chosen)
    usual = "fedcg" if client.trainer is None else "fedsplit" if client.trainer.private else "fedavg"
    method = get_method(str(kept.get("method", usual)))
    first: dict[str, Any] = {"federation": federation, "method": method.name, "rounds": _ROUNDS}
    if not kept:
        first["params"] = {"epochs": 5, "lr": 1e-3} | ({"server_iterations": 200} if method.name == "fedcg" else {})
    if method.payload.up & network.starts_on_devices:  # the first differences are to zeros, so they are whole weights
        first["codec"] = "f16-delta"
    form = client.form(data.train.images).model_dump(mode="json", exclude_defaults=True)
    stated = network.model_dump(mode="json", exclude_defaults=True)
    plan = first | kept | {"classes": list(map(str, client.classes)), "input": form, "network": stated}
    complete_spec(FederationPlan.model_validate(plan).model_copy(update={"network": network}))
    return plan


def image_plan(folder: Path) -> dict[str, Any]:
    """The plan for a folder of images: its classes, and mode, size, mean and deviation of at most `_MEASURED` images.

    Raises:
        ProgramError: no class folders with readable images.
    """
    import numpy as np

    from fedcg import imaging
    from fedcg.learning.data.sources import find_images

    files = find_images(folder)[0] if folder.is_dir() else []

    def decoded(form: ImageForm, *, resize: bool) -> Iterator[imaging.Pixels]:
        for path in files[:: -(-len(files) // _MEASURED) or 1]:
            with suppress(imaging.ImageError):
                yield imaging.decode_image(imaging.read_file(path), form, resize=resize)

    large = ImageForm(mode="RGB", height=_LONGEST, width=_LONGEST, mean=(0.5,) * 3, std=(0.5,) * 3)
    looked = [(each.shape[:2], bool((each == each[..., :1]).all())) for each in decoded(large, resize=False)]
    if not looked:
        raise ProgramError(f"{folder}: neither client.py nor CLASS/*.png or .jpg; `fedcg new NAME` creates a project")
    sides, is_grey = np.median([shape for shape, _ in looked], axis=0), all(grey for _, grey in looked)
    height, width = (max(4, round(side * min(1, _LONGEST / max(sides)))) for side in sides)
    form = large.model_copy(update={"mode": "L" if is_grey else "RGB", "height": height, "width": width})
    pixels = np.stack(list(decoded(form, resize=True))) / 255
    mean, std = pixels.mean((0, 1, 2)).round(3).tolist(), pixels.std((0, 1, 2)).clip(0.01).round(3).tolist()
    measured = {**form.model_dump(include={"mode", "height", "width"}), "mean": mean, "std": std}
    names = sorted({path.parent.name for path in files})
    return {"federation": _id_of(folder), "classes": names, "method": "fedcg", "rounds": 20, "input": measured}


CHOSEN = frozenset({"generator", "discriminator", "noise_dim"})


def plan_text(plan: Mapping[str, Any]) -> str:
    """A plan as TOML: the top-level fields, then the tables; lists of tables use one line per table."""
    tables = {name: value for name, value in plan.items() if isinstance(value, dict)}
    first = {name: plan[name] for name in ("federation", "classes", "method", "rounds") if name in plan}
    lines = [f"{name} = {_toml(value)}" for name, value in (first | dict(plan)).items() if name not in tables]
    for table, fields in tables.items():
        rows = [f"{name} = {_toml(value)}" for name, value in fields.items()]
        lines += ["", f"[{table}]", *rows] if rows else []
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_toml(one)}' for name, one in value.items())} }}" if value else "{}"
    if isinstance(value, (list, tuple)):
        rows = [_toml(one) for one in value]
        in_lines = "[\n" + "".join(f"  {row},\n" for row in rows) + "]"
        return in_lines if any(isinstance(one, dict) for one in value) else f"[{', '.join(rows)}]"
    return json.dumps(value, ensure_ascii=False, default=str)


def new_project(folder: Path, template: str) -> list[Path]:
    """Write a project that runs unchanged, with a plan that matches its program.

    Returns:
        The files written.

    Raises:
        ProgramError: the folder exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ProgramError(f"{folder} already exists: choose another name", exit_code=EXISTS)
    folder.mkdir(parents=True, exist_ok=True)
    source = files("fedcg.learning").joinpath("templates")
    name = re.sub(r"[^A-Za-z0-9]+", "-", folder.resolve().name).strip("-").lower() or "federation"
    for target in ("client.py", "pyproject.toml", "README.md", "test_client.py"):
        kept = f"client_{template}.py" if target == "client.py" else target
        text = source.joinpath(f"{kept}.template").read_text(encoding="utf-8")
        extra = "[tables]" if template in ("signals", "tables") else ""
        (folder / target).write_text(Template(text).safe_substitute(name=name, extra=extra), encoding="utf-8")
    (folder / PLAN_FILE).write_text(plan_text(project_plan(folder)) + "\n", encoding="utf-8")
    return sorted(folder.iterdir())
