"""Actor-critics in Equinox: built from an environment's specs, or made for mazes.

Each maps one observation to `(policy outputs, value)`. `jax.vmap` makes a batch.
"""

from collections.abc import Callable

from jumanji.environments import Maze

from ..environments import Environment
from ..mazes import FixedWallsGenerator
from .layers import GridConv as GridConv
from .layers import Heads as Heads
from .layers import SetAttention as SetAttention
from .layers import orthogonal_linear as orthogonal_linear
from .layout import Layout as Layout
from .layout import read_layout as read_layout
from .mazes import BlogMazeNetwork as BlogMazeNetwork
from .mazes import NetworkFactory as NetworkFactory
from .mazes import PlanningMazeNetwork as PlanningMazeNetwork
from .mazes import make_blog_network as make_blog_network
from .mazes import make_planning_network as make_planning_network
from .mazes import maze_planes as maze_planes
from .spec import SpecNetwork as SpecNetwork
from .spec import make_spec_network as make_spec_network


def make_default_network(environment: Environment) -> NetworkFactory:
    """What suits an environment: a planner where mazes change, else what the specs ask for.

    Args:
        environment: with Jumanji's specs.

    Returns:
        From a key to the network.

    Raises:
        ValueError: the observation or the action cannot be served.

    Example:
        >>> import jax, jumanji
        >>> type(make_default_network(jumanji.make("Maze-v0"))(jax.random.key(0))).__name__
        'PlanningMazeNetwork'
        >>> type(make_default_network(jumanji.make("Snake-v1"))(jax.random.key(0))).__name__
        'SpecNetwork'
    """
    # Where the walls never change there is nothing to plan, and a plain network is faster.
    if isinstance(environment, Maze) and not isinstance(environment.generator, FixedWallsGenerator):
        return make_planning_network(environment)
    return make_spec_network(environment)


NETWORKS: dict[str, Callable[[Environment], NetworkFactory]] = {
    "auto": make_default_network,
    "spec": make_spec_network,
    "planning": make_planning_network,
    "blog": make_blog_network,
}
