"""Several devices, each with its share of an agent's environments: JAX's own `shard_map`.

A device walks its environments alone. What it learns from them is shared: the numbers of a
loss are gathered, so that every formula sees the whole minibatch, and gradients are added up.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray, Shaped

_Tree = TypeVar("_Tree")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def count_devices(asked: int | Literal["all"]) -> int:
    """How many devices a run is to have; of several processes always all.

    Example:
        >>> count_devices(1)
        1
    """
    return jax.device_count() if asked == "all" or jax.process_count() > 1 else asked


def make_mesh(count: int | None = None) -> Mesh:
    """A mesh of some of this program's devices, on whatever hosts they are.

    Args:
        count: how many; all by default.

    Returns:
        A mesh of one axis.

    Raises:
        ValueError: there are not so many devices; or only some of those of several hosts are
            asked for.

    Example:
        >>> make_mesh(1).size
        1
    """
    there = jax.device_count()
    count = there if count is None else count
    if not 1 <= count <= there:
        advice = (
            "a CPU is one device, unless the environment variable JAX_NUM_CPU_DEVICES makes more "
            "of it"
            if jax.default_backend() == "cpu"
            else "ask for fewer"
        )
        raise ValueError(f"{count} devices are asked for, and there are {there}: {advice}.")
    if jax.process_count() > 1 and count < there:
        raise ValueError(
            f"{count} devices are asked for, and the {jax.process_count()} processes of this run "
            f"have {there}; use all of them, or start fewer processes."
        )
    return jax.make_mesh(
        (count,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
    )


def keys_by_index(key: PRNGKeyArray, indices: Int[Array, " n"]) -> Shaped[Array, "n ..."]:
    """A key for each of several things, which depends on its index in the whole and on no device.

    Example:
        >>> import jax.numpy as jnp
        >>> two, one = (keys_by_index(jax.random.key(0), jnp.array(x)) for x in ([0, 1], [1]))
        >>> bool(two[1] == one[0])
        True
    """
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, indices)


def lay_out(kind: Any, **split: Any) -> Any:
    """How a state lies on a mesh: whole on every device, except for what is named.

    Args:
        kind: the state's class, a `NamedTuple`.
        **split: specs of fields that are cut into parts.

    Returns:
        A `PartitionSpec`, or a tree of them, in place of each field.

    Example:
        >>> from typing import NamedTuple
        >>> State = NamedTuple("State", [("params", int), ("envs", int)])
        >>> lay_out(State, envs=PartitionSpec("devices"))
        State(params=P(), envs=P('devices',))
    """
    return kind(**{**dict.fromkeys(kind._fields, PartitionSpec()), **split})


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that an agent's environments are spread over.

    Its methods are called inside the function that `spread` is given, on each device.

    Attributes:
        mesh: of one axis; `None` for the one device that JAX takes by itself.
    """

    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        """Refuse a mesh that is no row of devices."""
        if self.mesh is not None and len(self.mesh.axis_names) != 1:
            raise ValueError(
                f"an agent is spread over a mesh of one axis, but this one has "
                f"{self.mesh.axis_names}."
            )

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def axis(self) -> str | None:
        """Name of the mesh's axis."""
        return None if self.mesh is None else self.mesh.axis_names[0]

    def share(self, **sizes: int) -> int:
        """A device's part of a number of things.

        Args:
            **sizes: one number, by the name it has for the user.

        Returns:
            The number over the devices.

        Raises:
            ValueError: it cannot be divided.

        Example:
            >>> Devices().share(envs=64)
            64
        """
        ((name, size),) = sizes.items()
        if size % self.count:
            raise ValueError(
                f"{name} is {size}, which cannot be spread evenly over {self.count} devices; "
                f"choose a multiple of {self.count}."
            )
        return size // self.count

    def spread(self, function: _Function, in_specs: Any, out_specs: Any) -> _Function:
        """Run a function on all devices at once.

        Args:
            function: of each device's part of the arguments.
            in_specs: `PartitionSpec`s of its arguments, as for `jax.shard_map`.
            out_specs: of its results.

        Returns:
            The same function of the whole.
        """
        if self.mesh is None:
            return function
        # Environments are someone else's code: their loops begin with constants, which the check
        # of what differs between devices refuses.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def index(self) -> Int[Array, ""] | int:
        """Which device this is."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis)

    def gather(self, tree: _Tree) -> _Tree:
        """All devices' rows, in the order of the devices, on each; constant to a derivative."""
        if self.axis is None:
            return tree
        return jax.lax.all_gather(jax.lax.stop_gradient(tree), self.axis, tiled=True)

    def gather_for_loss(self, tree: _Tree) -> _Tree:
        """All devices' rows of floats, in one message: of small arrays their number is what costs.

        A derivative flows to a device's own rows only. Where all devices go on to the same loss,
        the sum of their gradients is that of the whole.
        """
        if self.axis is None:
            return tree
        _, unravel = ravel_pytree(jax.tree.map(lambda x: x[0], tree))
        own = jax.vmap(lambda row: ravel_pytree(row)[0])(tree)
        place = self.index() * len(own)
        rows = jax.lax.dynamic_update_slice_in_dim(self.gather(own), own, place, axis=0)
        return jax.vmap(unravel)(rows)

    def sum(self, tree: _Tree) -> _Tree:
        """Sum over devices."""
        return tree if self.axis is None else jax.lax.psum(tree, self.axis)


ONE_DEVICE = Devices()
