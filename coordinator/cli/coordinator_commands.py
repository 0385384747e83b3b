"""Commands of the coordinator's side: coordinator, broker, deploy; those of `federation_commands` are mounted from here.

Heavy imports happen inside the commands.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.api_token_commands import api_token_app
from coordinator.cli.federation_commands import federation_app
from coordinator.cli.shared_options import AsJson, Directory, Somewhere, Url, line_printer, print_result, store_of
from coordinator.cli.watch_command import federation_watch
from fedcg.errors import FAILED
from fedcg.json_output import print_data

coordinator_app = typer.Typer(help="Create and run a coordinator.", no_args_is_help=True)
broker_app = typer.Typer(help="Run a broker for a coordinator.", no_args_is_help=True)
deploy_app = typer.Typer(help="Write configuration for programs that are run by others.", no_args_is_help=True)

__all__ = ["broker_app", "coordinator_app", "deploy_app", "federation_app"]

coordinator_app.add_typer(api_token_app, name="token")
federation_app.command("watch")(federation_watch)

BROKERS = ("mosquitto", "amqtt")


@broker_app.callback()
def _broker() -> None:
    """Run a broker for a coordinator."""


@deploy_app.callback()
def _deploy() -> None:
    """Write configuration for programs that are run by others."""


@coordinator_app.command("init")
def coordinator_init(
    directory: Directory,
    host: Annotated[str, typer.Option(help="Name or address under which devices reach the broker.")] = "127.0.0.1",
    broker_port: Annotated[int, typer.Option(min=1, max=65535)] = 8883,
    api_port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP interface, on loopback only.")] = 8440,
    enrol_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Also serve HTTPS for devices that enrol by token; 8444 is usual."),
    ] = None,
    carrier_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Also carry artifacts of devices over HTTPS; 8445 is usual."),
    ] = None,
    observer: Annotated[bool, typer.Option("--observer", help="Also make a read-only observer certificate.")] = False,
    public_data: Annotated[
        Path | None, typer.Option(help="Unlabelled images for methods that distil on some: a folder or an .npz.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a coordinator: authority, certificates, keys, secret, configuration, in an empty directory."""
    from coordinator.cli.opening import create_home
    from coordinator.config import (
        AggregationSettings,
        ApiSettings,
        BrokerSettings,
        CarrierSettings,
        CoordinatorConfig,
        EnrolmentSettings,
    )

    config = CoordinatorConfig(
        broker=BrokerSettings(host=host, port=broker_port),
        api=ApiSettings(port=api_port),
        enrolment=EnrolmentSettings(port=enrol_port),
        carrier=CarrierSettings(port=carrier_port),
        aggregation=AggregationSettings(public_data=None if public_data is None else str(public_data.resolve())),
    )
    home = create_home(directory, config, observers=("observer",) if observer else ())
    text = f"Created {home.root}. Next: fedcg federation create --dir {home.root} plan.toml (plan --example prints one)"
    print_result({"dir": str(home.root), "config": str(home.config_file)}, text, as_json=as_json)


@coordinator_app.command("run")
def coordinator_run(
    directory: Directory,
    exit_when_finished: Annotated[
        bool, typer.Option("--exit-when-finished", help="End after the last round, once the devices have left.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the coordinator until SIGTERM or Ctrl-C; started again it goes on where it was."""
    from coordinator.cli.run import run_coordinator
    from coordinator.paths import Home

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    code = run_coordinator(
        Home(directory), exit_when_finished=exit_when_finished, print_line=line_printer(as_json=as_json)
    )
    raise typer.Exit(code)


@coordinator_app.command("status")
def coordinator_status(
    directory: Somewhere = None,
    url: Url = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when a problem is open, for a monitor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show all federations and the open problems, each with its remedy."""
    from rich.console import Console

    from coordinator.cli.client import client_of
    from coordinator.cli.status_table import tables_of

    with client_of(directory, url) as client:
        runs, federations, problems = client.is_remote, client.all("/federations"), client.get("/problems")
    if as_json:
        print_data({"runs": runs, "federations": federations, "problems": problems})
    else:
        console = Console(highlight=False)
        for shown in tables_of(runs=runs, federations=federations, problems=problems):
            console.print(shown)
    raise typer.Exit(FAILED if check and (problems or not runs) else 0)


@coordinator_app.command("rotate-key")
def coordinator_rotate_key(directory: Directory, as_json: AsJson = False) -> None:
    """Replace the key that signs the coordinator's messages; devices follow by a message that the old key signs.

    The coordinator may be running; earlier keys stay in the directory. Open enrolment tokens name the earlier key: they are
    revoked and listed. For a key that was stolen see docs/operations.md.
    """
    from coordinator.pki.signing_keys import key_file, rotate_key

    now = time.time()
    with store_of(directory) as (home, store):
        link = rotate_key(home, store, now)
        void = [token for token in store.register.tokens() if token.revoked_at == now]
    path = key_file(home, link.serial)
    text = f"The message key is now number {link.serial}, in {path}. Devices follow at the coordinator's next message."
    if void:
        text += f"\n{len(void)} open tokens named the earlier key and are revoked. Make new ones:"
    for token in void:
        bound = "" if token.device is None else f" --{'replaces' if token.replaces else 'device'} {token.device}"
        text += f"\n  fedcg token create --dir {home.root}{bound}    (was {token.id})"
    values = {"serial": link.serial, "key": link.new, "replaces": link.old, "file": str(path)}
    print_result({**values, "revoked_tokens": [token.id for token in void]}, text, as_json=as_json)


@broker_app.command("run")
def broker_run(
    directory: Directory,
    broker: Annotated[str, typer.Option(help="mosquitto; or amqtt, for demos on this machine.")] = "mosquitto",
    as_json: AsJson = False,
) -> None:
    """Run a broker with mutual TLS for a coordinator, in the foreground, until SIGTERM or Ctrl-C."""
    from coordinator.broker.broker_process import run_embedded, run_mosquitto
    from coordinator.errors import BrokerError
    from coordinator.paths import Home

    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if broker not in BROKERS:
        raise BrokerError(f"--broker {broker}: choose one of {', '.join(BROKERS)}")
    run = run_mosquitto if broker == "mosquitto" else run_embedded
    code = run(Home(directory).require(), line_printer(as_json=as_json))
    raise typer.Exit(code)


@deploy_app.command("mosquitto")
def deploy_mosquitto(
    directory: Directory,
    out: Annotated[
        Path, typer.Option("--out", help="The folder that Mosquitto starts from; it holds the broker's key.")
    ],
    as_json: AsJson = False,
) -> None:
    """Write all that a Mosquitto of your own needs into one folder: configuration, certificates, key, access list, revocation list.

    On this machine the coordinator keeps the lists there up to date and makes Mosquitto read them. Run again, the command brings everything up to date.
    """
    from coordinator.broker.access_lists import refresh_access, reload_brokers
    from coordinator.broker.deployed_mosquitto import deploy
    from coordinator.broker.mosquitto import CONFIG_NAME
    from fedcg.find_mosquitto import find_mosquitto

    with store_of(directory) as (home, _), home.changing_members():
        refresh_access(home)
        account = deploy(home, out)
        runs = reload_brokers(home)
    found = find_mosquitto()
    start = f"{'mosquitto' if found is None else found.binary} -c {out.resolve() / CONFIG_NAME}"
    state = (
        "It runs, and has read the lists; start it again after a change of coordinator.toml:"
        if runs
        else "Start it with:"
    )
    text = (
        f"Wrote {out}, for a Mosquitto that runs as user {account}. {state}\n  {start}\n"
        f"On this machine the coordinator keeps acl and crl.pem there up to date. On another one: copy {out.resolve()} to the same "
        "path there, and after every change of devices acl and crl.pem; then send Mosquitto SIGHUP."
    )
    print_result(
        {"dir": str(out.resolve()), "user": account, "runs": bool(runs), "start": start}, text, as_json=as_json
    )
