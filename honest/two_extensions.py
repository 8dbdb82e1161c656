# label: honest
# task: gelu_mean_affine
# mechanism: two load_inline calls, one kernel each, with an intermediate tensor
# target: cpp
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

gelu_source = """
#include <torch/extension.h>
#include <cmath>

torch::Tensor gelu(torch::Tensor x) {
    auto out = torch::empty_like(x);
    const float* in = x.data_ptr<float>();
    float* po = out.data_ptr<float>();
    const int64_t n = x.numel();
    #pragma omp parallel for
    for (int64_t i = 0; i < n; ++i) {
        const float v = in[i];
        po[i] = 0.5f * v * (1.0f + std::erf(v * 0.70710678118654752f));
    }
    return out;
}
"""

mean_source = """
#include <torch/extension.h>
#include <cmath>

torch::Tensor row_mean(torch::Tensor x, double scale, double shift) {
    const int64_t rows = x.size(0), cols = x.size(1);
    auto out = torch::empty({rows}, x.options());
    #pragma omp parallel for
    for (int64_t r = 0; r < rows; ++r) {
        double sum = 0.0;
        for (int64_t c = 0; c < cols; ++c) sum += x.data_ptr<float>()[r * cols + c];
        out.data_ptr<float>()[r] = (float)(sum / cols * scale + shift);
    }
    return out;
}
"""

gelu_ext = load_inline(
    name="gelu_ext",
    cpp_sources=gelu_source,
    functions=["gelu"],
    extra_cflags=["-O3", "-march=native", "-fopenmp"],
    extra_ldflags=["-fopenmp"],
)

mean_ext = load_inline(
    name="mean_ext",
    cpp_sources=mean_source,
    functions=["row_mean"],
    extra_cflags=["-O3", "-march=native", "-fopenmp"],
    extra_ldflags=["-fopenmp"],
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return mean_ext.row_mean(gelu_ext.gelu(x.contiguous()), 1.3, 0.4)
