"""The folder of a demo: its layout, settings and ports, and the secrets of its processes.

DIR/coordinator/   the coordinator's home                  DIR/data/       each client's folder, an ordinary data source
DIR/observer/      the recorded traffic of the broker      DIR/devices/    bundle and store per client
DIR/summary.json   figures, and accuracies by round        DIR/logs/       output of every process
"""

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from experiments.data.deal import DealOptions, deal_out
from experiments.data.source import Picture, RowPicture, Source
from experiments.errors import OptionError, SourceError
from experiments.settings import Setting, root_secret
from fedcg.errors import EXISTS
from fedcg.files import checked_secret, replace_durably
from fedcg.values import Value

LOOPBACK = "127.0.0.1"


class Run(Value):
    """The folder of a demo."""

    root: Path
    setting: Setting
    broker_port: int
    api_port: int

    @property
    def home(self) -> Path:
        """The coordinator's home."""
        return self.root / "coordinator"

    @property
    def data(self) -> Path:
        """Each client's own folder, and the common test images."""
        return self.root / "data"

    @property
    def observer(self) -> Path:
        """The recorded traffic of the broker."""
        return self.root / "observer"

    def bundle(self, client: str) -> Path:
        """A device's bundle: certificates, keys, agent.toml, and its private store."""
        return self.root / "devices" / client


def free_ports(count: int) -> list[int]:
    """Return TCP ports on loopback that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind((LOOPBACK, 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def new_run(root: Path, setting: Setting) -> Run:
    """Return the folder of a new demo; writes nothing yet.

    Raises:
        OptionError: the folder is not empty.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise OptionError(f"{root} is not an empty folder; choose another --out, or delete it first", exit_code=EXISTS)
    broker_port, api_port = free_ports(2)
    return Run(root.resolve(), setting, broker_port, api_port)


def write_secrets(folder: Path, seed: int, client: str) -> None:
    """Give a device its own secret and the cohort's, from the demo's seed; on a real device both are random."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, purpose in (("device.key", f"device {client}"), ("cohort.key", "cohort")):
        replace_durably(folder / name, checked_secret(root_secret(seed, purpose)))


def _place(pictures: Sequence[Picture], folder: Path, name: str | None = None) -> None:
    """Hard-link image files into a folder, or copy them if the file system can't link; write pictures that are not files.

    Only a single picture may get another name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        target = folder / (name or picture.name)
        try:
            if isinstance(picture, RowPicture):
                target.write_bytes(picture.content())
            else:
                os.link(picture.path, target)
        except FileExistsError:
            continue
        except OSError as error:
            if isinstance(picture, RowPicture):
                raise SourceError(f"{target} can't be written: {error.strerror or error}") from error
            shutil.copyfile(picture.path, target)


def prepare(source: Source, out: Path, options: DealOptions) -> dict[str, dict[str, int]]:
    """Write `out/CLIENT/{train,test}/CLASS/*`, `out/common/CLASS/*` and `out/public/*`; return each client's `train_images` and `test_images`.

    Every client gets every class folder, also an empty one, so that class lists agree. Without a test part in the
    source, a sixth of each class becomes test and another sixth (at most 200, the same in every class) common test. The
    file names of public images do not reveal their classes.

    Args:
        source: the images.
        out: folder to write to; created if missing.
        options: the settings of the partition.

    Raises:
        SourceError: too few images for the clients, or a folder that can't be written.
    """
    deal = deal_out(source, options)
    counts = {}
    for name, dealt in deal.clients.items():
        parts = {"train": dealt.train, "val": dealt.val, "test": dealt.test}
        for part, pictures in parts.items():
            for label, of_class in enumerate(pictures or ()):
                _place(of_class, out / name / part / deal.classes[label])
        counts[name] = {f"{part}_images": sum(map(len, parts[part] or ())) for part in ("train", "test")}
    for label, of_class in enumerate(deal.common):
        _place(of_class, out / "common" / deal.classes[label])
    for number, picture in enumerate(deal.public):
        _place([picture], out / "public", f"{number:06d}{Path(picture.name).suffix}")
    return counts
