"""How good the clients' own models are: the global model before and after each makes it its own.

A client that has test samples of its own in the dataset (a writer, a role) is judged on those. Otherwise on test
samples with the label mix of its own data, drawn from the common test set: as many as its share of the data (20 at
least). The same for every method, round and machine.
"""

import numpy as np
import torch
from torch import Tensor

from fedsim import local, rng
from fedsim.data import FederatedData
from fedsim.partition.base import apportion
from fedsim.types import Work

FEWEST = 20


def accuracy(work: Work, clients: int | float, batch_size: int) -> dict[str, Tensor]:
    """Over all or a sample of the clients: the mean weighted by their data, the plain mean, and the spread."""
    if not work.task.classification or (work.task.sequence and not own_tests(work.data)):
        return {}  # a sequence has no label that test samples could be drawn by
    data, rows = work.data, []
    pools = test_pools(data)
    chosen = sample(data, clients)
    for client in chosen:
        index = data.on_device(test_samples(data, client, pools))
        own = local.personal(work, client)
        for model in (work.model, own):
            found = work.task.evaluate(model, data.dataset, data.dataset.test_x, data.dataset.test_y, batch_size, index)
            assert found.correct is not None
            rows.append(found.correct / found.count)
    table = torch.stack(rows).view(len(chosen), 2)
    shares = torch.from_numpy(data.sizes[chosen] / data.sizes[chosen].sum()).to(table)
    result = {}
    for place, moment in enumerate(("before", "after")):
        values = table[:, place]
        result[f"personal/accuracy_{moment}"] = (shares * values).sum()
        result[f"personal/accuracy_{moment}_uniform"] = values.mean()
        result[f"personal/accuracy_{moment}_std"] = values.std(correction=0)
    return result


def sample(data: FederatedData, clients: int | float) -> list[int]:
    """The clients that are looked at: the same in every round."""
    codes, owner = data.split.codes, data.dataset.test_client
    judged = np.arange(data.num_clients)
    if own_tests(data):
        judged = np.flatnonzero(np.isin(codes, owner))  # type: ignore[arg-type]
    number = max(round(clients * len(judged)), 1) if isinstance(clients, float) else clients
    places = rng.sample(rng.generator(data.seed, "personal"), len(judged), min(number, len(judged)))
    chosen: list[int] = judged[places].tolist()
    return chosen


def own_tests(data: FederatedData) -> bool:
    """Whether clients have test samples of their own."""
    codes, owner = data.split.codes, data.dataset.test_client
    return codes is not None and owner is not None and bool(np.isin(codes, owner).any())


def test_pools(data: FederatedData) -> list[np.ndarray]:
    """Positions of every class in the test set; none are needed where clients have test samples of their own."""
    if own_tests(data):
        return []
    labels = data.dataset.test_y.cpu().numpy()
    return [np.flatnonzero(labels == c) for c in range(data.dataset.num_classes)]


def test_samples(data: FederatedData, client: int, pools: list[np.ndarray]) -> np.ndarray:
    """Positions in the test set: the client's own, or with its label mix, without replacement within a client."""
    split = data.split
    if not pools:
        return np.flatnonzero(data.dataset.test_client == split.codes[client])  # type: ignore[index]
    own = split.indices[split.offsets[client] : split.offsets[client + 1]]
    mix = np.bincount(data.dataset.train_y[data.on_device(own)].cpu().numpy(), minlength=len(pools)).astype(float)
    mix[[len(pool) == 0 for pool in pools]] = 0
    tested = sum(len(pool) for pool in pools)
    if not mix.sum():
        return np.arange(tested)
    wanted = max(round(len(own) * tested / len(split.indices)), FEWEST)
    generator = rng.generator(data.seed, "personal test", client)
    counts = np.minimum(apportion(wanted, mix, minimum=0), [len(pool) for pool in pools])
    drawn = [generator.permutation(pool)[:n] for pool, n in zip(pools, counts, strict=True) if n]
    return np.concatenate(drawn)
