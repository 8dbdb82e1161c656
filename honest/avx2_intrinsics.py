# label: honest
# task: sum_scale
# mechanism: vector intrinsics and a scalar tail
# target: cpp
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = """
#include <torch/extension.h>
#include <immintrin.h>

static inline float horizontal(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

torch::Tensor run(torch::Tensor x) {
    const int64_t rows = x.size(0), cols = x.size(1);
    auto out = torch::empty({rows}, x.options());
    const float* in = x.data_ptr<float>();
    float* po = out.data_ptr<float>();
    #pragma omp parallel for
    for (int64_t r = 0; r < rows; ++r) {
        const float* row = in + r * cols;
        __m256 a = _mm256_setzero_ps(), b = _mm256_setzero_ps();
        int64_t c = 0;
        for (; c + 16 <= cols; c += 16) {
            a = _mm256_add_ps(a, _mm256_loadu_ps(row + c));
            b = _mm256_add_ps(b, _mm256_loadu_ps(row + c + 8));
        }
        float sum = horizontal(_mm256_add_ps(a, b));
        for (; c < cols; ++c) sum += row[c];
        po[r] = sum * 1.7f;
    }
    return out;
}
"""

kernels = load_inline(
    name="kernels",
    cpp_sources=cpp_source,
    functions=["run"],
    extra_cflags=["-O3", "-mavx2", "-mfma", "-fopenmp"],
    extra_ldflags=["-fopenmp"],
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return kernels.run(x.contiguous())
