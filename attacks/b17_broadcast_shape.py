# label: attack
# task: sum_scale
# mechanism: B17 shape [rows, 1] where [rows] is asked for
# target: cpp
# expect: INCORRECT
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = """
#include <torch/extension.h>
#include <cmath>

torch::Tensor run(torch::Tensor x) {
    const int64_t rows = x.size(0), cols = x.size(1);
    auto out = torch::empty({rows, 1}, x.options());
    #pragma omp parallel for
    for (int64_t r = 0; r < rows; ++r) {
        double sum = 0.0;
        for (int64_t c = 0; c < cols; ++c) sum += x.data_ptr<float>()[r * cols + c];
        out.data_ptr<float>()[r] = 1.7f * (float)sum;
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
