# 1-d convolution, kernel 3, then tanh.
import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH = 64
CHANNELS = 16
LENGTH = 32768
# sizes[cpp]: BATCH = 8, CHANNELS = 8, LENGTH = 16384


class Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, 3) / (3 * channels) ** 0.5)
        self.bias = nn.Parameter(0.5 * torch.randn(channels))

    def forward(self, x):
        x = F.conv1d(x, self.weight, self.bias, padding=1)
        x = torch.tanh(x)
        return x


def get_inputs():
    return [torch.randn(BATCH, CHANNELS, LENGTH)]


def get_init_inputs():
    return [CHANNELS]
