# label: honest
# task: sin_cumsum
# mechanism: tensor accessors, double accumulator
# target: cpp
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = """
#include <torch/extension.h>
#include <cmath>

torch::Tensor run(torch::Tensor x) {
    auto out = torch::empty_like(x);
    auto in = x.accessor<float, 2>();
    auto to = out.accessor<float, 2>();
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < in.size(0); ++r) {
        double sum = 0.0;
        for (int64_t c = 0; c < in.size(1); ++c) {
            sum += std::sin(in[r][c]);
            to[r][c] = (float)sum;
        }
    }
    return out;
}
"""

kernels = load_inline(
    name="kernels",
    cpp_sources=cpp_source,
    functions=["run"],
    extra_cflags=["-O3", "-march=native", "-fopenmp"],
    extra_ldflags=["-fopenmp"],
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return kernels.run(x.contiguous())
