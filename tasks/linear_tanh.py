# Linear layer, then tanh.
import torch
import torch.nn as nn
import torch.nn.functional as F

M = 4096
K = 2048
N = 4096
# sizes[cpp]: M = 1024, K = 128, N = 1024


class Model(nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k) / k**0.5)
        self.bias = nn.Parameter(0.5 * torch.randn(n))

    def forward(self, x):
        x = F.linear(x, self.weight, self.bias)
        x = torch.tanh(x)
        return x


def get_inputs():
    return [torch.randn(M, K)]


def get_init_inputs():
    return [K, N]
