"""`fedcg audit`: record the traffic of a broker, and check the recording against private weights."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedcg.json_output import print_data

app = typer.Typer(no_args_is_help=True, help="Record independently the data that left the devices, and check it.")


@app.command()
def observe(
    federation: Annotated[str, typer.Option(help="the federation's id")],
    out: Annotated[Path, typer.Option(help="folder for wire.json and artifacts/")],
    port: Annotated[int, typer.Option(help="the broker's port")],
    tls: Annotated[Path, typer.Option(help="folder with ca.pem, observer.pem, observer.key")],
    host: Annotated[str, typer.Option(help="the broker's host")] = "127.0.0.1",
    identity: Annotated[str, typer.Option(help="name in the certificate")] = "observer",
    protocol: Annotated[Literal["auto", "5", "3.1.1"], typer.Option(help="MQTT version")] = "auto",
    until_finished: Annotated[bool, typer.Option("--until-finished", help="end when the federation has ended")] = False,
    frames: Annotated[bool, typer.Option("--frames", help="also keep every frame as it came, in frames.bin")] = False,
) -> None:
    """Record and decode everything that crosses a federation's topics, with a read-only certificate.

    Prints `ready` once it listens. Ends on SIGTERM or Ctrl-C with the record complete.
    """
    from audit.recording.observer import Observer
    from fedcg.wire.transport.mqtt import MqttConfig, MqttTransport, TlsFiles

    files = TlsFiles(ca=tls / "ca.pem", cert=tls / f"{identity}.pem", key=tls / f"{identity}.key")
    transport = MqttTransport(MqttConfig(host=host, port=port, identity=identity, tls=files, protocol=protocol))
    observer = Observer(transport, federation, out, keep_frames=frames)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    observer.start()
    observer.run(stop, until_finished=until_finished, on_ready=lambda: typer.echo("ready"))


@app.command()
def compare(
    observed: Annotated[Path, typer.Option(help="an observer's folder")],
    private: Annotated[list[Path], typer.Option(help="safetensors file with private weights; repeat for more")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Compare every recorded tensor with every private tensor, as value, as delta, and as raw bytes.

    Private are the parts extractor and discriminator in the files. Exit code 1 when something leaked.
    """
    from audit.recording.comparison import check_recording

    result = check_recording(observed, private)
    if as_json:
        print_data(result.record())
    else:
        typer.echo(result.summary())
        for match in result.matches:
            typer.echo(f"LEAK: {match}")
    if result.matches:
        raise typer.Exit(1)
