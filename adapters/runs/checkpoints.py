"""Checkpoints of a whole training state, by Orbax: atomic, the newest ones and the best."""

import errno
import logging
import os
import re
import shutil
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from .folder import next_free_path, resume_command

_FIRST_PROCESS_ALONE = ocp.options.MultiprocessingOptions(
    primary_host=0, active_processes={0}, barrier_sync_key_prefix="first"
)
# Orbax prints each error with all its threads, many times over. Here it is one sentence.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


def _hush(others: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Say nothing of reads that were under way when another one failed: their loop is gone."""

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            others(unraisable)

    return hook


sys.unraisablehook = _hush(sys.unraisablehook)


class Damaged(ValueError):
    """A checkpoint is there, but cannot be read as it was written."""


class _Directory(type(epath.Path())):
    """A path that is no pattern, whatever characters it has: Orbax looks for files in it."""

    def glob(self, pattern: str) -> Iterator[Any]:
        return (type(self)(path) for path in Path(self).glob(pattern))


class _Manager(ocp.CheckpointManager):
    def metrics(self, step: int) -> Any:
        """The score of a checkpoint, or `None`: a damaged one is not in the way of the others."""
        try:
            metrics = super().metrics(step)
        except (ValueError, OSError):
            return None
        is_right = isinstance(metrics, dict) and isinstance(metrics.get("score"), float)
        return metrics if is_right else None


class Checkpoints:
    """The checkpoints of a run, one directory each, named by iteration.

    A checkpoint is written beside its final name and renamed when it is whole, so that an
    interrupt or a full disk costs the newest one at most. It is written while training goes on.

    Of several processes only the first one has any.
    """

    def __init__(self, path: Path, *, keep: int = 2, read_only: bool = False) -> None:
        """Open a directory of checkpoints.

        Args:
            path: the directory; made if it is not there.
            keep: how many of the newest to keep, beside the best.
            read_only: leave everything as it is, what another process is writing too.

        Raises:
            ValueError: Orbax cannot write to a path of such a name.
            OSError: it cannot be made.
        """
        # Typed keys and state trees are saved as plain arrays, a leaf by its path: the file
        # then depends on no class of ours.
        preserved = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(keep),
                checkpoint_managers.BestN(get_metric_fn=lambda metrics: metrics["score"], n=1),
            ]
        )
        self.path = path
        require_name(path)
        if not read_only:
            path.mkdir(parents=True, exist_ok=True)
        self._manager = _Manager(
            _Directory(path.absolute()),
            item_handlers=ocp.StandardCheckpointHandler(
                multiprocessing_options=_FIRST_PROCESS_ALONE
            ),
            options=ocp.CheckpointManagerOptions(
                create=False,
                best_fn=lambda metrics: metrics["score"],
                preservation_policy=preserved,
                cleanup_tmp_directories=not read_only,
                multiprocessing_options=_FIRST_PROCESS_ALONE,
            ),
        )
        self._writing: int | None = None

    def save(
        self,
        iteration: int,
        arrays: Mapping[str, Any],
        score: float,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to save a state; returns when it may be changed again.

        Args:
            iteration: its number.
            arrays: of the state, as `flatten` gives them.
            score: higher is better; the best one is kept.
            about: what to write beside it, as JSON can say it.

        Raises:
            OSError: it could not be written, or the one before, in spite of which this one is
                being written; others are as they were.
        """
        try:
            self.wait()
        finally:
            self._begin(iteration, arrays, score, about)

    def _begin(
        self,
        iteration: int,
        arrays: Mapping[str, Any],
        score: float,
        about: Mapping[str, Any] | None,
    ) -> None:
        if iteration in self._manager.all_steps():
            return
        self._writing = iteration
        try:
            # What fails half-way leaves Orbax's threads behind: they speak at length or never end.
            _require_room(self.path, sum(x.nbytes for x in arrays.values()))
            held = {name: np.asarray(array) for name, array in arrays.items()}  # Orbax copies them.
            self._manager.save(
                iteration,
                args=ocp.args.StandardSave(held),
                metrics={"score": score},
                custom_metadata={**(about or {}), "checksum": _checksum(held)},
            )
        except Exception as error:
            if not _is_of_storage(error):
                raise
            raise self._failure(error) from error

    def is_writing(self) -> bool:
        """Whether a checkpoint is not yet whole.

        Raises:
            OSError: it could not be written; earlier ones are as they were.
        """
        if self._writing is None:
            return False
        if self._manager.is_saving_in_progress():
            return True
        self.wait()
        return False

    def wait(self) -> None:
        """Return when all is whole on disk.

        Raises:
            OSError: what was being written could not be; earlier ones are as they were.
        """
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            if not _is_of_storage(error):
                raise
            raise self._failure(error) from error
        self._writing = None

    def _failure(self, error: Exception) -> OSError:
        """One sentence, once what is useless has made room."""
        iteration, self._writing = self._writing, None
        for partial in self.path.glob(f"{iteration}.*tmp*"):
            shutil.rmtree(partial, ignore_errors=True)
        self._manager.reload()
        return OSError(
            f"the checkpoint of iteration {iteration} could not be written to {self.path} "
            f"({_reason(error)}); earlier ones are untouched. Mend that, then go on with "
            f"`{resume_command(self.path.parent)}`."
        )

    def iterations(self) -> list[int]:
        """Iterations that have a whole checkpoint, in order."""
        return sorted(self._manager.all_steps())

    def best_iteration(self) -> int | None:
        """The iteration with the highest score; `None` if nothing is saved."""
        return self._manager.best_step()

    def about(self, iteration: int) -> dict[str, Any]:
        """What was written beside a checkpoint.

        Raises:
            Damaged: it cannot be read.
        """
        with self._reading(iteration):
            about = self._manager.metadata(iteration).custom_metadata
            if not about:
                raise EOFError("what was written beside it is gone")
            return dict(about)

    def set_aside(self, iteration: int) -> Path:
        """Give a checkpoint a name that is no checkpoint's; the new path."""
        aside = next_free_path(self.path / f"damaged-{iteration}")
        (self.path / str(iteration)).rename(aside)
        self.reload()
        return aside

    def reload(self) -> None:
        """See what was moved by another."""
        self._manager.reload()

    def restore(self, like: Any, iteration: int | None = None) -> Any:
        """Read a state back.

        Args:
            like: a tree of the same structure, shapes and dtypes; `jax.eval_shape` gives one.
            iteration: which; the newest by default.

        Returns:
            The state, its typed keys made again; see `restore_arrays`.

        Raises:
            ValueError: as `restore_arrays`.
        """
        return as_state(self.restore_arrays(like, iteration), like)

    def restore_arrays(self, like: Any, iteration: int | None = None) -> dict[str, Any]:
        """Read the arrays of a state back, each by its path.

        Args:
            like: a tree of the same structure, shapes and dtypes; `jax.eval_shape` gives one.
            iteration: which; the newest by default.

        Returns:
            NumPy arrays; a typed key is the integers under it. `as_state` makes the state of them.

        Raises:
            ValueError: there is no checkpoint, or it is of another network, environment or
                set of settings; the sentence names the first leaf that differs.
            Damaged: it cannot be read as it was written.
        """
        iteration = self._manager.latest_step() if iteration is None else iteration
        if iteration is None:
            raise ValueError(f"{self.path} holds no checkpoint; train the run first.")
        wanted = array_shapes(like)
        with self._reading(iteration):
            saved = dict(self._manager.item_metadata(iteration))
        for name in sorted({*wanted, *saved}, key=lambda name: (len(name), name)):
            given, needed = _describe(saved.get(name)), _describe(wanted.get(name))
            if given != needed:
                raise ValueError(
                    f"the checkpoint of iteration {iteration} in {self.path} does not fit: its "
                    f"{name} is {given}, but this agent's is {needed}. It was written with another "
                    "network, environment or number of environments."
                )
        as_numpy = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), wanted)
        args: Any = ocp.args.StandardRestore(as_numpy)
        expected = self.about(iteration).get("checksum")
        with self._reading(iteration):
            arrays = dict(self._manager.restore(iteration, args=args))
            if expected not in (None, _checksum(arrays)):
                raise EOFError("its numbers are not those that were written")
        return arrays

    @contextmanager
    def _reading(self, iteration: int) -> Iterator[None]:
        """Say of what goes wrong that the checkpoint is damaged, unless reading is what fails."""
        try:
            yield
        except Exception as error:
            is_elsewhere = re.match("PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAVAIL", str(error))
            if is_elsewhere or isinstance(error, PermissionError | MemoryError):
                raise
            raise Damaged(
                f"the checkpoint of iteration {iteration} in {self.path} is damaged "
                f"({_reason(error)})"
            ) from error

    def close(self) -> None:
        """Wait for what is still being written, and release the directory.

        Raises:
            OSError: it could not be written; earlier ones are as they were.
        """
        try:
            self.wait()
        finally:
            self._manager.close()


def array_shapes(like: Any) -> dict[str, Any]:
    """Shapes and dtypes of the arrays that stand for a state, by path."""
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in flatten(like).items()
    }


def as_state(arrays: Mapping[str, Any], like: Any) -> Any:
    """Put a state together again from its arrays by path."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(
        treedef, [_unwrap(arrays.get(jax.tree_util.keystr(path)), leaf) for path, leaf in leaves]
    )


def flatten(state: Any) -> dict[str, Any]:
    """Arrays of a state by path, with typed keys as the integers under them.

    Arrays without elements are left out: Orbax does not take them, and `as_state` knows them.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): _key_data(leaf) for path, leaf in leaves if leaf.size}


def require_name(path: Path) -> None:
    r"""Refuse a path that Orbax takes for another one.

    Args:
        path: where checkpoints are to lie.

    Raises:
        ValueError: it has a backslash or bytes that are no text, or begins as a cloud's.

    Example:
        >>> require_name(Path("runs [old]"))
        >>> require_name(Path("runs", "back\\slash"))
        Traceback (most recent call last):
        ValueError: checkpoints cannot lie in ...
    """
    text = path.absolute().as_posix()
    is_text = text.encode(errors="replace").decode() == text
    if "\\" in text or not is_text or epath.Path(text).as_posix() != os.fspath(epath.Path(text)):
        raise ValueError(
            f"checkpoints cannot lie in {text!r}: the library that writes them takes this name for "
            "another. Give a folder whose path has no backslash, is UTF-8, and does not begin with "
            "/gs, /s3, /az or /hf."
        )


def _checksum(arrays: Mapping[str, Any]) -> int:
    """Of all numbers: what is compressed may be damaged and read without a fault."""
    sums = []
    for name in sorted(arrays):
        data = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        words, rest = np.split(data, [len(data) // 8 * 8])
        # A sum of words takes a tenth of the time of a checksum of bytes.
        sums += [name, int(words.view(np.uint64).sum()), int(rest.sum())]
    return zlib.crc32(repr(sums).encode())


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.random.key_data(leaf)


def _unwrap(array: Any, like: Any) -> Any:
    if not like.size:
        data = jax.eval_shape(_key_data, like)
        array = jax.numpy.zeros(data.shape, data.dtype)
    if not _is_key(like):
        return array
    found: list[Any] = []  # Only a traced key tells how it is made, not the shape of one.
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(array, impl=found[0])


def _describe(leaf: Any) -> str:
    return "missing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def _require_room(path: Path, size: int) -> None:
    if not os.access(path, os.W_OK):
        raise OSError("nothing can be written there")
    free = shutil.disk_usage(path).free
    if size > free:
        raise OSError(
            f"{os.strerror(errno.ENOSPC)}: it takes up to {size:,} bytes, and {free:,} are free"
        )


def _is_of_storage(error: Exception) -> bool:
    # Orbax raises what its storage says as ValueError: "RESOURCE_EXHAUSTED: Error writing ...".
    return isinstance(error, OSError) or re.match("[A-Z_]+: ", str(error)) is not None


def _reason(error: BaseException) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if len(text) < 200:
        return text
    known = (os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
    return next((reason for reason in known if reason in text), textwrap.shorten(text, 200))
