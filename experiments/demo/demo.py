"""The demo: a whole federation on this machine, with each participant as a separate process, started by its command.

Owns the order of the steps. Steps before the participants start (home,
federation, bundles) call the commands' functions in this process, since each command would import the same packages
again. Imports no torch.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from coordinator.broker.access_lists import refresh_access
from coordinator.broker.broker_folder import write_folder
from coordinator.cli.opening import create_home
from coordinator.config import AggregationSettings, ApiSettings, BrokerSettings, CoordinatorConfig
from coordinator.members.enrolment import make_bundles
from coordinator.operations.create_federation import Complete
from coordinator.operations.operations import open_federation
from coordinator.paths import Home
from coordinator.storage.locks import changing_members
from coordinator.storage.store import Store
from edge_client.config import load_config
from edge_client.store.private_store import open_store
from edge_client.store.roster import card_of, roster_of
from experiments.data.deal import client_names
from experiments.data.source import Source
from experiments.demo.event_follower import AgentHistory, CoordinatorHistory, Follower
from experiments.demo.processes import ONE_THREAD, POLL_S, PRELOADED, Child, Children, children
from experiments.demo.report import Progress, process_began, summarise
from experiments.demo.run_folder import LOOPBACK, Run, prepare, write_secrets
from experiments.errors import ProcessError
from experiments.record import versions
from experiments.settings import FEDERATION, root_secret
from fedcg.config_file import set_values
from fedcg.files import READABLE, replace_durably
from fedcg.learning.spec import FederationSpec, plan_from_mapping
from fedcg.wire.parts import DEFAULT_ALLOW_REPORT, DEFAULT_ALLOW_UPLOAD, Part, ReportField

READY_S = 30.0
SETTLE_S = 5.0  # for the observer to write the last traffic


class Demo:
    """One run, up to the summary.

    Args:
        run: the run's folder.
        console: for output to the user.
        complete: the process that completes the plan.
    """

    def __init__(self, run: Run, console: Console, complete: Complete) -> None:
        self._run = run
        self._complete_plan = complete
        self._progress = Progress(console, run.setting.rounds)
        self._clients = client_names(run.setting.clients)
        self._backbones: tuple[str, ...] = ()
        self._agents = {client: AgentHistory(client) for client in self._clients}
        self._followers = {client: Follower(run.bundle(client) / "store" / "events.jsonl") for client in self._clients}
        self._coordinator = CoordinatorHistory()
        self._coordinator_log = Follower(run.home / "events.jsonl")
        self._broker_named = "mosquitto"

    async def run(self) -> dict[str, Any]:
        """Run the federation to its end and write `summary.json`.

        Raises:
            PlanError: the method or the networks refuse the plan; no files remain.
            ProcessError: a step failed, a process exited early, or the federation stalled.
            SourceError: the data can't be used.
        """
        os.environ.update(ONE_THREAD)  # before the fork server loads numpy, which would start threads
        async with children(self._run.root / "logs", PRELOADED) as processes:
            watching = asyncio.create_task(self._watch())
            try:
                agents = await self._start_all(processes)
                await self._until_finished(agents)
                await self._until_observed()
            finally:
                watching.cancel()
            self._look()
        return await asyncio.to_thread(self._report)

    # Start

    async def _start_all(self, processes: Children) -> list[Child]:
        """Prepare and start everything, in parallel where possible; return the agents."""
        run = self._run
        source = await asyncio.to_thread(run.setting.source)
        data = asyncio.create_task(asyncio.to_thread(prepare, source, run.data, run.setting.deal()))
        await asyncio.to_thread(self._initialise)
        home = Home(run.home)
        with changing_members(home):  # a coordinator loads its packages, then waits for this lock before it serves
            broker = await self._start_broker(processes, home)
            coordinator = processes.fork("coordinator", "coordinator", "run", "--dir", run.home)
            observer = self._start_observer(processes)
            if run.setting.public_images:
                await data  # opening a federation requires readable public images
            await asyncio.to_thread(self._provision, home, source)
        lines = await processes.line(broker, "ready", READY_S)
        self._broker_named = lines[0].removeprefix("broker:").strip()
        self._progress.print_once(f"broker: {self._broker_named}")
        self._images = await data
        self._allowed = self._policy()
        await processes.line(
            observer, "ready", READY_S
        )  # before the agents, so that it records everything that a device sends
        for client in self._clients:
            write_secrets(run.bundle(client) / "store" / "secrets", run.setting.seed, client)
        if self._is_sealed:
            self._give_rosters()
        agents = [self._start_agent(processes, client) for client in self._clients]
        self._kept_up = (broker, observer, coordinator)
        return agents

    def _initialise(self) -> None:
        run = self._run
        config = CoordinatorConfig(
            broker=BrokerSettings(host=LOOPBACK, port=run.broker_port),
            api=ApiSettings(port=run.api_port),
            aggregation=AggregationSettings(
                public_data=str(run.data / "public") if run.setting.public_images else None
            ),
        )
        secret = root_secret(run.setting.seed, "coordinator")
        home = create_home(run.home, config, observers=("observer",), secret=secret)
        with contextlib.closing(Store.of(home)) as store:
            make_bundles(home, store, self._clients, run.root / "devices", time.time(), FEDERATION)

    async def _start_broker(self, processes: Children, home: Home) -> Child:
        """Start the broker from the folder of `fedcg deploy mosquitto`, with the lists for an open federation."""
        lists = refresh_access(home).model_copy(update={"federations": (FEDERATION,)})
        await asyncio.to_thread(write_folder, home, home.broker, lists)
        return processes.fork("broker", "broker", "run", "--dir", home.broker, outlives_others=True)

    def _provision(self, home: Home, source: Source) -> None:
        """Open the federation."""
        plan = plan_from_mapping(self._run.setting.plan(source))
        with contextlib.closing(Store.of(home)) as store:
            open_federation(home, store, plan, complete=self._complete_plan)

    def _start_observer(self, processes: Children) -> Child:
        run = self._run
        return processes.fork(
            "observer", "audit", "observe", "--federation", FEDERATION, "--out", run.observer, "--host", LOOPBACK,
            "--port", str(run.broker_port), "--tls", run.home / "pki",
            outlives_others=True,
        )  # fmt: skip

    def _give_rosters(self) -> None:
        """Give every device the cards of all devices, as people do with real devices."""
        configs = [load_config(self._run.bundle(client) / "agent.toml", {}) for client in self._clients]
        stores = {config.device: open_store(config, make=True) for config in configs}
        cards = "\n".join(card_of(device, FEDERATION, store.sum_key()) for device, store in stores.items())
        for store in stores.values():
            store.save_roster(roster_of(cards, FEDERATION, "the demo's roster"))

    def _start_agent(self, processes: Children, client: str) -> Child:
        config = self._run.bundle(client) / "agent.toml"
        settings: dict[tuple[str, str], str | bool | float | list[str]] = {
            ("data", "root"): f"../../data/{client}",
            ("data", "common_test"): "../../data/common",
            ("training", "shadow_every"): 1,
            ("training", "threads"): 1,
            # All devices share one machine here: benchmarks would be meaningless, and exports would delay training.
            ("export", "variants"): False,
            ("export", "each_best"): False,
            ("policy", "allow_upload"): sorted(part.value for part in self._allowed[0]),
            ("policy", "allow_report"): sorted(field.value for field in self._allowed[1]),
        }
        if len(names := self._backbones) > 1:
            settings["training", "backbone"] = names[self._clients.index(client) % len(names)]
        config.write_text(set_values(config.read_text(), settings))  # so that the agent can be restarted by hand
        return processes.fork(client, "agent", "run", "--config", config, "--until-finished")

    def _policy(self) -> tuple[frozenset[Part], frozenset[ReportField]]:
        """Allow uploads and report fields: the defaults and the spec's requirements; additions to the defaults are printed."""
        home = Home(self._run.home)
        with contextlib.closing(Store.of(home)) as store:
            spec = FederationSpec.parse((home.artifacts / store.federations()[0].spec).read_bytes())
        self._is_sealed = bool(spec.sealed)
        self._backbones = spec.network.backbone_names  # in turn, as in a simulation
        parts, fields = frozenset(spec.upload) - DEFAULT_ALLOW_UPLOAD, spec.required_report - DEFAULT_ALLOW_REPORT
        for key, more in (("allow_upload", parts), ("allow_report", fields)):
            if more:
                names = ", ".join(sorted(name.value for name in more))
                self._progress.print_once(
                    f"{spec.method} requires {names}: the demo's devices allow it, a real device needs policy.{key} "
                    "in agent.toml"
                )
        return DEFAULT_ALLOW_UPLOAD | parts, DEFAULT_ALLOW_REPORT | fields

    # Watch

    def _look(self) -> None:
        for client, follower in self._followers.items():
            self._agents[client].take(follower.new())
        self._coordinator.take(self._coordinator_log.new())
        self._progress.show(list(self._agents.values()), self._coordinator)

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(0.2)

    async def _until_finished(self, agents: list[Child]) -> None:
        """Wait until every agent has exited; if another process exits, or the federation stalls, the demo fails."""
        while any(agent.is_running for agent in agents):
            for agent in agents:
                if not agent.is_running and agent.process.exitcode != 0:
                    raise agent.ended_too_early()
            for other in self._kept_up:
                if not other.is_running:
                    raise other.ended_too_early()
            if self._coordinator.stalled is not None:
                raise ProcessError(
                    f"the federation stalled: {self._coordinator.stalled}; see {self._run.root / 'logs'}"
                )
            await asyncio.sleep(POLL_S)

    async def _until_observed(self) -> None:
        """Give the observer time to write the last traffic."""
        end = time.monotonic() + SETTLE_S
        while not self._wire().get("finished"):
            if time.monotonic() > end:
                self._progress.print_once("the observer recorded incomplete transfers: see observer/wire.json")
                return
            await asyncio.sleep(POLL_S)

    def _wire(self) -> Mapping[str, Any]:
        try:
            wire: dict[str, Any] = json.loads((self._run.observer / "wire.json").read_text())
        except FileNotFoundError:
            return {}
        return wire

    # Report

    def _report(self) -> dict[str, Any]:
        run, agents = self._run, list(self._agents.values())
        summary = summarise(
            setting=run.setting.model_dump(mode="json"),
            broker=self._broker_named,
            total_s=time.time() - process_began(),
            images=self._images,
            agents=agents,
            wire=self._wire(),
            versions=versions(),
        )
        replace_durably(run.root / "summary.json", json.dumps(summary, indent=1), READABLE)
        return summary
