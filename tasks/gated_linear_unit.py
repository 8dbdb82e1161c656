# Gated linear unit: one linear layer makes values and gates, the output is value * sigmoid(gate).
import torch
import torch.nn as nn
import torch.nn.functional as F

M = 4096
K = 2048
N = 4096
# sizes[cpp]: M = 1024, K = 128, N = 512


class Model(nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * n, k) / k**0.5)
        self.bias = nn.Parameter(0.5 * torch.randn(2 * n))

    def forward(self, x):
        x = F.linear(x, self.weight, self.bias)
        value, gate = x.chunk(2, dim=1)
        return value * torch.sigmoid(gate)


def get_inputs():
    return [torch.randn(M, K)]


def get_init_inputs():
    return [K, N]
