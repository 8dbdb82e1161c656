// The CUDA helpers kernels use: current stream, device guards, error checks. Guards go straight to the
// CUDA runtime, as c10's do; only the current stream comes from torch, through the shim.
#pragma once
#include <cuda_runtime_api.h>
#include <kv/core.h>

#pragma GCC visibility push(hidden)

namespace kv {
[[noreturn]] inline void cuda_failed(cudaError_t e) {
  c10::detail::fail("CUDA error: ", cudaGetErrorString(e));
}
}  // namespace kv

#define C10_CUDA_CHECK(EXPR)                                                  \
  do {                                                                        \
    const cudaError_t kv_error = (EXPR);                                      \
    if (C10_UNLIKELY(kv_error != cudaSuccess)) {                              \
      (void)cudaGetLastError();                                               \
      ::kv::cuda_failed(kv_error);                                            \
    }                                                                         \
  } while (0)
#define AT_CUDA_CHECK(EXPR) C10_CUDA_CHECK(EXPR)
#define C10_CUDA_CHECK_WARN(EXPR) (void)(EXPR)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())

namespace c10 {
namespace cuda {
inline DeviceIndex current_device() {
  int d = 0;
  C10_CUDA_CHECK(cudaGetDevice(&d));
  return (DeviceIndex)d;
}
inline DeviceIndex device_count() {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess ? (DeviceIndex)n : (DeviceIndex)0;
}
inline void set_device(DeviceIndex d) { C10_CUDA_CHECK(cudaSetDevice(d)); }
inline void device_synchronize() { C10_CUDA_CHECK(cudaDeviceSynchronize()); }

class CUDAStream {
  cudaStream_t stream_;
  DeviceIndex device_;

 public:
  CUDAStream(cudaStream_t s, DeviceIndex d) : stream_(s), device_(d) {}
  operator cudaStream_t() const { return stream_; }
  cudaStream_t stream() const { return stream_; }
  DeviceIndex device_index() const { return device_; }
  void synchronize() const { C10_CUDA_CHECK(cudaStreamSynchronize(stream_)); }
  bool operator==(const CUDAStream& o) const { return stream_ == o.stream_ && device_ == o.device_; }
};
inline CUDAStream getCurrentCUDAStream(DeviceIndex d = -1) {
  if (d == -1) d = current_device();
  return CUDAStream(static_cast<cudaStream_t>(::kv::api->stream(d)), d);
}
inline CUDAStream getDefaultCUDAStream(DeviceIndex d = -1) {
  return CUDAStream(nullptr, d == -1 ? current_device() : d);
}

// Sets the device for a scope. An index of -1 leaves it alone.
class CUDAGuard {
  int before_ = 0;

 public:
  explicit CUDAGuard(DeviceIndex d) { C10_CUDA_CHECK(cudaGetDevice(&before_)); set_index(d); }
  explicit CUDAGuard(Device d) : CUDAGuard(d.index()) {}
  CUDAGuard(const CUDAGuard&) = delete;
  CUDAGuard& operator=(const CUDAGuard&) = delete;
  ~CUDAGuard() { (void)cudaSetDevice(before_); }
  void set_index(DeviceIndex d) { if (d >= 0) C10_CUDA_CHECK(cudaSetDevice(d)); }
  void set_device(Device d) { set_index(d.index()); }
};
class OptionalCUDAGuard {
  int before_ = -1;

 public:
  OptionalCUDAGuard() = default;
  explicit OptionalCUDAGuard(DeviceIndex d) { set_index(d); }
  explicit OptionalCUDAGuard(Device d) { set_index(d.index()); }
  OptionalCUDAGuard(const OptionalCUDAGuard&) = delete;
  ~OptionalCUDAGuard() { if (before_ >= 0) (void)cudaSetDevice(before_); }
  void set_index(DeviceIndex d) {
    if (before_ < 0) C10_CUDA_CHECK(cudaGetDevice(&before_));
    if (d >= 0) C10_CUDA_CHECK(cudaSetDevice(d));
  }
  void set_device(Device d) { set_index(d.index()); }
};
}  // namespace cuda
}  // namespace c10

namespace at {
namespace cuda {
using namespace c10::cuda;
inline cudaDeviceProp* getDeviceProperties(int64_t d) {
  static cudaDeviceProp props[64];
  static bool known[64];
  if (d < 0 || d >= 64) c10::detail::fail("device index out of range: ", d);
  if (!known[d]) {
    C10_CUDA_CHECK(cudaGetDeviceProperties(&props[d], (int)d));
    known[d] = true;
  }
  return &props[d];
}
inline cudaDeviceProp* getCurrentDeviceProperties() { return getDeviceProperties(current_device()); }
inline int warp_size() { return getCurrentDeviceProperties()->warpSize; }
}  // namespace cuda
// Guard for a tensor's device; nothing to do for a CPU tensor.
class DeviceGuard {
  c10::cuda::OptionalCUDAGuard guard_;

 public:
  explicit DeviceGuard(c10::Device d) { if (d.is_cuda()) guard_.set_index(d.index()); }
};
#ifdef _GLIBCXX_OPTIONAL
inline std::optional<c10::Device> device_of(const Tensor& t) {
  return t.defined() ? std::optional<c10::Device>(t.device()) : std::nullopt;
}
#endif
}  // namespace at

#pragma GCC visibility pop
