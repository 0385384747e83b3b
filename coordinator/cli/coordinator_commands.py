"""Commands on the coordinator's side: coordinator, broker, deploy. Also mounts the commands of `federation_commands`.

Heavy imports happen inside the commands.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordinator.cli.federation_commands import federation_app, federations_table
from coordinator.cli.shared_options import HOME_VARIABLE, Directory, asks, store_of
from fedcg.child_python import loading
from fedcg.errors import FAILED
from fedcg.log_output import LogForm, LogFormOption, LogLevel, LogLevelOption, LogSettings
from fedcg.terminal import AsJson, PassphraseFile, Result, command, line_printer, passphrase_of
from fedcg.text_output import moment, seconds_of, table

if TYPE_CHECKING:
    from coordinator.cli.client import Client

api_token_app = typer.Typer(help="Create, list and revoke the API tokens of people and programs.", no_args_is_help=True)


@asks(api_token_app, "create")
def token_create(
    client: Client,
    name: Annotated[str, typer.Option("--name", help="Name of the person or program, for the audit log.")],
    role: Annotated[
        Literal["viewer", "operator", "admin"],
        typer.Option("--role", help="viewer: read only; operator: also make changes; admin: also create tokens."),
    ],
    span: Annotated[str, typer.Option("--for", metavar="SPAN", help="Time until it expires, at most 3650d.")] = "90d",
) -> Result:
    """Create an API token. It is shown once; only a hash of it is stored.

    Example: fedcg coordinator token create --name ann --role operator --for 90d
    """
    days = seconds_of(span, "--for") / 86_400
    made = client.change("POST", "/api-tokens", {"name": name, "role": role, "days": days})
    return made, (
        f"{made['token']}\n\nShown only now. Use it as `Authorization: Bearer {made['token'][:10]}...`, or as FEDCG_API_TOKEN for commands with --url.\n"
        f"It gives access as {name!r} with the role {role}, {_until(made)}.\nNext: to revoke it, fedcg coordinator token revoke {made['id']}"
    )


@asks(api_token_app, "list")
def token_list(client: Client) -> Result:
    """List all API tokens. Their secrets are not stored.

    Example: fedcg coordinator token list
    """
    found = client.all("/api-tokens")
    columns = ("id", "name", "role", "state", "expires", "last used")
    return found, table(columns, map(_row, found), "No tokens yet.\nNext: fedcg coordinator token create")


@asks(api_token_app, "revoke")
def token_revoke(
    client: Client, token: Annotated[str, typer.Argument(help="Token id, from `fedcg coordinator token list`.")]
) -> Result:
    """Revoke a token immediately, and end all page sessions that were opened with it.

    Example: fedcg coordinator token revoke 3f9c21d07a54
    """
    done = client.change("DELETE", f"/api-tokens/{token}")
    return done, f"token {token} of {done['name']} is revoked."


session_app = typer.Typer(help="List and end open sessions of the page.", no_args_is_help=True)


@asks(session_app, "list")
def session_list(client: Client) -> Result:
    """List the open sessions of the page: all for an admin, else your own.

    Example: fedcg coordinator session list
    """
    found = client.all("/sessions")
    columns = ("id", "name", "role", "token or account", "last address", "opened", "ends")
    rows = ((s["id"], *s["who"].values(), s["address"], moment(s["opened_at"]), moment(s["ends_at"])) for s in found)
    return found, table(columns, rows, "No open sessions.")


@asks(session_app, "end")
def session_end(
    client: Client, session: Annotated[str, typer.Argument(help="Session id, from `fedcg coordinator session list`.")]
) -> Result:
    """End an open session of the page. The person can sign in again until the token or the role is withdrawn.

    Example: fedcg coordinator session end 3f9c21d07a54b8e6
    """
    done = client.change("DELETE", f"/sessions/{session}")
    return done, f"session {session} of {done['who']['name']} has ended."


def _row(token: dict[str, Any]) -> tuple[object, ...]:
    used = None if token["last_used_at"] is None else moment(token["last_used_at"])
    state = "revoked" if token["revoked_at"] else "valid" if token["is_valid"] else "expired"
    return token["id"], token["name"], token["role"], state, _until(token), used


def _until(token: dict[str, Any]) -> str:
    return "without expiry" if token["expires_at"] is None else f"until {moment(token['expires_at'])}"


coordinator_app = typer.Typer(help="Create and run a coordinator.", no_args_is_help=True)
broker_app = typer.Typer(help="Run a broker for a coordinator.", no_args_is_help=True)
deploy_app = typer.Typer(help="Write configuration for other programs, such as Mosquitto.", no_args_is_help=True)

__all__ = ["broker_app", "coordinator_app", "deploy_app", "federation_app"]

coordinator_app.add_typer(api_token_app, name="token")
coordinator_app.add_typer(session_app, name="session")


@broker_app.callback()
def _broker() -> None:
    """Run a broker for a coordinator."""


@deploy_app.callback()
def _deploy() -> None:
    """Write configuration for other programs, such as Mosquitto."""


@command(coordinator_app, "init")
def coordinator_init(
    directory: Directory,
    host: Annotated[str, typer.Option(help="Host name or address at which devices reach the broker.")] = "127.0.0.1",
    broker_port: Annotated[int, typer.Option(min=1, max=65535)] = 8883,
    api_port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP interface, on loopback only.")] = 8440,
    enrol_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Also listen for HTTPS enrolment by token on this port; usually 8444."),
    ] = None,
    carrier_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Also carry artifacts over HTTPS on this port; usually 8445.")
    ] = None,
    observer: Annotated[bool, typer.Option("--observer", help="Also issue a read-only observer certificate.")] = False,
    public_data: Annotated[
        Path | None, typer.Option(help="Unlabelled images for methods that need public data: a folder or an .npz.")
    ] = None,
) -> Result:
    """Create a coordinator in an empty directory: authority, certificates, keys, secret and configuration.

    Example: fedcg coordinator init --dir /var/lib/fedcg --host 192.168.1.10 --enrol-port 8444
    """
    from coordinator.cli.opening import create_home
    from coordinator.config import CoordinatorConfig

    sections = {
        "broker": {"host": host, "port": broker_port},
        "api": {"port": api_port},
        "enrolment": {"port": enrol_port},
        "carrier": {"port": carrier_port},
        "aggregation": {"public_data": None if public_data is None else str(public_data.resolve())},
    }
    config = CoordinatorConfig.model_validate(sections)
    home = create_home(directory, config, observers=("observer",) if observer else ())
    command = f"fedcg federation create --dir {home.root} plan.toml"
    text = f"Created {home.root}.\nNext: {command} (fedcg federation plan --example prints a plan)"
    return {"dir": str(home.root), "config": str(home.config_file)}, text


@coordinator_app.command("run")
def coordinator_run(
    directory: Directory,
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="Exit after the last round, once the devices have left.")
    ] = False,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Continue from the present state of a database that has lost commits.")
    ] = False,
    form: LogFormOption = LogForm.CONSOLE,
    level: LogLevelOption = LogLevel.INFO,
    as_json: AsJson = False,
) -> None:
    """Run the coordinator until SIGTERM or Ctrl-C. After a restart it resumes where it stopped. SIGUSR1 toggles the log level `debug`.

    Example: fedcg coordinator run --dir /var/lib/fedcg
    """
    with loading():
        from coordinator.cli.run import run_coordinator
    from coordinator.paths import Home
    from fedcg.log_output import set_up_log, toggle_debug_on_signal

    log = LogSettings(form, level)
    set_up_log(log)
    toggle_debug_on_signal(log)
    code = run_coordinator(
        Home(directory),
        until_finished=until_finished,
        accepts_loss=accept_loss,
        print_line=line_printer(as_json=as_json),
    )
    raise typer.Exit(code)


@asks(coordinator_app, "status")
def coordinator_status(
    client: Client,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 on problems or if it is not running.")] = False,
) -> Result:
    """Show all federations, and all open problems with their remedies.

    Example: fedcg coordinator status --check
    """
    runs, federations, problems = client.is_remote, client.all("/federations"), client.get("/problems")
    lines = ["The coordinator is running." if runs else "No coordinator is running; read from its directory."]
    lines += ["", federations_table(federations), ""]
    for one in problems:
        lines += [f"{one['kind']}, {one['subject']}: {one['what']}", f"  remedy: {one['remedy']}"]
        lines += [f"  repair: {each['command']}" for each in one["repairs"]] + [f"  details: {one['docs']}"]
    values = {"runs": runs, "federations": federations, "problems": problems}
    text = "\n".join([*lines, *([] if problems else ["No open problems."])])
    return values, text, FAILED if check and (problems or not runs) else 0


@asks(coordinator_app, "search")
def search(
    client: Client, text: Annotated[str, typer.Argument(help="Part of an id, label, site or note, or a round.")]
) -> Result:
    """Search federations, devices, rounds and exported models, like the page's search box.

    Example: fedcg coordinator search line-4
    """
    found = client.all("/search", q=text)
    rows = ((each["kind"], each["name"], each["what"]) for each in found)
    return found, table(("kind", "name", "what it is"), rows, "Nothing matches.\nNext: fedcg device list")


@asks(coordinator_app, "notify")
def coordinator_notify(
    client: Client,
    channel: Annotated[str, typer.Argument(help="webhook, mail or mqtt; empty lists all channels.")] = "",
) -> Result:
    """Show the channels of [notify] in coordinator.toml, or send a test to one.

    Example: fedcg coordinator notify mail
    """
    found = client.change("POST", f"/notifications/{channel}/test") if channel else client.get("/notifications")
    columns = ("channel", "receiver", "last accepted", "waiting", "last failure")
    rows = [
        (one["name"], one["target"], one["sent_at"] and moment(one["sent_at"]), one["waiting"], one["failure"])
        for one in found
    ]
    return found, table(columns, rows, "No channel is set.\nNext: set one under [notify] in coordinator.toml")


@command(coordinator_app, "rotate-key")
def coordinator_rotate_key(directory: Directory) -> Result:
    """Replace the key that signs the coordinator's messages. The old key signs the message that announces the new one to devices.

    The coordinator may be running. Earlier keys stay in the directory. Open enrolment tokens name the earlier key, so they are
    revoked and listed. For a stolen key see docs/how-to/upgrade.md.

    Example: fedcg coordinator rotate-key --dir /var/lib/fedcg
    """
    from coordinator.pki.signing_keys import key_file, rotate_key

    now = time.time()
    with store_of(directory) as (home, store):
        link = rotate_key(home, store, now)
        void = [token for token in store.register.tokens() if token.revoked_at == now]
    path = key_file(home, link.serial)
    text = f"The message key is now number {link.serial}, in {path}. Devices switch to it at the coordinator's next message."
    if void:
        text += f"\n{len(void)} open tokens named the earlier key and were revoked.\nNext: create new ones:"
    for token in void:
        bound = "" if token.device is None else f" --{'replaces' if token.replaces else 'device'} {token.device}"
        text += f"\n  fedcg token create --dir {home.root}{bound}    (was {token.id})"
    values = {"serial": link.serial, "key": link.new, "replaces": link.old, "file": str(path)}
    return {**values, "revoked_tokens": [token.id for token in void]}, text


@command(coordinator_app, "backup")
def coordinator_backup(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write; it must not exist.")],
    directory: Directory,
    passphrase_file: PassphraseFile = None,
) -> Result:
    """Write database, kept artifacts, keys and configuration to one encrypted file. The coordinator may be running.

    Example: fedcg coordinator backup --out /backup/fedcg-2026-11-22 --passphrase-file /secure/passphrase
    """
    from coordinator.paths import Home
    from coordinator.storage.backup import write_backup

    home = Home(directory).require()
    facts = write_backup(home, out, passphrase_of(passphrase_file, is_new=True))
    size = out.stat().st_size
    text = f"Wrote {out}: {size} bytes, {facts.artifacts} artifacts. It holds all keys. Store the passphrase elsewhere."
    text += f"\nNext: to restore it, fedcg coordinator restore {out} --dir NEW"
    return {"file": str(out), "bytes": size, **facts.model_dump()}, text


@command(coordinator_app, "restore")
def coordinator_restore(
    file: Annotated[Path, typer.Argument(help="A backup by `fedcg coordinator backup`.")],
    directory: Directory,
    passphrase_file: PassphraseFile = None,
    database: Annotated[
        str | None, typer.Option(help="Other location than in the backup: URL of an empty database, or `sqlite`.")
    ] = None,
    artifacts: Annotated[
        str | None, typer.Option(help="Other location than in the backup: s3://bucket/prefix, or `directory`.")
    ] = None,
) -> Result:
    """Restore a coordinator from a backup into an empty directory and an empty database. First stop the coordinator that it replaces.

    Example: fedcg coordinator restore /backup/fedcg-2026-11-22 --dir /var/lib/fedcg --passphrase-file /secure/passphrase
    """
    from coordinator.broker.access_lists import refresh_access
    from coordinator.cli.opening import change_storage
    from coordinator.paths import Home
    from coordinator.storage.backup import read_backup

    home = Home(directory)
    places = {"database": database, "artifacts": artifacts}
    passphrase = passphrase_of(passphrase_file, is_new=False)
    epoch = read_backup(file, home, passphrase, lambda made: change_storage(made, places))
    refresh_access(home)
    text = f"Restored {home.root}, continuing at epoch {epoch}.\nNext: fedcg coordinator run --dir {home.root}"
    return {"dir": str(home.root), "epoch": epoch}, text


@broker_app.command("run")
def broker_run(
    directory: Annotated[
        Path,
        typer.Option(
            "--dir", envvar=HOME_VARIABLE, help="The coordinator's directory, or a folder of `fedcg deploy mosquitto`."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Run a broker with mutual TLS for a coordinator in the foreground, until SIGTERM or Ctrl-C.

    Example: fedcg broker run --dir /var/lib/fedcg
    """
    from coordinator.broker.broker_process import run_mosquitto

    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    report = line_printer(as_json=as_json)
    raise typer.Exit(run_mosquitto(directory, report))


@command(deploy_app, "mosquitto")
def deploy_mosquitto(
    directory: Directory,
    out: Annotated[Path, typer.Option("--out", help="Folder to write, with the broker's key but not the authority's.")],
) -> Result:
    """Write everything that Mosquitto needs on another machine to one folder. Start it there with `fedcg broker run`.

    The coordinator updates its device lists over MQTT. Run this again after changing coordinator.toml, or before the certificates expire.

    Example: fedcg deploy mosquitto --dir /var/lib/fedcg --out /etc/fedcg-broker
    """
    from coordinator.broker.access_lists import refresh_access
    from coordinator.broker.broker_folder import write_folder
    from coordinator.config import LOOPBACK_HOSTS
    from coordinator.storage.locks import changing_members

    with store_of(directory) as (home, _), changing_members(home):
        write_folder(home, out, refresh_access(home))
        host = home.config().broker.host
    start = f"fedcg broker run --dir {out.resolve()}"
    place = (
        f"[broker] host in coordinator.toml is {host}, so the broker serves this machine only. Start it here:"
        if host in LOOPBACK_HOSTS
        else f"copy the folder over a secure channel to {host}, install Mosquitto and fedcg-edge[wire] there, and run:"
    )
    text = f"Wrote {out}. The coordinator keeps its device lists up to date.\nNext: {place}\n  {start}"
    return {"dir": str(out.resolve()), "start": start}, text
