"""The command `vernal`: each subcommand is one call that a script can make too."""

import dataclasses
import itertools
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import tyro
from rich.table import Table
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction

from . import hosts, launch
from .actions import make_action_codec
from .agents.agent import Agent
from .agents.alphazero import AlphaZeroConfig
from .agents.ppo import PPOConfig
from .evaluation import MOST_STEPS, Act, Episodes, make_random_policy, play, summarise
from .mesh import count_devices
from .networks import make_default_network
from .options import REQUIRED, parse, split_arguments
from .output import make_console
from .registry import environment_names, find_options, make_environment
from .runs import training
from .runs.animation import animate, record_states, require_film
from .runs.config import AGENTS, RunConfig
from .runs.curve import draw_curve
from .runs.folder import RunFolder, next_free_path
from .runs.progress import progress_line
from .runs.summary import describe_value, read_curves
from .runs.summary import summarise as summarise_curves

# As --env-arg a=1 b=2, and as --env-arg a=1 --env-arg b=2.
EnvArgs = UseAppendAction[tuple[tuple[str, ...], ...]]
Vary = EnvArgs
Count = int | Literal["all"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; faults of input end in one sentence and an exit code.

    Args:
        arguments: words after `vernal`; the process's own by default.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    agents = {
        "train": {"ppo": train_ppo, "alphazero": train_alphazero},
        "sweep": {"ppo": sweep_ppo, "alphazero": sweep_alphazero},
    }
    commands = {
        "train": train,
        "sweep": sweep,
        "resume": resume,
        "evaluate": evaluate,
        "watch": watch,
        "plot": plot,
        "envs": envs,
    }
    prog = "vernal"
    if arguments[:1] and arguments[0] in agents:
        prog, commands = f"vernal {arguments[0]}", agents[arguments[0]]
        arguments = arguments[1:]
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands,
            prog=prog,
            description="Reinforcement learning for people who write JAX with Equinox.",
            args=arguments,
        )
    except (ValueError, TypeError, OSError) as error:
        print(f"vernal: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt as interrupt:
        print(f"vernal: {interrupt}" if interrupt.args else "vernal: stopped.", file=sys.stderr)
        sys.exit(_PREEMPTED if isinstance(interrupt, training.Preempted) else 130)


# After SIGTERM, with the state saved: "temporary failure, try again" of sysexits.h.
_PREEMPTED = 75


def train() -> None:
    """Train an agent, or several seeds of it, as in: vernal train ppo maze-medium."""


def sweep() -> None:
    """Train with several settings, as in: vernal sweep ppo maze-easy --vary gamma=0.9,0.99."""


_HOSTS, _SAFETY = launch.Hosts(), training.Safety()


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """What a run has beside its agent's own settings."""

    env_arg: EnvArgs = ()
    """Options of the environment as NAME=VALUE; `vernal envs ENVIRONMENT` lists them."""
    network: str = "auto"
    """`spec` is built from the environment's specs; `planning` and `blog` are for mazes; `auto`
    is `planning` where mazes change, else `spec`."""
    steps: int = 819_200
    """Environment steps for each agent to train for, rounded up to whole iterations."""
    seed: int = 0
    """Whole number from which all others are drawn: the same seed, the same run."""
    seeds: int = 1
    """How many agents to train at once, with this seed and those that follow it."""
    at_once: int = 0
    """How many of several agents to step side by side on each device, the others then; 0 for all
    of them, or for one after the other on a CPU, which is faster there unless networks are tiny."""
    devices: Count = 1
    """How many devices to spread environments or agents over, or `all`. A CPU counts as that many.
    Of several processes always all."""
    folder: Path | None = None
    """Folder of the run, not there yet; by default runs/ENVIRONMENT/AGENT/seed-SEED, or the same
    with -2 and so on."""
    hosts: OmitArgPrefixes[launch.Hosts] = _HOSTS
    safety: OmitArgPrefixes[training.Safety] = _SAFETY


# Settings as they were typed. `_train` checks them: in here, what a check says would reach the
# user wrapped in the parser's own words.


@dataclasses.dataclass(frozen=True)
class TypedPPOConfig(PPOConfig):
    """Settings of PPO."""

    def __post_init__(self) -> None:
        """Check nothing yet."""


@dataclasses.dataclass(frozen=True)
class TypedAlphaZeroConfig(AlphaZeroConfig):
    """Settings of AlphaZero."""

    def __post_init__(self) -> None:
        """Check nothing yet."""


_PPO, _ALPHAZERO, _OPTIONS = TypedPPOConfig(), TypedAlphaZeroConfig(), TrainOptions()


def train_ppo(
    environment: Positional[str],
    config: OmitArgPrefixes[TypedPPOConfig] = _PPO,
    run: OmitArgPrefixes[TrainOptions] = _OPTIONS,
) -> None:
    """Train an agent with proximal policy optimisation.

    Args:
        environment: name of the environment; `vernal envs` lists all. One of your own is
            MODULE:CALLABLE, a class or a function that returns it.
        config: settings of PPO.
        run: what is not the agent's own.
    """
    _train("ppo", environment, config, run)


def train_alphazero(
    environment: Positional[str],
    config: OmitArgPrefixes[TypedAlphaZeroConfig] = _ALPHAZERO,
    run: OmitArgPrefixes[TrainOptions] = _OPTIONS,
) -> None:
    """Train an agent with AlphaZero: tree search in the environment's own simulator.

    Of the numbers that it reports, `policy` is the cross-entropy of the network to the search,
    which ends at the search's own entropy, and `kl` is what it is above that.

    Args:
        environment: name of the environment; `vernal envs` lists all. One of your own is
            MODULE:CALLABLE, a class or a function that returns it.
        config: settings of AlphaZero.
        run: what is not the agent's own.
    """
    _train("alphazero", environment, config, run)


def sweep_ppo(
    environment: Positional[str],
    vary: Vary = (),
    config: OmitArgPrefixes[TypedPPOConfig] = _PPO,
    run: OmitArgPrefixes[TrainOptions] = _OPTIONS,
) -> None:
    """Train agents with proximal policy optimisation, one for each combination of settings.

    Args:
        environment: as for `vernal train`.
        vary: settings to try, as NAME=VALUE,VALUE,...; each combination with every seed.
        config: settings of PPO that are the same for all.
        run: what is not the agent's own.
    """
    _sweep("ppo", environment, config, run, vary)


def sweep_alphazero(
    environment: Positional[str],
    vary: Vary = (),
    config: OmitArgPrefixes[TypedAlphaZeroConfig] = _ALPHAZERO,
    run: OmitArgPrefixes[TrainOptions] = _OPTIONS,
) -> None:
    """Train agents with AlphaZero, one for each combination of settings.

    Args:
        environment: as for `vernal train`.
        vary: settings to try, as NAME=VALUE,VALUE,...; each combination with every seed.
        config: settings of AlphaZero that are the same for all.
        run: what is not the agent's own.
    """
    _sweep("alphazero", environment, config, run, vary)


def _train(
    agent: str, environment: str, settings: Any, options: TrainOptions, vary: Vary = ()
) -> None:
    run = RunConfig(
        agent,
        environment,
        options.network,
        options.seed,
        options.steps,
        AGENTS[agent].settings(**dataclasses.asdict(settings)),
        split_arguments(itertools.chain(*options.env_arg)),
        seeds=options.seeds,
        vary=_parse_varied(vary),
        devices=count_devices(options.devices),
        at_once=options.at_once,
    )
    with progress_line() as report:
        folder = training.start(run, options.folder, report, options.safety)
    _say_what_came(folder)


def _sweep(agent: str, environment: str, settings: Any, options: TrainOptions, vary: Vary) -> None:
    if not any(vary):
        raise ValueError(
            "a sweep varies something; name it, as in --vary learning_rate=1e-4,3e-4,1e-3."
        )
    _train(agent, environment, settings, options, vary)


def _parse_varied(vary: Vary) -> dict[str, list[float]]:
    texts = split_arguments(itertools.chain(*vary))
    return {
        name: [parse(name, value, float) for value in text.split(",")]
        for name, text in texts.items()
    }


def resume(
    run: Positional[Path],
    *,
    steps: int | None = None,
    devices: Count | None = None,
    any_versions: bool = False,
    trust: bool = False,
    hosts: OmitArgPrefixes[launch.Hosts] = _HOSTS,
    safety: OmitArgPrefixes[training.Safety] = _SAFETY,
) -> None:
    """Go on with a run from its newest checkpoint.

    Args:
        run: folder of the run.
        steps: environment steps to train for in all; as the run was started by default.
        devices: how many to train on, or `all`; as many as before by default.
        any_versions: go on although libraries have other versions than those it was trained
            with, or JAX other options: it will not be the same run to the last bit.
        trust: import code from outside of vernal that the run's folder names, as an environment of
            your own: whoever wrote the folder chose it.
        hosts: of the run.
        safety: of the run.
    """
    del hosts  # `launch` has joined them.
    is_told = devices is not None or jax.process_count() > 1
    count = count_devices(devices or 1) if is_told else None
    with progress_line() as report:
        folder = training.resume(
            RunFolder(run),
            report,
            safety,
            steps=steps,
            devices=count,
            any_versions=any_versions,
            trust=trust,
        )
    _say_what_came(folder)


def evaluate(
    run: Positional[Path],
    *,
    episodes: int = 256,
    max_steps: int = MOST_STEPS,
    seed: int = 1,
    best: bool = False,
    member: int | None = None,
    simulations: UseAppendAction[tuple[tuple[int, ...], ...]] = (),
    trust: bool = False,
) -> None:
    """Measure an agent over whole episodes, beside a random policy.

    Args:
        run: folder of the run.
        episodes: how many, of each policy.
        max_steps: steps after which an episode is left; it counts with what it had by then.
        seed: of the instances and the sampling; all policies meet the same instances.
        best: the checkpoint with the best mean return in place of the newest; one is saved
            every 30 seconds and at the end. Of several agents it is their mean that counts.
        member: which of several agents, from 0, in the order of the table that training prints
            and then of seeds; by default the one with the highest mean return at last.
        simulations: for AlphaZero, how many states to search before each step; several numbers
            are several rows. By default as many as it was trained with.
        trust: import code from outside of vernal that the run names, as for `vernal resume`.
    """
    searched = tuple(itertools.chain(*simulations))
    _require_counts(episodes=[episodes], max_steps=[max_steps], simulations=searched)
    _require_seed(seed)
    config, environment, agent, state = training.load(
        RunFolder(run), best=best, member=member, trust=trust
    )

    def played(act: Act, *, sees_states: bool = False) -> Callable[[Any], Episodes]:
        return lambda key: play(
            environment, act, key, episodes, max_steps=max_steps, sees_states=sees_states
        )

    policies = {
        "greedy": played(lambda key, observation: agent.act(state, None, observation)),
        "sampled": played(lambda key, observation: agent.act(state, key, observation)),
        "random legal": played(make_random_policy(environment)),
    }
    for count, plan in _planners(config, agent, state, searched).items():
        policies[f"search {count}"] = played(plan, sees_states=True)
    options = [f"{name}={value}" for name, value in config.environment_arguments.items()]
    name = " ".join([config.environment, *options])
    summaries = {}
    for policy, run_policy in policies.items():
        outcome = jax.jit(run_policy)(jax.random.key(seed))
        summaries[policy] = summarise(environment, jax.random.key(seed), outcome)
    columns = list(dict.fromkeys(itertools.chain(*summaries.values())))
    table = Table(title=f"{name}, {episodes} episodes, mean ± 95 % interval")
    table.add_column("policy", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for policy, summary in summaries.items():
        table.add_row(policy, *(summary.get(column, "") for column in columns))
    make_console().print(table)
    if "cut" in columns:
        print(f"cut: left after {max_steps:,} steps; --max-steps allows more.")


def _require_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; give a number from 0 to {2**32 - 1:,}.")


def _require_counts(**given: Iterable[int]) -> None:
    for name, counts in given.items():
        for count in counts:
            if count < 1:
                raise ValueError(f"{name} is {count}; give at least 1.")


def _planners(
    config: RunConfig, agent: Agent, state: Any, simulations: tuple[int, ...]
) -> dict[int, Act]:
    """Policies that search, by their number of simulations; as trained with by default."""
    plan = agent.plan
    if plan is None:
        if simulations:
            raise ValueError(f"{config.agent} does not search; leave --simulations away.")
        return {}

    def make_act(count: int) -> Act:
        return lambda key, observation, environment_state: plan(
            state, key, environment_state, observation, simulations=count
        )

    return {count: make_act(count) for count in simulations or (config.settings.simulations,)}


def watch(
    run: Positional[Path],
    *,
    episodes: int = 3,
    seed: int = 1,
    max_steps: int = 200,
    frames_per_second: int = 8,
    output: Path | None = None,
    sampled: bool = False,
    member: int | None = None,
    trust: bool = False,
) -> None:
    """Write an animation of an agent.

    Args:
        run: folder of the run.
        episodes: how many to show, one after the other.
        seed: of the instances and the sampling.
        max_steps: steps after which an episode is left.
        frames_per_second: speed.
        output: file that ends in .gif or .mp4 (which takes ffmpeg); by default agent.gif in the
            run's folder, or agent-2.gif and so on.
        sampled: whether actions are sampled; the most probable ones by default.
        member: which of several agents, as for `vernal evaluate`.
        trust: import code from outside of vernal that the run names, as for `vernal resume`.
    """
    _require_counts(
        episodes=[episodes], max_steps=[max_steps], frames_per_second=[frames_per_second]
    )
    _require_seed(seed)
    folder = RunFolder(run)
    path = next_free_path(folder.path / "agent.gif") if output is None else output
    require_film(path)
    config, environment, agent, state = training.load(folder, member=member, trust=trust)
    if not hasattr(environment, "animate"):
        raise ValueError(
            f"{config.environment} has no method animate(states, interval) that could draw it."
        )

    def act(key: Any, observation: Any) -> Any:
        return agent.act(state, key if sampled else None, observation)

    states = record_states(
        environment, act, jax.random.key(seed), episodes=episodes, max_steps=max_steps
    )
    animate(environment, states, path, frames_per_second=frames_per_second)
    print(f"animation of {episodes} episodes: {path}")


def plot(runs: Positional[list[Path]], *, output: Path | None = None) -> None:
    """Draw the learning curves of several runs into one picture.

    Args:
        runs: folders of the runs.
        output: picture to write; curve.png here by default, or curve-2.png and so on.
    """
    if not runs:
        raise ValueError("name the runs to plot, as in: vernal plot runs/maze-medium/ppo/seed-0.")
    for run in runs:
        RunFolder(run).read_config()
    path = next_free_path(Path("curve.png")) if output is None else output
    draw_curve([RunFolder(run) for run in runs], path)
    print(f"curves of {len(runs)} runs: {path}")


def envs(environment: Positional[str | None] = None, *, env_arg: EnvArgs = ()) -> None:
    """List every environment, and whether PPO can train on it here; or one with its options.

    Args:
        environment: the one whose options to list; all environments by default.
        env_arg: options as NAME=VALUE: a chosen generator has options of its own.
    """
    arguments = split_arguments(itertools.chain(*env_arg))
    if environment is not None:
        _describe_environment(environment, arguments)
    elif arguments:
        raise ValueError("options are those of one environment; name it before --env-arg.")
    else:
        _list_environments()


def _list_environments() -> None:
    table = Table("environment", "actions", "works here")
    table.columns[0].no_wrap = True
    for name in environment_names():
        table.add_row(name, *_try_out(name, {}))
    make_console().print(table)
    print("options of one, as of Maze-v0: vernal envs Maze-v0")


def _describe_environment(name: str, arguments: dict[str, str]) -> None:
    options = find_options(name, arguments)
    table = Table("option", "default", "or")
    table.columns[0].no_wrap = True
    for option, (_, default) in options.own.items():
        table.add_row(option, _describe_default(default))
    for part, (classes, chosen, inner) in options.parts.items():
        others = [kind for kind in classes if classes[kind] is not chosen]
        table.add_row(part, chosen.__name__ if chosen else "its own", ", ".join(others))
        for option, (_, default) in inner.items():
            table.add_row(f"  {option}", _describe_default(default))
    actions, works = _try_out(name, arguments)
    make_console().print(f"{name}  actions: {actions or 'unknown'}  works here: {works}")
    if table.rows:
        make_console().print(table)
        print(f"choose, as in: vernal train ppo {name} --env-arg NAME=VALUE")
    else:
        print("It has no options.")


def _describe_default(default: Any) -> str:
    text = "required" if default is REQUIRED else repr(default)
    return text if len(text) <= 24 else text[:21] + "..."


def _try_out(name: str, arguments: dict[str, str]) -> tuple[str, str]:
    """Actions of an environment, and whether PPO can train on it; nothing is computed."""
    try:
        environment = make_environment(name, arguments)
        codec = make_action_codec(environment)
        eqx.filter_eval_shape(make_default_network(environment), jax.random.key(0))
        return f"{codec.kind} {codec.output_shape}", "yes"
    except ValueError as error:
        return "", f"no: {error}"


def _say_what_came(folder: RunFolder) -> None:
    """Where the run is, and of several agents what they reached; the first process says it."""
    if not hosts.is_first():
        return
    config = RunConfig.from_dict(folder.read_config())
    if config.is_several:
        _print_summary(folder)
    print(f"run: {folder.path}")
    if folder.curve_path.is_file():
        print(f"curve: {folder.curve_path}")
    run = shlex.quote(str(folder.path)) + (" --trust" if config.find_outside() else "")
    print(f"next: vernal watch {run}  or  vernal evaluate {run}")


def _print_summary(folder: RunFolder) -> None:
    summaries = [summarise_curves(curves) for curves in read_curves(folder)]
    table = Table(
        *summaries[0].setting,
        "seeds",
        "return at last",
        "interquartile mean",
        "over all of training",
        title="mean episode returns, 95 % intervals over seeds; at last: the last tenth",
    )
    for summary in summaries:
        broken = f" ({summary.broken} broke)" if summary.broken else ""
        low, high = summary.iqm_interval
        table.add_row(
            *map(describe_value, summary.setting.values()),
            f"{summary.seeds}{broken}",
            _known(summary.last) + _known(summary.margin, " ± "),
            "" if math.isnan(summary.iqm) else f"{summary.iqm:.3f} ({low:.3f} to {high:.3f})",
            _known(summary.whole),
        )
    make_console().print(table)


def _known(value: float, before: str = "") -> str:
    return "" if math.isnan(value) else f"{before}{value:.3f}"
