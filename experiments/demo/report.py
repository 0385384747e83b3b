"""The output of a demo: a line for each round, `summary.json` and the table.

Numbers come from event logs. The broker's traffic comes only from the observer's record.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.demo.event_follower import AgentHistory, CoordinatorHistory, Event, number

TABLE_WIDTH = 100
OWN = ("accuracy_local", "accuracy_personal", "accuracy_onnx")
COMMON = ("accuracy_common_local", "accuracy_common_personal", "accuracy_common_onnx")
ACCURACIES = (*OWN, *COMMON)
# Reported if the agent measured it. `own` is the personal model of the best validation round, before a download;
# the others its rivals at the end of the federation; `personal` is the one that validation chose, by its `loss_val`.
CANDIDATES = ("own", "downloaded", "interpolated", "tuned", "averaged")
EXTRAS = (
    *(
        f"{figure}_{name}"
        for name in CANDIDATES
        for figure in ("accuracy", "accuracy_common", "accuracy_val", "loss_val")
    ),
    "consistency",
    "generator_spread",
)

WireRecord = Mapping[str, Any]


def process_began() -> float:
    """Return the start of this process in Unix seconds, so that imports are included in the duration."""
    if sys.platform != "linux":
        return psutil.Process().create_time()
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # psutil's value is a second off
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def uplink_bytes_per_round(wire: WireRecord, client: str, rounds: int) -> int:
    """Return the mean payload bytes per round that a device published, as the observer recorded; all messages count."""
    up = wire.get("bytes", {}).get(client, {}).get("up", {})
    return round(sum(map(int, up.values())) / max(1, rounds))


def crossed(wire: WireRecord, client: str) -> tuple[list[str], list[str]]:
    """Return (parts, report fields) that the observer found in one client's updates."""
    updates = [seen for seen in wire.get("artifacts", ()) if seen["kind"] == "update" and seen["sender"] == client]
    parts = sorted({part for seen in updates for part in seen["parts"]})
    return parts, sorted({name for seen in updates for name in seen["report"]})


def _client_record(agent: AgentHistory, images: Mapping[str, int], wire: WireRecord, rounds: int) -> dict[str, Any]:
    final: Event = agent.finalised or {}
    parts, fields = crossed(wire, agent.id)
    record: dict[str, Any] = {"id": agent.id, **images}
    record |= {name: number(final, name) for name in ACCURACIES}
    record |= {
        "onnx_model": final.get("onnx_model"),
        "uplink_bytes_per_round": uplink_bytes_per_round(wire, agent.id, rounds),
    }
    record |= {"parts_on_wire": parts, "fields_on_wire": fields, "candidate": final.get("candidate")}
    last = agent.curve[max(agent.curve)] if agent.curve else {}
    record |= {name: number({**last, **final}, name) for name in EXTRAS}
    return record


def curves(agents: Sequence[AgentHistory]) -> dict[str, list[dict[str, Any]]]:
    """Return accuracies by client and round."""
    names = (*ACCURACIES, *EXTRAS)
    return {
        agent.id: [
            {"round": round_number} | {name: number(event, name) for name in names if number(event, name) is not None}
            for round_number, event in sorted(agent.curve.items())
        ]
        for agent in agents
    }


def summarise(
    *,
    setting: Mapping[str, Any],
    broker: str,
    total_s: float,
    images: Mapping[str, Mapping[str, int]],
    agents: Sequence[AgentHistory],
    wire: WireRecord,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Return the content of `summary.json`; `total_s` is the duration of the run, `images` has each client's numbers of images, from `prepare`."""
    clients = [_client_record(agent, images[agent.id], wire, setting["rounds"]) for agent in agents]
    return {
        "method": setting["method"],
        "rounds": setting["rounds"],
        "data": setting["data"],
        "broker": broker,
        "seconds": {"total": round(total_s, 2)},
        "parts_on_wire": list(wire.get("parts_on_wire", ())),
        "fields_on_wire": list(wire.get("fields_on_wire", ())),
        "clients": clients,
        "mean": {name: mean([client[name] for client in clients]) for name in (*ACCURACIES, *EXTRAS)},
        "observer": {"artifacts": len(wire.get("artifacts", ())), "sealed": wire.get("sealed")},
        "setting": dict(setting),
        "versions": dict(versions),
        "curves": curves(agents),
    }


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values, without None; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def percent(value: float | None) -> str:
    """Format a share of 1 as percent with one decimal; `-` for None."""
    return "-" if value is None else f"{100 * value:.1f}"


def table(summary: Mapping[str, Any]) -> Table:
    """Return the summary as tables, readable at 100 columns; accuracies in percent."""
    title = f"{summary['method']}, {summary['rounds']} rounds, {summary['data']}; accuracy in %"
    result = Table(title=title, box=box.SIMPLE_HEAD, show_footer=True, collapse_padding=True)
    average = summary["mean"]
    result.add_column("client", "mean")
    result.add_column("train\nimages", justify="right")
    result.add_column("own test images\nlocal personal  ONNX", _triple(average, OWN), justify="right")
    result.add_column("common balanced test\nlocal personal  ONNX", _triple(average, COMMON), justify="right")
    result.add_column("KB up\n/round", justify="right")
    result.add_column("crossed the broker\n(observed)", max_width=24)
    for client in summary["clients"]:
        result.add_row(
            client["id"],
            str(client["train_images"]),
            _triple(client, OWN),
            _triple(client, COMMON),
            f"{client['uplink_bytes_per_round'] / 1000:.0f}",
            _crossing(client),
        )
    return result


def _triple(values: Mapping[str, Any], names: Sequence[str]) -> str:
    local, personal, onnx = (percent(values[name]) for name in names)
    return f"{local:>5} {personal:>8} {onnx:>5}"


def _crossing(client: Mapping[str, Any]) -> str:
    parts = ", ".join(client["parts_on_wire"]) or "no part"
    fields = ", ".join(client["fields_on_wire"]) or "no field"
    return f"{parts}\n{fields}"


class Progress:
    """Prints one line for each round.

    Args:
        console: for the output.
        rounds: number of rounds of the federation.
    """

    def __init__(self, console: Console, rounds: int) -> None:
        self._console = console
        self._rounds = rounds
        self._printed: set[str] = set()

    def print_once(self, line: str) -> None:
        """Print a permanent line, once."""
        if line not in self._printed:
            self._printed.add(line)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, agents: Sequence[AgentHistory], coordinator: CoordinatorHistory) -> None:
        """Print news: the first open round, each finished round, and problems of agents."""
        if coordinator.is_open:
            self.print_once("the first round is open")
        for round_number in coordinator.stored:
            self.print_once(self._round_line(agents, round_number))
        for agent in agents:
            for problem in agent.problems:
                self.print_once(f"{agent.id}: {problem}")

    def _round_line(self, agents: Sequence[AgentHistory], round_number: int) -> str:
        def average(name: str) -> str:
            events = [agent.curve[round_number] for agent in agents if round_number in agent.curve]
            return percent(mean([number(event, name) for event in events]))

        return (
            f"round {round_number}/{self._rounds}: mean accuracy, % (local / personal): "
            f"own test {average('accuracy_local')} / {average('accuracy_personal')}, "
            f"common {average('accuracy_common_local')} / {average('accuracy_common_personal')}"
        )
