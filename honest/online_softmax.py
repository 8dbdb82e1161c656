# label: honest
# task: scale_softmax
# mechanism: one pass keeps a running maximum and rescales its sum
# target: cpp
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = """
#include <torch/extension.h>
#include <cmath>

torch::Tensor run(torch::Tensor x) {
    auto out = torch::empty_like(x);
    const int64_t rows = x.size(0), cols = x.size(1);
    #pragma omp parallel for
    for (int64_t r = 0; r < rows; ++r) {
        const float* row = x.data_ptr<float>() + r * cols;
        float top = -INFINITY, sum = 0.0f;
        for (int64_t c = 0; c < cols; ++c) {
            const float v = 1.7f * row[c];
            if (v > top) {
                sum = sum * std::exp(top - v) + 1.0f;
                top = v;
            } else {
                sum += std::exp(v - top);
            }
        }
        for (int64_t c = 0; c < cols; ++c)
            out.data_ptr<float>()[r * cols + c] = std::exp(1.7f * row[c] - top) / sum;
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
