"""Several processes that run the same program, on one host or many: `jax.distributed`.

Every process runs the whole command, with its devices a part of one mesh. The first one alone
reads and writes files. What it reads it tells the others, and what goes wrong in one of them is
told to all, so that they stop together.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree
from numpy.typing import NDArray

# A process that says nothing for so long is lost: JAX then ends the others.
_SILENCE_SECONDS = 60


class Lost(RuntimeError):
    """Another process of the run is gone; this one cannot go on, nor take leave of it."""


def connect(coordinator: str, processes: int | None = None, process: int | None = None) -> None:
    """Join the other processes; before anything else is asked of JAX.

    Args:
        coordinator: `HOST:PORT` of the first process; or `auto`, to read everything from what
            the cluster says (Slurm, Open MPI, Kubernetes and others that JAX knows).
        processes: how many there are.
        process: which one this is, from 0.

    Raises:
        ValueError: the address, the numbers or the cluster cannot be made sense of; or the
            others do not come.
    """
    if coordinator == "auto" and (processes, process) != (None, None):
        raise ValueError("--coordinator auto asks the cluster; leave --processes and --process.")
    if coordinator == "auto":
        keywords: dict[str, Any] = {}
    elif processes is None or process is None:
        raise ValueError(
            "--coordinator HOST:PORT goes with --processes (how many there are) and --process "
            "(which one this is, from 0)."
        )
    elif not 0 <= process < processes:
        raise ValueError(
            f"process is {process} of {processes}; give a number from 0 to {processes - 1}."
        )
    else:
        keywords = {
            "coordinator_address": coordinator,
            "num_processes": processes,
            "process_id": process,
        }
    # SIGTERM is ours to answer, between two iterations.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=_SILENCE_SECONDS,
            shutdown_timeout_seconds=_SILENCE_SECONDS,
            **keywords,
        )
    except (ValueError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(f"the processes could not be joined by {coordinator}: {first}.") from error


def is_first() -> bool:
    """Whether this process is the one that reads and writes files."""
    return jax.process_index() == 0


def from_first(function: Callable[[], Any]) -> Any:
    """Call a function on the first process only, and tell all what came of it.

    Args:
        function: gives what JSON can say.

    Returns:
        What it gave.

    Raises:
        Exception: what it raised; on the other processes a ValueError, an OSError, or else a
            RuntimeError, of the same words.

    Example:
        >>> from_first(lambda: {"steps": 3})
        {'steps': 3}
    """
    if jax.process_count() == 1:
        return function()
    answer: dict[str, Any] = {}
    if is_first():
        try:
            answer = {"value": function()}
        except Exception as error:
            _broadcast_text(json.dumps({"kind": _kind(error).__name__, "text": str(error)}))
            raise
    answer = json.loads(_broadcast_text(json.dumps(answer)))
    if "text" in answer:
        raise {kind.__name__: kind for kind in _KINDS}[answer["kind"]](answer["text"])
    return answer["value"]


_KINDS = (ValueError, OSError, RuntimeError)


def _kind(error: Exception) -> type[Exception]:
    return next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)


class Word(NamedTuple):
    """What a process says to the others between two iterations.

    Attributes:
        save: whether to write a checkpoint now; the first process decides.
        signal: number of a signal that it got, or 0.
        fault: why it cannot go on, or nothing.
    """

    save: bool = False
    signal: int = 0
    fault: str = ""


def agree(word: Word) -> Word:
    """Put together what all processes say.

    Args:
        word: of this one.

    Returns:
        What the first says of saving, the highest signal, and a fault with its process.

    Example:
        >>> agree(Word(save=True)).save
        True
    """
    if jax.process_count() == 1:
        return word
    said = _gather(np.array([word.save, word.signal, len(word.fault.encode())], np.int32))
    fault = ""
    if said[:, 2].any():
        speaker = int(np.argmax(said[:, 2] > 0))
        text = np.zeros(said[:, 2].max(), np.uint8)
        own = np.frombuffer(word.fault.encode(), np.uint8)
        text[: len(own)] = own
        heard = bytes(_gather(text)[speaker, : said[speaker, 2]]).decode()
        is_own = speaker == jax.process_index()
        fault = heard if is_own else f"process {speaker} stopped: {heard}"
    return Word(bool(said[0, 0]), int(said[:, 1].max()), fault)


def fetch(tree: PyTree) -> PyTree:
    """Arrays as they are in the whole, on every process; typed keys are no such arrays."""
    if jax.process_count() == 1:
        return tree

    def fetch_one(array: jax.Array) -> NDArray[Any]:
        if not array.is_fully_addressable and not array.is_fully_replicated:
            return np.asarray(multihost_utils.process_allgather(array, tiled=True))
        return np.array(array)  # A copy: the array may be used up soon.

    with hearing_others():
        return jax.tree.map(fetch_one, tree)


def tell(tree: PyTree, shapes: PyTree) -> PyTree:
    """Arrays that the first process has, on all.

    Args:
        tree: of the first process; no matter what on the others.
        shapes: of the same structure.
    """
    if jax.process_count() == 1:
        return tree
    if not is_first():
        tree = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    with hearing_others():
        return multihost_utils.broadcast_one_to_all(tree)


@contextmanager
def hearing_others() -> Iterator[None]:
    """Say plainly that another process is gone where a message to it does not arrive.

    Raises:
        Lost: it is.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # JAX raises either: "UNKNOWN: Gloo all-reduce failed: ... Connection reset by peer".
        is_silence = re.search("gloo|nccl|UNAVAILABLE|DEADLINE_EXCEEDED|peer", str(error), re.I)
        if jax.process_count() == 1 or not is_silence:
            raise
        reason = str(error).partition("\n")[0][:200]
        raise Lost(
            f"another process of this run is lost ({reason}); `vernal resume` goes on."
        ) from error


def _gather(array: NDArray[Any]) -> NDArray[Any]:
    with hearing_others():
        return np.asarray(multihost_utils.process_allgather(array))


def _broadcast_text(text: str) -> str:
    data = np.frombuffer(text.encode(), np.uint8)
    with hearing_others():
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
        held = np.zeros(size, np.uint8)
        if is_first():
            held[:] = data
        return bytes(np.asarray(multihost_utils.broadcast_one_to_all(held))).decode()
