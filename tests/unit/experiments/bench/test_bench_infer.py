"""`fedcg bench infer`: what its figures are made of, and that it runs. No timing is asserted."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from experiments.bench.inference_latency import Load, ask
from tests.support.commands import data_of

FEDCG = [sys.executable, "-m", "fedcg", "bench", "infer"]


def test_a_percentile_is_the_latency_that_a_share_of_the_requests_stayed_within() -> None:
    load = Load([number / 1000 for number in range(100, 0, -1)])  # 1 to 100 ms
    assert [load.percentile_ms(share) for share in (0.0, 0.5, 0.99, 1.0)] == pytest.approx([1, 51, 100, 100])
    assert Load([0.007]).percentile_ms(0.99) == pytest.approx(7)


@contextmanager
def _answering(*connections: list[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """A server that gives these answers on one connection after the other; its port, and the requests that came."""
    requests: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        for answers in connections:
            connection, _ = listener.accept()
            with connection:
                for answer in answers:
                    requests.append(connection.recv(1000))
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve, args=(listener,))
        serving.start()
        yield listener.getsockname()[1], requests
        serving.join()


def test_callers_count_what_was_answered_with_200_and_what_was_not() -> None:
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    bad = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nfull"
    with _answering([good, bad, good, good[:20]], [good]) as (port, requests):  # the fourth breaks off
        load = ask(port, b"image", 1, lambda done: done < 5)
    assert (len(load.seconds), load.failed) == (3, 2)
    assert len(requests) == 5
    assert requests[0].startswith(b"POST /predict HTTP/1.1\r\n")
    assert requests[0].endswith(b"Content-Length: 5\r\n\r\nimage")


@pytest.mark.slow
def test_the_quick_measurement_gives_every_figure_and_loses_no_request() -> None:
    run = subprocess.run([*FEDCG, "--quick", "--json"], capture_output=True, check=True, timeout=200)
    record = data_of(run.stdout)
    assert (record["kind"], record["format"], set(record["setting"])) == (
        "bench infer",
        1,
        {"images", "repeats", "callers", "requests", "swaps", "side"},
    )
    found = record["lenet5"]
    for name in ("speedup_vs_eager", "eager_ms", "onnxruntime_ms", "ready_s", "rss_mb", "fp16_vs_fp32", "int8_vs_fp32"):
        assert found[name] > 0
    for name in ("batches", "single"):
        assert found[name]["failed"] == 0
        assert found[name]["p99_ms"] >= found[name]["p50_ms"] > 0
    for name in ("one_caller", "beside_normal", "beside_low", "beside_idle"):
        assert found[name]["failed"] == 0
        assert found[name]["p99_ms"] / found["one_caller"]["p99_ms"] == pytest.approx(
            found[name]["p99_vs_alone"], rel=0.1, abs=0.01
        )
    assert found["swaps"]["swaps"] == 1
    assert found["swaps"]["requests"] > 0
    assert found["swaps"]["failed"] == 0
    shown = subprocess.run([*FEDCG, "--quick"], capture_output=True, check=True, timeout=200, text=True).stdout
    assert "lenet5.speedup_vs_eager" in shown
    assert "(at least 3)" in shown


@pytest.mark.slow
def test_a_network_that_there_is_not_is_an_error() -> None:
    run = subprocess.run([*FEDCG, "--network", "lenet7"], capture_output=True, check=False, timeout=100, text=True)
    assert run.returncode == 2
    assert "lenet7" in run.stderr
    assert "Traceback" not in run.stderr
