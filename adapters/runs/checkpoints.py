"""Checkpoints of a whole training state, by Orbax: atomic, the newest ones and the best."""

import errno
import logging
import os
import re
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

_FIRST_PROCESS_ALONE = ocp.options.MultiprocessingOptions(
    primary_host=0, active_processes={0}, barrier_sync_key_prefix="first"
)
# Orbax prints each error with all its threads, many times over. Here it is one sentence.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


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
        if not read_only:
            path.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            path.absolute(),
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
            # What fails half-way leaves Orbax's threads behind, which say so at length.
            _require_room(self.path, sum(x.nbytes for x in arrays.values()))
            self._manager.save(
                iteration,
                args=ocp.args.StandardSave(dict(arrays)),
                metrics={"score": score},
                custom_metadata=dict(about or {}),
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
            f"({_reason(error)}); earlier ones are untouched. Make room, then go on with `vernal "
            f"resume {self.path.parent}`."
        )

    def iterations(self) -> list[int]:
        """Iterations that have a whole checkpoint, in order."""
        return sorted(self._manager.all_steps())

    def best_iteration(self) -> int | None:
        """The iteration with the highest score; `None` if nothing is saved."""
        return self._manager.best_step()

    def about(self, iteration: int) -> dict[str, Any]:
        """What was written beside a checkpoint."""
        return dict(self._manager.metadata(iteration).custom_metadata or {})

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
        """
        iteration = self._manager.latest_step() if iteration is None else iteration
        if iteration is None:
            raise ValueError(f"{self.path} holds no checkpoint; train the run first.")
        wanted = array_shapes(like)
        saved = self._manager.item_metadata(iteration)
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
        return dict(self._manager.restore(iteration, args=args))

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
        treedef, [_unwrap(arrays[jax.tree_util.keystr(path)], leaf) for path, leaf in leaves]
    )


def flatten(state: Any) -> dict[str, Any]:
    """Arrays of a state by path, with typed keys as the integers under them."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): _key_data(leaf) for path, leaf in leaves}


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.random.key_data(leaf)


def _unwrap(array: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(array) if _is_key(like) else array


def _describe(leaf: Any) -> str:
    return "missing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def _require_room(path: Path, size: int) -> None:
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
