"""A whole federation of real processes for tests: broker, coordinator and agents, started by their commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedcg.files import checked_secret
from tests.support.commands import data_of, run_fedcg
from tests.support.edge.toml_edit import set_values
from tests.support.waiting import await_ends, free_port, wait_until

CLASSES = ("circle", "cross", "stripe")


def wait_for(condition: Callable[[], bool], what: str, deadline_s: float = 90.0) -> None:
    """Poll a condition until it holds; AssertionError with `what` after the deadline."""
    wait_until(condition, what, deadline_s)


def draw_image(label: int, generator: np.random.Generator) -> Image.Image:
    """A noisy 32x32 grey drawing of one of three shapes."""
    rows, columns = np.mgrid[0:32, 0:32]
    y, x = generator.integers(12, 20, size=2)
    distance = np.hypot(rows - y, columns - x)
    shapes = (np.abs(distance - 8) < 2, (np.abs(rows - y) < 2) | (np.abs(columns - x) < 2), (rows + x) % 8 < 3)
    pixels = 160.0 * shapes[label] + generator.normal(40, 25, size=(32, 32))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def write_images(root: Path, per_class: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for label, name in enumerate(CLASSES):
        folder = root / name
        folder.mkdir(parents=True)
        for index in range(per_class):
            draw_image(label, generator).save(folder / f"{index:03d}.png")


LYING = Path(__file__).with_name("lying_device")


@dataclass
class Stack:
    """Paths and processes of one federation under `root`."""

    root: Path
    devices: tuple[str, ...] = ("site-1", "site-2", "site-3")
    method: str = "fedcg"
    split: str = "lenet5_relu"
    params: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 2
    allow_report: tuple[str, ...] = ("examples", "accuracy", "loss", "health", "shadow")
    allow_upload: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of devices that differ from the default
    sealed: tuple[str, ...] = ()  # parts that the plan seals
    weights: str = ""  # digest of a frozen backbone's weights, for grey images normalised as in its training
    attack: str = ""  # attack of the coordinator, in `hostile_coordinator`
    liar: str = ""  # a device that seals false numbers (`lying_device`)
    min_clients: int | None = None  # all devices when None
    deadline_s: float | None = None  # of a round
    shadow_every: int = 1
    enrol: bool = False  # devices enrol by token once the coordinator runs (`enrol_device`), instead of by bundle
    plans: bool = True  # a federation is there from the start
    certificate_days: float | None = None
    storage: Mapping[str, str] = field(default_factory=dict)  # [storage] of the coordinator
    home_name: str = "coordinator"
    enrol_port: int = field(default_factory=free_port)
    broker_port: int = field(default_factory=free_port)
    api_port: int = field(default_factory=free_port)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.root / self.home_name

    def store(self, device: str) -> Path:
        return self.root / "devices" / device / "store"

    def config(self, device: str) -> Path:
        return self.root / "devices" / device / "agent.toml"

    def command(self, *arguments: str) -> str:
        """Run one `fedcg` command to its end, on a thread: the test's own thread has the browser driver's event loop."""
        with ThreadPoolExecutor(1) as threads:
            done = threads.submit(run_fedcg, *arguments).result()
        assert done.exit_code == 0, f"fedcg {' '.join(arguments)}: {done.output}"
        return done.stdout

    def prepare(self) -> None:
        """Create the coordinator's home, the federation, and each device's bundle, data and secrets."""
        self.root.mkdir(parents=True, exist_ok=True)
        ports = ["--broker-port", str(self.broker_port), "--api-port", str(self.api_port)]
        if self.enrol:
            ports += ["--enrol-port", str(self.enrol_port)]
        self.command("coordinator", "init", "--dir", str(self.home), "--observer", *ports)
        (self.home / "coordinator.secret").write_bytes(checked_secret(b"s" * 32))
        (self.home / "high-water.mark").unlink()  # the previous secret signed it
        storage = {("storage", name): value for name, value in self.storage.items()}
        set_values(self.home / "coordinator.toml", {("rounds", "retry_s"): 0.5, **storage})
        if self.certificate_days is not None:
            set_values(self.home / "coordinator.toml", {("enrolment", "certificate_days"): self.certificate_days})
        if self.plans:
            plan = self.root / "plan.toml"
            plan.write_text(self.plan())
            self.command("federation", "create", "--dir", str(self.home), str(plan))
        if not self.enrol:
            self.command("device", "add", *self.devices, "--dir", str(self.home), "--out", str(self.root / "devices"))
        for number, device in enumerate(self.devices):
            data = self.root / "data" / device
            write_images(data / "train", per_class=16, seed=100 + number)
            write_images(data / "test", per_class=6, seed=200 + number)
            if not self.enrol:
                self.adapt_config(device, data)
            secrets = self.store(device) / "secrets"
            secrets.mkdir(parents=True, mode=0o700)
            self.store(device).chmod(0o700)
            for name, content in (("cohort.key", b"c" * 32), ("device.key", bytes([number]) * 32)):
                (secrets / name).write_bytes(checked_secret(content))
                (secrets / name).chmod(0o600)

    def share_cards(self, but: str = "") -> None:
        """Give every device the cohort's roster, the keys for sealed sums, except `but`."""
        cards = [self.command("cohort", "card", "--config", str(self.config(device))) for device in self.devices]
        roster = self.root / "roster.txt"
        roster.write_text("".join(cards))
        for device in self.devices:
            if device != but:
                self.command("cohort", "roster", str(roster), "--config", str(self.config(device)))

    def enrol_device(self, device: str, *wishes: str, folder: Path | None = None) -> Path:
        """Create a token and enrol a device with it, like an operator and an owner; return the device's folder."""
        made = self.command("token", "create", "--dir", str(self.home), "--json", *(wishes or ("--device", device)))
        return self.enrol_with(data_of(made)["token"], device, folder)

    def enrol_with(self, token: str, device: str, folder: Path | None = None) -> Path:
        """Enrol a device with a token; return its folder."""
        out, data = folder or self.config(device).parent, self.root / "data" / device
        self.command("enrol", "--token", token, "--out", str(out), "--data", str(data))
        self.adapt_config(device, data, out / "agent.toml")
        return out

    def plan(self) -> str:
        side, mean, std = (64, 0.449, 0.226) if self.weights else (32, 0.5, 0.5)
        frozen = f'weights = "{self.weights}"\nfreeze = "all"\n' if self.weights else ""
        params = "\n".join(f"{name} = {json.dumps(value)}" for name, value in self.params.items())
        return (
            f'federation = "shapes"\nclasses = {json.dumps(list(CLASSES))}\nmethod = "{self.method}"\nrounds = {self.rounds}\n'
            f"seed = 7\nmin_clients = {self.min_clients or len(self.devices)}\nmin_cohort = 1\n"
            f"{f'deadline_s = {self.deadline_s}' if self.deadline_s else ''}\nsealed = {json.dumps(list(self.sealed))}\n"
            f'[input]\nmode = "L"\nheight = {side}\nwidth = {side}\nmean = [{mean}]\nstd = [{std}]\n'
            f'[network]\nsplit = "{self.split}"\ngenerator = "mlp"\ndiscriminator = "mlp"\nnoise_dim = 16\n{frozen}'
            f"[params]\n{params}\n"
        )

    def adapt_config(self, device: str, data: Path, config: Path | None = None) -> None:
        """Set the test's data in the generated agent.toml."""
        path = config or self.config(device)
        set_values(
            path,
            {
                ("data", "root"): str(data),
                ("policy", "allow_report"): list(self.allow_report),
                ("training", "shadow_every"): self.shadow_every,
                ("export", "enabled"): False,
                **(
                    {("policy", "allow_upload"): list(self.allow_upload[device])} if device in self.allow_upload else {}
                ),
            },
        )

    def start(self, name: str, *arguments: str, program: tuple[str, ...] = ("fedcg",)) -> subprocess.Popen[bytes]:
        """Start a process of the federation; its output goes to `<root>/<name>.log`."""
        log = (self.root / f"{name}.log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", *program, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": str(LYING)} if name == self.liar else {})},
            start_new_session=True,
        )
        log.close()
        self.running[name] = process
        return process

    def start_broker(self) -> None:
        self.start("broker", "broker", "run", "--dir", str(self.home))
        wait_for(lambda: b"ready" in (self.root / "broker.log").read_bytes(), "the broker is ready", 30)

    def start_coordinator(self) -> None:
        program = ("tests.support.hostile_coordinator", self.attack) if self.attack else ("fedcg",)
        self.start("coordinator", "coordinator", "run", "--dir", str(self.home), program=program)

    def start_agent(self, device: str) -> None:
        self.start(device, "agent", "run", "--config", str(self.config(device)), "--until-finished")

    def start_all(self) -> None:
        self.start_broker()
        self.start_coordinator()
        for device in self.devices:
            self.start_agent(device)

    def start_observer(self, *options: str) -> None:
        """Start an observer of the federation, which writes to `<root>/wire`; it is subscribed when this returns."""
        where = ["--out", str(self.root / "wire"), "--port", str(self.broker_port), "--tls", str(self.home / "pki")]
        self.start("observer", "audit", "observe", "--federation", "shapes", *where, *options)
        wait_for(lambda: b"ready" in (self.root / "observer.log").read_bytes(), "the observer listens", 30)

    @contextmanager
    def up(self, *, agents: bool = False, observer: Sequence[str] | None = None) -> Iterator[Stack]:
        """Run broker and connected coordinator, and optionally an observer and all agents, while the context lasts."""
        if not self.home.exists():
            self.prepare()
        try:
            self.start_broker()
            if observer is not None:
                self.start_observer(*observer)
            self.start_coordinator()
            if self.plans:
                self.wait_event("coordinator", lambda event: event["event"] == "link" and event["up"], "it has a link")
            wait_for(lambda: b"http" in (self.root / "coordinator.log").read_bytes(), "it serves the page")
            for device in self.devices if agents else ():
                self.start_agent(device)
            yield self
        finally:
            self.stop()

    def doctor(self, device: str) -> dict[str, dict[str, Any]]:
        """Return the findings of `fedcg doctor` on a device, by check; its exit code is 0 if nothing failed."""
        command = [sys.executable, "-m", "fedcg", "doctor", "--config", str(self.config(device)), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        findings = {one["check"]: one for one in data_of(done.stdout)["findings"]}
        assert done.returncode == any(one["state"] == "failed" for one in findings.values()), findings
        assert done.stderr == ""
        return findings

    def events(self, of: str) -> list[dict[str, Any]]:
        """Return the event log of a device or of "coordinator", without an incomplete last line."""
        path = (self.home if of == "coordinator" else self.store(of)) / "events.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line.endswith("}")]

    def wait_event(
        self, of: str, matches: Callable[[dict[str, Any]], bool], what: str, deadline_s: float = 90.0
    ) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def seen() -> bool:
            self.assert_alive()
            found[:] = [event for event in self.events(of) if matches(event)]
            return bool(found)

        wait_for(seen, f"{of}: {what}\n{self.tail(of)}", deadline_s)
        return found[0]

    def tail(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text()[-3000:] if path.exists() else "(no log)"

    def assert_alive(self) -> None:
        for name in ("broker", "coordinator"):
            process = self.running.get(name)
            assert process is None or process.poll() is None, f"{name} ended: {self.tail(name)}"

    def kill(self, name: str) -> None:
        """SIGKILL one process that this stack started."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)

    def wait_finished(self, deadline_s: float = 150.0) -> None:
        """Check that all agents end with exit code 0 (they run with --until-finished)."""
        await_ends({device: self.running[device] for device in self.devices}, self.tail, deadline_s)

    def final_aggregate(self) -> str:
        """Return the sha256 of the final aggregate, from the coordinator's event log."""
        return str(
            next(event for event in reversed(self.events("coordinator")) if event["event"] == "finished")["aggregate"]
        )

    def stop(self) -> None:
        for name in reversed(list(self.running)):
            process = self.running[name]
            if process.poll() is None:
                process.terminate()
        for process in self.running.values():
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
