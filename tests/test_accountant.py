"""The privacy accountant against closed forms and exact computations of its own mechanism."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm

from fedsim.check import BadValue
from fedsim.privacy.accountant import epsilon

NOISE = [0.3, 1.0, 5.0, 40.0]


def exact(noise_multiplier: float, rounds: int, delta: float) -> float:
    """All clients take part. Rounds of Gaussian noise are one with sqrt(rounds) times the sensitivity, 2 S; and for
    sensitivity D and noise s, Balle & Wang (ICML 2018), Theorem 8, is an equality:

        delta(epsilon) = Phi(D/2s - epsilon s/D) - e^epsilon Phi(-D/2s - epsilon s/D) .
    """
    ratio = 2 * math.sqrt(rounds) / noise_multiplier

    def excess(eps: float) -> float:
        low = norm.logcdf(-ratio / 2 - eps / ratio)
        return float(norm.cdf(ratio / 2 - eps / ratio) - math.exp(eps + low) - delta)

    return float(brentq(excess, 0, ratio * (ratio + 20), xtol=1e-12)) if excess(0) > 0 else 0.0


def renyi(noise_multiplier: float, rounds: int, delta: float) -> float:
    """All clients take part: rdp(alpha) = alpha rounds / (2 sigma^2) with sigma = noise_multiplier / 2, converted to
    epsilon, the best of all real alpha."""
    rho = rounds / (2 * (noise_multiplier / 2) ** 2)

    def at(log: float) -> float:
        alpha = 1 + math.exp(log)
        return rho * alpha + math.log1p(-1 / alpha) - math.log(delta * alpha) / (alpha - 1)

    return float(minimize_scalar(at, bounds=(-5, 12), method="bounded", options={"xatol": 1e-10}).fun)


def pair(noise_multiplier: float, rate: float, delta: float) -> float:
    """One round, with a rate m/N below one, for one pair of neighbours: a client sends S or -S (S = 1), the others 0.

    The sum is (1 - q) N(0, s^2) + q N(+-1, s^2), so their exact epsilon is a lower bound for all neighbours.
    """
    x = np.linspace(-1 - 12 * noise_multiplier, 1 + 12 * noise_multiplier, 200_001)
    p, q = ((1 - rate) * norm.pdf(x, 0, noise_multiplier) + rate * norm.pdf(x, c, noise_multiplier) for c in (1, -1))

    def excess(eps: float) -> float:
        return float(np.trapezoid(np.maximum(p - math.exp(eps) * q, 0), x) - delta)

    return float(brentq(excess, 0, 100)) if excess(0) > 0 else 0.0


@pytest.mark.parametrize("rounds", [1, 10, 1000])
@pytest.mark.parametrize("noise_multiplier", NOISE)
def test_full_participation(noise_multiplier: float, rounds: int) -> None:
    """Never below the exact epsilon, and the closed Renyi form but for the grid of orders."""
    found = epsilon(rounds, noise_multiplier, 1e-5, 100, 100)
    assert found >= exact(noise_multiplier, rounds, 1e-5)
    best = renyi(noise_multiplier, rounds, 1e-5)
    # Orders are thin above 64 (epsilon below 0.2) and begin at 1.1 (where epsilon is astronomic anyway).
    assert best * (1 - 1e-9) <= found <= best * (1.001 if 0.2 < best < 100 else 1.1)


def test_full_participation_is_close_to_exact() -> None:
    """Renyi bounds lose a little: 10.73 instead of 9.99 with noise_multiplier 1, a mechanism with sigma = 1/2."""
    assert exact(1.0, 1, 1e-5) == pytest.approx(9.99, abs=0.01)
    for noise_multiplier in NOISE:
        assert epsilon(1, noise_multiplier, 1e-5, 7, 7) < 1.2 * exact(noise_multiplier, 1, 1e-5)


def test_by_hand() -> None:
    """noise_multiplier 2, sigma = 1; two rounds: rdp(alpha) = alpha. At alpha = 4 and delta = e^-6 / 4:

    epsilon <= 4 + log(3/4) + 6/3 = 5.712; and it is not far from the best."""
    found = epsilon(2, 2.0, math.exp(-6) / 4, 50, 50)
    assert 5.5 < found <= 6 + math.log(0.75)


@pytest.mark.parametrize(("clients", "cohort"), [(100, 10), (100, 90), (3, 1), (10**6, 1000)])
@pytest.mark.parametrize("noise_multiplier", NOISE)
def test_subsampled(noise_multiplier: float, clients: int, cohort: int) -> None:
    """Between the exact epsilon of one pair of neighbours and that without sampling, also where the theorem's own
    bound is above it."""
    found = epsilon(1, noise_multiplier, 1e-6, clients, cohort)
    assert pair(noise_multiplier, cohort / clients, 1e-6) <= found
    assert found <= epsilon(1, noise_multiplier, 1e-6, clients, clients)


def test_sampling_amplifies() -> None:
    """A tenth of the clients and moderate noise: in one round a fraction of the epsilon."""
    whole, tenth = (epsilon(1, 5.0, 1e-6, 1000, m) for m in (1000, 100))
    assert tenth < 0.3 * whole


@settings(max_examples=15, deadline=None)
@given(
    noise=st.sampled_from(NOISE),
    rounds=st.integers(0, 10_000),
    more=st.integers(0, 1000),
    cohort=st.sampled_from([1, 20, 60, 100]),
    delta=st.floats(1e-12, 0.5),
)
def test_monotone(noise: float, rounds: int, more: int, cohort: int, delta: float) -> None:
    here = epsilon(rounds, noise, delta, 100, cohort)
    assert here >= 0
    assert here <= epsilon(rounds + more, noise, delta, 100, cohort), "in rounds"
    assert here >= epsilon(rounds, noise, min(2 * delta, 0.99), 100, cohort), "in delta"
    assert all(here >= epsilon(rounds, z, delta, 100, cohort) for z in NOISE if z > noise), "in noise"
    assert all(here <= epsilon(rounds, noise, delta, 100, m) for m in (20, 60, 100) if m > cohort), "in the rate"


def test_limits() -> None:
    assert epsilon(5, 0.0, 1e-5, 100, 10) == math.inf
    assert epsilon(5, 1e-200, 1e-5, 100, 10) == math.inf
    assert epsilon(0, 0.0, 1e-5, 100, 10) == 0, "nothing was released"
    assert epsilon(1, 1e6, 1e-5, 100, 10) == 0
    assert math.isfinite(epsilon(1, 1e-6, 1e-5, 100, 10))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rounds": -1}, "rounds"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": 1e9}, "noise_multiplier"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"clients_per_round": 11}, "clients_per_round"),
        ({"clients_per_round": 0}, "clients_per_round"),
    ],
)
def test_refused(changes: dict[str, float], key: str) -> None:
    arguments = {"rounds": 1, "noise_multiplier": 1.0, "delta": 1e-5, "num_clients": 10, "clients_per_round": 10}
    with pytest.raises(BadValue, match=key):
        epsilon(**{**arguments, **changes})


def test_a_round_costs_no_time() -> None:
    """It is logged in every round, so divergences are worked out once. (0.1 ms; the bound is for busy machines.)"""
    epsilon(1, 1.0, 1e-5, 100, 10)
    start = time.process_time()
    for rounds in range(1, 101):
        epsilon(rounds, 1.0, 1e-5, 100, 10)
    assert time.process_time() - start < 0.5
