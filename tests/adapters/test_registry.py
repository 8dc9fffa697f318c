"""Environments by name."""

import ast
import socket
from pathlib import Path

import jumanji
import pytest
from jumanji import environments
from jumanji.environments.routing.maze.generator import Generator as MazeGenerator

from vernal.adapters.registry import environment_names, find_outside, make_environment

from .environments_for_tests import OFFLINE, make_once


def test_names_are_vernals_own_and_then_jumanjis_sorted():
    assert environment_names() == [
        "maze-easy",
        "maze-medium",
        *sorted(jumanji.registered_environments()),
    ]


@pytest.mark.parametrize("name", OFFLINE)
def test_every_name_but_sokobans_makes_an_environment(name):
    environment = make_once(name)
    assert environment.action_spec is not None
    assert environment.observation_spec is not None


def test_a_jumanji_name_makes_jumanjis_environment():
    assert type(make_once("Snake-v1")) is type(jumanji.make("Snake-v1"))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("snake", "Snake-v1"),
        ("Snake-v0", "Snake-v1"),
        ("MAZE-EASY", "maze-easy"),
        ("Tetris", "Tetris-v0"),
    ],
)
def test_an_unknown_name_offers_near_ones(name, near):
    with pytest.raises(
        ValueError, match=f"there is no environment '{name}'; did you mean"
    ) as error:
        make_environment(name)
    assert near in str(error.value)
    assert str(error.value).endswith("`vernal envs` lists all.")


@pytest.mark.parametrize("name", ["", "xyzzy", "qqqqqqqqqqqqqqqq"])
def test_a_name_like_no_other_offers_none(name):
    with pytest.raises(
        ValueError, match=f"^there is no environment '{name}'; `vernal envs` lists all.$"
    ):
        make_environment(name)


@pytest.fixture
def offline(monkeypatch):
    """Fail whatever asks the network."""

    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("arguments", [{}, {"time_limit": "5"}])
def test_sokoban_is_refused_in_a_sentence_without_network_access(arguments):
    with pytest.raises(
        ValueError, match=r"Sokoban-v0 downloads its levels .* --env-arg generator=ToyGenerator"
    ):
        make_environment("Sokoban-v0", arguments)


@pytest.mark.usefixtures("offline")
def test_sokoban_with_levels_of_its_own_is_made_without_network_access(monkeypatch):
    # What draws it opens pictures and leaves them open.
    monkeypatch.setattr("jumanji.environments.routing.sokoban.env.BoxViewer", lambda *_, **__: None)
    sokoban = make_environment("Sokoban-v0", {"generator": "ToyGenerator", "time_limit": "50"})
    assert type(sokoban.generator).__name__ == "ToyGenerator"
    assert sokoban.time_limit == 50


def test_options_reach_the_environment_and_its_generator():
    maze = make_environment("Maze-v0", {"num_rows": "5", "time_limit": "30"})
    assert (maze.num_rows, maze.num_cols, maze.time_limit) == (5, 10, 30)
    assert maze.observation_spec.walls.shape == (5, 10)


def test_an_option_wins_over_what_jumanji_registered():
    cube = make_environment("RubiksCube-partly-scrambled-v0", {"time_limit": "30"})
    assert cube.time_limit == 30
    assert cube.generator.num_scrambles_on_reset == 7


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("maze-easy", {"num_rows": "5"}, "maze-easy has no option 'num_rows'; it has none."),
        ("Maze-v0", {"num_rows": "-3"}, "Maze-v0 with num_rows=-3 cannot be made: ValueError: "),
        ("Game2048-v1", {"board_size": "0"}, "the reset of Game2048-v1 with board_size=0 fails: "),
        ("json:loads", {}, "json:loads needs s; give each as NAME=VALUE."),
        ("json:loads", {"s": "}"}, "json:loads with s=} cannot be made: JSONDecodeError: "),
        ("json:loads", {"s": "'[]'"}, "json:loads with s='[]' lacks reset, step, "),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(name, arguments, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make_environment(name, arguments)
    assert str(error.value).startswith(sentence)


def test_a_part_is_only_a_class_of_the_environments_own_package():
    made = []

    class Generator(MazeGenerator):
        def __init__(self, num_rows: int = 5, num_cols: int = 5):
            made.append(self)

        def __call__(self, key):
            raise NotImplementedError

    with pytest.raises(ValueError, match="Maze-v0 has no generator 'Generator'; choose one of"):
        make_environment("Maze-v0", {"generator": Generator.__name__})
    assert made == []


def test_what_goes_outside_is_all_that_jumanji_has():
    """Every class that may be chosen by name and opens a file or asks the network."""
    found = set()
    for path in Path(environments.__path__[0]).rglob("generator.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(
                word in ast.unparse(node) for word in ("open(", "requests", "hf_hub", "load(")
            ):
                found.add(node.name)
    assert found == {"DeepMindGenerator", "HuggingFaceDeepMindGenerator", "CSVGenerator"}
    for name in found:
        assert find_outside("Sokoban-v0", {"generator": name})
