"""fedsim: federated-learning experiments from the command line."""

__version__ = "0.1.0"
