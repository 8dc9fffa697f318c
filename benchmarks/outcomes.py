"""What a run came to: evaluated once, kept in a file, and read into a table."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from vernal.adapters.evaluation import (
    Episodes,
    Interval,
    confidence_interval,
    make_random_policy,
    play,
)
from vernal.adapters.runs import training
from vernal.adapters.runs.checkpoints import Checkpoints
from vernal.adapters.runs.folder import RunFolder

EVALUATION_SEED = 99
HEADER = ["environment", "steps", "minutes", "network", "parameters", "random legal", "sampled"]
HEADER += ["greedy", "better than random"]


def evaluate(folder: RunFolder, episodes: int) -> dict[str, Any]:
    """What was trained, and how three policies do on the same new instances.

    Args:
        folder: the run.
        episodes: of each policy.

    Returns:
        Plain values.
    """
    config, environment, agent, state = training.load(folder)
    network, rows = agent.network(state), read_trained(folder)
    policies = {
        "greedy": lambda key, observation: agent.act(state, None, observation),
        "sampled": lambda key, observation: agent.act(state, key, observation),
        "random legal": make_random_policy(environment),
    }
    key = jax.random.key(EVALUATION_SEED)
    outcomes = {
        name: jax.jit(lambda act=act: play(environment, act, key, episodes))()
        for name, act in policies.items()
    }
    parameters = jax.tree.leaves(eqx.filter(network, eqx.is_inexact_array))
    return {
        **config.to_dict(),
        "steps": rows[-1]["steps"],
        "minutes": round(sum(map(iteration_seconds, rows)) / 60, 1),
        "network": type(network).__name__,
        "parameters": sum(leaf.size for leaf in parameters),
        "backend": jax.default_backend(),
        "cores": os.cpu_count(),
        "episodes": episodes,
        "policies": compare(outcomes),
    }


def read_trained(folder: RunFolder) -> list[dict[str, Any]]:
    """A run's metrics up to its newest checkpoint: what came after is lost when it stops."""
    if not folder.checkpoints_path.is_dir():
        return []
    checkpoints = Checkpoints(folder.checkpoints_path, read_only=True)
    try:
        newest = max(checkpoints.iterations(), default=0)
    finally:
        checkpoints.close()
    return [row for row in folder.read_metrics() if row["iteration"] <= newest]


def iteration_seconds(row: dict[str, Any]) -> float:
    """How long an iteration took, with what it compiled, from its line of the metrics.

    Example:
        >>> iteration_seconds({"iteration": 3, "steps": 300, "steps_per_second": 50})
        2.0
    """
    return row["steps"] / row["iteration"] / max(row["steps_per_second"], 1)


def compare(outcomes: dict[str, Episodes]) -> dict[str, dict[str, Any]]:
    """Means with 95 % intervals, and what each policy has beyond the random one.

    All play the same instances, so the differences are taken instance by instance.

    Example:
        >>> one, two = (Episodes(np.array([x, x + 1.0]), np.array([9, 9])) for x in (1.0, 2.0))
        >>> compare({"greedy": two, "random legal": one})["greedy"]["beyond random"]
        {'mean': 1.0, 'half_width': 0.0}
    """
    random = np.asarray(outcomes["random legal"].returns)
    return {
        name: {
            "return": confidence_interval(outcome.returns)._asdict(),
            "length": confidence_interval(outcome.lengths)._asdict(),
            "beyond random": confidence_interval(np.asarray(outcome.returns) - random)._asdict(),
        }
        for name, outcome in outcomes.items()
    }


def outcome_path(folder: Path, environment: str) -> Path:
    """Where an environment's outcome lies in a folder."""
    return folder / f"{environment}.json"


def write(path: Path, text: str) -> None:
    """Write a file at one stroke."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def print_table(folder: Path) -> None:
    """Print the table of all outcomes, and put it into the README beside them."""
    rows = [summarise(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    table = Table(*HEADER)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    readme = folder / "README.md"
    if readme.is_file():
        write(readme, insert_table(readme.read_text(encoding="utf-8"), rows))


def summarise(outcome: dict[str, Any]) -> list[str]:
    """The row of the table: better is a policy whose interval beyond random lies above 0."""
    policies = outcome["policies"]
    beyond = {name: Interval(**policies[name]["beyond random"]) for name in ("greedy", "sampled")}
    better = [name for name, interval in beyond.items() if interval.mean > interval.half_width]
    options = [f"{name}={value}" for name, value in outcome["environment_arguments"].items()]
    return [
        " ".join([outcome["environment"], *options]),
        f"{outcome['steps']:,}",
        f"{outcome['minutes']:.1f}",
        outcome["network"],
        f"{outcome['parameters']:,}",
        *(str(Interval(**policies[n]["return"])) for n in ("random legal", "sampled", "greedy")),
        ", ".join(better) or "none",
    ]


def insert_table(page: str, rows: Sequence[Sequence[str]]) -> str:
    r"""Put the table between the two marks of a page.

    Example:
        >>> "old" in insert_table("<!-- table -->\nold\n<!-- end -->\n", [])
        False
    """
    alignment = ["---", "--:", "--:", "---", "--:", "--:", "--:", "--:", "---"]
    lines = "".join("| " + " | ".join(line) + " |\n" for line in (HEADER, alignment, *rows))
    before, mark, rest = page.partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    return f"{before}{mark}\n{lines}\n{end}{after}"
