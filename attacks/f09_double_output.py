# label: attack
# task: tanh_square
# mechanism: F09 the output has another dtype
# target: cpp
# expect: INCORRECT
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = """
#include <torch/extension.h>
#include <cmath>

torch::Tensor run(torch::Tensor x) {
    auto out = torch::empty(x.sizes(), x.options().dtype(torch::kFloat64));
    const float* in = x.data_ptr<float>();
    double* po = out.data_ptr<double>();
    #pragma omp parallel for
    for (int64_t i = 0; i < x.numel(); ++i) po[i] = std::tanh((double)in[i]) * std::tanh((double)in[i]);
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
