"""Runs: nothing is lost, nothing overwritten, and a resumed run is the run itself."""

import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from PIL import Image, ImageSequence

from vernal.adapters.agents.ppo import PPOConfig
from vernal.adapters.evaluation import make_random_policy
from vernal.adapters.runs import training
from vernal.adapters.runs.animation import animate, record_states
from vernal.adapters.runs.checkpoints import Checkpoints, flatten
from vernal.adapters.runs.curve import draw_curve
from vernal.adapters.runs.folder import RunFolder, create_run_folder, next_free_path
from vernal.adapters.runs.program import make_program
from vernal.adapters.runs.progress import describe

from .environments_for_tests import make_once

SETTINGS = PPOConfig(envs=2, rollout_steps=64, minibatch_size=64, epochs=1)
CONFIG = training.RunConfig("ppo", "maze-easy", "spec", seed=0, steps=128 * 4, settings=SETTINGS)


def ignore(progress):
    del progress


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of four iterations; read, never written to."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    return training.start(CONFIG, path, ignore)


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
    assert {p.name for p in (tmp_path / "run").iterdir()} <= {"config.toml", "checkpoints"}


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


def test_checkpoint_holds_typed_keys(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    state = {"key": jax.random.key(3), "x": jax.numpy.arange(2.0)}
    checkpoints.save(1, flatten(state), 0.0)
    checkpoints.wait()
    restored = checkpoints.restore(jax.eval_shape(lambda: state))
    assert restored["key"].dtype == state["key"].dtype
    np.testing.assert_array_equal(leaves(restored)[0], leaves(state)[0])
    checkpoints.close()


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
