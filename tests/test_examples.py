"""The examples do what they say, in a short form."""

import pathlib
import re
import runpy

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


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
