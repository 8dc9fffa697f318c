"""Environments of someone's own: imported by name, and checked before anything compiles."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jumanji.wrappers import AutoResetWrapper, VmapAutoResetWrapper, Wrapper

from vernal.adapters.environments import VectorEnvironment, check_environment
from vernal.adapters.factories import check_own_environment, import_factory
from vernal.adapters.registry import make_environment

from .environments_for_tests import CountingEnvironment, SpecsOnly, make_once


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module into the working folder, and forget it afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    yield write
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_a_module_in_the_working_folder_is_found(module):
    module("corridors", "class Corridor:\n    def wide(): return 3\n")
    assert import_factory("corridors:Corridor.wide")() == 3


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such_module:make", "no_such_module cannot be imported .* No module named"),
        ("faulty:make", r"faulty cannot be imported .* SyntaxError: .*faulty.py, line 1"),
        ("sound:mkae", "the module sound has no 'mkae'"),
        ("sound:number", "sound:number is of type int; name a class or a function"),
        ("sound:", "is written MODULE:CALLABLE; got 'sound:'"),
        (":make", "is written MODULE:CALLABLE; got ':make'"),
    ],
)
def test_what_cannot_be_imported_is_refused_in_a_sentence(module, name, sentence):
    module("sound", "number = 1\n")
    module("faulty", "def make(:\n")
    with pytest.raises(ValueError, match=sentence):
        import_factory(name)


@pytest.mark.parametrize("name", ["maze-easy", "Connector-v3", "GraphColoring-v1"])
def test_jumanjis_environments_are_sound(name):
    check_own_environment(make_once(name))


class NoTimeStep(CountingEnvironment):
    def step(self, state, action) -> Any:
        return state, jnp.zeros(3)


class OtherState(CountingEnvironment):
    def step(self, state, action) -> Any:
        state, timestep = super().step(state, action)
        return state._replace(steps=state.steps * 1.0), timestep


class OtherObservation(CountingEnvironment):
    def _observe(self, state):
        return super()._observe(state)._replace(instance=jnp.zeros(2, int))


class LongerState(CountingEnvironment):
    def step(self, state, action) -> Any:
        state, timestep = super().step(state, action)
        return (*state, 1), timestep


class Faulty(CountingEnvironment):
    def reset(self, key):
        raise KeyError("door")


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (NoTimeStep(), "the step of it returns no jumanji.types.TimeStep beside the state"),
        (OtherState(), "the state after a step of it differs from that of reset: .steps should"),
        (
            OtherObservation(),
            r"first observation of it differs .* .instance should be int32\[\], not",
        ),
        (LongerState(), "the state after a step of it differs from that of reset: .steps should"),
        (Faulty(), r"the reset of it fails: KeyError: 'door' \(line \d+ of .*test_factories.py\)"),
        (
            SpecsOnly(lambda: 3),
            "the action_spec of it is of type int; make it one of jumanji.specs",
        ),
        ("Snake-v1", "it is the text 'Snake-v1'; make an environment of that name by make_env"),
        (
            CountingEnvironment,
            r"it is the class CountingEnvironment itself; .* CountingEnviron.*\(\)",
        ),
        (jax.random.key(0), "it is an array, as a random key is: .* not make_spec_network"),
        (object(), "it lacks reset, step, observation_spec, action_spec, which an environment"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else "",
)
def test_what_no_agent_could_train_on_is_refused_in_a_sentence(environment, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_own_environment(environment, "it")


class MoreObservation(CountingEnvironment):
    def _observe(self, state) -> Any:
        return (super()._observe(state), state.length)


class OtherDtype(CountingEnvironment):
    def _observe(self, state):
        return super()._observe(state)._replace(steps=state.steps * 1.0)


class Renamed(CountingEnvironment):
    def _observe(self, state) -> Any:
        return super()._observe(state)._asdict()


@pytest.mark.parametrize(
    "environment", [OtherObservation(), MoreObservation(), OtherDtype(), Renamed()]
)
def test_an_observation_that_is_not_as_its_spec_says_is_refused_wherever_it_is_used(environment):
    sentences = []
    for check in (check_environment, lambda e: VectorEnvironment(e, 2), check_own_environment):
        with pytest.raises(ValueError, match="the first observation of") as error:
            check(environment)
        sentences.append(str(error.value).partition("differs from its spec: ")[2])
    assert len({*sentences}) == 1
    assert " should " in sentences[0]


def test_in_64_bit_mode_a_spec_may_be_wrong_about_the_width_only():
    with jax.enable_x64(True):
        with jax.numpy_rank_promotion("allow"):  # inside of it
            check_environment(make_environment("SlidingTilePuzzle-v0"))
        with pytest.raises(ValueError, match=r"\.steps should be int32\[\], not float32"):
            check_environment(OtherDtype())


class Outer:
    """A wrapper of someone's own, which is none of Jumanji's."""

    def __init__(self, environment):
        self.inside = environment
        self.observation_spec = environment.observation_spec
        self.action_spec = environment.action_spec

    def reset(self, key):
        return self.inside.reset(key)

    def step(self, state, action):
        return self.inside.step(state, action)


SNAKE: Any = make_once("Snake-v1")


@pytest.mark.parametrize(
    "environment",
    [
        AutoResetWrapper(SNAKE),
        VmapAutoResetWrapper(SNAKE),
        Wrapper(AutoResetWrapper(SNAKE)),
        Outer(Outer(Wrapper(AutoResetWrapper(SNAKE)))),
    ],
    ids=["alone", "mapped", "wrapped", "deep"],
)
@pytest.mark.parametrize(
    "check", [check_environment, lambda e: VectorEnvironment(e, 2), check_own_environment]
)
def test_an_environment_that_resets_itself_is_refused_however_deep(check, environment):
    with pytest.raises(TypeError, match="resets itself, which hides the true last observations"):
        check(environment)


def test_a_wrapper_that_resets_nothing_is_sound():
    inner: Any = Wrapper(SNAKE)
    inner.outer = Outer(inner)  # a circle
    check_own_environment(inner.outer)
