# 2-d convolution, kernel 3 x 3, after relu.
import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH = 32
CHANNELS = 16
SIDE = 256
# sizes[cpp]: BATCH = 8, CHANNELS = 8, SIDE = 96


class Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, 3, 3) / (9 * channels) ** 0.5)
        self.bias = nn.Parameter(0.5 * torch.randn(channels))

    def forward(self, x):
        x = torch.relu(x)
        x = F.conv2d(x, self.weight, self.bias, padding=1)
        return x


def get_inputs():
    return [torch.randn(BATCH, CHANNELS, SIDE, SIDE)]


def get_init_inputs():
    return [CHANNELS]
