// The shim: the one object that is built against torch's real headers, once per torch and compiler.
//
// It is a Python extension with one function, `load(path, name)`: open a candidate's object, hand it the
// function table of kv/abi.h, collect the functions it binds, and return them as {name: callable}. A call
// turns Python arguments into `KvValue`s, tries the overloads of that name in order, and turns the result
// back. Any C++ exception inside becomes a Python one with its text, as torch's own bindings do.
// Only lean headers: no torch/extension.h. The current CUDA stream is asked from torch's Python side, so
// this file is the same on every machine.
#include <dlfcn.h>

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "include/kv/abi.h"

namespace {

// ---- tensors ---------------------------------------------------------------------------------------------

using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

c10::TensorImpl* impl(void* p) { return static_cast<c10::TensorImpl*>(p); }
at::Tensor borrow(void* p) { return at::Tensor(Pointer::reclaim_copy(impl(p))); }
void* own(at::Tensor t) { return t.defined() ? t.unsafeReleaseTensorImpl() : nullptr; }

int32_t kind(const c10::Error& e) {
  if (dynamic_cast<const c10::IndexError*>(&e)) return KV_INDEX_ERROR;
  if (dynamic_cast<const c10::ValueError*>(&e)) return KV_VALUE_ERROR;
  if (dynamic_cast<const c10::TypeError*>(&e)) return KV_TYPE_ERROR;
  if (dynamic_cast<const c10::NotImplementedError*>(&e)) return KV_NOT_IMPLEMENTED_ERROR;
  return KV_RUNTIME_ERROR;
}
PyObject* python_type(int32_t kind) {
  switch (kind) {
    case KV_INDEX_ERROR: return PyExc_IndexError;
    case KV_VALUE_ERROR: return PyExc_ValueError;
    case KV_TYPE_ERROR: return PyExc_TypeError;
    case KV_NOT_IMPLEMENTED_ERROR: return PyExc_NotImplementedError;
    default: return PyExc_RuntimeError;
  }
}
// c10::Error carries a backtrace in what(); candidates and users get the message alone.
template <class F> auto plain(F f) -> decltype(f()) {
  try {
    return f();
  } catch (const c10::Error& e) {
    throw kv::Error(kind(e), strdup(e.what_without_backtrace()));
  }
}

c10::TensorOptions options(const KvOptions& o) {
  c10::TensorOptions out;
  if (o.dtype >= 0) out = out.dtype(static_cast<c10::ScalarType>(o.dtype));
  if (o.device_type >= 0)
    out = out.device(c10::Device(static_cast<c10::DeviceType>(o.device_type), o.device_index));
  if (o.pinned >= 0) out = out.pinned_memory(o.pinned != 0);
  return out;
}
std::optional<c10::MemoryFormat> format(const KvOptions& o) {
  if (o.memory_format < 0) return std::nullopt;
  return static_cast<c10::MemoryFormat>(o.memory_format);
}
at::Scalar scalar(const KvScalar& s) {
  if (s.tag == KV_FLOAT) return at::Scalar(s.d);
  if (s.tag == KV_BOOL) return at::Scalar(s.i != 0);
  return at::Scalar(s.i);
}
at::Tensor graded(at::Tensor t, const KvOptions& o) {
  if (o.requires_grad > 0) t.set_requires_grad(true);
  return t;
}

void kv_retain(void* p) { c10::raw::intrusive_ptr::incref(impl(p)); }
void kv_release(void* p) { (void)Pointer::reclaim(impl(p)); }

void kv_meta(void* p, KvMeta* m) {
  plain([&] {
    const c10::TensorImpl* t = impl(p);
    const auto sizes = t->sizes(), strides = t->strides();
    const c10::Device device = t->device();
    m->sizes = sizes.data();
    m->strides = strides.data();
    m->dim = t->dim();
    m->numel = t->numel();
    m->offset = t->storage_offset();
    m->dtype = static_cast<int8_t>(c10::typeMetaToScalarType(t->dtype()));
    m->device_type = static_cast<int8_t>(device.type());
    m->device_index = device.index();
    m->contiguous = t->is_contiguous();
    m->requires_grad = t->requires_grad();
  });
}
void* kv_data(void* p) {
  return plain([&] { return borrow(p).data_ptr(); });
}

void* kv_make(int32_t what, const int64_t* sizes, int64_t n, KvOptions o, KvScalar v) {
  return plain([&] {
    const at::IntArrayRef s(sizes, n);
    const auto opt = options(o);
    switch (what) {
      case KV_ZEROS: return own(graded(at::zeros(s, opt), o));
      case KV_ONES: return own(graded(at::ones(s, opt), o));
      case KV_FULL: return own(graded(at::full(s, scalar(v), opt), o));
      default: return own(graded(at::empty(s, opt, format(o)), o));
    }
  });
}
void* kv_like(int32_t what, void* p, KvOptions o, KvScalar v) {
  return plain([&] {
    const at::Tensor t = borrow(p);
    const auto opt = options(o);
    switch (what) {
      case KV_ZEROS: return own(graded(at::zeros_like(t, opt, format(o)), o));
      case KV_ONES: return own(graded(at::ones_like(t, opt, format(o)), o));
      case KV_FULL: return own(graded(at::full_like(t, scalar(v), opt, format(o)), o));
      default: return own(graded(at::empty_like(t, opt, format(o)), o));
    }
  });
}

at::Tensor to(const at::Tensor& t, const int64_t* a) {
  auto o = t.options();
  if (a[0] >= 0) o = o.dtype(static_cast<c10::ScalarType>(a[0]));
  if (a[1] >= 0) o = o.device(c10::Device(static_cast<c10::DeviceType>(a[1]), static_cast<int8_t>(a[2])));
  return t.to(o);
}

void* kv_op(int32_t what, void* p, const int64_t* a, int64_t n) {
  return plain([&] {
    const at::Tensor t = borrow(p);
    const at::IntArrayRef s(a, n);
    switch (what) {
      case KV_CONTIGUOUS: return own(t.contiguous(static_cast<c10::MemoryFormat>(a[0])));
      case KV_CLONE: return own(t.clone());
      case KV_DETACH: return own(t.detach());
      case KV_VIEW: return own(t.view(s));
      case KV_RESHAPE: return own(t.reshape(s));
      case KV_SLICE: return own(t.slice(a[0], a[1], a[2], a[3]));
      case KV_SELECT: return own(t.select(a[0], a[1]));
      case KV_TRANSPOSE: return own(t.transpose(a[0], a[1]));
      case KV_PERMUTE: return own(t.permute(s));
      case KV_UNSQUEEZE: return own(t.unsqueeze(a[0]));
      case KV_SQUEEZE: return own(t.squeeze());
      case KV_SQUEEZE_DIM: return own(t.squeeze(a[0]));
      case KV_FLATTEN: return own(t.flatten(a[0], a[1]));
      case KV_EXPAND: return own(t.expand(s));
      case KV_NARROW: return own(t.narrow(a[0], a[1], a[2]));
      case KV_T: return own(t.t());
      case KV_TO: return own(to(t, a));
      default: throw std::runtime_error("unknown operation");
    }
  });
}
void kv_inplace(int32_t what, void* p, void* other, KvScalar v) {
  plain([&] {
    at::Tensor t = borrow(p);
    if (what == KV_COPY) t.copy_(borrow(other));
    else if (what == KV_FILL) t.fill_(scalar(v));
    else t.zero_();
  });
}
KvScalar kv_item(void* p) {
  return plain([&] {
    const at::Scalar s = borrow(p).item();
    if (s.isFloatingPoint()) return KvScalar{KV_FLOAT, 0, s.toDouble()};
    if (s.isBoolean()) return KvScalar{KV_BOOL, s.toBool(), 0};
    return KvScalar{KV_INT, s.toLong(), 0};
  });
}
int64_t kv_threads() { return at::get_num_threads(); }

// torch._C._cuda_getCurrentRawStream(device): what torch's own generated code uses.
void* kv_stream(int32_t device) {
  const PyGILState_STATE gil = PyGILState_Ensure();
  void* out = nullptr;
  bool ok = false;
  if (PyObject* module = PyImport_ImportModule("torch._C")) {
    if (PyObject* r = PyObject_CallMethod(module, "_cuda_getCurrentRawStream", "i", device)) {
      out = PyLong_AsVoidPtr(r);
      ok = !PyErr_Occurred();
      Py_DECREF(r);
    }
    Py_DECREF(module);
  }
  PyErr_Clear();
  PyGILState_Release(gil);
  if (!ok) throw std::runtime_error("torch has no current CUDA stream here");
  return out;
}

// ---- Python values ---------------------------------------------------------------------------------------

// The arguments of one call; keeps converted lists alive until the call is over.
struct Arguments {
  std::deque<std::vector<KvValue>> lists;

  bool load(PyObject* o, KvValue* v) {
    if (o == Py_None) v->tag = KV_NONE;
    else if (THPVariable_Check(o)) {
      v->tag = KV_TENSOR;
      v->tensor = THPVariable_Unpack(o).unsafeGetTensorImpl();
    } else if (PyBool_Check(o)) {
      v->tag = KV_BOOL;
      v->i = o == Py_True;
    } else if (PyFloat_Check(o)) {
      v->tag = KV_FLOAT;
      v->d = PyFloat_AS_DOUBLE(o);
    } else if (PyUnicode_Check(o)) {
      Py_ssize_t n = 0;
      v->tag = KV_STR;
      v->s = PyUnicode_AsUTF8AndSize(o, &n);
      v->n = n;
      if (!v->s) return false;
    } else if (PyList_Check(o) || PyTuple_Check(o)) {
      return load_list(o, v);
    } else {
      return load_number(o, v);
    }
    return true;
  }

  bool load_list(PyObject* o, KvValue* v) {
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(o);
    lists.emplace_back(n);
    std::vector<KvValue>& items = lists.back();
    for (Py_ssize_t i = 0; i < n; ++i)
      if (!load(PySequence_Fast_GET_ITEM(o, i), &items[i])) return false;
    v->tag = PyTuple_Check(o) ? KV_TUPLE : KV_LIST;
    v->n = n;
    v->items = items.data();
    return true;
  }

  // Integers and whatever behaves like one (numpy), then whatever can be a float.
  bool load_number(PyObject* o, KvValue* v) {
    if (PyIndex_Check(o)) {
      if (PyObject* i = PyNumber_Index(o)) {
        v->tag = KV_INT;
        v->i = PyLong_AsLongLong(i);
        Py_DECREF(i);
        if (!PyErr_Occurred()) return true;
      }
      PyErr_Clear();
      return false;
    }
    const double d = PyFloat_AsDouble(o);
    if (PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    v->tag = KV_FLOAT;
    v->d = d;
    return true;
  }
};

// Takes over what `v` owns, also on failure.
PyObject* give(KvValue* v) {
  switch (v->tag) {
    case KV_TENSOR: return THPVariable_Wrap(at::Tensor(Pointer::reclaim(impl(v->tensor))));
    case KV_INT: return PyLong_FromLongLong(v->i);
    case KV_BOOL: return PyBool_FromLong(v->i != 0);
    case KV_FLOAT: return PyFloat_FromDouble(v->d);
    case KV_STR: {
      PyObject* s = PyUnicode_DecodeUTF8(v->s, v->n, "replace");
      free(const_cast<char*>(v->s));
      return s;
    }
    case KV_LIST:
    case KV_TUPLE: {
      const bool tuple = v->tag == KV_TUPLE;
      PyObject* out = tuple ? PyTuple_New(v->n) : PyList_New(v->n);
      for (int64_t i = 0; i < v->n; ++i) {
        PyObject* item = give(&v->items[i]);
        if (!item || !out) {
          Py_XDECREF(item);
          Py_CLEAR(out);
        } else if (tuple) {
          PyTuple_SET_ITEM(out, i, item);
        } else {
          PyList_SET_ITEM(out, i, item);
        }
      }
      free(v->items);
      return out;
    }
    default: Py_RETURN_NONE;
  }
}

// ---- bound functions -------------------------------------------------------------------------------------

struct Overload {
  std::string signature;
  KvCall call;
  void* context;
  size_t arity;
  std::vector<std::string> names;
  std::vector<KvValue> defaults;
};
struct Function {
  std::string name, doc;
  std::vector<Overload> overloads;
  PyMethodDef method;
};
struct Module {
  std::vector<std::unique_ptr<Function>> functions;
};

void kv_def(void* module, const KvDef* d) {
  auto& functions = static_cast<Module*>(module)->functions;
  Function* f = nullptr;
  for (auto& known : functions)
    if (known->name == d->name) f = known.get();
  if (!f) {
    functions.push_back(std::make_unique<Function>());
    f = functions.back().get();
    f->name = d->name;
    f->doc = d->doc;
  }
  Overload o{d->signature, d->call, d->context, static_cast<size_t>(d->arity), {}, {}};
  for (int64_t i = 0; i < d->named; ++i) {
    o.names.emplace_back(d->names[i]);
    o.defaults.push_back(d->defaults[i]);
  }
  f->overloads.push_back(std::move(o));
}

const KvApi api = {kv_retain, kv_release, kv_meta, kv_data,   kv_make,   kv_like,
                   kv_op,     kv_inplace, kv_item, kv_threads, kv_stream, kv_def};

// Positional, keyword and default arguments in order; false when they do not fit this overload.
bool arrange(const Overload& o, PyObject* args, PyObject* kwargs, Arguments* store, std::vector<KvValue>* out) {
  const size_t given = PyTuple_GET_SIZE(args);
  size_t used = kwargs ? PyDict_GET_SIZE(kwargs) : 0;
  if (given > o.arity) return false;
  out->assign(o.arity, KvValue{});
  for (size_t i = 0; i < o.arity; ++i) {
    PyObject* item = nullptr;
    if (i < given) {
      item = PyTuple_GET_ITEM(args, i);
    } else if (i < o.names.size() && kwargs) {
      item = PyDict_GetItemString(kwargs, o.names[i].c_str());
      if (item) --used;
    }
    if (item) {
      if (!store->load(item, &(*out)[i])) return false;
    } else if (i < o.defaults.size() && o.defaults[i].tag >= 0) {
      (*out)[i] = o.defaults[i];
    } else {
      return false;
    }
  }
  return used == 0;
}

PyObject* mismatch(const Function& f) {
  std::string text = f.name + "(): incompatible function arguments. The following argument types are supported:\n";
  int i = 0;
  for (const Overload& o : f.overloads) text += "    " + std::to_string(++i) + ". " + o.signature + "\n";
  PyErr_SetString(PyExc_TypeError, text.c_str());
  return nullptr;
}

PyObject* call(PyObject* self, PyObject* args, PyObject* kwargs) {
  const auto* f = static_cast<Function*>(PyCapsule_GetPointer(self, nullptr));
  if (!f) return nullptr;
  try {
    for (const Overload& o : f->overloads) {
      Arguments store;
      std::vector<KvValue> values;
      if (!arrange(o, args, kwargs, &store, &values)) continue;
      KvValue out{};
      if (o.call(o.context, values.data(), static_cast<int64_t>(values.size()), &out)) return give(&out);
    }
    return mismatch(*f);
  } catch (const kv::Error& e) {
    PyErr_SetString(python_type(e.kind()), e.what());
  } catch (const c10::Error& e) {
    PyErr_SetString(python_type(kind(e)), e.what_without_backtrace());
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "Unknown C++ exception");
  }
  return nullptr;
}

std::string without(std::string text, const std::string& path) {
  for (size_t at = text.find(path); at != std::string::npos; at = text.find(path)) text.replace(at, path.size(), "kernel.so");
  return text;
}

// load(path, name) -> {function name: callable}. The object and its functions live as long as the process.
PyObject* load(PyObject*, PyObject* args) {
  const char *path = nullptr, *name = nullptr;
  if (!PyArg_ParseTuple(args, "ss", &path, &name)) return nullptr;
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    PyErr_SetString(PyExc_ImportError, without(dlerror(), path).c_str());
    return nullptr;
  }
  using Entry = void (*)(const KvApi*, void*);
  const auto entry = reinterpret_cast<Entry>(dlsym(handle, (std::string("kv_module_") + name).c_str()));
  if (!entry) {
    PyErr_Format(PyExc_ImportError, "dynamic module does not define module export function (PyInit_%s)", name);
    return nullptr;
  }
  auto* module = new Module;
  try {
    entry(&api, module);
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_ImportError, e.what());
    return nullptr;
  }
  PyObject* out = PyDict_New();
  for (auto& f : module->functions) {
    f->method = {f->name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                 METH_VARARGS | METH_KEYWORDS, f->doc.c_str()};
    PyObject* self = PyCapsule_New(f.get(), nullptr, nullptr);
    PyObject* function = self ? PyCFunction_NewEx(&f->method, self, nullptr) : nullptr;
    Py_XDECREF(self);
    if (!out || !function || PyDict_SetItemString(out, f->name.c_str(), function) < 0) {
      Py_XDECREF(function);
      Py_XDECREF(out);
      return nullptr;
    }
    Py_DECREF(function);
  }
  return out;
}

PyMethodDef methods[] = {{"load", load, METH_VARARGS, "load(path, name) -> {function name: callable}"},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kv_shim", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_kv_shim() { return PyModule_Create(&definition); }
