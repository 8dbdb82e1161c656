"""static_checks and native_checks: every rule with an answer it refuses and honest look-alikes.

`CPP` and `CUDA` are honest answers; each case edits one of them. A refused case names the rule that
must be among the findings; an accepted case must have no finding at all.
"""

# A case a line, like a table:
# ruff: noqa: E501

from __future__ import annotations

import random
import time

import pytest

from static_checks import RULES, check, check_native

CPP = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = r"""
#include <torch/extension.h>
#include <cmath>
torch::Tensor silu(torch::Tensor x) {
  auto out = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  float* b = out.data_ptr<float>();
  const int64_t n = x.numel();
  #pragma omp parallel for
  for (int64_t i = 0; i < n; ++i) b[i] = a[i] / (1.0f + std::exp(-a[i]));
  return out;
}
"""
ext = load_inline(name="silu", cpp_sources=source, functions=["silu"], extra_cflags=["-O3"])


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return ext.silu(x)
'''

CUDA = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
template <typename T>
__global__ void square_kernel(const T* __restrict__ a, T* __restrict__ b, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) b[i] = a[i] * a[i];
}
torch::Tensor square(torch::Tensor x) {
  TORCH_CHECK(x.is_cuda(), "x must be on the GPU");
  auto out = torch::empty_like(x);
  int n = x.numel();
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "square", ([&] {
    square_kernel<scalar_t><<<(n + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), n);
  }));
  return out;
}
"""
module = load_inline(
    name="square",
    cpp_sources="torch::Tensor square(torch::Tensor x);",
    cuda_sources=cuda_source,
    functions=["square"],
    extra_cuda_cflags=["-O3", "--use_fast_math"],
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.op = module

    def forward(self, x):
        return self.op.square(x)
'''


def cpp(
    forward: str = "return ext.silu(x)",
    init: str = "",
    head: str = "",
    tail: str = "",
    body: str = "",
    old: str = "",
    new: str = "",
) -> str:
    """The honest cpp answer, edited: other forward, more in __init__, module level, class, source."""
    code = CPP.replace("return ext.silu(x)", forward.replace("\n", "\n        "))
    code = code.replace("super().__init__()\n", f"super().__init__()\n        {init}\n")
    code = code.replace("class ModelNew", f"{head}\n\n\nclass ModelNew")
    if body:
        code = code.replace(
            "  auto out = torch::empty_like(x);", f"  {body}\n  auto out = torch::empty_like(x);"
        )
    if old:
        assert old in code
        code = code.replace(old, new)
    return code + tail


def cuda(old: str = "", new: str = "") -> str:
    """The honest CUDA answer with one replacement."""
    assert old in CUDA
    return CUDA.replace(old, new) if old else CUDA


def rules(code: str, target: str = "cpp", purity: str = "strict") -> list[str]:
    """Rule ids of the fatal findings."""
    return [finding.rule for finding in check(code, target, purity) if finding.fatal]


REFUSED: list[tuple[str, str]] = [
    # Python: the answer itself
    ("format", "def f(:\n"),
    ("format", "x = '\0'"),
    ("format", "import torch\nx = 1\n"),
    ("format", "x = " + "(" * 150 + "1" + ")" * 150),
    ("format", cpp(old="class ModelNew(nn.Module)", new="class ModelNew")),
    ("format", cpp(old="class ModelNew(nn.Module)", new="class ModelNew(dict)")),
    ("format", cpp(old="def forward", new="def forwards")),
    ("format", "x = '" + "a" * 500_000 + "'"),
    ("try", cpp("try:\n    return ext.silu(x)\nexcept Exception:\n    return x")),
    ("try", cpp("try:\n    return ext.silu(x)\nfinally:\n    x = None")),
    ("try", cpp(head="import contextlib", forward="with contextlib.suppress(Exception):\n    return ext.silu(x)")),
    ("try", cpp(head="class Quiet:\n    def __exit__(self, *a):\n        return True")),
    ("inherit", cpp(old="class ModelNew(nn.Module)", new="class ModelNew(Model)")),
    ("inherit", cpp(head="class Model(nn.Module):\n    def forward(self, x):\n        return x\n\nM = Model",
                    old="class ModelNew(nn.Module)", new="class ModelNew(M)")),
    ("inherit", cpp("return super().forward(x)")),
    ("inherit", cpp(init="self.ref = Model()")),
    ("pass", cpp(old="    def __init__(self):\n        super().__init__()\n        \n\n    def forward(self, x):\n"
                     "        return ext.silu(x)", new="    pass")),
    ("pass", cpp("pass")),
    ("pass", cpp('"""nothing"""\n...')),
    # torch.nn and torch
    ("torch_nn", cpp(init="self.fc = nn.Linear(4, 4)")),
    ("torch_nn", cpp(head="from torch import nn as q", init="self.fc = q.Linear(4, 4)")),
    ("torch_nn", cpp(head="import torch as T", init="self.fc = T.nn.Conv2d(4, 4, 3)")),
    ("torch_nn", cpp(head="from torch.nn import ReLU as R", init="self.act = R()")),
    ("torch_nn", cpp(head="L = getattr(nn, 'Lin' + 'ear')")),
    ("torch_nn", cpp(head="import torch.nn.modules.linear as lin", init="self.fc = lin.Linear(4, 4)")),
    ("functional", cpp("return torch.nn.functional.silu(x)")),
    ("functional", cpp(head="import torch.nn.functional as F", forward="return F.silu(ext.silu(x))")),
    ("functional", cpp(head="from torch.nn.functional import silu as s", forward="return s(x)")),
    ("functional", cpp(head="from torch.nn import functional as G\nops = [G.silu]")),
    ("functional", cpp("return nn.functional.relu(ext.silu(x))")),
    ("torch_compute", cpp("return torch.relu(ext.silu(x))")),
    ("torch_compute", cpp(head="T = torch", forward="return T.matmul(x, x)")),
    ("torch_compute", cpp(head="from torch import matmul as mm", forward="return mm(x, x)")),
    ("torch_compute", cpp(head="op = torch.sigmoid", forward="return op(x)")),
    ("torch_compute", cpp(head="ops = {'a': torch.sigmoid}", forward="return ops['a'](x)")),
    ("torch_compute", cpp(init="self.op = torch.sigmoid", forward="return self.op(x)")),
    ("torch_compute", cpp("return getattr(torch, 're' + 'lu')(x)")),
    ("torch_compute", cpp(head="def help(t):\n    return torch.tanh(t)", forward="return help(ext.silu(x))")),
    ("torch_compute", cpp(head="g = lambda t: torch.tanh(t)", forward="return g(ext.silu(x))")),
    ("torch_compute", cpp(head="import functools", forward="return functools.partial(torch.add, x)(x)")),
    ("torch_compute", cpp("return torch.Tensor.relu(x)")),
    ("torch_compute", cpp("return torch.linalg.vector_norm(x)")),
    ("torch_compute", cpp("return sum([ext.silu(x), x])")),
    ("torch_compute", cpp(head="import operator", forward="return operator.add(x, x)")),
    ("torch_compute", cpp(head="import torch.functional as tf", forward="return tf.einsum('ij,jk', x, x)")),
    ("torch_compute", cpp("if not x.is_cuda:\n    return torch.nn.init.torch.relu(x)\nreturn ext.silu(x)")),
    ("tensor_method", cpp("return x.relu()")),
    ("tensor_method", cpp("y = ext.silu(x)\nreturn y.sum(dim=1)")),
    ("tensor_method", cpp("y = x.contiguous().view(-1)\nf = y.sigmoid\nreturn f()")),
    ("tensor_method", cpp("return x.__matmul__(x)")),
    ("tensor_method", cpp("return [x][0].softmax(1)")),
    ("tensor_method", cpp("return getattr(x, 'relu')()")),
    ("tensor_method", cpp(init="self.w = nn.Parameter(torch.ones(3))", forward="return self.w.add(1)")),
    ("tensor_method", cpp(old="def forward(self, x)", new="def forward(self, *x)",
                          forward="return x[0].relu()")),
    ("tensor_method", cpp("return x.cpu().numpy()")),
    ("tensor_operator", cpp("return ext.silu(x) + x")),
    ("tensor_operator", cpp("x += 1\nreturn ext.silu(x)")),
    ("tensor_operator", cpp("return x @ x.T")),
    ("tensor_operator", cpp("return -ext.silu(x)")),
    ("tensor_operator", cpp("return ext.silu(x) * (x > 0)")),
    ("tensor_operator", cpp(init="self.w = nn.Parameter(torch.ones(3))", forward="return ext.silu(x) * self.w")),
    ("tensor_operator", cpp(init="self.register_buffer('w', torch.ones(3))",
                            forward="y = self.helper(x)\nreturn ext.silu(y)",
                            tail="\n    def helper(self, t):\n        return t * 2\n")),
    ("compiler", cpp(init="self.f = torch.compile(ext.silu)")),
    ("compiler", cpp("return torch.ops.aten.silu(x)")),
    ("compiler", cpp("return torch._C._nn.silu(x)")),
    ("compiler", cpp(head="@torch.jit.script\ndef f(x):\n    return x")),
    # hidden access
    ("dynamic", cpp(head="exec('import torch')")),
    ("dynamic", cpp("return eval('torch.relu')(x)")),
    ("dynamic", cpp(head="e = __import__('torch')")),
    ("dynamic", cpp(head="g = globals()['torch']")),
    ("dynamic", cpp(head="import sys\nt = sys.modules['torch']")),
    ("dynamic", cpp(head="n = input\nf = getattr(torch, chr(114) + 'elu')")),
    ("dynamic", cpp(head="k = ().__class__.__base__.__subclasses__()")),
    ("dynamic", cpp("return torch.__dict__['relu'](x)")),
    ("dynamic", cpp(head="import os\nos.system('true')")),
    ("dynamic", cpp(head="import sys\nframe = sys._getframe(1)")),
    ("dynamic", cpp(init="self.register_forward_hook(lambda m, i, o: o)")),
    ("dynamic", cpp(head="import builtins as b" .replace("builtins", "os") + "\nb.execv('/bin/true', [])")),
    ("import", cpp(head="import ctypes")),
    ("import", cpp(head="import subprocess as s")),
    ("import", cpp(head="from importlib import import_module")),
    ("import", cpp(head="import gc, inspect")),
    ("import", cpp(head="import threading")),
    ("import", cpp(head="from torch import *")),
    ("import", cpp(head="from . import reference")),
    ("file", cpp(head="data = open('/tmp/x').read()")),
    ("file", cpp(head="w = torch.load('w.pt')")),
    ("file", cpp(head="import pathlib\nt = pathlib.Path('x').read_text()")),
    ("tamper", cpp(head="torch.allclose = lambda *a, **k: True")),
    ("tamper", cpp(head="torch.cuda.synchronize = lambda: None")),
    ("tamper", cpp(head="setattr(torch, 'equal', lambda *a: True)")),
    ("tamper", cpp(head="import time\ntime.perf_counter = lambda: 0.0")),
    ("tamper", cpp(head="torch.Tensor.__eq__ = lambda a, b: True")),
    ("tensor_subclass", cpp(head="class Lazy(torch.Tensor):\n    x = 1")),
    ("tensor_subclass", cpp(head="class L:\n    def __torch_function__(self, f, t, a, k):\n        return 0")),
    # the same by detours
    ("torch_compute", cpp(head="class W:\n    def __init__(self, x):\n        self.y = torch.relu(x)",
                          forward="return W(ext.silu(x)).y")),
    ("torch_compute", cpp(head="class W:\n    def __add__(self, o):\n        return torch.relu(o)",
                          forward="return W() + ext.silu(x)")),
    ("torch_compute", cpp(head="def deco(f):\n    def run(self, x):\n        return torch.relu(f(self, x))\n    return run",
                          old="    def forward", new="    @deco\n    def forward")),
    ("torch_compute", cpp(tail="\ndef fast(self, x):\n    return torch.relu(ext.silu(x))\n\nModelNew.forward = fast\n")),
    ("torch_compute", cpp(init="self.forward = self.other",
                          tail="\n    def other(self, x):\n        return torch.relu(ext.silu(x))\n")),
    ("torch_compute", cpp(tail="\ndef wrap(c):\n    def make():\n        m = c()\n        m.g = lambda x: torch.relu(x)\n"
                               "        return m\n    return make\n\nModelNew = wrap(ModelNew)\n")),
    ("torch_compute", cpp(tail="\n    @property\n    def y(self):\n        return torch.ones(3).softmax(0) + torch.relu(self.z)\n",
                          forward="return ext.silu(x, self.y)")),
    ("torch_compute", cpp(tail="\n    def __getattr__(self, name):\n        return torch.relu\n")),
    ("torch_compute", cpp("return type(x).relu(x)")),
    ("torch_compute", cpp("return torch.cuda.torch.relu(x)")),
    ("torch_compute", cpp(head="class Act(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
                               "        return torch.sigmoid(ext.silu(x))", forward="return Act.apply(x)")),
    ("tensor_method", cpp(head="class Act(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
                               "        return x.exp()", forward="return Act.apply(ext.silu(x))")),
    ("tensor_method", cpp("return list(map(lambda t: t, [x]))[0].T.relu()")),
    ("tensor_operator", cpp("a, b = ext.silu(x), x\nreturn a - b")),
    ("tensor_operator", cpp("return [t * 2 for t in (x, x)][0]")),
    ("dynamic", cpp(head="import os\nos.sys.modules['torch'].equal")),
    ("dynamic", cpp("return torch.__getattr__('relu')(x)")),
    ("dynamic", cpp(head="torch.utils.cpp_extension.os.system('true')")),
    ("import", cpp(head="torch.utils.cpp_extension.subprocess.run(['true'])")),
    # the kernel
    ("no_load_inline", "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x\n"),
    ("unused_kernel", cpp("return x")),
    ("unused_kernel", cpp(init="self.y = ext.silu(torch.ones(3))", forward="return x.clone()")),
    ("no_kernel", cpp(old="for (int64_t i = 0; i < n; ++i) b[i] = a[i] / (1.0f + std::exp(-a[i]));", new="")),
    ("no_kernel", cpp(old="  #pragma omp parallel for\n  for (int64_t i = 0; i < n; ++i)"
                          " b[i] = a[i] / (1.0f + std::exp(-a[i]));",
                      new="  // for (int i = 0; i < n; ++i)\n")),
    ("no_kernel", cpp(old="torch::Tensor silu(",
                      new="void unused(float* p) { for (int i = 0; i < 3; ++i) p[i] = 0; }\n"
                          "torch::Tensor relu(")),
    # C++
    ("native_compute", cpp(body="auto y = at::silu(x);")),
    ("native_compute", cpp(body="auto y = torch::matmul(x, x);")),
    ("native_compute", cpp(body="auto y = ::at::native::silu(x);")),
    ("native_compute", cpp(body="namespace q = at; auto y = q::relu(x);")),
    ("native_compute", cpp(body="using namespace at; auto y = matmul(x, x);")),
    ("native_compute", cpp(body="auto y = relu(x);")),
    ("native_compute", cpp(body="auto y = exp(x);")),
    ("native_compute", cpp(body="auto y = x.sigmoid();")),
    ("native_compute", cpp(body="auto y = x.contiguous().view({-1}).sum();")),
    ("native_compute", cpp(body="auto y = x * 2;")),
    ("native_compute", cpp(body="x += x;")),
    ("native_compute", cpp(body="auto y = -x;")),
    ("native_compute", cpp(body="x.mul_(2);")),
    ("native_compute", cpp(body="std::vector<torch::Tensor> v{x}; for (auto& t : v) t.exp_();")),
    ("native_compute", cpp(body="using T = torch::Tensor; T z = x; z = z.relu();")),
    ("native_compute", cpp(body="auto y = torch::nn::functional::silu(x);")),
    ("native_compute", cpp(body="torch::nn::Linear l(3, 4);")),
    ("native_compute", cpp(body="struct S { torch::Tensor t; } s{x}; s.t.relu_();")),
    ("native_compute", cpp(body="auto go = [](auto t) { return t.softmax(0); }; go(x);")),
    ("native_compute", cpp(body="auto y = id(x).exp();", old="torch::Tensor silu(",
                           new="torch::Tensor id(torch::Tensor t) { return t; }\ntorch::Tensor silu(")),
    ("native_compute", cpp(body="at::Tensor* p = &x; auto y = p->exp();")),
    ("native_compute", cpp(body="auto y = std::move(x).exp();")),
    ("native_compute", cpp(old="#include <cmath>", new="#define GO(x) at::silu(x)")),
    ("native_compute", cpp(body="auto y = at::mat\\\nmul(x, x);", old="r\"\"\"", new="r\"\"\"")),
    ("native_compute", cpp(body="auto y = P(si, lu)(x);", old="#include <cmath>", new="#define P(a, b) at::a##b")),
    ("native_compute", cpp(body="auto y = LIB::GLUE(ta, nh)(x);", old="#include <cmath>",
                           new="#define GLUE(a, b) a##b\n#define LIB GLUE(a, t)")),
    ("flags", cpp(old='"-O3"', new='"-O3", "-fplugin=./x.so"')),
    ("flags", cpp(old='["-O3"]', new='["-O3 -include /etc/passwd"]')),
    ("native_python", cpp(body='auto t = py::module_::import("torch");')),
    ("native_python", cpp(body='PyRun_SimpleString("x");')),
    ("native_python", cpp(body='py::object o; o.attr("relu");')),
    ("native_library", cpp(body="cblas_sgemm(a, b);")),
    ("native_system", cpp(body='system("true");')),
    ("native_system", cpp(body='std::system("true");')),
    ("native_system", cpp(body='auto f = popen; f("x", "r");')),
    ("native_system", cpp(body='void* h = dlopen("libc.so", 1);')),
    ("native_system", cpp(body="if (fork() == 0) return x;")),
    ("native_system", cpp(body='std::ifstream f("/proc/self/maps");')),
    ("native_system", cpp(body="std::thread t([] {}); t.detach();")),
    ("native_asm", cpp(body='asm volatile("syscall");')),
    ("native_include", cpp(old="#include <cmath>", new='#include "/etc/passwd"')),
    ("native_include", cpp(old="#include <cmath>", new='#include "../secret.h"')),
    ("native_include", cpp(old="#include <cmath>", new="#define H <cmath>\n#include H")),
    ("native_interpose", cpp(old="torch::Tensor silu(",
                             new='extern "C" int clock_gettime(int c, void* t) { return 0; }\ntorch::Tensor silu(')),
]  # fmt: skip

REFUSED_CUDA: list[tuple[str, str]] = [
    ("no_kernel", cuda("square_kernel<scalar_t><<<(n + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(",
                       "(void)(")),
    ("no_kernel", cuda("__global__ ", "")),
    ("no_kernel", cuda("square_kernel<scalar_t><<<(n + 255)", "// square_kernel<scalar_t><<<(n + 255)")),
    ("no_kernel", cuda("  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i < n) b[i] = a[i] * a[i];\n", "")),
    ("no_kernel", cuda('functions=["square"]', 'functions=["other"]')
     .replace("torch::Tensor square(torch::Tensor x);", "torch::Tensor other(torch::Tensor x) { return x; }")
     .replace("op.square", "op.other")),
    ("native_compute", cuda("return out;", "return at::matmul(x, out);")),
    ("native_library", cuda("return out;", "cublasSgemm(h, out); return out;")),
    ("native_library", cuda("return out;", "cub::DeviceReduce::Sum(p, n); return out;")),
    ("native_library", cuda("return out;", "thrust::sort(p, q); return out;")),
    ("native_asm", cuda("return out;", 'asm("nop"); return out;')),
    ("native_interpose", cuda("template <typename T>\n__global__",
                              "cudaError_t cudaEventElapsedTime(float* m, int a) { return 0; }\n"
                              "template <typename T>\n__global__")),
    ("tensor_operator", cuda("self.op.square(x)", "self.op.square(x) * 2")),
]  # fmt: skip

ACCEPTED: list[tuple[str, str]] = [
    ("plain", CPP),
    ("pass in a comment", cpp("# pass\n# try: except\nreturn ext.silu(x)")),
    ("try in strings", cpp("assert x.dim() > 0, 'try: torch.nn.functional.relu except pass'\nreturn ext.silu(x)")),
    ("pass as a real statement", cpp("if x.numel() == 0:\n    pass\nreturn ext.silu(x)")),
    ("words in C++ comments", cpp(body="// at::matmul(x), system(), try\n  /* torch::relu(x) */")),
    ("words in C++ strings", cpp(body='TORCH_CHECK(x.is_contiguous(), "at::relu(x) system(1)");')),
    ("empty_like", cpp("out = torch.empty_like(x)\nreturn ext.silu(x)")),
    ("views", cpp("y = x.contiguous().view(-1)\nreturn ext.silu(y).view(x.shape)")),
    ("shape arithmetic", cpp("n = x.shape[0] * x.size(1) + x.numel() // 2\nreturn ext.silu(x.view(-1)).view(x.size())")),
    ("grid arithmetic", cpp("b, c = x.shape[:2]\nk = (b + 255) // 256\nk *= 2\nassert k > 0\nreturn ext.silu(x)")),
    ("parameters", cpp(init="self.weight = nn.Parameter(torch.randn(3) / 3**0.5)\n        nn.init.ones_(self.weight)",
                       forward="return ext.silu(x.contiguous(), self.weight.t().contiguous())")),
    ("kaiming", cpp(head="import math", init="self.w = nn.Parameter(torch.empty(3, 3))\n"
                    "        nn.init.kaiming_uniform_(self.w, a=math.sqrt(5))")),
    ("buffers", cpp(init="self.register_buffer('w', torch.arange(9).float() * 0.5)", forward="return ext.silu(x, self.w)")),
    ("helper method", cpp("return self._run(x)", tail="\n    def _run(self, t):\n        return ext.silu(t.contiguous())\n")),
    ("helper function", cpp(head="def run(t: torch.Tensor, n: int):\n    return ext.silu(t, n * 2)",
                            forward="return run(x, x.size(0) + 1)")),
    ("lazy build", cpp(head="_built = None\n\ndef built():\n    global _built\n    if _built is None:\n"
                            "        _built = load_inline(name='silu', cpp_sources=source, functions=['silu'])\n"
                            "    return _built", forward="return built().silu(x)")),
    ("bound name of a torch function", cpp(old="silu(", new="softmax(").replace('["silu"]', '["softmax"]')),
    ("function kept on self", cpp(init="self.fn = ext.silu", forward="return self.fn(x)")),
    ("F as a size", cpp("N, F = x.shape\nreturn ext.silu(x.view(N * F))")),
    ("unused functional import", cpp(head="import torch.nn.functional as F")),
    ("getattr on self", cpp(init="self.w0 = nn.Parameter(torch.ones(1))", forward="return ext.silu(x, getattr(self, f'w{0}'))")),
    ("getattr on the extension", cpp("return getattr(ext, 'silu')(x)")),
    ("no_grad", cpp("with torch.no_grad():\n    return ext.silu(x)")),
    ("autograd function", cpp(head="class Silu(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
                                   "        return ext.silu(x)", forward="return Silu.apply(x)")),
    ("environment", cpp(head="import os\nos.environ['CXX'] = 'g++'")),
    ("dtype casts", cpp("return ext.silu(x.float().to(torch.float32))")),
    ("tuple result", cpp("y, m = ext.silu(x)\nreturn y.view_as(x), m")),
    ("module of modules", cpp(head="class Act(nn.Module):\n    def forward(self, x):\n        return ext.silu(x)",
                              init="self.acts = nn.ModuleList([Act(), Act()])",
                              forward="for act in self.acts:\n    x = act(x)\nreturn x")),
    ("sources in pieces", cpp(old="cpp_sources=source", new="cpp_sources=['#include <vector>', source + '// end']")),
    ("two extensions", cpp(head="ext2 = load_inline(name='b', cpp_sources=[source], functions='silu')",
                           forward="return ext2.silu(ext.silu(x))")),
    ("f-string source", cpp(old='r"""\n#include', new='f"""\n#include').replace("{\n", "{{\n").replace("\n}\n", "\n}}\n")),
    ("f-string with constants", cpp(head="LOW, HIGH = -0.8, 1.2\nsrc = f'// {LOW} {HIGH}' + source\n"
                                    "ext = load_inline(name='b', cpp_sources=[src], functions=['silu'])")),
    ("f-string with a value known only later", cpp(head="import os\nsrc = f'// {os.cpu_count()}\\n' + source\n"
                                    "ext = load_inline(name='b', cpp_sources=[src], functions=['silu'])")),
    ("format of a template", cpp(head="src = source.replace('silu', '%s') % ('silu',)\n"
                                 "ext = load_inline(name='b', cpp_sources=[src], functions=['silu'])")),
    ("pybind by hand", cpp(old="  return out;\n}\n",
                           new='  return out;\n}\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n  m.def("silu", &silu, "x");\n}\n')
     .replace(', functions=["silu"]', "")),
    ("pybind of a lambda", cpp(old="  return out;\n}\n",
                               new='  return out;\n}\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n'
                                   '  m.def("silu", [](torch::Tensor x) { return silu(x); });\n}\n')
     .replace(', functions=["silu"]', "")),
    ("scalar maths in C++", cpp(body="float m = max(1.0f, 2.0f); m = exp(m) + std::pow(m, 2) + tanh(m) - fabs(m);")),
    ("struct with a sum method", cpp(body="struct Box { float v; float sum() { return v; } }; Box box{1}; float s = box.sum() + 1;")),
    ("C++ plumbing", cpp(body="auto y = torch::zeros({x.size(0), 3}, x.options().dtype(torch::kFloat32)); y.copy_(y.contiguous());"
                              " auto sizes = x.sizes().vec(); int64_t k = x.size(0) * x.stride(0) + x.dim();")),
    ("local lambda on a tensor", cpp(body="auto scale = [](const torch::Tensor& t) { return t.numel(); }; auto k = scale(x);")),
    ("at::parallel_for", cpp(old="  #pragma omp parallel for\n  for", new="  at::parallel_for(0, n, 64, [&](int64_t p, int64_t q) {\n  for")
     .replace("int64_t i = 0; i < n;", "int64_t i = p; i < q;").replace("std::exp(-a[i]));", "std::exp(-a[i])); });")),
    ("macro for the loop", cpp(old="  #pragma omp parallel for\n  for (int64_t i = 0; i < n; ++i)", new="  LOOP(i, n)")
     .replace("#include <cmath>", "#define LOOP(i, n) for (int64_t i = 0; i < n; ++i)")),
    ("macro that pastes names", cpp(old="#include <cmath>", new="#include <cmath>\n#define MAKE(T) static T id_##T(T v) { return v; }\nMAKE(int)")),
    ("helper in C++", cpp(old="torch::Tensor silu(", new="static void run(const float* a, float* b, int64_t n) {\n"
                          "  for (int64_t i = 0; i < n; ++i) b[i] = a[i];\n}\ntorch::Tensor silu(")
     .replace("  #pragma omp parallel for\n  for (int64_t i = 0; i < n; ++i) b[i] = a[i] / (1.0f + std::exp(-a[i]));", "  run(a, b, n);")),
    ("variables named like system calls", cpp(body="float kill = 1.0f; int connect = 2; kill += connect; struct S { int open; } s; s.open = 3;")),
    ("joined threads", cpp(body="std::thread t([] {}); t.join();")),
    ("Model of its own name", cpp(head="class Model2(nn.Module):\n    def forward(self, x):\n        return ext.silu(x)",
                                  old="class ModelNew(nn.Module)", new="class ModelNew(Model2)")),
    ("print and assert", cpp("assert isinstance(x, torch.Tensor) and x.dtype == torch.float32\nreturn ext.silu(x)")),
    ("annotations", cpp(old="def forward(self, x)", new="def forward(self, x: torch.Tensor, n: int = 2) -> torch.Tensor",
                        forward="return ext.silu(x, n * 2 + 1)")),
    ("none checks", cpp(init="self.bias = None", forward="b = self.bias if self.bias is not None else x.new_zeros(1)\nreturn ext.silu(x, b)")),
    ("out variants", cpp("out = torch.empty(x.shape[0], 2 * x.shape[1], device=x.device, dtype=x.dtype)\next.silu(x, out)\nreturn out[:, : x.shape[1]]")),
    ("weights packed when they change", cpp(init="self.w = nn.Parameter(torch.ones(2, 2))\n        self.packed, self.version = None, -1",
        forward="if self.packed is None or self.w._version != self.version:\n    self.packed, self.version = self.w.t().contiguous(), self.w._version\nreturn ext.silu(x, self.packed)")),
    ("workspace reuse", cpp(init="self.space = None", forward="if self.space is None or self.space.shape != x.shape:\n    self.space = torch.empty_like(x)\nreturn ext.silu(x, self.space)")),
    ("default list of sizes", cpp("shape = list(x.shape) + [1]\nshape[-1] = 3\nreturn ext.silu(x).view(tuple(x.shape))")),
]  # fmt: skip

ACCEPTED_CUDA: list[tuple[str, str]] = [
    ("plain", CUDA),
    ("inline PTX", cuda("if (i < n) b[i]", 'asm volatile("mov.u32 %0, %%laneid;" : "=r"(n)); if (i < n) b[i]')),
    ("block-level cub", cuda("if (i < n) b[i]", "typedef cub::BlockReduce<float, 256> R; __shared__ typename R::TempStorage s; if (i < n) b[i]")),
    ("launch by API", cuda("square_kernel<scalar_t><<<(n + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(\n"
                           "        x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), n);",
                           "void* args[] = {&n}; cudaLaunchKernel((void*)square_kernel<scalar_t>, dim3(1), dim3(256), args, 0, 0);")),
    ("streams and graphs", cuda("return self.op.square(x)", "s = torch.cuda.Stream()\n        s.wait_stream(torch.cuda.current_stream())\n"
                                "        with torch.cuda.stream(s):\n            y = self.op.square(x)\n"
                                "        torch.cuda.current_stream().wait_stream(s)\n        return y")),
    ("guard", cuda("auto out", "const at::cuda::OptionalCUDAGuard g(x.device()); auto out")),
    ("macro launch", cuda("template <typename T>", "#define CHECK_CUDA(x) TORCH_CHECK(x.is_cuda(), #x)\ntemplate <typename T>")),
    ("launch helper", cuda("torch::Tensor square(torch::Tensor x) {",
                           "void go(const float* a, float* b, int n) {\n  square_kernel<float><<<n, 1>>>(a, b, n);\n}\n"
                           "torch::Tensor square(torch::Tensor x) {\n  go(x.data_ptr<float>(), x.data_ptr<float>(), 0);")),
    ("several strings", cuda('cuda_sources=cuda_source', 'cuda_sources=["#include <vector>", cuda_source]')),
    ("half types", cuda("int n = x.numel();", "int n = x.numel(); const at::Half* h = x.data_ptr<at::Half>(); c10::BFloat16 z;")),
    ("function pointer table", cuda("template <typename T>", "__device__ float twice(float v) { return v * 2; }\ntemplate <typename T>")),
]  # fmt: skip


def ids(cases: list[tuple[str, str]]) -> list[str]:
    return [f"{number}-{label.replace(' ', '_')}" for number, (label, _) in enumerate(cases)]


@pytest.mark.parametrize(("rule", "code"), REFUSED, ids=ids(REFUSED))
def test_refused_cpp(rule: str, code: str) -> None:
    assert rule in rules(code), check(code, "cpp")


@pytest.mark.parametrize(("rule", "code"), REFUSED_CUDA, ids=ids(REFUSED_CUDA))
def test_refused_cuda(rule: str, code: str) -> None:
    assert rule in rules(code, "cuda"), check(code, "cuda")


@pytest.mark.parametrize(("label", "code"), ACCEPTED, ids=ids(ACCEPTED))
def test_accepted_cpp(label: str, code: str) -> None:
    compile(code, label, "exec")
    assert check(code, "cpp") == []


@pytest.mark.parametrize(("label", "code"), ACCEPTED_CUDA, ids=ids(ACCEPTED_CUDA))
def test_accepted_cuda(label: str, code: str) -> None:
    compile(code, label, "exec")
    assert check(code, "cuda") == []


def test_every_rule_has_a_refused_case() -> None:
    assert {rule for rule, _ in REFUSED + REFUSED_CUDA} == set(RULES)


def test_finding_says_where() -> None:
    code = cpp("y = ext.silu(x)\nreturn torch.relu(y)", body="auto y = at::silu(x);")
    python, native = check(code, "cpp")[::-1]
    assert code.splitlines()[python.line - 1].strip() == python.evidence == "return torch.relu(y)"
    assert code.splitlines()[native.line - 1].strip() == native.evidence == "auto y = at::silu(x);"
    assert "torch.relu" in python.message and "at::silu" in native.message


def test_findings_are_deterministic() -> None:
    for _, code in REFUSED:
        assert check(code, "cpp") == check(code, "cpp")


def test_purity_library_allows_vendor_calls_only() -> None:
    vendor = cuda("return out;", "cublasSgemm(h, out); return out;")
    assert "native_library" in rules(vendor, "cuda", "strict")
    assert check(vendor, "cuda", "library") == []
    aten = cuda("return out;", "return at::matmul(x, out);")
    assert "native_compute" in rules(aten, "cuda", "library")


def test_constructor_may_compute_weights_only() -> None:
    made = "self.w = nn.Parameter(torch.relu(torch.randn(3)) * 2 + torch.ones(3).cumsum(0))"
    assert check(cpp(init=made), "cpp") == []
    assert "torch_compute" in rules(cpp(init=made, forward="self.__init__()\nreturn ext.silu(x)"))


def test_sources_seen_only_while_running() -> None:
    source = CPP.split('"""')[1]
    assert check_native([source], ["silu"], "cpp") == []
    swapped = source.replace("return out;", "return at::relu(out);")
    assert [f.rule for f in check_native([swapped], ["silu"], "cpp")] == ["native_compute"]
    assert [f.rule for f in check_native([source], ["other"], "cpp")] == ["no_kernel"]


def test_source_built_while_running_is_still_read() -> None:
    code = cpp(old="cpp_sources=source", new="cpp_sources=''.join(chr(ord(c)) for c in source)")
    assert check(code, "cpp") == []
    assert "native_compute" in rules(code.replace("return out;", "return at::relu(out);"))


def test_junk_never_raises() -> None:
    rng = random.Random(0)
    pieces = [CPP, CUDA, *(code for _, code in REFUSED[:40])]
    for _ in range(150):
        text = rng.choice(pieces)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(text))
            cut = rng.choice(
                ["", "(", "}", '"', "\n", "\\", "é", "\ud800", "<<<", "#define a a\n", "::"]
            )
            text = text[:at] + cut + text[at + rng.randrange(3) :]
        for target in ("cpp", "cuda"):
            assert all(finding.message for finding in check(text, target))
    for text in (
        "",
        "\ud800",
        "x" * 1000,
        "(" * 3000,
        "a=" * 3000,
        "-" * 5000 + "1",
        "lambda: " * 300,
    ):
        assert rules(text)


def test_deep_source_never_raises() -> None:
    for deep in ("(" * 4000, "{" * 4000, "x." * 4000, "[](){" * 1000, "#define A A\n" * 500):
        assert isinstance(check(cpp(body=deep), "cpp"), list)


@pytest.mark.parametrize(
    "body",
    [
        "a<" * 50_000,
        "x" + "+x" * 50_000 + ";",
        "x" + ".t()" * 30_000 + ";",
        "std::" * 20_000 + "a;",
    ],
)
def test_hostile_source_takes_seconds_at_most(body: str) -> None:
    start = time.perf_counter()
    assert check(cpp(body=body), "cpp") or body.startswith("std")
    assert time.perf_counter() - start < 10


def test_hostile_macros_take_seconds_at_most() -> None:
    start = time.perf_counter()
    grow = "#define Z a##b\n" + "".join(
        f"#define A{i} " + f"A{i + 1} " * 10 + "\n" for i in range(40)
    )
    for macros in ("#define A(x) x##x\n" + "A(" * 20_000, grow + "A0"):
        assert isinstance(check(cpp(old="#include <cmath>", new=macros), "cpp"), list)
    assert time.perf_counter() - start < 10


def test_speed() -> None:
    """Under 20 ms an answer; the best of five, since other work may share the machine."""
    for code, target in ((CPP, "cpp"), (CUDA, "cuda")):
        check(code, target)
        best = min(_seconds(code, target) for _ in range(5))
        assert best < 0.02


def _seconds(code: str, target: str) -> float:
    start = time.perf_counter()
    check(code, target)
    return time.perf_counter() - start
