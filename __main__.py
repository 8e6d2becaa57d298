"""The command `repertory`, also `python -m repertory`: what a failure prints, and the exit status.

    0    done
    1    the engine's fault, or a request that failed inside it
    2    the caller's fault: an unknown flag, a wrong setting, a refused request
    130  interrupted

Nothing heavy is imported before a verb needs it: `--help` must answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from .protocol.errors import ConfigError, RepertoryError, RequestError

FAULT, USAGE, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. `argv` is `sys.argv[1:]` unless given."""
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError, RepertoryError, BaseExceptionGroup) as error:
        return _failed(error)
    return status


def _run(argv: Sequence[str]) -> int:
    from cyclopts import CycloptsError

    from .actors.commands.app import build_app

    try:
        command, bound, _ = build_app().parse_args(list(argv), print_error=False, exit_on_error=False, verbose=False)
    except CycloptsError as error:
        _say(str(error))
        return USAGE
    return command(*bound.args, **bound.kwargs) or 0


def _failed(error: BaseException) -> int:
    """Report `error` (task groups wrap what their tasks raise) or, where it is of no known kind, raise it again."""
    leaves = list(_leaves(error))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return INTERRUPTED
    if all(isinstance(leaf, BrokenPipeError) for leaf in leaves) and _reader_has_gone():
        return FAULT
    if not all(isinstance(leaf, RepertoryError) for leaf in leaves):
        raise error
    for message in dict.fromkeys(str(leaf) for leaf in leaves):
        _say(message)
    return USAGE if all(isinstance(leaf, RequestError | ConfigError) for leaf in leaves) else FAULT


def _reader_has_gone() -> bool:
    """Whether it is our output that nobody reads any more (`| head`): no reason to complain, now or at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _say(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201 - the command line's own voice


if __name__ == "__main__":
    sys.exit(main())
