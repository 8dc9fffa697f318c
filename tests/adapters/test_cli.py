"""The command: what a newcomer types, and what is said to bad input."""

import dataclasses
import importlib.metadata
import json
import subprocess
import sys

import pytest

from vernal.adapters.agents.ppo import PPOConfig
from vernal.adapters.cli import main

_SMALL = {"envs": 2, "rollout-steps": 64, "minibatch-size": 64, "epochs": 1, "steps": 256}
SMALL = [f"--{name}={value}" for name, value in _SMALL.items()]


@pytest.fixture
def vernal(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder: exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        try:
            main(words)
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        output, errors = capsys.readouterr()
        return code, output, errors

    return run


def test_train_evaluate_watch_plot(vernal, tmp_path):
    code, output, _ = vernal("train", "ppo", "maze-medium", *SMALL)
    run = tmp_path / "runs" / "maze-medium" / "ppo" / "seed-0"
    assert code == 0
    assert "vernal watch runs/maze-medium/ppo/seed-0" in output
    assert {p.name for p in run.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "checkpoints",
        "curve.png",
    }
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2

    code, output, errors = vernal("evaluate", str(run), "--episodes", "8")
    assert code == 0, errors
    for word in ("greedy", "sampled", "random", "return", "solved", "shortest"):
        assert word in output

    code, output, _ = vernal("watch", str(run), "--episodes", "1", "--max-steps", "3")
    assert code == 0
    assert (run / "agent.gif").is_file()

    code, output, _ = vernal("plot", str(run), "--output", "curves.png")
    assert code == 0
    assert (tmp_path / "curves.png").is_file()

    code, output, _ = vernal("resume", str(run), "--steps", "384")
    assert code == 0
    last = (run / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["steps"] == 384


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train ppo Mase-v0", "no environment 'Mase-v0'; did you mean Maze-v0"),
        ("train ppo Sokoban-v0", "Sokoban-v0 downloads its levels"),
        ("train ppo maze-easy --minibatch-size 1000", "1000, which does not divide the 8192"),
        ("train ppo maze-easy --gamma -0.5", "gamma is -0.5; give a number from 0 to 1"),
        ("train ppo maze-easy --envs 0", "envs is 0; give at least 1"),
        ("train ppo maze-easy --steps 0", "steps is 0; give at least 1"),
        ("train ppo maze-easy --keep 0", "keep is 0; give at least 1 checkpoint"),
        ("train ppo maze-easy --save-every -1", "save_every is -1.0; give 0 seconds or more"),
        ("train ppo maze-easy --seed -1", "seed is -1; give a number from 0"),
        ("train ppo maze-easy --seed 99999999999999999999", "give a number from 0 to"),
        ("watch nowhere --frames-per-second 0", "frames_per_second is 0; give at least 1"),
        ("watch nowhere --output agent.avi", "ends in .gif or .mp4"),
        ("train ppo maze-easy --network resnet", "no network 'resnet'; choose one of auto"),
        ("train ppo Snake-v1 --network blog", "network 'blog' is for mazes only"),
        ("train ppo Maze-v0 --env-arg num_row=5", "no option 'num_row'; it has num_rows"),
        ("train ppo Maze-v0 --env-arg num_rows", "an option is written NAME=VALUE"),
        ("train ppo Maze-v0 --env-arg a=1 --env-arg a=2", "a is given twice, as 1 and as 2"),
        ("train ppo maze-v0", "did you mean Maze-v0"),
        ("train ppo nowhere:make", "nowhere cannot be imported"),
        ("envs Maze-v1", "no environment 'Maze-v1'; did you mean Maze-v0"),
        ("envs --env-arg num_rows=5", "options are those of one environment"),
        ("train dqn maze-easy", "dqn"),
        ("trian ppo maze-easy", "trian"),
        ("train ppo maze-easy --learnin-rate 1", "--learning-rate"),
        ("evaluate nowhere", "nowhere is no run"),
        ("watch nowhere", "nowhere is no run"),
        ("plot nowhere", "nowhere is no run"),
        ("plot", "name the runs to plot, as in: vernal plot runs/"),
        ("evaluate nowhere --max-steps 0", "max_steps is 0; give at least 1"),
        ("resume nowhere", "nowhere is no run"),
    ],
)
def test_bad_input_ends_in_a_sentence_and_writes_nothing(vernal, tmp_path, words, sentence):
    code, output, errors = vernal(*words.split())
    assert code != 0
    assert sentence in " ".join((output + errors).replace("│", " ").split())
    assert "tyro" not in output + errors
    assert "Traceback" not in output + errors
    assert list(tmp_path.iterdir()) == []


def test_alphazero_is_trained_and_evaluated_with_searches(vernal, tmp_path):
    small = ["--envs=2", "--rollout-steps=4", "--simulations=2", "--minibatch-size=8", "--epochs=1"]
    small += ["--env-arg", "num_rows=3", "num_cols=3", "time_limit=5", "--network=spec"]
    code, _, errors = vernal("train", "alphazero", "Maze-v0", *small, "--steps=16")
    assert code == 0, errors
    run = tmp_path / "runs" / "Maze-v0" / "alphazero" / "seed-0"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["steps"] for row in rows] == [8, 16]
    words = ["--episodes=2", "--simulations", "1", "3"]
    code, output, errors = vernal("evaluate", str(run), *words)
    assert code == 0, errors
    for policy in ("greedy", "sampled", "random legal", "search 1", "search 3"):
        assert policy in output


def test_simulations_of_an_agent_that_does_not_search_are_refused(vernal, tmp_path):
    vernal("train", "ppo", "maze-easy", *SMALL)
    run = str(tmp_path / "runs" / "maze-easy" / "ppo" / "seed-0")
    code, _, errors = vernal("evaluate", run, "--simulations", "4")
    assert code == 1
    assert "ppo does not search; leave --simulations away" in errors
    code, _, errors = vernal("evaluate", run, "--simulations", "0")
    assert "simulations is 0; give at least 1" in errors


def test_episodes_that_need_not_end_are_cut_and_counted(vernal, tmp_path):
    vernal("train", "ppo", "maze-easy", *SMALL)
    run = str(tmp_path / "runs" / "maze-easy" / "ppo" / "seed-0")
    code, output, errors = vernal("evaluate", run, "--episodes", "4", "--max-steps", "3")
    assert code == 0, errors
    (line,) = [line for line in output.splitlines() if "greedy" in line]
    assert "4 of 4" in line
    assert "cut: left after 3 steps; --max-steps allows more." in output


def test_option_values_that_look_like_markup_are_shown(vernal, tmp_path, monkeypatch):
    (tmp_path / "levels.py").write_text(
        "from jumanji.environments import Maze\n\n"
        "def make(level: str = 'none'):\n    return Maze(time_limit=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for value in ("[/data/easy]", "[easy]"):
        code, output, errors = vernal("envs", "levels:make", "--env-arg", f"level={value}")
        assert code == 0, errors
    words = ["--env-arg", "level=[/data/easy]", "--network=spec", *SMALL]
    code, output, errors = vernal("train", "ppo", "levels:make", *words)
    assert code == 0, errors
    run = str(tmp_path / "runs" / "make" / "ppo" / "seed-0")
    code, output, errors = vernal("evaluate", run, "--episodes", "2", "--trust")
    assert code == 0, errors
    assert "level=[/data/easy]" in output


def test_version_is_told_by_the_command_and_by_the_module():
    for words in (["-m", "vernal"], ["-c", "from vernal.adapters.launch import main; main()"]):
        told = subprocess.check_output([sys.executable, *words, "--version"], text=True)
        assert told.startswith(f"vernal {importlib.metadata.version('vernal')} (jax ")


def test_existing_folder_is_refused(vernal, tmp_path):
    (tmp_path / "mine").mkdir()
    code, _, errors = vernal("train", "ppo", "maze-easy", "--folder", "mine", *SMALL)
    assert code == 1
    assert "mine exists already" in errors


def test_help_of_training_explains_every_setting_with_its_default(vernal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, output, _ = vernal("train", "ppo", "--help")
    assert code == 0
    output = " ".join(output.replace("│", " ").split())
    for field in dataclasses.fields(PPOConfig):
        name = field.name.strip("_").replace("_", "-")
        assert f"--{name}" in output, name
        if field.type is not bool:
            assert f"(default: {field.default})" in output, name


def test_envs_lists_every_environment_and_why_one_does_not_work(vernal):
    code, output, _ = vernal("envs")
    assert code == 0
    assert "maze-medium" in output
    assert "Connector-v3" in output
    (line,) = [line for line in output.splitlines() if "Sokoban" in line and "│" in line][:1]
    assert "no: " in line


def test_envs_lists_the_options_of_one_environment_with_their_defaults(vernal):
    code, output, _ = vernal("envs", "Maze-v0")
    assert code == 0
    rows = [line.replace("│", " ").split() for line in output.splitlines() if "│" in line]
    assert rows == [
        ["time_limit", "None"],
        ["generator", "RandomGenerator", "ToyGenerator"],
        ["num_rows", "10"],
        ["num_cols", "10"],
    ]


def test_envs_lists_the_options_of_a_chosen_generator(vernal):
    chosen = "generator=UniformRandomGenerator"
    _, output, _ = vernal("envs", "Connector-v3", "--env-arg", chosen)
    assert "grid_size" in output
    assert "temperature" not in output


def test_envs_tells_how_an_environment_without_levels_is_made(vernal):
    code, output, _ = vernal("envs", "Sokoban-v0")
    assert code == 0
    assert "--env-arg generator=ToyGenerator" in output
    assert "SimpleSolveGenerator" in output
