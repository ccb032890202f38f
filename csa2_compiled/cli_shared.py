"""What the commands of `csa2` share: options, consoles, and errors as one line and an exit code."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from csa2_compiled.run_report import BadArgumentError

BAD_ARGUMENT, DOES_NOT_WORK = 2, 1
_PIPED_WIDTH = 120  # columns, where there is no terminal and COLUMNS is not set


class Device(str, Enum):
    """Where to run."""

    CPU = "cpu"
    CUDA = "cuda"


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        help="config.json or inference/config.json of the model; without it a tiny 9-layer byte model.",
        metavar="JSON",
    ),
]
DeviceOption = Annotated[Device, typer.Option(help="Where to run.")]


class NotWorkingError(RuntimeError):
    """This machine cannot do what was asked, whatever the arguments."""


@contextmanager
def errors(command: str) -> Iterator[None]:
    """Turn what a user can fix into one line on stderr and an exit code."""
    try:
        yield
    except BadArgumentError as error:
        _fail(command, error, BAD_ARGUMENT)
    except NotWorkingError as error:
        _fail(command, error, DOES_NOT_WORK)


def make_console(stderr: bool = False) -> Console:
    """A console that prints text as it is."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


def check_output(argument: str, path: Path) -> None:
    """Raise BadArgumentError for a file that cannot be written, before the work whose result it is to hold."""
    if path.is_dir():
        raise BadArgumentError(argument, f"{path} is a directory; a file name is needed")
    if not path.parent.is_dir():
        raise BadArgumentError(argument, f"{path.parent} is no directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadArgumentError(argument, f"{path} cannot be written")


def _fail(command: str, error: Exception, code: int) -> NoReturn:
    typer.echo(f"csa2 {command}: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(code)
