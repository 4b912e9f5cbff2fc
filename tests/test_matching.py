"""PFNM's matching against numbers worked by hand, a search through all assignments in NumPy, and its symmetries."""

from itertools import combinations, pairwise, permutations
from math import factorial, log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim.check import BadValue
from fedsim.matching import Matched, Network, Prior, align, assign, carry, cost, match, pad

PRIOR = Prior(sigma2=0.1, sigma02=1.0, gamma0=1.0)
SHAPES = [[3, 4, 2], [3, 5, 4, 2], [3, 4, 6, 5, 2]]
"""One, two and three hidden layers."""


def random_net(sizes: list[int], seed: int) -> Network:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(o, i, generator=g), torch.randn(o, generator=g)) for i, o in pairwise(sizes)]


def near(net: Network, seed: int, noise: float = 0.01) -> Network:
    g = torch.Generator().manual_seed(seed)
    shaken = [[x + noise * torch.randn(x.shape, generator=g) for x in layer] for layer in net]
    return [(weight, bias) for weight, bias in shaken]


def shuffled(net: Network, seed: int) -> tuple[Network, list[list[int]]]:
    """Hidden units in another order, the next layer's columns with them; new unit i was unit order[i]."""
    rng, layers, orders = np.random.default_rng(seed), list(net), []
    for i in range(len(layers) - 1):
        order = rng.permutation(len(layers[i][1])).tolist()
        layers[i] = (layers[i][0][order], layers[i][1][order])
        layers[i + 1] = (layers[i + 1][0][:, order], layers[i + 1][1])
        orders.append(order)
    return layers, orders


def forward(net: Network, x: Tensor) -> Tensor:
    for weight, bias in net[:-1]:
        x = (x @ weight.T + bias).relu()
    return x @ net[-1][0].T + net[-1][1]


def assert_equal(found: Network, expected: Network, tolerance: float = 0.0) -> None:
    for (w, b), (ew, eb) in zip(found, expected, strict=True):
        torch.testing.assert_close(w, ew, rtol=0, atol=tolerance)
        torch.testing.assert_close(b, eb, rtol=0, atol=tolerance)


def lists(matched: Matched) -> list[list[list[int]]]:
    return [[a.tolist() for a in client] for client in matched.assignment]


# The same objective in NumPy, one assignment at a time.


def conditional_cost(units: list[np.ndarray], places: list[list[int]], k: int, prior: Prior) -> float:
    """What client k's present assignment costs, the other clients held fixed: the terms of Eq. 8, summed."""
    total, new, s, s0 = 0.0, 0, prior.sigma2, prior.sigma02
    for v, i in zip(units[k], places[k], strict=True):
        others = [u for j in range(len(units)) if j != k for u, at in zip(units[j], places[j], strict=True) if at == i]
        rest = sum((u / s for u in others), np.zeros_like(v))
        total -= np.sum((rest + v / s) ** 2) / (1 / s0 + (len(others) + 1) / s)
        total += np.sum(rest**2) / (1 / s0 + len(others) / s)
        if others:
            total -= 2 * log(len(others) / (len(units) - len(others)))
        else:
            new += 1
            total -= 2 * log(prior.gamma0 / len(units))
    return float(total + 2 * log(factorial(new)))


def every_assignment(width: int, atoms: list[int]) -> list[list[int]]:
    """Each unit to an atom of its own or to a new one (negative numbers)."""
    found = []
    for size in range(min(width, len(atoms)) + 1):
        for chosen in combinations(range(width), size):
            for targets in permutations(atoms, size):
                mapping = dict(zip(chosen, targets, strict=True))
                found.append([mapping.get(i, -1 - i) for i in range(width)])
    return found


def best_assignment(units: list[np.ndarray], places: list[list[int]], k: int, prior: Prior) -> list[int]:
    """Client k's cheapest assignment of all, given the others'."""
    atoms = sorted({i for j, at in enumerate(places) if j != k for i in at})
    every = every_assignment(len(units[k]), atoms)
    return min(every, key=lambda mine: conditional_cost(units, [*places[:k], mine, *places[k + 1 :]], k, prior))


def partition(places: list[list[int]]) -> set[frozenset[tuple[int, int]]]:
    """The atoms as sets of (client, unit): what remains of an assignment without its numbering."""
    atoms = {i for at in places for i in at}
    return {frozenset((k, u) for k, at in enumerate(places) for u, i in enumerate(at) if i == atom) for atom in atoms}


def random_units(widths: list[int], scale: float, seed: int) -> tuple[list[np.ndarray], list[Tensor]]:
    rng = np.random.default_rng(seed)
    units = [rng.normal(size=(width, 2)) * scale for width in widths]
    return units, [torch.from_numpy(u) for u in units]


priors = st.builds(Prior, st.floats(0.05, 5), st.floats(0.05, 5), st.floats(0.1, 10))


# The cost


def test_cost_by_hand() -> None:
    """sigma^2 = 1/2, sigma0^2 = 1, gamma0 = 3, J = 3; v = 1; atoms: S = 2 of n = 1, S = -1 of n = 2.

    a = 2, p = 1. Atom 1: -(2 + 4)^2/(1 + 2 + 2) + 4^2/(1 + 2) - 2 log(1/2) = -36/5 + 16/3 + 2 log 2.
    Atom 2: -(2 - 2)^2/(1 + 2 + 4) + 2^2/(1 + 4) - 2 log(2/1) = 4/5 - 2 log 2.
    New: -2^2/(1 + 2) - 2 log(3/3) + 2 log 1 = -4/3."""
    prior = Prior(sigma2=0.5, sigma02=1.0, gamma0=3.0)
    atoms = torch.tensor([[2.0], [-1.0]]), torch.tensor([1.0, 2.0])
    found = cost(torch.tensor([[1.0]]), *atoms, clients=3, prior=prior)
    assert found.tolist() == [pytest.approx([-36 / 5 + 16 / 3 + 2 * log(2), 4 / 5 - 2 * log(2), -4 / 3], rel=1e-6)]


def test_cost_of_new_atoms_by_hand() -> None:
    """sigma^2 = sigma0^2 = 1, gamma0 = 1/2, J = 2: -||v||^2/2 + 2 log 4 + 2 log i', with ||v||^2 = 25 and 0."""
    units = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    found = cost(units, torch.empty(0, 2), torch.empty(0), clients=2, prior=Prior(1.0, 1.0, 0.5))
    first = 2 * log(4)
    assert found[0].tolist() == pytest.approx([-12.5 + first, -12.5 + first + 2 * log(2)], rel=1e-6)
    assert found[1].tolist() == pytest.approx([first, first + 2 * log(2)], rel=1e-6)


# The assignment


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 3), prior=priors, scale=st.floats(0.1, 3), seed=st.integers(0, 10_000))
def test_two_clients_against_all_assignments(width: int, prior: Prior, scale: float, seed: int) -> None:
    """Whatever client 0 is assigned, every way to match two clients is an assignment of client 1: the best of all."""
    units, tensors = random_units([width, width], scale, seed)
    found = [f.tolist() for f in assign(tensors, prior, iterations=5)[0]]
    best = [found[0], best_assignment(units, found, 1, prior)]
    assert partition(found) == partition(best)


@settings(max_examples=40, deadline=None)
@given(
    widths=st.sampled_from([[3, 2, 1], [2, 2, 2], [2, 1, 1, 1]]),
    passes=st.integers(1, 4),
    prior=priors,
    scale=st.floats(0.1, 3),
    seed=st.integers(0, 10_000),
)
def test_the_passes_against_all_assignments(
    widths: list[int], passes: int, prior: Prior, scale: float, seed: int
) -> None:
    """The alternation once more, each step of it a search through all assignments of one client."""
    units, tensors = random_units(widths, scale, seed)
    places: list[list[int]] = [[] for _ in widths]
    present = [u[:0] for u in units]
    for _ in range(passes):
        for k in range(len(widths)):
            present[k] = units[k]
            mine = best_assignment(present, places, k, prior)
            names = iter(range(sum(widths)))
            taken = {i for j, at in enumerate(places) if j != k for i in at} | {*mine}
            places[k] = [i if i >= 0 else next(n for n in names if n not in taken) for i in mine]
    found = [f.tolist() for f in assign(tensors, prior, passes)[0]]
    assert partition(found) == partition(places)


@settings(max_examples=30, deadline=None)
@given(prior=priors, scale=st.floats(0.1, 3), seed=st.integers(0, 10_000))
def test_assignments_are_one_to_one_and_leave_no_gap(prior: Prior, scale: float, seed: int) -> None:
    widths = [2, 4, 3, 3]
    found, atoms = assign(random_units(widths, scale, seed)[1], prior, iterations=3)
    for width, places in zip(widths, found, strict=True):
        assert len(places.unique()) == width
    assert torch.cat(found).unique().tolist() == list(range(atoms))


def test_a_further_pass_corrects_the_first() -> None:
    """One unit each, 1, 3 and 4; a = 2, p = 1, gamma0 = 1. In the first pass

        3 with {1}:     -(6 + 2)^2/5 + 4/3 + 2 log 2      = -10.08 , new -36/3 + 2 log 3 =  -9.80 : joins
        4 with {1, 3}:  -(8 + 8)^2/7 + 64/5 - 2 log 2     = -25.16 , new -64/3 + 2 log 3 = -19.14 : joins

    and in the second 1 with {3, 4}: -(2 + 14)^2/7 + 196/5 - 2 log 2 = 1.24 , new -4/3 + 2 log 3 = 0.86 : leaves."""
    units = [torch.tensor([[x]], dtype=torch.float64) for x in (1.0, 3.0, 4.0)]
    prior = Prior(sigma2=0.5, sigma02=1.0, gamma0=1.0)
    found = {n: [f.tolist() for f in assign(units, prior, iterations=n)[0]] for n in (1, 2, 9)}
    assert found == {1: [[0], [0], [0]], 2: [[1], [0], [0]], 9: [[1], [0], [0]]}


# The network


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("clients", [1, 2, 5])
def test_identical_clients_return_themselves(sizes: list[int], clients: int) -> None:
    net = random_net(sizes, 0)
    matched = match([net] * clients, [1 / clients] * clients, PRIOR, iterations=3)
    assert_equal(matched.network, net, 1e-6)
    assert lists(matched) == [[list(range(w)) for w in sizes[1:-1]]] * clients


@settings(max_examples=40, deadline=None)
@given(
    sigma2=st.floats(1e-3, 1e2),
    sigma02=st.floats(1e-3, 1e2),
    gamma0=st.floats(1e-3, 1),
    dead=st.integers(0, 3),
    clients=st.integers(2, 4),
)
def test_identical_clients_never_grow_with_small_mass(
    sigma2: float, sigma02: float, gamma0: float, dead: int, clients: int
) -> None:
    """gamma0 <= 1: n/(J - n) > gamma0/J, and ||.||^2/(p + a n) is convex in n. Whatever the units, also zero ones."""
    net = random_net([3, 4, 2], 1)
    net[0][0][:dead], net[0][1][:dead], net[1][0][:, :dead] = 0, 0, 0
    matched = match([net] * clients, [1 / clients] * clients, Prior(sigma2, sigma02, gamma0), iterations=2)
    assert_equal(matched.network, net, 1e-6)


@pytest.mark.parametrize("sizes", SHAPES)
def test_the_order_of_a_clients_units_does_not_matter(sizes: list[int]) -> None:
    net = random_net(sizes, 3)
    clients = [near(net, seed) for seed in range(4)]
    plain = match(clients, [0.1, 0.2, 0.3, 0.4], PRIOR, iterations=3)
    mixed = [shuffled(client, seed)[0] for seed, client in enumerate(clients)]
    matched = match(mixed, [0.1, 0.2, 0.3, 0.4], PRIOR, iterations=3)
    assert plain.widths == matched.widths == sizes[1:-1]
    assert not torch.equal(matched.network[0][0], plain.network[0][0])
    assert_equal(align(matched, plain.network).network, plain.network)
    assert_equal(align(matched, net).network, align(plain, net).network)


@pytest.mark.parametrize("sizes", SHAPES)
def test_the_assignment_undoes_a_permutation(sizes: list[int]) -> None:
    """Client 0 in the global order, client 1 a permutation of it: its new unit i was unit order[i]."""
    net = random_net(sizes, 4)
    mixed, orders = shuffled(net, 5)
    matched = match([net, mixed], [0.5, 0.5], PRIOR, iterations=2)
    assert lists(matched)[1] == orders
    assert_equal(matched.network, net, 1e-6)


def test_values_are_weighted_means_over_the_owners_by_hand() -> None:
    """Client 0 has units A = (in 10, bias 0, out 10) and B = (in -10, bias 5, out 10); client 1 (weight 3/4) has
    A' = (10, 4, 14) only. A is shared: bias 3/4 * 4 = 3, out 10/4 + 3/4 * 14 = 13. B is client 0's, undiminished.
    Output bias 1/4 * 8 + 3/4 * 0 = 2. No shrinkage by the prior."""
    first = [
        (torch.tensor([[-10.0], [10.0]]), torch.tensor([5.0, 0.0])),
        (torch.tensor([[10.0, 10.0]]), torch.tensor([8.0])),
    ]
    second = [(torch.tensor([[10.0]]), torch.tensor([4.0])), (torch.tensor([[14.0]]), torch.tensor([0.0]))]
    matched = match([first, second], [0.25, 0.75], Prior(1.0, 10.0, 1.0), iterations=2)
    (weight, bias), (out, last) = matched.network
    assert lists(matched) == [[[0, 1]], [[1]]]
    assert (weight.tolist(), bias.tolist()) == ([[-10.0], [10.0]], [5.0, 3.0])
    assert (out.tolist(), last.tolist()) == ([[10.0, 13.0]], [2.0])


def test_disjoint_clients_grow_to_the_sum_of_the_widths() -> None:
    """Units ten standard deviations apart. With every unit its owner's, the outputs add up, as do the functions."""
    clients = [random_net([3, width, 2], 10 + width) for width in (2, 4, 3)]
    for k, client in enumerate(clients):
        client[0][0].add_(10 * k)
    matched = match(clients, [0.2, 0.3, 0.5], PRIOR, iterations=3)
    assert matched.widths == [9]
    x, shift = torch.randn(5, 3), sum(w * c[1][1] for w, c in zip((0.2, 0.3, 0.5), clients, strict=True))
    expected = sum((forward(c, x) - c[1][1] for c in clients), torch.zeros(5, 2)) + shift
    torch.testing.assert_close(forward(matched.network, x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", SHAPES[1:])
def test_disjoint_deep_clients_stay_apart(sizes: list[int]) -> None:
    """Each layer is the clients' layers side by side; the weights between one's units and another's are zero."""
    clients = [random_net(sizes, seed) for seed in (0, 1)]
    for _, bias in clients[1][:-1]:
        bias.add_(30)
    matched = match(clients, [0.5, 0.5], PRIOR, iterations=3)
    assert matched.widths == [2 * w for w in sizes[1:-1]]
    for layer in range(1, len(sizes) - 2):
        weight = matched.network[layer][0]
        blocks = torch.block_diag(clients[0][layer][0], clients[1][layer][0])
        torch.testing.assert_close(weight, blocks)


def test_a_weight_is_averaged_over_the_clients_that_have_both_ends() -> None:
    """Client 1 lacks the second unit of the upper layer; the weights into it are client 0's alone, not halved."""
    full = random_net([3, 4, 2, 2], 6)
    full[1][1].copy_(torch.tensor([-20.0, 20.0]))
    lacking = [full[0], (full[1][0][:1], full[1][1][:1]), (full[2][0][:, :1], full[2][1])]
    matched = match([full, lacking], [0.5, 0.5], Prior(10.0, 1.0, 1.0), iterations=3)
    assert matched.widths == [4, 2]
    assert_equal(matched.network, full, 1e-6)


def test_clients_of_different_widths() -> None:
    """Clients that each lack some of a network's units give the network back, in any order of the clients."""
    net = random_net([6, 5, 3], 7)
    kept = [[0, 1], [0, 2, 3, 4], [1, 3, 4]]
    clients = [[(net[0][0][own], net[0][1][own]), (net[1][0][:, own], net[1][1])] for own in kept]
    matched = match(clients, [0.5, 0.3, 0.2], PRIOR, iterations=3)
    assert matched.widths == [5]
    assert lists(matched)[1] == [[0, 1, 2, 3]], "the widest client comes first and gives the order"
    aligned = align(matched, net)
    assert_equal(aligned.network, net, 1e-6)
    assert lists(aligned) == [[own] for own in kept]


def test_no_hidden_layer_is_the_weighted_mean() -> None:
    clients = [random_net([3, 2], seed) for seed in (0, 1)]
    matched = match(clients, [0.25, 0.75], PRIOR, iterations=1)
    torch.testing.assert_close(matched.network[0][0], 0.25 * clients[0][0][0] + 0.75 * clients[1][0][0])
    assert matched.widths == []


def test_the_inputs_stay_as_they_were_and_so_does_their_type() -> None:
    clients = [random_net([3, 4, 2], seed) for seed in (0, 1)]
    copies = [[(w.clone(), b.clone()) for w, b in client] for client in clients]
    matched = align(match(clients, [0.5, 0.5], PRIOR, iterations=2), clients[1])
    for client, copy in zip(clients, copies, strict=True):
        assert_equal(client, copy)
    assert {x.dtype for layer in matched.network for x in layer} == {torch.float32}


# carry, pad, align


def test_carry_by_hand() -> None:
    """Two units to places 2 and 0 of three."""
    tree = [(torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 4.0])), (torch.tensor([[5.0, 6.0]]), torch.tensor([7.0]))]
    (weight, bias), (out, last) = carry(tree, [torch.tensor([2, 0])], [3])
    assert (weight.tolist(), bias.tolist()) == ([[2.0], [0.0], [1.0]], [4.0, 0.0, 3.0])
    assert (out.tolist(), last.tolist()) == ([[6.0, 0.0, 5.0]], [7.0])


@pytest.mark.parametrize("sizes", SHAPES)
def test_carrying_preserves_the_function(sizes: list[int]) -> None:
    """Each client in global coordinates computes what it did; carried and averaged where they are owned: the global."""
    clients = [random_net([*sizes[:1], *(w + k for w in sizes[1:-1]), *sizes[-1:]], k) for k in range(3)]
    weights, x = [0.2, 0.3, 0.5], torch.randn(4, sizes[0])
    matched = match(clients, weights, Prior(1.0, 1.0, 1.0), iterations=3)
    carried = [carry(c, own, matched.widths) for c, own in zip(clients, matched.assignment, strict=True)]
    for client, net in zip(clients, carried, strict=True):
        torch.testing.assert_close(forward(net, x), forward(client, x), rtol=1e-4, atol=1e-4)
    for layer, found in enumerate(matched.network):
        for part in (0, 1):
            stack = np.stack([net[layer][part].numpy() for net in carried])
            mass = np.tensordot(weights, stack != 0, 1)  # random parameters are nowhere zero
            mean = np.tensordot(weights, stack, 1) / np.where(mass > 0, mass, 1)
            assert np.allclose(found[part], mean, atol=1e-5)


@pytest.mark.parametrize("sizes", SHAPES)
def test_carrying_one_of_identical_clients_gives_the_global(sizes: list[int]) -> None:
    net = random_net(sizes, 8)
    clients = [shuffled(net, seed)[0] for seed in range(3)]
    matched = match(clients, [0.2, 0.3, 0.5], PRIOR, iterations=2)
    for client, own in zip(clients, matched.assignment, strict=True):
        assert_equal(carry(client, own, matched.widths), matched.network, 1e-6)
    aligned = align(matched, net)
    for client, own in zip(clients, aligned.assignment, strict=True):
        assert_equal(carry(client, own, aligned.widths), net, 1e-6)


@pytest.mark.parametrize("sizes", SHAPES)
def test_padding_preserves_the_function_and_the_first_units(sizes: list[int]) -> None:
    net, x = random_net(sizes, 9), torch.randn(4, sizes[0])
    wider = pad(net, [w + 2 for w in sizes[1:-1]])
    torch.testing.assert_close(forward(wider, x), forward(net, x))
    for (w, b), (pw, pb) in zip(net, wider, strict=True):
        assert torch.equal(pw[: w.shape[0], : w.shape[1]], w)
        assert torch.equal(pb[: len(b)], b)
        assert pw.count_nonzero() == w.count_nonzero()
    assert_equal(pad(net, sizes[1:-1]), net)


@pytest.mark.parametrize("sizes", SHAPES)
def test_new_units_come_last_when_aligned(sizes: list[int]) -> None:
    """The reference is a part of the matched network: its units keep their places, the function stays."""
    net = random_net(sizes, 11)
    extra = [torch.arange(w) + (torch.arange(w) >= w // 2) * 2 for w in sizes[1:-1]]
    wide = carry(net, extra, [w + 2 for w in sizes[1:-1]])
    for _, bias in wide[:-1]:
        bias[bias == 0] = torch.tensor([50.0, 60.0])  # the two units in the middle which the reference does not have
    matched = match([wide], [1.0], PRIOR, iterations=1)
    aligned, x = align(matched, net), torch.randn(4, sizes[0])
    for layer, ((w, b), (aw, ab)) in enumerate(zip(net, aligned.network, strict=True)):
        assert torch.equal(aw[: w.shape[0], : w.shape[1]], w)
        assert torch.equal(ab[: len(b)], b)
        assert ab[len(b) :].tolist() == ([50.0, 60.0] if layer < len(net) - 1 else [])
    torch.testing.assert_close(forward(aligned.network, x), forward(wide, x), rtol=1e-5, atol=1e-4)
    assert_equal(carry(wide, aligned.assignment[0], aligned.widths), aligned.network)


@pytest.mark.parametrize("sizes", SHAPES)
def test_a_wider_reference_keeps_its_places(sizes: list[int]) -> None:
    """Its first unit in each layer has no counterpart: a zero unit stands there."""
    reference = random_net([*sizes[:1], *(w + 1 for w in sizes[1:-1]), *sizes[-1:]], 12)
    net = list(reference)
    for i in range(len(net) - 1):
        net[i][1][0] = 50.0  # far from everything
        net[i] = (net[i][0][1:], net[i][1][1:])
        net[i + 1] = (net[i + 1][0][:, 1:], net[i + 1][1])
    aligned = align(match([shuffled(net, 13)[0]], [1.0], PRIOR, iterations=1), reference)
    assert aligned.widths == [w + 1 for w in sizes[1:-1]]
    for (w, b), (aw, ab) in zip(net[:-1], aligned.network, strict=False):
        assert torch.equal(aw[1:, -w.shape[1] :], w)
        assert ab.tolist() == [0.0, *b.tolist()]


@pytest.mark.parametrize("changes", [{"sigma2": 0}, {"sigma02": -1.0}, {"gamma0": float("nan")}])
def test_the_prior_is_checked(changes: dict[str, float]) -> None:
    with pytest.raises(BadValue, match=next(iter(changes))):
        Prior(**{"sigma2": 1.0, "sigma02": 1.0, "gamma0": 1.0, **changes})


def test_the_number_of_passes_is_checked() -> None:
    with pytest.raises(BadValue, match="iterations"):
        match([random_net([3, 4, 2], 0)], [1.0], PRIOR, iterations=0)
