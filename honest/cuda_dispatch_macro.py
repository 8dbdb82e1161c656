# label: honest
# task: tanh_square
# mechanism: AT_DISPATCH_FLOATING_TYPES and a template kernel
# target: cuda
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = "torch::Tensor run(torch::Tensor x);"

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

template <typename T>
__global__ void square_tanh(const T* in, T* out, int64_t n) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) {
        const T t = tanh(in[i]);
        out[i] = t * t;
    }
}

torch::Tensor run(torch::Tensor x) {
    auto out = torch::empty_like(x);
    const int64_t n = x.numel();
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "square_tanh", [&] {
        square_tanh<scalar_t><<<(unsigned)((n + 255) / 256), 256>>>(
            x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), n);
    });
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
