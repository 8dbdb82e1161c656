"""The CUDA side of `trace_grammar`: the same tasks as CUDA kernels, in good and slow versions.

`pre` and `post` become __device__ functions with the same C lines. Row-wise cores use the same row
templates: with a thread per row every thread walks along its row, so neighbouring threads read
far apart; with a block per row neighbouring threads read neighbouring columns and the partial
results meet through warp shuffles and shared memory.
"""

from __future__ import annotations

from tasks.generate import CORES, Spec
from trace_grammar import (
    BINARY,
    IMPORTS,
    ROW_TEMPLATES,
    Line,
    Style,
    Variant,
    arguments,
    chains,
    line,
    module,
    plain,
    pointers,
    returned,
    signature,
)

_THREADS = {"32": 32, "256": 256}
_LOAD = (
    'ops = load_inline(name="fused", cpp_sources=declaration, cuda_sources=source, '
    'functions=["run"])'
)
# Reductions across a block of up to 1024 threads, for every thread.
_BLOCK_SUM = """\
__device__ float block_sum(float v) {
    __shared__ float part[32];
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0.f;
    for (int i = 0; i < blockDim.x / 32; ++i) v += part[i];
    __syncthreads();
    return v;
}""".split("\n")
_BLOCK_MAX = """\
__device__ float block_max(float v) {
    __shared__ float part[32];
    for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, d));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = part[0];
    for (int i = 1; i < blockDim.x / 32; ++i) v = fmaxf(v, part[i]);
    __syncthreads();
    return v;
}""".split("\n")
_MAX_CORES = ("amax", "logsumexp", "softmax", "log_softmax", "softmax_max")
_INDEX = "    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;"


def variants(core: str) -> list[Variant]:
    """Every way to write a core, the fastest last."""
    family = CORES[core].family
    product = family in ("matmul", "conv")
    passes = ("naive", "ordered") if product else ("separate", "fused")
    loops = {"elementwise": ["thread", "float4"], "matmul": ["thread"], "conv": ["thread"]}.get(
        family, ["thread", "block"]
    )
    return [Variant(lo, b, p) for lo in loops for b in _THREADS for p in passes]


def _parameters(core: str) -> str:
    """Parameters of the main kernel that every core has: inputs and outputs."""
    names = {"x": "a", "y": "b", "weight": "w", "bias": "b"}
    inputs = [f"const float* {names[argument]}" for argument in arguments(core)]
    return ", ".join([*inputs, "float* o", *_second(core, "float* u")])


def _second(core: str, text: str) -> list[str]:
    return [text] if CORES[core].family == "tuple" else []


def _passed(core: str, first: str = "a") -> str:
    """What the host hands to the main kernel: the pointers."""
    names = {"x": first, "y": "b", "weight": "w", "bias": "b"}
    values = [names[argument] for argument in arguments(core)]
    return ", ".join([*values, "o", *_second(core, "u")])


def _map_kernel(name: str, function: str) -> list[Line]:
    """A kernel that applies `pre` or `post` to every element: one pass of its own."""
    return [
        Line(f"__global__ void {name}(const float* a, float* o, int64_t n) {{"),
        Line(_INDEX),
        line(f"    if (i < n) o[i] = {function}(a[i]);"),
        Line("}"),
    ]


def _launch(name: str, threads: int, count: str, values: str) -> Line:
    return line(f"    {name}<<<({count} + {threads - 1}) / {threads}, {threads}>>>({values});")


# ---------------------------------------------------------------------------------------- kernels


def _elementwise(core: str, variant: Variant) -> tuple[list[Line], list[Line]]:
    """(kernels, the part of the host function between the pointers and the return)."""
    right, wrong = BINARY[core]
    threads = _THREADS[variant.build]
    separate = variant.passes == "separate"
    two = len(arguments(core)) == 2
    four = variant.loop == "float4"
    read = "t" if separate else "a"
    inside = "{}" if separate else "pre({})"
    store = "{}" if separate else "post({})"

    def value(template: str, part: str) -> str:
        suffix = f".{part}" if part else "[i]"
        a = inside.format(f"{'p' if four else 'a'}{suffix}")
        return store.format(template.format(a=a, b=f"{'q' if four else 'b'}{suffix}"))

    kernel = [Line(f"__global__ void fused({_parameters(core)}, int64_t n) {{")]
    if four:
        kernel += [
            Line("    int64_t i = 4 * (blockIdx.x * (int64_t)blockDim.x + threadIdx.x);"),
            line("    if (i >= n) return;", {"off_by_one": "    if (i + 4 >= n) return;"}),
            Line("    float4 p = *(const float4*)(a + i);"),
            *(plain("    float4 q = *(const float4*)(b + i);") if two else []),
            *(
                line(
                    f"    p.{part} = {value(right, part)};",
                    {"wrong_op": f"    p.{part} = {value(wrong, part)};"},
                )
                for part in "xyzw"
            ),
            line("    *(float4*)(o + i) = p;", {"undeclared": "    *(float4*)(out + i) = p;"}),
            Line("}"),
        ]
    else:
        kernel += [
            Line(_INDEX),
            line(
                f"    if (i < n) o[i] = {value(right, '')};",
                {
                    "off_by_one": f"    if (i < n - 1) o[i] = {value(right, '')};",
                    "wrong_op": f"    if (i < n) o[i] = {value(wrong, '')};",
                },
            ),
            Line("}"),
        ]
    count = "n / 4" if four else "n"
    host = [line("    int64_t n = x.numel();")]
    if separate:
        kernel = [*_map_kernel("first", "pre"), *kernel, *_map_kernel("last", "post")]
        host += _temporary()
        host.append(_launch("first", threads, "n", "a, t, n"))
    host.append(_launch("fused", threads, count, f"{_passed(core, read)}, n"))
    if separate:
        host.append(_launch("last", threads, "n", "o, o, n"))
    return kernel, host


def _temporary() -> list[Line]:
    return plain("    auto tmp = torch::empty_like(x);", "    auto t = tmp.data_ptr<float>();")


def _rows(core: str, variant: Variant) -> tuple[list[Line], list[Line]]:
    family, separate = CORES[core].family, variant.passes == "separate"
    scan, block = family == "scan", variant.loop == "block"
    loop = "for (int c = 0; c < cols; ++c)"
    if block:
        loop = "for (int c = threadIdx.x; c < cols; c += blockDim.x)"
    style = Style(
        loop=loop,
        short=loop.replace("c < cols", "c < cols - 1"),
        first="p[c]" if separate else "pre(p[c])",
        post="" if separate else "post",
        block=block,
    )
    row = "blockIdx.x" if block else "blockIdx.x * blockDim.x + threadIdx.x"
    body = _block_scan(core, style) if scan and block else ROW_TEMPLATES[family](core, style)
    kernel = [
        *(plain(*_BLOCK_SUM) if block and not scan and core != "amax" else []),
        *(plain(*_BLOCK_MAX) if block and core in _MAX_CORES else []),
        Line(f"__global__ void fused({_parameters(core)}, int rows, int cols) {{"),
        Line(f"        int r = {row};"),
        line(
            "        if (r >= rows) return;", {"off_by_one": "        if (r >= rows - 1) return;"}
        ),
        Line("        auto p = a + (int64_t)r * cols;"),
        *(plain("        auto q = o + (int64_t)r * cols;") if family != "reduce" else []),
        *body,
        Line("}"),
    ]
    threads = _THREADS[variant.build]
    host = _temporary() if separate else []
    if separate:
        kernel = [*_map_kernel("first", "pre"), *kernel, *_map_kernel("last", "post")]
        host.append(_launch("first", 256, "x.numel()", "a, t, x.numel()"))
    values = f"{_passed(core, 't' if separate else 'a')}, rows, cols"
    if block:
        host.append(line(f"    fused<<<rows, {threads}>>>({values});"))
    else:
        host.append(_launch("fused", threads, "rows", values))
    if separate:
        host.append(_launch("last", 256, "out.numel()", "o, o, out.numel()"))
    return kernel, host


def _block_scan(core: str, style: Style) -> list[Line]:
    """Running sums of a row by one block: a chunk a thread, then the sums before each chunk."""
    back = core == "rcumsum"
    place = "cols - 1 - c" if back else "c"
    first = style.first.replace("p[c]", f"p[{place}]")
    return [
        Line("        __shared__ float part[1024];"),
        Line("        int size = (cols + blockDim.x - 1) / blockDim.x;"),
        Line("        int low = threadIdx.x * size, high = min(low + size, cols);"),
        line("        float s = 0.f;", {"undeclared": "        float sum = 0.f;"}),
        Line(f"        for (int c = low; c < high; ++c) s += {first};"),
        Line("        part[threadIdx.x] = s;"),
        Line("        __syncthreads();"),
        Line("        s = 0.f;"),
        line(
            "        for (int t = 0; t < (int)threadIdx.x; ++t) s += part[t];",
            {"off_by_one": "        for (int t = 0; t <= (int)threadIdx.x; ++t) s += part[t];"},
        ),
        Line(
            f"        for (int c = low; c < high; ++c) {{ s += {first}; "
            f"q[{place}] = {style.put('s')}; }}"
        ),
    ]


def _matmul(core: str, variant: Variant) -> tuple[list[Line], list[Line]]:
    """One output a thread, from global memory or through shared tiles of 16 x 16."""
    linear = core == "linear"
    side = 16 if variant.passes == "ordered" else {"32": 4, "256": 16}[variant.build]
    factor = "w[(int64_t)j * k + l]" if linear else "b[(int64_t)l * n + j]"
    start = "b[j]" if linear else "0.f"
    initial = line(
        f"    float s = {start};",
        {"bias": "    float s = 0.f;"} if linear else {"init": "    float s = 1.f;"},
    )
    head = [
        *_map_kernel("first", "pre"),
        Line(f"__global__ void fused({_parameters(core)}, int m, int k, int n) {{"),
        Line("    int i = blockIdx.y * blockDim.y + threadIdx.y;"),
        Line("    int j = blockIdx.x * blockDim.x + threadIdx.x;"),
    ]
    if variant.passes == "naive":
        body = [
            line("    if (i >= m || j >= n) return;"),
            initial,
            line(
                f"    for (int l = 0; l < k; ++l) s += a[(int64_t)i * k + l] * {factor};",
                {
                    "off_by_one": "    for (int l = 0; l < k - 1; ++l) "
                    f"s += a[(int64_t)i * k + l] * {factor};"
                },
            ),
        ]
    else:
        tile = "w[(int64_t)(blockIdx.x * 16 + threadIdx.y) * k + l + threadIdx.x]"
        other = tile if linear else "b[(int64_t)(l + threadIdx.y) * n + j]"
        product = "p[threadIdx.y][d] * " + ("q[threadIdx.x][d]" if linear else "q[d][threadIdx.x]")
        body = [
            Line("    __shared__ float p[16][17], q[16][17];"),
            initial,
            Line("    for (int l = 0; l < k; l += 16) {"),
            Line("        p[threadIdx.y][threadIdx.x] = a[(int64_t)i * k + l + threadIdx.x];"),
            Line(f"        q[threadIdx.y][threadIdx.x] = {other};"),
            line("        __syncthreads();"),
            line(
                f"        for (int d = 0; d < 16; ++d) s += {product};",
                {"off_by_one": f"        for (int d = 0; d < 15; ++d) s += {product};"},
            ),
            Line("        __syncthreads();"),
            Line("    }"),
        ]
    store = line(
        "    o[(int64_t)i * n + j] = post(s);",
        {"undeclared": "    o[(int64_t)i * n + j] = post(acc);"},
    )
    host = [
        *_temporary(),
        _launch("first", 256, "x.numel()", "a, t, x.numel()"),
        line(f"    dim3 block({side}, {side});"),
        line(f"    dim3 grid((n + {side - 1}) / {side}, (m + {side - 1}) / {side});"),
        line(f"    fused<<<grid, block>>>({_passed(core, 't')}, m, k, n);"),
    ]
    return [*head, *body, store, Line("}")], host


def _conv(core: str, variant: Variant) -> tuple[list[Line], list[Line]]:
    """One output a thread; `pre` in a pass of its own, or again for every use ("naive")."""
    naive = variant.passes == "naive"
    one = core == "conv1d"
    read = "pre(p[{}])" if naive else "p[{}]"
    sizes = "int channels, int len" if one else "int channels, int rows, int cols"
    kernel = [
        *([] if naive else _map_kernel("first", "pre")),
        Line(f"__global__ void fused({_parameters(core)}, int64_t n, {sizes}) {{"),
        Line(_INDEX),
        line("    if (i >= n) return;", {"off_by_one": "    if (i >= n - 1) return;"}),
        *(plain() if one else plain("    int size = rows * cols;")),
        Line(f"    int64_t r = i / {'len' if one else 'size'};"),
        Line(f"    auto p = a + r / channels * channels * {'len' if one else 'size'};"),
        Line(f"    auto f = w + r % channels * channels * {3 if one else 9};"),
        line("    float s = b[r % channels];", {"bias": "    float s = 0.f;"}),
    ]
    if one:
        value = read.format("c * len + l + d - 1")
        kernel += [
            Line("    int l = i % len;"),
            Line("    for (int c = 0; c < channels; ++c)"),
            Line("    for (int d = 0; d < 3; ++d)"),
            line(
                f"        if (l + d >= 1 && l + d <= len) s += f[c * 3 + d] * {value};",
                {
                    "off_by_one": "        if (l + d >= 1 && l + d < len) "
                    f"s += f[c * 3 + d] * {value};"
                },
            ),
        ]
    else:
        value = read.format("c * size + y * cols + x")
        kernel += [
            Line("    int row = i % size / cols, col = i % cols;"),
            Line("    for (int c = 0; c < channels; ++c)"),
            Line("    for (int d = 0; d < 9; ++d) {"),
            line(
                "        int y = row + d / 3 - 1, x = col + d % 3 - 1;",
                {"wrong_op": "        int y = row + d % 3 - 1, x = col + d / 3 - 1;"},
            ),
            Line(
                "        if (y >= 0 && y < rows && x >= 0 && x < cols) "
                f"s += f[c * 9 + d] * {value};"
            ),
            Line("    }"),
        ]
    kernel += [line("    o[i] = post(s);", {"semicolon": "    o[i] = post(s)"}), Line("}")]
    host = [line("    int64_t n = x.numel();")]
    if not naive:
        host += [*_temporary(), _launch("first", 256, "n", "a, t, n")]
    values = f"{_passed(core, 'a' if naive else 't')}, n, channels, "
    values += "len" if one else "rows, cols"
    host.append(_launch("fused", _THREADS[variant.build], "n", values))
    return kernel, host


# ------------------------------------------------------------------------------------ whole answers


def _sizes(core: str) -> list[Line]:
    """The host's sizes, and the shape of the output."""
    family = CORES[core].family
    if family == "elementwise":
        return []
    if family == "matmul":
        n = "weight.size(0)" if core == "linear" else "y.size(1)"
        return plain(f"    int m = x.size(0), k = x.size(1), n = {n};")
    if core == "conv1d":
        return plain("    int channels = x.size(1), len = x.size(2);")
    if core == "conv2d":
        return plain("    int channels = x.size(1), rows = x.size(2), cols = x.size(3);")
    right = "    int rows = x.size(0), cols = x.size(1);"
    return [line(right, {"dims": "    int rows = x.size(1), cols = x.size(0);"})]


def _shape(core: str) -> str:
    family = CORES[core].family
    if family == "reduce":
        return "torch::empty({rows}, x.options())"
    if family == "matmul":
        return "torch::empty({m, n}, x.options())"
    return "torch::empty_like(x)"


def kernel(spec: Spec, variant: Variant) -> list[Line]:
    """The complete correct answer for a task, in one variant."""
    core = spec.core
    family = CORES[core].family
    write = {"elementwise": _elementwise, "matmul": _matmul, "conv": _conv}.get(family, _rows)
    kernels, host = write(core, variant)
    head = signature(core).text
    return [
        *plain(*IMPORTS, f'declaration = "{head.removesuffix(" {")};"', 'source = r"""'),
        *plain("#include <torch/extension.h>"),
        *chains(spec, "cuda"),
        *kernels,
        signature(core),
        *_sizes(core),
        *pointers(core, _shape(core)),
        *host,
        *returned(core),
        *plain('"""', _LOAD),
        *module(core),
    ]
