"""Defines an attack, and how every attack is carried out.

An attack declares the knowledge that it needs. Its function yields findings: figures, controls, pictures and
notes. The runner here checks what is missing, passes random streams and effort, counts steps, and collects the
findings.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from importlib import import_module

from audit.choices import ATTACKS
from audit.errors import TimeLimitError, UnknownAttackError
from audit.evidence import Case, Knowledge, Truth, View
from audit.measures import Control, Figure, Outcome, Pictures
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import ImageForm, TensorForm
from fedcg.learning.training.batches import steps_of
from fedcg.values import Value
from fedcg.wire.parts import Part


class Effort(str, Enum):
    """How much time an audit may take, on two CPU cores.

    A device runs `QUICK` before it publishes. `THOROUGH` is for publications.
    """

    QUICK = "quick"
    DEFAULT = "default"
    THOROUGH = "thorough"

    def of(self, quick: int, default: int, thorough: int) -> int:
        """Return the number for this effort; 0 skips something."""
        return {Effort.QUICK: quick, Effort.DEFAULT: default, Effort.THOROUGH: thorough}[self]

    @property
    def limit_s(self) -> float:
        """Seconds after which an audit stops the attacks that are not done."""
        return {Effort.QUICK: 180.0, Effort.DEFAULT: 1200.0, Effort.THOROUGH: math.inf}[self]

    def out_of_time(self) -> TimeLimitError:
        """Return the error of an attack that is stopped at `limit_s`."""
        return TimeLimitError(
            f"not done within {self.limit_s / 60:g} minutes, the limit of effort {self.value}; choose fewer --attacks"
        )


Progress = Callable[[int, int], None]
"""(steps done, total steps); an attack calls it at least every few seconds."""
Tick = Callable[[], None]
"""Called after each step."""
Found = Figure | Control | Pictures | str
"""What an attack yields; a text is a note that a reader needs to judge the figures."""


class Trial(Value):
    """One attack on one case: everything that the attack's function receives.

    Attributes:
        streams: the only source of its random numbers.
    """

    case: Case
    effort: Effort
    streams: Streams
    progress: Progress

    @property
    def view(self) -> View:
        """The attacker's view."""
        return self.case.view

    @property
    def truth(self) -> Truth:
        """The truth, which only scores, ceilings and controls may read."""
        return self.case.truth

    def steps(self, total: int) -> Tick:
        """Return a function to call after each of `total` steps."""
        done = itertools.count(1)
        return lambda: self.progress(min(next(done), total), total)


class Attack(Value):
    """An attack.

    Attributes:
        name: used on the command line.
        title: for a report; `question`: a privacy officer's question, in one sentence; `source`: paper and equations.
        carry_out: guesses from the trial's view, scores the guesses against its truth, and yields the findings. A
            failed guess raises nothing.
        parts: required in the update; `auxiliary`, `private`, `held_out`: whether the attack needs auxiliary images,
            the device's private networks, or held-out images.
        least_side: smallest side of an image in pixels, if the attack only works on images; 0: it works on tensors of
            any shape.
        lacking: any other reason why a case can't be attacked, as a sentence with the remedy; None if there is none.
        not_quick: why a quick audit skips it; empty if it does not.
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
        """Return why a case can't be attacked, as a sentence with the remedy; None if it can."""
        form, least = case.view.spec.input, self.least_side
        if least and isinstance(form, TensorForm):
            return f"{self.name} works on images, and the inputs are tensors of shape {list(form.shape)}"
        if isinstance(form, ImageForm) and min(form.height, form.width) < least:
            return f"{self.name} works on images of at least {least} x {least} pixels, not {form.height} x {form.width}"
        given = case.lacks(auxiliary=self.auxiliary, private=self.private, held_out=self.held_out, parts=self.parts)
        return given or self.lacking(case)

    def run(self, case: Case, effort: Effort, progress: Progress) -> Outcome:
        """Carry out the attack on a case; return its findings and duration, or the reason why it was not tried."""
        started = time.perf_counter()
        skipped = self.lacks(case) or (self.not_quick if effort is Effort.QUICK else "")
        if skipped:
            return Outcome(self.name, skipped=skipped)
        found = list(self.carry_out(Trial(case, effort, case.streams.at(self.name), progress)))
        return Outcome(
            self.name,
            tuple(_as_sent(one, case) for one in found if isinstance(one, Figure)),
            tuple(one for one in found if isinstance(one, Control)),
            tuple(one for one in found if isinstance(one, Pictures)),
            tuple(one for one in found if isinstance(one, str)),
            seconds=round(time.perf_counter() - started, 1),
        )


NOTHING_TO_FIND = 0.01
"""A chance above it is no finding. A larger one would end one gate in twenty on updates without a leak."""
_NO_CEILING = "Whether the device's own extractor would find more is not known: give --private."


def ceiling_control(case: Case, name: str, value: float, chances: Sequence[float]) -> Iterator[Control | str]:
    """Yield a control of the attacks with an estimated extractor, which is much weaker than the device's own: the latter must find nothing either.

    Args:
        case: of the audit.
        name: of the figures.
        value: the largest with the device's own extractor.
        chances: of its figures; empty if it was not given.
    """
    if case.view.shares_extractor:
        return
    if not chances:
        yield _NO_CEILING
        return
    title = f"{name} with the device's own extractor: an estimated one proves nothing if that finds more"
    likely = min(1.0, min(chances) * len(chances))
    must = f"nothing (chance above {NOTHING_TO_FIND:.0%}; {likely:.1%})"
    yield Control(title, value, must, likely > NOTHING_TO_FIND, name)


def _as_sent(figure: Figure, case: Case) -> Figure:
    """Return a figure of the gradient of all images as one of the update if the device's round had a single step: its weight difference is that gradient.

    DP-SGD adds noise to that gradient, which these figures leave out.
    """
    params, privacy = case.view.method.params_type.model_validate(case.view.spec.params), case.truth.privacy
    images = len(case.truth.train)
    if privacy is None or privacy.dp_sgd is not None or steps_of(params, images) > 1 or figure.rows != images:
        return figure
    sent = (Knowledge.UPDATE if one is Knowledge.BATCH else one for one in figure.knowledge)
    return replace(figure, knowledge=tuple(dict.fromkeys(sent)))


def carried_out(attack: Attack, case: Case, effort: Effort, progress: Progress, deadline: float) -> Outcome:
    """Run an attack in this process until a deadline on the monotonic clock; an error, and the deadline, become an outcome that passes no gate."""

    def step(done: int, total: int) -> None:
        if time.monotonic() > deadline:
            raise effort.out_of_time()
        progress(done, total)

    try:
        step(0, 1)
        return attack.run(case, effort, step)
    except Exception as error:  # noqa: BLE001 - one failed attack does not stop the others; report and gate name it
        return Outcome.failure(attack.name, error)


def get_attack(name: str) -> Attack:
    """Return the attack of that name; imports its module.

    Raises:
        UnknownAttackError: no such attack; the message lists the attacks.
    """
    if name not in ATTACKS:
        raise UnknownAttackError(f"unknown attack {name!r}; choose from {', '.join(ATTACKS)}")
    attack: Attack = import_module(f"audit.attacks.{ATTACKS[name]}").ATTACK
    return attack


def chosen_attacks(names: Sequence[str]) -> tuple[Attack, ...]:
    """Return the attacks of these names in the order of a report, each once; all if no name is given."""
    wanted = {get_attack(name).name for name in names} if names else set(ATTACKS)
    return tuple(get_attack(name) for name in ATTACKS if name in wanted)
