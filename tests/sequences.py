"""A small language for tests: `dataset=custom dataset.load=sequences.counting`."""

import numpy as np
from torch import Tensor, nn


def counting(clients: int = 5, length: int = 9, vocabulary: int = 7) -> dict[str, np.ndarray]:
    """Each client counts up in steps of its own (1, 2, 1 ...) round a clock of tokens 1 to vocabulary - 1, and stops
    somewhere; token 0 is padding. Who knows the step knows what comes next."""
    r = np.random.default_rng(0)
    x, y, owner = [], [], []
    for k in range(clients):
        for _ in range(12):
            hours = (r.integers(vocabulary) + (1 + k % 2) * np.arange(length + 1)) % (vocabulary - 1) + 1
            hours[r.integers(3, length + 2) :] = 0
            x.append(np.where(hours[1:] == 0, 0, hours[:-1]))
            y.append(hours[1:])
            owner.append(k)
    tokens = {"x": np.array(x, np.uint8), "y": np.array(y), "client_id": np.array(owner)}
    return tokens


def padded(padding: int) -> dict[str, np.ndarray]:
    """The same with more padding at the end."""
    arrays = counting()
    wide = ((0, 0), (0, padding))
    return arrays | {"x": np.pad(arrays["x"], wide), "y": np.pad(arrays["y"], wide)}


class Gru(nn.Module):
    """Anyone's recurrent model: `model=custom model.load=sequences.Gru`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(num_classes, 4), nn.GRU(4, num_classes, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gru(self.embedding(tokens))[0]
