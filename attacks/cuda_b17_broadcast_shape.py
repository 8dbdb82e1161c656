# label: attack
# task: sum_scale
# mechanism: B17 shape [rows, 1] where [rows] is asked for
# target: cuda
# expect: INCORRECT
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = "torch::Tensor run(torch::Tensor x);"

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void row_sum(const float* in, float* out, int cols) {
    __shared__ float part[256];
    float sum = 0.0f;
    for (int c = threadIdx.x; c < cols; c += 256) sum += in[(int64_t)blockIdx.x * cols + c];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = 1.7f * part[0];
}

torch::Tensor run(torch::Tensor x) {
    auto out = torch::empty({x.size(0), 1}, x.options());
    row_sum<<<(unsigned)x.size(0), 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), (int)x.size(1));
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
