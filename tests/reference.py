"""The papers' formulas once more, in NumPy and from the papers: what the code under test is compared with.

A linear model  F(x) = W x + b  with softmax cross-entropy is enough: its gradients can be written down.
"""

import numpy as np

Params = dict[str, np.ndarray]


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def loss_gradient(p: Params, x: np.ndarray, y: np.ndarray) -> Params:
    """Of the mean cross-entropy over a batch."""
    error = softmax(x @ p["W"].T + p["b"])
    error[np.arange(len(y)), y] -= 1
    return {"W": error.T @ x / len(y), "b": error.mean(0)}


def output_norm_gradient(p: Params, x: np.ndarray) -> Params:
    """Of mean_i ||W x_i + b||^2: 2/n sum_i F_i x_i^T and 2/n sum_i F_i."""
    outputs = x @ p["W"].T + p["b"]
    return {"W": 2 * outputs.T @ x / len(x), "b": 2 * outputs.mean(0)}


def sensitivity(p: Params, batches: list[np.ndarray], mu: float) -> Params:
    """Elastic paper, Algorithm 1: Omega <- mu Omega + (1 - mu) |g|, from zero."""
    omega = {k: np.zeros_like(v) for k, v in p.items()}
    for x in batches:
        g = output_norm_gradient(p, x)
        omega = {k: mu * o + (1 - mu) * np.abs(g[k]) for k, o in omega.items()}
    return omega


def average_sensitivity(p: Params, batches: list[np.ndarray]) -> Params:
    """Supplement Eq. 1, over batches."""
    gradients = [output_norm_gradient(p, x) for x in batches]
    return {k: np.mean([np.abs(g[k]) for g in gradients], axis=0) for k in p}


def sgd(p: Params, batches: list[tuple[np.ndarray, np.ndarray]], lr: float, prox: float = 0.0) -> Params:
    """Local training (FedProx: plus prox (w - w_t))."""
    start, w = p, dict(p)
    for x, y in batches:
        g = loss_gradient(w, x, y)
        w = {k: w[k] - lr * (g[k] + prox * (w[k] - start[k])) for k in w}
    return w


def norm(p: Params) -> float:
    return float(np.sqrt(sum((v**2).sum() for v in p.values())))
