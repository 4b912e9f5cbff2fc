"""What a run has given away so far: (epsilon, delta) differential privacy of a client's whole data.

McMahan et al., "Learning Differentially Private Recurrent Language Models" (ICLR 2018), for cohorts of a fixed size. In
every round m of N clients are drawn uniformly without replacement, each vector is clipped to L2 norm S, and the sum is
released with Gaussian noise of standard deviation noise_multiplier * S in every coordinate.

Neighbours differ in one client's data, N being public. Replacing a vector of norm <= S by another moves the sum by up
to 2 S, so to its sensitivity the noise has the ratio

    sigma = noise_multiplier / 2 .

A round is (alpha, rdp(alpha)) Renyi private (Mironov 2017) with  rdp(alpha) = alpha / (2 sigma^2)  where all clients
take part; sampling lowers it: Wang, Balle & Kasiviswanathan, "Subsampled Renyi Differential Privacy" (AISTATS 2019),
Theorem 27, here Google's `dp_accounting`. Rounds add up, and for every alpha (Canonne, Kamath & Steinke 2020,
Proposition 12)

    epsilon = rounds * rdp(alpha) + log(1 - 1/alpha) - log(delta alpha) / (alpha - 1) .

The smallest over the library's orders alpha is an upper bound on the true epsilon.
"""

import math
from collections.abc import Callable
from functools import lru_cache

from fedsim import check


def epsilon(rounds: int, noise_multiplier: float, delta: float, num_clients: int, clients_per_round: int) -> float:
    """Epsilon after `rounds` rounds; infinite without noise. The first call with some noise, N and m is slow."""
    check.integer("rounds", rounds, ge=0)
    check.number("noise_multiplier", noise_multiplier, ge=0, le=1e6)
    check.number("delta", delta, gt=0, lt=1)
    check.integer("num_clients", num_clients, ge=1)
    check.integer("clients_per_round", clients_per_round, ge=1, le=num_clients)
    if rounds == 0:
        return 0.0  # nothing was released
    if noise_multiplier < 1e-6:
        return math.inf  # no privacy is left, and the squares of still smaller numbers underflow
    return _curve(noise_multiplier, num_clients, clients_per_round)(rounds, delta)


@lru_cache
def _curve(noise_multiplier: float, num_clients: int, clients_per_round: int) -> Callable[[int, float], float]:
    """(rounds, delta) -> epsilon, with one round's Renyi divergences worked out."""
    # Imported here, as it takes a second (it loads much of SciPy).
    import dp_accounting as dp  # type: ignore[import-untyped]

    release = dp.GaussianDpEvent(noise_multiplier / 2)  # the library wants noise / sensitivity, whatever the relation
    full, sampled = (dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE) for _ in range(2))
    full.compose(release)
    sampled.compose(dp.SampledWithoutReplacementDpEvent(num_clients, clients_per_round, release))
    # Theorem 27 is loose where most clients take part, or with little noise. But a round is never less private than
    # with all clients: given the cohort it is the same mechanism, and mixing over cohorts can only make neighbours
    # harder to tell apart (the divergence is quasi-convex). Both bounds hold, hence the smaller one at each order.
    orders = full.orders.tolist()
    rdp = [min(pair) for pair in zip(full.rdp.tolist(), sampled.rdp.tolist(), strict=True)]
    return lambda rounds, delta: float(dp.rdp.compute_epsilon(orders, [rounds * r for r in rdp], delta)[0])
