"""`fedcg infer serve` as applications, operators and hostile callers see it: a process of its own, asked over HTTP."""

import asyncio
import http.client
import json
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import cycle
from pathlib import Path

import pytest
from PIL import Image

from export.model.runtime import Model, load_inputs
from export.model.versions import ModelVersions
from fedcg.listening import Caps, Connections, Listener
from tests.support.commands import data_of, fails, succeeds
from tests.support.learning.export_models import LOADED_PROBE, encoded, install_model, picture
from tests.support.serving import JSON, PNG, Server, install_one_that_names_one_class, install_versions, serving
from tests.support.stack import wait_for

MAX_BYTES = 300_000
ONE = encoded(picture(1), "PNG")
TWO = encoded(picture(2), "PNG")
OK = 'fedcg_serve_requests_total{outcome="ok"}'
QUEUE = "fedcg_serve_queue_images"
# A sound image that takes long to decode and short to send: 36 million pixels, under the default limit.
SLOW = encoded(Image.new("L", (6000, 6000)), "PNG")


@pytest.fixture(scope="module")
def server(installed: Path) -> Iterator[Server]:
    with serving(installed, "--max-bytes", MAX_BYTES, "--max-pixels", 1_000_000, "--max-batch", 8) as running:
        yield running


def _told(server: Server, body: bytes, headers: dict[str, str], query: str = "") -> list[dict[str, object]]:
    answer = server.ask(f"/predict{query}", body, headers)
    assert answer.status == 200, answer.text
    document = answer.document
    assert [document[name] for name in ("federation", "round", "version")] == ["garden", 2, "0002"]
    results: list[dict[str, object]] = document["results"]
    return results


def test_every_form_of_a_request_is_answered_as_infer_does(server: Server, installed: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(2)]
    for file, content in zip(files, (ONE, TWO), strict=True):
        file.write_bytes(content)
    done = succeeds("infer", "--model", installed, "--json", "--top", 2, *files)
    wanted = [{**result, "file": ""} for result in data_of(done)["results"]]
    [raw] = _told(server, ONE, PNG, "?top=2")
    assert raw == {**wanted[0], "file": "image"}
    form = Model.load(installed).manifest.input
    arrays = [load_inputs(content, form)[0].tolist() for content in (ONE, TWO)]
    batch = _told(server, json.dumps({"images": arrays}).encode(), JSON, "?top=2")
    assert batch == [{**wanted[0], "file": "images[0]"}, {**wanted[1], "file": "images[1]"}]
    [single] = _told(server, json.dumps({"images": arrays[1]}).encode(), JSON, "?top=2")
    assert single == batch[1] | {"file": "images[0]"}


def test_it_is_ready_and_says_which_model_it_serves(server: Server, installed: Path) -> None:
    assert server.ask("/healthz").document == {"status": "ok"}
    identity = {"federation": "garden", "round": 2, "version": "0002"}
    assert server.ask("/readyz").document == {"status": "ok", **identity}
    told = server.ask("/model").document
    assert told == told | identity | {"providers": ["CPUExecutionProvider"], "refused": None}
    assert told["manifest"] == json.loads((installed / "0002" / "manifest.json").read_text())
    assert told["since"]


@pytest.mark.parametrize(
    ("body", "headers", "status", "code", "field"),
    [
        (bytes(MAX_BYTES + 1), PNG, 413, "body_too_large", None),
        (b"\x93NUMPY", {"Content-Type": "application/x-npy"}, 415, "unknown_type", "Content-Type"),
        (b"a=b", {"Content-Type": "text/plain"}, 415, "unknown_type", "Content-Type"),
        (b"{", JSON, 422, "bad_json", "body"),
        (b"--x--", {"Content-Type": "multipart/form-data; boundary=x"}, 415, "unknown_type", "Content-Type"),
        (b"text", PNG, 422, "bad_image", "image"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_request_is_told_what_is_wrong(
    server: Server, body: bytes, headers: dict[str, str], status: int, code: str, field: str | None
) -> None:
    outcome = f'fedcg_serve_requests_total{{outcome="{code}"}}'
    before = server.metric(outcome)
    answer = server.ask("/predict", body, headers)
    assert (answer.status, answer.code, answer.document["error"]["field"]) == (status, code, field), answer.text
    assert len(answer.document["error"]["message"]) > 20
    assert server.metric(outcome) == before + 1
    assert server.ask("/predict", ONE, PNG).status == 200


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [
        ("/predict?top=0", "POST", 422, "bad_request"),
        ("/predict?top=many", "POST", 422, "bad_request"),
        ("/predict", "GET", 405, "wrong_method"),
        ("/nowhere", "GET", 404, "not_found"),
    ],
)
def test_a_wrong_address_is_told_so_as_json(server: Server, path: str, method: str, status: int, code: str) -> None:
    answer = server.ask(path, ONE if method == "POST" else None, PNG, method)
    assert (answer.status, answer.code) == (status, code)


def test_a_body_without_a_length_is_refused_while_it_is_read(server: Server) -> None:
    """It never ends: an answer can only come before all of it was taken."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        piece = bytes(50_000)
        for _ in range(MAX_BYTES // len(piece) + 1):
            connection.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (413, "body_too_large")


def test_metrics_count_what_happened(server: Server, installed: Path) -> None:
    def figures() -> list[float]:
        seconds = ("fedcg_serve_request_seconds_count", 'fedcg_serve_request_seconds_bucket{le="+Inf"}')
        return [server.metric(name) for name in (OK, *seconds, "fedcg_serve_batch_images_sum")]

    [likeliest] = _told(server, ONE, PNG)
    predicted = f'fedcg_serve_predictions_total{{class="{likeliest["class"]}"}}'
    before, classes = figures(), server.metric(predicted)
    [pixels] = load_inputs(ONE, Model.load(installed).manifest.input)
    _told(server, json.dumps({"images": [pixels.tolist()] * 2}).encode(), JSON)
    assert [after - value for after, value in zip(figures(), before, strict=True)] == [1, 1, 1, 2]
    assert server.metric(predicted) == classes + 2
    sha256 = Model.load(installed).manifest.model.sha256
    info = f'fedcg_serve_model_info{{federation="garden",round="2",sha256="{sha256}",version="0002"}}'
    assert [server.metric(one) for one in (info, "fedcg_serve_ready", QUEUE)] == [1, 1, 0]
    assert server.ask("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_it_waits_for_a_model_and_at_its_end_has_loaded_neither_torch_nor_paho_nor_the_wire(
    installed: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    with serving(models, command=(sys.executable, "-c", LOADED_PROBE)) as running:
        ready, asked = running.ask("/readyz"), running.ask("/predict", ONE, PNG)
        for answer in (ready, asked, running.ask("/model")):
            assert (answer.status, answer.code) == (503, "no_model")
            assert f"{models}: no such folder" in answer.document["error"]["message"]
        assert asked.headers["retry-after"]
        assert (running.ask("/healthz").status, running.metric("fedcg_serve_ready")) == (200, 0)
        shutil.copytree(installed, models)
        running.wait_for_version("0002")
        assert running.ask("/predict", ONE, PNG).status == 200
        code, errors = running.stop()
    assert (code, errors.splitlines()[-1]) == (0, "LOADED []")


@contextmanager
def _slow_request(server: Server) -> Iterator[http.client.HTTPConnection]:
    """One whose image is being decoded when the context begins."""
    with closing(server.connect()) as connection:
        connection.request("POST", "/predict", SLOW, PNG)
        server.wait_for_metric(QUEUE, 1)
        yield connection


def _answered(connection: http.client.HTTPConnection) -> int:
    """How many images it was answered for."""
    with closing(connection.getresponse()) as response:
        assert response.status == 200
        return len(json.loads(response.read())["results"])


def test_a_full_queue_and_a_caller_who_left_and_a_drain(installed: Path) -> None:
    with serving(installed, "--queue", 1) as running:
        with _slow_request(running) as first:
            refused = running.ask("/predict", ONE, PNG)
            assert (refused.status, refused.code, refused.headers["retry-after"]) == (429, "queue_full", "1")
            assert _answered(first) == 1
        batches = running.metric("fedcg_serve_batch_images_count")

        with _slow_request(running):
            pass
        running.wait_for_metric('fedcg_serve_requests_total{outcome="cancelled"}', 1)
        assert running.metric(QUEUE) == 0
        assert running.ask("/predict", ONE, PNG).status == 200
        assert running.metric("fedcg_serve_batch_images_count") == batches + 1  # the left one was not predicted

        with _slow_request(running) as last:
            running.process.send_signal(signal.SIGTERM)
            assert running.ask("/readyz").code == running.ask("/predict", ONE, PNG).code == "draining"
            assert _answered(last) == 1
        assert running.process.wait(timeout=30) == 0


def test_answers_do_not_wait_for_a_callers_acknowledgement() -> None:
    """TCP_NODELAY, without which every answer on a kept connection takes 40 ms."""

    async def run() -> int:
        accepted = asyncio.get_running_loop().create_future()
        with Listener("a test", "127.0.0.1", 0, Connections(Caps(8, 8))) as listener:
            server = await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=listener)
            _, caller = await asyncio.open_connection(*listener.getsockname())
            writer: asyncio.StreamWriter = await accepted
            no_delay: int = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for one in (caller, writer, server):
                one.close()
            await server.wait_closed()
        return no_delay

    assert asyncio.run(run()) != 0


@pytest.mark.slow
def test_an_interrupt_ends_it_with_exit_code_0_too(installed: Path) -> None:
    with serving(installed) as running:
        code, errors = running.stop(signal.SIGINT)
    assert code == 0
    assert "Traceback" not in errors


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(server: Server, installed: Path) -> None:
    done = fails(2, "infer", "serve", "--model", str(installed), "--port", str(server.port))
    assert f"cannot listen on 127.0.0.1 port {server.port}" in done
    assert "--port" in done


def test_a_page_that_leads_a_browser_here_under_its_own_name_gets_nothing(server: Server, installed: Path) -> None:
    refused = server.ask("/model", headers={"Host": "evil.example"})
    assert (refused.status, refused.code) == (400, "wrong_host")
    assert "--allow-host" in refused.document["error"]["message"]
    assert server.ask("/model", headers={"Host": f"localhost:{server.port}"}).status == 200
    with serving(installed, "--allow-host", "line-4.example") as named:
        assert named.ask("/model", headers={"Host": "line-4.example:80"}).status == 200


NEXT = cycle([encoded(picture(seed), "PNG") for seed in range(24)])
ALL = ("--shadow-share", 1)


def _ask_until(server: Server, version: str, deadline_s: float = 60) -> list[str]:
    """Ask until an answer is of this version; the versions of all answers, none of which fails."""
    seen: list[str] = []

    def is_answered() -> bool:
        answer = server.ask("/predict", next(NEXT), PNG)
        assert answer.status == 200, answer.text
        seen.append(answer.document["version"])
        return seen[-1] == version

    wait_for(is_answered, f"an answer of version {version}", deadline_s)
    return seen


def _candidate(server: Server) -> str | None:
    candidate = server.ask("/model").document["candidate"]
    return candidate and str(candidate["version"])


def _wait_for_candidate(server: Server, version: str) -> None:
    wait_for(lambda: _candidate(server) == version, f"version {version} is the candidate", 30)


def test_a_good_version_serves_after_it_was_compared_and_the_stage_is_shown(tmp_path: Path) -> None:
    install_versions(tmp_path, 1)
    with serving(tmp_path, "--shadow", 30, *ALL) as server:
        assert _ask_until(server, "0001") == ["0001"]
        assert _candidate(server) is None
        install_model(tmp_path, seed=1, round_number=2)  # of the same weights
        _wait_for_candidate(server, "0002")
        stage = server.ask("/model").document["candidate"]
        assert (stage["round"], stage["images"], stage["of_images"], stage["failures"]) == (2, 0, 30, 0)
        assert server.ask("/readyz").document["version"] == "0001"
        assert 'fedcg_serve_candidate_images{version="0002"} 0.0' in server.ask("/metrics").text
        *before, after = _ask_until(server, "0002")
        assert after == "0002"
        assert set(before) == {"0001"}
        assert len(before) >= 30
        assert _candidate(server) is None
        assert "fedcg_serve_candidate_images{" not in server.ask("/metrics").text
        code, errors = server.stop()
    assert code == 0
    told = r"version 0002 takes all requests: (\d+) images compared, 100% of them got the same class, 0 requests failed"
    found = re.search(told, errors)
    assert found is not None, errors
    assert int(found[1]) >= 30


def test_the_server_returns_to_the_version_before_one_that_drifts(tmp_path: Path) -> None:
    install_versions(tmp_path, 1)
    with serving(tmp_path, "--watch", "20", "--shadow", 0) as server:

        def ask(version: str) -> None:
            for _ in range(24):
                assert server.ask("/predict", next(NEXT), PNG).status == 200
            server.wait_for_version(version)

        ask("0001")
        install_one_that_names_one_class(tmp_path)
        server.wait_for_version("0002")
        ask("0001")
        assert ModelVersions(tmp_path).current().name == "0001"
        assert "version 0002: its predicted classes" in server.ask("/model").document["taken_back"]
        assert server.metric('fedcg_serve_rollbacks_total{reason="drift"}') == 1
        ask("0001")
        code, errors = server.stop()
    assert code == 0
    assert "version 0002 rolled back to 0001: " in errors
