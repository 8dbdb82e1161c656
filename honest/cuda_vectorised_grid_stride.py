# label: honest
# task: tanh_square
# mechanism: float4 loads, a grid-stride loop, a scalar tail
# target: cuda
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = "torch::Tensor run(torch::Tensor x);"

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__device__ __forceinline__ float squared(float v) {
    const float t = tanhf(v);
    return t * t;
}

__global__ void square_tanh(const float* __restrict__ in, float* __restrict__ out, int64_t n) {
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    const int64_t first = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    const float4* in4 = reinterpret_cast<const float4*>(in);
    float4* out4 = reinterpret_cast<float4*>(out);
    for (int64_t i = first; i < n / 4; i += stride) {
        const float4 v = in4[i];
        out4[i] = make_float4(squared(v.x), squared(v.y), squared(v.z), squared(v.w));
    }
    for (int64_t i = n / 4 * 4 + first; i < n; i += stride) out[i] = squared(in[i]);
}

torch::Tensor run(torch::Tensor x) {
    auto out = torch::empty_like(x);
    const int64_t n = x.numel();
    square_tanh<<<132 * 8, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), n);
    return out;
}
"""

kernels = load_inline(
    name="kernels",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["run"],
    extra_cuda_cflags=["-O3"],
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return kernels.run(x.contiguous())
