"""Environments by name."""

import socket

import jumanji
import pytest

from vernal.adapters.registry import environment_names, make_environment

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


def test_sokoban_is_refused_in_a_sentence_without_network_access(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(ValueError, match=r"Sokoban-v0 downloads its levels .* ToyGenerator"):
        make_environment("Sokoban-v0")
