"""The examples of tree search do what they say, in a short form."""

import os
import pathlib
import re
import runpy
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SHARES = r"won (\d+\.\d)%, drawn (\d+\.\d)%, lost (\d+\.\d)%"


def shares(text, name):
    """Per cent of the games won, drawn and lost."""
    (found,) = re.findall(f"{name}: {SHARES}", text)
    return [float(share) for share in found]


def test_tic_tac_toe_is_won_by_search_against_random_moves(capsys):
    runpy.run_path(str(EXAMPLES / "tic_tac_toe.py"))["main"](games=200)
    output = capsys.readouterr().out
    at_random, by_search = shares(output, "at random"), shares(output, "by search")
    assert at_random[0] < 60
    assert by_search[0] > 80
    assert by_search[2] < 5


def test_search_from_one_state_goes_to_the_goal_eagerly_and_compiled(capsys):
    runpy.run_path(str(EXAMPLES / "search_one_state.py"))["main"]()
    eagerly, compiled = capsys.readouterr().out.splitlines()
    assert eagerly.startswith("eagerly: go right, weights 0.00 0.")
    assert compiled.partition(":")[2] == eagerly.partition(":")[2]


def test_search_on_many_devices_uses_all_of_them_in_both_ways():
    command = [sys.executable, str(EXAMPLES / "search_many_devices.py")]
    on_cpu = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=on_cpu, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"(\w+): 256 searches on (\d) devices, (\d+)% go nearer", done.stdout)
    assert [(how, devices) for how, devices, _ in lines] == [("jit", "4"), ("shard_map", "4")]
    assert all(int(share) > 85 for *_, share in lines)


def test_network_trained_on_searches_wins_alone(capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)  # It plays the game of another example.
    runpy.run_path(str(EXAMPLES / "search_in_training.py"))["main"](updates=400)
    output = capsys.readouterr().out
    before, after = shares(output, "before"), shares(output, "after")
    assert before[0] < 65
    assert after[0] > 80
