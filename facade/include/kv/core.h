// Rung 0 of the build ladder: the part of torch's C++ interface that kernels use, as a thin header.
//
// Names, semantics and error texts follow the stock headers; everything that needs torch goes through
// the function table of kv/abi.h. What is missing here does not compile, and then the builder falls
// back to the stock headers. Nothing here may behave differently from stock where it compiles.
#pragma once
#include <exception>
#include <initializer_list>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <type_traits>
#include <utility>

#include <kv/abi.h>
#ifdef _OPENMP
#include <omp.h>
#endif

// Nothing of this is visible outside the candidate's object: the names are torch's, and torch is in the
// same process.
#pragma GCC visibility push(hidden)

#ifdef __CUDACC__
#define C10_HOST_DEVICE __host__ __device__
#define C10_DEVICE __device__
#define C10_HOST __host__
#else
#define C10_HOST_DEVICE
#define C10_DEVICE
#define C10_HOST
#endif
#define C10_UNUSED __attribute__((__unused__))
#define C10_LIKELY(x) (__builtin_expect(static_cast<bool>(x), 1))
#define C10_UNLIKELY(x) (__builtin_expect(static_cast<bool>(x), 0))
#define C10_RESTRICT __restrict
#define C10_ALWAYS_INLINE inline __attribute__((__always_inline__))
#define TORCH_API
#define AT_FORALL_KV_TYPES(_) \
  _(uint8_t, Byte, 0) _(int8_t, Char, 1) _(int16_t, Short, 2) _(int, Int, 3) _(int64_t, Long, 4) \
  _(::c10::Half, Half, 5) _(float, Float, 6) _(double, Double, 7) _(bool, Bool, 11) \
  _(::c10::BFloat16, BFloat16, 15)

namespace kv {
inline const KvApi* api = nullptr;
inline uint32_t bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
inline float from_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
}  // namespace kv

namespace c10 {
struct Half;
struct BFloat16;

enum class DeviceType : int8_t { CPU = 0, CUDA = 1 };
constexpr DeviceType kCPU = DeviceType::CPU;
constexpr DeviceType kCUDA = DeviceType::CUDA;
typedef int8_t DeviceIndex;
enum class Layout : int8_t { Strided };
constexpr Layout kStrided = Layout::Strided;
enum class MemoryFormat : int8_t { Contiguous, Preserve, ChannelsLast, ChannelsLast3d };

enum class ScalarType : int8_t {
  Byte = 0, Char = 1, Short = 2, Int = 3, Long = 4, Half = 5, Float = 6, Double = 7,
  ComplexHalf = 8, ComplexFloat = 9, ComplexDouble = 10, Bool = 11, BFloat16 = 15, Undefined = 127
};
#define KV_CONSTANT(T, N, V) constexpr ScalarType k##N = ScalarType::N;
AT_FORALL_KV_TYPES(KV_CONSTANT)
#undef KV_CONSTANT

inline const char* toString(ScalarType t) {
  switch (t) {
#define KV_NAME(T, N, V) case ScalarType::N: return #N;
    AT_FORALL_KV_TYPES(KV_NAME)
#undef KV_NAME
    case ScalarType::ComplexHalf: return "ComplexHalf";
    case ScalarType::ComplexFloat: return "ComplexFloat";
    case ScalarType::ComplexDouble: return "ComplexDouble";
    default: return "UNKNOWN_SCALAR";
  }
}
inline size_t elementSize(ScalarType t) {
  switch (t) {
    case ScalarType::Byte: case ScalarType::Char: case ScalarType::Bool: return 1;
    case ScalarType::Short: case ScalarType::Half: case ScalarType::BFloat16: return 2;
    case ScalarType::Int: case ScalarType::Float: case ScalarType::ComplexHalf: return 4;
    case ScalarType::ComplexDouble: return 16;
    default: return 8;
  }
}
inline bool isFloatingType(ScalarType t) {
  return t == ScalarType::Float || t == ScalarType::Double || t == ScalarType::Half ||
         t == ScalarType::BFloat16;
}

// 16-bit floats: storage plus conversion to and from float, rounding to nearest even.
struct alignas(2) Half {
  unsigned short x;
  struct from_bits_t {};
  C10_HOST_DEVICE static constexpr from_bits_t from_bits() { return from_bits_t(); }
  Half() = default;
  C10_HOST_DEVICE constexpr Half(unsigned short b, from_bits_t) : x(b) {}
  C10_HOST_DEVICE inline Half(float v);
  C10_HOST_DEVICE inline operator float() const;
#if defined(__CUDACC__) && defined(KV_WITH_HALF)
  C10_HOST_DEVICE Half(const __half& v) { x = *reinterpret_cast<const unsigned short*>(&v); }
  C10_HOST_DEVICE operator __half() const { return *reinterpret_cast<const __half*>(&x); }
#endif
};
struct alignas(2) BFloat16 {
  unsigned short x;
  struct from_bits_t {};
  C10_HOST_DEVICE static constexpr from_bits_t from_bits() { return from_bits_t(); }
  BFloat16() = default;
  C10_HOST_DEVICE constexpr BFloat16(unsigned short b, from_bits_t) : x(b) {}
  C10_HOST_DEVICE inline BFloat16(float v);
  C10_HOST_DEVICE inline operator float() const;
#if defined(__CUDACC__) && defined(KV_WITH_HALF)
  C10_HOST_DEVICE BFloat16(const __nv_bfloat16& v) { x = *reinterpret_cast<const unsigned short*>(&v); }
  C10_HOST_DEVICE operator __nv_bfloat16() const { return *reinterpret_cast<const __nv_bfloat16*>(&x); }
#endif
};
}  // namespace c10

namespace kv {
inline unsigned short half_from_float(float f) {
  uint32_t u = bits(f), sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u >= 0x7f800000u) return sign | (u > 0x7f800000u ? 0x7e00u : 0x7c00u);
  if (u >= 0x477ff000u) return sign | 0x7c00u;
  if (u < 0x38800000u) return sign | (bits(from_bits(u) + 0.5f) - 0x3f000000u);
  return sign | ((u + 0xfffu + ((u >> 13) & 1u) - 0x38000000u) >> 13);
}
inline float half_to_float(unsigned short h) {
  uint32_t sign = uint32_t(h & 0x8000u) << 16, e = (h >> 10) & 0x1fu, m = h & 0x3ffu;
  if (e == 31) return from_bits(sign | 0x7f800000u | (m << 13));
  if (e == 0) return from_bits(sign | bits(float(m) * 5.9604644775390625e-08f));
  return from_bits(sign | ((e + 112u) << 23) | (m << 13));
}
C10_HOST_DEVICE inline unsigned short bfloat_from_float(float f) {
  union { float f; uint32_t u; } v;
  v.f = f;
  if (f != f) return 0x7fc0u;
  return (unsigned short)((v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16);
}
}  // namespace kv

namespace c10 {
#if defined(__CUDACC__) && defined(KV_WITH_HALF)
C10_HOST_DEVICE inline Half::Half(float v) {
#ifdef __CUDA_ARCH__
  x = __half_as_ushort(__float2half(v));
#else
  x = ::kv::half_from_float(v);
#endif
}
C10_HOST_DEVICE inline Half::operator float() const {
#ifdef __CUDA_ARCH__
  return __half2float(*reinterpret_cast<const __half*>(&x));
#else
  return ::kv::half_to_float(x);
#endif
}
#else
inline Half::Half(float v) : x(::kv::half_from_float(v)) {}
inline Half::operator float() const { return ::kv::half_to_float(x); }
#endif
C10_HOST_DEVICE inline BFloat16::BFloat16(float v) : x(::kv::bfloat_from_float(v)) {}
C10_HOST_DEVICE inline BFloat16::operator float() const {
  union { uint32_t u; float f; } v;
  v.u = uint32_t(x) << 16;
  return v.f;
}
#define KV_OPERATORS(H) \
  C10_HOST_DEVICE inline H operator+(const H& a, const H& b) { return float(a) + float(b); } \
  C10_HOST_DEVICE inline H operator-(const H& a, const H& b) { return float(a) - float(b); } \
  C10_HOST_DEVICE inline H operator*(const H& a, const H& b) { return float(a) * float(b); } \
  C10_HOST_DEVICE inline H operator/(const H& a, const H& b) { return float(a) / float(b); } \
  C10_HOST_DEVICE inline H operator-(const H& a) { return -float(a); } \
  C10_HOST_DEVICE inline H& operator+=(H& a, const H& b) { a = a + b; return a; } \
  C10_HOST_DEVICE inline H& operator-=(H& a, const H& b) { a = a - b; return a; } \
  C10_HOST_DEVICE inline H& operator*=(H& a, const H& b) { a = a * b; return a; } \
  C10_HOST_DEVICE inline H& operator/=(H& a, const H& b) { a = a / b; return a; } \
  C10_HOST_DEVICE inline float operator+(H a, float b) { return float(a) + b; } \
  C10_HOST_DEVICE inline float operator-(H a, float b) { return float(a) - b; } \
  C10_HOST_DEVICE inline float operator*(H a, float b) { return float(a) * b; } \
  C10_HOST_DEVICE inline float operator/(H a, float b) { return float(a) / b; } \
  C10_HOST_DEVICE inline float operator+(float a, H b) { return a + float(b); } \
  C10_HOST_DEVICE inline float operator-(float a, H b) { return a - float(b); } \
  C10_HOST_DEVICE inline float operator*(float a, H b) { return a * float(b); } \
  C10_HOST_DEVICE inline float operator/(float a, H b) { return a / float(b); } \
  C10_HOST_DEVICE inline float& operator+=(float& a, const H& b) { return a += float(b); } \
  C10_HOST_DEVICE inline float& operator-=(float& a, const H& b) { return a -= float(b); } \
  C10_HOST_DEVICE inline float& operator*=(float& a, const H& b) { return a *= float(b); } \
  C10_HOST_DEVICE inline double operator+(H a, double b) { return double(float(a)) + b; } \
  C10_HOST_DEVICE inline double operator-(H a, double b) { return double(float(a)) - b; } \
  C10_HOST_DEVICE inline double operator*(H a, double b) { return double(float(a)) * b; } \
  C10_HOST_DEVICE inline double operator/(H a, double b) { return double(float(a)) / b; } \
  C10_HOST_DEVICE inline double operator+(double a, H b) { return a + double(float(b)); } \
  C10_HOST_DEVICE inline double operator-(double a, H b) { return a - double(float(b)); } \
  C10_HOST_DEVICE inline double operator*(double a, H b) { return a * double(float(b)); } \
  C10_HOST_DEVICE inline double operator/(double a, H b) { return a / double(float(b)); } \
  C10_HOST_DEVICE inline H operator+(H a, int b) { return a + H(float(b)); } \
  C10_HOST_DEVICE inline H operator-(H a, int b) { return a - H(float(b)); } \
  C10_HOST_DEVICE inline H operator*(H a, int b) { return a * H(float(b)); } \
  C10_HOST_DEVICE inline H operator/(H a, int b) { return a / H(float(b)); } \
  C10_HOST_DEVICE inline H operator+(int a, H b) { return H(float(a)) + b; } \
  C10_HOST_DEVICE inline H operator-(int a, H b) { return H(float(a)) - b; } \
  C10_HOST_DEVICE inline H operator*(int a, H b) { return H(float(a)) * b; } \
  C10_HOST_DEVICE inline H operator/(int a, H b) { return H(float(a)) / b; }
KV_OPERATORS(Half)
KV_OPERATORS(BFloat16)
#undef KV_OPERATORS

namespace impl {
template <ScalarType S> struct ScalarTypeToCPPType;
#define KV_TYPE(T, N, V) template <> struct ScalarTypeToCPPType<ScalarType::N> { using type = T; };
AT_FORALL_KV_TYPES(KV_TYPE)
#undef KV_TYPE
template <ScalarType S> using ScalarTypeToCPPTypeT = typename ScalarTypeToCPPType<S>::type;
}  // namespace impl
template <class T> struct CppTypeToScalarType;
#define KV_TYPE(T, N, V) \
  template <> struct CppTypeToScalarType<T> { static constexpr ScalarType value = ScalarType::N; };
AT_FORALL_KV_TYPES(KV_TYPE)
#undef KV_TYPE

template <class T> class ArrayRef {
  const T* data_;
  size_t size_;

 public:
  using value_type = T;
  using iterator = const T*;
  using const_iterator = const T*;
  constexpr ArrayRef() : data_(nullptr), size_(0) {}
  constexpr ArrayRef(const T& one) : data_(&one), size_(1) {}
  constexpr ArrayRef(const T* d, size_t n) : data_(d), size_(n) {}
  constexpr ArrayRef(const T* b, const T* e) : data_(b), size_(e - b) {}
  template <size_t N> constexpr ArrayRef(const T (&a)[N]) : data_(a), size_(N) {}
  constexpr ArrayRef(const std::initializer_list<T>& l) : data_(l.begin()), size_(l.size()) {}
  template <class V, class = std::enable_if_t<
      std::is_same<const T*, decltype(static_cast<const T*>(std::declval<const V&>().data()))>::value &&
      std::is_integral<decltype(std::declval<const V&>().size())>::value && !std::is_same<V, ArrayRef>::value>>
  ArrayRef(const V& v) : data_(v.data()), size_(v.size()) {}
  constexpr const T* data() const { return data_; }
  constexpr size_t size() const { return size_; }
  constexpr bool empty() const { return size_ == 0; }
  constexpr const T* begin() const { return data_; }
  constexpr const T* end() const { return data_ + size_; }
  constexpr const T& operator[](size_t i) const { return data_[i]; }
  inline const T& at(size_t i) const;
  const T& front() const { return at(0); }
  const T& back() const { return at(size_ - 1); }
  bool equals(ArrayRef o) const {
    if (size_ != o.size_) return false;
    for (size_t i = 0; i < size_; ++i) if (!(data_[i] == o.data_[i])) return false;
    return true;
  }
#ifdef _GLIBCXX_VECTOR
  std::vector<T> vec() const { return std::vector<T>(begin(), end()); }
#endif
};
template <class T> bool operator==(ArrayRef<T> a, ArrayRef<T> b) { return a.equals(b); }
template <class T> bool operator!=(ArrayRef<T> a, ArrayRef<T> b) { return !a.equals(b); }
using IntArrayRef = ArrayRef<int64_t>;
#ifdef _GLIBCXX_VECTOR
template <class T> bool operator==(const std::vector<T>& a, ArrayRef<T> b) { return ArrayRef<T>(a).equals(b); }
template <class T> bool operator==(ArrayRef<T> a, const std::vector<T>& b) { return a.equals(ArrayRef<T>(b)); }
template <class T> bool operator!=(ArrayRef<T> a, const std::vector<T>& b) { return !a.equals(ArrayRef<T>(b)); }
#endif

class Device {
  DeviceType type_;
  DeviceIndex index_;

 public:
  Device(DeviceType t, DeviceIndex i = -1) : type_(t), index_(i) {}
  Device(const char* text) : type_(DeviceType::CPU), index_(-1) { parse(text); }
  template <class S, class = decltype(std::declval<const S&>().c_str())> Device(const S& s) : Device(s.c_str()) {}
  inline void parse(const char* text);
  DeviceType type() const { return type_; }
  DeviceIndex index() const { return index_; }
  bool has_index() const { return index_ != -1; }
  bool is_cuda() const { return type_ == DeviceType::CUDA; }
  bool is_cpu() const { return type_ == DeviceType::CPU; }
  bool operator==(const Device& o) const { return type_ == o.type_ && index_ == o.index_; }
  bool operator!=(const Device& o) const { return !(*this == o); }
};

}  // namespace c10

namespace caffe2 {
// What Tensor::dtype() gives back; compares with ScalarType.
class TypeMeta {
  c10::ScalarType type_;

 public:
  constexpr TypeMeta(c10::ScalarType t) : type_(t) {}
  c10::ScalarType toScalarType() const { return type_; }
  size_t itemsize() const { return c10::elementSize(type_); }
  template <class T> bool Match() const { return type_ == c10::CppTypeToScalarType<T>::value; }
  template <class T> static TypeMeta Make() { return TypeMeta(c10::CppTypeToScalarType<T>::value); }
  friend bool operator==(TypeMeta a, TypeMeta b) { return a.type_ == b.type_; }
  friend bool operator!=(TypeMeta a, TypeMeta b) { return a.type_ != b.type_; }
  const char* name() const {
    switch (type_) {
      case c10::ScalarType::Byte: return "unsigned char";
      case c10::ScalarType::Char: return "signed char";
      case c10::ScalarType::Short: return "short int";
      case c10::ScalarType::Int: return "int";
      case c10::ScalarType::Long: return "long int";
      case c10::ScalarType::Half: return "c10::Half";
      case c10::ScalarType::Float: return "float";
      case c10::ScalarType::Double: return "double";
      case c10::ScalarType::Bool: return "bool";
      case c10::ScalarType::BFloat16: return "c10::BFloat16";
      default: return "nullptr (uninitialized)";
    }
  }
};
inline bool operator==(c10::ScalarType a, TypeMeta b) { return a == b.toScalarType(); }
inline bool operator!=(c10::ScalarType a, TypeMeta b) { return a != b.toScalarType(); }
inline bool operator==(TypeMeta a, c10::ScalarType b) { return b == a.toScalarType(); }
inline bool operator!=(TypeMeta a, c10::ScalarType b) { return b != a.toScalarType(); }
}  // namespace caffe2

namespace kv {
// Text of an error, put together as an ostream would print its pieces.
struct Text {
  char* s = nullptr;
  size_t n = 0;
  void put(const char* t, size_t k) {
    s = static_cast<char*>(realloc(s, n + k + 1));
    memcpy(s + n, t, k);
    n += k;
    s[n] = 0;
  }
  void add(const char* t) { put(t, strlen(t)); }
  void add(char c) { put(&c, 1); }
  void add(bool b) { add(b ? '1' : '0'); }
  void add(c10::ScalarType t) { add(c10::toString(t)); }
  void add(caffe2::TypeMeta t) { add(t.name()); }
  void add(c10::DeviceType t) { add(t == c10::DeviceType::CUDA ? "cuda" : "cpu"); }
  void add(c10::Device d) {
    add(d.type());
    if (d.has_index()) { add(':'); add((int)d.index()); }
  }
  template <class T> void add(c10::ArrayRef<T> a) {
    add('[');
    for (size_t i = 0; i < a.size(); ++i) { if (i) add(", "); add(a[i]); }
    add(']');
  }
  template <class T> std::enable_if_t<std::is_integral<T>::value> add(T v) {
    char b[32];
    put(b, std::is_signed<T>::value ? snprintf(b, 32, "%lld", (long long)v)
                                    : snprintf(b, 32, "%llu", (unsigned long long)v));
  }
  template <class T> std::enable_if_t<std::is_floating_point<T>::value> add(T v) {
    char b[32];
    put(b, snprintf(b, 32, "%g", (double)v));
  }
  template <class T> auto add(const T& v) -> decltype((void)v.c_str()) { put(v.c_str(), v.size()); }
};
}  // namespace kv

namespace c10 {
using ::kv::Error;
namespace detail {
template <class... A> [[noreturn]] inline void fail_as(int32_t kind, const A&... parts) {
  ::kv::Text t;
  t.put("", 0);
  (t.add(parts), ...);
  throw Error(kind, t.s);
}
template <class... A> [[noreturn]] inline void fail(const A&... parts) { fail_as(KV_RUNTIME_ERROR, parts...); }
template <class... A> [[noreturn]] inline void check_failed(int32_t kind, const char*, const A&... parts) {
  fail_as(kind, parts...);
}
[[noreturn]] inline void check_failed(int32_t kind, const char* condition) { fail_as(kind, condition); }
template <class... A> inline void warn(const A&... parts) {
  ::kv::Text t;
  t.put("", 0);
  (t.add(parts), ...);
  fprintf(stderr, "[W] Warning: %s\n", t.s);
  free(t.s);
}
}  // namespace detail
// "cpu", "cuda" or "cuda:N"; what else stock knows is refused by stock kernels anyway.
inline void Device::parse(const char* text) {
  if (strcmp(text, "cpu") == 0) return;
  if (strncmp(text, "cuda", 4) != 0 || (text[4] && (text[4] != ':' || text[5] < '0' || text[5] > '9')))
    detail::fail("Invalid device string: '", text, "'");
  type_ = DeviceType::CUDA;
  if (text[4]) index_ = (DeviceIndex)atoi(text + 5);
}
template <class T> inline const T& ArrayRef<T>::at(size_t i) const {
  if (i >= size_) detail::fail("ArrayRef: invalid index Index = ", i, "; Length = ", size_);
  return data_[i];
}
}  // namespace c10

#define KV_IMPROVE "(Could this error message be improved?  If so, please report an enhancement request to PyTorch.)"
#define KV_CHECK(kind, cond, ...)                                                                     \
  if (C10_UNLIKELY(!(cond))) {                                                                        \
    ::c10::detail::check_failed(kind, "Expected " #cond " to be true, but got false.  " KV_IMPROVE, \
                                ##__VA_ARGS__);                                                       \
  }
#define TORCH_CHECK(cond, ...) KV_CHECK(KV_RUNTIME_ERROR, cond, ##__VA_ARGS__)
#define TORCH_CHECK_VALUE(cond, ...) KV_CHECK(KV_VALUE_ERROR, cond, ##__VA_ARGS__)
#define TORCH_CHECK_TYPE(cond, ...) KV_CHECK(KV_TYPE_ERROR, cond, ##__VA_ARGS__)
#define TORCH_CHECK_INDEX(cond, ...) KV_CHECK(KV_INDEX_ERROR, cond, ##__VA_ARGS__)
#define TORCH_CHECK_NOT_IMPLEMENTED(cond, ...) KV_CHECK(KV_NOT_IMPLEMENTED_ERROR, cond, ##__VA_ARGS__)
#define AT_ASSERTM TORCH_CHECK
#define AT_ERROR(...) do { ::c10::detail::fail(__VA_ARGS__); } while (false)
#define TORCH_WARN(...) ::c10::detail::warn(__VA_ARGS__)
#ifdef __CUDACC__
#include <assert.h>
#define CUDA_KERNEL_ASSERT(cond) assert(cond)
#endif

namespace c10 {
class Scalar {
  KvScalar v_;

 public:
  Scalar() : v_{KV_INT, 0, 0} {}
  Scalar(bool b) : v_{KV_BOOL, b, double(b)} {}
  template <class T, std::enable_if_t<std::is_integral<T>::value && !std::is_same<T, bool>::value, int> = 0>
  Scalar(T i) : v_{KV_INT, (int64_t)i, (double)i} {}
  template <class T, std::enable_if_t<std::is_floating_point<T>::value, int> = 0>
  Scalar(T d) : v_{KV_FLOAT, 0, (double)d} {}
  explicit Scalar(KvScalar v) : v_(v) {}
  KvScalar raw() const { return v_; }
  template <class T> T to() const { return v_.tag == KV_FLOAT ? (T)v_.d : (T)v_.i; }
  double toDouble() const { return to<double>(); }
  float toFloat() const { return to<float>(); }
  int64_t toLong() const { return to<int64_t>(); }
  int toInt() const { return to<int>(); }
  bool isFloatingPoint() const { return v_.tag == KV_FLOAT; }
};

struct TensorOptions {
  KvOptions raw{-1, -1, -1, -1, -1, -1};
  TensorOptions() = default;
  TensorOptions(ScalarType t) { raw.dtype = (int8_t)t; }
  TensorOptions(caffe2::TypeMeta t) { raw.dtype = (int8_t)t.toScalarType(); }
  TensorOptions(Device d) { raw.device_type = (int8_t)d.type(); raw.device_index = d.index(); }
  TensorOptions(DeviceType t) { raw.device_type = (int8_t)t; }
  TensorOptions(Layout) {}
  TensorOptions(MemoryFormat f) { raw.memory_format = (int8_t)f; }
  TensorOptions dtype(ScalarType t) const { TensorOptions o(*this); o.raw.dtype = (int8_t)t; return o; }
  TensorOptions dtype(caffe2::TypeMeta t) const { return dtype(t.toScalarType()); }
  template <class T> TensorOptions dtype() const { return dtype(CppTypeToScalarType<T>::value); }
  TensorOptions device(Device d) const {
    TensorOptions o(*this);
    o.raw.device_type = (int8_t)d.type();
    o.raw.device_index = d.index();
    return o;
  }
  TensorOptions device(DeviceType t, DeviceIndex i = -1) const { return device(Device(t, i)); }
  TensorOptions device_index(DeviceIndex i) const { return device(Device(DeviceType::CUDA, i)); }
  TensorOptions layout(Layout) const { return *this; }
  TensorOptions requires_grad(bool b = true) const { TensorOptions o(*this); o.raw.requires_grad = b; return o; }
  TensorOptions pinned_memory(bool b = true) const { TensorOptions o(*this); o.raw.pinned = b; return o; }
  TensorOptions memory_format(MemoryFormat f) const {
    TensorOptions o(*this);
    o.raw.memory_format = (int8_t)f;
    return o;
  }
};
}  // namespace c10

namespace at {
using namespace c10;
using c10::Half;
using c10::BFloat16;

template <typename T> struct DefaultPtrTraits { typedef T* PtrType; };
template <typename T> struct RestrictPtrTraits { typedef T* __restrict__ PtrType; };

// Strided views of a tensor's data; sizes and strides are borrowed (host) or copied (packed).
template <class T, size_t N, template <class> class P = DefaultPtrTraits, class I = int64_t>
class TensorAccessorBase {
 protected:
  typename P<T>::PtrType data_;
  const I* sizes_;
  const I* strides_;

 public:
  typedef typename P<T>::PtrType PtrType;
  C10_HOST_DEVICE TensorAccessorBase(PtrType d, const I* s, const I* t) : data_(d), sizes_(s), strides_(t) {}
  C10_HOST ArrayRef<I> sizes() const { return ArrayRef<I>(sizes_, N); }
  C10_HOST ArrayRef<I> strides() const { return ArrayRef<I>(strides_, N); }
  C10_HOST_DEVICE I stride(I i) const { return strides_[i]; }
  C10_HOST_DEVICE I size(I i) const { return sizes_[i]; }
  C10_HOST_DEVICE PtrType data() { return data_; }
  C10_HOST_DEVICE const PtrType data() const { return data_; }
};
template <class T, size_t N, template <class> class P = DefaultPtrTraits, class I = int64_t>
class TensorAccessor : public TensorAccessorBase<T, N, P, I> {
 public:
  using TensorAccessorBase<T, N, P, I>::TensorAccessorBase;
  C10_HOST_DEVICE TensorAccessor<T, N - 1, P, I> operator[](I i) const {
    return TensorAccessor<T, N - 1, P, I>(this->data_ + this->strides_[0] * i, this->sizes_ + 1, this->strides_ + 1);
  }
};
template <class T, template <class> class P, class I>
class TensorAccessor<T, 1, P, I> : public TensorAccessorBase<T, 1, P, I> {
 public:
  using TensorAccessorBase<T, 1, P, I>::TensorAccessorBase;
  C10_HOST_DEVICE T& operator[](I i) const { return this->data_[this->strides_[0] * i]; }
};

template <class T, size_t N, template <class> class P = DefaultPtrTraits, class I = int64_t>
class GenericPackedTensorAccessor {
  typename P<T>::PtrType data_;
  I sizes_[N];
  I strides_[N];

 public:
  typedef typename P<T>::PtrType PtrType;
  C10_HOST GenericPackedTensorAccessor(PtrType d, const int64_t* s, const int64_t* t) : data_(d) {
    for (size_t i = 0; i < N; ++i) { sizes_[i] = (I)s[i]; strides_[i] = (I)t[i]; }
  }
  C10_HOST_DEVICE I stride(I i) const { return strides_[i]; }
  C10_HOST_DEVICE I size(I i) const { return sizes_[i]; }
  C10_HOST_DEVICE PtrType data() { return data_; }
  C10_HOST_DEVICE const PtrType data() const { return data_; }
  C10_HOST_DEVICE decltype(auto) operator[](I i) {
    if constexpr (N == 1) return (data_[strides_[0] * i]);
    else return TensorAccessor<T, N - 1, P, I>(data_ + strides_[0] * i, sizes_ + 1, strides_ + 1);
  }
  C10_HOST_DEVICE decltype(auto) operator[](I i) const {
    if constexpr (N == 1) return ((const T&)data_[strides_[0] * i]);
    else return TensorAccessor<const T, N - 1, P, I>(data_ + strides_[0] * i, sizes_ + 1, strides_ + 1);
  }
};
template <class T, size_t N, template <class> class P = DefaultPtrTraits>
using PackedTensorAccessor32 = GenericPackedTensorAccessor<T, N, P, int32_t>;
template <class T, size_t N, template <class> class P = DefaultPtrTraits>
using PackedTensorAccessor64 = GenericPackedTensorAccessor<T, N, P, int64_t>;

class DeprecatedTypeProperties {
  c10::ScalarType type_;
  bool cuda_;

 public:
  DeprecatedTypeProperties(c10::ScalarType t, bool cuda) : type_(t), cuda_(cuda) {}
  c10::ScalarType scalarType() const { return type_; }
  bool is_cuda() const { return cuda_; }
  bool operator==(const DeprecatedTypeProperties& o) const { return type_ == o.type_ && cuda_ == o.cuda_; }
  bool operator!=(const DeprecatedTypeProperties& o) const { return !(*this == o); }
};

class Tensor {
  void* p_ = nullptr;

  KvMeta meta() const {
    if (!p_) c10::detail::fail("tensor does not have a device");
    KvMeta m;
    ::kv::api->meta(p_, &m);
    return m;
  }
  void* need() const {
    if (!p_) c10::detail::fail("Expected a proper Tensor but got None (or an undefined Tensor in C++)");
    return p_;
  }
  Tensor op(int32_t what, std::initializer_list<int64_t> a = {}) const {
    return adopt(::kv::api->op(what, need(), a.begin(), (int64_t)a.size()));
  }
  Tensor op(int32_t what, IntArrayRef a) const {
    return adopt(::kv::api->op(what, need(), a.data(), (int64_t)a.size()));
  }
  static int64_t wrap(int64_t d, int64_t n) {
    int64_t range = n > 0 ? n : 1;
    if (d < -range || d >= range)
      c10::detail::fail_as(KV_INDEX_ERROR, "Dimension out of range (expected to be in range of [", -range, ", ", range - 1,
                        "], but got ", d, ")");
    return d < 0 ? d + range : d;
  }

 public:
  Tensor() = default;
  Tensor(const Tensor& o) : p_(o.p_) { if (p_) ::kv::api->retain(p_); }
  Tensor(Tensor&& o) noexcept : p_(o.p_) { o.p_ = nullptr; }
  Tensor& operator=(Tensor o) noexcept { void* t = p_; p_ = o.p_; o.p_ = t; return *this; }
  ~Tensor() { if (p_) ::kv::api->release(p_); }
  static Tensor adopt(void* p) { Tensor t; t.p_ = p; return t; }
  void* raw() const { return p_; }
  void* leak() { void* p = p_; p_ = nullptr; return p; }

  bool defined() const { return p_ != nullptr; }
  void reset() { *this = Tensor(); }
  bool is_same(const Tensor& o) const { return p_ == o.p_; }
  int64_t dim() const { return meta().dim; }
  int64_t ndimension() const { return dim(); }
  int64_t numel() const { return meta().numel; }
  IntArrayRef sizes() const { KvMeta m = meta(); return IntArrayRef(m.sizes, (size_t)m.dim); }
  IntArrayRef strides() const { KvMeta m = meta(); return IntArrayRef(m.strides, (size_t)m.dim); }
  int64_t size(int64_t d) const {
    KvMeta m = meta();
    if (m.dim == 0) c10::detail::fail_as(KV_INDEX_ERROR, "Dimension specified as ", d, " but tensor has no dimensions");
    return m.sizes[wrap(d, m.dim)];
  }
  int64_t stride(int64_t d) const {
    KvMeta m = meta();
    if (m.dim == 0) c10::detail::fail_as(KV_INDEX_ERROR, "Dimension specified as ", d, " but tensor has no dimensions");
    return m.strides[wrap(d, m.dim)];
  }
  int64_t storage_offset() const { return meta().offset; }
  ScalarType scalar_type() const { return p_ ? (ScalarType)meta().dtype : ScalarType::Undefined; }
  caffe2::TypeMeta dtype() const { return caffe2::TypeMeta(scalar_type()); }
  DeprecatedTypeProperties type() const { return DeprecatedTypeProperties(scalar_type(), is_cuda()); }
  size_t itemsize() const { return elementSize(scalar_type()); }
  int64_t element_size() const { return (int64_t)itemsize(); }
  size_t nbytes() const { return (size_t)numel() * itemsize(); }
  Device device() const { KvMeta m = meta(); return Device((DeviceType)m.device_type, m.device_index); }
  int64_t get_device() const { return meta().device_index; }
  bool is_cuda() const { return p_ && meta().device_type == 1; }
  bool is_cpu() const { return p_ && meta().device_type == 0; }
  bool is_floating_point() const { return isFloatingType(scalar_type()); }
  bool is_contiguous() const { return meta().contiguous; }
  bool requires_grad() const { return meta().requires_grad; }
  TensorOptions options() const {
    KvMeta m = meta();
    TensorOptions o;
    o.raw.dtype = m.dtype;
    o.raw.device_type = m.device_type;
    o.raw.device_index = m.device_index;
    return o;
  }

  void* data_ptr() const { return ::kv::api->data(need()); }
  const void* const_data_ptr() const { return data_ptr(); }
  void* mutable_data_ptr() const { return data_ptr(); }
  template <class T> T* data_ptr() const {
    constexpr ScalarType want = CppTypeToScalarType<std::remove_const_t<T>>::value;
    if (C10_UNLIKELY(scalar_type() != want))
      c10::detail::fail("expected scalar type ", want, " but found ", scalar_type());
    return static_cast<T*>(data_ptr());
  }
  template <class T> const T* const_data_ptr() const { return data_ptr<std::remove_const_t<T>>(); }
  template <class T> T* mutable_data_ptr() const { return data_ptr<T>(); }
  template <class T> T* data() const { return data_ptr<T>(); }
  template <class T> T item() const { return Scalar(::kv::api->item(need())).to<T>(); }
  Scalar item() const { return Scalar(::kv::api->item(need())); }

  template <class T, size_t N> TensorAccessor<T, N> accessor() const& {
    if (dim() != (int64_t)N)
      c10::detail::fail("TensorAccessor expected ", N, " dims but tensor has ", dim());
    return TensorAccessor<T, N>(data_ptr<T>(), sizes().data(), strides().data());
  }
  template <class T, size_t N> TensorAccessor<T, N> accessor() && = delete;
  template <class T, size_t N, template <class> class P = DefaultPtrTraits>
  GenericPackedTensorAccessor<T, N, P, int32_t> packed_accessor32() const& {
    if (numel() > 2147483647)
      c10::detail::fail("numel needs to be smaller than int32_t max; otherwise, please use packed_accessor64");
    return packed<T, N, P, int32_t>();
  }
  template <class T, size_t N, template <class> class P = DefaultPtrTraits>
  GenericPackedTensorAccessor<T, N, P, int64_t> packed_accessor64() const& { return packed<T, N, P, int64_t>(); }
  template <class T, size_t N, template <class> class P, class I>
  GenericPackedTensorAccessor<T, N, P, I> packed() const {
    if (dim() != (int64_t)N)
      c10::detail::fail("TensorAccessor expected ", N, " dims but tensor has ", dim());
    return GenericPackedTensorAccessor<T, N, P, I>(data_ptr<T>(), sizes().data(), strides().data());
  }

  Tensor contiguous(MemoryFormat f = MemoryFormat::Contiguous) const { return op(KV_CONTIGUOUS, {(int64_t)f}); }
  Tensor clone() const { return op(KV_CLONE); }
  Tensor detach() const { return op(KV_DETACH); }
  Tensor t() const { return op(KV_T); }
  Tensor view(IntArrayRef s) const { return op(KV_VIEW, s); }
  Tensor reshape(IntArrayRef s) const { return op(KV_RESHAPE, s); }
  Tensor expand(IntArrayRef s) const { return op(KV_EXPAND, s); }
  Tensor permute(IntArrayRef s) const { return op(KV_PERMUTE, s); }
  Tensor slice(int64_t d, int64_t b, int64_t e, int64_t step = 1) const { return op(KV_SLICE, {d, b, e, step}); }
  Tensor narrow(int64_t d, int64_t b, int64_t n) const { return op(KV_NARROW, {d, b, n}); }
  Tensor select(int64_t d, int64_t i) const { return op(KV_SELECT, {d, i}); }
  Tensor operator[](int64_t i) const { return select(0, i); }
  Tensor transpose(int64_t a, int64_t b) const { return op(KV_TRANSPOSE, {a, b}); }
  Tensor unsqueeze(int64_t d) const { return op(KV_UNSQUEEZE, {d}); }
  Tensor squeeze() const { return op(KV_SQUEEZE); }
  Tensor squeeze(int64_t d) const { return op(KV_SQUEEZE_DIM, {d}); }
  Tensor flatten(int64_t b = 0, int64_t e = -1) const { return op(KV_FLATTEN, {b, e}); }
  Tensor view_as(const Tensor& o) const { return view(o.sizes()); }
  Tensor reshape_as(const Tensor& o) const { return reshape(o.sizes()); }
  Tensor expand_as(const Tensor& o) const { return expand(o.sizes()); }
  Tensor to(ScalarType t) const { return op(KV_TO, {(int64_t)t, -1, -1}); }
  Tensor to(Device d) const { return op(KV_TO, {-1, (int64_t)d.type(), d.index()}); }
  Tensor to(DeviceType d) const { return to(Device(d)); }
  Tensor to(caffe2::TypeMeta t) const { return to(t.toScalarType()); }
  Tensor cpu() const { return to(Device(kCPU)); }
  Tensor cuda() const { return to(Device(kCUDA)); }
  Tensor& copy_(const Tensor& o) { ::kv::api->inplace(KV_COPY, need(), o.need(), KvScalar{}); return *this; }
  Tensor& zero_() { ::kv::api->inplace(KV_ZERO, need(), nullptr, KvScalar{}); return *this; }
  Tensor& fill_(const Scalar& s) { ::kv::api->inplace(KV_FILL, need(), nullptr, s.raw()); return *this; }
  const Tensor& copy_(const Tensor& o) const { ::kv::api->inplace(KV_COPY, need(), o.need(), KvScalar{}); return *this; }
};

inline Tensor empty(IntArrayRef s, TensorOptions o = {}) {
  return Tensor::adopt(::kv::api->make(KV_EMPTY, s.data(), (int64_t)s.size(), o.raw, KvScalar{}));
}
inline Tensor zeros(IntArrayRef s, TensorOptions o = {}) {
  return Tensor::adopt(::kv::api->make(KV_ZEROS, s.data(), (int64_t)s.size(), o.raw, KvScalar{}));
}
inline Tensor ones(IntArrayRef s, TensorOptions o = {}) {
  return Tensor::adopt(::kv::api->make(KV_ONES, s.data(), (int64_t)s.size(), o.raw, KvScalar{}));
}
inline Tensor full(IntArrayRef s, const Scalar& v, TensorOptions o = {}) {
  return Tensor::adopt(::kv::api->make(KV_FULL, s.data(), (int64_t)s.size(), o.raw, v.raw()));
}
namespace detail {
inline void* self(const Tensor& t) {
  if (!t.defined()) c10::detail::fail("Expected a proper Tensor but got None (or an undefined Tensor in C++)");
  return t.raw();
}
}  // namespace detail
inline Tensor empty_like(const Tensor& t, TensorOptions o = {}) {
  return Tensor::adopt(::kv::api->like(KV_EMPTY, detail::self(t), o.raw, KvScalar{}));
}
inline Tensor zeros_like(const Tensor& t, TensorOptions o = {}) {
  return Tensor::adopt(::kv::api->like(KV_ZEROS, detail::self(t), o.raw, KvScalar{}));
}
inline Tensor ones_like(const Tensor& t, TensorOptions o = {}) {
  return Tensor::adopt(::kv::api->like(KV_ONES, detail::self(t), o.raw, KvScalar{}));
}
inline Tensor full_like(const Tensor& t, const Scalar& v, TensorOptions o = {}) {
  return Tensor::adopt(::kv::api->like(KV_FULL, detail::self(t), o.raw, v.raw()));
}
inline TensorOptions dtype(ScalarType t) { return TensorOptions(t); }
inline TensorOptions dtype(caffe2::TypeMeta t) { return TensorOptions(t); }
inline TensorOptions device(Device d) { return TensorOptions(d); }
inline TensorOptions requires_grad(bool b = true) { return TensorOptions().requires_grad(b); }

inline int get_num_threads() { return (int)::kv::api->threads(); }
inline int64_t divup(int64_t x, int64_t y) { return (x + y - 1) / y; }

// As in stock: threads only when the candidate asks for OpenMP, one contiguous chunk a thread.
template <class F>
inline void parallel_for(int64_t begin, int64_t end, int64_t grain_size, const F& f) {
  if (begin >= end) return;
#ifdef _OPENMP
  const int64_t n = end - begin;
  if (n > grain_size && n > 1 && !omp_in_parallel() && get_num_threads() > 1) {
    std::exception_ptr first;
#pragma omp parallel
    {
      int64_t threads = omp_get_num_threads();
      if (grain_size > 0) {
        const int64_t useful = divup(n, grain_size);
        if (useful < threads) threads = useful;
      }
      const int64_t chunk = divup(n, threads), b = begin + omp_get_thread_num() * chunk;
      if (b < end) {
        try {
          f(b, b + chunk < end ? b + chunk : end);
        } catch (...) {
#pragma omp critical(kv_first_exception)
          if (!first) first = std::current_exception();
        }
      }
    }
    if (first) std::rethrow_exception(first);
    return;
  }
#endif
  f(begin, end);
}
}  // namespace at

// The long names of the types belong to torch alone, as in stock.
namespace torch {
using namespace at;
using namespace c10;
constexpr ScalarType kUInt8 = kByte, kInt8 = kChar, kInt16 = kShort, kInt32 = kInt, kInt64 = kLong,
                     kFloat16 = kHalf, kFloat32 = kFloat, kFloat64 = kDouble;
}  // namespace torch

namespace c10 {
#ifdef _GLIBCXX_OPTIONAL
using std::optional;
using std::nullopt;
using std::make_optional;
#endif
}  // namespace c10

namespace torch {
using namespace at;
using at::Tensor;
using c10::ScalarType;
using c10::TensorOptions;
using c10::Device;
using c10::DeviceType;
using c10::IntArrayRef;
using Dtype = c10::ScalarType;
}  // namespace torch

namespace detail {
inline c10::ScalarType scalar_type(c10::ScalarType s) { return s; }
#ifdef KV_DISPATCH_ON_TYPE
inline c10::ScalarType scalar_type(const at::DeprecatedTypeProperties& t) { return t.scalarType(); }
#endif
}  // namespace detail

#define AT_DISPATCH_SWITCH(TYPE, NAME, ...)                                                       \
  [&] {                                                                                           \
    const auto& the_type = TYPE;                                                                  \
    constexpr const char* at_dispatch_name = NAME;                                                \
    ::c10::ScalarType _st = ::detail::scalar_type(the_type);                                      \
    switch (_st) {                                                                                \
      __VA_ARGS__                                                                                 \
      default:                                                                                    \
        ::c10::detail::fail_as(KV_NOT_IMPLEMENTED_ERROR, '"', at_dispatch_name,                   \
                               "\" not implemented for '", _st, "'");                             \
    }                                                                                             \
  }()
#define AT_DISPATCH_CASE(enum_type, ...)                                                \
  case enum_type: {                                                                     \
    using scalar_t [[maybe_unused]] = ::c10::impl::ScalarTypeToCPPTypeT<enum_type>;     \
    return __VA_ARGS__();                                                               \
  }
#define AT_DISPATCH_CASE_FLOATING_TYPES(...)             \
  AT_DISPATCH_CASE(at::ScalarType::Double, __VA_ARGS__)  \
  AT_DISPATCH_CASE(at::ScalarType::Float, __VA_ARGS__)
#define AT_DISPATCH_CASE_FLOATING_TYPES_AND_HALF(...)  \
  AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__)         \
  AT_DISPATCH_CASE(at::ScalarType::Half, __VA_ARGS__)
#define AT_DISPATCH_CASE_INTEGRAL_TYPES(...)             \
  AT_DISPATCH_CASE(at::ScalarType::Byte, __VA_ARGS__)    \
  AT_DISPATCH_CASE(at::ScalarType::Char, __VA_ARGS__)    \
  AT_DISPATCH_CASE(at::ScalarType::Int, __VA_ARGS__)     \
  AT_DISPATCH_CASE(at::ScalarType::Long, __VA_ARGS__)    \
  AT_DISPATCH_CASE(at::ScalarType::Short, __VA_ARGS__)
#define AT_DISPATCH_CASE_ALL_TYPES(...)         \
  AT_DISPATCH_CASE_INTEGRAL_TYPES(__VA_ARGS__)  \
  AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES(TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__))
#define AT_DISPATCH_FLOATING_TYPES_AND_HALF(TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_FLOATING_TYPES_AND_HALF(__VA_ARGS__))
#define AT_DISPATCH_FLOATING_TYPES_AND(S1, TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__) AT_DISPATCH_CASE(S1, __VA_ARGS__))
#define AT_DISPATCH_FLOATING_TYPES_AND2(S1, S2, TYPE, NAME, ...)                           \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__)              \
                     AT_DISPATCH_CASE(S1, __VA_ARGS__) AT_DISPATCH_CASE(S2, __VA_ARGS__))
#define AT_DISPATCH_INTEGRAL_TYPES(TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_INTEGRAL_TYPES(__VA_ARGS__))
#define AT_DISPATCH_ALL_TYPES(TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_ALL_TYPES(__VA_ARGS__))
#define AT_DISPATCH_ALL_TYPES_AND(S1, TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_ALL_TYPES(__VA_ARGS__) AT_DISPATCH_CASE(S1, __VA_ARGS__))
#define AT_DISPATCH_ALL_TYPES_AND2(S1, S2, TYPE, NAME, ...)                      \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_ALL_TYPES(__VA_ARGS__)         \
                     AT_DISPATCH_CASE(S1, __VA_ARGS__) AT_DISPATCH_CASE(S2, __VA_ARGS__))

#pragma GCC visibility pop
