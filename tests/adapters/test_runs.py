"""Runs: nothing is lost, nothing overwritten, and a resumed run is the run itself."""

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from PIL import Image, ImageSequence

import vernal
from vernal.adapters import factories
from vernal.adapters.agents.alphazero import AlphaZeroConfig
from vernal.adapters.agents.ppo import PPOConfig
from vernal.adapters.cli import main
from vernal.adapters.evaluation import make_random_policy
from vernal.adapters.runs import folder as folder_module
from vernal.adapters.runs import program, training
from vernal.adapters.runs.animation import animate, record_states
from vernal.adapters.runs.checkpoints import Checkpoints, Damaged, flatten
from vernal.adapters.runs.curve import draw_curve
from vernal.adapters.runs.folder import RunFolder, create_run_folder, next_free_path
from vernal.adapters.runs.program import make_program
from vernal.adapters.runs.progress import describe

from .environments_for_tests import make_once

SETTINGS = PPOConfig(envs=2, rollout_steps=64, minibatch_size=64, epochs=1)
CONFIG = training.RunConfig("ppo", "maze-easy", "spec", seed=0, steps=128 * 4, settings=SETTINGS)


def ignore(progress):
    del progress


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    """Runs of the same program share it: compiling is most of what a test would take."""
    made = {}

    def make_once(config, **options):
        name = repr(dataclasses.replace(config, steps=1))
        if config.find_outside() or name not in made:
            made[name] = make_program(config, **options)
        return made[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "make_program", make_once)
        yield


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of four iterations; read, never written to."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    return training.start(CONFIG, path, ignore, training.Safety(save_every=0.0))


@pytest.fixture
def run_copy(whole_run, tmp_path):
    shutil.copytree(whole_run.path, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


def without_times(rows):
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def leaves(state):
    return [
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(state)
    ]


def test_resumed_run_equals_the_undisturbed_one_bit_for_bit(whole_run, tmp_path):
    half = dataclasses.replace(CONFIG, steps=128 * 2)
    folder = training.start(half, tmp_path / "half", ignore)
    training.resume(folder, ignore, steps=CONFIG.steps)
    resumed, whole = folder.read_metrics(), whole_run.read_metrics()
    assert without_times(resumed) == without_times(whole)
    states = [training.load(f)[3] for f in (folder, whole_run)]
    for a, b in zip(*map(leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)


def test_resume_drops_metrics_newer_than_the_checkpoint(run_copy):
    run_copy.append_metrics({"iteration": 5, "episodes": 0})
    training.resume(run_copy, ignore, steps=128 * 6)
    assert [row["iteration"] for row in run_copy.read_metrics()] == [1, 2, 3, 4, 5, 6]
    assert "policy" in run_copy.read_metrics()[4]


def test_resume_of_a_finished_run_says_so(run_copy):
    with pytest.raises(ValueError, match=r"has taken 512 steps already, and 512 are asked for"):
        training.resume(run_copy, ignore)


def test_metrics_on_a_full_disk_end_in_a_sentence(run_copy):
    run_copy.metrics_path.unlink()
    run_copy.metrics_path.symlink_to("/dev/full")  # Linux has a file that is always full.
    with pytest.raises(OSError, match=r"could not be written \(No space left on device"):
        run_copy.append_metrics({"iteration": 5})


def test_metrics_have_a_line_for_every_iteration(whole_run):
    rows = whole_run.read_metrics()
    assert [row["steps"] for row in rows] == [128, 256, 384, 512]
    assert {"mean_return", "mean_length", "policy", "value", "entropy", "kl"} <= rows[0].keys()


def test_no_ended_episode_is_null_not_nan(whole_run):
    # Episodes of the easy maze last up to 100 steps; none ends within the first 64.
    line = whole_run.metrics_path.read_text().splitlines()[0]
    assert json.loads(line)["mean_return"] is None
    assert "NaN" not in line


def test_no_ended_episode_is_said_so(whole_run):
    row = whole_run.read_metrics()[0]
    progress = training.Progress(row, iterations=4, seconds_left=1.0)
    assert "no episode ended yet" in describe(progress)


def test_config_of_a_run_makes_it_again(whole_run):
    values = whole_run.read_config()
    assert training.RunConfig.from_dict(values) == CONFIG
    assert set(values["versions"]) >= {"vernal", "jax", "jumanji"}


def test_options_of_the_environment_are_those_of_the_run(tmp_path):
    config = dataclasses.replace(
        CONFIG, environment="Maze-v0", environment_arguments={"num_rows": "5", "num_cols": "4"}
    )
    folder = create_run_folder(tmp_path / "run")
    folder.write_config(config.to_dict())
    read = training.RunConfig.from_dict(folder.read_config())
    maze = make_program(read).environment
    assert (maze.num_rows, maze.num_cols) == (5, 4)


def test_config_from_before_there_were_options_is_read(whole_run):
    values = whole_run.read_config()
    del values["environment_arguments"]
    assert training.RunConfig.from_dict(values) == CONFIG


def test_half_a_line_of_metrics_is_left_out(run_copy):
    with run_copy.metrics_path.open("a") as file:
        file.write('{"iteration": 5, "epi')
    assert len(run_copy.read_metrics()) == 4


def test_existing_folder_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("precious")
    with pytest.raises(ValueError, match=r"mine exists already, and a run is never overwritten"):
        training.start(CONFIG, tmp_path / "mine", ignore)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes"]


def test_unknown_environment_leaves_no_folder(tmp_path):
    config = dataclasses.replace(CONFIG, environment="maze-esy")
    with pytest.raises(ValueError, match="did you mean maze-easy"):
        training.start(config, tmp_path / "run", ignore)
    assert not (tmp_path / "run").exists()


def test_folder_names_count_up(tmp_path):
    create_run_folder(tmp_path / "seed-0")
    create_run_folder(next_free_path(tmp_path / "seed-0"))
    assert next_free_path(tmp_path / "seed-0").name == "seed-0-3"


def test_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is no run: it has no config.toml"):
        training.load(RunFolder(tmp_path))


def test_damaged_config_is_refused(run_copy):
    run_copy.config_path.write_text("agent = ")
    with pytest.raises(ValueError, match=r"config.toml is damaged"):
        training.load(run_copy)


def test_config_with_an_unknown_setting_is_refused(run_copy):
    text = run_copy.config_path.read_text().replace("epochs", "epoxy")
    run_copy.config_path.write_text(text)
    with pytest.raises(ValueError, match=r"does not fit this vernal.*epoxy"):
        training.load(run_copy)


def test_run_that_died_before_its_first_checkpoint_starts_again(run_copy, whole_run):
    shutil.rmtree(run_copy.checkpoints_path)
    training.resume(run_copy, ignore)
    assert without_times(run_copy.read_metrics()) == without_times(whole_run.read_metrics())


def test_resume_remembers_how_far_it_should_go(run_copy):
    def interrupt(progress):
        del progress
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        training.resume(run_copy, interrupt, steps=128 * 6)
    training.resume(run_copy, ignore)
    assert run_copy.read_metrics()[-1]["iteration"] == 6


def test_reading_a_run_leaves_a_checkpoint_that_is_being_written(run_copy):
    partial = run_copy.checkpoints_path / "5.orbax-checkpoint-tmp"
    partial.mkdir()
    training.load(run_copy)
    training.load(run_copy, best=True)
    assert partial.is_dir()


def test_diverged_run_stops_and_says_what_is_not_finite(tmp_path):
    settings = dataclasses.replace(SETTINGS, learning_rate=1e38)
    config = dataclasses.replace(CONFIG, settings=settings)
    with pytest.raises(ValueError, match=r"in iteration \d+ policy, .*params.* are not finite"):
        training.start(config, tmp_path / "run", ignore)
    assert not (tmp_path / "run").exists()


def test_run_without_a_checkpoint_is_refused(run_copy):
    shutil.rmtree(run_copy.checkpoints_path)
    with pytest.raises(ValueError, match="holds no checkpoint yet"):
        training.load(run_copy)


def test_checkpoint_of_another_network_is_refused_by_name(run_copy):
    text = run_copy.config_path.read_text().replace('"spec"', '"blog"')
    run_copy.config_path.write_text(text)
    with pytest.raises(ValueError, match=r"other configuration .*: network is blog here and spec"):
        training.load(run_copy)


def test_checkpoints_keep_the_newest_two_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for iteration, score in enumerate([0.1, 0.9, 0.3, 0.2, 0.4], start=1):
        checkpoints.save(iteration, flatten({"x": np.full(3, iteration)}), score)
    checkpoints.wait()
    assert checkpoints.iterations() == [2, 4, 5]
    assert checkpoints.best_iteration() == 2
    best = checkpoints.restore({"x": np.zeros(3, int)}, checkpoints.best_iteration())
    np.testing.assert_array_equal(best["x"], [2, 2, 2])
    checkpoints.close()


@pytest.mark.parametrize("make", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_checkpoint_holds_typed_keys_however_made_and_arrays_without_elements(make, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    key = jax.random.key(3, impl=make)
    state = {"key": key, "x": jnp.arange(2.0), "none": jnp.zeros((0, 3)), "keys": key[None][:0]}
    checkpoints.save(1, flatten(state), 0.0)
    checkpoints.wait()
    restored = checkpoints.restore(jax.eval_shape(lambda: state))
    checkpoints.close()
    assert jax.tree.map(lambda x: (x.dtype, x.shape), restored) == jax.tree.map(
        lambda x: (x.dtype, x.shape), state
    )
    assert jax.random.bits(restored["key"]) == jax.random.bits(key)


def test_what_is_being_saved_may_be_changed_at_once(tmp_path):
    state = {"x": np.ones(10**6, np.float32), "y": jnp.ones(10**6)}
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, flatten(state), 0.0)
        state["x"][:] = 0
        jax.jit(lambda y: y * 0, donate_argnums=0)(state.pop("y")).block_until_ready()
        checkpoints.wait()
        restored = checkpoints.restore({"x": state["x"], "y": state["x"]})
    assert restored["x"].min() == restored["y"].min() == 1


def test_scores_before_any_episode_ended_can_be_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, flatten({"x": np.zeros(1)}), -math.inf)
    checkpoints.save(2, flatten({"x": np.ones(1)}), 0.5)
    assert checkpoints.best_iteration() == 2
    checkpoints.close()


def test_interrupted_save_leaves_the_earlier_checkpoint(run_copy):
    newest = run_copy.checkpoints_path / "4"
    partial = run_copy.checkpoints_path / "5.orbax-checkpoint-tmp"
    shutil.copytree(newest, partial)
    for file in partial.rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])
    assert int(training.load(run_copy)[3].iteration) == 4


def test_full_disk_leaves_the_earlier_checkpoint(tmp_path):
    script = """
        import resource, sys, pathlib
        import numpy as np
        from vernal.adapters.runs.checkpoints import Checkpoints, flatten
        checkpoints = Checkpoints(pathlib.Path(sys.argv[1]))
        rng = np.random.default_rng(0)
        checkpoints.save(1, flatten({"x": rng.random(100_000)}), 0.0)
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            checkpoints.save(2, flatten({"x": rng.random(100_000)}), 0.0)
            checkpoints.wait()
        except OSError as error:
            print(error)
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "the checkpoint of iteration 2 could not be written" in done.stdout, done.stderr
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.iterations() == [1]
    expected = np.random.default_rng(0).random(100_000).astype(np.float32)
    restored = checkpoints.restore({"x": np.zeros(100_000)})["x"]
    np.testing.assert_allclose(restored, expected, rtol=1e-6)
    checkpoints.close()


def test_interrupt_saves_the_iteration_it_came_in(tmp_path):
    def interrupt(progress):
        if progress.row["iteration"] == 2:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="after iteration 2, whose state is saved"):
        training.start(CONFIG, tmp_path / "run", interrupt)
    assert int(training.load(RunFolder(tmp_path / "run"))[3].iteration) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_in_the_last_iteration_says_that_the_run_is_complete(run_copy):
    def interrupt(progress):
        del progress
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(
        KeyboardInterrupt, match=r"after iteration 5, .* the run is complete"
    ) as stop:
        training.resume(run_copy, interrupt, steps=128 * 5)
    assert "resume" not in str(stop.value)


def test_curve_shows_every_run(whole_run, tmp_path):
    draw_curve([whole_run, whole_run], tmp_path / "both.png")
    draw_curve([whole_run], tmp_path / "one.png")
    with Image.open(tmp_path / "both.png") as both, Image.open(tmp_path / "one.png") as one:
        assert both.size == one.size
        assert (np.asarray(both) != np.asarray(one)).any()


def test_curve_of_no_ended_episode_is_refused(tmp_path):
    folder = create_run_folder(tmp_path / "run")
    folder.write_config(CONFIG.to_dict())
    folder.append_metrics({"iteration": 1, "steps": 128, "episodes": 0})
    with pytest.raises(ValueError, match="no episode has ended"):
        draw_curve([folder], tmp_path / "curve.png")


def test_animation_has_a_frame_for_every_state(tmp_path):
    maze = make_once("maze-easy")
    states = record_states(
        maze, make_random_policy(maze), jax.random.key(0), episodes=2, max_steps=4
    )
    animate(maze, states, tmp_path / "agent.gif", frames_per_second=10)
    assert len(states) == 2 * 5
    # Pillow merges frames that are equal; the agent may bump into the border.
    places = [tuple(map(int, state.agent_position)) for state in states]
    moves = sum(a != b for a, b in itertools.pairwise(places))
    with Image.open(tmp_path / "agent.gif") as film:
        frames = list(ImageSequence.Iterator(film))
    assert len(frames) == moves + 1


def test_animation_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"ends in .gif or .mp4"):
        animate(make_once("maze-easy"), [], tmp_path / "agent.avi", frames_per_second=8)


def test_film_without_ffmpeg_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="ffmpeg is not installed"):
        animate(make_once("maze-easy"), [], tmp_path / "agent.mp4", frames_per_second=8)


# ---- a stranger's folder -----------------------------------------------------------------------

HUGE = 10**12
HOSTILE = {
    "agent": ["ppoo", "../../ppo", "os:system", 3, ["ppo"], "", "ppo\x1b[2J"],
    "environment": ["subprocess:getoutput", "a:b:c", ":", "../maze-easy", "/etc", 3, {}, "\x1b]0;"],
    "network": ["os:system", "../spec", 3, []],
    "seed": [-1, HUGE, "0", 0.5, True, []],
    "steps": [0, -1, 10**30, "512", 1e9, math.inf, []],
    "seeds": [0, 10**9, HUGE, "2", 1.5],
    "devices": [0, -1, "1", True],
    "at_once": [-1, "1", 0.5],
    "vary": [
        [],
        {"gamma": 0.9},
        {"gamma": []},
        {"gamma": ["0.9"]},
        {"gamma": [0.9, 0.9]},
        {"envs": [1.0]},
        {"os:system": [1.0]},
        {"gamma": [x / 1000 for x in range(1000)], "gae_lambda": [x / 1100 for x in range(1100)]},
    ],
    "environment_arguments": [[], "x", {"num_rows": 5}, {"a": "\x1b[2J"}],
    "versions": [[], "x", {"jax": 1}, {"jax": "\x1b[2J"}, {"jax": {}}],
    "jax_options": [[], {"jax_enable_x64": True}, {"jax_enable_x64": "True"}],
    "settings": [None, [], "x", {}, {"os:system": 1}],
    "surprise": [1],
}
HOSTILE_SETTINGS = {
    "envs": [0, -1, "2", 2.5, True, HUGE, 10**30],
    "epochs": [0, "1", 1.0],
    "minibatch_size": [0, 100, "64"],
    "rollout_steps": [0, "64"],
    "learning_rate": [0.0, -1.0, math.inf, math.nan, "1e-3", True, []],
    "gamma": [-0.1, 1.5, math.nan, "0.9"],
    "max_grad_norm": [0.0, math.nan, "0.5"],
    "normalise_values": ["false", 0, []],
}


@pytest.fixture
def imported(monkeypatch):
    """Names of modules that a run had imported."""
    names = []
    monkeypatch.setattr(factories.importlib, "import_module", names.append)
    return names


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name, values in HOSTILE.items() for value in values),
        *((f"settings.{n}", value) for n, values in HOSTILE_SETTINGS.items() for value in values),
    ],
    ids=lambda value: f"{value!r:.30}",
)
def test_whatever_a_configuration_says_is_refused_in_a_sentence(name, value, run_copy, imported):
    values = run_copy.read_config()
    table, _, inner = name.rpartition(".")
    place = values[table] if table else values
    if value is None:
        del place[inner]
    else:
        place[inner] = value
    run_copy.replace_config(values)
    before = sorted(run_copy.path.rglob("*"))
    for use in (lambda: training.load(run_copy), lambda: training.resume(run_copy, ignore)):
        with pytest.raises(ValueError) as fault:  # noqa: PT011
            use()
        assert str(fault.value).isprintable(), fault.value
        assert len(str(fault.value)) < 500
        assert type(fault.value) is ValueError
    assert imported == []
    assert sorted(run_copy.path.rglob("*")) == before


@pytest.mark.parametrize("text", [b"\xff", b"a = " + b"[" * 2000, b"agent = 'ppo'", b""])
def test_configuration_that_is_no_toml_or_half_of_one_is_refused(run_copy, text):
    run_copy.config_path.write_bytes(text)
    with pytest.raises(ValueError, match=r"config.toml (is damaged|does not fit)"):
        training.load(run_copy)


def test_missing_and_unknown_names_of_a_configuration_are_told(run_copy):
    values = run_copy.read_config()
    with pytest.raises(ValueError, match="does not fit this vernal: there is no agent 'ppoo'; ch"):
        training.RunConfig.from_dict({**values, "agent": "ppoo"})
    with pytest.raises(ValueError, match="does not fit this vernal: it lacks environment, seed"):
        training.RunConfig.from_dict(
            {k: v for k, v in values.items() if k not in ("environment", "seed")}
        )
    with pytest.raises(ValueError, match="epochs is 'two'; give a whole number"):
        training.RunConfig.from_dict(
            {**values, "settings": {**values["settings"], "epochs": "two"}}
        )


@pytest.mark.parametrize("command", ["evaluate", "watch", "resume", "plot"])
def test_command_of_a_folder_is_not_run(command, run_copy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = run_copy.read_config()
    values |= {
        "environment": "subprocess:getoutput",
        "environment_arguments": {"cmd": "touch made"},
    }
    run_copy.replace_config(values)
    with pytest.raises(SystemExit) if command != "plot" else contextlib.nullcontext():
        main([command, str(run_copy.path)])
    assert not (tmp_path / "made").exists()
    if command != "plot":  # Which reads numbers and makes no environment.
        errors = capsys.readouterr().err
        assert "this run imports and runs subprocess:getoutput as its environment" in errors
        assert "--trust" in errors
        assert len(errors.splitlines()) == 1


def test_environment_of_ones_own_is_trusted_where_it_is_typed_and_by_a_word(tmp_path, monkeypatch):
    (tmp_path / "own_maze.py").write_text(
        "from vernal.adapters.mazes import make_easy_maze as make\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = dataclasses.replace(CONFIG, environment="own_maze:make", steps=128)
    folder = training.start(config, tmp_path / "run", ignore)
    del sys.modules["own_maze"]
    for use in (lambda: training.load(folder), lambda: training.resume(folder, ignore, steps=256)):
        with pytest.raises(ValueError, match=r"own_maze:make as its environment, .*trust=True"):
            use()
    assert "own_maze" not in sys.modules
    assert training.load(folder, trust=True).config == config
    training.resume(folder, ignore, steps=256, trust=True)
    assert len(folder.read_metrics()) == 2
    del sys.modules["own_maze"]


def test_levels_that_are_downloaded_are_no_strangers_choice(run_copy, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr("jumanji.environments.routing.sokoban.generator.hf_hub_download", refuse)
    values = run_copy.read_config()
    chosen = {"generator": "HuggingFaceDeepMindGenerator", "dataset_name": "hard"}
    run_copy.replace_config(
        {**values, "environment": "Sokoban-v0", "environment_arguments": chosen}
    )
    with pytest.raises(ValueError, match="this run downloads levels for its HuggingFaceDeepMindG"):
        training.load(run_copy)


def test_picture_that_cannot_be_drawn_costs_no_run(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise ValueError("no such backend")

    monkeypatch.setattr(training, "draw_curve", fail)
    training.start(CONFIG, tmp_path / "run", ignore)
    assert "the curve could not be drawn (no such backend)" in capsys.readouterr().err


def test_line_that_cannot_be_said_costs_no_run(run_copy, monkeypatch):
    class Gone:
        def write(self, text):
            raise BrokenPipeError

    shutil.rmtree(run_copy.checkpoints_path)
    monkeypatch.setattr(sys, "stderr", Gone())
    training.resume(run_copy, ignore)


def stop_in_the_second(number):
    def report(progress):
        if progress.row["iteration"] == 2:
            signal.raise_signal(number)

    return report


@pytest.fixture
def answer_to_hangup(request):
    """How this process answers SIGHUP, whatever it inherited from the shell that started it."""
    before = signal.signal(signal.SIGHUP, request.param)
    yield request.param
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("answer_to_hangup", [signal.SIG_DFL], indirect=True)
def test_terminal_that_goes_away_ends_the_run_as_sigterm_does(tmp_path, answer_to_hangup):
    with pytest.raises(training.Preempted, match="after iteration 2, whose state is saved"):
        training.start(CONFIG, tmp_path / "run", stop_in_the_second(signal.SIGHUP))
    assert signal.getsignal(signal.SIGHUP) is answer_to_hangup


@pytest.mark.parametrize("answer_to_hangup", [signal.SIG_IGN], indirect=True)
def test_terminal_that_goes_away_is_ignored_under_nohup(tmp_path, answer_to_hangup):
    folder = training.start(CONFIG, tmp_path / "run", stop_in_the_second(signal.SIGHUP))
    assert signal.getsignal(signal.SIGHUP) is answer_to_hangup
    assert len(folder.read_metrics()) == 4


def test_nothing_is_unpickled(whole_run, monkeypatch):
    for package in vernal.__path__:
        for path in pathlib.Path(package).rglob("*.py"):
            assert not re.search(r"\b(pickle|dill|shelve|marshal)\b", path.read_text()), path

    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert int(training.load(whole_run).state.iteration) == 4


# ---- paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "runs [old]",
        "a*b",
        "q?",
        "{x}",
        "ünï 漢字",
        "two  spaces",
        "new\nline",
        "#h%20%s",
        "~",
        "-x",
    ],
)
def test_checkpoints_lie_in_a_folder_of_any_name(name, tmp_path):
    state = {"x": np.arange(3.0, dtype=np.float32)}
    with open_checkpoints(tmp_path / name) as checkpoints:
        checkpoints.save(1, flatten(state), 0.0)
    with open_checkpoints(tmp_path / name, read_only=True) as checkpoints:
        np.testing.assert_array_equal(checkpoints.restore(state)["x"], state["x"])


def test_run_in_a_folder_with_brackets_goes_on(tmp_path):
    half = dataclasses.replace(CONFIG, steps=128)
    folder = training.start(half, str(tmp_path / "runs [old]" / "a*"), ignore)
    training.resume(folder, ignore, steps=256)
    assert int(training.load(folder).state.iteration) == 2


@pytest.mark.parametrize("name", ["back\\slash", os.fsdecode(b"no-text-\xff")])
def test_folder_that_the_library_takes_for_another_is_refused_before_it_is_made(name, tmp_path):
    with pytest.raises(ValueError, match=r"checkpoints cannot lie in .*Give a folder"):
        training.start(CONFIG, tmp_path / name, ignore)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_refused_as_such_and_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "compile_step", lambda *_: pytest.fail("it was compiled before"))
    (tmp_path / "file").write_text("")
    for sub in ("run", "deep/run"):
        with pytest.raises(ValueError, match=rf"{tmp_path}/file is a file; give another --folder"):
            training.start(CONFIG, tmp_path / "file" / sub, ignore)
    with pytest.raises(ValueError, match="file exists already"):
        training.start(CONFIG, tmp_path / "file", ignore)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OSError, match=rf"{tmp_path} is read-only; give another --folder"):
        training.start(CONFIG, tmp_path / "run", ignore)


# ---- an owner ----------------------------------------------------------------------------------


def test_run_that_is_being_trained_is_not_resumed_but_read(run_copy):
    said = []

    def report(progress):
        del progress
        with pytest.raises(
            ValueError, match=rf"being trained by process {os.getpid()} on"
        ) as fault:
            training.resume(run_copy, ignore, steps=128 * 6)
        said.append(str(fault.value))
        training.load(run_copy)

    training.resume(run_copy, report, steps=128 * 5)
    assert len(said) == 1
    assert not (run_copy.path / "lock").exists()


def test_killed_owner_leaves_no_lock(tmp_path):
    script = """
        import pathlib, sys, time
        from vernal.adapters.runs.folder import RunFolder
        with RunFolder(pathlib.Path(sys.argv[1])).own():
            print("mine", flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        with (
            pytest.raises(ValueError, match=rf"trained by process {owner.pid} on .*; wait for"),
            RunFolder(tmp_path).own(),
        ):
            pass
        owner.kill()
    assert (tmp_path / "lock").exists()
    with RunFolder(tmp_path).own():
        pass


def test_lock_that_was_removed_in_the_moment_before_is_taken_anew(tmp_path, monkeypatch):
    """The owner before it ended between the opening of its file and the locking of it."""
    real, path = folder_module.fcntl.flock, tmp_path / "lock"
    ends = [path.unlink]

    def flock(*arguments):
        if ends:
            ends.pop()()
        real(*arguments)

    monkeypatch.setattr(folder_module.fcntl, "flock", flock)
    with RunFolder(tmp_path).own():
        assert path.exists()
        with pytest.raises(ValueError, match="is being trained"), RunFolder(tmp_path).own():
            pass


def test_file_system_without_locks_is_trained_on(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(folder_module.fcntl, "flock", flock)
    with RunFolder(tmp_path).own():
        pass


def test_folder_that_cannot_be_written_to_is_told_with_advice(run_copy, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with (
        pytest.raises(OSError, match=r"cannot be written to \(Read-only .*; copy the run to where"),
        run_copy.own(),
    ):
        pass


# ---- damage ------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_checkpoints(path, **options):
    checkpoints = Checkpoints(path, **options)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def flip_a_bit(data, rng):
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


DAMAGES = {
    "cut short": lambda data, _: data[: len(data) // 2],
    "empty": lambda *_: b"",
    "random": lambda data, rng: rng.randbytes(len(data)),
    "one bit": flip_a_bit,
    "gone": None,
}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """Numbers that do not compress, so that each byte of them counts."""
    path = tmp_path_factory.mktemp("checkpoints")
    rng = np.random.default_rng(0)
    states = {n: {"x": rng.random(500, np.float32), "n": np.int32(n)} for n in (1, 2)}
    with open_checkpoints(path) as checkpoints:
        for number, state in states.items():
            checkpoints.save(number, flatten(state), 0.0, {"of": "a test"})
    return path, states


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed_or_does_no_harm(damage, two_checkpoints, tmp_path):
    source, states = two_checkpoints
    files = [p.relative_to(source) for p in (source / "2").rglob("*") if p.stat().st_size]
    rng, noticed, refused = random.Random(0), {}, []
    for file in (file for file in files if (source / file).is_file()):
        copy = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(source, copy)
        change = DAMAGES[damage]
        if change is None:
            (copy / file).unlink()
        else:
            (copy / file).write_bytes(change((copy / file).read_bytes(), rng))
        with open_checkpoints(copy, read_only=True) as checkpoints:
            assert checkpoints.iterations() == [1, 2], file
            assert checkpoints.best_iteration() in (1, 2)
            try:
                state = checkpoints.restore(states[2], 2)
            except Damaged as error:
                noticed[file.name] = str(error)
                continue
            except ValueError as error:  # A name or a shape that is not what it was.
                refused.append(str(error))
                continue
            for name, array in states[2].items():
                np.testing.assert_array_equal(state[name], array, err_msg=str(file))
    assert len(noticed) >= (3 if damage == "one bit" else 4)
    assert all("the checkpoint of iteration 2 in" in said for said in noticed.values())
    assert all("does not fit" in said for said in refused)


def newest(folder):
    return folder.checkpoints_path / "4"


def cut_short(path):
    for file in path.rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])


def rename_a_setting(path):
    about = path / "_CHECKPOINT_METADATA"
    about.write_text(about.read_text().replace("gamma", "gbmma"))


def empty_out(path):
    shutil.rmtree(path)
    path.mkdir()


@pytest.mark.parametrize("damage", [cut_short, empty_out, rename_a_setting])
def test_run_goes_on_from_the_newest_whole_checkpoint_and_loses_nothing(
    damage, run_copy, whole_run, capsys
):
    damage(newest(run_copy))
    broken = sorted(p.relative_to(newest(run_copy)) for p in newest(run_copy).rglob("*"))
    assert int(training.load(run_copy).state.iteration) == 3
    said = capsys.readouterr().err
    assert re.search(
        r"checkpoint of iteration 4 in .* is damaged.*; that of iteration 3 is u", said
    )
    assert newest(run_copy).exists()  # A reader leaves all as it is.
    training.resume(run_copy, ignore)
    aside = run_copy.checkpoints_path / "damaged-4"
    assert f"now lies in {aside}; that of iteration 3 is used" in capsys.readouterr().err
    assert sorted(p.relative_to(aside) for p in aside.rglob("*")) == broken
    assert without_times(run_copy.read_metrics()) == without_times(whole_run.read_metrics())
    set_aside = RunFolder(run_copy.path, metrics_name="metrics-set-aside.jsonl").read_metrics()
    assert set_aside == whole_run.read_metrics()[3:]
    for a, b in zip(*(leaves(training.load(f).state) for f in (run_copy, whole_run)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_best_checkpoint_that_is_damaged_is_replaced_by_the_newest(run_copy, capsys):
    with open_checkpoints(run_copy.checkpoints_path, read_only=True) as checkpoints:
        best = checkpoints.best_iteration()
    cut_short(run_copy.checkpoints_path / str(best))
    loaded = training.load(run_copy, best=True)
    assert int(loaded.state.iteration) == (3 if best == 4 else 4)
    assert f"iteration {best} in" in capsys.readouterr().err


def test_all_checkpoints_damaged_is_one_sentence(run_copy):
    for path in run_copy.checkpoints_path.iterdir():
        cut_short(path)
    before = sorted(run_copy.path.rglob("*"))
    for use in (lambda: training.load(run_copy), lambda: training.resume(run_copy, ignore)):
        with pytest.raises(
            ValueError, match=r"iteration 4 .*; .*iteration 3 .*no whole one is left"
        ):
            use()
    assert sorted(run_copy.path.rglob("*")) == before


def test_run_without_checkpoints_says_that_it_begins_again(run_copy, capsys):
    shutil.rmtree(run_copy.checkpoints_path)
    rows = run_copy.read_metrics()
    training.resume(run_copy, ignore)
    assert "holds no checkpoint; it begins from the start" in capsys.readouterr().err
    aside = RunFolder(run_copy.path, metrics_name="metrics-set-aside.jsonl")
    assert aside.read_metrics() == rows


@pytest.mark.parametrize(
    "end",
    [
        b"\xff\xfe\n",
        b"7\n",
        b"null\n",
        b'{"iteration": 5, "epi',
        b'{"iteration": "x"}\n',
        b"[" * 9999,
    ],
)
def test_metrics_that_end_in_anything_are_read_and_nothing_is_lost(end, run_copy):
    lines = run_copy.metrics_path.read_bytes()
    run_copy.metrics_path.write_bytes(lines + end)
    assert len(run_copy.read_metrics()) == 4
    run_copy.set_metrics_aside(4)
    assert run_copy.metrics_path.read_bytes() == lines
    aside = (run_copy.path / "metrics-set-aside.jsonl").read_bytes()
    assert aside.rstrip(b"\n") == end.rstrip(b"\n")


def test_line_that_was_cut_at_its_end_does_not_swallow_the_next(run_copy):
    run_copy.metrics_path.write_bytes(run_copy.metrics_path.read_bytes()[:-1])
    run_copy.set_metrics_aside(4)
    run_copy.append_metrics({"iteration": 5})
    assert [row["iteration"] for row in run_copy.read_metrics()] == [1, 2, 3, 4, 5]


def test_lines_that_a_crash_lost_are_told(run_copy, capsys):
    lines = run_copy.metrics_path.read_bytes().splitlines(keepends=True)
    run_copy.metrics_path.write_bytes(b"".join([lines[0], lines[3]]))
    training.resume(run_copy, ignore, steps=128 * 5)
    assert "lacks 2 of the 4 iterations before, from iteration 2 on" in capsys.readouterr().err


def test_full_or_read_only_folder_of_checkpoints_is_told_before_the_library_begins(
    tmp_path, monkeypatch
):
    with open_checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(os, "access", lambda *_: False)
        with pytest.raises(
            OSError, match=r"could not be written .* \(nothing can be written there"
        ):
            checkpoints.save(1, {"x": np.ones(1)}, 0.0)
    assert list(tmp_path.iterdir()) == []


# ---- several agents ----------------------------------------------------------------------------


def test_best_member_is_one_that_arrived(tmp_path):
    folder, members = RunFolder(tmp_path), [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    first = {"iteration": 1, "mean_return": 9.0}
    folder.append_metrics(*({**member, **first} for member in members))
    folder.append_metrics(*({"seed": n, "iteration": 2, "mean_return": None} for n in (1, 2)))
    folder.append_metrics({"seed": 5, "iteration": 2, "mean_return": 99.0})
    assert training.best_member(folder, members) == 1


def test_best_member_of_no_metrics_is_asked_for(tmp_path):
    with pytest.raises(ValueError, match=r"which of the 2 agents is best; .*--member, from 0 to 1"):
        training.best_member(RunFolder(tmp_path), [{"seed": 0}, {"seed": 1}])


def test_member_of_a_single_agent_is_refused_as_such(whole_run):
    with pytest.raises(ValueError, match="member is 3; this run has one agent; give 0"):
        training.load(whole_run, member=3)


# ---- a configuration from Python ---------------------------------------------------------------


@pytest.fixture
def unchecked():
    """As outside of the tests: what is annotated is not verified."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("number", [np.float32, np.float64, jnp.float32])
def test_numbers_of_numpy_and_jax_are_written_and_read_back_the_same(number, tmp_path):
    settings: dict[str, Any] = {"minibatch_size": np.int32(64), "learning_rate": number(1e-3)}
    config = dataclasses.replace(
        CONFIG,
        seed=np.int64(3),
        settings=PPOConfig(**settings),
        vary={
            "gamma": [number(x) for x in (0.9, 0.99)],
            "gae_lambda": np.asarray([0.1, 1.0], np.float32),
        },
    )
    folder = create_run_folder(tmp_path / "run")
    folder.write_config(config.to_dict())
    read = training.RunConfig.from_dict(folder.read_config())
    assert read == config
    assert np.float32(read.settings.learning_rate) == np.float32(number(1e-3))
    assert np.float32(read.vary["gae_lambda"][0]) == np.float32(0.1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"agent": "a2c"}, "there is no agent 'a2c'; choose one of ppo, alphazero"),
        (
            {"settings": {"envs": 2}},
            r"settings of ppo are of type dict; make them with PPOConfig\(",
        ),
        ({"settings": AlphaZeroConfig()}, "settings of ppo are of type AlphaZeroConfig"),
        ({"environment": "maze\neasy"}, "environment is .*; give printable text"),
        (
            {"environment_arguments": {"a": "x\x00"}},
            "environment_arguments is .*; give a table of t",
        ),
        ({"seeds": 2**20 + 1}, "these are 1,048,577 agents; give at most 1,048,576"),
        ({"network": "resnet"}, "there is no network 'resnet'"),
        ({"environment": 3}, "environment is 3; give printable text"),
        ({"steps": "9"}, "steps is '9'; give a whole number"),
        ({"vary": [0.9]}, r"vary is \[0.9\]; give a table of lists of numbers"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_configuration_that_cannot_be_is_refused_in_a_sentence(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **change)


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1000, 10**6])
def test_more_memory_than_there_is_is_refused_before_anything_is_written(
    room, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, "make_program", make_program)
    monkeypatch.setattr(program, "_system_memory", lambda: room)
    what = "the state of this run" if room == 1000 else "training"
    with pytest.raises(
        ValueError, match=rf"{what} takes .* GB of memory, and there are .*; take fe"
    ):
        training.start(CONFIG, tmp_path / "run", ignore)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"envs": 10**12}, {"rollout_steps": 10**12}], ids=str)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
def test_more_than_can_be_counted_is_refused_before_anything_is_written(change, tmp_path):
    settings = dataclasses.replace(SETTINGS, **change)
    with pytest.raises(ValueError, match=r"this run is too large \(.*; take fewer environments"):
        training.start(dataclasses.replace(CONFIG, settings=settings), tmp_path / "run", ignore)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_runs_out_in_the_first_iteration_leaves_no_folder(tmp_path, monkeypatch):
    def fail(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")

    def make(*arguments, **options):
        return make_program(*arguments, **options)._replace(step=fail)

    monkeypatch.setattr(training, "make_program", make)
    monkeypatch.setattr(training, "compile_step", ignore_all)
    with pytest.raises(ValueError, match=r"too large \(RESOURCE_EXHAUSTED: Out of memory alloc"):
        training.start(CONFIG, tmp_path / "run", ignore)
    assert list(tmp_path.iterdir()) == []


def ignore_all(*_):
    pass


def test_step_that_was_compiled_ahead_is_not_compiled_again():
    trained = make_program(CONFIG)
    state, compiled = trained.init(), []

    def count(event, duration_secs, **_):
        del duration_secs
        compiled.append(event.endswith("backend_compile_duration"))

    program.compile_step(trained, state)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        trained.step(state)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert not any(compiled)


# ---- what JAX was told -------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["jax_threefry_partitionable", "jax_default_matmul_precision"])
def test_run_under_another_option_of_jax_is_refused_by_name(option, run_copy):
    values = run_copy.read_config()
    here = values["jax_options"][option]
    values["jax_options"][option] = "another"
    run_copy.replace_config(values)
    with pytest.raises(ValueError, match=rf"{option} is {here}, and was another.*--any-versions"):
        training.resume(run_copy, ignore, steps=128 * 5)
    training.load(run_copy)
    training.resume(run_copy, ignore, steps=128 * 5, any_versions=True)
    assert run_copy.read_config()["jax_options"][option] == here


def test_option_of_jax_that_changes_arrays_is_named_and_not_the_network(run_copy):
    with jax.default_prng_impl("rbg"):
        for use in (
            lambda: training.load(run_copy),
            lambda: training.resume(run_copy, ignore, steps=128 * 5, any_versions=True),
        ):
            with pytest.raises(
                ValueError, match="jax_default_prng_impl is rbg, and was threefry2x32"
            ):
                use()


def test_run_from_before_options_were_recorded_goes_on(run_copy):
    values = run_copy.read_config()
    del values["jax_options"]
    run_copy.replace_config(values)
    training.resume(run_copy, ignore, steps=128 * 5)
    assert "jax_options" in run_copy.read_config()
