"""The results of every environment: resumable training, outcomes, and their table."""

import functools
import importlib
import json
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import pytest

from vernal.adapters.agents.ppo import PPOConfig
from vernal.adapters.evaluation import Episodes
from vernal.adapters.registry import find_options
from vernal.adapters.runs.folder import RunFolder
from vernal.adapters.runs.training import RunConfig

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
outcomes, results = map(importlib.import_module, ("outcomes", "results"))

SETTINGS = PPOConfig(envs=2, rollout_steps=8, epochs=1, minibatch_size=16)
CONFIG = RunConfig("ppo", "maze-easy", "spec", 0, 10**9, SETTINGS)


def run_in(folder):
    return RunFolder(folder / "runs" / "maze-easy")


def play_nothing(environment, act, key, episodes):
    del environment, act, key
    return Episodes(jnp.zeros(episodes), jnp.ones(episodes, int))


def measure(folder, minutes):
    places = folder / "runs", folder / "outcomes"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcomes, "play", play_nothing)
        results.measure(CONFIG, minutes, *places)


class Stopped(NamedTuple):
    """A run that was stopped after its first iteration, then gone on with until time was over."""

    folder: Path
    due_before: bool
    due_after: bool

    @property
    def run(self):
        return run_in(self.folder)

    @property
    def outcome(self):
        return json.loads((self.folder / "outcomes" / "maze-easy.json").read_text())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    due = functools.partial(results.is_due, "maze-easy", folder / "runs", folder / "outcomes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "describe", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            measure(folder, minutes=60)
    due_before = due()
    spent = sum(map(outcomes.iteration_seconds, outcomes.read_trained(run_in(folder))))
    measure(folder, minutes=(spent + 1e-3) / 60)
    return Stopped(folder, due_before, due())


def test_a_stopped_run_is_due(stopped):
    assert stopped.due_before


def test_a_stopped_run_goes_on_where_it_was_until_its_time_is_over(stopped):
    assert [row["iteration"] for row in stopped.run.read_metrics()] == [1, 2]


def test_a_measured_environment_is_not_due(stopped):
    assert not stopped.due_after


def test_an_outcome_counts_the_steps_of_all_processes(stopped):
    assert stopped.outcome["steps"] == 32


def test_an_outcome_names_the_network_and_the_settings(stopped):
    assert stopped.outcome["network"].endswith("Network")
    assert stopped.outcome["settings"]["envs"] == 2


def test_an_outcome_has_three_policies(stopped):
    assert set(stopped.outcome["policies"]) == {"greedy", "sampled", "random legal"}


def write_run(path, finished):
    path.mkdir(parents=True)
    (path / "config.toml").write_text("")
    if finished:
        (path / "Snake-v1.json").write_text("{}")


def test_a_second_run_that_was_begun_is_found_behind_a_finished_one(tmp_path):
    write_run(tmp_path / "Snake-v1", finished=True)
    write_run(tmp_path / "Snake-v1-2", finished=False)
    assert results.find_unfinished("Snake-v1", tmp_path).path.name == "Snake-v1-2"


def test_a_name_that_begins_alike_is_another_environment(tmp_path):
    write_run(tmp_path / "Snake-v1-large", finished=False)
    assert results.find_unfinished("Snake-v1", tmp_path) is None


def test_commands_that_fail_are_counted():
    program = "import sys; sys.exit(int(sys.argv[1]))"
    commands = [[sys.executable, "-c", program, code] for code in "010"]
    assert results.run_all(commands, jobs=2) == 1


def test_options_are_those_of_an_environment():
    for name, options in results.OPTIONS.items():
        assert options.keys() <= set(find_options(name, options).names())


def test_beyond_random_is_measured_instance_by_instance():
    spread = jnp.array([0.0, 100.0, 50.0])
    random, better = (Episodes(spread + gain, jnp.ones(3, int)) for gain in (0, 1))
    beyond = outcomes.compare({"greedy": better, "random legal": random})["greedy"]["beyond random"]
    assert beyond == {"mean": 1.0, "half_width": 0.0}


def outcome(mean, half_width):
    interval = {"mean": mean, "half_width": half_width}
    policy = {"return": interval, "length": interval, "beyond random": interval}
    return {
        "environment": "Maze-v0",
        "environment_arguments": {"num_rows": "4"},
        "steps": 4096,
        "minutes": 1.25,
        "network": "SpecNetwork",
        "parameters": 1234,
        "policies": {"greedy": policy, "sampled": policy, "random legal": policy},
    }


@pytest.mark.parametrize(
    ("mean", "half_width", "better"),
    [(1.0, 0.9, "greedy, sampled"), (1.0, 1.1, "none"), (-1.0, 0.1, "none")],
)
def test_better_is_what_lies_above_by_more_than_the_interval(mean, half_width, better):
    assert outcomes.summarise(outcome(mean, half_width))[-1] == better


def test_table_takes_the_place_of_the_old_one_and_leaves_the_page(tmp_path):
    outcomes.write(tmp_path / "Maze-v0.json", json.dumps(outcome(1.0, 0.5)))
    page = "# Results\n\nText.\n\n<!-- table -->\n{}<!-- end -->\n\nMore.\n"
    (tmp_path / "README.md").write_text(page.format("old\n"))
    outcomes.print_table(tmp_path)
    before, _, after = (tmp_path / "README.md").read_text().partition("| environment |")
    assert before == "# Results\n\nText.\n\n<!-- table -->\n\n"
    assert after.endswith("| greedy, sampled |\n\n<!-- end -->\n\nMore.\n")
    assert "| Maze-v0 num_rows=4 | 4,096 | 1.2 | SpecNetwork | 1,234 | 1.000 ± 0.500 |" in after


def test_the_page_beside_the_results_has_a_place_for_the_table():
    page = (results.ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    assert page.index("<!-- table -->\n") < page.index("<!-- end -->\n")
