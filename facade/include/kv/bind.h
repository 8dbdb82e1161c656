// Bindings without pybind11: each bound function gets a small trampoline made by templates, which
// takes and gives `KvValue`s; the shim turns those into Python objects.
//
// Covered: `PYBIND11_MODULE(name, m) { m.def("f", &f, "doc", py::arg("x") = 1); }` with functions and
// lambdas. Argument and result types without a `Caster` do not compile, so the builder falls back.
#pragma once
#include <kv/core.h>

#pragma GCC visibility push(hidden)

namespace kv {
template <class T, class = void> struct Caster {
  static_assert(sizeof(T) == 0, "kv: no conversion for this type in the thin bindings");
};

template <> struct Caster<at::Tensor> {
  static const char* name() { return "torch.Tensor"; }
  static bool load(const KvValue& v, at::Tensor& out) {
    if (v.tag == KV_NONE) return true;  // as in stock: None is an undefined tensor
    if (v.tag != KV_TENSOR) return false;
    api->retain(v.tensor);
    out = at::Tensor::adopt(v.tensor);
    return true;
  }
  static void give(at::Tensor t, KvValue* out) {
    out->tag = t.defined() ? KV_TENSOR : KV_NONE;
    out->tensor = t.leak();
  }
};
template <> struct Caster<bool> {
  static const char* name() { return "bool"; }
  static bool load(const KvValue& v, bool& out) {
    if (v.tag != KV_BOOL) return false;
    out = v.i != 0;
    return true;
  }
  static void give(bool b, KvValue* out) { out->tag = KV_BOOL; out->i = b; }
};
template <class T>
struct Caster<T, std::enable_if_t<std::is_integral<T>::value && !std::is_same<T, bool>::value &&
                                  !std::is_same<T, char>::value>> {
  static const char* name() { return "int"; }
  static bool load(const KvValue& v, T& out) {
    if (v.tag != KV_INT && v.tag != KV_BOOL) return false;
    out = (T)v.i;
    return (int64_t)out == v.i && (std::is_signed<T>::value || v.i >= 0);
  }
  static void give(T i, KvValue* out) { out->tag = KV_INT; out->i = (int64_t)i; }
};
template <class T> struct Caster<T, std::enable_if_t<std::is_floating_point<T>::value>> {
  static const char* name() { return "float"; }
  static bool load(const KvValue& v, T& out) {
    if (v.tag == KV_FLOAT) out = (T)v.d;
    else if (v.tag == KV_INT || v.tag == KV_BOOL) out = (T)v.i;
    else if (v.tag == KV_TENSOR) {
      KvMeta m;
      api->meta(v.tensor, &m);
      if (m.numel != 1) return false;
      out = c10::Scalar(api->item(v.tensor)).to<T>();
    } else return false;
    return true;
  }
  static void give(T d, KvValue* out) { out->tag = KV_FLOAT; out->d = (double)d; }
};
inline void give_text(const char* s, size_t n, KvValue* out) {
  char* copy = static_cast<char*>(malloc(n + 1));
  memcpy(copy, s, n);
  copy[n] = 0;
  out->tag = KV_STR;
  out->n = (int64_t)n;
  out->s = copy;
}
inline KvValue* give_items(int32_t tag, size_t n, KvValue* out) {
  out->tag = tag;
  out->n = (int64_t)n;
  out->items = static_cast<KvValue*>(calloc(n ? n : 1, sizeof(KvValue)));
  return out->items;
}
#ifdef _GLIBCXX_STRING
template <> struct Caster<std::string> {
  static const char* name() { return "str"; }
  static bool load(const KvValue& v, std::string& out) {
    if (v.tag != KV_STR) return false;
    out.assign(v.s, (size_t)v.n);
    return true;
  }
  static void give(const std::string& s, KvValue* out) { give_text(s.data(), s.size(), out); }
};
#endif
#ifdef _GLIBCXX_VECTOR
template <class T> struct Caster<std::vector<T>> {
  static const char* name() { return "list"; }
  static bool load(const KvValue& v, std::vector<T>& out) {
    if (v.tag != KV_LIST && v.tag != KV_TUPLE) return false;
    for (int64_t i = 0; i < v.n; ++i) {
      T one{};
      if (!Caster<T>::load(v.items[i], one)) return false;
      out.push_back(std::move(one));
    }
    return true;
  }
  static void give(const std::vector<T>& v, KvValue* out) {
    KvValue* items = give_items(KV_LIST, v.size(), out);
    for (size_t i = 0; i < v.size(); ++i) Caster<T>::give(v[i], items + i);
  }
};
#endif
#ifdef _GLIBCXX_OPTIONAL
template <class T> struct Caster<std::optional<T>> {
  static const char* name() { return "optional"; }
  static bool load(const KvValue& v, std::optional<T>& out) {
    if (v.tag == KV_NONE) return true;
    T one{};
    if (!Caster<T>::load(v, one)) return false;
    out = std::move(one);
    return true;
  }
  static void give(const std::optional<T>& v, KvValue* out) {
    if (v) Caster<T>::give(*v, out);
    else out->tag = KV_NONE;
  }
};
#endif
#ifdef _GLIBCXX_TUPLE
template <class... T> struct Caster<std::tuple<T...>> {
  static const char* name() { return "tuple"; }
  template <size_t... I>
  static void fill(const std::tuple<T...>& v, KvValue* items, std::index_sequence<I...>) {
    (Caster<std::decay_t<T>>::give(std::get<I>(v), items + I), ...);
  }
  static void give(const std::tuple<T...>& v, KvValue* out) {
    fill(v, give_items(KV_TUPLE, sizeof...(T), out), std::index_sequence_for<T...>());
  }
};
#endif
template <class A, class B> struct Caster<std::pair<A, B>> {
  static const char* name() { return "tuple"; }
  static void give(const std::pair<A, B>& v, KvValue* out) {
    KvValue* items = give_items(KV_TUPLE, 2, out);
    Caster<A>::give(v.first, items);
    Caster<B>::give(v.second, items + 1);
  }
};

template <size_t I, class T> struct Slot { T value{}; };
template <class S, class... T> struct Slots;
template <size_t... I, class... T>
struct Slots<std::index_sequence<I...>, T...> : Slot<I, T>... {
  bool load(const KvValue* v) { return (Caster<T>::load(v[I], static_cast<Slot<I, T>&>(*this).value) && ...); }
  template <class F> decltype(auto) apply(F& f) { return f(static_cast<Slot<I, T>&>(*this).value...); }
};
// By-value parameters and references both take the slot's lvalue; rvalue references do not compile.
template <class F, class R, class... A> struct Trampoline {
  static bool call(void* context, const KvValue* args, int64_t n, KvValue* out) {
    if (n != (int64_t)sizeof...(A)) return false;
    Slots<std::index_sequence_for<A...>, std::remove_cv_t<std::remove_reference_t<A>>...> slots;
    if (!slots.load(args)) return false;
    F& f = *reinterpret_cast<F*>(context);
    if constexpr (std::is_void<R>::value) {
      slots.apply(f);
      out->tag = KV_NONE;
    } else {
      Caster<std::remove_cv_t<std::remove_reference_t<R>>>::give(slots.apply(f), out);
    }
    return true;
  }
  static const char* signature() {
    static char text[512];
    int k = snprintf(text, sizeof text, "(");
    int i = 0;
    ((k += k < 400 ? snprintf(text + k, sizeof text - k, "%sarg%d: %s", i ? ", " : "", i,
                              Caster<std::remove_cv_t<std::remove_reference_t<A>>>::name())
                   : 0,
      ++i),
     ...);
    snprintf(text + k, sizeof text - k, ")");
    return text;
  }
};
template <class F> struct Callable : Callable<decltype(&F::operator())> {};
template <class R, class... A> struct Callable<R (*)(A...)> {
  template <class F> using Call = Trampoline<F, R, A...>;
  static constexpr int64_t arity = sizeof...(A);
};
template <class C, class R, class... A> struct Callable<R (C::*)(A...) const> : Callable<R (*)(A...)> {};
template <class C, class R, class... A> struct Callable<R (C::*)(A...)> : Callable<R (*)(A...)> {};
}  // namespace kv

namespace pybind11 {
struct arg_v {
  const char* name;
  KvValue value;
};
struct arg {
  const char* name;
  explicit constexpr arg(const char* n) : name(n) {}
  template <class T> arg_v operator=(const T& v) const {
    arg_v out{name, KvValue{}};
    ::kv::Caster<T>::give(v, &out.value);
    return out;
  }
  arg_v operator=(const char* s) const {
    arg_v out{name, KvValue{}};
    ::kv::give_text(s, strlen(s), &out.value);
    return out;
  }
};
struct gil_scoped_release {};
template <class... T> struct call_guard {};

class module_ {
  void* m_;

  struct Extra {
    const char* doc = "";
    const char** names;
    KvValue* defaults;
    int64_t named = 0;
    void take(const char* d) { doc = d; }
    void take(const arg& a) { names[named] = a.name; defaults[named++].tag = -1; }
    void take(const arg_v& a) { names[named] = a.name; defaults[named++] = a.value; }
    template <class... T> void take(call_guard<T...>) {}
  };

 public:
  explicit module_(void* m) : m_(m) {}
  template <class F, class... E> module_& def(const char* name, F&& f, const E&... extra) {
    using D = std::decay_t<F>;
    using Call = typename ::kv::Callable<D>::template Call<D>;
    Extra e;
    e.names = static_cast<const char**>(calloc(sizeof...(E) + 1, sizeof(char*)));
    e.defaults = static_cast<KvValue*>(calloc(sizeof...(E) + 1, sizeof(KvValue)));
    (e.take(extra), ...);
    if (e.named && e.named != ::kv::Callable<D>::arity)
      c10::detail::fail("bindings of ", name, ": ", e.named, " py::arg for ", ::kv::Callable<D>::arity, " parameters");
    KvDef d{name, e.doc, Call::signature(), &Call::call, new D(std::forward<F>(f)), ::kv::Callable<D>::arity,
            e.named, e.names, e.defaults};
    ::kv::api->def(m_, &d);
    return *this;
  }
};
using module = module_;
}  // namespace pybind11

namespace torch {
template <class F> F&& wrap_pybind_function(F&& f) { return std::forward<F>(f); }
}  // namespace torch
namespace py = pybind11;

#define KV_MODULE(name, var)                                                                            \
  static void kv_body_##name(::pybind11::module_&);                                                     \
  extern "C" __attribute__((visibility("default"))) void kv_module_##name(const KvApi* a, void* m) {    \
    ::kv::api = a;                                                                                      \
    ::pybind11::module_ mod(m);                                                                         \
    kv_body_##name(mod);                                                                                \
  }                                                                                                     \
  static void kv_body_##name([[maybe_unused]] ::pybind11::module_& var)
#define PYBIND11_MODULE(name, var) KV_MODULE(name, var)

#pragma GCC visibility pop
