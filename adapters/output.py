"""What the command prints: plain text that any terminal shows, and that never ends a run."""

import codecs
import errno
import io
import os
import sys
from typing import Any

from rich.console import Console

# For a terminal, a log or a cluster whose encoding has no such character.
_PLAIN = {
    "·": "|",
    "±": "+-",
    "×": "x",
    "–": "-",
    "−": "-",
    "…": "...",
    "╭": "+",
    "╮": "+",
    "╰": "+",
    "╯": "+",
    "│": "|",
    "─": "-",
}


def make_console() -> Console:
    """A console that shows text as it is: a value such as `[easy]` or `:smile:` is no markup."""
    return Console(markup=False, emoji=False)


def make_output_safe() -> None:
    """Let nothing that is printed from here on fail.

    What an encoding cannot say is replaced. What cannot be written, since the reader of a pipe is
    gone or a disk is full, is dropped: a line that nobody sees must not cost a training run.
    """
    codecs.register_error("vernal", _replace)
    sys.stdout, sys.stderr = _safe(sys.stdout), _safe(sys.stderr)


def _safe(stream: Any) -> Any:
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):  # none, closed, or replaced by another program
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Unfailing(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors="vernal",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Unfailing(io.FileIO):
    """A file to which writing never fails."""

    _is_told = False

    def write(self, data: Any) -> int:
        """Write, or drop what cannot be written; a closed pipe is nothing to speak of."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EPIPE and not self._is_told and self.fileno() != 2:
                self._is_told = True
                reason = os.strerror(error.errno or 0)
                print(f"vernal: the output cannot be written ({reason}).", file=sys.stderr)
            return len(data)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in text), error.end
