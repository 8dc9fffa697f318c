"""Options by name: found by introspection, read as literals, refused in one sentence."""

import pytest

from vernal.adapters.options import REQUIRED, parse, read_arguments, read_options, split_arguments

from .environments_for_tests import OFFLINE, make_once

REGISTERED = [name for name in OFFLINE if not name.startswith("maze-")]


def options_of(name, arguments):
    environment = make_once(name)
    return read_options(name, type(environment), environment, arguments)


def arguments_of(name, **arguments):
    return read_arguments(name, options_of(name, arguments), arguments)


@pytest.mark.parametrize("name", REGISTERED)
def test_a_part_made_of_its_defaults_is_the_one_that_is_there(name):
    environment = make_once(name)
    for parameter, (_, chosen, options) in options_of(name, {}).parts.items():
        if chosen is None or REQUIRED in [option.default for option in options.values()]:
            continue
        made = arguments_of(name, **{parameter: chosen.__name__})[parameter]
        (there,) = [v for v in vars(environment).values() if type(v) is chosen]
        assert numbers(made) == numbers(there)


def numbers(thing):
    """What of it is plain, by name."""
    plain = (bool, int, float, str, tuple)
    return {name: value for name, value in vars(thing).items() if isinstance(value, plain)}


def test_options_not_given_stay_as_they_are_registered():
    generator = arguments_of("LevelBasedForaging-v0", num_food="3")["generator"]
    assert (generator.num_food, generator.grid_size, generator.force_coop) == (3, 8, True)


def test_a_value_that_follows_from_others_is_left_to_follow():
    generator = arguments_of("Connector-v3", grid_size="6")["generator"]
    assert generator.max_steps < make_once("Connector-v3")._generator.max_steps


def test_another_class_takes_over_the_values_of_the_registered_one():
    generator = arguments_of("Connector-v3", generator="UniformRandomGenerator")["generator"]
    assert (type(generator).__name__, generator.grid_size) == ("UniformRandomGenerator", 10)


def test_a_part_that_no_option_speaks_of_is_left_to_the_environment():
    # Jumanji makes the reward of this one from its generator.
    assert arguments_of("MultiCVRP-v0", num_customers="6").keys() == {"generator"}


def test_reward_functions_are_chosen_by_name():
    assert type(arguments_of("TSP-v1", reward_fn="SparseReward")["reward_fn"]).__name__ == (
        "SparseReward"
    )


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("Maze-v0", {"num_row": "5"}, "Maze-v0 has no option 'num_row'; it has num_rows, num_cols"),
        ("Maze-v0", {"viewer": "5"}, "has no option 'viewer'; it has time_limit, generator"),
        (
            "Maze-v0",
            {"generator": "ToyGenerator", "num_rows": "5"},
            "Maze-v0 with generator=ToyGenerator has no option 'num_rows'; it has time_limit",
        ),
        (
            "JobShop-v0",
            {"generator": "Toy"},
            "JobShop-v0 has no generator 'Toy'; choose one of ToyGenerator, RandomGenerator.",
        ),
        ("Maze-v0", {"num_rows": "five"}, "num_rows is 'five'; give a whole number."),
        ("Maze-v0", {"time_limit": "1.5"}, "time_limit is 1.5; give a whole number or None."),
        ("LevelBasedForaging-v0", {"force_coop": "1"}, "force_coop is 1; give True or False."),
        ("BinPack-v2", {"generator": "CSVGenerator"}, "CSVGenerator needs csv_path; give each as"),
        (
            "LevelBasedForaging-v0",
            {"grid_size": "6"},
            "RandomGenerator cannot be made with grid_size=6: AssertionError: Field of view must",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(name, arguments, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        arguments_of(name, **arguments)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("5", int, 5),
        (" -5 ", int, -5),
        ("5", float, 5.0),
        ("None", int | None, None),
        ("True", bool, True),
        ("easy", str, "easy"),
        ("'5'", str, "5"),
        ("5", str, "5"),
        ("(1, 2.5)", tuple[int, float], (1, 2.5)),
        ("['X X']", list, ["X X"]),
    ],
)
def test_values_are_literals_and_bare_words(text, hint, value):
    parsed = parse("option", text, hint)
    assert (type(parsed), parsed) == (type(value), value)


def test_a_value_may_hold_an_equals_sign():
    assert split_arguments(["a=b=c"]) == {"a": "b=c"}


@pytest.mark.parametrize("word", ["num_rows", "=5", ""])
def test_a_word_that_is_no_pair_is_refused(word):
    with pytest.raises(ValueError, match=f"is written NAME=VALUE, .* got '{word}'"):
        split_arguments([word])


def test_an_option_given_twice_is_refused():
    with pytest.raises(ValueError, match="num_rows is given twice, as 5 and as 6"):
        split_arguments(["num_rows=5", "num_rows=6"])


def test_parameters_of_a_function_are_options():
    def make(length: int, *, slip: float = 0.1):
        return length, slip

    options = read_options("corridor", make, None, {})
    assert options.own == {"length": (int, REQUIRED), "slip": (float, 0.1)}
    with pytest.raises(ValueError, match="corridor needs length"):
        read_arguments("corridor", options, {"slip": "0.2"})
