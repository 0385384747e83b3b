"""What an attack is, and the one way in which every attack is carried out.

An attack states what it needs to know, and is a function that yields what it finds: figures, controls, pictures, curves and notes.
The runner here checks what is lacking, hands out the random streams and the effort, counts steps, and puts the findings together.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module

from audit.choices import ATTACKS
from audit.errors import UnknownAttackError
from audit.evidence import Case, Truth, View
from audit.measures import Control, Curve, Figure, Outcome, Pictures
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import ImageForm, TensorForm
from fedcg.wire.parts import Part


class Effort(str, Enum):
    """How much time an attack may take.

    `QUICK` is what a device runs before it publishes: all attacks together 60 s for LeNet5 on 2 CPUs; `DEFAULT`: 10 minutes;
    `THOROUGH`: for publications.
    """

    QUICK = "quick"
    DEFAULT = "default"
    THOROUGH = "thorough"

    def of(self, quick: int, default: int, thorough: int) -> int:
        """The number that goes with this effort; 0 leaves something out."""
        return {Effort.QUICK: quick, Effort.DEFAULT: default, Effort.THOROUGH: thorough}[self]


Progress = Callable[[int, int], None]
"""(steps done, steps in all); an attack calls it at least every few seconds."""
Tick = Callable[[], None]
"""Called after each step."""
Found = Figure | Control | Pictures | Curve | str
"""What an attack yields; a text is a note: a sentence that a reader has to know to judge the figures."""


@dataclass(frozen=True)
class Trial:
    """One attack on one case: all that a function that carries it out is given.

    Attributes:
        streams: the only source of its random numbers.
    """

    case: Case
    effort: Effort
    streams: Streams
    progress: Progress

    @property
    def view(self) -> View:
        """What the attacker has."""
        return self.case.view

    @property
    def truth(self) -> Truth:
        """What only scores, ceilings and controls may read."""
        return self.case.truth

    def steps(self, total: int) -> Tick:
        """A function to call after each of `total` steps."""
        done = itertools.count(1)
        return lambda: self.progress(min(next(done), total), total)


@dataclass(frozen=True)
class Attack:
    """An attack.

    Attributes:
        name: on the command line and in gates.
        title: for a report; `question` is what a privacy officer asks, in one sentence; `source` paper and equations.
        carry_out: guesses from the trial's view, scores the guesses against its truth, and yields what it finds; raises nothing for
            a failed guess.
        parts: that have to be in the update. Whether it takes `auxiliary` images, the device's `private` networks, or `held_out` images.
        least_side: of images, in pixels, where it works on images alone; 0: it works on tensors of any shape.
        lacking: what else keeps it from being tried on a case, as a sentence with the remedy; None where nothing does.
        not_quick: why a quick audit leaves it out; empty where it does not.
    """

    name: str
    title: str
    question: str
    source: str
    carry_out: Callable[[Trial], Iterable[Found]]
    parts: frozenset[Part] = frozenset()
    auxiliary: bool = False
    private: bool = False
    held_out: bool = False
    least_side: int = 0
    lacking: Callable[[Case], str | None] = lambda _: None
    not_quick: str = ""

    def lacks(self, case: Case) -> str | None:
        """Why it can't be tried on a case, as a sentence with the remedy; None where it can."""
        form, least = case.view.spec.input, self.least_side
        if least and isinstance(form, TensorForm):
            return f"{self.name} works on images, and the inputs are tensors of shape {list(form.shape)}"
        if isinstance(form, ImageForm) and min(form.height, form.width) < least:
            return f"{self.name} works on images of at least {least} x {least} pixels, not {form.height} x {form.width}"
        given = case.lacks(auxiliary=self.auxiliary, private=self.private, held_out=self.held_out, parts=self.parts)
        return given or self.lacking(case)

    def run(self, case: Case, effort: Effort, progress: Progress) -> Outcome:
        """What it comes to on a case and how long that took, or the reason why it was not tried."""
        started = time.perf_counter()
        skipped = self.lacks(case) or (self.not_quick if effort is Effort.QUICK else "")
        if skipped:
            return Outcome(self.name, skipped=skipped)
        found = list(self.carry_out(Trial(case, effort, case.streams.at(self.name), progress)))
        return Outcome(
            self.name,
            tuple(one for one in found if isinstance(one, Figure)),
            tuple(one for one in found if isinstance(one, Control)),
            tuple(one for one in found if isinstance(one, Pictures)),
            tuple(one for one in found if isinstance(one, Curve)),
            tuple(one for one in found if isinstance(one, str)),
            seconds=round(time.perf_counter() - started, 1),
        )


def get_attack(name: str) -> Attack:
    """The attack of that name; its module is imported now.

    Raises:
        UnknownAttackError: there is none; the message lists those there are.
    """
    if name not in ATTACKS:
        raise UnknownAttackError(f"no attack {name!r}; there are {', '.join(ATTACKS)}")
    attack: Attack = import_module(f"audit.attacks.{ATTACKS[name]}").ATTACK
    return attack


def chosen_attacks(names: Sequence[str]) -> tuple[Attack, ...]:
    """The attacks of these names in the order of a report, each once; all where none is named."""
    wanted = {get_attack(name).name for name in names} if names else set(ATTACKS)
    return tuple(get_attack(name) for name in ATTACKS if name in wanted)
