"""The build ladder: same bits at each rung, errors only when sure and at the right lines, cache."""

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import compile_errors
import confinement
import kernel_build
from kernel_build import Builder, BuildRequest, extract_requests, load_built, toolchain

HERE = Path(__file__).resolve().parent
FLAGS = ["-O3", "-fopenmp", "-march=native"]
NVCC = shutil.which("nvcc") is not None


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A fresh cache with the shim in it; the shim itself comes from the user's cache."""
    root = tmp_path_factory.mktemp("cache")
    with Builder("cpp") as builder:
        builder.prepare()
        assert builder.shim_path, builder.shim_error
        shim = Path(builder.shim_path).parent
    shutil.copytree(shim, root / "build" / shim.parent.name / shim.name)
    return root


@pytest.fixture(scope="session")
def builder(cache):
    with Builder("cpp", cache) as builder:
        builder.prepare()
        yield builder


def request(source: str, functions=("f",), flags=FLAGS, **kwargs) -> BuildRequest:
    return BuildRequest.from_load_inline(
        "ext", source, functions=list(functions), extra_cflags=flags, **kwargs
    )


def load(builder: Builder, wanted: BuildRequest):
    result = builder.build(wanted)
    assert result.ok and result.path, result.error
    return load_built(result.path, result.kind, wanted)


def in_function(body: str) -> str:
    return (
        textwrap.dedent("""\
        #include <torch/extension.h>
        torch::Tensor f(torch::Tensor x) {
            float* p = x.data_ptr<float>();
            int64_t n = x.numel();
            %s
            return x;
        }
        """)
        % body
    )


# ---- what the facade builds computes what stock computes ----------------------------------------

KERNELS = r"""
#include <torch/extension.h>
#include <cmath>
#include <vector>

torch::Tensor chain(torch::Tensor x, double scale) {
    auto y = torch::empty_like(x);
    const float* a = x.data_ptr<float>();
    float* b = y.data_ptr<float>();
    const int64_t n = x.numel();
    #pragma omp parallel for
    for (int64_t i = 0; i < n; ++i) b[i] = std::tanh(a[i]) * (float)scale + exp(-a[i] * a[i]);
    return y;
}
std::vector<torch::Tensor> softmax(const torch::Tensor& x, c10::optional<torch::Tensor> bias) {
    TORCH_CHECK(x.dim() == 2, "softmax wants two dimensions, got ", x.dim(), " in ", x.sizes());
    auto in = x.contiguous();
    auto y = torch::zeros({x.size(0), x.size(1)}, x.options());
    auto total = torch::full({x.size(0)}, 0.5, torch::TensorOptions().dtype(torch::kFloat64));
    auto a = in.accessor<float, 2>();
    auto b = y.accessor<float, 2>();
    at::parallel_for(0, x.size(0), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            float top = -INFINITY, sum = 0;
            for (int64_t j = 0; j < a.size(1); ++j) top = std::max(top, a[i][j]);
            for (int64_t j = 0; j < a.size(1); ++j) sum += b[i][j] = std::exp(a[i][j] - top);
            for (int64_t j = 0; j < a.size(1); ++j) b[i][j] /= sum;
            if (bias.has_value()) b[i][0] += bias->data_ptr<float>()[i];
            total.data_ptr<double>()[i] += sum;
        }
    });
    return {y, total};
}
torch::Tensor halves(torch::Tensor x) {
    auto y = torch::empty(x.sizes(), x.options());
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "halves", [&] {
        const scalar_t* a = x.data_ptr<scalar_t>();
        scalar_t* b = y.data_ptr<scalar_t>();
        for (int64_t i = 0; i < x.numel(); ++i) b[i] = a[i] * scalar_t(0.3) + a[i] / scalar_t(7);
    });
    return y;
}
std::tuple<torch::Tensor, int64_t, double, bool> views(torch::Tensor x) {
    auto y = x.slice(0, 1, 3).transpose(0, 1).reshape({-1}).clone();
    y.narrow(0, 0, 2).fill_(3);
    y[2].copy_(x[0][0]);
    return {y, x.stride(0), x.sizes()[1] / 2.0, x.is_contiguous() && !x.is_cuda()};
}
"""
NAMES = ["chain", "softmax", "halves", "views"]


def outputs(module) -> list:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(37, 19, generator=generator)
    found = [module.chain(x, 1.7), *module.softmax(x, None), *module.softmax(x.t(), torch.ones(19))]
    sweep = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)  # every 16-bit float
    for dtype in (torch.float32, torch.float64):
        found.append(module.halves(x.to(dtype)))
    for dtype in (torch.float16, torch.bfloat16):
        found.append(module.halves(sweep.view(dtype)))
    return found + list(module.views(x))


@pytest.mark.slow
def test_unsupported_call_falls_to_stock_and_both_rungs_give_the_same_bits(builder):
    thin = builder.build(request(KERNELS, NAMES))
    assert thin.ok and thin.rung == 0 and thin.kind == "facade", thin.error
    more = KERNELS + "torch::Tensor total(torch::Tensor x) { return x.sum(); }\n"
    stock = builder.build(request(more, [*NAMES, "total"]))
    assert stock.ok and stock.rung == 2 and stock.kind == "pybind", stock.error
    ours = load_built(thin.path, thin.kind, request(KERNELS, NAMES))
    theirs = load_built(stock.path, stock.kind, request(more, [*NAMES, "total"]))
    assert theirs.total(torch.ones(5)) == 5
    for a, b in zip(outputs(ours), outputs(theirs), strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
            same = (a == b) | (a.isnan() & b.isnan())
            assert bool(same.all())
        else:
            assert a == b
    for call in (
        lambda m: m.softmax(torch.ones(3), None),
        lambda m: m.chain(torch.ones(3, dtype=torch.float64), 1.0),
        lambda m: m.halves(torch.ones(3, dtype=torch.int32)),
        lambda m: m.views(torch.ones(())),
    ):
        with pytest.raises(Exception) as mine:  # noqa: B017 - the type is compared below
            call(ours)
        with pytest.raises(Exception) as other:  # noqa: B017
            call(theirs)
        assert type(mine.value) is type(other.value) and str(mine.value) == str(other.value)
    for wrong in ((torch.ones(3),), (torch.ones(3), "a"), (1, 2.0)):
        with pytest.raises(TypeError):
            ours.chain(*wrong)
        with pytest.raises(TypeError):
            theirs.chain(*wrong)


def test_hand_written_bindings_with_keywords_defaults_and_lambdas(builder):
    source = """
    #include <torch/extension.h>
    double twice(int64_t n, double s, bool neg, const std::string& tag) {
        return (neg ? -1 : 1) * n * s + tag.size();
    }
    PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
        m.def("twice", &twice, "doc", py::arg("n"), py::arg("s") = 2.0, py::arg("neg") = false,
              py::arg("tag") = "ab");
        m.def("first", [](std::vector<torch::Tensor> v) { return v.at(0); });
    }
    """
    wanted = BuildRequest.from_load_inline("ext", source)
    module = load(builder, wanted)
    assert (
        module.twice(3) == 8
        and module.twice(n=3, neg=True) == -4
        and module.twice(1, 5, tag="") == 5
    )
    x = torch.ones(2)
    assert module.first([x, x + 1]) is x
    with pytest.raises(TypeError):
        module.twice(3, wrong=1)
    with pytest.raises(RuntimeError, match="range"):
        module.first([])


def test_failed_checks_and_exceptions_become_python_exceptions(builder):
    module = load(
        builder,
        request(
            in_function("""TORCH_CHECK(n > 2, "n is ", n, ", want > ", 2.5, ' ', x.dtype());
            if (n == 3) throw std::invalid_argument("three");
            if (n == 4) throw 4;
            if (n == 5) TORCH_CHECK(p == nullptr);
            if (n == 7) TORCH_CHECK_INDEX(false, "seven");""")
        ),
    )
    with pytest.raises(RuntimeError, match=r"^n is 1, want > 2.5 float$"):
        module.f(torch.ones(1))
    with pytest.raises(RuntimeError, match="^three$"):
        module.f(torch.ones(3))
    with pytest.raises(RuntimeError):
        module.f(torch.ones(4))
    with pytest.raises(RuntimeError, match="^Expected p == nullptr to be true, but got false"):
        module.f(torch.ones(5))
    assert module.f(torch.ones(6)).sum() == 6
    with pytest.raises(IndexError, match="^seven$"):
        module.f(torch.ones(7))


def test_undefined_function_is_an_import_error_without_paths(builder):
    wanted = request("#include <torch/extension.h>\ntorch::Tensor f(torch::Tensor x);")
    result = builder.build(wanted)
    assert result.ok
    with pytest.raises(ImportError, match="undefined symbol") as error:
        load_built(result.path, result.kind, wanted)
    assert str(builder.cache.root) not in str(error.value)


# ---- errors -------------------------------------------------------------------------------------

SURE = [
    ("p[0] = q[0];", "'q' was not declared"),
    ("p[0] = 1.0f", "expected ';'"),
    ("p = 3.5f;", "cannot convert 'float' to 'float*'"),
    ("x.frobnicate();", "no member named 'frobnicate'"),
    ("auto z = torch::frobnicate(x);", "'frobnicate' is not a member of 'torch'"),
    ("float v = x;", "cannot convert 'at::Tensor' to 'float'"),
    ("p[0] = max(p[0], 0.0f);", "'max' was not declared"),
    ("for (int i = 0; i < n; ++i) { p[i] = 0;", "a brace is not closed"),
    ("#include <torch/nosuch.h>", "torch/nosuch.h"),
    ("auto p = x.numel();", "conflicting declaration"),
]
UNSURE = [
    "auto z = x + x;",
    "x = torch::relu(x);",
    "x = relu(x);",
    "p[0] = x.sum().item<float>();",
    "auto s = x.sizes().slice(1);",
    "#include <ATen/Dispatch_v2.h>",
    'AT_DISPATCH_COMPLEX_TYPES(x.scalar_type(), "f", [&] {});',
    "std::vector<at::Tensor> v; v.frob();",
    "x = torch::nn::functional::relu(x);",
    "Tensor y = x;",
    "const auto k = at::kLong; int j = c10::elementSize(k) + c10::nosuchname::data;",
]


@pytest.mark.parametrize(("body", "message"), SURE)
def test_errors_that_are_surely_the_candidates_are_reported_from_rung_0(builder, body, message):
    result = builder.build(request(in_function(body)))
    assert not result.ok and result.rung == 0 and not result.harness_error
    assert message in result.error
    line = 9 if "brace" in message else 5
    assert result.error.startswith(f"kernel.cpp:{line}:")
    assert "/tmp" not in result.error and str(HERE) not in result.error
    assert len(result.error) <= compile_errors.ERROR_CHARACTERS


@pytest.mark.parametrize("body", UNSURE)
def test_what_stock_might_compile_is_not_blamed_on_the_candidate(cache, body):
    with Builder("cpp", cache, rungs=(0,)) as only_thin:
        only_thin.prepare()
        with only_thin.cache.work() as folder:
            result, certain = only_thin._rung(
                request(in_function(body)), toolchain("cpp"), 0, folder
            )
        assert not result.ok and not certain, result.error


def test_a_function_that_is_not_declared_is_named(builder):
    result = builder.build(request(in_function(""), functions=["g"]))
    assert not result.ok and result.rung == 0
    assert result.error == "functions asks for 'g', which cpp_sources does not declare"


def test_error_of_the_second_string_counts_on(builder):
    wanted = BuildRequest.from_load_inline(
        "ext", ["int a;\n", "int b = undeclared_name;"], functions=["f"]
    )
    assert builder.build(wanted).error.startswith("kernel.cpp:3:9: error: 'undeclared_name'")


def test_nvcc_messages_are_read():
    output = textwrap.dedent("""\
        kernel.cu(12): error: identifier "tid" is undefined
            int i = tid;
                    ^
        ptxas error   : Entry function '_Z1kPf' uses too much shared data
        1 error detected in the compilation of "kernel.cu".
        """)
    errors = compile_errors.diagnostics(output)
    assert [(e.file, e.line) for e in errors] == [("kernel.cu", 12), ("", 0)]
    text = compile_errors.report(errors[:1], output, {"kernel.cu": "\n" * 11 + "    int i = tid;"})
    assert text == 'kernel.cu:12: error: identifier "tid" is undefined\n   12 |     int i = tid;'


# ---- flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag",
    [
        "-fplugin=./x.so",
        "-B/tmp",
        "-wrapper sh,-c",
        "@args",
        "-include /etc/passwd",
        "-x c",
        "-I/etc",
        "-Wl,-rpath,/x",
        "-Wp,-I/etc",
        "-o /x",
        "-specs=x",
        "-fdump-tree-all",
        "-save-temps",
        "-O3 ; touch x",
        "-DA=`id`",
        "-O3 -L/x",
        "'",
    ],
)
def test_dangerous_flags_are_refused(builder, flag):
    result = builder.build(request(in_function(""), flags=["-O2", flag]))
    assert not result.ok and not result.harness_error
    assert "extra_cflags" in result.error and "\n" not in result.error


def test_usual_flags_are_allowed():
    cflags = [
        "-O3 -march=native",
        "-ffast-math",
        "-std=c++20",
        "-DN=4",
        "-Wall",
        "-Wno-unused",
        "-funroll-loops",
    ]
    cuda = [
        "-O3",
        "--use_fast_math",
        "-lineinfo",
        "-Xptxas=-v",
        "-Xptxas",
        "-O3,-v",
        "-Xcompiler",
        "-O3,-fopenmp",
    ]
    cuda += [
        "-arch=sm_90",
        "-gencode=arch=compute_90a,code=sm_90a",
        "--expt-relaxed-constexpr",
        "-std=c++17",
    ]
    cuda += [
        "--maxrregcount=64",
        "-U__CUDA_NO_HALF_OPERATORS__",
        "--ptxas-options=-O3",
        "--extended-lambda",
    ]
    wanted = BuildRequest.from_load_inline(
        "ext",
        "",
        "x",
        extra_cflags=cflags,
        extra_cuda_cflags=cuda,
        extra_ldflags=["-lgomp", "-lcublas", "-lm"],
    )
    assert kernel_build.check_request(wanted, "cuda", None) == ""


def test_cuda_is_refused_for_the_cpp_target(builder):
    result = builder.build(BuildRequest.from_load_inline("ext", "", "__global__ void k() {}"))
    assert not result.ok and "cuda_sources" in result.error


# ---- cache --------------------------------------------------------------------------------------


def test_second_build_is_a_cache_hit_also_for_failures(builder):
    for body in ("p[0] = 11;", "p[0] = eleven;"):
        first, second = (builder.build(request(in_function(body))) for _ in range(2))
        assert not first.cached and second.cached and second.seconds < 0.1
        assert (first.ok, first.path, first.error) == (second.ok, second.path, second.error)
    assert builder.build(request(in_function("p[0] = 11;"), flags=["-O2"])).cached is False


def test_many_processes_build_one_key_once(cache):
    program = (
        "import sys, json; from kernel_build import *\n"
        "r = Builder('cpp', sys.argv[1]).build(BuildRequest.from_dict(json.loads(sys.argv[2])))\n"
        "assert r.ok, r; assert 'torch' not in sys.modules\nprint(int(r.cached), r.path)"
    )
    wanted = json.dumps(request(in_function("p[0] = 77;")).to_dict())
    command = [sys.executable, "-c", program, str(cache), wanted]
    running = [
        subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = [process.communicate(timeout=60)[0].split() for process in running]
    assert sorted(cached for cached, _ in said) == ["0", "1", "1"]
    assert len({path for _, path in said}) == 1


def test_a_compiler_that_takes_too_long_is_killed_and_not_cached(cache):
    with Builder("cpp", cache, timeout_s=0.05) as impatient:
        result = impatient.build(request(in_function("p[0] = 99;")))
        assert result.timed_out and not result.ok and not result.harness_error
    with Builder("cpp", cache) as patient:
        assert patient.build(request(in_function("p[0] = 99;"))).ok


def test_too_much_memory_and_too_large_an_object_are_the_candidates_fault(cache):
    tens = "\n".join(f"#define A{i + 1} " + ",".join([f"A{i}"] * 10) for i in range(6))
    many = f"#define A0 1\n{tens}\nstatic int table[] = {{A6}};\n" + in_function("p[0] = table[1];")
    large = "int table[1 << 28] = {1};\n" + in_function("p[0] = table[1];")
    with Builder("cpp", cache, memory_bytes=250 << 20) as small:
        for bomb, text in (
            (many, "the compiler ran out of memory (250 MB)"),
            (large, "the compiled kernel is larger than 256 MB"),
        ):
            result = small.build(request(bomb))
            assert not result.ok and result.rung == 0 and not result.harness_error
            assert result.error == text


def test_a_compiler_reads_no_private_file(builder, tmp_path):
    if "no-landlock" in confinement.available():
        pytest.skip("no Landlock here")
    (tmp_path / "secret").write_text("sesame\n")
    result = builder.build(request(f'#include "{tmp_path}/secret"\n' + in_function("")))
    assert not result.ok and result.rung == 0 and "Permission denied" in result.error
    assert "sesame" not in result.error


def test_a_full_disk_is_our_fault_and_leaves_nothing(builder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kernel_build.os, "rename", full)
    before = set(builder.cache.root.rglob("*"))
    result = builder.build(request(in_function("p[0] = 123;")))
    assert (
        not result.ok
        and "No space left" in result.harness_error
        and "\n" not in result.harness_error
    )
    lock_files = {p for p in builder.cache.root.rglob("*") if p.parent.name == "locks"}
    assert {
        p for p in set(builder.cache.root.rglob("*")) - before - lock_files if p.is_file()
    } == set()


def test_an_unusable_cache_folder_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with Builder("cpp", tmp_path / "file") as broken:
        assert "cache folder" in broken.build(request(in_function(""))).harness_error


def test_a_missing_compiler_says_what_to_install(cache, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    toolchain.cache_clear()
    try:
        with Builder("cpp", cache) as without:
            assert "install g++" in without.build(request(in_function(""))).harness_error
    finally:
        toolchain.cache_clear()


def test_trim_drops_what_was_used_longest_ago(tmp_path):
    store = kernel_build.Cache(tmp_path, limit_bytes=2500)
    for i, key in enumerate(["aa1", "bb2", "cc3"]):
        (tmp_path / "f").write_bytes(b"x" * 1000)
        store.put(key, {"ok": True}, {"kernel.so": tmp_path / "f"})
        os.utime(store.folder(key), (i + 1, i + 1))
    assert store.get("aa1")  # used again just now
    store.trim()
    assert store.get("aa1") and store.get("cc3") and not store.get("bb2")


def test_a_link_instead_of_an_object_is_not_taken_into_the_cache(tmp_path):
    store = kernel_build.Cache(tmp_path)
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="no regular file"):
        store.put("aa", {"ok": True}, {"kernel.so": tmp_path / "link"})
    assert store.get("aa") is None


# ---- answers ------------------------------------------------------------------------------------

ANSWER = '''
import torch
from torch.utils.cpp_extension import load_inline as build
N = 4
HEAD = "#include <torch/extension.h>\\n"
SRC = HEAD + f"""
torch::Tensor add(torch::Tensor x) {{
    auto y = x.clone();
    for (int64_t i = 0; i < x.numel(); ++i) y.data_ptr<float>()[i] += {N};
    return y;
}}
"""
mod = build(name="adder", cpp_sources=[SRC], functions=["add"], extra_cflags=["-O" + "3"],
            verbose=True)
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return mod.add(x)
'''


def test_requests_are_read_without_running_the_answer():
    (found,) = extract_requests(ANSWER) or []
    assert found.name == "adder" and found.functions == (("add", "add"),)
    assert found.extra_cflags == ("-O3",) and "+= 4;" in found.cpp_sources[0]
    assert extract_requests("import torch") == []
    assert extract_requests("def broken(:") is None


@pytest.mark.parametrize(
    "change",
    [
        ('name="adder"', "name=str(torch.rand(1))"),
        ('["-O" + "3"]', "flags()"),
        ("N = 4", "N = 4\nfor N in range(3): pass"),
        ("verbose=True", "**extra"),
        ("cpp_sources=[SRC]", "cpp_sources=open('x').read()"),
    ],
)
def test_requests_that_depend_on_running_are_not_guessed(change):
    assert change[0] in ANSWER
    assert extract_requests(ANSWER.replace(*change)) is None


def test_the_answer_runs_with_the_installed_loader(builder, monkeypatch):
    from torch.utils import cpp_extension

    for name in ("load_inline", "load"):
        monkeypatch.setattr(cpp_extension, name, getattr(cpp_extension, name))
    asked = []

    def missing(wanted):
        asked.append(wanted)
        raise SystemExit(3)

    found: dict[BuildRequest, kernel_build.BuildResult] = {}
    kernel_build.install_loader(found.get, missing)
    with pytest.raises(SystemExit):
        exec(compile(ANSWER, "answer", "exec"), {})
    assert asked == extract_requests(ANSWER)
    assert BuildRequest.from_dict(json.loads(json.dumps(asked[0].to_dict()))) == asked[0]
    found[asked[0]] = builder.build(asked[0])
    space: dict = {"__name__": "answer"}
    exec(compile(ANSWER, "answer", "exec"), space)
    assert torch.equal(space["ModelNew"]()(torch.zeros(3)), torch.full((3,), 4.0))


def test_a_request_from_a_hostile_process_is_checked():
    good = request("int a;").to_dict()
    for field, value in (
        ("name", 3),
        ("cpp_sources", [1]),
        ("functions", "ab"),
        ("extra_cflags", {"a": 1}),
    ):
        with pytest.raises((TypeError, ValueError)):
            BuildRequest.from_dict({**good, field: value})


# ---- CUDA ---------------------------------------------------------------------------------------

CUDA = r"""
#include <torch/extension.h>
#include <cuda_fp16.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
template <typename scalar_t>
__global__ void relu_kernel(const scalar_t* __restrict__ a, scalar_t* __restrict__ b, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) b[i] = a[i] > scalar_t(0) ? a[i] : scalar_t(0);
}
__global__ void touch(torch::PackedTensorAccessor32<float, 2, torch::RestrictPtrTraits> x) {
    x[threadIdx.x][0] += 1.0f;
}
torch::Tensor relu(torch::Tensor x) {
    TORCH_CHECK(x.is_cuda(), "x must be on the GPU");
    const at::cuda::OptionalCUDAGuard guard(x.device());
    auto y = torch::empty_like(x);
    const int64_t n = x.numel();
    AT_DISPATCH_FLOATING_TYPES_AND_HALF(x.scalar_type(), "relu", ([&] {
        relu_kernel<scalar_t><<<(n + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
            x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), n);
    }));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return y;
}
"""


@pytest.fixture(scope="session")
def cuda_builder(cache):
    if not NVCC:
        pytest.skip("no nvcc")
    with Builder("cuda", cache) as builder:
        yield builder


def cuda_request(source: str, cpp="torch::Tensor relu(torch::Tensor x);", functions=("relu",)):
    return BuildRequest.from_load_inline(
        "relu_ext",
        cpp,
        source,
        functions=functions and list(functions),
        extra_cuda_cflags=["-O3", "--use_fast_math"],
    )


def test_a_cuda_answer_compiles_and_links_at_rung_0(cuda_builder):
    for wanted in (
        cuda_request(CUDA),
        cuda_request(
            CUDA + 'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("relu", &relu); }', "", None
        ),
    ):
        result = cuda_builder.build(wanted)
        assert result.ok and result.rung == 0, result.error
        symbols = subprocess.run(["nm", "-D", result.path], capture_output=True, text=True).stdout
        assert "kv_module_relu_ext" in symbols and "_ZN2at" not in symbols


def test_cuda_errors_have_the_candidates_lines(cuda_builder):
    line = 1 + CUDA[: CUDA.index("auto y")].count("\n")
    for old, new, number, message in (
        (
            "auto y = torch::empty_like(x);",
            "auto y = torch::empty_like(x)",
            line + 1,
            'expected a ";"',
        ),
        ("auto y", "int k = undeclared_thing; auto y", line, "undeclared_thing"),
    ):
        result = cuda_builder.build(cuda_request(CUDA.replace(old, new)))
        assert not result.ok and result.rung == 0
        assert result.error.startswith(f"kernel.cu:{number}: error:") and message in result.error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_cuda_answer_runs(cuda_builder):
    module = load(cuda_builder, cuda_request(CUDA))
    for dtype in (torch.float32, torch.float64, torch.float16):
        x = torch.randn(1000, device="cuda").to(dtype)
        with torch.cuda.stream(torch.cuda.Stream()):
            y = module.relu(x)
        torch.cuda.synchronize()
        assert torch.equal(y, torch.relu(x))
    with pytest.raises(RuntimeError, match="^x must be on the GPU$"):
        module.relu(torch.ones(3))


def test_stop_ends_a_running_compiler_and_caches_nothing(cache) -> None:
    """A stopped build is our doing: a harness error at once, and built when asked for again."""
    source = "#include <torch/extension.h>\n#include <regex>\n"
    source += 'torch::Tensor f(torch::Tensor x) { std::regex r("a+b"); return x; }\n'
    builder = Builder("cpp", cache)
    builder.prepare()
    future = builder.submit(request(source))
    time.sleep(0.3)
    builder.stop()
    start = time.monotonic()
    result = future.result(timeout=30)
    assert (result.ok, result.harness_error) == (False, "builds were stopped")
    assert time.monotonic() - start < 5
    builder.close()
    with Builder("cpp", cache) as again:
        again.prepare()
        built = again.build(request(source))
    assert (built.ok, built.cached) == (True, False)
