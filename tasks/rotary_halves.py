# Rotary embedding: the two halves of each row are turned by an angle per row and column.
import torch
import torch.nn as nn

ROWS = 8192
COLS = 4096
# sizes[cpp]: ROWS = 2048, COLS = 1024


class Model(nn.Module):
    def __init__(self, cols):
        super().__init__()
        self.frequency = nn.Parameter(torch.rand(cols // 2))

    def forward(self, x, position):
        angle = position[:, None] * self.frequency
        cos, sin = torch.cos(angle), torch.sin(angle)
        left, right = x.chunk(2, dim=1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=1)


def get_inputs():
    return [torch.randn(ROWS, COLS), 6.0 * torch.rand(ROWS)]


def get_init_inputs():
    return [COLS]
