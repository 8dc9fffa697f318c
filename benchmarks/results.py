"""What PPO learns on each of Jumanji's environments, with the settings that it comes with.

    python benchmarks/results.py                               # all of them, 20 minutes each
    python benchmarks/results.py Snake-v1 --minutes 60 --again
    python benchmarks/results.py --table

Each environment is trained in a process of its own, into runs/results/ENVIRONMENT, and then
evaluated on instances that training never met; the outcome is written into
benchmarks/results/ENVIRONMENT.json. However the command is stopped, called again it goes on
where it was: a run that was begun is resumed as it was begun, and what has an outcome is left.
"""

import argparse
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from outcomes import evaluate, iteration_seconds, outcome_path, print_table, read_trained, write

from vernal.adapters.agents.ppo import PPOConfig
from vernal.adapters.registry import BUILT_IN, environment_names
from vernal.adapters.runs import training
from vernal.adapters.runs.folder import RunFolder, next_free_path
from vernal.adapters.runs.progress import describe

ROOT = Path(__file__).parents[1]
OPTIONS = {"Sokoban-v0": {"generator": "ToyGenerator"}}  # Its own generator downloads levels.
NO_LIMIT = 10**12
EPISODES = 256


def main() -> None:
    """Measure what has no outcome yet, and print the table."""
    known = [name for name in environment_names() if name not in BUILT_IN]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("environments", nargs="*", metavar="ENV", help="all by default")
    parser.add_argument("--minutes", type=float, default=20, help="of training, compilation too")
    parser.add_argument("--steps", type=int, default=NO_LIMIT, help="after which to stop earlier")
    parser.add_argument("--seed", type=int, default=0, help="of the training")
    parser.add_argument("--again", action="store_true", help="measure anew what has an outcome")
    parser.add_argument("--jobs", type=int, default=1, help="environments to train side by side")
    parser.add_argument("--table", action="store_true", help="only print and write the table")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "results")
    parser.add_argument("--outcomes", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.environments) - set(known)
    if unknown:
        sys.exit(
            f"results: there is no {', '.join(sorted(unknown))}; choose of {', '.join(known)}."
        )
    if options.parent is not None:
        sys.exit(measure_here(options))
    if not options.table:
        measure_all(options.environments or known, options)
    print_table(options.outcomes)


def measure_all(names: Sequence[str], options: argparse.Namespace) -> None:
    """Measure what is due, each environment in a process of its own."""
    due = [n for n in names if options.again or is_due(n, options.runs, options.outcomes)]
    command = [sys.executable, __file__, "--parent", str(os.getpid())]
    for name in ("minutes", "steps", "seed", "jobs", "runs", "outcomes"):
        command += [f"--{name}", str(getattr(options, name))]
    try:
        failed = run_all([[*command, name] for name in due], options.jobs)
    except KeyboardInterrupt:
        sys.exit("results: stopped; the same command goes on.")
    if failed:
        sys.exit(f"results: {failed} of {len(due)} environments failed; see what they said above.")


def run_all(commands: Sequence[Sequence[str]], jobs: int) -> int:
    """Run commands, so many at a time, each told its share of the cores.

    Returns:
        How many failed.

    Raises:
        KeyboardInterrupt: Ctrl-C; all that were running have ended.
    """
    waiting, failed = list(commands), 0
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            for share in range(jobs):
                if share in running and running[share].poll() is not None:
                    failed += running.pop(share).returncode != 0
                if share not in running and waiting:
                    running[share] = subprocess.Popen([*waiting.pop(0), "--share", str(share)])
            time.sleep(0.2)
    except KeyboardInterrupt:  # They had it too, and save their states.
        for process in running.values():
            process.wait()
        raise
    return failed


def is_due(name: str, runs: Path, outcomes: Path) -> bool:
    """Whether an environment has no outcome, or a run of it was begun and not finished."""
    return find_unfinished(name, runs) is not None or not outcome_path(outcomes, name).exists()


def find_unfinished(name: str, runs: Path) -> RunFolder | None:
    """The environment's run that has no outcome yet, if there is one."""
    for path in [runs / name, *runs.glob(f"{name}-[0-9]*")]:
        folder = RunFolder(path)
        if folder.config_path.is_file() and not outcome_path(path, name).exists():
            return folder
    return None


def measure_here(options: argparse.Namespace) -> int:
    """Measure one environment in this process; returns its exit code."""
    keep_to_share(options.share, options.jobs)
    (name,) = options.environments
    try:
        config = training.RunConfig(
            agent="ppo",
            environment=name,
            network="auto",
            seed=options.seed,
            steps=options.steps,
            settings=PPOConfig(),
            environment_arguments=OPTIONS.get(name, {}),
        )
        measure(config, options.minutes, options.runs, options.outcomes, options.parent)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def keep_to_share(share: int, jobs: int) -> None:
    """Leave the other cores to the other jobs, where the system can: XLA starts fewer threads."""
    if jobs > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[share::jobs] or cores)


def measure(
    config: training.RunConfig,
    minutes: float,
    runs: Path,
    outcomes: Path,
    parent: int | None = None,
) -> None:
    """Train, or go on with it; evaluate; write the outcome.

    Args:
        config: what to train; an unfinished run goes on as it was begun.
        minutes: time to train for, in all processes together.
        runs: folder of the runs.
        outcomes: folder of the outcomes.
        parent: the process that this one ends with.

    Raises:
        KeyboardInterrupt: Ctrl-C, or the parent is gone; the state is saved.
        ValueError: training diverged, or the configuration does not fit.
        OSError: something could not be written.
    """
    name = config.environment
    folder = find_unfinished(name, runs) or RunFolder(next_free_path(runs / name))
    train(config, folder, minutes, parent)
    print(f"{name}: evaluating", flush=True)
    text = json.dumps(evaluate(folder, EPISODES), indent=2) + "\n"
    for place in (outcomes, folder.path):  # The copy in the run says that it is finished.
        write(outcome_path(place, name), text)


def train(
    config: training.RunConfig, folder: RunFolder, minutes: float, parent: int | None
) -> None:
    """Train until the time or the steps are over, counting what was done before."""
    rows = read_trained(folder)
    steps, seconds = (
        max((row["steps"] for row in rows), default=0),
        sum(map(iteration_seconds, rows)),
    )
    printed = -math.inf

    def report(progress: training.Progress) -> None:
        nonlocal seconds, printed
        seconds += iteration_seconds(progress.row)
        if time.monotonic() - printed > 30:
            printed = time.monotonic()
            known = math.inf if progress.seconds_left is None else progress.seconds_left
            left = max(min(known, 60 * minutes - seconds), 0.0)
            line = describe(dataclasses.replace(progress, seconds_left=left))
            print(f"{config.environment}: {line}", flush=True)
        if seconds >= 60 * minutes or parent not in (None, os.getppid()):
            signal.raise_signal(signal.SIGINT)  # As Ctrl-C does: the state is saved first.

    try:
        if not folder.config_path.is_file():
            training.start(config, folder.path, report)
        elif seconds < 60 * minutes and steps < config.steps:
            training.resume(folder, report, steps=config.steps)
    except KeyboardInterrupt:
        if seconds < 60 * minutes:
            raise


if __name__ == "__main__":
    main()
