"""Numbers and curves over the seeds of a setting."""

import dataclasses

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy

from vernal.adapters.agents.ppo import PPOConfig
from vernal.adapters.cli import main
from vernal.adapters.runs import training
from vernal.adapters.runs.curve import draw_curve
from vernal.adapters.runs.folder import create_run_folder
from vernal.adapters.runs.summary import (
    describe_setting,
    margins,
    read_curves,
    summarise,
)
from vernal.adapters.runs.training import RunConfig

VARY = {"gamma": [0.9, 0.99]}
CONFIG = RunConfig("ppo", "maze-easy", "spec", 3, 100, PPOConfig(), seeds=5, vary=VARY)


def value(gamma, seed, iteration):
    return 1000 * gamma + seed**2 + iteration


@pytest.fixture
def sweep(tmp_path):
    """Two settings of five seeds over twenty iterations; one agent breaks half-way."""
    folder = create_run_folder(tmp_path / "sweep")
    folder.write_config(CONFIG.to_dict())
    for iteration in range(1, 21):
        for member in CONFIG.members():
            gamma, seed = member["gamma"], member["seed"]
            is_broken = (gamma, seed) == (0.99, 7) and iteration > 10
            ended = 0 if iteration == 1 else seed
            numbers = {"iteration": iteration, "steps": 8 * iteration, "episodes": ended}
            mean = value(gamma, seed, iteration) if ended else None
            if not is_broken:
                folder.append_metrics({**member, **numbers, "mean_return": mean, "mean_length": 2})
    return folder


def test_curves_are_the_metrics_by_setting_and_seed(sweep):
    first, second = read_curves(sweep)
    assert (first.setting, second.setting) == ({"gamma": 0.9}, {"gamma": 0.99})
    assert first.returns.shape == (5, 20)
    assert first.returns[2, 7] == value(0.9, 5, 8)
    assert np.isnan(first.returns[:, 0]).all()
    assert np.isnan(second.returns[4, 10:]).all()
    np.testing.assert_array_equal(first.steps, 8 * np.arange(1, 21))
    assert first.arrived.tolist() == [True] * 5
    assert second.arrived.tolist() == [True] * 4 + [False]


def test_summary_is_that_of_scipy(sweep):
    summary = summarise(read_curves(sweep)[0])
    last = np.array([value(0.9, seed, 19.5) for seed in range(3, 8)])
    assert summary.seeds == 5
    np.testing.assert_allclose(summary.last, last.mean())
    low, high = scipy.stats.t.interval(0.95, 4, loc=last.mean(), scale=scipy.stats.sem(last))
    np.testing.assert_allclose(summary.margin, (high - low) / 2)
    np.testing.assert_allclose(summary.iqm, np.sort(last)[1:-1].mean())
    assert summary.iqm_interval[0] < summary.iqm < summary.iqm_interval[1]
    np.testing.assert_allclose(summary.whole, last.mean() - 19.5 + 11)


def test_seeds_that_broke_are_counted_and_left_out(sweep):
    summary = summarise(read_curves(sweep)[1])
    assert (summary.seeds, summary.broken) == (4, 1)
    np.testing.assert_allclose(summary.last, np.mean([value(0.99, s, 19.5) for s in range(3, 7)]))
    whole = [value(0.99, seed, 11) for seed in range(3, 7)]
    np.testing.assert_allclose(summary.whole, np.mean(whole))
    assert np.isnan(summary.iqm)


def test_one_seed_has_no_interval(sweep):
    curves = read_curves(sweep)[0]
    alone = curves._replace(
        arrived=curves.arrived[:1], returns=curves.returns[:1], episodes=curves.episodes[:1]
    )
    assert np.isnan(summarise(alone).margin)


def test_margins_leave_out_what_is_missing():
    values = np.array([[1.0, 1.0], [3.0, np.nan], [np.nan, np.nan]])
    np.testing.assert_allclose(margins(values), [scipy.stats.t.ppf(0.975, 1), np.nan])


def test_settings_are_described_in_short():
    assert (
        describe_setting({"gamma": 0.9, "learning_rate": 1e-05}) == "gamma 0.9, learning_rate 1e-05"
    )


def test_curves_of_a_sweep_have_a_band_for_each_setting(sweep, tmp_path, monkeypatch):
    bands = []
    real = plt.Axes.fill_between
    monkeypatch.setattr(
        plt.Axes, "fill_between", lambda *args, **kw: bands.append(args) or real(*args, **kw)
    )
    draw_curve([sweep], tmp_path / "curve.png")
    assert len(bands) == 4  # Two settings, return and length.
    _, steps, low, high = bands[0]
    summary = read_curves(sweep)[0]
    np.testing.assert_array_equal(steps, summary.steps[1:])
    np.testing.assert_allclose((low + high) / 2, summary.returns[:, 1:].mean(axis=0))


def test_best_member_is_taken_from_the_last_returns(sweep):
    assert training.best_member(sweep, CONFIG.members()) == 8
    assert CONFIG.members()[8] == {"gamma": 0.99, "seed": 6}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"vary": {"envs": [8.0, 16.0]}},
            r"envs cannot be varied within one program; choose of learn",
        ),
        ({"vary": {"gamma": [0.9, 0.9]}}, r"gamma is to be varied over \[0.9, 0.9\]; give val"),
        ({"vary": {"gamma": [0.9, 0.9 + 1e-9]}}, r"give values that differ in float32"),
        ({"vary": {"learning_rate": [1e-60]}}, r"learning_rate is 1e-60, which is 0 in float32"),
        ({"vary": {"gamma": []}}, r"gamma is to be varied over \[\]"),
        ({"vary": {"gamma": [0.9, 1.5]}}, r"gamma is 1.5; give a number from 0 to 1"),
        ({"seeds": 0}, r"seeds is 0; give at least 1"),
        ({"seed": 2**32 - 2, "seeds": 3}, r"give a number from 0 to 4,294,967,293"),
        ({"at_once": -1}, r"at_once is -1; give 0 or more"),
        ({"devices": 0}, r"devices is 0; give at least 1"),
    ],
)
def test_what_cannot_be_trained_together_is_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **change)


def test_sweep_is_trained_told_and_evaluated_by_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    sizes = {"envs": 2, "rollout-steps": 128, "minibatch-size": 64, "epochs": 1, "steps": 512}
    small = [f"--{name}={size}" for name, size in sizes.items()]
    main(["sweep", "ppo", "maze-easy", *small, "--seeds=2", "--vary", "gamma=0.9,0.99"])
    output = capsys.readouterr().out
    assert "gamma" in output
    assert "return at last" in output
    run = tmp_path / "runs" / "maze-easy" / "ppo" / "sweep-gamma"
    assert {p.name for p in run.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "checkpoints",
        "curve.png",
    }
    main(["evaluate", str(run), "--episodes=2", "--member=3"])
    assert "greedy" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["watch", str(run), "--member=4"])
    assert "member is 4; this run has 4, so give 0 to 3" in capsys.readouterr().err


def test_sweep_of_nothing_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["sweep", "ppo", "maze-easy"])
    assert "a sweep varies something; name it, as in --vary" in capsys.readouterr().err
