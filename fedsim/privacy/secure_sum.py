"""Secure summation: the server learns the sum of the clients' vectors and none of the vectors.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), Figure 4 without the
steps it marks for active adversaries. A cohort U of n clients, a threshold t, vectors in the ring Z_{2^64}:

    0 AdvertiseKeys   u draws two X25519 key pairs, one to encrypt shares, one for masks, and sends both public keys.
    1 ShareKeys       u draws a seed b_u, makes t-of-n Shamir shares of b_u and of its secret mask key, and sends v,
                      through the server, v's two shares under a key that only u and v can compute.
    2 MaskedInput     u sends  y_u = x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv)  where s_uv is
                      agreed from the mask keys of u and v: in a sum over all of U these cancel.
    3 Unmasking       The server names the survivors, whose y_u arrived. They answer with their shares of the survivors'
                      b_u and of the other clients' mask keys, never both for one client. t answers give the server
                      the seeds and keys, and with them what is left of the masks in the sum.

A client's y_u is thus hidden by its own seed should it arrive after the server has been given its mask key, and by the
masks shared with other survivors once its seed is known. A sum has at least t inputs.

Numbers are fixed point: x becomes round(2^bits x) mod 2^64. In a sum of m inputs each coordinate is off by at most
m 2^-(bits+1), the clients' roundings; beyond 2^(53-bits) float64 has no room for all 63 bits and the result is that
rounded to the nearest float64 (relative error 2^-53). No sum overflows, as every input must stay below 2^(63-bits) / n
in absolute value; another is refused.

This is a simulation in that all parties live in one process. The cryptography is real (`cryptography`: X25519,
HKDF-SHA256, ChaCha20 as the PRG, ChaCha20-Poly1305), a `Client` holds its own secrets and what it is sent, the
`Server` what it is sent. The adversary is honest but curious, the server together with fewer than t clients. Left out
is what the paper adds against active ones: signatures (a server that invents clients), the consistency check (one that
names different survivors to different clients). A sum of one is no secret, nor is one with all inputs but one known.

Keys come from the system's randomness, not from `fedsim.rng`: masks cancel exactly in the ring, so no result depends on
them, and a seed that is written into a config would open them all.
"""

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedsim import check

Ring = NDArray[np.uint64]
"""A vector over Z_{2^64}: NumPy's unsigned integers wrap around."""

PRIME = 2**256 + 297
"""The first prime above 2^256: any 32 bytes are an element of the field."""
SECRET, SHARE = 32, 33  # bytes

CHUNK = 2**15
"""The keystream is made and added in pieces of this many numbers, which stay in the cache."""
_ZEROS = memoryview(bytes(8 * CHUNK))


class NotSummable(check.InputError):
    """A client's vector holds a number that has no fixed-point form here."""


class TooFewSurvivors(check.InputError):
    """Fewer clients are left than the threshold: the masks stay on, and there is no sum."""


class ProtocolError(Exception):
    """A step out of turn, such as a second vector under the same masks. No honest use meets it."""


# Shamir's secret sharing: a polynomial of degree t - 1 with the secret at 0; a share is its value at another point.


def split(secret: int, threshold: int, points: Iterable[int], prime: int = PRIME) -> dict[int, int]:
    """A share for each point; any `threshold` of them give the secret, fewer say nothing about it."""
    coefficients = [*(secrets.randbelow(prime) for _ in range(threshold - 1)), secret]
    shares = {}
    for point in points:
        value = 0
        for c in coefficients:
            value = (value * point + c) % prime
        shares[point] = value
    return shares


def interpolation(points: Sequence[int], prime: int = PRIME) -> dict[int, int]:
    """Lagrange's weights: f(0) = sum_i weight_i f(point_i) for a polynomial f of degree below their number."""
    weights = {}
    for i in points:
        above = below = 1
        for j in points:
            if j != i:
                above, below = above * j % prime, below * (j - i) % prime
        weights[i] = above * pow(below, -1, prime) % prime
    return weights


def combine(shares: Mapping[int, int], weights: Mapping[int, int], prime: int = PRIME) -> int:
    """The secret, from the shares at the points of `weights`."""
    return sum(weight * shares[point] for point, weight in weights.items()) % prime


@dataclass(frozen=True)
class FixedPoint:
    """Real numbers as elements of Z_{2^64}, such that a sum of `terms` of them does not overflow."""

    bits: int
    terms: int

    def encode(self, x: NDArray[np.floating]) -> Ring:
        limit = 2.0**63 / self.terms
        with np.errstate(over="ignore"):  # an overflow is infinite, and refused
            scaled = np.rint(np.ldexp(x.astype(np.float64), self.bits))
        ok = np.abs(scaled) < limit  # False for NaN
        if not ok.all():
            i = int(np.argmin(ok))
            raise NotSummable(
                f"{x[i]} at position {i} cannot be summed securely: values must be finite and below "
                f"{limit / 2**self.bits:g} in absolute value (2^(63-bits) / clients with bits={self.bits} and "
                f"{self.terms} clients)"
            )
        return scaled.astype(np.int64).view(np.uint64)

    def decode(self, total: Ring) -> NDArray[np.float64]:
        return np.ldexp(total.view(np.int64).astype(np.float64), -self.bits)


def add_stream(total: Ring, seed: bytes, sign: int) -> None:
    """total += sign * PRG(seed), in place. A seed is used for one stream only, so the nonce can be zero."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    add = np.add if sign > 0 else np.subtract
    for start in range(0, len(total), CHUNK):
        part = total[start : start + CHUNK]
        add(part, np.frombuffer(stream.update(_ZEROS[: 8 * len(part)]), dtype="<u8"), out=part)


def agree(mine: X25519PrivateKey, theirs: bytes, purpose: bytes) -> bytes:
    """The key that the owners of two key pairs share, and nobody else can compute."""
    shared = mine.exchange(X25519PublicKey.from_public_bytes(theirs))
    return HKDF(SHA256(), SECRET, salt=None, info=b"fedsim secure sum " + purpose).derive(shared)


def mask_key(mine: X25519PrivateKey, theirs: bytes) -> bytes:
    """s_uv."""
    return agree(mine, theirs, b"mask")


def sign(u: int, v: int) -> int:
    """With which sign u adds the mask it shares with v; v adds it with the other."""
    return 1 if u < v else -1


def point(client: int) -> int:
    """Where a client's shares are taken; never 0, where the secret is."""
    return client + 1


@dataclass(frozen=True)
class PublicKeys:
    """Round 0's message."""

    letters: bytes
    masks: bytes


@dataclass(frozen=True)
class Answer:
    """Round 3's message: one client's shares of others' secrets."""

    seeds: dict[int, int]
    """Of b_v for the survivors v."""
    keys: dict[int, int]
    """Of the secret mask key for the others."""


class Client:
    """One client: its own secrets, the public keys, and the letters of the others, which only it can open."""

    def __init__(self, id: int, threshold: int, numbers: FixedPoint) -> None:
        self.id, self._threshold, self._numbers = id, threshold, numbers
        self._letter_key, self._mask_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(SECRET)
        self._masked = self._answered = False

    def advertise(self) -> PublicKeys:
        """Round 0."""
        public = (key.public_key().public_bytes_raw() for key in (self._letter_key, self._mask_key))
        return PublicKeys(*public)

    def share(self, keys: Mapping[int, PublicKeys]) -> dict[int, bytes]:
        """Round 1: a letter for each other client."""
        self._keys = keys
        self._agreed = {v: agree(self._letter_key, k.letters, b"letter") for v, k in keys.items() if v != self.id}
        points = [point(v) for v in keys]
        key_shares = split(int.from_bytes(self._mask_key.private_bytes_raw()), self._threshold, points)
        seed_shares = split(int.from_bytes(self._seed), self._threshold, points)
        text = {v: key_shares[point(v)].to_bytes(SHARE) + seed_shares[point(v)].to_bytes(SHARE) for v in keys}
        self._own = text[self.id]
        return {v: ChaCha20Poly1305(k).encrypt(*_envelope(self.id, v, text[v])) for v, k in self._agreed.items()}

    def deliver(self, letters: Mapping[int, bytes]) -> None:
        """The end of round 1: what the others wrote. Opened in round 3, if the server asks."""
        self._letters = letters

    def mask(self, vector: NDArray[np.floating]) -> Ring:
        """Round 2. Once: the difference of two vectors under the same masks is the difference of the inputs."""
        if self._masked:
            raise ProtocolError(f"client {self.id} has masked a vector already")
        try:
            y = self._numbers.encode(vector)
        except NotSummable as error:
            raise NotSummable(f"client {self.id}: {error}") from None
        self._masked = True
        add_stream(y, self._seed, 1)
        for v, keys in self._keys.items():
            if v != self.id:
                add_stream(y, mask_key(self._mask_key, keys.masks), sign(self.id, v))
        return y

    def unmask(self, survivors: Collection[int]) -> Answer:
        """Round 3. Once: answers for two lists of survivors could open both secrets of a client."""
        if self._answered:
            raise ProtocolError(f"client {self.id} has answered already")
        alive = self._keys.keys() & survivors
        _enough(len(alive), self._threshold)
        self._answered = True
        answer = Answer({}, {})
        for v in self._keys:
            if v == self.id:
                text = self._own
            else:
                text = ChaCha20Poly1305(self._agreed[v]).decrypt(*_envelope(v, self.id, self._letters[v]))
            if v in alive:
                answer.seeds[v] = int.from_bytes(text[SHARE:])
            else:
                answer.keys[v] = int.from_bytes(text[:SHARE])
        return answer


class Server:
    """The server: public keys, letters that it hands on and cannot open, one running sum, and who is in it."""

    def __init__(self, keys: Mapping[int, PublicKeys], threshold: int, size: int) -> None:
        self.keys, self._threshold = keys, threshold
        self._letters: dict[int, dict[int, bytes]] = {v: {} for v in keys}
        self._total: Ring = np.zeros(size, dtype=np.uint64)
        self._survivors: dict[int, None] = {}
        self._open = True

    def post(self, sender: int, letters: Mapping[int, bytes]) -> None:
        """Round 1, one client's letters."""
        for recipient, letter in letters.items():
            self._letters[recipient][sender] = letter

    def letters(self, recipient: int) -> dict[int, bytes]:
        """Those to hand on."""
        return self._letters.pop(recipient)

    def receive(self, client: int, masked: Ring) -> None:
        """Round 2: added up and forgotten."""
        if client not in self.keys or client in self._survivors or not self._open:
            raise ProtocolError(f"no vector is expected from client {client}")
        if masked.shape != self._total.shape or masked.dtype != np.uint64:
            raise ProtocolError(f"client {client} sent {masked.shape} {masked.dtype}, not {self._total.shape} uint64")
        self._total += masked
        self._survivors[client] = None

    def survivors(self) -> list[int]:
        """The end of round 2: nobody else's vector is taken any more."""
        self._open = False
        _enough(len(self._survivors), self._threshold)
        return list(self._survivors)

    def unmask(self, answers: Mapping[int, Answer]) -> Ring:
        """Round 3: sum_u x_u over the survivors, from the first t answers."""
        _enough(len(answers), self._threshold)
        helpers = list(answers)[: self._threshold]
        weights = interpolation([point(h) for h in helpers])

        def secret(shares: dict[int, int]) -> bytes:
            return combine({point(h): s for h, s in shares.items()}, weights).to_bytes(SECRET)

        total = self._total.copy()
        for u in self._survivors:
            add_stream(total, secret({h: answers[h].seeds[u] for h in helpers}), -1)
        for v in self.keys:
            if v not in self._survivors:
                key = X25519PrivateKey.from_private_bytes(secret({h: answers[h].keys[v] for h in helpers}))
                for u in self._survivors:
                    add_stream(total, mask_key(key, self.keys[u].masks), -sign(u, v))
        return total


class SecureSum:
    """The protocol for one sum, which carries the messages. Fresh keys, so one for each sum.

    Vectors pass one by one: memory is that of a few vectors, and n^2 small keys and letters.
    """

    def __init__(self, clients: Sequence[int], threshold: int, bits: int, size: int) -> None:
        """Rounds 0 and 1, which all `clients` complete."""
        if not clients or len(set(clients)) < len(clients) or min(clients) < 0:
            raise check.BadValue("clients", list(clients), "must be distinct whole numbers >= 0, at least one")
        check.integer("threshold", threshold, ge=1, le=len(clients))
        check.integer("bits", bits, ge=0, le=62)
        check.integer("size", size, ge=1)
        self._numbers = FixedPoint(bits, len(clients))
        self._size = size
        self.clients = {u: Client(u, threshold, self._numbers) for u in clients}
        self.server = Server({u: client.advertise() for u, client in self.clients.items()}, threshold, size)
        for u, client in self.clients.items():
            self.server.post(u, client.share(self.server.keys))
        for u, client in self.clients.items():
            client.deliver(self.server.letters(u))

    def mask(self, client: int, vector: NDArray[np.floating]) -> Ring:
        """What the client sends in round 2, uniformly random to whoever lacks the keys."""
        if vector.shape != (self._size,):
            raise ProtocolError(f"client {client} sums {vector.shape}, not {(self._size,)}")
        return self.clients[client].mask(vector)

    def receive(self, client: int, masked: Ring) -> None:
        """What the server does with it. A client for which this is never called has dropped out."""
        self.server.receive(client, masked)

    def total(self, silent: Collection[int] = ()) -> NDArray[np.float64]:
        """Round 3, once: the sum over the clients received. Those in `silent` are gone before they answer, which
        leaves their inputs in the sum."""
        survivors = self.server.survivors()
        answers = {u: self.clients[u].unmask(survivors) for u in survivors if u not in silent}
        return self._numbers.decode(self.server.unmask(answers))


def _envelope(sender: int, recipient: int, text: bytes) -> tuple[bytes, bytes, bytes]:
    """Nonce, content, associated data. One key serves two letters, one each way: the sender tells them apart."""
    return sender.to_bytes(12), text, recipient.to_bytes(12)


def _enough(left: int, threshold: int) -> None:
    if left < threshold:
        raise TooFewSurvivors(f"{left} clients are left of the {threshold} that it takes to take off the masks")
