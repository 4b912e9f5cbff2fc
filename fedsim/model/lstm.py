"""The character LSTM for Shakespeare."""

import math
import warnings

import torch
from torch import Tensor, nn

from fedsim import check, kernels, native
from fedsim.data import PAD

# Weights that are handed in from outside lie where they lie. cuDNN copies them together at every call, here some
# megabytes, and says so; nobody could act on it.
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")


class Lstm(nn.Module):
    """One layer; gates in the order input, forget, cell, output. As in Keras, and unlike nn.LSTM, with one bias: a
    second one would add nothing to the function, but count twice in every update.

    Initial weights as Keras and Reddi et al.'s code have them: input weights He's normal cut off at two standard
    deviations, recurrent weights orthogonal, bias 0 and for the forget gate 1."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.input_weight = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.recurrent_weight = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(4 * hidden))
        self.hidden = hidden
        std = math.sqrt(2 / inputs) / 0.87962566103423978  # cut off, it has sqrt(2 / inputs)
        nn.init.trunc_normal_(self.input_weight, std=std, a=-2 * std, b=2 * std)
        nn.init.orthogonal_(self.recurrent_weight)
        with torch.no_grad():
            self.bias[hidden : 2 * hidden] = 1

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, inputs] -> [B, T, hidden], from a state of zeros."""
        if around := torch._C._functorch.get_interpreter_stack():  # torch.lstm has no rule for what is around it
            one_gradient = [level.key() for level in around] == [torch._C._functorch.TransformType.Grad]
            if one_gradient and native.serves(x):
                h: Tensor = kernels.Lstm.apply(x, self.input_weight, self.recurrent_weight, self.bias)[0]
                return h
            return self._step_by_step(x)
        weights = [self.input_weight, self.recurrent_weight, self.bias, torch.zeros_like(self.bias)]
        state = x.new_zeros(1, len(x), self.hidden)
        # nn.LSTM's own kernel: a loop of matrix products in Python takes up to 2.6 times as long on a CPU. Always as in
        # training, which without dropout is the same: cuDNN gives no gradients otherwise, and elastic wants them.
        return torch.lstm(
            x,
            (state, state),
            weights,
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=True,
            bidirectional=False,
            batch_first=True,
        )[0]

    def _step_by_step(self, x: Tensor) -> Tensor:
        """The same in plain operations."""
        drive, states = x @ self.input_weight.T + self.bias, []
        h = c = torch.zeros_like(drive[:, 0, : self.hidden])
        for t in range(x.shape[1]):
            i, f, g, o = (drive[:, t] + h @ self.recurrent_weight.T).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states, 1)


class LstmShakespeare(nn.Module):
    """McMahan et al., AISTATS 2017: characters embedded in 8 dimensions, two LSTM layers of 256, a linear layer. With
    the 90 tokens of Reddi et al., ICLR 2021, it has their 820,522 parameters.

    Embedding uniform in [-0.05, 0.05], linear layer Glorot's uniform and bias 0, as in Keras."""

    def __init__(
        self,
        embedding: int,
        hidden: int,
        layers: int,
        input_shape: tuple[int, ...],
        num_classes: int,
    ) -> None:
        for key, value in (("embedding", embedding), ("hidden", hidden), ("layers", layers)):
            check.integer(key, value, ge=1, le=65536)
        if len(input_shape) != 1:
            raise check.InputError(
                "model=lstm_shakespeare needs sequences of tokens; this dataset's samples have shape "
                f"{'x'.join(map(str, input_shape))}"
            )
        super().__init__()
        self.embedding = nn.Embedding(num_classes, embedding)
        self.layers = nn.ModuleList(Lstm(hidden if i else embedding, hidden) for i in range(layers))
        self.linear = nn.Linear(hidden, num_classes)
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> logits of the next token at every position [B, T, V]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        # Elastic's sensitivity is the gradient of the outputs' squared norm: padding must not count in it.
        logits: Tensor = self.linear(x) * (tokens != PAD).unsqueeze(-1)
        return logits
