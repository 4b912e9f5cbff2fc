"""PFNM: match the clients' hidden units before averaging them. Yurochkin et al., ICML 2019; `fedsim/matching.py`.

The clients' networks (fully connected, any number of hidden layers) are matched under a Beta-Bernoulli prior and
averaged unit by unit. The result is put in the order of the server's model theta, so that memories stay meaningful;
units that no unit of theta stands for come last, and the model grows. With theta' = theta padded by zero units,

    direction = theta' - matched ,          or with `tau` (elastic paper, Table 2)  zeta * (theta' - matched)

Elastic reads as follows: a client measures Omega_k at theta as ever; Omega_k is carried to the matched order as its
weights are; a global parameter's Omega is the mean over the clients that have it, with the weights of its value; zeta
is then taken layer by layer in the matched network.
"""

from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from torch import Tensor

from fedsim import check
from fedsim.aggregator.elastic import Elastic
from fedsim.cohort import Cohort
from fedsim.matching import Matched, Network, Prior, align, carry, match, pad
from fedsim.types import Direction, Probe, State, Tree


@dataclass(frozen=True)
class Pfnm(Elastic):
    tau: float | None  # type: ignore[assignment]
    sigma2: float
    sigma02: float
    gamma0: float
    iterations: int

    def __post_init__(self) -> None:
        inherited = {f.name: getattr(self, f.name) for f in fields(Elastic)}
        Elastic(**inherited | ({"tau": 0.5} if self.tau is None else {}))  # checks them, whether they are used or not
        Prior(self.sigma2, self.sigma02, self.gamma0)
        check.integer("iterations", self.iterations, ge=1)

    @property
    def individual(self) -> bool:
        return True

    @property
    def extra_uploads(self) -> int:
        return 0 if self.tau is None else 1

    @property
    def probe(self) -> Probe | None:  # type: ignore[override]
        return None if self.tau is None else super().probe

    def init(self, params: Tree) -> State:
        _network(params)  # refuse what is not fully connected before anything is trained
        return {}

    def direction(self, cohort: Cohort, state: State) -> Direction:
        theta, members = cohort.server.params, cohort.members
        if not all(torch.isfinite(t).all() for m in members for t in m.params.values()):
            return Direction(cohort.delta)  # nothing to match: the run has diverged, and will be seen to
        found = match(
            [_network(m.params) for m in members],
            [m.weight for m in members],
            Prior(self.sigma2, self.sigma02, self.gamma0),
            self.iterations,
        )
        found = align(found, _network(theta))
        origin = _tree(theta, pad(_network(theta), found.widths))
        matched = _tree(theta, found.network)
        naive = {n: o - matched[n] for n, o in origin.items()}
        units = torch.tensor(float(sum(found.widths)), device=next(iter(theta.values())).device)
        if self.tau is None:
            return Direction(naive, metrics={"pfnm/units": units}, origin=origin)
        zeta = self.zeta(self._carried_omega(cohort, found))
        scaled = self.scaled(naive, zeta)
        return Direction(
            scaled.tree, metrics=scaled.metrics | {"pfnm/units": units}, layers=scaled.layers, origin=origin
        )

    def _carried_omega(self, cohort: Cohort, found: Matched) -> Tree:
        theta = cohort.server.params
        total: dict[str, Tensor] = {}
        mass: dict[str, Tensor] = {}
        for member, assignment in zip(cohort.members, found.assignment, strict=True):
            assert member.measured is not None
            ones = {n: torch.ones_like(o) for n, o in member.measured.items()}
            for sums, tree in ((total, member.measured), (mass, ones)):
                carried = _tree(theta, carry(_network(tree), assignment, found.widths))
                for n, t in carried.items():
                    sums[n] = sums[n] + member.weight * t if n in sums else member.weight * t
        return {n: torch.where(mass[n] > 0, t / mass[n], torch.zeros_like(t)) for n, t in total.items()}


def _network(params: Tree) -> Network:
    """(weight, bias) of every layer, from the input up."""
    tensors = list(params.values())
    layers = list(zip(tensors[::2], tensors[1::2], strict=False))
    dense = len(tensors) % 2 == 0 and all(w.dim() == 2 and b.dim() == 1 for w, b in layers)
    if not dense or any(below.shape[0] != above.shape[1] for (below, _), (above, _) in pairwise(layers)):
        raise check.InputError("aggregator=pfnm matches fully connected networks; use model=mlp or model=logistic")
    return layers


def _tree(like: Tree, network: Network) -> Tree:
    return dict(zip(like, (t for layer in network for t in layer), strict=True))
