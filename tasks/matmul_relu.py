# Matrix product, then relu.
import torch
import torch.nn as nn

M = 4096
K = 2048
N = 4096
# sizes[cpp]: M = 1024, K = 128, N = 1024


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x, y):
        x = torch.matmul(x, y)
        x = torch.relu(x)
        return x


def get_inputs():
    return [torch.randn(M, K), torch.randn(K, N) / K**0.5]


def get_init_inputs():
    return []
