"""Live progress of a demo on a terminal, or plain lines where there is none. Shows histories; changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.table import Table

from experiments.demo.event_follower import AgentHistory, CoordinatorHistory, number
from experiments.demo.summary import mean, percent

BAR = 12
_WORDS = {
    "classify": "training",
    "generate": "generator",
    "teacher": "teacher pass",
    "distil": "distilling",
    "evaluate": "evaluating",
    "export": "exporting",
}


def _bar(step: int, steps: int) -> str:
    if steps <= 0:
        return ""
    done = min(BAR, round(BAR * step / steps))
    return "█" * done + "░" * (BAR - done)


def _accuracies(agent: AgentHistory, prefix: str) -> str:
    if not agent.curve:
        return ""
    event = agent.curve[max(agent.curve)]
    values = (number(event, f"accuracy_{prefix}{what}") for what in ("local", "personal"))
    return " / ".join(map(percent, values))


class Progress:
    """Shows the histories.

    Args:
        console: where to; it is live when the console is a terminal.
        rounds: number of rounds of the federation.
    """

    def __init__(self, console: Console, rounds: int) -> None:
        self._console = console
        self._rounds = rounds
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
        self._printed: set[str] = set()

    def shown(self) -> AbstractContextManager[object]:
        """Show the live table while the block lasts."""
        return self._live or nullcontext()

    def print_once(self, line: str) -> None:
        """Print a line that stays, once."""
        if line not in self._printed:
            self._printed.add(line)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, agents: Sequence[AgentHistory], coordinator: CoordinatorHistory) -> None:
        """Show the state of the coordinator and of every agent."""
        if self._live is not None:
            self._live.update(self.render(agents, coordinator))
        if coordinator.opened:
            self.print_once("the first round is open")
        for round_number in sorted(coordinator.stored):
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

    def render(self, agents: Sequence[AgentHistory], coordinator: CoordinatorHistory) -> Table:
        """The live table."""
        table = Table(title=f"round {max(1, coordinator.round)} of {self._rounds}", title_justify="left")
        for column in ("who", "state", "progress", "own test, %\nlocal / personal", "common, %\nlocal / personal"):
            table.add_column(column)
        state = _WORDS.get(coordinator.state, coordinator.state)
        table.add_row("coordinator", state, _bar(coordinator.step, coordinator.steps), "", "")
        for agent in agents:
            state = _WORDS.get(agent.state, agent.state)
            bar = _bar(agent.step, agent.steps)
            table.add_row(agent.id, state, bar, _accuracies(agent, ""), _accuracies(agent, "common_"))
        return table
