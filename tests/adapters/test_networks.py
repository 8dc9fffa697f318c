"""Networks: what the layers compute, and what the heads give."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji import specs
from jumanji.environments import Maze
from jumanji.environments.routing.maze.generator import RandomGenerator
from jumanji.environments.routing.maze.types import Observation as MazeObservation
from jumanji.environments.routing.maze.types import Position

from vernal.adapters.actions import make_action_codec
from vernal.adapters.evaluation import instance_keys, play
from vernal.adapters.mazes import FixedWallsGenerator, shortest_path_length
from vernal.adapters.networks import (
    NETWORKS,
    BlogMazeNetwork,
    GridConv,
    Heads,
    PlanningMazeNetwork,
    SpecNetwork,
    make_spec_network,
    maze_planes,
    orthogonal_linear,
)

from .environments_for_tests import (
    OFFLINE,
    CountingEnvironment,
    SpecsOnly,
    WithEmptyLeaf,
    make_once,
    quick_jit,
)

KEY = jax.random.key(0)
MAZE = make_once("Maze-v0")


def convolve(conv, grid):
    """The same window by JAX's own convolution."""
    dimensions = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(
        grid[None], conv.weight, (conv.stride, conv.stride), "VALID", dimension_numbers=dimensions
    )[0]
    return out + jnp.broadcast_to(conv.bias, out.shape)


grids = pytest.mark.parametrize(
    ("shape", "size"),
    [((10, 10, 3), 3), ((3, 5, 1), 3), ((4, 6, 2), 2), ((5, 20, 2), 3), ((2, 3, 4), 1)],
)


@grids
def test_grid_conv_equals_jax_convolution(shape, size):
    conv, grid = GridConv(shape[-1], 5, size, key=KEY), jax.random.normal(KEY, shape)
    both = jax.jit(lambda grid: (conv(grid), convolve(conv, grid)))(grid)
    np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(10, 10, 3), (7, 20, 2)])
def test_grid_conv_with_a_stride_equals_jax_convolution(shape):
    conv, grid = GridConv(shape[-1], 5, stride=2, key=KEY), jax.random.normal(KEY, shape)
    both = jax.jit(lambda grid: (conv(grid), convolve(conv, grid)))(grid)
    np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-5)


@grids
def test_gradient_of_grid_conv_equals_that_of_jax_convolution(shape, size):
    conv, grid = GridConv(shape[-1], 5, size, key=KEY), jax.random.normal(KEY, shape)

    def gradient(apply):
        return jax.jit(jax.grad(lambda args: jnp.sum(jnp.sin(apply(*args)))))((conv, grid))

    expected = gradient(convolve)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        gradient(lambda conv, grid: conv(grid)),
        expected,
    )


@pytest.mark.parametrize(("in_size", "out_size"), [(8, 3), (5, 5), (3, 8)])
def test_orthogonal_linear_has_orthogonal_weights_of_the_given_scale(in_size, out_size):
    weight = np.asarray(orthogonal_linear(in_size, out_size, 0.5, key=KEY).weight)
    assert weight.shape == (out_size, in_size)
    gram = weight @ weight.T if out_size <= in_size else weight.T @ weight
    np.testing.assert_allclose(gram, 0.25 * np.eye(min(in_size, out_size)), atol=1e-6)


def test_orthogonal_linear_with_a_scalar_output_has_a_row_of_the_given_length():
    layer = orthogonal_linear(8, "scalar", 0.01, key=KEY)
    assert layer(jnp.ones(8)).shape == ()
    assert np.linalg.norm(layer.weight) == pytest.approx(0.01)


@pytest.mark.parametrize("out_size", [3, "scalar"])
def test_orthogonal_linear_has_zero_biases(out_size):
    layer = orthogonal_linear(8, out_size, 0.01, key=KEY)
    assert layer.bias is not None
    assert not layer.bias.any()


def test_heads_are_nearly_uniform_and_nearly_0_at_first():
    run = jax.jit(lambda key: Heads(64, (3, 4), key=key)(jax.random.normal(key, (64,))))
    outputs, value = run(KEY)
    assert outputs.shape == (3, 4)
    assert jnp.abs(outputs).max() < 0.05
    assert jnp.abs(value) < 0.05


def test_a_spec_network_for_an_action_of_no_kind_is_refused_at_once():
    environment = SpecsOnly(lambda: specs.Array((2,), float))
    with pytest.raises(ValueError, match=r"action spec .* cannot be served"):
        make_spec_network(environment)


@pytest.mark.parametrize("name", OFFLINE)
def test_spec_network_gives_the_codecs_outputs_and_one_value(name):
    environment = make_once(name)

    def run(key):
        _, timestep = environment.reset(key)
        return make_spec_network(environment)(key)(timestep.observation)

    with jax.numpy_rank_promotion("allow"):  # inside some of Jumanji's environments
        outputs, value = jax.eval_shape(run, KEY)
    assert outputs.shape == make_action_codec(environment).output_shape
    assert value.shape == ()


MAZES = 12


@functools.cache
def begin_mazes():
    """Shortest ways of the instances that `play` meets, and their first observations."""
    states, timesteps = jax.jit(jax.vmap(MAZE.reset))(instance_keys(KEY, MAZES))
    cells = np.stack([*states.agent_position, *states.target_position], axis=1)
    distances = [
        shortest_path_length(walls, cell[:2], cell[2:])
        for walls, cell in zip(np.asarray(states.walls), cells.tolist(), strict=True)
    ]
    return np.array(distances), timesteps.observation


@functools.cache
def make_network(name):
    return NETWORKS[name](MAZE)(KEY)


@pytest.mark.parametrize("name", ["spec", "blog", "planning"])
def test_a_batch_under_jit_and_vmap_equals_state_by_state(name):
    network, (_, observations) = make_network(name), begin_mazes()
    arrays, static = eqx.partition(network, eqx.is_array)
    alone = jax.jit(lambda arrays, observation: eqx.combine(arrays, static)(observation))
    together = jax.jit(jax.vmap(alone, (None, 0)))(arrays, observations)
    for n in range(2):
        row = jax.tree.map(lambda x: x[n], observations)  # noqa: B023
        for whole, part in zip(together, alone(arrays, row), strict=True):
            np.testing.assert_allclose(whole[n], part, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["spec", "blog", "planning"])
def test_gradient_reaches_every_weight_and_is_finite(name):
    network, (_, observations) = make_network(name), begin_mazes()

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(network):
        outputs, values = jax.vmap(network)(observations)
        return jnp.sum(outputs**2) + jnp.sum((values - 1) ** 2)

    for path, leaf in jax.tree.leaves_with_path(gradient(network)):
        assert jnp.isfinite(leaf).all()
        assert (leaf != 0).any() != ("statistics" in jax.tree_util.keystr(path))


def test_the_blogs_network_has_the_sizes_of_the_post():
    network = BlogMazeNetwork(key=KEY)
    shapes = [x.shape for x in jax.tree.leaves(eqx.filter(network, eqx.is_array))]
    assert shapes == [(3, 3, 3, 1), (1,), (64, 64), (64,), (4, 64), (4,), (1, 64), (1,)]


def test_maze_planes_are_walls_agent_and_target():
    walls = np.zeros((10, 10), bool)
    walls[4, 5] = walls[0, 9] = True
    row, col, up, left = map(jnp.asarray, (3, 7, 9, 0))
    observation = MazeObservation(
        agent_position=Position(row, col),
        target_position=Position(up, left),
        walls=jnp.asarray(walls),
        step_count=jnp.asarray(0),
        action_mask=jnp.ones(4, bool),
    )
    planes = maze_planes(observation)
    np.testing.assert_array_equal(planes[..., 0], walls)
    assert np.argwhere(planes[..., 1]).tolist() == [[3, 7]]
    assert np.argwhere(planes[..., 2]).tolist() == [[9, 0]]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


SHARE = sigmoid(3.0)


def make_planner(plan_steps=99):
    """Weights by hand: a goal is worth 1, an open cell passes on `SHARE`, a wall nothing.

    The policy prefers the move to the best neighbour, and the value is the worth at the agent.
    """
    network = PlanningMazeNetwork(key=KEY, channels=1, width=5, plan_steps=plan_steps)
    hidden = np.zeros((5, 6))
    hidden[range(5), range(5)] = 1  # the steps to the four neighbours, then the worth here
    policy, value = 100 * np.eye(4, 5), np.eye(1, 5, 4)
    weights = {  # of walls and target, ten times smaller than the logits they make
        "worth": ([[0.0, 6.0]], [-3.0]),
        "share": ([[-4.0, 0.0]], [0.3]),
        "hidden": (hidden, [3.0] * 4 + [0.0]),
        "policy": (policy, [0.0] * 4),
        "value": (value, [0.0]),
    }

    def parts(network):
        layers = {name: getattr(network, name) for name in ("worth", "share", "hidden")}
        layers |= {name: getattr(network.heads, name) for name in ("policy", "value")}
        return [part for name in weights for part in (layers[name].weight, layers[name].bias)]

    arrays = [jnp.asarray(x, jnp.float32) for pair in weights.values() for x in pair]
    return eqx.tree_at(parts, network, arrays)


def test_planned_value_is_the_share_to_the_power_of_the_distance():
    distances, observations = begin_mazes()
    _, values = jax.jit(jax.vmap(make_planner()))(observations)
    np.testing.assert_allclose(values, SHARE**distances, rtol=1e-3)


def test_planned_greedy_moves_walk_the_shortest_way():
    codec, planner = make_action_codec(MAZE), make_planner()

    def act(key, observation):
        del key
        outputs, _ = planner(observation)
        return codec.distribution(outputs, codec.legal(observation)).mode()

    distances, _ = begin_mazes()
    outcome = jax.jit(lambda: play(MAZE, act, KEY, episodes=MAZES))()
    np.testing.assert_array_equal(outcome.lengths, distances)
    assert (outcome.returns == 1).all()
    assert max(distances) > 10


def test_a_goal_beyond_the_planned_steps_is_not_seen():
    walls = np.ones((10, 10), bool)
    walls[0] = False
    corridor = Maze(FixedWallsGenerator(walls, [(0, 0)], [(0, 9)]))

    @jax.jit
    def look():
        _, timestep = corridor.reset(KEY)
        return [make_planner(plan_steps=n)(timestep.observation)[1] for n in (8, 9)]

    too_short, just_enough = look()
    assert too_short < 1e-6
    assert just_enough == pytest.approx(SHARE**9, rel=1e-4)


SMALL_MAZE = Maze(RandomGenerator(5, 5))


@pytest.mark.parametrize(
    ("network", "environment", "wanted"),
    [
        ("blog", "Snake-v1", "mazes only"),
        ("planning", "Snake-v1", "mazes only"),
        ("blog", SMALL_MAZE, "mazes of 10 x 10 cells only"),
    ],
)
def test_networks_for_mazes_refuse_other_environments(network, environment, wanted):
    environment = make_once(environment) if isinstance(environment, str) else environment
    with pytest.raises(ValueError, match=f"the network '{network}' is for {wanted}"):
        NETWORKS[network](environment)


def test_a_planner_plans_as_many_steps_as_its_maze_asks_for():
    network = NETWORKS["planning"](SMALL_MAZE)(KEY)
    assert isinstance(network, PlanningMazeNetwork)
    assert network.plan_steps == 2 * (5 + 5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Maze-v0", PlanningMazeNetwork), ("maze-medium", SpecNetwork), ("Snake-v1", SpecNetwork)],
)
def test_the_network_chosen_by_itself_plans_where_walls_change(name, kind):
    network = eqx.filter_eval_shape(NETWORKS["auto"](make_once(name)), KEY)
    assert type(network) is kind


def test_a_width_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="set_width is 30; give a multiple of 4"):
        SpecNetwork(MAZE, set_width=30, key=KEY)


@functools.cache
def count_in(dtype):
    """Outputs and value of a network with weights of a dtype, and the network after statistics."""
    environment = CountingEnvironment()

    def run(key):
        network = make_spec_network(environment)(key)
        network = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_array(x) else x, network)
        observations = jax.vmap(lambda k: environment.reset(k)[1].observation)(
            jax.random.split(key, 8)
        )
        after = network.with_statistics_of(observations)
        return jax.vmap(after)(observations), eqx.filter(after, eqx.is_array)

    return quick_jit(run)(KEY)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_network_of_half_precision_keeps_its_statistics_and_says_nearly_the_same(dtype):
    said, network = count_in(dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(network)} == {jnp.dtype(dtype)}
    exact, reference = count_in(jnp.float32)
    for a, b in ((said, exact), (network.statistics, reference.statistics)):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x.astype(float), y, rtol=0.02, atol=2e-3), a, b
        )


def test_a_leaf_without_elements_changes_no_network():
    environment = WithEmptyLeaf()
    _, timestep = environment.reset(KEY)
    network = make_spec_network(environment)(KEY)
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), timestep.observation)
    after = network.with_statistics_of(batch)
    assert after.statistics == {}
    outputs, value = after(timestep.observation)
    assert jnp.isfinite(outputs).all()
    assert jnp.isfinite(value)
