"""What the command prints: it never fails, and shows text as it is."""

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vernal.adapters.agents.ppo import PPOConfig
from vernal.adapters.output import make_console
from vernal.adapters.runs import training
from vernal.adapters.runs.program import make_program
from vernal.adapters.runs.progress import describe
from vernal.adapters.runs.training import Progress

SETTINGS = PPOConfig(envs=2, rollout_steps=64, minibatch_size=64, epochs=1)
CONFIG = training.RunConfig("ppo", "maze-easy", "spec", seed=0, steps=128, settings=SETTINGS)

# The command's own preparation of its output, without the seconds that importing an agent takes.
PRINT = """
import sys
from vernal.adapters.output import make_output_safe
make_output_safe()
for _ in range(2):
    print("0.5 ± 0.1 · ü", flush=True)
    print("said", file=sys.stderr)
"""


def run(code, stdout: Any = subprocess.PIPE, **variables):
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", **variables}
    words = [sys.executable, "-c", code]
    return subprocess.run(
        words, check=False, stdout=stdout, stderr=subprocess.PIPE, env=environment
    )


def test_characters_that_an_encoding_lacks_are_replaced():
    done = run(PRINT, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("ascii").splitlines() == ["0.5 +- 0.1 | ?"] * 2


def test_characters_that_an_encoding_has_stay():
    done = run(PRINT)
    assert done.stdout.decode().splitlines() == ["0.5 ± 0.1 · ü"] * 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_device_is_told_once_and_ends_nothing():
    with open("/dev/full", "w") as full:
        done = run(PRINT, stdout=full)
    assert done.returncode == 0
    assert done.stderr.decode().splitlines() == [
        "vernal: the output cannot be written (No space left on device).",
        "said",
        "said",
    ]


def test_a_pipe_whose_reader_is_gone_ends_nothing():
    reader, writer = os.pipe()
    os.close(reader)
    done = run(PRINT, stdout=writer)
    os.close(writer)
    assert done.returncode == 0
    assert done.stderr.decode().splitlines() == ["said", "said"]


@pytest.mark.parametrize("value", ["[/data/easy]", "[easy]", "[bold]x[/bold]", ":smile:"])
def test_text_that_looks_like_markup_is_shown_as_it_is(value):
    console = make_console()
    console.file = io.StringIO()
    console.print(f"level={value}")
    assert console.file.getvalue() == f"level={value}\n"


ROW = {"steps": 8192, "steps_per_second": 60000, "episodes": 0, "mean_return": None}
ROW |= {"mean_length": None, "policy": 0.0, "value": 0.0, "entropy": 0.0, "kl": 0.0}


@pytest.mark.parametrize(
    ("seconds", "end"),
    [
        (None, "kl 0.0000"),
        (0.0, "· 0:00 left"),
        (59.6, "· 1:00 left"),
        (3599.0, "· 59:59 left"),
        (85283.0, "· 23:41:23 left"),
    ],
)
def test_time_left_is_said_once_it_is_known(seconds, end):
    assert describe(Progress(ROW, iterations=9, seconds_left=seconds)).endswith(end)


def test_the_first_iteration_does_not_count_for_the_estimate(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: clock[0])
    config = dataclasses.replace(CONFIG, steps=128 * 5)
    program = make_program(config)

    def step(state):
        clock[0] += 100.0 if int(state.iteration) == 0 else 2.0
        return program.step(state)

    monkeypatch.setattr(training, "make_program", lambda *_, **__: program._replace(step=step))
    monkeypatch.setattr(training, "compile_step", lambda *_: None)
    said = []
    training.start(config, tmp_path / "run", lambda progress: said.append(progress.seconds_left))
    assert said == [None, 6.0, 4.0, 2.0, 0.0]
