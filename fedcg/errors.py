"""The errors that end a command; `fedcg.cli` turns them into exit codes.

Exit codes, the same for every command: 0 done, 1 failed while running, 2 bad input, 3 no answer in time, 4 not connected or not
allowed, 5 already running, 6 already exists, 7 not found, 8 a leak or an unmet gate, 130 interrupted.

FedcgError              1: failed while running
├── BadInputError       2: bad input; options that the command refuses
├── NoAnswerInTimeError 3: something did not answer in time
└── …                   each package's own errors, with the code in its `errors.py`; 4 to 7 are set where they are raised
"""

import re
import sys
import sysconfig
import traceback
from pathlib import Path

FAILED, BAD_INPUT, TIMED_OUT, NOT_CONNECTED, ALREADY_RUNNING, EXISTS, NOT_FOUND, NOT_MET = 1, 2, 3, 4, 5, 6, 7, 8
NEXT_STEPS = {
    FAILED: "run it again with --debug for the details",
    BAD_INPUT: "correct the input; --help lists what the command takes",
    TIMED_OUT: "try again; if it fails again, check the log of the other side",
    NOT_CONNECTED: "check that the other side runs, its address, and the token or certificate",
    ALREADY_RUNNING: "stop the running one first",
    EXISTS: "choose another name or place, or use the existing one",
    NOT_FOUND: "check the name or path; the commands `list` and `status` show the existing names",
    NOT_MET: "read what was found; trying again does not change it",
}
"""The next step for errors that do not name one, by exit code."""
_PACKAGES = frozenset({"audit", "coordinator", "devices", "edge_client", "experiments", "export", "fedcg"})
_IN_CODE = re.compile(r"\[(Errno -?\d+|SSL|[A-Z0-9]+: [A-Z0-9_]+)\] | ?\(_ssl\.c:\d+\)")
_OF_DATABASE = re.compile(
    r"\((?:sqlite3|psycopg[\w.]*)\.\w+\) |\s*(?:\[SQL: .*)?\(Background on this error at: .*", re.DOTALL
)
_NO_TEXT = re.compile(r"'[\w-]+' codec can't .*")


def in_words(cause: object) -> str:
    """The text of an error of the system, OpenSSL, a database or Python, without error numbers, SQL statements and code locations."""
    return _NO_TEXT.sub("it is not plain text", _IN_CODE.sub("", _OF_DATABASE.sub("", str(cause))))


def is_of_code(error: BaseException) -> bool:
    """Whether an error is of a type that faulty code raises. Such an error needs its type and place to be understood."""
    return type(error).__module__ == "builtins" and not isinstance(error, OSError | MemoryError)


def told(error: BaseException) -> str:
    """An error's text. For an error in code, also its type and the last place outside torch."""
    text = str(error) or type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    if not is_of_code(error) or not frames:
        return text
    where = frames[-1]
    return f"{type(error).__name__}: {text} ({Path(where.filename).name}, line {where.lineno}, in {where.name})"


def users_trace(error: BaseException | None) -> str:
    """The traceback of an error through the user's own code; empty if this program or a package raised it."""
    found = ""
    while error is not None:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if is_users(one.filename)]
        if frames and not isinstance(error, FedcgError | OSError):
            found = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).rstrip()
        error = error.__cause__
    return found


def is_users(filename: str) -> bool:
    """Whether a file belongs neither to this program nor to Python or an installed package."""
    path, root = Path(filename), Path(__file__).parents[1]
    if not path.is_file() or path.is_relative_to(sys.prefix) or path.is_relative_to(sysconfig.get_path("stdlib")):
        return False
    return not (path.is_relative_to(root) and path.relative_to(root).parts[0] in _PACKAGES)


class FedcgError(Exception):
    """Base of every error whose message is for the user of the command line.

    Args:
        words: the message; texts of libraries in it pass `in_words`.
        exit_code: overrides the class's.

    Attributes:
        exit_code: of a command that ends with this error.
        next_step: what to do, if the message does not contain it.
        data: results that the command found despite the error, for scripts.
    """

    exit_code: int = FAILED
    next_step: str = ""
    data: object = None

    def __init__(self, *words: object, exit_code: int | None = None) -> None:
        super().__init__(*map(in_words, words))
        if exit_code is not None:
            self.exit_code = exit_code


class BadInputError(FedcgError):
    """Options or input that a command can't use."""

    exit_code = BAD_INPUT


class NoAnswerInTimeError(FedcgError):
    """Something did not answer in time."""

    exit_code = TIMED_OUT
