import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets import RandomDistribution

RANGED = {
    "uniform": {},
    "normal": {"mean": 30.0, "std": 40.0},
    "zipf": {"alpha": 1.2},
    "lognormal": {"mean": 30.0, "std": 60.0},
}


def draw(distribution, size=1000, seed=0):
    return distribution.sample(np.random.default_rng(seed), size)


@pytest.mark.parametrize("dist_type", RANGED)
@given(low=st.integers(0, 50), width=st.integers(1, 100), seed=st.integers(0, 1000))
def test_draws_are_integers_within_their_bounds(dist_type, low, width, seed):
    distribution = RandomDistribution(dist_type, low=low, high=low + width, **RANGED[dist_type])
    values = draw(distribution, 200, seed)
    assert values.dtype == np.int64
    assert values.shape == (200,)
    assert values.min() >= low
    assert values.max() <= low + width - (dist_type == "uniform")


@pytest.mark.parametrize("dist_type", RANGED)
def test_the_same_generator_state_draws_the_same_values(dist_type):
    distribution = RandomDistribution(dist_type, low=1, high=500, **RANGED[dist_type])
    np.testing.assert_array_equal(draw(distribution), draw(distribution))
    assert not np.array_equal(draw(distribution), draw(distribution, seed=1))


@pytest.mark.parametrize("mean, std", [(200.0, 100.0), (500.0, 1000.0)])
def test_lognormal_mean_and_std_are_those_of_its_values(mean, std):
    values = draw(RandomDistribution("lognormal", mean=mean, std=std), 1_000_000)
    assert values.mean() == pytest.approx(mean, rel=0.01)
    assert values.std() == pytest.approx(std, rel=0.05)


def test_normal_mean_and_std():
    values = draw(RandomDistribution("normal", mean=100.0, std=20.0), 100_000)
    assert values.mean() == pytest.approx(100, rel=0.01)
    assert values.std() == pytest.approx(20, rel=0.02)


def test_uniform_reaches_low_and_one_less_than_high():
    assert set(draw(RandomDistribution("uniform", low=3, high=6))) == {3, 4, 5}


def test_zipf_has_numpys_exponent():
    values = draw(RandomDistribution("zipf", alpha=2.0), 100_000)
    assert (values == 1).mean() == pytest.approx(6 / np.pi**2, rel=0.01)  # 1 / zeta(2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dist_type": "poisson"}, r"RandomDistribution.dist_type = 'poisson': expected one of uniform, "),
        ({"dist_type": "uniform", "low": 0}, r"RandomDistribution.high is not set: uniform needs it"),
        ({"dist_type": "lognormal", "mean": 5.0}, r"RandomDistribution.std is not set: lognormal needs it"),
        ({"dist_type": "normal", "std": 5.0}, r"RandomDistribution.mean is not set"),
        ({"dist_type": "zipf"}, r"RandomDistribution.alpha is not set"),
        ({"dist_type": "zipf", "alpha": 1.0}, r"RandomDistribution.alpha = 1.0: expected more than 1"),
        ({"dist_type": "uniform", "low": 4, "high": 4}, r"RandomDistribution.high = 4: expected at least 5"),
        ({"dist_type": "zipf", "alpha": 2.0, "low": 4, "high": 3}, r"RandomDistribution.high = 3"),
        ({"dist_type": "normal", "mean": 0.0, "std": -1.0}, r"RandomDistribution.std = -1.0"),
        ({"dist_type": "lognormal", "mean": 0.0, "std": 1.0}, r"RandomDistribution.mean = 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        RandomDistribution(**arguments)
