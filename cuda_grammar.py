"""The CUDA half of `trace_grammar.py`: answers for target "cuda", good, slow and broken.

The same idea: a core is a template of lines around the device functions `pre` and `post`, every
line carries the mistakes that can be made in it, and texts repeat from core to core, because a
small model learns one token a line. What costs time is real. Row-wise cores take one thread a row
(neighbouring threads then read addresses a whole row apart), or a block a row: neighbouring threads
read neighbouring columns, a reduction goes through shuffles and shared memory, and the row is kept
in shared memory, so that global memory is read and written once. Element-wise cores take one value
or four (float4) a thread. Scans by a block go through the row in tiles of four values a thread.
Matrix products take one thread an output, or tiles of 128 x 128 in shared memory with 8 x 8 outputs
in the registers of each thread. Convolutions take one output or four neighbours a thread.

Tensors are contiguous float32. The float4 loops and the scan by blocks want the last dimension
divisible by 4, a fused block keeps at most 12288 columns (48 KiB of shared memory).
No mistake reads or writes out of bounds: all shorten a loop, a grid or a formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

_LOOPS: dict[str, tuple[str, str]] = {  # family -> values of Variant.loop, slow and fast
    "elementwise": ("thread", "float4"),
    "conv": ("thread", "float4"),
    "matmul": ("thread", "tile"),
}
_ROW_LOOPS = ("thread", "block")
_POINTERS = {"x": "a", "y": "b", "weight": "w", "bias": "b"}  # names that `pointers` gives
_INDEX = "blockIdx.x * blockDim.x + threadIdx.x"

# --------------------------------------------------------------------------------- device functions


def _block_reduction(kind: str, start: str, step: str) -> list[Line]:
    """`block_sum` or `block_max`: every thread gives a value and gets the result of the block."""
    shuffle = step.format("__shfl_xor_sync(~0u, v, d)")
    faults: dict[str, str | None] = {}
    if kind == "sum":  # a maximum may be missed without harm where it only prevents overflow
        faults["off_by_one"] = f"    for (int d = 16; d > 1; d /= 2) {shuffle}"
    return [
        *plain(f"__device__ float block_{kind}(float v) {{", "    __shared__ float part[32];"),
        line(f"    for (int d = 16; d > 0; d /= 2) {shuffle}", faults),
        *plain(
            "    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;",
            "    __syncthreads();",
            f"    v = {start};",
            f"    for (int i = 0; i < blockDim.x / 32; ++i) {step.format('part[i]')}",
            "    __syncthreads();",
            "    return v;",
            "}",
        ),
    ]


def _block_scan() -> list[Line]:
    """`block_scan`: the sum of s and of the values of all threads before; s += the block's sum."""
    return [
        *plain(
            "__device__ float block_scan(float v, float& s) {", "    __shared__ float part[32];"
        ),
        *plain("    float t = v;"),
        line(
            "    for (int d = 1; d < 32; d *= 2) {",
            {"off_by_one": "    for (int d = 1; d < 16; d *= 2) {"},
        ),
        *plain(
            "        float u = __shfl_up_sync(~0u, t, d);",
            "        if (threadIdx.x % 32 >= d) t += u;",
            "    }",
            "    if (threadIdx.x % 32 == 31) part[threadIdx.x / 32] = t;",
            "    __syncthreads();",
        ),
        line("    t += s - v;", {"wrong_op": "    t += s;"}),
        *plain("    for (int i = 0; i < threadIdx.x / 32; ++i) t += part[i];"),
        line(
            "    for (int i = 0; i < blockDim.x / 32; ++i) s += part[i];",
            {"forgotten": None},
        ),
        *plain("    __syncthreads();", "    return t;", "}"),
    ]


def _device_functions(lines: Sequence[Line]) -> list[Line]:
    """The block-wide functions that `lines` call."""
    text = "\n".join(one.text for one in lines)
    needed: list[Line] = []
    if "block_sum(" in text:
        needed += _block_reduction("sum", "0.f", "v += {};")
    if "block_max(" in text:
        needed += _block_reduction("max", "-1e30f", "v = fmaxf(v, {});")
    if "block_scan(" in text:
        needed += _block_scan()
    return needed


# ----------------------------------------------------------------------------- element-wise kernels


def _index(start: str = _INDEX, name: str = "i") -> Line:
    return line(f"    int64_t {name} = {start};", {"undeclared": None})


def _each(kernel_name: str, function: str, names: str, vector: bool) -> list[Line]:
    """A kernel that stores function(a[i]) or function(a[i], b[i]) in o[i]; vector: four at once."""
    kind = "float4" if vector else "float"
    taken = ", ".join(f"{kind}* {name}" for name in (*names, "o"))
    lines = [Line(f"__global__ void {kernel_name}({taken}, int64_t n) {{"), _index()]
    if not vector:
        values = ", ".join(f"{name}[i]" for name in names)
        return [*lines, *plain(f"    if (i < n) o[i] = {function}({values});", "}")]
    calls = []
    for part in "xyzw":
        values = ", ".join(f"{local}.{part}" for local, _ in zip("vw", names, strict=False))
        calls.append(f"{function}({values})")
    lines += plain("    if (i >= n) return;", "    float4 v = a[i];")
    if len(names) == 2:
        lines += plain("    float4 w = b[i];")
    return [*lines, *plain(f"    o[i] = make_float4({', '.join(calls)});", "}")]


def _threads(variant: Variant) -> Line:
    return Line(f"    int threads = {variant.build};")


def _blocks(value: str) -> Line:
    """The size of the grid; one block less leaves outputs unwritten."""
    short = value.removesuffix(" + 1") if value.endswith(" + 1") else value
    return line(f"    int blocks = {value};", {"off_by_one": f"    int blocks = {short} - 1;"})


def _launch(given: str, kernel_name: str = "kernel") -> Line:
    text = f"    {kernel_name}<<<blocks, threads>>>({given});"
    return line(text, {"undeclared": text.replace("<<<blocks", "<<<grid")})


def _elementwise(core: str, variant: Variant) -> list[Line]:
    vector, fused = variant.loop == "float4", variant.passes == "fused"
    names = "a" if core == "map" else "ab"
    right, wrong = (
        f"    return post({value});" if fused else f"    return {value};"
        for value in (form.format(a="pre(x)" if fused else "x", b="y") for form in BINARY[core])
    )
    parameters = ", ".join(f"float {name}" for name in "xy"[: len(names)])
    middle = [
        Line(f"__device__ float each({parameters}) {{"),
        line(right, {"wrong_op": wrong}),
        Line("}"),
        *_each("kernel", "each", names, vector),
    ]
    first, last = _each("before", "pre", "a", vector), _each("after", "post", "a", vector)
    cast = "(float4*)" if vector else ""

    def call(kernel_name: str, *pointers: str) -> Line:
        return _launch(", ".join([*(cast + p for p in pointers), "n"]), kernel_name)

    if fused:
        lines, calls = middle, [call("kernel", *names, "o")]
    else:
        calls = [call("before", "a", "o"), call("after", "o", "o")]
        if core == "map":
            lines = [*first, *last]
        else:
            lines = [*first, *middle, *last]
            calls.insert(1, call("kernel", "o", "b", "o"))
    return [
        *lines,
        signature(core),
        *pointers(core, "torch::empty_like(x)"),
        Line(f"    int64_t n = x.numel(){' / 4' if vector else ''};"),
        _threads(variant),
        _blocks("n / threads + 1"),
        *calls,
        *returned(core),
    ]


# ---------------------------------------------------------------- parts of the other host functions


def _first_pass() -> list[Line]:
    """Host lines: `pre` of all of x into a temporary t."""
    return plain(
        "    auto tmp = torch::empty_like(x);",
        "    auto t = tmp.data_ptr<float>();",
        "    before<<<x.numel() / threads + 1, threads>>>(a, t, x.numel());",
    )


def _last_pass(spec: Spec) -> list[Line]:
    """Host line: `post` of all of out, in place."""
    text = "    after<<<out.numel() / threads + 1, threads>>>(o, o, out.numel());"
    return [line(text, {"forgotten": None} if spec.post else {})]


def _head(core: str, sizes: str) -> Line:
    """The signature of the main kernel: all pointers, then sizes."""
    names = [_POINTERS[argument] for argument in arguments(core)]
    names += ["o", "u"] if CORES[core].family == "tuple" else ["o"]
    pointers = ", ".join(f"float* {name}" for name in names)
    counts = ", ".join(f"int64_t {name}" for name in sizes.split())
    return Line(f"__global__ void kernel({pointers}, {counts}) {{")


def _passed(core: str, first: str, sizes: str) -> str:
    """What the host function passes to the main kernel."""
    names = [_POINTERS[argument] for argument in arguments(core)]
    names += ["o", "u"] if CORES[core].family == "tuple" else ["o"]
    return ", ".join([first, *names[1:], *sizes.split()])


def _around(spec: Spec, variant: Variant, kernel_lines: list[Line]) -> list[Line]:
    """The main kernel, with what it calls and the kernels of separate passes."""
    separate = variant.passes == "separate"
    through_t = separate or (bool(spec.pre) and CORES[spec.core].family in ("matmul", "conv"))
    return [
        *_device_functions(kernel_lines),
        *(_each("before", "pre", "a", False) if through_t else []),
        *kernel_lines,
        *(_each("after", "post", "a", False) if separate else []),
    ]


# -------------------------------------------------------------------------------------- row kernels


def _rows(spec: Spec, variant: Variant) -> list[Line]:
    core, family = spec.core, CORES[spec.core].family
    separate, block = variant.passes == "separate", variant.loop == "block"
    scan = family == "scan"
    shared = block and not separate and family not in ("reduce", "scan")
    loop = "for (int64_t c = 0; c < cols; ++c)"
    if block:
        loop = "for (int64_t c = threadIdx.x; c < cols; c += blockDim.x)"
    style = Style(
        loop=loop,
        short=loop.replace("c < cols", "c < cols - 1"),
        first="p[c]" if separate else "pre(p[c])",
        post="" if separate else "post",
        block=block,
    )
    body = _scan_tiles(core, style) if scan and block else ROW_TEMPLATES[family](core, style)
    lines = [
        _head(core, "rows cols"),
        *(plain("    extern __shared__ float q[];") if shared else []),
        _index("blockIdx.x" if block else _INDEX, "r"),
        Line("    if (r < rows) {"),
        Line("        auto p = a + r * cols;"),
        *(plain("        auto q = o + r * cols;") if family != "reduce" and not shared else []),
        *(_stored(body, loop) if shared else body),
        *plain("    }", "}"),
    ]
    return [*_around(spec, variant, lines), *_rows_host(spec, variant, shared)]


def _stored(lines: Sequence[Line], loop: str) -> list[Line]:
    """The template's last loop stores in q; where q is shared memory it must store in o."""
    short = loop.replace("c < cols", "c < cols - 1")

    def moved(text: str | None) -> str | None:
        for head in (loop, short):
            if text and text.startswith(f"        {head} q[c] = "):
                return text.replace(f"{head} q[c] = ", f"{head} o[r * cols + c] = ")
        return text

    return [
        Line(moved(one.text) or "", tuple((kind, moved(other)) for kind, other in one.faults))
        for one in lines
    ]


def _rows_host(spec: Spec, variant: Variant, shared: bool) -> list[Line]:
    core, family = spec.core, CORES[spec.core].family
    separate = variant.passes == "separate"
    full = family != "reduce"
    # Weights have a column's length: swapped sizes would read behind them.
    swapped: Mapping[str, str] = (
        {} if family == "norm" else {"dims": "    int64_t rows = x.size(1), cols = x.size(0);"}
    )
    launch = _launch(_passed(core, "t" if separate else "a", "rows cols"))
    if shared:
        wrong = tuple(
            (k, t and t.replace("threads>>>", "threads, cols * 4>>>")) for k, t in launch.faults
        )
        launch = Line(launch.text.replace("threads>>>", "threads, cols * 4>>>"), wrong)
    return [
        signature(core),
        line("    int64_t rows = x.size(0), cols = x.size(1);", swapped),
        *pointers(core, "torch::empty_like(x)" if full else "torch::empty({rows}, x.options())"),
        _threads(variant),
        _blocks("rows" if variant.loop == "block" else "rows / threads + 1"),
        *(_first_pass() if separate else []),
        launch,
        *(_last_pass(spec) if separate else []),
        *returned(core),
    ]


def _scan_tiles(core: str, style: Style) -> list[Line]:
    """A running sum by a block: four neighbouring columns a thread, s carries from tile to tile."""
    right, left = "        int64_t c = k;", "        int64_t c = cols - 4 - k;"
    order = "xyzw"
    if core == "rcumsum":
        right, left, order = left, right, "wzyx"
    first = style.first.replace("p[c]", "v.{}")  # pre(v.x), or v.x where a pass applied pre
    steps = [f"v.{order[0]} = {first.format(order[0])};"]
    steps += [f"v.{b} = v.{a} + {first.format(b)};" for a, b in zip(order, order[1:], strict=False)]
    stored = ", ".join(style.put(f"t + v.{part}") for part in "xyzw")
    return [
        line("        float s = 0.f;", {"init": "        float s = 1.f;"}),
        Line("        for (int64_t i = 0; i < cols; i += 4 * blockDim.x) {"),
        Line("        int64_t k = i + 4 * threadIdx.x;"),
        line(right, {"wrong_op": left}),
        Line("        float4 v = k < cols ? *(float4*)(p + c) : float4();"),
        Line(f"        {' '.join(steps)}"),
        line(
            f"        float t = block_scan(v.{order[-1]}, s);",
            {"undeclared": f"        float t = scan(v.{order[-1]}, s);"},
        ),
        Line(f"        if (k < cols) *(float4*)(q + c) = make_float4({stored});"),
        Line("        }"),
    ]


# ---------------------------------------------------------------------------------- matrix products


def _matmul(spec: Spec, variant: Variant) -> list[Line]:
    core, tile, separate = spec.core, variant.loop == "tile", variant.passes == "separate"
    kernel_lines = (_matmul_tiles if tile else _matmul_threads)(core, "" if separate else "post")
    columns = "weight.size(0)" if core == "linear" else "y.size(1)"
    grid = _blocks("m * n / threads + 1")
    if tile:
        text = "    dim3 blocks((n + 127) / 128, (m + 127) / 128);"
        grid = line(text, {"off_by_one": text.replace("(n + 127)", "(n - 1)")})
    return [
        *_around(spec, variant, kernel_lines),
        signature(core),
        Line(f"    int64_t m = x.size(0), k = x.size(1), n = {columns};"),
        *pointers(core, "torch::empty({m, n}, x.options())"),
        _threads(variant),
        grid,
        *(_first_pass() if separate or spec.pre else plain("    auto t = a;")),
        _launch(_passed(core, "t", "m n k")),
        *(_last_pass(spec) if separate else []),
        *returned(core),
    ]


def _matmul_threads(core: str, post: str) -> list[Line]:
    """One thread an output."""
    factor = "w[j * k + l]" if core == "linear" else "b[l * n + j]"
    head = "        for (int64_t l = 0; l < k; ++l)"
    bias: dict[str, str | None] = {"bias": f"        o[r] = {post}(s);"}
    return [
        _head(core, "m n k"),
        _index(name="r"),
        Line("    if (r < m * n) {"),
        Line("        int64_t i = r / n, j = r % n;"),
        line("        float s = 0.f;", {"init": "        float s = 1.f;"}),
        line(
            f"{head} s += a[i * k + l] * {factor};",
            {"off_by_one": f"{head.replace('< k', '< k - 1')} s += a[i * k + l] * {factor};"},
        ),
        line(f"        o[r] = {post}(s + b[j]);", bias)
        if core == "linear"
        else Line(f"        o[r] = {post}(s);"),
        *plain("    }", "}"),
    ]


def _matmul_tiles(core: str, post: str) -> list[Line]:
    """128 x 128 outputs a block of 256 threads, steps of 16 through the inner dimension.

    Padding to 129 keeps the transposing stores out of each other's banks.
    """
    if core == "linear":
        load = plain(
            "            int64_t j = j0 + c / 16;",
            "            v[c % 16][c / 16] = j < n && l < k ? w[j * k + l] : 0.f;",
        )
    else:
        load = plain(
            "            int64_t j = j0 + c % 128, h = l0 + c / 128;",
            "            v[c / 128][c % 128] = j < n && h < k ? b[h * n + j] : 0.f;",
        )
    value, store = "s[e / 8][e % 8]", "        if (i < m && j < n) o[i * n + j] ="
    faults: dict[str, str | None] = {
        "dims": f"        if (i < m && j < n) o[j * m + i] = {post}({value});"
    }
    if core == "linear":
        faults = {"bias": f"{store} {post}({value});"}
        value += " + b[j]"
    inner = "            for (int e = 0; e < 64; ++e)"
    return [
        _head(core, "m n k"),
        *plain(
            "    __shared__ float u[16][129], v[16][129];",
            "    int x = threadIdx.x % 16, y = threadIdx.x / 16;",
            "    int64_t i0 = blockIdx.y * 128, j0 = blockIdx.x * 128;",
        ),
        line("    float s[8][8] = {};", {"init": "    float s[8][8] = {1.f};"}),
        *plain(
            "    for (int64_t l0 = 0; l0 < k; l0 += 16) {",
            "        for (int c = threadIdx.x; c < 2048; c += 256) {",
            "            int64_t i = i0 + c / 16, l = l0 + c % 16;",
            "            u[c % 16][c / 16] = i < m && l < k ? a[i * k + l] : 0.f;",
        ),
        *load,
        *plain("        }", "        __syncthreads();"),
        line(
            "        for (int l = 0; l < 16; ++l) {",
            {"off_by_one": "        for (int l = 0; l < 15; ++l) {"},
        ),
        *plain(
            "            #pragma unroll",
            f"{inner} s[e / 8][e % 8] += u[l][y + e / 8 * 16] * v[l][x + e % 8 * 16];",
            "        }",
            "        __syncthreads();",
            "    }",
            "    #pragma unroll",
            "    for (int e = 0; e < 64; ++e) {",
            "        int64_t i = i0 + y + e / 8 * 16, j = j0 + x + e % 8 * 16;",
        ),
        line(f"{store} {post}({value});", faults),
        *plain("    }", "}"),
    ]


# ------------------------------------------------------------------------------------- convolutions


def _conv(spec: Spec, variant: Variant) -> list[Line]:
    core, vector = spec.core, variant.loop == "float4"
    separate, two = variant.passes == "separate", spec.core == "conv2d"
    sizes = "n channels rows cols" if two else "n channels cols"
    lines = [
        _head(core, sizes).text.replace("int64_t", "int"),
        f"    int r = {'4 * (' + _INDEX + ')' if vector else _INDEX};",
        "    if (r < n) {",
    ]
    if two:
        host = ["    int64_t channels = x.size(1), rows = x.size(2), cols = x.size(3);"]
    else:
        host = ["    int64_t channels = x.size(1), cols = x.size(2);"]
    kernel_lines = [*plain(*lines), *_conv_body(two, vector, "" if separate else "post")]
    return [
        *_around(spec, variant, kernel_lines),
        signature(core),
        *plain(*host, "    int64_t n = x.numel();"),
        *pointers(core, "torch::empty_like(x)"),
        _threads(variant),
        _blocks("n / 4 / threads + 1" if vector else "n / threads + 1"),
        *(_first_pass() if separate or spec.pre else plain("    auto t = a;")),
        _launch(_passed(core, "t", sizes)),
        *(_last_pass(spec) if separate else []),
        *returned(core),
    ]


def _conv_body(two: bool, vector: bool, post: str) -> list[Line]:
    """Output r (to r + 3): channel c, row y, column i; g and k point to the taps of one row."""
    if two:
        place = plain(
            "        int size = rows * cols, i = r % cols, y = r / cols % rows;",
            "        int c = r / size % channels;",
        )
        start = "        auto p = a + r / size / channels * channels * size + y * cols + i;"
        wrong = "        auto p = a + y * cols + i;"
        loops = [
            Line("        for (int d = 0; d < channels; ++d)"),
            Line("        for (int e = 0; e < 3; ++e) {"),
            Line("            auto g = p + d * size + (e - 1) * cols;"),
            Line("            auto k = w + (c * channels + d) * 9 + e * 3;"),
            line(
                "            if (y + e < 1 || y + e > rows) continue;",
                {"off_by_one": "            if (y + e < 1 || y + e >= rows) continue;"},
            ),
        ]
    else:
        place = plain("        int i = r % cols, c = r / cols % channels;")
        start = "        auto p = a + r / cols / channels * channels * cols + i;"
        wrong = "        auto p = a + i;"
        loops = [
            Line("        for (int d = 0; d < channels; ++d) {"),
            Line("            auto g = p + d * cols;"),
            Line("            auto k = w + (c * channels + d) * 3;"),
        ]
    kind, zero = ("float4", "make_float4(b[c], b[c], b[c], b[c])") if vector else ("float", "b[c]")
    none = "make_float4(0.f, 0.f, 0.f, 0.f)" if vector else "0.f"
    right, far = ("i < cols - 4", "g[4]") if vector else ("i < cols - 1", "g[1]")
    edges = f"            float l = i > 0 ? g[-1] : 0.f, h = {right} ? {far} : 0.f;"
    return [
        *place,
        line(start, {"dims": wrong}),
        line(f"        {kind} s = {zero};", {"bias": f"        {kind} s = {none};"}),
        *loops,
        line(edges, {"off_by_one": edges.replace("i > 0", "i > 4")}),
        *(_conv_four(post) if vector else _conv_one(post)),
        *plain("    }", "}"),
    ]


def _conv_one(post: str) -> list[Line]:
    return [
        line(
            "            s += k[0] * l + k[1] * g[0] + k[2] * h;",
            {"wrong_op": "            s += k[2] * l + k[1] * g[0] + k[0] * h;"},
        ),
        Line("        }"),
        line(f"        o[r] = {post}(s);", {"semicolon": f"        o[r] = {post}(s)"}),
    ]


def _conv_four(post: str) -> list[Line]:
    put = ", ".join(f"{post}(s.{part})" for part in "xyzw")
    last = f"        *(float4*)(o + r) = make_float4({put})"
    return [
        Line("            float4 v = *(float4*)g;"),
        line(
            "            s.x += k[0] * l + k[1] * v.x + k[2] * v.y;",
            {"wrong_op": "            s.x += k[2] * l + k[1] * v.x + k[0] * v.y;"},
        ),
        *plain(
            "            s.y += k[0] * v.x + k[1] * v.y + k[2] * v.z;",
            "            s.z += k[0] * v.y + k[1] * v.z + k[2] * v.w;",
            "            s.w += k[0] * v.z + k[1] * v.w + k[2] * h;",
            "        }",
        ),
        line(f"{last};", {"semicolon": last}),
    ]


# ------------------------------------------------------------------------------------------ answers


def _body(spec: Spec, variant: Variant) -> list[Line]:
    family = CORES[spec.core].family
    if family == "elementwise":
        return _elementwise(spec.core, variant)
    if family == "matmul":
        return _matmul(spec, variant)
    if family == "conv":
        return _conv(spec, variant)
    return _rows(spec, variant)


def kernel(spec: Spec, variant: Variant) -> list[Line]:
    """The complete correct answer for a task on a GPU, in one variant."""
    declaration = signature(spec.core).text.removesuffix(" {") + ";"
    return [
        *plain(*IMPORTS, 'source = r"""', "#include <torch/extension.h>"),
        *chains(spec, "cuda"),
        *_body(spec, variant),
        *plain(
            '"""',
            f'cpp = "{declaration}"',
            'ops = load_inline(name="fused", cpp_sources=cpp, cuda_sources=source, '
            'functions=["run"], extra_cuda_cflags=["-O3"])',
        ),
        *module(spec.core),
    ]


def variants(core: str) -> list[Variant]:
    """Every way the grammar can write a CUDA answer for a core; the last should be the fastest."""
    family = CORES[core].family
    builds = ("256",) if family == "matmul" else ("32", "256")
    loops = _LOOPS.get(family, _ROW_LOOPS)
    return [Variant(lo, b, p) for lo in loops for b in builds for p in ("separate", "fused")]
