"""Many copies of one environment side by side, whose next episodes are ready before need.

Under `jax.vmap`, an automatic reset inside an environment's step generates a new instance
for every copy at every step and throws nearly all of them away. Here each copy has a short
queue of episodes that were generated in batches, and takes the next one when its episode
ends. Episode `e` of copy `i` depends on the key, on `i` and on `e`, and on nothing else: a
trajectory does not change with the length of the queues, the size of the batches, the
number of copies beside it, or the device it runs on. This holds for JAX's default random bits
(`threefry2x32`). Under `vmap` those of `rbg` depend on what is drawn beside them, so with
`jax_default_prng_impl` set to `rbg` a run is still the same each time, but not with queues of
another length or on another number of devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped

from vernal.core._arrays import where

from .checks import (
    require_as_specified,
    require_members,
    require_no_automatic_reset,
    require_specs,
    require_timesteps,
)
from .mesh import keys_by_index, lay_out

# Longer queues make larger batches, which are cheaper an episode; past 16 the gain is small.
_MOST_EPISODES = 16
_MOST_BYTES = 64 * 2**20


@runtime_checkable
class Environment(Protocol):
    """What is asked of an environment: Jumanji's `reset`, `step` and specs."""

    @property
    def observation_spec(self) -> Any:
        """Tree of arrays that the agent sees."""
        ...

    @property
    def action_spec(self) -> Any:
        """What the agent may do."""
        ...

    def reset(self, key: PRNGKeyArray) -> tuple[Any, Any]:
        """Start an episode: `(state, timestep)`."""
        ...

    def step(self, state: Any, action: Any) -> tuple[Any, Any]:
        """Take one step: `(state, timestep)`."""
        ...


def read_specs(environment: Environment) -> tuple[Any, Any]:
    """Observation spec and action spec, with concrete bounds even inside a trace.

    Jumanji builds a spec when it is first asked for, and keeps it: asked for inside a trace, it
    would keep that trace's values for ever.

    Args:
        environment: with Jumanji's specs.

    Returns:
        Observation spec and action spec.

    Example:
        >>> import jumanji
        >>> read_specs(jumanji.make("Snake-v1"))[1].num_values
        4
    """
    with jax.ensure_compile_time_eval():
        return environment.observation_spec, environment.action_spec


def check_environment(environment: Environment) -> None:
    """Refuse an environment that cannot take one step after another, before anything compiles.

    A step must keep the structure, shapes and dtypes of the state and of the observation. In
    JAX's 64-bit mode about half of Jumanji's environments do not. An observation must be what
    its spec says, for that is how it is read.

    Args:
        environment: one environment, without automatic reset.

    Raises:
        TypeError: it resets itself.
        ValueError: it lacks something; a step changes what it must keep, or, in 64-bit mode,
            cannot even be traced; or an observation differs from its spec.

    Example:
        >>> import jax, jumanji
        >>> check_environment(jumanji.make("JobShop-v0"))
        >>> with jax.enable_x64(True):
        ...     check_environment(jumanji.make("JobShop-v0"))
        Traceback (most recent call last):
        ValueError: JobShop cannot take one step after another: a step changes \
observation.machines_remaining_times from int32[10] to int64[10]; \
JAX's 64-bit mode (jax_enable_x64) is on, switch it off.
    """
    require_members(environment)
    _trace_first_step(environment, environment.reset, environment.step)


def _trace_first_step(
    environment: Environment, reset: Callable[..., Any], step: Callable[..., Any]
) -> tuple[Any, Any]:
    """Shapes of an episode's first state and observation, unless something is wrong with them."""
    name = type(environment).__name__
    require_no_automatic_reset(environment)
    observation_spec, action_spec = read_specs(environment)
    require_specs(name, observation_spec=observation_spec, action_spec=action_spec)
    action = action_spec.generate_value()
    try:
        state, timestep = jax.eval_shape(reset, jax.random.key(0))
        next_state, next_timestep = jax.eval_shape(step, state, action)
    except (TypeError, ValueError) as error:
        if not jax.config.read("jax_enable_x64"):
            raise
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise _refusal(environment, reason) from error
    require_timesteps(name, reset=timestep, step=next_timestep)
    first = {"state": state, "observation": timestep.observation}
    second = {"state": next_state, "observation": next_timestep.observation}
    before, after = _describe_leaves(first), _describe_leaves(second)
    for leaf in before | after:
        old, new = before.get(leaf, "nothing"), after.get(leaf, "nothing")
        if old != new:
            raise _refusal(environment, f"a step changes {leaf} from {old} to {new}")
    if jax.tree.structure(first) != jax.tree.structure(second):
        raise _refusal(environment, "a step changes the classes in its state or observation")
    require_as_specified(f"the first observation of {name}", timestep.observation, observation_spec)
    return state, timestep.observation


def _describe_leaves(tree: Any) -> dict[str, str]:
    """As `{"state.key": "uint32[2]"}`."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _refusal(environment: Environment, fault: str) -> ValueError:
    in_64_bits = jax.config.read("jax_enable_x64")
    advice = "; JAX's 64-bit mode (jax_enable_x64) is on, switch it off." if in_64_bits else "."
    name = type(environment).__name__
    return ValueError(f"{name} cannot take one step after another: {fault}{advice}")


class Outcome(NamedTuple):
    """What one step brought to the team.

    Attributes:
        reward: what it paid.
        discount: 0 where it reached a terminal state, else 1 as a rule.
        terminated: the episode ended in a terminal state.
        truncated: the episode was cut: its last state still has a value.
    """

    reward: Float[Array, ""]
    discount: Float[Array, ""]
    terminated: Bool[Array, ""]
    truncated: Bool[Array, ""]


def read_outcome(timestep: Any) -> Outcome:
    """Reward and end of a step, for one agent or a team.

    Agents of a team may have a reward and a discount each: the team earns the sum, and goes on
    as long as one of them does.

    Args:
        timestep: Jumanji's, of one copy.

    Returns:
        What the team got.

    Example:
        >>> import jax.numpy as jnp
        >>> from jumanji.types import termination
        >>> read_outcome(termination(jnp.array([1.0, 2.0]), None, shape=(2,))).reward.item()
        3.0
    """
    discount = jnp.max(timestep.discount).astype(jnp.float32)
    return Outcome(
        reward=jnp.sum(timestep.reward).astype(jnp.float32),
        discount=discount,
        terminated=timestep.last() & (discount == 0),
        truncated=timestep.last() & (discount != 0),
    )


class Queue(NamedTuple):
    """The next episodes of `B` copies, up to `Q` of each, in a ring.

    Attributes:
        states: first states; episode `e` of copy `i` lies at `[i * Q + e % Q]`.
        observations: their observations.
        generated: number of episodes generated so far, for each copy.
        taken: number of episodes begun so far, for each copy.
    """

    states: PyTree[Shaped[Array, "BQ ..."]]
    observations: PyTree[Shaped[Array, "BQ ..."]]
    generated: Int[Array, " B"]
    taken: Int[Array, " B"]


class EnvState(NamedTuple):
    """`B` copies of an environment, between two steps.

    Attributes:
        states: the environment's own states.
        observations: what the agent sees now; after an end, the new episode's first.
        episode_returns: sum of rewards of the running episodes so far.
        episode_lengths: number of steps of the running episodes so far.
        queue: their next episodes.
        indices: which copies these are, where they are a part of a larger whole.
        key: what all episodes derive from; never consumed.
    """

    states: PyTree[Shaped[Array, "B ..."]]
    observations: PyTree[Shaped[Array, "B ..."]]
    episode_returns: Float[Array, " B"]
    episode_lengths: Int[Array, " B"]
    queue: Queue
    indices: Int[Array, " B"]
    key: PRNGKeyArray

    def keys(self, key: PRNGKeyArray) -> Shaped[Array, " B"]:
        """A key for each copy, which depends on its index and on nothing beside it."""
        return keys_by_index(key, self.indices)

    @classmethod
    def split_along(cls, axis: str | None) -> Any:
        """`PartitionSpec`s by which the copies are spread along an axis of a mesh."""
        copies = {name: PartitionSpec(axis) for name in cls._fields if name != "key"}
        return lay_out(cls, **copies)


class Transition(NamedTuple):
    """What one step of `B` copies brought.

    Attributes:
        rewards: what the step paid, summed over agents.
        discounts: 0 where the step reached a terminal state, else 1 as a rule.
        terminated: the episode ended in a terminal state.
        truncated: the episode was cut, by a time limit for instance: its last state still
            has a value.
        next_observations: the state arrived in, before any reset: the true last one.
        episode_returns: sum of rewards of the episode up to and with this step.
        episode_lengths: its number of steps, this one included.
        extras: the environment's own metrics.
    """

    rewards: Float[Array, " B"]
    discounts: Float[Array, " B"]
    terminated: Bool[Array, " B"]
    truncated: Bool[Array, " B"]
    next_observations: PyTree[Shaped[Array, "B ..."]]
    episode_returns: Float[Array, " B"]
    episode_lengths: Int[Array, " B"]
    extras: Any

    @property
    def resets(self) -> Bool[Array, " *batch"]:
        """True where the episode ended, for either reason."""
        return self.terminated | self.truncated


class VectorEnvironment:
    """`num_envs` copies of an environment with automatic reset from prefetched episodes.

    `init` and `step` are pure functions of arrays.

    Example:
        >>> import jax, jax.numpy as jnp, jumanji
        >>> envs = VectorEnvironment(jumanji.make("Snake-v1"), num_envs=3)
        >>> state = envs.init(jax.random.key(0))
        >>> state, transition = envs.step(state, jnp.array([0, 1, 2]))
        >>> transition.episode_lengths.tolist()
        [1, 1, 1]
    """

    def __init__(
        self,
        environment: Environment,
        num_envs: int,
        *,
        queue_length: int | None = None,
    ) -> None:
        """Describe the copies; nothing is generated yet.

        Args:
            environment: one environment, without automatic reset.
            num_envs: how many copies, `B`.
            queue_length: how many coming episodes to hold for each copy, `Q`. It changes
                memory and speed, no trajectory. If not given, as many as fit into 64 MiB for all
                copies together, but at least 1 and at most 16.

        Raises:
            TypeError: the environment resets itself.
            ValueError: a count is below 1, or `check_environment` refuses the environment.
        """
        if num_envs < 1 or (queue_length is not None and queue_length < 1):
            raise ValueError(
                f"VectorEnvironment needs at least one copy and a queue of at least one episode; "
                f"got num_envs={num_envs}, queue_length={queue_length}."
            )
        require_members(environment)
        self.environment = environment
        # Compiled functions keep what is traced for the check, which takes half a second for some.
        self._reset, self._step = jax.jit(environment.reset), jax.jit(environment.step)
        episode = _trace_first_step(environment, self._reset, self._step)
        self.num_envs = num_envs
        self.queue_length = queue_length or _fitting_queue_length(num_envs, episode)
        # Episodes made side by side are cheaper, but all of a batch wait for one.
        self.batch_size = max(1, num_envs * self.queue_length // 4)

    def part(self, parts: int) -> "VectorEnvironment":
        """One of several equal parts of the copies, with queues as long as those of the whole.

        Args:
            parts: how many; divides the number of copies.

        Returns:
            Fewer copies; which ones, `init` is told.
        """
        if self.num_envs % parts:
            raise ValueError(f"{self.num_envs} copies cannot be cut into {parts} equal parts.")
        if parts == 1:
            return self
        return VectorEnvironment(
            self.environment, self.num_envs // parts, queue_length=self.queue_length
        )

    def init(self, key: PRNGKeyArray, first_index: Int[Array, ""] | int = 0) -> EnvState:
        """Begin the first episode of every copy.

        Args:
            key: consumed; all episodes to come derive from it.
            first_index: index of the first copy, where these are a part of a larger whole.

        Returns:
            The copies at their first states, with full queues.
        """
        copies = jnp.repeat(jnp.arange(self.num_envs), self.queue_length)
        episodes = jnp.tile(jnp.arange(self.queue_length), self.num_envs)
        indices = jnp.asarray(first_index) + jnp.arange(self.num_envs)
        states, observations = self._generate(key, indices[copies], episodes)
        full = jnp.full(self.num_envs, self.queue_length, int)
        queue = Queue(states, observations, generated=full, taken=jnp.ones_like(full))
        states, observations = self._take(queue, jnp.zeros_like(full))
        return EnvState(
            states=states,
            observations=observations,
            episode_returns=jnp.zeros(self.num_envs),
            episode_lengths=jnp.zeros(self.num_envs, jnp.int32),
            queue=queue,
            indices=indices,
            key=key,
        )

    def step(
        self, env_state: EnvState, actions: PyTree[Shaped[Array, "B ..."]]
    ) -> tuple[EnvState, Transition]:
        """Take one step in every copy; where an episode ends, begin the next one.

        Args:
            env_state: the copies.
            actions: one action for each, as the environment's action spec wants it.

        Returns:
            The copies after the step, and what it brought.
        """
        states, timesteps = jax.vmap(self._step)(env_state.states, actions)
        rewards, discounts, terminated, truncated = jax.vmap(read_outcome)(timesteps)
        ended = terminated | truncated
        transition = Transition(
            rewards=rewards,
            discounts=discounts,
            terminated=terminated,
            truncated=truncated,
            next_observations=timesteps.observation,
            episode_returns=env_state.episode_returns + rewards,
            episode_lengths=env_state.episode_lengths + 1,
            extras=timesteps.extras,
        )
        queue = self._refill(env_state, ended)
        states, observations = self._begin(queue, ended, states, timesteps.observation)
        env_state = EnvState(
            states=states,
            observations=observations,
            episode_returns=jnp.where(ended, 0, transition.episode_returns),
            episode_lengths=jnp.where(ended, 0, transition.episode_lengths),
            queue=queue._replace(taken=queue.taken + ended.astype(int)),
            indices=env_state.indices,
            key=env_state.key,
        )
        return env_state, transition

    def _generate(self, key: PRNGKeyArray, indices: Array, episodes: Array) -> tuple[Any, Any]:
        """First states and observations of some episodes of some copies."""

        def generate_one(index: Array, episode: Array) -> tuple[Any, Any]:
            copy_key = jax.random.fold_in(key, index)
            state, timestep = self._reset(jax.random.fold_in(copy_key, episode))
            return state, timestep.observation

        return jax.vmap(generate_one)(indices, episodes)

    def _begin(
        self, queue: Queue, ended: Bool[Array, " B"], states: Any, observations: Any
    ) -> tuple[Any, Any]:
        """The copies, where an episode ended at the start of the next one."""

        def begin(carry: Any) -> Any:
            first = self._take(queue, queue.taken)
            return where(ended, first, carry[0]), jnp.array(False)

        # Often no episode ends, and then no state is moved: a loop of at most one turn.
        carry = ((states, observations), jnp.any(ended))
        return jax.lax.while_loop(lambda carry: carry[1], begin, carry)[0]

    def _take(self, queue: Queue, episodes: Int[Array, " B"]) -> tuple[Any, Any]:
        """First states and observations of one waiting episode of each copy."""
        slots = jnp.arange(self.num_envs) * self.queue_length + episodes % self.queue_length
        return jax.tree.map(
            lambda x: x.at[slots].get(mode="promise_in_bounds"),
            (queue.states, queue.observations),
        )

    def _refill(self, env_state: EnvState, needed: Bool[Array, " B"]) -> Queue:
        """Generate batches of episodes until no copy that needs one has an empty queue."""

        def is_dry(queue: Queue) -> Bool[Array, ""]:
            return jnp.any(needed & (queue.taken == queue.generated))

        def generate(queue: Queue) -> Queue:
            # All free places, those of the emptiest queues first.
            free = self.queue_length - (queue.generated - queue.taken)
            ahead = jnp.arange(self.queue_length)[None, :]
            is_free = ahead < free[:, None]
            urgency = jnp.where(is_free, ahead - free[:, None], 1).ravel()
            chosen = jnp.argsort(urgency, stable=True)[: self.batch_size]
            copies, place = jnp.divmod(chosen, self.queue_length)
            episodes = queue.generated[copies] + place
            indices = env_state.indices[copies]
            states, observations = self._generate(env_state.key, indices, episodes)
            useful = is_free.ravel()[chosen]
            slots = copies * self.queue_length + episodes % self.queue_length
            slots = jnp.where(useful, slots, self.num_envs * self.queue_length)

            def put(ring: Array, fresh: Array) -> Array:
                return ring.at[slots].set(fresh, mode="drop")

            return Queue(
                states=jax.tree.map(put, queue.states, states),
                observations=jax.tree.map(put, queue.observations, observations),
                generated=queue.generated.at[copies].add(useful.astype(int)),
                taken=queue.taken,
            )

        # A loop of no turns, not a `cond`: under `vmap` a `cond` would run both branches.
        return jax.lax.while_loop(is_dry, generate, env_state.queue)


def _fitting_queue_length(num_envs: int, episode: Any) -> int:
    """How many episodes of that size may wait for each copy."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(episode))
    return max(1, min(_MOST_EPISODES, _MOST_BYTES // max(1, num_envs * size)))
