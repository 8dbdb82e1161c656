# Layer norm over the rows, after silu.
import torch
import torch.nn as nn
import torch.nn.functional as F

ROWS = 8192
COLS = 4096
# sizes[cpp]: ROWS = 2048, COLS = 1024


class Model(nn.Module):
    def __init__(self, cols):
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.3 * torch.randn(cols))
        self.bias = nn.Parameter(0.3 * torch.randn(cols))

    def forward(self, x):
        x = F.silu(x)
        x = F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)
        return x


def get_inputs():
    scale = 0.5 + 1.5 * torch.rand(ROWS, 1)
    offset = 0.5 * torch.randn(ROWS, 1)
    return [torch.randn(ROWS, COLS) * scale + offset]


def get_init_inputs():
    return [COLS]
