"""`fedcg agent store migrate`, `fedcg agent backup|restore`: the private store at rest. Importing this loads no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_client.cli.shared_options import ConfigOption, read_config
from fedcg.errors import NOT_FOUND, BadInputError
from fedcg.terminal import PassphraseFile, Result, passphrase_of, prints

if TYPE_CHECKING:
    from edge_client.config import AgentConfig
    from edge_client.store.private_store import PrivateStore

store_app = typer.Typer(help="Check this device's private store.", no_args_is_help=True)


@store_app.command("migrate")
@prints
def migrate_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Check the private store, with its secrets; changes nothing. The agent must not run meanwhile.

    Exit codes: 0 done; 1 failed; 2 configuration or private store can't be used; 5 an agent runs.

    Example: fedcg agent store migrate
    """
    from edge_client.store.private_store import STORE_FORMAT

    settings = read_config(config)
    if settings.store.exists() and (owner := settings.store.stat().st_uid) != os.geteuid():
        raise BadInputError(
            f"{settings.store} belongs to the user with id {owner}: run this as that user (sudo -u '#{owner}' ...), "
            "otherwise its agent could not read the files any more"
        )
    with _alone(settings) as store:
        generation, problems = store.generations.current()
        problems += store.damage()
        store.take_over()
    trained = None if generation is None else generation.round_attempt.round
    values = {"store": str(settings.store), "format": STORE_FORMAT, "round": trained, "problems": list(problems)}
    stands = "nothing was trained yet" if trained is None else f"trained up to round {trained}"
    return values, "; ".join((f"{settings.store} has format {STORE_FORMAT}, {stands}", *problems))


@prints
def backup_command(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="the file to write; must not exist")],
    config: ConfigOption = Path("agent.toml"),
    passphrase_file: PassphraseFile = None,
) -> Result:
    """Write private store, keys, certificate and agent.toml into one encrypted file, for a box that replaces this one.

    The agent must not run meanwhile. Images are not part of it. A box with damaged files is not backed up. Exit codes: 0 done; 1 refused; 2 bad input, or a damaged store; 5 an agent runs; 6 the file exists.

    Example: fedcg agent backup --out /backup/line-4 --passphrase-file /root/passphrase
    """
    from edge_client.cli.status import damage_that_matters
    from edge_client.errors import StoreError
    from edge_client.store.backup import write_backup

    settings = read_config(config)
    with _alone(settings) as store:
        if damage := damage_that_matters(settings, store):
            raise StoreError("; ".join((*damage, "no backup was written")))
        facts = write_backup(settings, config, store, out, passphrase_of(passphrase_file, is_new=True))
    return {"file": str(out), "bytes": out.stat().st_size, **facts.model_dump()}, (
        f"Wrote {out}: device {facts.device} of {facts.federation}, trained up to round {facts.round}.\n"
        "It holds the device's keys and private weights: keep the passphrase apart from it.\n"
        f"Next: on the box that replaces this one, fedcg agent restore {out.name} --config {config}"
    )


@prints
def restore_command(
    file: Annotated[Path, typer.Argument(help="a file of `fedcg agent backup`")],
    config: ConfigOption = Path("agent.toml"),
    passphrase_file: PassphraseFile = None,
) -> Result:
    """Make this box the device of a backup. Overwrites nothing; an agent.toml that is there already names the places.

    Exit codes: 0 done; 1 refused, nothing was written; 2 bad input; 6 something is there already; 7 there is no such file.

    Example: fedcg agent restore /backup/line-4 --config /etc/fedcg/casting/agent.toml
    """
    from edge_client.store.backup import read_backup

    passphrase = passphrase_of(passphrase_file, is_new=False)
    facts, settings = read_backup(file, config, passphrase, os.environ)
    lines = [
        f"Restored device {facts.device} of {facts.federation}, trained up to round {facts.round}: {settings.store}",
        "The box that it was taken from must not run again: of two agents of one device the first update of a round counts,",
        "and the other one gets the receipt `conflict`. Where the old box was stolen, have the operator revoke the device, and enrol this one anew.",
    ]
    if (settings.store / "privacy.json").exists():
        lines.append(
            "Rounds that were trained with DP-SGD after the backup are not in its record of spent privacy: count them in by hand, or "
            "enrol the device anew."
        )
    values = {"config": str(config), "store": str(settings.store), **facts.model_dump()}
    return values, "\n".join([*lines, f"Next: fedcg doctor --config {config}"])


@contextmanager
def _alone(settings: AgentConfig) -> Iterator[PrivateStore]:
    """The store, while no agent and no training process uses it."""
    from edge_client.errors import StoreFormatError
    from edge_client.store.private_store import open_store

    if not (settings.store / "format.json").exists():
        raise StoreFormatError(
            f"{settings.store} holds no private store yet; `fedcg agent run` makes one", exit_code=NOT_FOUND
        )
    store = open_store(settings)
    with store.locked("lock"), store.locked("trainer.lock"):
        yield store
