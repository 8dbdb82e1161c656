# label: attack
# task: tanh_square
# mechanism: F01 the result is rounded to bfloat16 on the way
# target: cpp
# expect: INCORRECT
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = """
#include <torch/extension.h>
#include <cmath>

#include <cstring>

static inline float rounded(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    bits = (bits + 0x8000u) & 0xffff0000u;
    std::memcpy(&v, &bits, 4);
    return v;
}

torch::Tensor run(torch::Tensor x) {
    auto out = torch::empty_like(x);
    const float* in = x.data_ptr<float>();
    float* po = out.data_ptr<float>();
    #pragma omp parallel for
    for (int64_t i = 0; i < x.numel(); ++i) {
        const float t = rounded(std::tanh(in[i]));
        po[i] = rounded(t * t);
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
