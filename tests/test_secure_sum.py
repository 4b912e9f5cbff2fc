"""Secure summation: the sum is right, and what the server sees says nothing else."""

import itertools
import pickle
from collections.abc import Collection
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chi2

from fedsim.check import BadValue
from fedsim.privacy import secure_sum
from fedsim.privacy.secure_sum import (
    FixedPoint,
    NotSummable,
    ProtocolError,
    SecureSum,
    TooFewSurvivors,
    add_stream,
    combine,
    interpolation,
    mask_key,
    sign,
    split,
)

SIZE = 20_000  # numbers in a vector whose statistics are looked at


def session(inputs: np.ndarray, dropped: Collection[int] = (), threshold: int = 1, bits: int = 24) -> SecureSum:
    """Rounds 0 to 2: all share keys, all but the dropped send."""
    run = SecureSum(range(len(inputs)), threshold, bits, inputs.shape[1])
    for client, x in enumerate(inputs):
        if client not in dropped:
            run.receive(client, run.mask(client, x))
    return run


def normal(clients: int, size: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(clients, size))


def looks_uniform(y: np.ndarray) -> bool:
    """Chi-square over the 256 values of a byte, on both sides; a truly uniform one fails once in 10^9."""
    counts = np.bincount(y.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return bool(chi2.ppf(5e-10, 255) < statistic < chi2.isf(5e-10, 255))


def correlation(y: np.ndarray, x: np.ndarray) -> float:
    """In standard deviations of what independent vectors have."""
    return float(abs(np.corrcoef(y.view(np.int64).astype(float), x)[0, 1]) * np.sqrt(len(x)))


@st.composite
def rounds(draw: st.DrawFn) -> tuple[np.ndarray, list[int], int, int]:
    """Inputs up to the largest allowed, who drops out, a threshold that the others reach, bits."""
    clients, size, bits = draw(st.integers(1, 7)), draw(st.integers(1, 6)), draw(st.integers(0, 50))
    limit = float(np.nextafter(2.0 ** (63 - bits) / clients, 0))
    inputs = draw(arrays(np.float64, (clients, size), elements=st.floats(-limit, limit) | st.floats(-1, 1)))
    dropped = draw(st.lists(st.integers(0, clients - 1), unique=True, max_size=clients - 1))
    return inputs, dropped, draw(st.integers(1, clients - len(dropped))), bits


@settings(max_examples=100, deadline=None)
@given(case=rounds())
def test_the_sum_is_the_survivors_sum(case: tuple[np.ndarray, list[int], int, int]) -> None:
    """Within m 2^-(bits+1) of the exact rational sum, plus the result's own rounding to float64."""
    inputs, dropped, threshold, bits = case
    total = session(inputs, dropped, threshold, bits).total()
    alive = [k for k in range(len(inputs)) if k not in dropped]
    for found, column in zip(total, inputs[alive].T, strict=True):
        true = sum(Fraction(float(x)) for x in column)
        rounding = Fraction(len(alive), 2 ** (bits + 1))
        assert abs(Fraction(float(found)) - true) <= rounding + (abs(true) + rounding) * Fraction(1, 2**53)


def test_by_hand() -> None:
    """Two bits: 0.3 -> 1/4, 0.4 -> 2/4, -1.6 -> -6/4, -0.9 -> -4/4. Negative numbers wrap around and come back."""
    inputs = np.array([[0.3, -1.6], [0.4, -0.9]])
    assert session(inputs, bits=2).total().tolist() == [0.75, -2.5]
    assert FixedPoint(2, 2).encode(inputs[0]).tolist() == [1, 2**64 - 6]


def test_the_sum_wraps_through_zero() -> None:
    """The encodings overflow the ring many times on the way."""
    inputs = np.array([[-3.0, 5.0], [2.0, -5.0], [1.0, -7.0]])
    run = session(inputs, bits=40)
    assert run.total().tolist() == [0.0, -7.0]
    assert sum(int(FixedPoint(40, 3).encode(x)[1]) for x in inputs) > 2**64


def test_precision_is_met_with_equality() -> None:
    """Rounding is to even: 1.5 -> 2 and 2.5 -> 2 units; m = 3 of them 1.5 units off."""
    unit = 2.0**-10
    assert session(np.full((3, 1), 1.5 * unit), bits=10).total()[0] == 6 * unit
    assert session(np.full((3, 1), 2.5 * unit), bits=10).total()[0] == 6 * unit


def test_float32_is_taken_exactly() -> None:
    inputs = normal(3).astype(np.float32)
    assert np.array_equal(session(inputs, bits=40).total(), session(inputs.astype(np.float64), bits=40).total())


def test_longer_than_a_chunk_of_keystream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces continue one stream: the length of a piece changes nothing."""
    monkeypatch.setattr(secure_sum, "CHUNK", 8)
    inputs = np.ldexp(np.rint(np.ldexp(normal(4, 37), 20)), -20)
    assert np.array_equal(session(inputs, [2], bits=20).total(), inputs[[0, 1, 3]].sum(axis=0))
    short, whole = np.zeros(37, np.uint64), np.zeros(37, np.uint64)
    add_stream(short, bytes(32), 1)
    monkeypatch.setattr(secure_sum, "CHUNK", 64)
    add_stream(whole, bytes(32), 1)
    assert np.array_equal(short, whole)


def test_the_keystream_is_chacha20() -> None:
    """RFC 8439, A.1, test vector 1: key, nonce and counter zero."""
    found = np.zeros(2, np.uint64)
    add_stream(found, bytes(32), 1)
    assert found.astype("<u8").tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_arrival_order_and_ids_do_not_matter() -> None:
    inputs = {41: np.array([1.0]), 0: np.array([2.0]), 7: np.array([4.0])}
    run = SecureSum(list(inputs), 2, 20, 1)
    for client in (7, 41):
        run.receive(client, run.mask(client, inputs[client]))
    assert run.total().tolist() == [5.0]


def test_fewer_than_the_threshold() -> None:
    with pytest.raises(TooFewSurvivors, match="2 clients are left of the 3"):
        session(normal(5), dropped=[0, 1, 4], threshold=3).total()
    assert session(normal(5), dropped=[0, 1], threshold=3).total().shape == (5,)


def test_silent_in_the_last_round() -> None:
    """A client that sent its vector and then went away is in the sum, as long as t others answer."""
    inputs = np.ldexp(np.rint(np.ldexp(normal(5), 20)), -20)
    found = session(inputs, dropped=[1], threshold=2, bits=20).total(silent=[0, 4])
    assert np.array_equal(found, inputs[[0, 2, 3, 4]].sum(axis=0))
    with pytest.raises(TooFewSurvivors, match="1 clients are left of the 2"):
        session(inputs, dropped=[1], threshold=2).total(silent=[0, 3, 4])


def test_masked_vectors_look_uniform() -> None:
    """Whatever is in them: normal numbers, zeros, a constant."""
    inputs = np.stack([*normal(2, SIZE), np.zeros(SIZE), np.full(SIZE, -3.0)])
    run = SecureSum(range(4), 3, 24, SIZE)
    masked = [run.mask(client, x) for client, x in enumerate(inputs)]
    assert all(looks_uniform(y) for y in masked)
    assert not any(looks_uniform(FixedPoint(24, 4).encode(x)) for x in inputs), "the check can fail"
    assert all(correlation(y, x) < 6 for y in masked for x in inputs[:2])
    assert correlation(FixedPoint(24, 4).encode(inputs[0]), inputs[0]) > 6


def test_two_runs_have_other_masks_and_the_same_bits() -> None:
    inputs = normal(3, 1000)
    runs = [SecureSum(range(3), 2, 24, 1000) for _ in range(2)]
    masked = [[run.mask(client, x) for client, x in enumerate(inputs)] for run in runs]
    for one, other in zip(*masked, strict=True):
        assert not (one == other).any()
    for run, ys in zip(runs, masked, strict=True):
        for client, y in enumerate(ys):
            run.receive(client, y)
    assert runs[0].total().tobytes() == runs[1].total().tobytes()


def test_pairwise_masks_cancel() -> None:
    """Both ends agree on the key, nobody else has it, and the signs are opposite: only the seeds' streams are left."""
    run = SecureSum(range(4), 2, 24, 50)
    clients, keys = run.clients, run.server.keys
    agreed = {(u, v): mask_key(clients[u]._mask_key, keys[v].masks) for u, v in itertools.permutations(range(4), 2)}
    assert all(agreed[u, v] == agreed[v, u] for u, v in agreed)
    assert len(set(agreed.values())) == 6
    rest = np.zeros(50, np.uint64)
    for (u, v), key in agreed.items():
        add_stream(rest, key, sign(u, v))
    assert not rest.any()
    for client in clients:
        rest += run.mask(client, np.zeros(50))
        add_stream(rest, clients[client]._seed, -1)
    assert not rest.any()


def test_the_server_holds_no_secret() -> None:
    """Before unmasking: among the bytes of all it was sent and has kept there is no key, seed or input, and of vectors
    only the one sum."""
    inputs = normal(4, SIZE)
    run = SecureSum(range(4), 3, 24, SIZE)
    sent = []
    for client, x in enumerate(inputs[:3]):
        sent.append(run.mask(client, x))
        run.receive(client, sent[-1])
    kept = pickle.dumps(vars(run.server))
    assert len(kept) < 8 * SIZE + 5000, "one vector, whatever the cohort"
    encoded = [FixedPoint(24, 4).encode(x).tobytes() for x in inputs]
    for client in run.clients.values():
        for key in (client._mask_key, client._letter_key):
            assert key.private_bytes_raw() not in kept
        assert client._seed not in kept
        for v, letter in client._letters.items():
            other = run.clients[v]
            assert other._seed not in letter
            assert letter not in kept, "handed on"
    for code, y in itertools.product(encoded, sent):
        assert code[:64] not in kept
        assert y.tobytes()[:64] not in kept, "added up and forgotten"
    assert looks_uniform(run.server._total), "and the sum is masked"
    assert run.server._total.tobytes()[:64] in kept, "the search can find"


def test_the_transcript_opens_no_single_vector() -> None:
    """The server with every message of a run in its hands. A survivor's seed opens, its masks with other survivors do
    not; a dropped client's key opens, its seed does not, should its vector arrive late."""
    inputs = normal(4, SIZE)
    run = SecureSum(range(4), 2, 24, SIZE)
    masked = {client: run.mask(client, x) for client, x in enumerate(inputs)}
    for client in (0, 1, 3):
        run.receive(client, masked[client])
    answers = {u: run.clients[u].unmask(run.server.survivors()) for u in (0, 1, 3)}
    for answer in answers.values():
        assert (set(answer.seeds), set(answer.keys)) == ({0, 1, 3}, {2}), "one secret of each client, never both"
    seeds = {u: run.clients[u]._seed for u in (0, 1, 3)}
    weights = interpolation([1, 2])
    for u, seed in seeds.items():
        opened = combine({1: answers[0].seeds[u], 2: answers[1].seeds[u]}, weights)
        assert opened.to_bytes(32) == seed
    late = run.clients[2]._mask_key
    opened = combine({1: answers[0].keys[2], 2: answers[1].keys[2]}, weights)
    assert opened.to_bytes(32) == late.private_bytes_raw()

    def known(u: int) -> np.ndarray:
        """A masked vector less every mask that these secrets give."""
        y = masked[u].copy()
        if u in seeds:
            add_stream(y, seeds[u], -1)
            add_stream(y, mask_key(late, run.server.keys[u].masks), -sign(u, 2))
        else:
            for v in seeds:
                add_stream(y, mask_key(late, run.server.keys[v].masks), -sign(u, v))
        return y

    for u, x in enumerate(inputs):
        assert looks_uniform(known(u))
        assert correlation(known(u), x) < 6
    total = known(0) + known(1) + known(3)
    assert not looks_uniform(total), "the sum, which it is to learn"
    assert np.array_equal(FixedPoint(24, 4).decode(total), FixedPoint(24, 4).decode(run.server.unmask(answers)))


def test_steps_out_of_turn() -> None:
    """Whatever would reveal more than one sum is refused."""
    run = SecureSum(range(3), 2, 24, 2)
    ys = {client: run.mask(client, np.ones(2)) for client in range(3)}
    with pytest.raises(ProtocolError, match="client 0 has masked"):
        run.mask(0, np.zeros(2))
    for client in (0, 1):
        run.receive(client, ys[client])
    with pytest.raises(ProtocolError, match="expected from client 1"):
        run.receive(1, ys[1])
    with pytest.raises(ProtocolError, match="expected from client 9"):
        run.receive(9, ys[1])
    with pytest.raises(ProtocolError, match=r"not \(2,\) uint64"):
        run.receive(2, ys[2].astype(np.float64))
    with pytest.raises(TooFewSurvivors):
        run.clients[1].unmask([1, 8, 9])
    assert run.total().tolist() == [2.0, 2.0]
    with pytest.raises(ProtocolError, match="expected from client 2"):
        run.receive(2, ys[2])
    with pytest.raises(ProtocolError, match="answered already"):
        run.total()
    with pytest.raises(ProtocolError, match="client 1 sums"):
        SecureSum([1], 1, 24, 2).mask(1, np.zeros(3))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**39 / 3, -(2.0**39), 1e300])
def test_values_out_of_range(bad: float) -> None:
    run = SecureSum(range(3), 2, 24, 4)
    with pytest.raises(NotSummable, match=r"client 1: .* at position 2 .* finite and below 1\.83252e\+11"):
        run.mask(1, np.array([0.0, 1.0, bad, bad]))
    largest = np.full(4, np.nextafter(2.0**39 / 3, 0))
    assert run.mask(1, largest).shape == (4,), "below it is fine, also after a refusal"


def test_no_sum_overflows() -> None:
    """The largest allowed values, all of one sign, in float32 too."""
    for clients, kind in itertools.product((1, 2, 3, 7), (np.float64, np.float32)):
        largest = np.nextafter(kind(2.0**39 / clients), kind(0))
        for value in (largest, -largest):
            total = session(np.full((clients, 1), value, dtype=kind)).total()
            assert total[0] == pytest.approx(float(value) * clients, rel=1e-15)


@pytest.mark.parametrize(
    ("clients", "threshold", "bits", "size", "key"),
    [
        ([], 1, 24, 1, "clients"),
        ([1, 1], 1, 24, 1, "clients"),
        ([-1, 1], 1, 24, 1, "clients"),
        ([0, 1], 3, 24, 1, "threshold"),
        ([0, 1], 0, 24, 1, "threshold"),
        ([0, 1], 1, 63, 1, "bits"),
        ([0, 1], 1, -1, 1, "bits"),
        ([0, 1], 1, 24, 0, "size"),
    ],
)
def test_refused(clients: list[int], threshold: int, bits: int, size: int, key: str) -> None:
    with pytest.raises(BadValue, match=key):
        SecureSum(clients, threshold, bits, size)


@settings(max_examples=50, deadline=None)
@given(secret=st.integers(0, 2**256 - 1), number=st.integers(1, 6), data=st.data())
def test_any_t_shares_give_the_secret(secret: int, number: int, data: st.DataObject) -> None:
    points = data.draw(st.lists(st.integers(1, 10**9), min_size=number, max_size=number, unique=True))
    threshold = data.draw(st.integers(1, number))
    shares = split(secret, threshold, points)
    for chosen in itertools.combinations(points, threshold):
        assert combine(shares, interpolation(chosen)) == secret


def test_shamir_by_hand() -> None:
    """f(x) = 3 + 2x + x^2 mod 11: f(1) = 6, f(2) = 0, f(5) = 5. Weights at 0: 10/4 = 8, 5/-3 = 2, 2/12 = 2 (mod 11)."""
    weights = interpolation([1, 2, 5], prime=11)
    assert weights == {1: 8, 2: 2, 5: 2}
    assert combine({1: 6, 2: 0, 5: 5}, weights, prime=11) == 3


def test_fewer_than_t_shares_determine_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 7^2 polynomials of degree 2 for each secret of Z_7: any secret gives every pair of shares once."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for secret, *drawn in itertools.product(range(7), repeat=3):
        values = iter(drawn)
        monkeypatch.setattr(secure_sum.secrets, "randbelow", lambda _, values=values: next(values))
        shares = split(secret, 3, [1, 2, 4], prime=7)
        assert combine(shares, interpolation([1, 2, 4], prime=7), prime=7) == secret
        seen.setdefault(secret, []).append((shares[1], shares[4]))
    everything = sorted(itertools.product(range(7), repeat=2))
    assert all(sorted(pairs) == everything for pairs in seen.values())


def test_the_field_holds_a_key() -> None:
    """A prime above 2^256, by Fermat to a few bases (a composite passes them all only by design)."""
    assert secure_sum.PRIME > 2**256
    assert all(pow(base, secure_sum.PRIME - 1, secure_sum.PRIME) == 1 for base in (2, 3, 5, 7, 11))
    assert combine(split(2**256 - 1, 2, [1, 2]), interpolation([1, 2])) == 2**256 - 1
