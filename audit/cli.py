"""`fedcg audit`: record the traffic of a broker, check the recording against private weights, attack what was sent."""

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from audit.options import AuditOptions
from fedcg.errors import FAILED, NOT_MET
from fedcg.terminal import AsJson, Result, command, print_data, prints, with_options
from fedcg.text_output import table

if TYPE_CHECKING:
    from audit.recording.leakage import PrivateTensor

app = typer.Typer(no_args_is_help=True, help="Independently record what leaves the devices, and attack it.")


@app.command()
def observe(
    federation: Annotated[str, typer.Option(help="the federation's id")],
    out: Annotated[Path, typer.Option(help="folder for wire.json and artifacts/")],
    port: Annotated[int, typer.Option(help="the broker's port")],
    tls: Annotated[Path, typer.Option(help="folder with ca.pem, observer.pem, observer.key")],
    host: Annotated[str, typer.Option(help="the broker's host")] = "127.0.0.1",
    identity: Annotated[str, typer.Option(help="name in the certificate")] = "observer",
    protocol: Annotated[Literal["auto", "5", "3.1.1"], typer.Option(help="MQTT version")] = "auto",
    until_finished: Annotated[bool, typer.Option("--until-finished", help="stop when the federation ends")] = False,
    frames: Annotated[bool, typer.Option("--frames", help="also keep every raw frame, in frames.bin")] = False,
    as_json: AsJson = False,
) -> None:
    """Record and decode everything that crosses a federation's topics, with a read-only certificate.

    Prints `ready` once it is subscribed. SIGTERM or Ctrl-C stops it and completes the record.

    Example: fedcg audit observe --federation casting --out record --port 8883 --tls /var/lib/fedcg/pki
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
    ready = {"message": "ready", "record": str(out)}
    observer.run(
        stop, until_finished=until_finished, on_ready=lambda: print_data(ready) if as_json else typer.echo("ready")
    )
    if not as_json:
        typer.echo(f"Next: fedcg audit compare --observed {out} --private STORE --data IMAGES")


@command(app)
def compare(
    observed: Annotated[Path, typer.Option(help="an observer's folder")],
    private: Annotated[
        list[Path], typer.Option(help="the agent's store, or a safetensors file with private weights; repeat for more")
    ],
    data: Annotated[
        Path | None, typer.Option(help="the device's images: also search for them and for their features")
    ] = None,
) -> Result:
    """Compare every recorded tensor with every private tensor: as values, as a delta, row by row and as raw bytes.

    The files' extractor, discriminator, shadow model and what the method keeps private count, and their change from file to file.
    Rows and columns are found at any position of a tensor, also scaled or coded. Sealed numbers, also as a coordinator sums them, must look like random
    bits. Exit code 8 if something leaked, was missed by the observer or can't be decoded. The output states what this check does not see.

    Example: fedcg audit compare --observed record --private /var/lib/fedcg/agent --data /data/images
    """
    from audit.recording.leakage import check_recording

    more: list[PrivateTensor] = []
    if data is not None:
        from audit.evidence import inputs_and_features, read_updates

        more = inputs_and_features(read_updates(observed).spec, data, private)
    result = check_recording(observed, private, more)
    return result.record(), result.summary(), 0 if result.is_clean else NOT_MET


def run_command(**given: Any) -> Result:
    """Attack the update of a device in a round, and report what leaked.

    The report lists the attacks that were tried, their gain over the best guess, and the attacks that were not tried.
    Exit code 8 if a gate failed, 1 if an attack failed to run. The report contains images of the device and is for the
    device's owner.

    Example: fedcg audit run --updates record --data /data/images --out report --effort quick
    """
    from rich.console import Console

    from audit.report import PAGE_FILE
    from audit.run import run_audit

    options = AuditOptions(**given)
    done = run_audit(options, Console(stderr=True))
    lines = [f"{finding.attack.title}: {finding.summary()}" for finding in done.findings]
    lines += [
        f"gate {verdict.condition}: {'passed' if verdict.passed else 'FAILED'}, {verdict.why}"
        for verdict in done.verdicts
    ]
    has_failed = any(finding.outcome.has_failed for finding in done.findings)
    code = NOT_MET if not all(verdict.passed for verdict in done.verdicts) else FAILED if has_failed else 0
    lines.append(f"the audit took {done.report['subject']['seconds']:.0f} s; report: {options.out / PAGE_FILE}")
    return done.report, "\n".join(lines), code


app.command("run", help=run_command.__doc__)(prints(with_options(run_command, AuditOptions)))


@command(app, "attacks")
def list_attacks() -> Result:
    """List the attacks: name, the question that each answers, and papers.

    Example: fedcg audit attacks
    """
    from audit.attacks.attack import chosen_attacks

    found = chosen_attacks(())
    values = [{"name": one.name, "title": one.title, "question": one.question, "source": one.source} for one in found]
    rows = [(one.name, one.title, one.question, one.source) for one in found]
    return values, f"{table(('attack', 'title', 'question', 'source'), rows, '')}\nNext: fedcg audit run --attacks NAME"
