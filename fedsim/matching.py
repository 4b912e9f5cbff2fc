"""Matching the hidden units of fully connected networks: the pure part of PFNM.

Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019. The order of hidden units
is arbitrary, so a client's unit v_jl (its weights and bias as one vector) is a noisy copy of a global atom theta_i:

    theta_i ~ N(0, sigma0^2 I) ,   v_jl | theta_i ~ N(theta_i, sigma^2 I) ,   which atoms J clients use: Beta-Bernoulli

with mass gamma0, and no two units of a client are copies of one atom. The MAP assignment is found client by client,
the others held fixed, as a linear assignment problem (`cost`); an atom may be new, so the data decide on the width.

Several hidden layers go top down, as in the paper: a unit is (bias, outgoing weights), the outgoing weights in the
matched order of the layer above (zero where the client lacks the unit); the lowest has its incoming weights too. The
ends are fixed: inputs and outputs have an order all clients share.

The value of a global parameter is the weighted mean over the clients that have it (both ends of it, for a weight):

    theta = sum_k w_k v_k / sum_k w_k

and not the paper's posterior mean  sum_k v_k/sigma^2 / (1/sigma0^2 + n/sigma^2) : identical clients shall return
themselves, round after round, without the prior pulling them to zero. As in the paper it is a mean over the owners, not
over all clients: a unit that only some have comes with its full outgoing weights. A weight that no client has is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]
from torch import Tensor

from fedsim import check

Layer = tuple[Tensor, Tensor]
"""(weight [out, in], bias [out])."""

Network = list[Layer]
"""From the input up; hidden layer l is fed by layer l and feeds layer l + 1."""


@dataclass(frozen=True)
class Prior:
    sigma2: float
    """sigma^2, how far a client's unit lies from its atom. Larger: more units are matched, fewer are added."""
    sigma02: float
    """sigma0^2, how far an atom lies from zero. Larger: adding an atom costs less."""
    gamma0: float
    """Mass of the Beta process: how many atoms there are. With gamma0 <= 1 identical clients never add one; above it
    they may where a unit is small, ||v||^2 / sigma0^2 < 2 log(gamma0) or so."""

    def __post_init__(self) -> None:
        check.number("sigma2", self.sigma2, gt=0)
        check.number("sigma02", self.sigma02, gt=0)
        check.number("gamma0", self.gamma0, gt=0)


@dataclass(frozen=True)
class Matched:
    network: Network
    assignment: list[list[Tensor]]
    """assignment[k][l][i]: the global unit which is unit i of hidden layer l of client k."""

    @property
    def widths(self) -> list[int]:
        return [len(bias) for _, bias in self.network[:-1]]


def match(clients: Sequence[Network], weights: Sequence[float], prior: Prior, iterations: int) -> Matched:
    """The global network of several clients'. Hidden widths may differ; dtype and device are the first client's."""
    check.integer("iterations", iterations, ge=1)
    nets = [_exact(net) for net in clients]
    order = [torch.arange(len(nets[0][-1][1]))] * len(nets)
    assignment: list[list[Tensor]] = [[] for _ in nets]
    widths: list[int] = []
    width = len(order[0])
    for layer in reversed(range(len(nets[0]) - 1)):
        units = [_units(net, layer, above, width) for net, above in zip(nets, order, strict=True)]
        order, width = assign(units, prior, iterations)
        assignment = [[found, *rest] for found, rest in zip(order, assignment, strict=True)]
        widths = [width, *widths]
    mean = _mean(nets, weights, assignment, widths)
    return Matched([(w.to(clients[0][0][0]), b.to(clients[0][0][0])) for w, b in mean], assignment)


def assign(units: Sequence[Tensor], prior: Prior, iterations: int) -> tuple[list[Tensor], int]:
    """The atom of each unit of each client ([L_k, D] each), and how many atoms there are.

    The first pass brings the clients in, the widest first; each further one takes every client out and assigns it
    anew, until a pass changes nothing. The order is fixed, so that the result is a function of its input. It need not
    settle: the i' of `cost` counts only a client's own new atoms, so two clients may disagree on sharing one.
    """
    order = sorted(range(len(units)), key=lambda k: -len(units[k]))
    capacity = sum(map(len, units))
    sums, counts = units[0].new_zeros(capacity, units[0].shape[1]), units[0].new_zeros(capacity)
    found = [torch.empty(0, dtype=torch.long)] * len(units)
    for _ in range(iterations):
        before = list(found)
        for k in order:
            sums[found[k]] -= units[k][: len(found[k])]  # the client's own share; none in the first pass
            counts[found[k]] -= 1
            used, free = counts.nonzero().flatten(), (counts == 0).nonzero().flatten()
            costs = cost(units[k], sums[used], counts[used], len(units), prior)
            columns = torch.from_numpy(linear_sum_assignment(costs.numpy())[1])
            new = columns >= len(used)
            # Which of the new columns a unit got is a tie: new atoms are numbered in the order of the client's units.
            columns[new] = len(used) + torch.arange(int(new.sum()))
            found[k] = torch.cat([used, free])[columns]
            sums[found[k][new]] = 0  # what rounding left of a former atom
            sums[found[k]] += units[k]
            counts[found[k]] += 1
        if all(map(torch.equal, before, found)):
            break
    kept = counts > 0  # a place may have been left empty
    number = kept.cumsum(0) - 1
    return [number[atoms] for atoms in found], int(kept.sum())


def cost(units: Tensor, sums: Tensor, counts: Tensor, clients: int, prior: Prior) -> Tensor:
    """What it costs to assign each of a client's L units to each of G atoms or to the L first new ones, [L, G + L].

    With a = 1/sigma^2, p = 1/sigma0^2, and S_i = `sums` and n_i = `counts` over the other clients' units in atom i:

        atom i:    - ||a v + a S_i||^2 / (p + a + a n_i) + ||a S_i||^2 / (p + a n_i) - 2 log(n_i / (J - n_i))
        new, i'th: - ||a v||^2 / (p + a) - 2 log(gamma0 / J) + 2 log(i')
    """
    a, p = 1 / prior.sigma2, 1 / prior.sigma02
    v2, s2 = units.square().sum(1)[:, None], sums.square().sum(1)
    both = v2 + 2 * units @ sums.T + s2
    old = a**2 * (both / (p + a + a * counts) - s2 / (p + a * counts)) + 2 * (counts / (clients - counts)).log()
    nth = torch.arange(1, len(units) + 1, dtype=units.dtype)
    new = a**2 * v2 / (p + a) + 2 * (prior.gamma0 / clients / nth).log()
    return -torch.cat([old, new], dim=1)


def carry(network: Network, assignment: Sequence[Tensor], widths: Sequence[int]) -> Network:
    """A client's network, or anything of its shapes, in global order; zero where the client has no such unit.

    `assignment` is that of one client (`matched.assignment[k]`), `widths` are the global ones (`matched.widths`).
    """
    carried = _zeros(network, widths)
    places = _places(network, assignment)
    for (weight, bias), (w, b), (rows, columns) in zip(carried, network, places, strict=True):
        weight[rows[:, None], columns] = w
        bias[rows] = b
    return carried


def pad(network: Network, widths: Sequence[int]) -> Network:
    """The same function with wider hidden layers: the units that are added are zero and come last."""
    return carry(network, [torch.arange(len(bias)) for _, bias in network[:-1]], widths)


def align(matched: Matched, reference: Network) -> Matched:
    """The same network in the order of another: unit i stands for the reference's unit i, new units come last.

    Top down as in `match`, the least sum of squared distances between units. Where the reference is the wider one, the
    units of it that are left over keep their places as zero units.
    """
    mine, theirs = _exact(matched.network), _exact(reference)
    width = len(mine[-1][1])
    order, positions, widths = torch.arange(width), list[Tensor](), list[int]()
    for layer in reversed(range(len(mine) - 1)):
        ours = _units(mine, layer, order, width)
        others = _units(theirs, layer, torch.arange(len(theirs[layer + 1][1])), width)
        rows, columns = linear_sum_assignment(torch.cdist(ours, others).square().numpy())
        order = torch.full((len(ours),), -1)
        order[rows] = torch.from_numpy(columns)
        order[order < 0] = torch.arange(len(others), len(others) + len(ours) - len(rows))
        width = max(len(ours), len(others))
        positions, widths = [order, *positions], [width, *widths]
    assignment = [[p[a] for p, a in zip(positions, client, strict=True)] for client in matched.assignment]
    return Matched(carry(matched.network, positions, widths), assignment)


def _mean(
    nets: Sequence[Network], weights: Sequence[float], assignment: Sequence[Sequence[Tensor]], widths: Sequence[int]
) -> Network:
    """sum_k w_k v_k / sum_k w_k over the clients that have the parameter. Only a client's own entries are touched: the
    global network may be as large as all of them together."""
    total, mass = _zeros(nets[0], widths), _zeros(nets[0], widths)
    for net, weight, own in zip(nets, weights, assignment, strict=True):
        places = _places(net, own)
        for (tw, tb), (mw, mb), (w, b), (rows, columns) in zip(total, mass, net, places, strict=True):
            tw[rows[:, None], columns] += weight * w
            mw[rows[:, None], columns] += weight
            tb[rows] += weight * b
            mb[rows] += weight
    return [(_ratio(tw, mw), _ratio(tb, mb)) for (tw, tb), (mw, mb) in zip(total, mass, strict=True)]


def _ratio(total: Tensor, mass: Tensor) -> Tensor:
    return torch.where(mass > 0, total / mass, 0)


def _zeros(network: Network, widths: Sequence[int]) -> Network:
    """A network of zeros with the ends of another and hidden widths of its own."""
    weight, bias = network[0][0], network[-1][1]
    sizes = [weight.shape[1], *widths, len(bias)]
    return [(weight.new_zeros(o, i), weight.new_zeros(o)) for i, o in pairwise(sizes)]


def _places(network: Network, assignment: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Where each layer's rows and columns stand in global order."""
    inputs, outputs = network[0][0].shape[1], len(network[-1][1])
    return [(rows, columns) for columns, rows in pairwise([torch.arange(inputs), *assignment, torch.arange(outputs)])]


def _units(network: Network, layer: int, above: Tensor, width: int) -> Tensor:
    """The vector of each unit of a hidden layer, [L, D]; `above` are the global places, of `width`, of the units it
    feeds."""
    weight = network[layer + 1][0]
    outgoing = weight.new_zeros(width, weight.shape[1]).index_copy(0, above, weight).T
    incoming = [network[0][0]] if layer == 0 else []
    return torch.cat([network[layer][1][:, None], outgoing, *incoming], dim=1)


def _exact(network: Network) -> Network:
    """On the CPU in double precision, where the assignment problem is solved."""
    return [(w.detach().cpu().double(), b.detach().cpu().double()) for w, b in network]
