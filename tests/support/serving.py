"""A real prediction server for tests, started by its command, and requests to it."""

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from export.build.install_model import package_personal
from export.model.runtime import Model, load_all
from fedcg.wire.parts import Part
from tests.support.learning.export_models import TestImages, encoded, install_model, make_parts, make_spec, picture
from tests.support.stack import wait_for

PNG = {"Content-Type": "image/png"}
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.text)
        return document

    @property
    def code(self) -> str:
        """The error's code."""
        return str(self.document["error"]["code"])


class Server:
    """A server process and its address."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)\n", line)
        assert found, line or process.communicate()[1]
        self.port = int(found[1])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, method: str = ""
    ) -> Answer:
        connection = self.connect()
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, dict(response.headers), response.read().decode())
        finally:
            connection.close()

    def metric(self, sample: str) -> float:
        """Return the value of one sample of /metrics, by its name and labels; 0 if it is missing."""
        lines = self.ask("/metrics").text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == sample), 0.0)

    def wait_for_metric(self, sample: str, value: float) -> None:
        wait_for(lambda: self.metric(sample) == value, f"{sample} {value:g}", deadline_s=30)

    def wait_for_version(self, version: str) -> None:
        wait_for(lambda: self.ask("/readyz").document.get("version") == version, f"version {version}", deadline_s=30)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Stop it; return its exit code and stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@contextmanager
def serving(
    model: Path, *options: str | int, command: Sequence[str] = (sys.executable, "-m", "fedcg")
) -> Iterator[Server]:
    """Run a server on a free port; it is killed at the end if still running."""
    words = [*command, "infer", "serve", "--model", str(model), "--port", "0", *map(str, options)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()


def install_versions(root: Path, count: int, images: TestImages | None = None) -> None:
    """Install versions 0001, 0002, … of rounds 1, 2, … with different answers; the last is in use."""
    for number in range(1, count + 1):
        install_model(root, seed=number, images=images)


def install_one_that_names_one_class(root: Path) -> None:
    """Install a version with the weights of `install_versions(root, 1)`, except that it always predicts their least frequent class."""
    torch.set_num_threads(1)
    spec = make_spec()
    parts = {part: dict(weights) for part, weights in make_parts(spec).items()}
    name = next(name for name, tensor in parts[Part.CLASSIFIER].items() if tensor.shape == (spec.class_count,))
    model = Model.load(root, threads=1)
    pictures = load_all([encoded(picture(seed), "PNG") for seed in range(24)], model.manifest.input)
    least = int(np.bincount(model.predict(pictures).argmax(axis=1), minlength=spec.class_count).argmin())
    parts[Part.CLASSIFIER][name] = torch.tensor([1e4 if label == least else 0.0 for label in range(spec.class_count)])
    package_personal(spec, parts, root, round_number=2)
