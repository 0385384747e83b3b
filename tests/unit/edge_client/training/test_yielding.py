"""Training makes room for predictions: their load, the share of the time, and the priority of the process."""

import http.server
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import pytest

from devices.eligibility import EligibilitySettings, Obstacle
from devices.telemetry import Telemetry
from edge_client.agent.hardware import HardwareWatch
from edge_client.training.box_limits import InferenceLoad, Pauses
from edge_client.training.trainer_handle import trainer_process
from export.serving.app import Metrics
from fedcg.event_log import EventLog, read_events
from fedcg.log_output import LogSettings
from tests.support.edge.world import make_config
from tests.support.waiting import wait_until

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


@contextmanager
def server(metrics: Metrics) -> Iterator[str]:
    """The metrics of an inference server on a free port."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (
                metrics.text(queue=0, is_ready=True, identity=None, candidate=None) if self.path == "/metrics" else b""
            )
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_requests_a_second_are_counted_between_two_looks_whatever_their_outcome() -> None:
    metrics, clock = Metrics(), Clock()
    with server(metrics) as url:
        load = InferenceLoad(url, clock=clock)
        assert load() is None
        metrics.requests.labels("ok").inc(30)
        metrics.requests.labels("queue_full").inc(10)
        clock.now += 0.5
        assert load() is None  # too soon
        clock.now += 3.5
        assert load() == 10.0
    clock.now += 5.0
    assert load() is None  # it is gone: nothing is known
    assert InferenceLoad(None)() is None


def test_a_server_that_was_started_again_counts_from_nothing() -> None:
    pages, clock = (
        ['fedcg_serve_requests_total{outcome="ok"} 500.0\n', 'fedcg_serve_requests_total{outcome="ok"} 2.0\n'],
        Clock(),
    )
    load = InferenceLoad("http://127.0.0.1:1", lambda _: pages.pop(0), clock)
    load()
    clock.now += 2.0
    assert load() is None


def test_a_round_pauses_while_predictions_are_asked_for_and_goes_on_at_half_the_limit(tmp_path: Path) -> None:
    metrics, clock = Metrics(), Clock()
    with server(metrics) as url:
        settings = EligibilitySettings(inference_url=url, max_requests_per_s=4.0)
        rates = [0.0, 40.0, 24.0, 8.0]  # of the looks to come; 3 and then 2 a second are above half of 4, and at it

        def sleep(seconds: float) -> None:
            clock.sleep(2.0)
            metrics.requests.labels("ok").inc(rates.pop(0) / 4 if rates else 0.0)

        events = EventLog(tmp_path / "events.jsonl", clock)
        pauses = Pauses(settings, Telemetry, lambda: None, events, clock, lambda: NOON, sleep)
        pauses()
        metrics.requests.labels("ok").inc(10)
        clock.now += 2.0
        pauses()  # 5 a second
    lines = [dict(event) for event in read_events(tmp_path / "events.jsonl")]
    assert [(line["event"], line.get("reason")) for line in lines] == [("paused", "serving"), ("resumed", None)]
    assert "5.0 requests/s, at most 4" in str(lines[0]["detail"])


def test_a_busy_inference_server_keeps_a_device_from_a_round_with_the_reason(tmp_path: Path) -> None:
    metrics = Metrics()
    with server(metrics) as url:
        config = make_config(tmp_path)
        settings = EligibilitySettings(inference_url=url, max_requests_per_s=0.5)
        watch = HardwareWatch(config.model_copy(update={"eligibility": settings}), Telemetry, lambda: NOON)
        assert watch.reason() is None

        def reason() -> Obstacle | None:
            metrics.requests.labels("ok").inc(100)
            found = watch.reason()
            return None if found is None else found.obstacle

        wait_until(lambda: reason() is Obstacle.SERVING, "the requests are noticed")


@pytest.mark.parametrize(("duty", "slept"), [(1.0, []), (0.5, [0.4]), (0.25, [1.2])])
def test_a_duty_cycle_sleeps_after_each_step_for_the_rest_of_the_time(
    tmp_path: Path, duty: float, slept: list[float]
) -> None:
    clock = Clock()
    events = EventLog(tmp_path / "events.jsonl", clock)
    pauses = Pauses(
        EligibilitySettings(), Telemetry, lambda: None, events, clock, lambda: NOON, clock.sleep, duty_cycle=duty
    )
    pauses()
    clock.now += 0.4  # the step
    pauses()
    assert clock.slept == pytest.approx(slept)


@pytest.mark.parametrize(
    ("priority", "nice", "policy"),
    [("normal", 0, os.SCHED_OTHER), ("low", 10, os.SCHED_OTHER), ("idle", 0, os.SCHED_IDLE)],
)
def test_the_training_process_goes_after_other_programs_as_its_owner_says(
    tmp_path: Path, priority: str, nice: int, policy: int
) -> None:
    before = os.nice(0)
    config = make_config(tmp_path)
    training = config.training.model_copy(update={"priority": priority})
    handle = trainer_process(config.model_copy(update={"training": training}), LogSettings(), lambda _: None)
    try:
        pid = handle.start()
        wait_until(
            lambda: (os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)) == (max(before, nice), policy),
            f"the priority {priority} of the training process",
        )
    finally:
        handle.stop()
