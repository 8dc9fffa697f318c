"""The examples do what they say, in a short form."""

import doctest
import pathlib
import re
import runpy
import sys

import pytest

from vernal.adapters.cli import main

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_own_network_reports_the_games_that_ended(capsys):
    runpy.run_path(str(EXAMPLES / "own_network.py"))["main"](iterations=1)
    assert re.search(r"4,096 steps +\d+\.\d points a game", capsys.readouterr().out)


def test_many_seeds_reports_four_returns_for_each_rate(capsys):
    runpy.run_path(str(EXAMPLES / "many_seeds.py"))["main"](iterations=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "learning rate 1e-04",
        "learning rate 1e-03",
    ]
    assert all(line.count(",") == 3 for line in lines)


def test_own_environment_reports_the_mean_return(capsys):
    runpy.run_path(str(EXAMPLES / "own_environment.py"))["main"](iterations=1)
    assert re.search(r"1,024 steps +mean return -?\d\.\d\d", capsys.readouterr().out)


def test_own_environment_is_the_one_that_its_page_shows():
    page = (ROOT / "docs" / "own-environment.md").read_text(encoding="utf-8")
    example = (EXAMPLES / "own_environment.py").read_text(encoding="utf-8")
    shown = [e.source.rstrip() for e in doctest.DocTestParser().get_examples(page)]
    for name in ("State", "Observation", "Corridor"):
        (text,) = [source for source in shown if source.startswith(f"class {name}")]
        assert text in example


def test_own_environment_trains_and_is_made_again_by_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    options = ["--env-arg", "length=5", "--env-arg", "slip=0", "time_limit=9"]
    small = ["--steps=64", "--envs=2", "--rollout-steps=32", "--minibatch-size=64", "--epochs=1"]
    main(["train", "ppo", "own_environment:Corridor", *options, *small])
    assert "run: runs/Corridor/ppo/seed-0" in capsys.readouterr().out
    main(["evaluate", "runs/Corridor/ppo/seed-0", "--episodes", "4", "--trust"])
    output = " ".join(capsys.readouterr().out.split())
    assert "own_environment:Corridor length=5 slip=0 time_limit=9, 4 episodes" in output
    with pytest.raises(SystemExit):
        main(["watch", "runs/Corridor/ppo/seed-0", "--trust"])
    assert "own_environment:Corridor has no method animate" in capsys.readouterr().err
