"""Grammar of the fused tasks: what they compute, how their files read, which of them make sense.

A generated task is a `Spec`: element-wise operations before a core (`pre`), the core (row sum,
softmax, matmul, ...) and element-wise operations after it (`post`). `source(spec)` writes the
KernelBench file, one operation a line in `forward`; `read_spec(text)` goes the other way and
accepts nothing that `source` would not have written (sizes and comments aside), so whoever wants
to know what a task asks for need not guess.

Not every composition is worth a task. A relu on numbers that are never negative is dead code, a
sigmoid of a row sum over thousands of columns is the constant 1, and a benchmark made of those
teaches a model to return constants (KernelBench's issues 97, 108, 165). So `problem(spec)` runs
the composition in plain Python on a small sample of the task's own input distribution, corrected
for the true row length, and refuses operations that leave their input unchanged or that make the
output (nearly) constant. The exact audit on real tensors is in `test_tasks.py`.

`python tasks/generate.py` writes every generated task and `splits.toml` here. No torch needed.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import random
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NOMINAL_COLS = 2048  # row length `problem` assumes; task sizes are within a factor of two


@dataclass(frozen=True)
class Spec:
    """One fused task."""

    family: str  # one of FAMILIES
    pre: tuple[str, ...]  # names of OPS applied to the first input before the core, in order
    core: str  # one of CORES; "map" is no operation at all: then everything is in `pre`
    post: tuple[str, ...]  # names of OPS applied to the core's (first) output, in order


# Element-wise operations: name -> the line of `forward`, which holds every constant it needs.
OPS: dict[str, str] = {
    "relu": "x = torch.relu(x)",
    "leaky_relu": "x = F.leaky_relu(x, 0.1)",
    "elu": "x = F.elu(x)",
    "gelu": "x = F.gelu(x)",
    "silu": "x = F.silu(x)",
    "mish": "x = F.mish(x)",
    "softplus": "x = F.softplus(x)",
    "hardswish": "x = F.hardswish(x)",
    "tanh": "x = torch.tanh(x)",
    "sigmoid": "x = torch.sigmoid(x)",
    "sin": "x = torch.sin(x)",
    "exp": "x = torch.exp(torch.clamp(x, -4.0, 4.0))",
    "sqrt": "x = torch.sqrt(x)",
    "abs": "x = torch.abs(x)",
    "square": "x = x * x",
    "clamp": "x = torch.clamp(x, -0.8, 1.2)",
    "scale": "x = x * 1.7",
    "affine": "x = x * 1.3 + 0.4",
}


def _softplus(v: float) -> float:
    return v if v > 20 else math.log1p(math.exp(v))


def _sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v)) if v > -500 else 0.0


# The same operations on one Python float, for the check of sense below (and for tests).
SCALAR: dict[str, Callable[[float], float]] = {
    "relu": lambda v: max(v, 0.0),
    "leaky_relu": lambda v: v if v > 0 else 0.1 * v,
    "elu": lambda v: v if v > 0 else math.expm1(v),
    "gelu": lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))),
    "silu": lambda v: v * _sigmoid(v),
    "mish": lambda v: v * math.tanh(_softplus(v)),
    "softplus": _softplus,
    "hardswish": lambda v: v * min(max(v + 3, 0.0), 6.0) / 6,
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "sin": math.sin,
    "exp": lambda v: math.exp(min(max(v, -4.0), 4.0)),
    "sqrt": lambda v: math.sqrt(max(v, 0.0)),
    "abs": abs,
    "square": lambda v: v * v,
    "clamp": lambda v: min(max(v, -0.8), 1.2),
    "scale": lambda v: v * 1.7,
    "affine": lambda v: v * 1.3 + 0.4,
}

LINEAR = frozenset({"scale", "affine"})
# What may stand before sqrt: positive values with a small relative error, which a root keeps small.
POSITIVE = frozenset({"exp", "sigmoid", "softplus", "softmax", "l2norm", "softmax_max"})


@dataclass(frozen=True)
class Layout:
    """Inputs, parameters and sizes that a core needs."""

    sizes: tuple[tuple[str, int, int], ...]  # (constant, value on cuda, value on cpp)
    arguments: tuple[str, ...]  # names of forward's arguments
    inputs: tuple[str, ...]  # the body of get_inputs, one line each
    init: tuple[tuple[str, str], ...] = ()  # (constructor argument, size constant given to it)
    parameters: tuple[str, ...] = ()  # lines of __init__ after super().__init__()


@dataclass(frozen=True)
class Core:
    """The operation in the middle of a task."""

    family: str  # one of FAMILIES
    title: str  # for the comment at the top of the file
    lines: tuple[str, ...]  # lines of forward
    layout: Layout
    returns: str = "x"  # what forward returns
    barred_pre: frozenset[str] = frozenset()  # idle (or too wild) right before the core
    only_pre: frozenset[str] | None = None  # if set, nothing else may come before the core
    only_post: frozenset[str] | None = None  # if set, nothing else may come after the core


# Rows differ in scale and offset, so that a reduction is not one number for all rows and seeds.
_ROWS = ("scale = 0.5 + 1.5 * torch.rand(ROWS, 1)", "offset = 0.5 * torch.randn(ROWS, 1)")
_GRID = (("ROWS", 8192, 2048), ("COLS", 4096, 1024))
_TALL = (("ROWS", 16384, 4096), ("COLS", 4096, 1024))  # reductions write little, so they take more
_ONE = Layout(_GRID, ("x",), (*_ROWS, "return [torch.randn(ROWS, COLS) * scale + offset]"))
_REDUCE = Layout(_TALL, _ONE.arguments, _ONE.inputs)
_TWO = Layout(
    _GRID,
    ("x", "y"),
    (*_ROWS, "return [torch.randn(ROWS, COLS) * scale + offset, torch.randn(ROWS, COLS)]"),
)
_RANDOM_WALK = Layout(
    _GRID,
    ("x",),
    (_ROWS[0], "return [torch.randn(ROWS, COLS) * scale]"),
)
_NORM = Layout(
    _GRID,
    ("x",),
    _ONE.inputs,
    (("cols", "COLS"),),
    (
        "self.weight = nn.Parameter(1.0 + 0.3 * torch.randn(cols))",
        "self.bias = nn.Parameter(0.3 * torch.randn(cols))",
    ),
)
_RMSNORM = Layout(_GRID, ("x",), _ONE.inputs, _NORM.init, _NORM.parameters[:1])
_MATRIX = (("M", 4096, 1024), ("K", 2048, 128), ("N", 4096, 1024))
_MATMUL = Layout(
    _MATRIX,
    ("x", "y"),
    ("return [torch.randn(M, K), torch.randn(K, N) / K**0.5]",),
)
_LINEAR = Layout(
    _MATRIX,
    ("x",),
    ("return [torch.randn(M, K)]",),
    (("k", "K"), ("n", "N")),
    (
        "self.weight = nn.Parameter(torch.randn(n, k) / k**0.5)",
        "self.bias = nn.Parameter(0.5 * torch.randn(n))",
    ),
)
_CONV1D = Layout(
    (("BATCH", 64, 8), ("CHANNELS", 16, 8), ("LENGTH", 32768, 16384)),
    ("x",),
    ("return [torch.randn(BATCH, CHANNELS, LENGTH)]",),
    (("channels", "CHANNELS"),),
    (
        "self.weight = nn.Parameter(torch.randn(channels, channels, 3) / (3 * channels) ** 0.5)",
        "self.bias = nn.Parameter(0.5 * torch.randn(channels))",
    ),
)
_CONV2D = Layout(
    (("BATCH", 32, 8), ("CHANNELS", 16, 8), ("SIDE", 256, 96)),
    ("x",),
    ("return [torch.randn(BATCH, CHANNELS, SIDE, SIDE)]",),
    (("channels", "CHANNELS"),),
    (
        "self.weight = nn.Parameter(torch.randn(channels, channels, 3, 3) / (9 * channels) ** 0.5)",
        "self.bias = nn.Parameter(0.5 * torch.randn(channels))",
    ),
)

_WIDE = frozenset({"relu", "leaky_relu", "abs", "scale", "affine"})  # not idle on large values

CORES: dict[str, Core] = {
    "map": Core("elementwise", "one input", (), _ONE),
    "add": Core("elementwise", "sum of two inputs", ("x = x + y",), _TWO),
    "sub": Core("elementwise", "difference of two inputs", ("x = x - y",), _TWO),
    "mul": Core("elementwise", "product of two inputs", ("x = x * y",), _TWO),
    "maximum": Core("elementwise", "larger of two inputs", ("x = torch.maximum(x, y)",), _TWO),
    "gate": Core("elementwise", "gated by a second input", ("x = x * torch.sigmoid(y)",), _TWO),
    "sum": Core("reduce", "row sums", ("x = torch.sum(x, dim=1)",), _REDUCE, only_post=_WIDE),
    "mean": Core("reduce", "row means", ("x = torch.mean(x, dim=1)",), _REDUCE),
    "amax": Core(
        "reduce",
        "row maxima",
        ("x = torch.amax(x, dim=1)",),
        _REDUCE,
        # A long row's maximum is positive and large: most operations do nothing to it, or saturate.
        only_pre=frozenset({"abs", "square", "affine"}),
        only_post=frozenset({"scale", "affine", "square", "sin"}),
    ),
    "l2norm": Core(
        "reduce",
        "Euclidean norms of the rows",
        ("x = torch.linalg.vector_norm(x, dim=1)",),
        _REDUCE,
        barred_pre=frozenset({"abs"}),
        only_post=frozenset({"scale", "affine", "sqrt"}),
    ),
    "logsumexp": Core(
        "reduce", "log-sum-exp of the rows", ("x = torch.logsumexp(x, dim=1)",), _REDUCE
    ),
    "softmax": Core(
        "softmax",
        "softmax over the rows",
        ("x = torch.softmax(x, dim=1)",),
        _ONE,
        barred_pre=frozenset({"affine", "exp", "square"}),
        only_post=frozenset({"scale", "sqrt"}),
    ),
    "log_softmax": Core(
        "softmax",
        "log-softmax over the rows",
        ("x = torch.log_softmax(x, dim=1)",),
        _ONE,
        barred_pre=frozenset({"affine"}),
    ),
    "layernorm": Core(
        "norm",
        "layer norm over the rows",
        ("x = F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)",),
        _NORM,
        barred_pre=LINEAR,
    ),
    "rmsnorm": Core(
        "norm",
        "RMS norm over the rows",
        ("x = F.rms_norm(x, self.weight.shape, self.weight, 1e-6)",),
        _RMSNORM,
        barred_pre=LINEAR,
    ),
    "matmul": Core("matmul", "matrix product", ("x = torch.matmul(x, y)",), _MATMUL),
    "linear": Core("matmul", "linear layer", ("x = F.linear(x, self.weight, self.bias)",), _LINEAR),
    "conv1d": Core(
        "conv",
        "1-d convolution, kernel 3",
        ("x = F.conv1d(x, self.weight, self.bias, padding=1)",),
        _CONV1D,
    ),
    "conv2d": Core(
        "conv",
        "2-d convolution, kernel 3 x 3",
        ("x = F.conv2d(x, self.weight, self.bias, padding=1)",),
        _CONV2D,
    ),
    "cumsum": Core(
        "scan",
        "running sums of the rows",
        ("x = torch.cumsum(x, dim=1)",),
        _RANDOM_WALK,
        only_post=_WIDE,
    ),
    "rcumsum": Core(
        "scan",
        "running sums of the rows, from the right",
        ("x = torch.flip(torch.cumsum(torch.flip(x, (1,)), dim=1), (1,))",),
        _RANDOM_WALK,
        only_post=_WIDE,
    ),
    "softmax_max": Core(
        "tuple",
        "softmax over the rows, and the row maxima",
        ("y = torch.amax(x, dim=1)", "x = torch.softmax(x, dim=1)"),
        _ONE,
        returns="x, y",
        only_pre=frozenset({"abs", "leaky_relu", "silu", "gelu", "scale"}),
        only_post=frozenset({"scale", "sqrt"}),
    ),
    "center_mean": Core(
        "tuple",
        "rows without their mean, and the means",
        ("y = torch.mean(x, dim=1)", "x = x - y[:, None]"),
        _ONE,
        returns="x, y",
    ),
    "unit_norm": Core(
        "tuple",
        "rows divided by their norm, and the norms",
        ("y = torch.linalg.vector_norm(x, dim=1)", "x = x / y[:, None]"),
        _ONE,
        returns="x, y",
        only_post=frozenset({"scale"}),
    ),
}
FAMILIES: tuple[str, ...] = tuple(dict.fromkeys(core.family for core in CORES.values()))


def cores(family: str) -> tuple[str, ...]:
    """Names of the cores of a family."""
    return tuple(name for name, core in CORES.items() if core.family == family)


def name(spec: Spec) -> str:
    """File name (without .py) of a task; different specs have different names."""
    middle = () if spec.core == "map" else (spec.core,)
    return "_".join((*spec.pre, *middle, *spec.post))


# ----------------------------------------------------------------------------------- text <-> spec


def source(spec: Spec) -> str:
    """The task file: KernelBench format, cuda sizes as constants, cpp sizes in the size block."""
    core, layout = CORES[spec.core], CORES[spec.core].layout
    forward = [OPS[op] for op in spec.pre] + list(core.lines) + [OPS[op] for op in spec.post]
    init_names = ", ".join(["self", *(argument for argument, _ in layout.init)])
    uses_f = any("F." in line for line in forward)
    small = ", ".join(f"{constant} = {cpp}" for constant, _, cpp in layout.sizes)
    lines = [
        f"# {_title(spec)}",
        "import torch",
        "import torch.nn as nn",
        *(["import torch.nn.functional as F"] if uses_f else []),
        "",
        *(f"{constant} = {cuda}" for constant, cuda, _ in layout.sizes),
        f"# sizes[cpp]: {small}",
        "",
        "",
        "class Model(nn.Module):",
        f"    def __init__({init_names}):",
        "        super().__init__()",
        *(f"        {line}" for line in layout.parameters),
        "",
        f"    def forward(self, {', '.join(layout.arguments)}):",
        *(f"        {line}" for line in forward),
        f"        return {core.returns}",
        "",
        "",
        "def get_inputs():",
        *(f"    {line}" for line in layout.inputs),
        "",
        "",
        "def get_init_inputs():",
        f"    return [{', '.join(constant for _, constant in layout.init)}]",
    ]
    return "\n".join(lines) + "\n"


def _title(spec: Spec) -> str:
    """One line of prose: what the task computes."""
    if spec.core == "map":
        return f"Element-wise chain: {', '.join(spec.pre)}."
    before = f", after {', '.join(spec.pre)}" if spec.pre else ""
    after = f", then {', '.join(spec.post)}" if spec.post else ""
    title = CORES[spec.core].title
    return f"{title[0].upper()}{title[1:]}{before}{after}."


def read_spec(text: str) -> Spec | None:
    """The spec that `source` would write as `text` (its sizes and comments may differ), or None."""
    try:
        tree = ast.parse(text)
        forward = next(
            part
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == "Model"
            for part in node.body
            if isinstance(part, ast.FunctionDef) and part.name == "forward"
        )
    except (SyntaxError, ValueError, StopIteration, RecursionError):
        return None
    lines = tuple(ast.unparse(statement) for statement in forward.body[:-1])
    for core_name, core in CORES.items():
        spec = _match(lines, core_name, core)
        if spec is not None and _shape(tree) == _shape(ast.parse(source(spec))):
            return spec
    return None


def _match(lines: tuple[str, ...], core_name: str, core: Core) -> Spec | None:
    """Split the lines of a forward around a core's own lines."""
    wanted = tuple(_unparse(line) for line in core.lines)
    by_line = {_unparse(line): op for op, line in OPS.items()}
    last = len(lines) - len(wanted)
    for start in range(last + 1) if wanted else [len(lines)]:
        pre, post = lines[:start], lines[start + len(wanted) :]
        if lines[start : start + len(wanted)] != wanted:
            continue
        if all(line in by_line for line in (*pre, *post)):
            chain_pre = tuple(by_line[line] for line in pre)
            chain_post = tuple(by_line[line] for line in post)
            return Spec(core.family, chain_pre, core_name, chain_post)
    return None


@functools.cache
def _unparse(line: str) -> str:
    """A line as ast.unparse writes it, so that spelling does not matter."""
    return ast.unparse(ast.parse(line))


def _shape(tree: ast.Module) -> str:
    """The program with its size constants blanked out."""
    parts = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            parts.append(ast.unparse(node.targets[0]) + " = size")
        else:
            parts.append(ast.unparse(node))
    return "\n".join(parts)


# -------------------------------------------------------------------------- which specs make sense

Rows = list[list[float]]


@functools.cache
def _sample_rows(spread_offsets: bool) -> Rows:
    """24 rows of 32 values like the inputs of `_ONE` (or `_RANDOM_WALK`), with mean exactly 0."""
    rng = random.Random(7)
    rows = []
    for _ in range(12):
        scale, offset = 0.5 + 1.5 * rng.random(), 0.5 * rng.gauss(0, 1) * spread_offsets
        rows.append([rng.gauss(0, 1) * scale + offset for _ in range(32)])
    return rows + [[-v for v in row] for row in rows]


def _apply(op: str, rows: Rows) -> Rows:
    function = SCALAR[op]
    return [[function(v) for v in row] for row in rows]


def _sample_core(core: str, rows: Rows) -> Rows:
    """The core's first output on the sample, as it would be with rows of NOMINAL_COLS values."""
    rng = random.Random(11)
    longer = NOMINAL_COLS / len(rows[0])
    flat = [v for row in rows for v in row]
    rms = math.sqrt(sum(v * v for v in flat) / len(flat))
    if core in ("add", "sub", "mul", "maximum", "gate"):
        two: dict[str, Callable[[float, float], float]] = {
            "add": lambda v, w: v + w,
            "sub": lambda v, w: v - w,
            "mul": lambda v, w: v * w,
            "maximum": max,
            "gate": lambda v, w: v * _sigmoid(w),
        }
        return [[two[core](v, rng.gauss(0, 1)) for v in row] for row in rows]
    if core in ("matmul", "linear", "conv1d", "conv2d"):
        return [[rng.gauss(0, rms) for _ in row] for row in rows]
    if core in ("cumsum", "rcumsum"):
        mean, places = sum(flat) / len(flat), range(1, NOMINAL_COLS, 64)
        return [[rng.gauss(mean * n, rms * math.sqrt(n)) for n in places] for _ in rows]
    return [_sample_row_core(core, row, longer, rng) for row in rows]


def _sample_row_core(core: str, row: list[float], longer: float, rng: random.Random) -> list[float]:
    """Cores that work on one row alone."""
    total = sum(row) * longer
    mean = sum(row) / len(row)
    norm = math.sqrt(sum(v * v for v in row) * longer)
    lse = max(row) + math.log(sum(math.exp(v - max(row)) for v in row) * longer)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in row) / len(row)) + 1e-9
    reduced = {"sum": total, "mean": mean, "l2norm": norm, "logsumexp": lse, "amax": 1.5 * max(row)}
    if core in reduced:
        return [reduced[core]]
    each: dict[str, Callable[[float], float]] = {
        "map": lambda v: v,
        "softmax": lambda v: math.exp(v - lse),
        "softmax_max": lambda v: math.exp(v - lse),
        "log_softmax": lambda v: v - lse,
        "layernorm": lambda v: (v - mean) / deviation * rng.gauss(1, 0.3) + rng.gauss(0, 0.3),
        "rmsnorm": lambda v: v / (norm / math.sqrt(NOMINAL_COLS)) * rng.gauss(1, 0.3),
        "center_mean": lambda v: v - mean,
        "unit_norm": lambda v: v / norm,
    }
    return [each[core](v) for v in row]


def _constant(values: Sequence[float]) -> bool:
    """Whether the values are (nearly) one number to a comparison with tolerances."""
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    if spread < 0.08 * abs(mean) or spread < 1e-6:
        return True
    cell = max(abs(v) for v in values) * 1e-3
    counts: dict[int, int] = {}
    for v in values:
        counts[round(v / cell)] = counts.get(round(v / cell), 0) + 1
    return max(counts.values()) > 0.62 * len(values)


def _unchanged(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether an operation did no more than scale and shift: correlation of more than 0.9995."""
    n = len(before)
    mean_b, mean_a = sum(before) / n, sum(after) / n
    bb = sum((v - mean_b) ** 2 for v in before)
    aa = sum((v - mean_a) ** 2 for v in after)
    ab = sum((v - mean_b) * (w - mean_a) for v, w in zip(before, after, strict=True))
    return bb == 0 or aa == 0 or ab * ab > 0.9995**2 * aa * bb


def _chain_problem(ops: Sequence[str], rows: Rows, before: str) -> tuple[str, Rows]:
    """Follow a chain over the sample; `before` precedes it. (what is wrong or "", the result)."""
    for op in ops:
        if op == "sqrt" and before not in POSITIVE:
            return f"sqrt after {before or 'a signed input'}", rows
        if op == "sin" and max(abs(v) for row in rows for v in row) > 20:
            return "sin of large values", rows
        if op in LINEAR and before in LINEAR or (before, op) == ("abs", "square"):
            return f"{before} before {op} is redundant", rows
        after = _apply(op, rows)
        flat_before = [v for row in rows for v in row]
        flat_after = [v for row in after for v in row]
        if op not in LINEAR and _unchanged(flat_before, flat_after):
            return f"{op} changes nothing", rows
        if _constant(flat_after):
            return f"nearly constant after {op}", rows
        if max(abs(v) for v in flat_after) > 2e4:
            return f"{op} overflows half precision", rows
        rows, before = after, op
    return "", rows


@functools.lru_cache(maxsize=100_000)
def problem(spec: Spec) -> str:
    """Why a composition is not a sensible task; "" if it is one."""
    core = CORES[spec.core]
    chain = (*spec.pre, *spec.post)
    if spec.core == "map" and (spec.post or not 2 <= len(spec.pre) <= 4):
        return "an element-wise chain has two to four operations, all in pre"
    if len(set(chain)) != len(chain):
        return "an operation occurs twice"
    if core.only_pre is not None and not set(spec.pre) <= core.only_pre:
        return f"an operation before {spec.core} does nothing"
    if core.only_post is not None and not set(spec.post) <= core.only_post:
        return f"an operation after {spec.core} saturates"
    if spec.pre and spec.pre[-1] in core.barred_pre:
        return f"{spec.pre[-1]} before {spec.core} does nothing or too much"
    trouble, rows = _chain_problem(spec.pre, _sample_rows(core.layout != _RANDOM_WALK), "")
    if trouble:
        return trouble
    middle = _sample_core(spec.core, rows)
    if _constant([v for row in middle for v in row]):
        return f"nearly constant after {spec.core}"
    before = spec.core if spec.core != "map" else "".join(spec.pre[-1:])
    return _chain_problem(spec.post, middle, before)[0]


def all_specs(max_pre: int = 1, max_post: int = 1) -> Iterator[Spec]:
    """Every sensible spec with at most so many operations around its core; chains of 2 and 3."""
    for core_name, core in CORES.items():
        if core_name == "map":
            pres = [c for n in (2, 3) for c in itertools.permutations(OPS, n)]
            posts: list[tuple[str, ...]] = [()]
        else:
            pres = [c for n in range(max_pre + 1) for c in itertools.permutations(OPS, n)]
            posts = [c for n in range(max_post + 1) for c in itertools.permutations(OPS, n)]
        for pre, post in itertools.product(pres, posts):
            spec = Spec(core.family, pre, core_name, post)
            if not problem(spec):
                yield spec


def random_spec(
    rng: random.Random, exclude: Collection[Spec] = (), families: Sequence[str] = FAMILIES
) -> Spec:
    """A sensible spec, none of `exclude`: family, then core, then 0-2 operations on either side."""
    while True:
        core = rng.choice(cores(rng.choice(families)))
        if core == "map":
            pre = tuple(rng.sample(list(OPS), rng.choice((2, 2, 3, 3, 4))))
            post: tuple[str, ...] = ()
        else:
            pre = tuple(rng.sample(list(OPS), rng.choice((0, 0, 1, 1, 2))))
            post = tuple(rng.sample(list(OPS), rng.choice((0, 1, 1, 2))))
        spec = Spec(CORES[core].family, pre, core, post)
        if spec not in exclude and not problem(spec):
            return spec


# ----------------------------------------------------------------------------- the committed tasks


def _spec(text: str) -> Spec:
    """Parse "pre pre | core | post post"."""
    pre, core, post = (tuple(part.split()) for part in text.split("|"))
    return Spec(CORES[core[0]].family, pre, core[0], post)


TRAIN: tuple[Spec, ...] = tuple(
    map(
        _spec,
        (
            "silu scale | map |",
            "abs sigmoid affine | map |",
            "tanh square | map |",
            "exp sqrt affine | map |",
            "elu clamp | map |",
            "leaky_relu | mul | gelu",
            "| add | tanh",
            "| sum | scale",
            "softplus | sub | hardswish",
            "silu | sum |",
            "square | mean |",
            "gelu | mean | affine",
            "abs | amax |",
            "| l2norm | scale",
            "| logsumexp | sin",
            "scale | softmax |",
            "silu | log_softmax |",
            "| layernorm | relu",
            "tanh | layernorm |",
            "| rmsnorm | silu",
            "| matmul | relu",
            "| linear | gelu",
            "relu | conv2d |",
            "| conv1d | tanh",
            "sin | cumsum |",
            "| rcumsum | leaky_relu",
            "| softmax_max | scale",
        ),
    )
)
HELDOUT: tuple[Spec, ...] = tuple(
    map(
        _spec,
        (
            "silu square | map |",
            "leaky_relu tanh scale | map |",
            "silu | add | relu",
            "gelu | sum |",
            "tanh | mean | abs",
            "| softmax | scale",
            "gelu | log_softmax |",
            "silu | layernorm |",
            "| rmsnorm | gelu",
            "| matmul | silu",
            "| linear | tanh",
            "| conv2d | relu",
            "| cumsum | relu",
            "abs | softmax_max |",
        ),
    )
)
EXTRA: tuple[str, ...] = (  # written by hand, outside the grammar
    "bias_gelu_residual",
    "group_center_silu",
    "gated_linear_unit",
    "rotary_halves",
    "row_max_index",
)

RULE = """\
# Which tasks are trained on, and which only measured.
# Rule: a held-out task is a composition (pre, core, post) that is no training task and that no
# warm-up trace is drawn from (random_spec(rng, exclude=HELDOUT) in generate.py). Every core and
# every operation of a held-out task occurs in some training task, and every family has tasks in
# both lists: what is new is the composition.
# `extra`: written by hand, outside the grammar; not trained on unless a config names them.
# Written by generate.py; test_tasks.py checks the rule.
"""


def splits_text() -> str:
    """The contents of splits.toml."""

    def block(key: str, names: Sequence[str]) -> str:
        return f"{key} = [\n" + "".join(f'    "{item}",\n' for item in names) + "]\n"

    lists = {
        "train": [name(spec) for spec in TRAIN],
        "heldout": [name(spec) for spec in HELDOUT],
        "extra": list(EXTRA),
    }
    return RULE + "\n".join(["", *(block(key, names) for key, names in lists.items())])


def main(folder: Path) -> int:
    """Write every generated task and splits.toml into `folder`; 2 if the spec table is faulty."""
    for spec in (*TRAIN, *HELDOUT):
        if trouble := problem(spec):
            print(f"error: {name(spec)}: {trouble}", file=sys.stderr)
            return 2
        (folder / f"{name(spec)}.py").write_text(source(spec))
    (folder / "splits.toml").write_text(splits_text())
    return 0


def is_task_file(path: Path) -> bool:
    """Whether a file of this folder is a task (and not this generator)."""
    return bool(re.search(r"^class Model\b", path.read_text(), re.MULTILINE))


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent))
