"""Kernels that a grammar writes for the generated tasks, in good, slow and broken versions.

A task that `tasks/generate.py` wrote is a `Spec`: operations before a core, the core, operations
after it. `kernel(spec, variant, target)` translates it into a complete Python answer, as a list of
`Line`s. Operations become one C line each, in the same order, inside two small functions `pre`
and `post`, so that a new composition is translated line by line; the core is one template that
calls both. `Variant` says how fast the answer is meant to be: the loop, the compiler flags or the
block size, and how memory is passed over. Every line carries the mistakes that can be made in
it: `broken(lines, rng)` picks one. `STATUS` says what verdict each kind of mistake must get, and
`test_warmstart.py` holds the sandbox and this table against each other.

The answers are ordinary ones: nothing here is known to the sandbox.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tasks.generate import CORES, OPS, Spec


@dataclass(frozen=True)
class Line:
    """One line of an answer, and how it can go wrong."""

    text: str  # without the line end
    faults: tuple[tuple[str, str | None], ...] = ()  # (kind, text instead; None: line is missing)


@dataclass(frozen=True)
class Variant:
    """How an answer is written; each field is one decision that costs or saves time."""

    loop: str  # cpp: "serial", "omp"; cuda: "thread" (a thread per row/item), "block", "float4"
    build: str  # cpp: "O1", "O2", "fast" (compiler flags); cuda: "32", "256" (threads a block)
    passes: str  # "separate" (temporaries), "fused"; matmul, conv: "naive", "ordered"


# What a mistake leads to; the value of kernel_sandbox.Status.
STATUS: dict[str, str] = {
    "semicolon": "COMPILE_ERROR",
    "undeclared": "COMPILE_ERROR",
    "binding": "RUNTIME_ERROR",
    "dtype": "RUNTIME_ERROR",
    "argument": "RUNTIME_ERROR",
    "constant": "INCORRECT",
    "wrong_op": "INCORRECT",
    "forgotten": "INCORRECT",
    "off_by_one": "INCORRECT",
    "init": "INCORRECT",
    "dims": "INCORRECT",
    "bias": "INCORRECT",
    "hack": "HACK",
}


def status_of(kind: str, target: str) -> str:
    """The verdict that a kind of mistake must get: nvcc sees that a kernel is given double*."""
    return "COMPILE_ERROR" if (kind, target) == ("dtype", "cuda") else STATUS[kind]


# How often each kind is drawn where it is possible (not normalised).
WEIGHT: dict[str, float] = {kind: 1.0 for kind in STATUS} | {
    "off_by_one": 2.0,
    "undeclared": 1.5,
    "dtype": 1.5,
    "wrong_op": 0.7,
    "constant": 0.7,
    "argument": 0.5,
    "hack": 0.3,
}

# Operation -> C line; both targets take it.
C_LINE: dict[str, str] = {
    "relu": "v = v > 0.f ? v : 0.f;",
    "leaky_relu": "v = v > 0.f ? v : 0.1f * v;",
    "elu": "v = v > 0.f ? v : expm1f(v);",
    "gelu": "v = 0.5f * v * (1.f + erff(v * 0.70710678f));",
    "silu": "v = v / (1.f + expf(-v));",
    "mish": "v = v * tanhf(log1pf(expf(v)));",
    "softplus": "v = v > 20.f ? v : log1pf(expf(v));",
    "hardswish": "v = v * fminf(fmaxf(v + 3.f, 0.f), 6.f) / 6.f;",
    "tanh": "v = tanhf(v);",
    "sigmoid": "v = 1.f / (1.f + expf(-v));",
    "sin": "v = sinf(v);",
    "exp": "v = expf(fminf(fmaxf(v, -4.f), 4.f));",
    "sqrt": "v = sqrtf(v);",
    "abs": "v = fabsf(v);",
    "square": "v = v * v;",
    "clamp": "v = fminf(fmaxf(v, -0.8f), 1.2f);",
    "scale": "v = v * 1.7f;",
    "affine": "v = v * 1.3f + 0.4f;",
}
# The same with a wrong number, and with a neighbour's formula.
_WRONG_NUMBER: dict[str, str] = {
    "leaky_relu": "v = v > 0.f ? v : 0.01f * v;",
    "gelu": "v = 0.5f * v * (1.f + erff(v * 1.41421356f));",
    "hardswish": "v = v * fminf(fmaxf(v + 3.f, 0.f), 6.f) / 3.f;",
    "exp": "v = expf(fminf(fmaxf(v, -1.f), 1.f));",
    "clamp": "v = fminf(fmaxf(v, -1.f), 1.f);",
    "scale": "v = v * 1.07f;",
    "affine": "v = v * 1.3f + 0.04f;",
}
_WRONG_FORMULA: dict[str, str] = {
    "relu": "v = v < 0.f ? v : 0.f;",
    "elu": "v = v > 0.f ? v : expf(v);",
    "silu": "v = v / (1.f + expf(v));",
    "mish": "v = v * tanhf(expf(v));",
    "softplus": "v = v > 20.f ? v : logf(expf(v) - 1.f);",
    "tanh": "v = tanf(v);",
    "sigmoid": "v = 1.f / (1.f + expf(v));",
    "sin": "v = cosf(v);",
    "sqrt": "v = 1.f / sqrtf(v);",
    "abs": "v = -v;",
    "square": "v = v + v;",
}


def line(text: str, faults: Mapping[str, str | None] | None = None) -> Line:
    return Line(text, tuple((faults or {}).items()))


def plain(*texts: str) -> list[Line]:
    return [Line(text) for text in texts]


def _op_line(op: str) -> Line:
    text = C_LINE[op]
    faults: dict[str, str | None] = {"semicolon": f"    {text[:-1]}", "forgotten": None}
    if op in _WRONG_NUMBER:
        faults["constant"] = f"    {_WRONG_NUMBER[op]}"
    if op in _WRONG_FORMULA:
        faults["wrong_op"] = f"    {_WRONG_FORMULA[op]}"
    return line(f"    {text}", faults)


def _chain(name: str, ops: Sequence[str], target: str) -> list[Line]:
    """The function `pre` or `post`: one line an operation."""
    head = "static inline" if target == "cpp" else "__device__"
    return [
        Line(f"{head} float {name}(float v) {{"),
        *(_op_line(op) for op in ops),
        *plain("    return v;", "}"),
    ]


# ------------------------------------------------------------------------------ row-wise templates


@dataclass(frozen=True)
class Style:
    """How the pieces of a row template are spelt for one target and one variant."""

    loop: str  # head of a loop over the columns c of one row
    short: str  # the same loop, one column too short
    first: str  # the first step's value of column c: pre(p[c]), or p[c] if a pass did that
    post: str  # name of the function around what is stored: "post", or "" if a pass does that
    block: bool  # whether a reduction continues across the threads of a block

    def put(self, value: str) -> str:
        """The expression that is stored for `value`."""
        return f"post({value})" if self.post else value


def _total(style: Style, name: str = "s", kind: str = "sum") -> list[Line]:
    return plain(f"        {name} = block_{kind}({name});") if style.block else []


def _sum_loop(style: Style, body: str, init: bool = True) -> list[Line]:
    """s = sum over a row of what `body` adds to it."""
    wrong: dict[str, str | None] = {"undeclared": "        float sum = 0.f;"}
    if init:
        wrong["init"] = "        float s = 1.f;"
    return [
        line("        float s = 0.f;", wrong),
        line(f"        {style.loop} {body}", {"off_by_one": f"        {style.short} {body}"}),
        *_total(style),
    ]


def _max_loop(style: Style, body: str) -> list[Line]:
    """m = maximum over a row."""
    return [
        line("        float m = -1e30f;", {"undeclared": "        float max = -1e30f;"}),
        Line(f"        {style.loop} {body}"),
        *_total(style, "m", "max"),
    ]


def _store(style: Style, value: str, wrong: Mapping[str, str | None] | None = None) -> Line:
    """Store one value a column into q."""
    text = f"q[c] = {style.put(value)};"
    faults: dict[str, str | None] = {"off_by_one": f"        {style.short} {text}"}
    for kind, other in (wrong or {}).items():
        faults[kind] = f"        {style.loop} q[c] = {style.put(other or '')};"
    return line(f"        {style.loop} {text}", faults)


def _store_row(style: Style, value: str, wrong: Mapping[str, str] | None = None) -> Line:
    """Store one value a row into o."""
    guard = "if (threadIdx.x == 0) " if style.block else ""
    faults: dict[str, str | None] = {
        kind: f"        {guard}o[r] = {style.put(other)};" for kind, other in (wrong or {}).items()
    }
    faults.setdefault("undeclared", f"        {guard}po[r] = {style.put(value)};")
    return line(f"        {guard}o[r] = {style.put(value)};", faults)


def _reduce(core: str, s: Style) -> list[Line]:
    if core == "sum":
        return [*_sum_loop(s, f"s += {s.first};"), _store_row(s, "s", {"wrong_op": "s / cols"})]
    if core == "mean":
        loop = _sum_loop(s, f"s += {s.first};")
        return [*loop, _store_row(s, "s / cols", {"wrong_op": "s"})]
    if core == "amax":
        loop = _max_loop(s, f"m = fmaxf(m, {s.first});")
        return [*loop, _store_row(s, "m", {"wrong_op": "-m"})]
    if core == "l2norm":
        loop = _sum_loop(s, f"{{ float v = {s.first}; s += v * v; }}", init=False)
        return [*loop, _store_row(s, "sqrtf(s)", {"wrong_op": "s"})]
    loop = _max_loop(s, f"m = fmaxf(m, {s.first});")  # logsumexp
    loop += _sum_loop(s, f"s += expf({s.first} - m);", init=False)
    return [*loop, _store_row(s, "m + logf(s)", {"wrong_op": "logf(s)"})]


def _second(style: Style, value: str) -> list[Line]:
    guard = "if (threadIdx.x == 0) " if style.block else ""
    return [line(f"        {guard}u[r] = {value};", {"forgotten": None})]


def _softmax(core: str, s: Style) -> list[Line]:
    lines = _max_loop(s, f"{{ q[c] = {s.first}; m = fmaxf(m, q[c]); }}")
    if core == "softmax_max":
        lines += _second(s, "m")
    if core == "log_softmax":
        lines += _sum_loop(s, "s += expf(q[c] - m);", init=False)
        return [*lines, _store(s, "q[c] - m - logf(s)", {"wrong_op": "q[c] - logf(s)"})]
    lines += _sum_loop(s, "{ q[c] = expf(q[c] - m); s += q[c]; }", init=False)
    return [*lines, _store(s, "q[c] / s", {"wrong_op": "q[c]"})]


def _norm(core: str, s: Style) -> list[Line]:
    if core == "rmsnorm":
        return [
            *_sum_loop(s, f"{{ q[c] = {s.first}; s += q[c] * q[c]; }}", init=False),
            line(
                "        float inv = 1.f / sqrtf(s / cols + 1e-6f);",
                {"wrong_op": "        float inv = 1.f / sqrtf(s + 1e-6f);"},
            ),
            _store(s, "q[c] * inv * w[c]", {"bias": "q[c] * inv"}),
        ]
    return [
        *_sum_loop(s, f"{{ q[c] = {s.first}; s += q[c]; }}", init=False),
        *plain("        float mean = s / cols;", "        s = 0.f;"),
        line(f"        {s.loop} s += (q[c] - mean) * (q[c] - mean);"),
        *_total(s),
        line(
            "        float inv = 1.f / sqrtf(s / cols + 1e-5f);",
            {"wrong_op": "        float inv = 1.f / (s / cols + 1e-5f);"},
        ),
        _store(s, "(q[c] - mean) * inv * w[c] + b[c]", {"bias": "(q[c] - mean) * inv * w[c]"}),
    ]


def _tuple(core: str, s: Style) -> list[Line]:
    if core == "softmax_max":
        return _softmax(core, s)
    if core == "center_mean":
        lines = _sum_loop(s, f"{{ q[c] = {s.first}; s += q[c]; }}")
        lines += [line("        float mean = s / cols;"), *_second(s, "mean")]
        return [*lines, _store(s, "q[c] - mean", {"wrong_op": "q[c] - s"})]
    lines = _sum_loop(s, f"{{ q[c] = {s.first}; s += q[c] * q[c]; }}", init=False)
    lines += [line("        float norm = sqrtf(s);"), *_second(s, "norm")]
    return [*lines, _store(s, "q[c] / norm", {"wrong_op": "q[c] / s"})]


def _scan(core: str, s: Style) -> list[Line]:
    """One pass over the row, left to right or right to left; on cuda one thread a row."""
    body = f"{{ s += {s.first}; q[c] = {s.put('s')}; }}"
    integer = "int64_t" if "int64_t" in s.loop else "int"
    back = f"for ({integer} c = cols - 1; c >= 0; --c)"
    right = back if core == "rcumsum" else s.loop
    wrong = s.loop if core == "rcumsum" else back
    short = right.replace("c >= 0", "c > 0").replace("c < cols", "c < cols - 1")
    return [
        line("        float s = 0.f;", {"undeclared": "        float sum = 0.f;"}),
        line(
            f"        {right} {body}",
            {"wrong_op": f"        {wrong} {body}", "off_by_one": f"        {short} {body}"},
        ),
    ]


ROW_TEMPLATES = {
    "reduce": _reduce,
    "softmax": _softmax,
    "norm": _norm,
    "tuple": _tuple,
    "scan": _scan,
}

# Core of two inputs -> (expression, wrong expression) of the value a and the other input b.
BINARY: dict[str, tuple[str, str]] = {
    "map": ("{a}", "-{a}"),
    "add": ("{a} + {b}", "{a} - {b}"),
    "sub": ("{a} - {b}", "{b} - {a}"),
    "mul": ("{a} * {b}", "{a} + {b}"),
    "maximum": ("fmaxf({a}, {b})", "fminf({a}, {b})"),
    "gate": ("{a} / (1.f + expf(-{b}))", "{a} / (1.f + expf({b}))"),
}

# ----------------------------------------------------------------------------------------- cpp code

_CPP_FLAGS: dict[str, str] = {
    "O1": '"-O1"',
    "O2": '"-O2"',
    "fast": '"-O3", "-march=native", "-ffast-math"',
}
_PRAGMA = "    #pragma omp parallel for"
_ALL = "    for (int64_t i = 0; i < n; ++i)"


def arguments(core: str) -> tuple[str, ...]:
    """Names of the tensors the compiled function takes."""
    layout = CORES[core].layout
    names = [line.split(" = ")[0].removeprefix("self.") for line in layout.parameters]
    return (*layout.arguments, *names)


def signature(core: str) -> Line:
    kind = "std::vector<torch::Tensor>" if CORES[core].family == "tuple" else "torch::Tensor"
    taken = ", ".join(f"torch::Tensor {name}" for name in arguments(core))
    return Line(f"{kind} run({taken}) {{")


def pointers(core: str, shape: str) -> list[Line]:
    """The output tensor and raw pointers: a, b / w, b, o (and u for a second output)."""
    names = {"x": "a", "y": "b", "weight": "w", "bias": "b"}
    lines = [
        line(
            f"    auto out = {shape};",
            {"semicolon": f"    auto out = {shape}", "undeclared": f"    auto y_out = {shape};"},
        )
    ]
    for argument in arguments(core):
        text = f"    auto {names[argument]} = {argument}.data_ptr<float>();"
        wrong: dict[str, str | None] = {}
        if argument == "x":
            wrong["dtype"] = text.replace("<float>", "<double>")
        if argument == "y":
            wrong["undeclared"] = None
        lines.append(line(text, wrong))
    lines.append(Line("    auto o = out.data_ptr<float>();"))
    if CORES[core].family == "tuple":
        lines.append(Line("    auto second = torch::empty({rows}, x.options());"))
        lines.append(Line("    auto u = second.data_ptr<float>();"))
    return lines


def returned(core: str) -> list[Line]:
    if CORES[core].family == "tuple":
        return [line("    return {out, second};"), Line("}")]
    return [line("    return out;", {"undeclared": "    return output;"}), Line("}")]


def _pass(
    body: str, variant: Variant, total: str = "n", wrong: Mapping[str, str] | None = None
) -> list[Line]:
    """One loop over all elements on a line of its own, parallel if the variant is.

    A last pass that applies `post` in place cannot fail by stopping early: `post` may be empty,
    or do nothing to the last element.
    """
    text = f"{_ALL} {body}".replace("i < n", f"i < {total}")
    faults: dict[str, str | None] = {k: f"{_ALL} {other}" for k, other in (wrong or {}).items()}
    if "post(o[i])" not in body:
        faults["off_by_one"] = text.replace(f"i < {total}", f"i < {total} - 1")
    return [*(plain(_PRAGMA) if variant.loop == "omp" else []), line(text, faults)]


def _cpp_elementwise(core: str, variant: Variant) -> list[Line]:
    right, wrong = BINARY[core]
    lines = [signature(core), *pointers(core, "torch::empty_like(x)")]
    lines.append(line("    int64_t n = x.numel();"))
    if variant.passes == "fused":
        value, other = (f.format(a="pre(a[i])", b="b[i]") for f in (right, wrong))
        lines += _pass(
            f"o[i] = post({value});", variant, wrong={"wrong_op": f"o[i] = post({other});"}
        )
    else:
        value, other = (f.format(a="o[i]", b="b[i]") for f in (right, wrong))
        lines += _pass("o[i] = pre(a[i]);", variant)
        if core != "map":
            lines += _pass(f"o[i] = {value};", variant, wrong={"wrong_op": f"o[i] = {other};"})
        lines += _pass("o[i] = post(o[i]);", variant)
    return [*lines, *returned(core)]


def _first_pass(variant: Variant) -> list[Line]:
    """Apply `pre` to all of x into a temporary t."""
    lines = plain("    auto tmp = torch::empty_like(x);", "    auto t = tmp.data_ptr<float>();")
    return lines + _pass("t[i] = pre(a[i]);", variant, "x.numel()")


def _cpp_rows(core: str, variant: Variant) -> list[Line]:
    family, separate = CORES[core].family, variant.passes == "separate"
    loop = "for (int64_t c = 0; c < cols; ++c)"
    style = Style(
        loop=loop,
        short=loop.replace("c < cols", "c < cols - 1"),
        first="p[c]" if separate else "pre(p[c])",
        post="" if separate else "post",
        block=False,
    )
    full = family != "reduce"
    shape = "torch::empty_like(x)" if full else "torch::empty({rows}, x.options())"
    lines = [
        signature(core),
        line(
            "    int64_t rows = x.size(0), cols = x.size(1);",
            {"dims": "    int64_t rows = x.size(1), cols = x.size(0);"},
        ),
        *pointers(core, shape),
        *(_first_pass(variant) if separate else []),
        *(plain(_PRAGMA) if variant.loop == "omp" else []),
        line(
            "    for (int64_t r = 0; r < rows; ++r) {",
            {"off_by_one": "    for (int64_t r = 0; r < rows - 1; ++r) {"},
        ),
        Line(f"        auto p = {'t' if separate else 'a'} + r * cols;"),
        *(plain("        auto q = o + r * cols;") if full else []),
        *ROW_TEMPLATES[family](core, style),
        Line("    }"),
    ]
    if separate:
        lines += _pass("o[i] = post(o[i]);", variant, "out.numel()")
    return [*lines, *returned(core)]


def _cpp_matmul(core: str, variant: Variant) -> list[Line]:
    linear = core == "linear"
    n = "weight.size(0)" if linear else "y.size(1)"
    lines = [
        signature(core),
        Line(f"    int64_t m = x.size(0), k = x.size(1), n = {n};"),
        *pointers(core, "torch::empty({m, n}, x.options())"),
        *_first_pass(variant),
        *(plain(_PRAGMA) if variant.loop == "omp" else []),
        line(
            "    for (int64_t i = 0; i < m; ++i) {",
            {"off_by_one": "    for (int64_t i = 0; i < m - 1; ++i) {"},
        ),
        Line("        auto p = t + i * k;"),
        Line("        auto q = o + i * n;"),
    ]
    column = "        for (int64_t j = 0; j < n; ++j)"
    if variant.passes == "naive":
        value = "s + b[j]" if linear else "s"
        factor = "w[j * k + l]" if linear else "b[l * n + j]"
        bias: dict[str, str | None] = {"bias": "            q[j] = post(s);"} if linear else {}
        head = "for (int64_t l = 0; l < k; ++l)"
        short = "for (int64_t l = 0; l < k - 1; ++l)"
        lines += [
            Line(f"{column} {{"),
            line("            float s = 0.f;", {"init": "            float s = 1.f;"}),
            line(
                f"            {head} s += p[l] * {factor};",
                {"off_by_one": f"            {short} s += p[l] * {factor};"},
            ),
            line(f"            q[j] = post({value});", bias),
            Line("        }"),
        ]
    elif linear:
        lines += _four_outputs()
    else:
        lines += [
            line(f"{column} q[j] = 0.f;", {"init": f"{column} q[j] = 1.f;"}),
            Line("        for (int64_t l = 0; l < k; ++l) {"),
            Line("            float s = p[l];"),
            Line("            auto row = b + l * n;"),
            line(
                "            for (int64_t j = 0; j < n; ++j) q[j] += s * row[j];",
                {"undeclared": "            for (int64_t j = 0; j < n; ++j) q[j] += s * rows[j];"},
            ),
            Line("        }"),
            Line(f"{column} q[j] = post(q[j]);"),
        ]
    return [*lines, Line("    }"), *returned(core)]


def _four_outputs() -> list[Line]:
    """The linear layer, four outputs at a time: each input value is loaded once for four."""
    return [
        Line("        for (int64_t j = 0; j < n; j += 4) {"),
        Line("            auto w0 = w + j * k, w1 = w0 + k, w2 = w1 + k, w3 = w2 + k;"),
        line(
            "            float s0 = b[j], s1 = b[j + 1], s2 = b[j + 2], s3 = b[j + 3];",
            {"bias": "            float s0 = 0.f, s1 = 0.f, s2 = 0.f, s3 = 0.f;"},
        ),
        Line("            for (int64_t l = 0; l < k; ++l) {"),
        line(
            "                s0 += p[l] * w0[l]; s1 += p[l] * w1[l];",
            {"undeclared": "                s0 += p[l] * w0[l]; s1 += p[l] * w1[c];"},
        ),
        Line("                s2 += p[l] * w2[l]; s3 += p[l] * w3[l];"),
        Line("            }"),
        Line("            q[j] = s0; q[j + 1] = s1; q[j + 2] = s2; q[j + 3] = s3;"),
        Line("        }"),
        Line("        for (int64_t j = 0; j < n; ++j) q[j] = post(q[j]);"),
    ]


def _cpp_conv1d(variant: Variant) -> list[Line]:
    lines = [
        signature("conv1d"),
        Line("    int64_t batch = x.size(0), channels = x.size(1), len = x.size(2);"),
        *pointers("conv1d", "torch::empty_like(x)"),
        *_first_pass(variant),
        *(plain(_PRAGMA) if variant.loop == "omp" else []),
        Line("    for (int64_t r = 0; r < batch * channels; ++r) {"),
        line(
            "        auto p = t + r / channels * channels * len;",
            {"dims": "        auto p = t + r % batch * channels * len;"},
        ),
        Line("        auto q = o + r * len;"),
        Line("        auto f = w + r % channels * channels * 3;"),
    ]
    if variant.passes == "naive":
        lines += [
            Line("        for (int64_t i = 0; i < len; ++i) {"),
            line("            float s = b[r % channels];", {"bias": "            float s = 0.f;"}),
            Line("            for (int64_t c = 0; c < channels; ++c)"),
            Line("                for (int64_t d = 0; d < 3; ++d)"),
            line(
                "                    if (i + d >= 1 && i + d <= len) "
                "s += f[c * 3 + d] * p[c * len + i + d - 1];",
                {
                    "off_by_one": "                    if (i + d >= 1 && i + d < len) "
                    "s += f[c * 3 + d] * p[c * len + i + d - 1];"
                },
            ),
            Line("            q[i] = post(s);"),
            Line("        }"),
        ]
    else:
        lines += [
            line(
                "        for (int64_t i = 0; i < len; ++i) q[i] = b[r % channels];",
                {"bias": "        for (int64_t i = 0; i < len; ++i) q[i] = 0.f;"},
            ),
            Line("        for (int64_t c = 0; c < channels; ++c) {"),
            Line("            auto g = f + c * 3;"),
            Line("            auto h = p + c * len;"),
            line("            q[0] += g[1] * h[0] + g[2] * h[1];", {"off_by_one": None}),
            Line("            for (int64_t i = 1; i < len - 1; ++i)"),
            line(
                "                q[i] += g[0] * h[i - 1] + g[1] * h[i] + g[2] * h[i + 1];",
                {
                    "wrong_op": "                "
                    "q[i] += g[2] * h[i - 1] + g[1] * h[i] + g[0] * h[i + 1];"
                },
            ),
            Line("            q[len - 1] += g[0] * h[len - 2] + g[1] * h[len - 1];"),
            Line("        }"),
            line(
                "        for (int64_t i = 0; i < len; ++i) q[i] = post(q[i]);",
                {"semicolon": "        for (int64_t i = 0; i < len; ++i) q[i] = post(q[i])"},
            ),
        ]
    return [*lines, Line("    }"), *returned("conv1d")]


def _cpp_conv2d(variant: Variant) -> list[Line]:
    lines = [
        signature("conv2d"),
        Line("    int64_t batch = x.size(0), channels = x.size(1);"),
        line("    int64_t rows = x.size(2), cols = x.size(3), size = rows * cols;"),
        *pointers("conv2d", "torch::empty_like(x)"),
        *_first_pass(variant),
        *(plain(_PRAGMA) if variant.loop == "omp" else []),
        Line("    for (int64_t r = 0; r < batch * channels; ++r) {"),
        line(
            "        auto p = t + r / channels * channels * size;",
            {"dims": "        auto p = t + r % batch * channels * size;"},
        ),
        Line("        auto q = o + r * size;"),
        Line("        auto f = w + r % channels * channels * 9;"),
        line(
            "        for (int64_t i = 0; i < size; ++i) q[i] = b[r % channels];",
            {"bias": "        for (int64_t i = 0; i < size; ++i) q[i] = 0.f;"},
        ),
    ]
    naive = variant.passes == "naive"
    inner = [
        Line("        for (int64_t c = 0; c < channels; ++c)"),
        Line("        for (int64_t d = 0; d < 9; ++d) {"),
        Line("            int64_t dy = d / 3 - 1, dx = d % 3 - 1;"),
        line("            float g = f[c * 9 + d];"),
        line(
            "            int64_t y0 = dy < 0, y1 = rows - (dy > 0), x0 = dx < 0, "
            "x1 = cols - (dx > 0);",
            {
                "off_by_one": "            int64_t y0 = 1, y1 = rows - 1, x0 = 1, x1 = cols - 1;",
            },
        ),
    ]
    move = "q[y * cols + i] += g * p[c * size + (y + dy) * cols + i + dx];"
    if naive:  # down the columns: every step leaves the cache line
        inner += [
            Line("            for (int64_t i = x0; i < x1; ++i)"),
            Line("            for (int64_t y = y0; y < y1; ++y)"),
        ]
    else:
        inner += [
            Line("            for (int64_t y = y0; y < y1; ++y)"),
            Line("            for (int64_t i = x0; i < x1; ++i)"),
        ]
    lines += [
        *inner,
        line(
            f"                {move}", {"wrong_op": f"                {move}".replace("dx]", "dy]")}
        ),
        Line("        }"),
        line(
            "        for (int64_t i = 0; i < size; ++i) q[i] = post(q[i]);",
            {"semicolon": "        for (int64_t i = 0; i < size; ++i) q[i] = post(q[i])"},
        ),
        Line("    }"),
    ]
    return [*lines, *returned("conv2d")]


def _cpp_body(core: str, variant: Variant) -> list[Line]:
    family = CORES[core].family
    if family == "elementwise":
        return _cpp_elementwise(core, variant)
    if family == "matmul":
        return _cpp_matmul(core, variant)
    if family == "conv":
        return _cpp_conv1d(variant) if core == "conv1d" else _cpp_conv2d(variant)
    return _cpp_rows(core, variant)


def _cpp_load(variant: Variant) -> Line:
    omp = variant.loop == "omp"
    flags = _CPP_FLAGS[variant.build] + (', "-fopenmp"' if omp else "")
    link = ', extra_ldflags=["-fopenmp"]' if omp else ""
    text = (
        'ops = load_inline(name="fused", cpp_sources=source, functions=["run"], '
        f"extra_cflags=[{flags}]{link})"
    )
    return Line(text)


# ----------------------------------------------------------------------------------------- answers


def module(core: str) -> list[Line]:
    """The class ModelNew: the parameters of Model, and one call of the compiled function."""
    layout = CORES[core].layout
    init = ", ".join(["self", *(argument for argument, _ in layout.init)])
    own = [f"self.{name}" for name in arguments(core)[len(layout.arguments) :]]
    given = [*layout.arguments, *own]
    call, short = (f"ops.run({', '.join(names)})" for names in (given, given[:-1]))
    if CORES[core].family == "tuple":
        call, short = f"tuple({call})", f"tuple({short})"
    faults: dict[str, str | None] = {
        "binding": f"        return {call.replace('.run(', '.forward(')}"
    }
    if len(given) > 1:
        faults["argument"] = f"        return {short}"
    if CORES[core].family != "tuple":
        faults["hack"] = f"        return torch.relu({call})"
    return [
        *plain("class ModelNew(nn.Module):", f"    def __init__({init}):"),
        *plain("        super().__init__()", *(f"        {line}" for line in layout.parameters)),
        Line(f"    def forward(self, {', '.join(layout.arguments)}):"),
        line(f"        return {call}", faults),
    ]


IMPORTS = (
    "import torch",
    "import torch.nn as nn",
    "from torch.utils.cpp_extension import load_inline",
)


def kernel(spec: Spec, variant: Variant, target: str) -> list[Line]:
    """The complete correct answer for a task, in one variant."""
    if target == "cuda":
        import cuda_grammar

        return cuda_grammar.kernel(spec, variant)
    return [
        *plain(*IMPORTS, 'source = r"""', "#include <torch/extension.h>", "#include <cmath>"),
        *chains(spec, target),
        *_cpp_body(spec.core, variant),
        *plain('"""'),
        _cpp_load(variant),
        *module(spec.core),
    ]


def chains(spec: Spec, target: str) -> list[Line]:
    """The functions `pre` and `post` of an answer."""
    return [*_chain("pre", spec.pre, target), *_chain("post", spec.post, target)]


def text(lines: Sequence[Line]) -> str:
    """The answer as a file."""
    return "\n".join(line.text for line in lines) + "\n"


def fault_kinds(lines: Sequence[Line]) -> dict[str, list[int]]:
    """Which mistakes can be made in an answer: kind -> places (line numbers from 0)."""
    places: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        for kind, _ in line.faults:
            places.setdefault(kind, []).append(number)
    return places


def broken(lines: Sequence[Line], rng: random.Random, kind: str = "") -> tuple[list[Line], str]:
    """The answer with one mistake: of `kind`, or of a kind drawn by WEIGHT. (answer, kind)."""
    places = fault_kinds(lines)
    if not kind:
        kinds = sorted(places)
        kind = rng.choices(kinds, [WEIGHT[k] for k in kinds])[0]
    number = rng.choice(places[kind])
    instead = dict(lines[number].faults)[kind]
    middle = [] if instead is None else [Line(instead)]
    return [*lines[:number], *middle, *lines[number + 1 :]], kind


def variants(core: str, target: str) -> list[Variant]:
    """Every way the grammar can write an answer for a core."""
    family = CORES[core].family
    passes = ("naive", "ordered") if family in ("matmul", "conv") else ("separate", "fused")
    if target == "cuda":
        import cuda_grammar

        return cuda_grammar.variants(core)
    return [Variant(lo, b, p) for lo in ("serial", "omp") for b in _CPP_FLAGS for p in passes]


def fastest(core: str, target: str) -> Variant:
    """The variant that should win."""
    return variants(core, target)[-1]


def slower_in(variant: Variant, core: str, target: str) -> list[str]:
    """The fields in which a variant is not the fastest."""
    best = fastest(core, target)
    return [f for f in ("loop", "build", "passes") if getattr(variant, f) != getattr(best, f)]


def improved(variant: Variant, fields: Sequence[str], core: str, target: str) -> Variant:
    """The variant with some fields taken from the fastest one."""
    best = fastest(core, target)
    return replace(variant, **{field: getattr(best, field) for field in fields})


# Words for the thought and the summary.
_WORDS: dict[str, str] = {
    "serial": "Loop: serial.",
    "omp": "Loop: parallel with OpenMP.",
    "O1": "Flags: -O1.",
    "O2": "Flags: -O2.",
    "fast": "Flags: -O3, native, fast math.",
    "separate": "Memory: one pass per step.",
    "fused": "Memory: everything fused.",
    "naive": "Order: as in the formula.",
    "ordered": "Order: along memory.",
    "thread": "Loop: one thread per row or item.",
    "block": "Loop: a block per row.",
    "float4": "Loop: float4 per thread.",
    "tile": "Loop: shared memory tiles.",
    "32": "Block: 32 threads.",
    "256": "Block: 256 threads.",
}


PLAN = "Loop: "  # how the plan in a thought begins


def plan(variant: Variant) -> list[str]:
    """The plan in a thought: one decision a line."""
    return [_WORDS[variant.loop], _WORDS[variant.build], _WORDS[variant.passes]]


def summary(variant: Variant) -> str:
    """The summary line."""
    return "I wrote this. " + " ".join(plan(variant))


assert set(C_LINE) == set(OPS), "every operation of the task grammar needs a C line"
