# label: honest
# task: scale_softmax
# mechanism: warp shuffles, shared memory, one block a row
# target: cuda
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = "torch::Tensor run(torch::Tensor x);"

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

template <bool MAX>
__device__ float block_reduce(float v, float* shared) {
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, v, step);
        v = MAX ? fmaxf(v, other) : v + other;
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    float all = shared[0];
    for (int w = 1; w < blockDim.x / 32; ++w) all = MAX ? fmaxf(all, shared[w]) : all + shared[w];
    __syncthreads();
    return all;
}

__global__ void softmax(const float* in, float* out, int cols) {
    __shared__ float shared[8];
    const float* row = in + (int64_t)blockIdx.x * cols;
    float* to = out + (int64_t)blockIdx.x * cols;
    float top = -INFINITY, sum = 0.0f;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) top = fmaxf(top, 1.7f * row[c]);
    top = block_reduce<true>(top, shared);
    for (int c = threadIdx.x; c < cols; c += blockDim.x) sum += expf(1.7f * row[c] - top);
    sum = block_reduce<false>(sum, shared);
    for (int c = threadIdx.x; c < cols; c += blockDim.x) to[c] = expf(1.7f * row[c] - top) / sum;
}

torch::Tensor run(torch::Tensor x) {
    auto out = torch::empty_like(x);
    softmax<<<(unsigned)x.size(0), 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), (int)x.size(1));
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
