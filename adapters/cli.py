"""The command `vernal`: each subcommand is one call that a script can make too."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction

from .actions import make_action_codec
from .agents.ppo import PPOConfig
from .evaluation import make_random_policy, play, summarise
from .networks import make_default_network
from .options import REQUIRED, split_arguments
from .registry import environment_names, find_options, make_environment
from .runs import training
from .runs.animation import animate, record_states, require_film
from .runs.curve import draw_curve
from .runs.folder import RunFolder, next_free_path
from .runs.progress import progress_line

_DEFAULTS = PPOConfig()

# As --env-arg a=1 b=2, and as --env-arg a=1 --env-arg b=2.
EnvArgs = UseAppendAction[tuple[tuple[str, ...], ...]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; faults of input end in one sentence and an exit code.

    Args:
        arguments: words after `vernal`; the process's own by default.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    agents = {"ppo": train_ppo}
    commands = {
        "train": train,
        "resume": resume,
        "evaluate": evaluate,
        "watch": watch,
        "plot": plot,
        "envs": envs,
    }
    prog = "vernal"
    if arguments[:1] == ["train"]:
        prog, commands, arguments = "vernal train", agents, arguments[1:]
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
        sys.exit(130)


def train() -> None:
    """Train an agent, as in: vernal train ppo maze-medium."""


def train_ppo(
    environment: Positional[str],
    config: OmitArgPrefixes[PPOConfig] = _DEFAULTS,
    *,
    env_arg: EnvArgs = (),
    network: str = "auto",
    steps: int = 819_200,
    seed: int = 0,
    folder: Path | None = None,
) -> None:
    """Train an agent with proximal policy optimisation.

    Args:
        environment: name of the environment; `vernal envs` lists all. One of your own is
            MODULE:CALLABLE, a class or a function that returns it.
        config: settings of PPO.
        env_arg: options of the environment as NAME=VALUE; `vernal envs ENVIRONMENT` lists them.
        network: `spec` is built from the environment's specs; `planning` and `blog` are for
            mazes; `auto` is `planning` where mazes change, else `spec`.
        steps: environment steps to train for, rounded up to whole iterations.
        seed: whole number from which all others are drawn: the same seed, the same run.
        folder: folder of the run, not there yet; by default runs/ENVIRONMENT/ppo/seed-SEED, or
            the same with -2 and so on.
    """
    arguments = split_arguments(itertools.chain(*env_arg))
    run = training.RunConfig("ppo", environment, network, seed, steps, config, arguments)
    with progress_line() as report:
        _say_where(training.start(run, folder, report))


def resume(run: Positional[Path], *, steps: int | None = None) -> None:
    """Go on with a run from its newest checkpoint.

    Args:
        run: folder of the run.
        steps: environment steps to train for in all; as the run was started by default.
    """
    with progress_line() as report:
        _say_where(training.resume(RunFolder(run), report, steps=steps))


def evaluate(
    run: Positional[Path], *, episodes: int = 256, seed: int = 1, best: bool = False
) -> None:
    """Measure an agent over whole episodes, beside a random policy.

    Args:
        run: folder of the run.
        episodes: how many, of each policy.
        seed: of the instances and the sampling; all policies meet the same instances.
        best: the checkpoint with the best mean return in place of the newest; one is saved
            every 30 seconds and at the end.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}; give at least 1.")
    config, environment, agent, state = training.load(RunFolder(run), best=best)
    policies = {
        "greedy": lambda key, observation: agent.act(state, None, observation),
        "sampled": lambda key, observation: agent.act(state, key, observation),
        "random legal": make_random_policy(environment),
    }
    options = [f"{name}={value}" for name, value in config.environment_arguments.items()]
    name = " ".join([config.environment, *options])
    table = Table(title=f"{name}, {episodes} episodes, mean ± 95 % interval")
    for number, (name, act) in enumerate(policies.items()):
        outcome = jax.jit(lambda key, act=act: play(environment, act, key, episodes))(
            jax.random.key(seed)
        )
        summary = summarise(environment, jax.random.key(seed), outcome)
        if number == 0:
            table.add_column("policy")
            for column in summary:
                table.add_column(column, justify="right")
        table.add_row(name, *summary.values())
    Console().print(table)


def watch(
    run: Positional[Path],
    *,
    episodes: int = 3,
    seed: int = 1,
    max_steps: int = 200,
    frames_per_second: int = 8,
    output: Path | None = None,
    sampled: bool = False,
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
    """
    counts = {"episodes": episodes, "max_steps": max_steps, "frames_per_second": frames_per_second}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}; give at least 1.")
    folder = RunFolder(run)
    path = next_free_path(folder.path / "agent.gif") if output is None else output
    require_film(path)
    config, environment, agent, state = training.load(folder)
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
    Console().print(table)
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
    Console().print(f"{name}  actions: {actions or 'unknown'}  works here: {works}")
    if table.rows:
        Console().print(table)
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
        return "", f"no: {escape(str(error))}"


def _say_where(folder: RunFolder) -> None:
    print(f"run: {folder.path}")
    if folder.curve_path.is_file():
        print(f"curve: {folder.curve_path}")
    print(f"next: vernal watch {folder.path}  or  vernal evaluate {folder.path}")
