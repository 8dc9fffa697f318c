"""Many copies of one environment side by side, whose next episodes are ready before need.

Under `jax.vmap`, an automatic reset inside an environment's step generates a new instance
for every copy at every step and throws nearly all of them away. Here each copy has a short
queue of episodes that were generated in batches, and takes the next one when its episode
ends. Episode `e` of copy `i` depends on the key, on `i` and on `e`, and on nothing else: a
trajectory does not change with the length of the queues, the size of the batches, the
number of copies beside it, or the device it runs on.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped

from .scan import where


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
        key: what all episodes derive from; never consumed.
    """

    states: PyTree[Shaped[Array, "B ..."]]
    observations: PyTree[Shaped[Array, "B ..."]]
    episode_returns: Float[Array, " B"]
    episode_lengths: Int[Array, " B"]
    queue: Queue
    key: PRNGKeyArray


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
        queue_length: int = 16,
        first_index: int = 0,
    ) -> None:
        """Describe the copies; nothing is generated yet.

        Args:
            environment: one environment, without automatic reset.
            num_envs: how many copies, `B`.
            queue_length: how many coming episodes to hold for each copy, `Q`. It changes
                memory and speed, no trajectory.
            first_index: index of the first copy, where these are a part of a larger whole.

        Raises:
            ValueError: a count is below 1.
        """
        if num_envs < 1 or queue_length < 1:
            raise ValueError(
                f"VectorEnvironment needs at least one copy and a queue of at least one episode; "
                f"got num_envs={num_envs}, queue_length={queue_length}."
            )
        self.environment = environment
        self.num_envs = num_envs
        self.queue_length = queue_length
        self.first_index = first_index

    def init(self, key: PRNGKeyArray) -> EnvState:
        """Begin the first episode of every copy.

        Args:
            key: consumed; all episodes to come derive from it.

        Returns:
            The copies at their first states, with full queues.
        """
        copies = jnp.repeat(jnp.arange(self.num_envs), self.queue_length)
        episodes = jnp.tile(jnp.arange(self.queue_length), self.num_envs)
        states, observations = self._generate(key, copies, episodes)
        full = jnp.full(self.num_envs, self.queue_length)
        queue = Queue(states, observations, generated=full, taken=jnp.zeros_like(full))
        queue, states, observations = self._take(queue, jnp.ones(self.num_envs, bool))
        return EnvState(
            states=states,
            observations=observations,
            episode_returns=jnp.zeros(self.num_envs),
            episode_lengths=jnp.zeros(self.num_envs, jnp.int32),
            queue=queue,
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
        states, timesteps = jax.vmap(self.environment.step)(env_state.states, actions)
        # Agents of a team may have a reward and a discount each: the team earns the sum,
        # and goes on as long as one of them does.
        rewards = timesteps.reward.reshape(self.num_envs, -1).sum(axis=1).astype(jnp.float32)
        discounts = timesteps.discount.reshape(self.num_envs, -1).max(axis=1).astype(jnp.float32)
        ended = timesteps.last()
        transition = Transition(
            rewards=rewards,
            discounts=discounts,
            terminated=ended & (discounts == 0),
            truncated=ended & (discounts != 0),
            next_observations=timesteps.observation,
            episode_returns=env_state.episode_returns + rewards,
            episode_lengths=env_state.episode_lengths + 1,
            extras=timesteps.extras,
        )
        queue = self._refill(env_state.queue, env_state.key, ended)
        queue, first_states, first_observations = self._take(queue, ended)
        env_state = EnvState(
            states=where(ended, first_states, states),
            observations=where(ended, first_observations, timesteps.observation),
            episode_returns=jnp.where(ended, 0, transition.episode_returns),
            episode_lengths=jnp.where(ended, 0, transition.episode_lengths),
            queue=queue,
            key=env_state.key,
        )
        return env_state, transition

    def _generate(self, key: PRNGKeyArray, copies: Array, episodes: Array) -> tuple[Any, Any]:
        """First states and observations of some episodes of some copies."""

        def generate_one(copy: Array, episode: Array) -> tuple[Any, Any]:
            copy_key = jax.random.fold_in(key, self.first_index + copy)
            state, timestep = self.environment.reset(jax.random.fold_in(copy_key, episode))
            return state, timestep.observation

        return jax.vmap(generate_one)(copies, episodes)

    def _take(self, queue: Queue, needed: Bool[Array, " B"]) -> tuple[Queue, Any, Any]:
        """The next episode of every copy, gone from the queue where it was needed."""
        slots = jnp.arange(self.num_envs) * self.queue_length + queue.taken % self.queue_length
        states, observations = jax.tree.map(
            lambda x: x.at[slots].get(mode="promise_in_bounds"), (queue.states, queue.observations)
        )
        return queue._replace(taken=queue.taken + needed), states, observations

    def _refill(self, queue: Queue, key: PRNGKeyArray, needed: Bool[Array, " B"]) -> Queue:
        """Generate batches of episodes until no copy that needs one has an empty queue."""

        def is_dry(queue: Queue) -> Bool[Array, ""]:
            return jnp.any(needed & (queue.taken == queue.generated))

        def generate(queue: Queue) -> Queue:
            # All free places, those of the emptiest queues first; a batch fills a quarter of all
            # there are: episodes made side by side are cheaper, but all of a batch wait for one.
            free = self.queue_length - (queue.generated - queue.taken)
            ahead = jnp.arange(self.queue_length)[None, :]
            is_free = ahead < free[:, None]
            urgency = jnp.where(is_free, ahead - free[:, None], 1).ravel()
            chosen = jnp.argsort(urgency, stable=True)[:batch_size]
            copies, place = jnp.divmod(chosen, self.queue_length)
            episodes = queue.generated[copies] + place
            states, observations = self._generate(key, copies, episodes)
            useful = is_free.ravel()[chosen]
            slots = copies * self.queue_length + episodes % self.queue_length
            slots = jnp.where(useful, slots, self.num_envs * self.queue_length)

            def put(ring: Array, fresh: Array) -> Array:
                return ring.at[slots].set(fresh, mode="drop")

            return Queue(
                states=jax.tree.map(put, queue.states, states),
                observations=jax.tree.map(put, queue.observations, observations),
                generated=queue.generated.at[copies].add(useful),
                taken=queue.taken,
            )

        batch_size = max(1, self.num_envs * self.queue_length // 4)
        # A loop of no turns, not a `cond`: under `vmap` a `cond` would run both branches.
        return jax.lax.while_loop(is_dry, generate, queue)
