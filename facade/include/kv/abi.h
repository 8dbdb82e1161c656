// The contract between a candidate's object and the shim: plain C data and one table of functions.
//
// The candidate's object links no library of torch. It reaches tensors only through `KvApi`, which
// the shim (facade/shim.cpp, built once against the real headers) hands over when it loads the object.
// A tensor is an opaque pointer that owns one reference; null means "undefined tensor".
#pragma once
#include <exception>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern "C" {

enum KvTag : int32_t { KV_NONE, KV_TENSOR, KV_INT, KV_BOOL, KV_FLOAT, KV_STR, KV_LIST, KV_TUPLE };

// One Python value. Arguments are borrowed from the shim; a returned value is owned by the receiver
// (tensors one reference each, strings and item arrays from malloc).
struct KvValue {
  int32_t tag;
  int64_t n;  // length of a string, list or tuple
  union {
    void* tensor;
    int64_t i;
    double d;
    const char* s;
    KvValue* items;
  };
};

struct KvMeta {
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dim;
  int64_t numel;
  int64_t offset;        // storage offset in elements
  int8_t dtype;          // c10::ScalarType
  int8_t device_type;    // c10::DeviceType
  int8_t device_index;   // -1 on CPU
  int8_t contiguous;
  int8_t requires_grad;
};

// -1 means "not given" in every field.
struct KvOptions {
  int8_t dtype, device_type, device_index, requires_grad, pinned, memory_format;
};

struct KvScalar {
  int32_t tag;  // KV_INT, KV_BOOL or KV_FLOAT
  int64_t i;
  double d;
};

enum KvMake : int32_t { KV_EMPTY, KV_ZEROS, KV_ONES, KV_FULL };

enum KvOp : int32_t {
  KV_CONTIGUOUS, KV_CLONE, KV_DETACH, KV_VIEW, KV_RESHAPE, KV_SLICE, KV_SELECT, KV_TRANSPOSE, KV_PERMUTE,
  KV_UNSQUEEZE, KV_SQUEEZE, KV_SQUEEZE_DIM, KV_FLATTEN, KV_EXPAND, KV_NARROW, KV_T, KV_TO
};

enum KvInplace : int32_t { KV_COPY, KV_FILL, KV_ZERO };

// A bound function: false when the arguments do not fit its signature; exceptions pass through.
typedef bool (*KvCall)(void* context, const KvValue* args, int64_t n, KvValue* out);

struct KvDef {
  const char* name;
  const char* doc;
  const char* signature;      // for error messages, e.g. "(Tensor, int) -> Tensor"
  KvCall call;
  void* context;
  int64_t arity;
  int64_t named;              // how many of the trailing tables below are filled; 0 or arity
  const char* const* names;
  const KvValue* defaults;    // tag -1: no default
};

struct KvApi {
  void (*retain)(void*);
  void (*release)(void*);
  void (*meta)(void*, KvMeta*);
  void* (*data)(void*);
  void* (*make)(int32_t what, const int64_t* sizes, int64_t n, KvOptions, KvScalar);
  void* (*like)(int32_t what, void*, KvOptions, KvScalar);
  void* (*op)(int32_t what, void*, const int64_t* args, int64_t n);
  void (*inplace)(int32_t what, void*, void* other, KvScalar);
  KvScalar (*item)(void*);
  int64_t (*threads)();
  void* (*stream)(int32_t device_index);
  void (*def)(void* module, const KvDef*);
};
}

enum KvError : int32_t {
  KV_RUNTIME_ERROR, KV_INDEX_ERROR, KV_VALUE_ERROR, KV_TYPE_ERROR, KV_NOT_IMPLEMENTED_ERROR
};

namespace kv {
// What crosses from one side to the other when a check fails; `kind` picks the Python exception. Not a
// class c10::Error, because catch clauses match by name and the shim also knows the real one.
class __attribute__((visibility("hidden"))) Error : public std::exception {
  int32_t kind_;
  char* text_;

 public:
  Error(int32_t kind, char* text) : kind_(kind), text_(text) {}
  Error(const Error& o) : std::exception(o), kind_(o.kind_), text_(strdup(o.text_)) {}
  Error& operator=(const Error&) = delete;
  ~Error() override { free(text_); }
  int32_t kind() const noexcept { return kind_; }
  const char* what() const noexcept override { return text_; }
  const char* msg() const noexcept { return text_; }
  const char* what_without_backtrace() const noexcept { return text_; }
};
}  // namespace kv
