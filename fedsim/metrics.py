"""The names under which a run logs, and what they mean. README's table and the columns of metrics.csv are these."""

METRICS = {
    "round": "1 after the first round",
    "test/accuracy": "share of the test set the evaluated model gets right",
    "test/loss": "its mean loss there",
    "train/accuracy": "the same over every client's D_k, where eval.train",
    "train/loss": "the same over every client's D_k, where eval.train",
    "norm/N": "|| sum_k w_k delta_k ||: how far the clients move together",
    "norm/E": "sum_k w_k || delta_k ||: how far they move on average",
    "norm/N_over_E": "N / E, at most 1 (but for privacy's noise); small where the clients' directions cancel",
    "norm/N_server": "|| theta_{t+1} - theta_t ||: how far the server really moves",
    "norm/N_integrated": "sum of N_server over the rounds so far",
    "elastic/boosted_fraction": "share of scalar parameters with zeta > 1",
    "elastic/boosted_by_layer": "the same share of each layer (parameter tensor), plain mean over layers",
    "elastic/mean_zeta": "mean of zeta over all scalar parameters, also those that are not updated",
    "elastic/step": "|| zeta d || / || d ||, d = sum_k w_k delta_k: how much longer the step is than the naive one",
    "norm_norm/rate": "beta E / N: the plain rate that Norm-Norm and FedNNNN amount to in this round",
    "client_lr": "learning rate of the clients in this round",
    "comm/down_bytes": "sent out in the round: one model each time, two with SCAFFOLD",
    "comm/up_bytes": "sent back, used or not: one model each, one more with elastic, two with SCAFFOLD",
    "time/round_s": "wall time of the round and its evaluation (of one beside the next round, what was waited for it)",
    "client/loss": "sum_k w_k (mean loss of client k's batches, each before its step)",
    "sent/accuracy": "test accuracy of the model that is sent out, where another one is evaluated",
    "sent/loss": "its mean loss on the test set",
    "time/virtual_s": "virtual seconds since the start: delay + steps / speed of the slowest (or next) client",
    "clients/arrived": "clients whose update was used",
    "async/staleness": "updates the server made while the round's client trained (participation=async)",
    "async/discarded": "updates thrown away before this one, for being too stale",
    "privacy/epsilon": "epsilon spent so far, for privacy.delta",
    "privacy/clipped_fraction": "share of the clients whose update was clipped",
    "pfnm/units": "hidden units of the global model (aggregator=pfnm)",
    "personal/accuracy_before": "of the global model on test samples of a client's label mix; mean weighted by |D_k|",
    "personal/accuracy_after": "the same of the client's own model",
    "personal/accuracy_before_uniform": "the plain mean over clients",
    "personal/accuracy_after_uniform": "the plain mean over clients",
    "personal/accuracy_before_std": "standard deviation over clients",
    "personal/accuracy_after_std": "standard deviation over clients",
    "norm/N_conv": "N over the convolutional layers alone",
    "norm/E_conv": "E over the convolutional layers alone",
    "norm/N_server_conv": "N_server over the convolutional layers alone",
    "norm/N_linear": "N over the linear layers alone",
    "norm/E_linear": "E over the linear layers alone",
    "norm/N_server_linear": "N_server over the linear layers alone",
}

LAYER_METRICS = {
    "round": "1 after the first round",
    "layer": "name of the parameter tensor",
    "kind": "conv, linear, norm or other",
    "N": "N over this layer alone",
    "E": "E over this layer alone",
    "N_server": "N_server over this layer alone",
    "boosted_fraction": "share of its scalar parameters with zeta > 1 (elastic)",
}

NORMS = ("N", "E", "N_server")
"""Measured by layer and part in every round."""

EVALUATED = ("test/", "train/", "sent/", "personal/")
"""Metrics of evaluation rounds only (eval.every); blank in between."""

FINITE = ("client/loss", "test/loss", "train/loss", "norm/N_server")
"""A run diverges when one of these is no longer a finite number."""
