"""Checkpoints of a whole training state, by Orbax: atomic, the newest ones and the best."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

_NEWEST = 2


class Checkpoints:
    """The checkpoints of a run, one directory each, named by iteration.

    A checkpoint is written beside its final name and renamed when it is whole, so that an
    interrupt or a full disk costs the newest one at most.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open a directory of checkpoints.

        Args:
            path: the directory; made if it is not there.
            read_only: leave everything as it is, what another process is writing too.
        """
        # Typed keys and state trees are saved as plain arrays, a leaf by its path: the file
        # then depends on no class of ours.
        keep = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(_NEWEST),
                checkpoint_managers.BestN(get_metric_fn=lambda metrics: metrics["score"], n=1),
            ]
        )
        self.path = path
        self._manager = ocp.CheckpointManager(
            path.absolute(),
            item_handlers=ocp.StandardCheckpointHandler(),
            options=ocp.CheckpointManagerOptions(
                best_fn=lambda metrics: metrics["score"],
                preservation_policy=keep,
                cleanup_tmp_directories=not read_only,
            ),
        )

    def save(self, iteration: int, state: Any, score: float) -> None:
        """Save a state; returns when it is whole on disk.

        Args:
            iteration: its number.
            state: any tree of arrays.
            score: higher is better; the best one is kept.

        Raises:
            OSError: it could not be written; earlier checkpoints are as they were.
        """
        if iteration in self._manager.all_steps():
            return
        try:
            self._manager.save(
                iteration,
                args=ocp.args.StandardSave(_flatten(state)),
                metrics={"score": score},
            )
            self._manager.wait_until_finished()
        except Exception as error:
            raise OSError(
                f"the checkpoint of iteration {iteration} could not be written to {self.path} "
                f"({_first_line(error)}); earlier ones are untouched."
            ) from error

    def iterations(self) -> list[int]:
        """Iterations that have a whole checkpoint, in order."""
        return sorted(self._manager.all_steps())

    def best_iteration(self) -> int | None:
        """The iteration with the highest score; `None` if nothing is saved."""
        return self._manager.best_step()

    def restore(self, like: Any, iteration: int | None = None) -> Any:
        """Read a state back.

        Args:
            like: a tree of the same structure, shapes and dtypes; `jax.eval_shape` gives one.
            iteration: which; the newest by default.

        Returns:
            The state.

        Raises:
            ValueError: there is no checkpoint, or it is of another network, environment or
                set of settings; the sentence names the first leaf that differs.
        """
        iteration = self._manager.latest_step() if iteration is None else iteration
        if iteration is None:
            raise ValueError(f"{self.path} holds no checkpoint; train the run first.")
        wanted = _flatten(like)
        saved = self._manager.item_metadata(iteration)
        for name in sorted({*wanted, *saved}, key=lambda name: (len(name), name)):
            given, needed = _describe(saved.get(name)), _describe(wanted.get(name))
            if given != needed:
                raise ValueError(
                    f"the checkpoint of iteration {iteration} in {self.path} does not fit: its "
                    f"{name} is {given}, but this agent's is {needed}. It was written with another "
                    "network, environment or number of environments."
                )
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wanted)
        arrays = self._manager.restore(iteration, args=ocp.args.StandardRestore(shapes))
        leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
        return jax.tree.unflatten(
            treedef,
            [_unwrap(arrays[jax.tree_util.keystr(path)], leaf) for path, leaf in leaves],
        )

    def close(self) -> None:
        """Wait for what is still being written, and release the directory."""
        self._manager.close()


def _flatten(state: Any) -> dict[str, Any]:
    """Leaves by path, with typed keys as the integers under them."""
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


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
