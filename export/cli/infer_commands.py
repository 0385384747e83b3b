"""The commands `fedcg infer`, `fedcg model` and `fedcg export`. Only `export` imports torch, when it runs."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Iterable
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from export.errors import ExportError, ServingError
from export.model.versions import ModelVersions, Version
from fedcg.errors import NOT_FOUND
from fedcg.imaging import MAX_PIXELS
from fedcg.terminal import AsJson, Result, command, line_printer, print_data, prints
from fedcg.text_output import moment, seconds_of, table

if TYPE_CHECKING:
    from export.model.manifest import Accept
    from export.serving.judge import CandidateStage

model_app = typer.Typer(
    help="List, verify, use and roll back model versions on this device.", no_args_is_help=True, add_completion=False
)
Root = Annotated[Path, typer.Argument(metavar="DIR", help="Root of the versions: the folder with 0001, 0002, …")]
SignedBy = Annotated[
    str | None,
    typer.Option(
        "--signed-by",
        metavar="KEY",
        help="Accept only models signed by this device: its public key (64 hex digits), or a file that contains it. "
        "Default: signing.pub next to an agent's models, if present.",
    ),
]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Threads per prediction; 0: chosen by onnxruntime.")]
MaxPixels = Annotated[int, typer.Option("--max-pixels", min=1, help="Reject images with more pixels, before decoding.")]
WatchWindow = Annotated[
    int, typer.Option(min=0, help="Predictions to compare after an update; a worse version is rolled back. 0: off.")
]
ShadowImages = Annotated[
    int, typer.Option("--shadow", min=0, help="Images on which a new version is compared before it serves; 0: at once.")
]
ShadowShare = Annotated[
    float, typer.Option("--shadow-share", min=0.01, max=1, help="Share of requests that the new version also predicts.")
]
ShadowFor = Annotated[
    str,
    typer.Option("--shadow-for", metavar="SPAN", help="Longest comparison before the new version serves, e.g. 30m."),
]


def _accept(signed_by: str | None) -> Accept:
    from export.model.manifest import check_by_this_box, required

    return check_by_this_box if signed_by is None else required(signed_by)


def _stage(images: int, share: float, span: str) -> CandidateStage | None:
    from export.serving.judge import CandidateStage

    lasts_s = seconds_of(span, "--shadow-for")
    return CandidateStage(images, share, lasts_s) if images else None


class _InferGroup(TyperGroup):
    """Passes all arguments that name no subcommand to the command that classifies images."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the name of the default command."""
        close = get_close_matches(args[0], [name for name in self.commands if name != _IMAGES]) if args else []
        if close and args[0] not in self.commands and not Path(args[0]).exists():
            ctx.fail(f"No such command or file {args[0]!r}. Did you mean {close[0]!r}?")
        is_named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if is_named else [_IMAGES, *args])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command; the default one does not show its name in its usage line."""
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == _IMAGES else name, command, rest


_IMAGES = "IMAGE..."
infer_app = typer.Typer(
    cls=_InferGroup,
    help="Classify images or tensors with an exported model: from files, over HTTP (`serve`) or over MQTT (`serve-mqtt`).",
    add_completion=False,
)


@infer_app.command(_IMAGES)
def infer_command(
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE...", help="Image files; .npy or .npz files of tensors; folders; glob patterns."),
    ],
    model: Annotated[
        Path,
        typer.Option("--model", help="A model's directory, the root of its versions, or a device's private store."),
    ],
    top: Annotated[int, typer.Option("--top", min=1, help="Number of classes per image.")] = 3,
    max_pixels: MaxPixels = MAX_PIXELS,
    threads: Threads = 0,
    signed_by: SignedBy = None,
    as_json: AsJson = False,
) -> None:
    """Classify images or tensors with an exported model. Prints class names and probabilities, likeliest first.

    Images that cannot be classified are reported on stderr. The others are still classified.
    The exit code is then 2, or 7 if the only errors are missing files.
    Over HTTP: `fedcg infer serve --help`. Over MQTT: `fedcg infer serve-mqtt --help`.

    Example: fedcg infer --model /var/lib/fedcg/casting image.png --top 1
    """
    from export.model.image_files import IMAGE_SUFFIXES, TENSOR_SUFFIXES, classify_files, expand, table_lines
    from export.model.runtime import Model, in_words
    from fedcg.input_form import ImageForm

    loaded = Model.load(model, threads=threads, accept=_accept(signed_by))
    if sys.stderr.isatty():
        typer.echo(f"{loaded.directory} ({loaded.served.name}) on {in_words(loaded.predictor.providers)}", err=True)
    suffixes = IMAGE_SUFFIXES if isinstance(loaded.manifest.input, ImageForm) else TENSOR_SUFFIXES
    results, failures = classify_files(loaded, expand(images, suffixes), top=top, max_pixels=max_pixels)
    document = {
        "model": str(loaded.directory),
        "federation": loaded.manifest.federation,
        "round": loaded.manifest.round,
        "providers": list(loaded.predictor.providers),
        "results": [one.as_json() for one in results],
        "errors": [{"file": one.file, "error": one.reason} for one in failures],
    }
    if not as_json:
        for line in table_lines(results):
            typer.echo(line)
    if failures:
        refused = _some("inputs were not classified", map(str, failures), len(results) + len(failures))
        refused.data = document
        refused.exit_code = min(one.exit_code for one in failures)  # 2, or 7 if all are missing
        raise refused
    if as_json:
        print_data(document)


@infer_app.command("serve")
def serve_command(
    model: Annotated[Path, typer.Option("--model", help="Root of the versions, which is watched; or one model.")],
    host: Annotated[str, typer.Option(help="Address to listen on. No authentication.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8080,
    threads: Threads = 1,
    max_batch: Annotated[int, typer.Option(min=1, max=256, help="Most images in one batch or request.")] = 32,
    max_wait: Annotated[str, typer.Option(metavar="SPAN", help="Longest wait to fill a batch, at most 1s.")] = "2ms",
    queue: Annotated[int, typer.Option(min=1, max=4096, help="Most unanswered images; more get a 429.")] = 256,
    max_bytes: Annotated[int, typer.Option(min=1, help="Largest request body in bytes.")] = 16 * 1024 * 1024,
    max_pixels: MaxPixels = MAX_PIXELS,
    watch: WatchWindow = 200,
    shadow: ShadowImages = 200,
    shadow_share: ShadowShare = 0.25,
    shadow_for: ShadowFor = "1h",
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another host name accepted in the Host header; may be repeated.")
    ] = None,
    signed_by: SignedBy = None,
    as_json: AsJson = False,
) -> None:
    """Serve predictions over HTTP: POST /predict; GET /healthz, /readyz, /model and /metrics.

    Follows the version in use without losing a request. On SIGTERM or SIGINT, the server answers all accepted requests and exits with code 0, or 1 if some are unanswered after 30 s.

    Example: fedcg infer serve --model /var/lib/fedcg/casting/models --port 8080
    """
    gc.disable()  # imported modules stay in memory; garbage collection takes an eighth of the start-up time
    try:
        from export.serving.app import Metrics, Service
        from export.serving.batcher import Batcher
        from export.serving.live_model import ServedModel
        from export.serving.request_bodies import Limits
        from export.serving.server import serve
    finally:
        gc.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    metrics, wait_s = Metrics(), seconds_of(max_wait, "--max-wait", "1s")
    batcher = Batcher(max_batch=max_batch, max_wait_s=wait_s, capacity=queue, observe=metrics.batches.observe)
    models = ServedModel(
        model,
        threads=threads,
        warm_up=(1, max_batch),
        observe=lambda outcome: metrics.loads.labels(outcome).inc(),
        accept=_accept(signed_by),
        stage=_stage(shadow, shadow_share, shadow_for),
        watch=watch,
    )
    service = Service(models, batcher, Limits(max_bytes, max_pixels, min(max_batch, queue)), metrics)
    raise typer.Exit(serve(service, host, port, allow_host or (), queue, line_printer(as_json=as_json)))


@infer_app.command("serve-mqtt")
def serve_mqtt_command(
    model: Annotated[Path, typer.Option("--model", help="Root of the versions, which is watched; or one model.")],
    name: Annotated[str, typer.Option(help="Name of this server: its MQTT client id and a topic level.")],
    host: Annotated[str, typer.Option(help="Host of the broker.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the broker.")] = 8883,
    prefix: Annotated[str, typer.Option(help="Topic levels before NAME.")] = "fedcg-infer",
    ca: Annotated[Path | None, typer.Option(help="PEM file of the CA that signed the broker's certificate.")] = None,
    cert: Annotated[
        Path | None, typer.Option(help="PEM file of this server's certificate; its common name must be NAME.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None,
    insecure: Annotated[bool, typer.Option(help="Connect without TLS; loopback only.")] = False,
    threads: Threads = 1,
    queue: Annotated[int, typer.Option(min=1, max=4096, help="Most waiting requests; more are refused.")] = 64,
    top: Annotated[int, typer.Option(min=1, help="Number of classes per image.")] = 3,
    max_bytes: Annotated[int, typer.Option(min=1, help="Largest request in bytes.")] = 1024 * 1024,
    max_pixels: MaxPixels = MAX_PIXELS,
    watch: WatchWindow = 200,
    shadow: ShadowImages = 200,
    shadow_share: ShadowShare = 0.25,
    shadow_for: ShadowFor = "1h",
    signed_by: SignedBy = None,
    as_json: AsJson = False,
) -> None:
    """Serve predictions over MQTT, by request and response. Follows the version in use.

    On SIGTERM or SIGINT, the server answers all waiting requests and exits with code 0.

    Example: fedcg infer serve-mqtt --model /var/lib/fedcg/casting/models --name line-4 --insecure --port 1883
    """
    from export.serving.live_model import ServedModel
    from export.serving.mqtt_server import INBOUND_FACTOR, MAX_IMAGES, MqttServer, Place
    from export.serving.request_bodies import Limits
    from fedcg.wire.errors import TransportError
    from fedcg.wire.transport.mqtt import MqttConfig, MqttTransport, TlsFiles

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    files = [path for path in (ca, cert, key) if path is not None]
    if len(files) not in (0, 3):
        raise ServingError("TLS needs all of --ca, --cert and --key")
    stage = _stage(shadow, shadow_share, shadow_for)
    place, tls, inbound = Place(prefix, name), TlsFiles(*files) if files else None, INBOUND_FACTOR * max_bytes + 65_536
    try:
        config = MqttConfig(host, port, name, tls=tls, insecure=insecure, max_inbound=inbound)
    except (TransportError, ValueError) as error:
        raise ServingError(str(error)) from error
    server = MqttServer(
        ServedModel(model, threads=threads, warm_up=(1,), accept=_accept(signed_by), stage=stage, watch=watch),
        place,
        lambda will: MqttTransport(config, will),
        Limits(max_bytes, max_pixels, MAX_IMAGES),
        queue,
        top,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    line_printer(as_json=as_json)(f"serving requests on {prefix}/{name}/request/CLIENT/ID at {host}:{port}")
    server.run()


@command(model_app, "list")
def list_versions(root: Root, signed_by: SignedBy = None) -> Result:
    """Verify the versions under DIR and list them, oldest first. Exit codes: 2 if one does not match its manifest or signature; 7 if there is none.

    Example: fedcg model list /var/lib/fedcg/casting/models
    """
    installed = ModelVersions(root, _accept(signed_by))
    versions = installed.versions()
    if not versions:
        raise ExportError(f"{root}: no model is installed there", exit_code=NOT_FOUND)
    rows, pointer = [_version_row(installed, version) for version in versions], installed.pointer()
    returned, because = (pointer and pointer.returned) or ("", "")
    text = f"\n{returned} was rolled back: {because}" if returned else ""
    text += f"\n{pointer.answers} answers until the comparison ends" if pointer and pointer.answers else ""
    columns = ("version", "in use", "federation", "round", "accuracy", "created", "remarks")
    cells = [[row["version"], "yes" if row["current"] else "", *_cells(row)] for row in rows]
    text = f"{table(columns, cells, '')}{text}\nNext: fedcg model use {root} VERSION, or fedcg model rollback {root}"
    faults = [str(row["state"]) for row in rows if row["state"] != "sound"]
    return rows, text, _some("versions are refused", faults, len(rows)) if faults else 0


def _version_row(installed: ModelVersions, version: Version) -> dict[str, object]:
    from export.model.manifest import signer_of

    row: dict[str, object] = {"version": version.name, "current": version.is_current}
    try:
        (manifest, signature), signer = installed.verify(version.name), signer_of(version.directory)
    except ExportError as error:
        return row | {"state": f"refused: {error}"}
    accuracy = manifest.verification.accuracy_onnx  # None if only the device's program can read the data
    return row | {
        "state": "sound",
        "federation": manifest.federation,
        "round": manifest.round,
        "accuracy": manifest.metrics.get("accuracy_personal.test") if accuracy is None else accuracy,
        "verification": manifest.verification.model_dump(mode="json"),
        "created": manifest.created.isoformat(),
        "serves": manifest.serves,
        "signed_by": signer,
        "signature": signature,
    }


def _cells(row: dict[str, object]) -> tuple[object, ...]:
    """The columns after version and use."""
    if "created" not in row:
        return "", "", "", "", row["state"]
    accuracy = row["accuracy"]
    share = f"{accuracy:.1%}" if isinstance(accuracy, float) else "unavailable"
    created = moment(datetime.fromisoformat(str(row["created"])).timestamp())
    return row["federation"], row["round"], share, created, row["signature"]


def _some(what: str, problems: Iterable[str], of: int) -> ExportError:
    each = list(problems)
    return ExportError("\n  ".join((f"{len(each)} of {of} {what}", *each)))


@command(model_app, "use")
def use_version(
    root: Root, version: Annotated[str, typer.Argument(help="Version to use, e.g. 0002.")], signed_by: SignedBy = None
) -> Result:
    """Verify a version and put it in use.

    Example: fedcg model use /var/lib/fedcg/casting/models 0002
    """
    return _in_use(ModelVersions(root, _accept(signed_by)).use(version))


def _in_use(model: Path) -> Result:
    return {"model": str(model)}, f"in use: {model}\nNext: fedcg infer --model {model} IMAGE"


@command(model_app, "rollback")
def roll_back(root: Root, signed_by: SignedBy = None) -> Result:
    """Return to the previous version.

    Example: fedcg model rollback /var/lib/fedcg/casting/models
    """
    return _in_use(ModelVersions(root, _accept(signed_by)).rollback())


@prints
def export_command(
    spec: Annotated[Path, typer.Option("--spec", help="The federation's spec from an agent's store.")],
    weights: Annotated[Path, typer.Option("--weights", help="safetensors file: tensors part/name or slot/part/name.")],
    out: Annotated[Path, typer.Option("--out", help="Root of the versions. The new version is put in use.")],
    sign: Annotated[
        Path | None, typer.Option("--sign", metavar="KEY", help="Sign with a device's message key, e.g. signing.key.")
    ] = None,
    slot: Annotated[str | None, typer.Option("--slot", help="Slot of an agent's state, e.g. best.")] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            "--images", help="Test images as CLASS/*.png or .jpg, or an .npz of tensors. Default: random inputs."
        ),
    ] = None,
    round_number: Annotated[int, typer.Option("--round", min=0, help="Round that the weights come from.")] = 0,
) -> Result:
    """Export a personal model as ONNX, verify it against the trained model, and put it in use.

    Example: fedcg export --spec spec.json --weights state.safetensors --out models
    """
    from export.build.install_model import package_personal, read_spec, read_weights
    from export.model.image_files import labelled_files
    from export.model.manifest import read_manifest

    read = read_spec(spec)
    files, labels = labelled_files(images, read.classes, read.input) if images else ([], [])
    directory = package_personal(
        read,
        read_weights(weights, slot),
        out,
        round_number=round_number,
        test_files=files,
        test_labels=labels,
        key=sign,
    )
    checked = read_manifest(directory).verification
    accuracy = f", accuracy {checked.accuracy_onnx:.1%}" if checked.accuracy_onnx is not None else ""
    return {"model": str(directory), "verification": checked.model_dump(mode="json")}, (
        f"{directory}: verified on {checked.images} inputs ({checked.source}), largest difference of a logit "
        f"{checked.max_abs_difference:.1e}, same class for {checked.top1_agreement:.1%}{accuracy}\nNext: fedcg infer --model {directory} IMAGE"
    )
