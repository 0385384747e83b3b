"""A Mosquitto that the operator runs, not `fedcg broker run`: the folder it starts from, and its lists in it.

The folder holds everything that Mosquitto reads and writes, so it can be started by root, whose rights Mosquitto then
gives up, or by the user that made it, and copied to another machine. The home has a link to it and keeps the lists up to date.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Sequence
from pathlib import Path

from coordinator.broker.mosquitto import ACL_NAME, DATA_NAME, write_config
from coordinator.errors import BrokerError
from coordinator.paths import BROKER_NAME, Home
from coordinator.pki.authority import CA_NAME, credential_of, server_credential
from fedcg.files import PRIVATE, replace_durably

LINK_NAME = "deployed"
"""In a home's broker directory: leads to the folder that was made last."""
PID_FILE = Path(LINK_NAME, DATA_NAME, "mosquitto.pid")
"""The file into which the Mosquitto of that folder writes its process id, as configured there."""
ACCOUNT = "mosquitto"
"""The user that Mosquitto turns into when root starts it; made by the distributions' packages."""
SHARED = 0o640
FOLDER = 0o755


def deploy(home: Home, out: Path) -> str:
    """Write the folder of a Mosquitto, without its lists, and remember it in the home.

    Args:
        home: the coordinator's directory.
        out: the folder; created when missing.

    Returns:
        The user that Mosquitto will run under.

    Raises:
        BrokerError: it can't be written, or the user that Mosquitto will run under can't enter it.
    """
    out = out.resolve()
    account = _account()
    _check_way(out, account)
    try:
        _write(home, out, account)
    except OSError as error:
        raise BrokerError(f"{out} can't be made a broker's folder: {error}") from error
    return account.pw_name


def refresh_lists(home: Home) -> None:
    """Bring the lists up to date in the folder that a Mosquitto of the operator's starts from, if there is one.

    Raises:
        BrokerError: the folder can't be written to; a revoked device may still be on its lists.
    """
    folder = home.broker / LINK_NAME
    try:
        if folder.is_dir():
            # 0640 for a broker under another user: give the directory its group, and the setgid bit
            _copy(folder, (home.revocations, home.broker / ACL_NAME), SHARED)
    except OSError as error:
        raise BrokerError(
            f"the broker's lists can't be written to {folder.resolve()}: {error}. Give that folder to the user that the coordinator "
            f"runs under; or, if no broker reads it, remove {folder}"
        ) from error


def _write(home: Home, out: Path, account: pwd.struct_passwd) -> None:
    if not out.is_dir():
        out.mkdir(parents=True)
        out.chmod(FOLDER)
    write_config(home, out, user=account.pw_name, pki=out)
    if os.geteuid() == 0:
        os.chown(out / DATA_NAME, account.pw_uid, account.pw_gid, follow_symlinks=False)
    server = server_credential(home.pki, BROKER_NAME, home.config().broker.host)
    authority = credential_of(home.pki, CA_NAME).certificate
    _copy(out, (authority, server.certificate, server.key, home.revocations, home.broker / ACL_NAME), PRIVATE)
    link = home.broker / LINK_NAME
    link.unlink(missing_ok=True)
    link.symlink_to(out)


def _copy(folder: Path, sources: Sequence[Path], mode: int) -> None:
    """Replace files in a folder, each in one step; root's are given to the user that Mosquitto runs under, as its data is."""
    owner = (folder / DATA_NAME).stat()
    for source in sources:
        path = folder / source.name
        replace_durably(path, source.read_bytes(), mode)
        if os.geteuid() == 0:
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _account() -> pwd.struct_passwd:
    """The user that Mosquitto runs as: its own user when root sets it up and that user exists, else the user that sets it up."""
    try:
        return pwd.getpwnam(ACCOUNT) if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
    except KeyError:
        return pwd.getpwuid(0)


def _check_way(out: Path, account: pwd.struct_passwd) -> None:
    if os.geteuid() != 0 or account.pw_uid == 0:
        return
    for folder in (out, *out.parents):
        if folder.exists() and not folder.stat().st_mode & stat.S_IXOTH:
            raise BrokerError(
                f"{folder} can't be entered by user {account.pw_name}, under which Mosquitto runs when root starts it; choose "
                "another --out, for example /etc/mosquitto/fedcg"
            )
