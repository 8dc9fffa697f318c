"""Runs that are killed, preempted, out of room or out of numbers: nothing is lost.

Processes are killed in earnest. A kill comes at a random moment of a random iteration, or as
soon as a checkpoint is seen half-written; checkpoints are written after every iteration.
"""

import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from vernal.adapters.agents.alphazero import AlphaZeroConfig
from vernal.adapters.agents.ppo import PPOConfig
from vernal.adapters.cli import main
from vernal.adapters.runs import training
from vernal.adapters.runs.checkpoints import Checkpoints, flatten
from vernal.adapters.runs.folder import RunFolder
from vernal.adapters.runs.training import Preempted, RunConfig, Safety

SETTINGS = PPOConfig(envs=4, rollout_steps=32, minibatch_size=64, epochs=1)
STEPS = SETTINGS.envs * SETTINGS.rollout_steps
CONFIG = RunConfig("ppo", "maze-easy", "spec", seed=0, steps=4 * STEPS, settings=SETTINGS)
ALWAYS = Safety(save_every=0.0)
KILLS = 10


def ignore(progress):
    del progress


def arrays_of(path):
    """All arrays of the newest checkpoint, and the metrics without their times."""
    folder = RunFolder(path)
    state = flatten(training.load(folder).state)
    rows = [{k: v for k, v in row.items() if "second" not in k} for row in folder.read_metrics()]
    return rows, jax.tree.map(np.asarray, state)


def assert_same_run(path, other):
    (rows, state), (expected_rows, expected) = arrays_of(path), arrays_of(other)
    assert rows == expected_rows
    assert state.keys() == expected.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


# ---- killed ------------------------------------------------------------------------------------

LIFE = """
    import sys
    from pathlib import Path
    from vernal.adapters.agents.ppo import PPOConfig
    from vernal.adapters.runs import training
    from vernal.adapters.runs.folder import RunFolder

    path, steps = Path(sys.argv[1]), int(sys.argv[2])
    settings = PPOConfig(envs=4, rollout_steps=32, minibatch_size=64, epochs=1)
    config = training.RunConfig("ppo", "maze-easy", "spec", 0, steps, settings)
    safety = training.Safety(save_every=0.0)
    if path.exists():
        training.resume(RunFolder(path), lambda progress: None, safety)
    else:
        training.start(config, path, lambda progress: None, safety)
"""


@pytest.fixture(scope="module")
def live():
    """Start or resume a run in a process of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}

    def start(path, iterations):
        command = [sys.executable, "-c", textwrap.dedent(LIFE), str(path), str(iterations * STEPS)]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    return start


@pytest.fixture(scope="module")
def undisturbed(live, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "undisturbed"
    _, errors = (process := live(path, 60)).communicate()
    assert process.returncode == 0, errors
    return path


def wait_until(condition, process):
    while not condition():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.001)


@pytest.mark.parametrize("chain", range(2))
def test_run_killed_at_any_moment_goes_on_as_if_it_had_not_been(chain, live, undisturbed, tmp_path):
    moments, path = random.Random(chain), tmp_path / "run"
    folder = RunFolder(path)
    for kill in range(KILLS):
        before = len(folder.read_metrics())
        process = live(path, 60)
        lines = max(1, before - 2) + moments.randrange(1, 4)
        wait_until(lambda lines=lines: len(folder.read_metrics()) >= lines, process)
        if kill % 2:
            time.sleep(moments.uniform(0, 0.05))
        else:
            wait_until(lambda: any(folder.checkpoints_path.glob("*tmp*")), process)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    process = live(path, 60)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert_same_run(path, undisturbed)


# ---- told to stop ------------------------------------------------------------------------------


def stop_in(iteration):
    def report(progress):
        if progress.row["iteration"] == iteration:
            signal.raise_signal(signal.SIGTERM)

    return report


def test_sigterm_saves_and_the_run_goes_on(tmp_path):
    path, whole = tmp_path / "run", tmp_path / "whole"
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match=r"after iteration 2, whose state is saved; `vernal resume"):
        training.start(CONFIG, path, stop_in(2))
    assert signal.getsignal(signal.SIGTERM) is before
    training.resume(RunFolder(path), ignore)
    training.start(CONFIG, whole, ignore)
    assert_same_run(path, whole)


def test_second_sigterm_does_not_keep_the_first_from_saving(tmp_path):
    def stop_twice(progress):
        del progress
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Preempted, match="after iteration 1, whose state is saved"):
        training.start(CONFIG, tmp_path / "run", stop_twice)
    assert int(training.load(RunFolder(tmp_path / "run")).state.iteration) == 1


def test_sigterm_in_the_last_iteration_leaves_nothing_to_try_again(tmp_path):
    folder = training.start(CONFIG, tmp_path / "run", stop_in(4))
    assert int(training.load(folder).state.iteration) == 4


def test_sigterm_has_an_exit_code_of_its_own(tmp_path, monkeypatch, capsys):
    def preempted(*_, **__):
        raise Preempted("stopped after iteration 2, whose state is saved.")

    monkeypatch.setattr(training, "start", preempted)
    with pytest.raises(SystemExit) as stop:
        main(["train", "ppo", "maze-easy", "--folder", str(tmp_path / "run")])
    assert stop.value.code == 75
    assert capsys.readouterr().err == "vernal: stopped after iteration 2, whose state is saved.\n"


def test_alphazero_with_its_replay_resumes_bit_for_bit(tmp_path):
    settings = AlphaZeroConfig(
        envs=2, rollout_steps=8, minibatch_size=8, epochs=1, simulations=2, replay_iterations=2
    )
    config = dataclasses.replace(CONFIG, agent="alphazero", settings=settings, steps=4 * 16)
    with pytest.raises(KeyboardInterrupt):
        training.start(config, tmp_path / "run", stop_in(3))
    training.resume(RunFolder(tmp_path / "run"), ignore)
    training.start(config, tmp_path / "whole", ignore)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("change", [{"devices": 2}, {"seeds": 2, "devices": 2}], ids=str)
def test_many_devices_and_agents_resume_bit_for_bit(change, tmp_path):
    config = dataclasses.replace(CONFIG, **change)
    with pytest.raises(Preempted):
        training.start(config, tmp_path / "run", stop_in(2))
    training.resume(RunFolder(tmp_path / "run"), ignore)
    training.start(config, tmp_path / "whole", ignore)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


# ---- other software, another configuration -----------------------------------------------------


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "short"
    return training.start(dataclasses.replace(CONFIG, steps=2 * STEPS), path, ignore)


@pytest.fixture
def run_copy(short_run, tmp_path):
    shutil.copytree(short_run.path, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


def edit_config(folder, old, new):
    text = folder.config_path.read_text()
    assert old in text
    folder.config_path.write_text(text.replace(old, new))


def test_other_versions_are_named_and_may_be_accepted(run_copy):
    version = training.versions()["optax"]
    edit_config(run_copy, f'optax = "{version}"', 'optax = "0.0.1"')
    with pytest.raises(ValueError, match=rf"optax is {version}, and was 0.0.1.*--any-versions"):
        training.resume(run_copy, ignore, steps=3 * STEPS)
    training.resume(run_copy, ignore, steps=3 * STEPS, any_versions=True)
    assert run_copy.read_config()["versions"]["optax"] == version


def test_checkpoint_of_another_setting_is_refused_by_name(run_copy):
    edit_config(run_copy, "gamma = 0.99", "gamma = 0.9")
    with pytest.raises(ValueError, match=r"settings.gamma is 0.9 here and 0.99 there"):
        training.resume(run_copy, ignore, steps=3 * STEPS)
    assert len(run_copy.read_metrics()) == 2


def test_checkpoint_of_another_shape_is_refused_by_leaf(run_copy):
    iteration = Checkpoints(run_copy.checkpoints_path, read_only=True).iterations()[-1]
    shutil.rmtree(run_copy.checkpoints_path)
    checkpoints = Checkpoints(run_copy.checkpoints_path)
    checkpoints.save(iteration, {".iteration": np.zeros(3, np.int32)}, 0.0)
    checkpoints.close()
    with pytest.raises(ValueError, match=r"does not fit: its \.\w+.* is missing, but this agent's"):
        training.load(run_copy)


# ---- no room -----------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch):
    """A disk that is full from the second checkpoint on."""
    asked = iter([10**12])
    real = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=next(asked, 10)))


@pytest.mark.usefixtures("full_disk")
def test_full_disk_ends_the_run_and_keeps_what_was_saved(tmp_path):
    wanted = r"iteration 2 could not be written .*No space left on device: it takes up to [\d,]+ by"
    with pytest.raises(OSError, match=wanted):
        training.start(CONFIG, tmp_path / "run", ignore, ALWAYS)
    assert int(training.load(RunFolder(tmp_path / "run")).state.iteration) == 1


@pytest.mark.usefixtures("full_disk")
def test_full_disk_is_lived_with_by_a_flag(tmp_path, capsys, monkeypatch):
    folder, safety = RunFolder(tmp_path / "run"), dataclasses.replace(ALWAYS, on_full_disk="go-on")
    with pytest.raises(OSError, match=r"state of iteration 4, the last one, is not saved; make"):
        training.start(CONFIG, folder.path, ignore, safety)
    errors = capsys.readouterr().err
    assert all(f"checkpoint of iteration {n} could not" in errors for n in (2, 3, 4))
    assert len(folder.read_metrics()) == 4
    monkeypatch.undo()
    training.resume(folder, ignore)
    training.start(CONFIG, tmp_path / "whole", ignore)
    assert_same_run(folder.path, tmp_path / "whole")


def test_checkpoint_is_written_although_the_one_before_was_not(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    real, faults = ocp.CheckpointManager.wait_until_finished, ["No space left on device"]

    def fail_once(manager):
        real(manager)
        if faults:
            raise ValueError(f"RESOURCE_EXHAUSTED: Error writing: {faults.pop()}")

    checkpoints.save(1, {"x": np.ones(1)}, 0.0)
    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", fail_once)
    with pytest.raises(OSError, match="checkpoint of iteration 1 could not be written"):
        checkpoints.save(2, {"x": np.ones(1)}, 0.0)
    checkpoints.wait()
    assert 2 in checkpoints.iterations()
    checkpoints.close()


def test_metrics_that_find_no_room_are_written_later(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")

    def fill_and_empty(progress):
        if progress.row["iteration"] == 1:  # Linux has a file that is always full.
            folder.metrics_path.rename(tmp_path / "metrics")
            folder.metrics_path.symlink_to("/dev/full")
        if progress.row["iteration"] == 3:
            folder.metrics_path.unlink()
            (tmp_path / "metrics").rename(folder.metrics_path)

    safety = Safety(on_full_disk="go-on")
    training.start(CONFIG, folder.path, fill_and_empty, safety)
    assert [row["iteration"] for row in folder.read_metrics()] == [1, 2, 3, 4]
    assert "could not be written (No space left on device)" in capsys.readouterr().err


def test_disk_of_two_megabytes_runs_full(tmp_path):
    """A real one, where it may be mounted."""
    small = tmp_path / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=2m tmpfs {small}"
    private = ["unshare", "--mount", "sh", "-c"]
    allowed = subprocess.run([*private, mount], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip("no file system can be mounted here")
    flags = "--envs 16 --rollout-steps 32 --minibatch-size 512 --epochs 1 --network spec"
    train = (
        f"{Path(sys.executable).parent}/vernal train ppo maze-easy {flags} --steps 51200 "
        f"--save-every 0 --keep 100 --folder {small}/run"
    )
    script = f"{mount} && {{ {train}; echo code $?; ls {small}/run/checkpoints; }}"
    done = subprocess.run([*private, script], capture_output=True, text=True, check=False)
    assert "code 1" in done.stdout, done.stderr
    saved = [line for line in done.stdout.splitlines() if line.isdigit()]
    assert "1" in saved
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "earlier ones are untouched" in done.stderr.splitlines()[-1]


# ---- not a number ------------------------------------------------------------------------------

BROKEN = """
    import jax.numpy as jnp
    from vernal.adapters.mazes import make_easy_maze

    class Broken:
        \"\"\"A maze with a hole: who is at one place at one time is paid NaN.\"\"\"

        def __init__(self, time: int = 40):
            self._maze, self._time = make_easy_maze(), time
            self.observation_spec = self._maze.observation_spec
            self.action_spec = self._maze.action_spec
            self.reset = self._maze.reset

        def step(self, state, action):
            state, timestep = self._maze.step(state, action)
            place = state.agent_position
            falls = (state.step_count == self._time) & (place.col == 1)
            reward = jnp.where(falls, jnp.nan, timestep.reward)
            return state, timestep.replace(reward=reward)
"""


@pytest.fixture
def broken(tmp_path, monkeypatch):
    (tmp_path / "broken_maze.py").write_text(textwrap.dedent(BROKEN))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_maze", raising=False)
    return dataclasses.replace(CONFIG, environment="broken_maze:Broken", steps=12 * STEPS)


def test_nan_is_noticed_in_its_iteration_and_named(broken, tmp_path):
    folder = RunFolder(tmp_path / "run")
    wanted = r"iteration (\d+) policy, value, .*params\.\S+.* not finite.* iteration (\d+) is saved"
    with pytest.raises(ValueError, match=wanted) as stop:
        training.start(broken, folder.path, ignore, ALWAYS)
    broke, saved = map(int, re.findall(wanted, str(stop.value))[0])
    assert saved == broke - 1 == len(folder.read_metrics())
    state = training.load(folder, trust=True).state
    assert int(state.iteration) == saved
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_nan_is_skipped_by_a_flag(broken, tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    safety = dataclasses.replace(ALWAYS, on_nan="skip")
    training.start(broken, folder.path, ignore, safety)
    assert "going on from iteration" in capsys.readouterr().err
    assert [row["iteration"] for row in folder.read_metrics()] == list(range(1, 13))


def test_nan_that_cannot_be_skipped_ends_the_run(tmp_path):
    config = dataclasses.replace(CONFIG, settings=dataclasses.replace(SETTINGS, learning_rate=1e38))
    with pytest.raises(ValueError, match=r"set back 10 times, in vain"):
        training.start(config, tmp_path / "run", ignore, Safety(on_nan="skip"))


def test_agent_that_breaks_is_left_behind(tmp_path, capsys):
    rates = [1e-3, 1e38]
    config = dataclasses.replace(CONFIG, vary={"learning_rate": rates})
    folder = training.start(config, tmp_path / "run", ignore)
    assert "learning_rate 1e+38, seed 0 is left behind: in iteration 1" in capsys.readouterr().err
    assert [row["learning_rate"] for row in folder.read_metrics()] == [1e-3] * 4
    loaded = training.load(folder)
    assert float(loaded.state.hyperparameters.learning_rate) == np.float32(1e-3)
    with pytest.raises(ValueError, match="member 1 broke: its parameters are not finite"):
        training.load(folder, member=1)
    training.resume(folder, ignore, steps=6 * STEPS)
    assert capsys.readouterr().err == ""
    assert [row["iteration"] for row in folder.read_metrics()] == [1, 2, 3, 4, 5, 6]


def test_settings_that_are_newer_than_a_run_do_not_keep_it_from_going_on(run_copy):
    edit_config(run_copy, "normalise_advantages = false\n", "")
    training.resume(run_copy, ignore, steps=3 * STEPS)


def test_metrics_before_a_setback_are_set_aside(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_metrics(*({"iteration": n} for n in range(1, 6)))
    folder.set_metrics_aside(3)
    assert [row["iteration"] for row in folder.read_metrics()] == [1, 2, 3]
    aside = RunFolder(tmp_path, metrics_name="metrics-set-aside.jsonl").read_metrics()
    assert [row["iteration"] for row in aside] == [4, 5]
