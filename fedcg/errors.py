"""The errors with which a command ends that can't do its work; `fedcg.cli` gives their exit codes to the shell.

Exit codes, the same for every command: 0 done, 1 failed while running, 2 bad input, 3 no answer in time, 4 not connected or not
allowed, 5 it runs already, 6 what would be made exists, 7 what was named does not exist, 130 interrupted.

FedcgError              1: failed while running
├── BadInputError       2: bad input; options that a command itself refuses
├── NoAnswerInTimeError 3: something did not answer in time
├── ConnectionFailedError 4: there is no connection, or the other side does not accept who asks
└── …                   each package's own errors, with the code that its `errors.py` states; 5, 6 and 7 where they are raised
"""

import re
import sys
import sysconfig
import traceback
from pathlib import Path

FAILED, BAD_INPUT, TIMED_OUT, NOT_CONNECTED, ALREADY_RUNNING, EXISTS, NOT_FOUND = 1, 2, 3, 4, 5, 6, 7
NEXT_STEPS = {
    FAILED: "run it again with --debug for the details",
    BAD_INPUT: "correct the input; --help lists what the command takes",
    TIMED_OUT: "try again; look at the log of the other side when it repeats",
    NOT_CONNECTED: "check that the other side runs, its address, and the token or certificate",
    ALREADY_RUNNING: "stop the other one first, or leave it at that",
    EXISTS: "choose another name or place, or use what is there",
    NOT_FOUND: "check the name or path; the commands `list` and `status` show what names there are",
}
"""What to do after an error that names no step of its own, by exit code."""
_PACKAGES = frozenset({"audit", "coordinator", "devices", "edge_client", "experiments", "export", "fedcg"})
_IN_CODE = re.compile(r"\[(Errno -?\d+|SSL|[A-Z0-9]+: [A-Z0-9_]+)\] | ?\(_ssl\.c:\d+\)")
_OF_DATABASE = re.compile(
    r"\((?:sqlite3|psycopg[\w.]*)\.\w+\) |\s*(?:\[SQL: .*)?\(Background on this error at: .*", re.DOTALL
)
_NO_TEXT = re.compile(r"'[\w-]+' codec can't .*")


def in_words(cause: object) -> str:
    """What the system, OpenSSL, a database or Python wrote of an error, without its numbers, statements and places in code."""
    return _NO_TEXT.sub("it is not plain text", _IN_CODE.sub("", _OF_DATABASE.sub("", str(cause))))


def is_of_code(error: BaseException) -> bool:
    """Whether an error is of the kinds that code raises which is wrong: it says nothing without its type and place."""
    return type(error).__module__ == "builtins" and not isinstance(error, OSError | MemoryError)


def told(error: BaseException) -> str:
    """An error's text; of one in code, also its type, and the place outside torch that it comes from."""
    text = str(error) or type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    if not is_of_code(error) or not frames:
        return text
    where = frames[-1]
    return f"{type(error).__name__}: {text} ({Path(where.filename).name}, line {where.lineno}, in {where.name})"


def users_trace(error: BaseException | None) -> str:
    """The traceback through the user's own code that an error comes from; empty where it comes from this program or a package."""
    found = ""
    while error is not None:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if is_users(one.filename)]
        if frames and not isinstance(error, FedcgError | OSError):
            found = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).rstrip()
        error = error.__cause__
    return found


def is_users(filename: str) -> bool:
    """Whether a file is neither of this program nor of Python or an installed package."""
    path, root = Path(filename), Path(__file__).parents[1]
    if not path.is_file() or path.is_relative_to(sys.prefix) or path.is_relative_to(sysconfig.get_path("stdlib")):
        return False
    return not (path.is_relative_to(root) and path.relative_to(root).parts[0] in _PACKAGES)


class FedcgError(Exception):
    """Base of every error whose message is meant for the person at the command line.

    Args:
        words: the message; what others wrote in it is brought `in_words`.
        exit_code: another one than the class's.

    Attributes:
        exit_code: of a command that ends with it.
        next_step: what to do, where that is not a part of the message.
        data: what was found all the same, for scripts.
    """

    exit_code: int = FAILED
    next_step: str = ""
    data: object = None

    def __init__(self, *words: object, exit_code: int | None = None) -> None:
        super().__init__(*map(in_words, words))
        if exit_code is not None:
            self.exit_code = exit_code


class BadInputError(FedcgError):
    """Options of a command that can't be used."""

    exit_code = BAD_INPUT


class NoAnswerInTimeError(FedcgError):
    """Something did not answer in time."""

    exit_code = TIMED_OUT


class ConnectionFailedError(FedcgError):
    """There is no connection, or the other side does not accept who asks."""

    exit_code = NOT_CONNECTED
