"""Two processes on the loopback address that train one agent, and what ends them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vernal.adapters import hosts, launch
from vernal.adapters.runs import training
from vernal.adapters.runs.folder import RunFolder

VERNAL = Path(sys.executable).parent / "vernal"
SIZES = {"envs": 4, "rollout-steps": 32, "minibatch-size": 64, "epochs": 1}
SETTINGS = ["--network=spec", *(f"--{name}={size}" for name, size in SIZES.items())]
STEPS = 4 * 32


def ignore(progress):
    del progress


def rows_of(folder):
    rows = RunFolder(folder).read_metrics()
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


@pytest.fixture(scope="module")
def launch_two():
    """Start the command twice; both know of each other."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}

    def start(*words):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        joined = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process"]
        return [
            subprocess.Popen(
                [VERNAL, *words, *joined, str(number)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]

    return start


def wait_for_lines(folder, count, process):
    while len(RunFolder(folder).read_metrics()) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_two_processes_are_one_run_that_outlives_a_lost_one(launch_two, tmp_path):
    run, alone = tmp_path / "run", tmp_path / "alone"
    endless = ["--steps", str(10**7), "--save-every", "0"]
    first, second = launch_two("train", "ppo", "maze-easy", *SETTINGS, *endless, "--folder", run)
    wait_for_lines(run, 6, first)
    second.kill()
    second.communicate()
    output, errors = first.communicate()
    assert first.returncode == 1, (output, errors)
    last = errors.splitlines()[-1]
    assert last.startswith("vernal: another process of this run is lost"), errors
    assert last.endswith("; `vernal resume` goes on.")
    assert "128 steps" in output  # The first process reports.

    # What two processes learned is what one learns with two devices, and it goes on from there.
    folder = RunFolder(run)
    saved = int(training.load(folder).state.iteration)
    assert saved >= 1
    training.resume(folder, ignore, steps=(saved + 2) * STEPS, devices=2)
    config = training.RunConfig.from_dict(folder.read_config())
    assert config.devices == 2
    training.start(config, alone, ignore)
    rows, expected = rows_of(run), rows_of(alone)
    assert [row["iteration"] for row in rows] == list(range(1, saved + 3))
    for row, other in zip(rows[:4], expected[:4], strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            if value is not None:
                np.testing.assert_allclose(value, other[name], rtol=2e-4, atol=2e-5)


def test_sigterm_to_one_process_saves_and_ends_both(launch_two, tmp_path):
    run = tmp_path / "run"
    words = ["ppo", "maze-easy", *SETTINGS, "--seeds", "2", "--steps", str(10**7)]
    processes = launch_two("train", *words, "--folder", run)
    wait_for_lines(run, 4, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 75, errors
        assert f"whose state is saved; `vernal resume {run}` goes on" in errors
    rows = rows_of(run)
    assert [row["seed"] for row in rows[:4]] == [0, 1, 0, 1]
    loaded = training.load(RunFolder(run), member=1)
    assert int(loaded.state.iteration) == rows[-1]["iteration"]


def test_fault_of_the_first_process_is_told_to_the_other(launch_two, tmp_path):
    (tmp_path / "taken").mkdir()
    words = ["train", "ppo", "maze-easy", *SETTINGS, "--folder", tmp_path / "taken"]
    for process in launch_two(*words):
        output, errors = process.communicate()
        assert process.returncode == 1
        assert "taken exists already, and a run is never overwritten" in errors
        assert "steps" not in output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--coordinator", "localhost:1"], r"goes with --processes .* and --process"),
        (
            ["--coordinator", "localhost:1", "--processes", "2", "--process", "2"],
            r"process is 2 of 2; give a number from 0 to 1",
        ),
        (["--coordinator", "auto"], r"could not be joined by auto"),
        (["--coordinator", "auto", "--processes", "2"], r"auto asks the cluster; leave"),
        (["--processes", "2", "--process", "0"], r"find each other by --coordinator"),
    ],
)
def test_processes_that_cannot_be_joined_are_refused(words, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        launch.main(["train", "ppo", "maze-easy", *words])
    assert stop.value.code == 1
    assert re.search(sentence, capsys.readouterr().err)


def test_one_process_agrees_with_itself():
    word = hosts.Word(save=True, signal=15, fault="a reason")
    assert hosts.agree(word) == word
    assert hosts.is_first()
    with pytest.raises(OSError, match="no room"):
        hosts.from_first(lambda: (_ for _ in ()).throw(OSError("no room")))


@pytest.fixture
def told(monkeypatch):
    """What JAX is told of its configuration."""
    told = {}
    monkeypatch.setattr(launch.jax.config, "update", told.__setitem__)
    return told


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "ppo", "maze-easy", "--devices", "3"], {"jax_num_cpu_devices": 3}),
        (["train", "ppo", "maze-easy", "--devices=2", "--seeds", "4"], {"jax_num_cpu_devices": 2}),
        (["train", "ppo", "maze-easy", "--devices", "all"], {}),
        (["train", "ppo", "maze-easy", "--devices", "0"], {}),
        (["train", "ppo", "maze-easy"], {}),
        (["train", "--devices"], {}),
        ([], {}),
    ],
)
def test_cpu_is_divided_as_the_flags_say(words, expected, told):
    launch.prepare(words)
    assert told == expected


def test_resume_divides_the_cpu_as_the_run_did(tmp_path, told):
    (tmp_path / "config.toml").write_text("devices = 4\n")
    launch.prepare(["resume", str(tmp_path)])
    assert told == {"jax_num_cpu_devices": 4}
    told.clear()
    launch.prepare(["resume", str(tmp_path), "--devices", "2"])
    assert told == {"jax_num_cpu_devices": 2}
    told.clear()
    (tmp_path / "config.toml").write_text("devices =")
    launch.prepare(["resume", str(tmp_path)])
    assert told == {}
