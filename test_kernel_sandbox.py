"""Tests of the sandbox: real compiled kernels, real processes, every status for its own reason.

One C++ source holds honest and dishonest functions, so that it is compiled once; each test is a
ModelNew around it. Where a cheat would fall to the static checks already, they are switched off:
each layer must hold by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import confinement
import kernel_sandbox
import sandbox_commands
from confinement import Limits
from kernel_sandbox import (
    Call,
    KernelResult,
    Sandbox,
    Status,
    Task,
    UserError,
    load_task,
    resolve_sizes,
    score,
    summarise,
)

HERE = Path(__file__).resolve().parent

TASK = """
import torch
import torch.nn as nn

ROWS = 4096
COLS = 1024
# sizes[cpp]: ROWS = 256, COLS = 512


class Model(nn.Module):
    def __init__(self, cols):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(cols))
        self.offset = nn.Parameter(torch.zeros(cols))

    def forward(self, x):
        return torch.tanh(x) * self.gain + self.offset


def get_inputs():
    return [torch.randn(ROWS, COLS)]


def get_init_inputs():
    return [COLS]
"""

SOFTMAX = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=1)


def get_inputs():
    return [torch.randn(64, 2048)]


def get_init_inputs():
    return []
"""

SOURCE = r"""
#include <torch/extension.h>
#include <cmath>

static void compute(const float* x, const float* g, const float* b, float* o, int64_t from,
                    int64_t to, int64_t cols) {
  for (int64_t i = from; i < to; ++i)
    for (int64_t j = 0; j < cols; ++j)
      o[i * cols + j] = std::tanh(x[i * cols + j]) * g[j] + b[j];
}

torch::Tensor honest(torch::Tensor x, torch::Tensor g, torch::Tensor b) {
  TORCH_CHECK(x.dim() == 2, "expected a matrix, got ", x.dim(), " dimensions");
  auto out = torch::empty_like(x);
  const int64_t rows = x.size(0), cols = x.size(1);
  const float *px = x.data_ptr<float>(), *pg = g.data_ptr<float>(), *pb = b.data_ptr<float>();
  float* po = out.data_ptr<float>();
  #pragma omp parallel for
  for (int64_t i = 0; i < rows; ++i) compute(px, pg, pb, po, i, i + 1, cols);
  return out;
}

"""

CHEATS = r"""
#include <chrono>
#include <cstdlib>
#include <thread>

// Leaves the second half as it finds it.
torch::Tensor half_done(torch::Tensor x, torch::Tensor g, torch::Tensor b) {
  auto out = torch::empty_like(x);
  compute(x.data_ptr<float>(), g.data_ptr<float>(), b.data_ptr<float>(), out.data_ptr<float>(), 0,
          x.size(0) / 2, x.size(1));
  return out;
}

torch::Tensor unwritten(torch::Tensor x) { return torch::empty_like(x); }

// Returns at once; a thread that nobody joins computes later.
torch::Tensor later(torch::Tensor x, torch::Tensor g, torch::Tensor b, int64_t ms) {
  auto out = torch::empty_like(x);
  float* po = out.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) po[i] = 0;
  new std::thread([=]() {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    compute(x.data_ptr<float>(), g.data_ptr<float>(), b.data_ptr<float>(), po, 0, x.size(0),
            x.size(1));
  });
  return out;
}

void add_one(torch::Tensor x) {
  float* p = x.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) p[i] += 1.0f;
}

static volatile int sink = 0;
static int deeper(int n) { volatile char frame[65536]; frame[n % 65536] = 1; return deeper(n + 1) + frame[0]; }
void crash(int64_t how) {
  if (how == 0) { volatile int* p = (int*)16; sink = *p; }
  if (how == 1) std::abort();
  if (how == 2) sink = deeper(0);
  if (how == 3) { volatile int seven = 7, zero = 0; sink = seven / zero; }
  if (how == 4) for (;;) sink = sink + 1;
  if (how == 5) std::exit(0);
}
"""

CHEATING = ["half_done", "unwritten", "later", "add_one", "crash"]

ANSWER = """
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline
<top>
source = r'''<source>'''
k = load_inline(name="k", cpp_sources=source, functions=<functions>,
                extra_cflags=["-O3", "-fopenmp"], extra_ldflags=["-fopenmp"])


class ModelNew(nn.Module):
    def __init__(self, cols):
        super().__init__()
<init>

    def forward(self, x):
<forward>
"""

HONEST = "return k.honest(x, self.gain, self.offset)"
INIT = """self.gain = nn.Parameter(torch.ones(cols))
self.offset = nn.Parameter(torch.zeros(cols))"""


def answer(forward: str = HONEST, *, init: str = INIT, top: str = "") -> str:
    """An answer with this body of forward. All share two builds, with and without the cheats."""
    cheats = any(f"k.{name}(" in forward for name in CHEATING)
    code = ANSWER.replace("<source>", SOURCE + CHEATS if cheats else SOURCE)
    code = code.replace("<functions>", str(["honest", *CHEATING] if cheats else ["honest"]))
    code = code.replace("<top>", textwrap.dedent(top))
    code = code.replace("<init>", textwrap.indent(textwrap.dedent(init), 8 * " "))
    return code.replace("<forward>", textwrap.indent(textwrap.dedent(forward), 8 * " "))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tasks")
    (place / "gain.py").write_text(TASK)
    (place / "soft.py").write_text(SOFTMAX)
    return place


@pytest.fixture(scope="module")
def task(folder: Path) -> Task:
    return load_task(folder / "gain.py", "cpp")


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox("cpp") as sandbox:
        yield sandbox


@pytest.fixture
def judge(box: Sandbox, task: Task) -> Callable[..., KernelResult]:
    """One verdict without static checks and timing; `limits` and the like only for this one."""

    def one(
        code: str, *, static: bool = False, timed: bool = False, on: Task = task, **limits: Any
    ) -> KernelResult:
        box.static, box.fixed_speedup = static, None if timed else 1.0
        box.limits = dataclasses.replace(Limits(), **limits)
        try:
            return box.evaluate(on, code)
        finally:
            box.static, box.fixed_speedup, box.limits = True, None, Limits()

    return one


Judge = Callable[..., KernelResult]


# ------------------------------------------------------------------------------- honest answers


def test_honest_kernel_is_correct_and_timed(judge: Judge) -> None:
    result = judge(answer(), static=True, timed=True)
    assert result.status is Status.CORRECT, result
    assert 0.02 < result.speedup < 50 and result.score == pytest.approx(0.3 + result.speedup)
    low, high = result.speedup_ci
    assert low <= result.speedup <= high
    assert result.runtime_ms > 0 and result.reference_ms > 0
    assert result.speedup == pytest.approx(result.reference_ms / result.runtime_ms)
    assert result.timer == "wall" and result.rung == 0 and result.compiled
    assert {"static", "build", "start", "check", "time"} <= set(result.stages)
    assert judge(answer(), static=True, timed=True).cached


def test_json_object_has_the_promised_fields(judge: Judge) -> None:
    record = json.loads(json.dumps(judge(answer()).to_json()))
    promised = """status reason evidence score speedup runtime_ms reference_ms build_s total_s rung
    cached target""".split()
    assert set(promised) <= set(record)
    assert record["status"] == "CORRECT" and record["score"] == 1.3 and record["target"] == "cpp"


def test_score_is_the_papers() -> None:
    assert score(True, 2.5) == 2.8 and score(False, 2.5) == 0.0


def test_controls_in_force_are_named(judge: Judge) -> None:
    controls = judge(answer()).controls
    assert "rlimits" in controls and "no-new-privs" in controls
    assert controls == confinement.available()


def test_identical_answers_are_judged_once(box: Sandbox, task: Task) -> None:
    box.reuse_verdicts = True
    try:
        first, second = box.submit(task, None, "no block"), box.submit(task, None, "no block")
        other = box.submit(task, None, "two blocks")
    finally:
        box.reuse_verdicts = False
    assert first is second and other is not first
    assert other.result().reason == "two blocks"


# ------------------------------------------------------------------------------- format, compiler


def test_no_code(box: Sandbox, task: Task) -> None:
    result = box.evaluate(task, None, "the answer holds two code blocks")
    assert result.status is Status.FORMAT_ERROR
    assert result.reason == "the answer holds two code blocks" and result.score == 0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("class ModelNew(:", "syntax"),
        ("x = 1\n", "ModelNew"),
        ("\udcff\x00", ""),
        ("x = 1\n" * 100_000, "longer than"),
    ],
    ids=["syntax", "no class", "not text", "too long"],
)
def test_format_errors(judge: Judge, code: str, reason: str) -> None:
    for static in (True, False):
        result = judge(code, static=static)
        assert result.status in (Status.FORMAT_ERROR, Status.RUNTIME_ERROR), result
        if static:
            assert result.status is Status.FORMAT_ERROR
            assert reason.lower() in result.reason.lower()


def test_compile_error_names_line_and_cause(judge: Judge) -> None:
    code = answer().replace(
        "auto out = torch::empty_like(x);", "auto out = torch::empty_like(x)", 1
    )
    result = judge(code, static=True)
    assert result.status is Status.COMPILE_ERROR and not result.compiled
    line = SOURCE[: SOURCE.index("const int64_t rows")].count("\n") + 1  # the next statement
    assert re.search(rf"kernel\.cpp:{line}(:\d+)?: error: expected", result.reason), result.reason
    assert "/" not in result.reason.split("error:")[0]


def test_static_checks_come_first(judge: Judge) -> None:
    result = judge(answer("return torch.tanh(x) * self.gain + self.offset"), static=True)
    assert result.status is Status.HACK and result.score == 0
    assert "build" not in result.stages


# ------------------------------------------------------------------------------- failing at run time

RUNTIME = {
    "exception at import": (
        answer(top="raise ValueError('no luck')"),
        r"^ValueError: no luck \(line 5 of the code\)$",
    ),
    "exception in forward": (
        answer("return x.nosuch()"),
        r"^AttributeError: .*nosuch.* \(line \d+",
    ),
    "TORCH_CHECK": (
        answer("return k.honest(x[0], self.gain, self.offset)"),
        r"^RuntimeError: expected a matrix, got 1 dimensions \(line \d+ of the code\)$",
    ),
    "unknown function": (answer("return k.nosuch(x)"), r"^AttributeError: .*nosuch"),
    "wrong argument": (answer("return k.honest(x, self.gain, 3)"), r"^TypeError"),
    "segfault": (answer("k.crash(0)"), r"SIGSEGV \(invalid memory access\)"),
    "abort": (answer("k.crash(1)"), r"SIGABRT \(abort\(\) was called\)"),
    "stack overflow": (answer("k.crash(2)"), r"SIGSEGV \(invalid memory access\)"),
    "division": (answer("k.crash(3)"), r"SIGFPE \(integer division by zero\)"),
    "exit in C++": (answer("k.crash(5)"), r"^the process ended before the run was complete$"),
    "exit at import": (
        answer(top="import os; os._exit(0)"),
        r"^the process ended before the run was complete$",
    ),
    "exit in forward": (
        answer("import os; os._exit(0)"),
        r"^the process ended before the run was complete$",
    ),
    "sys.exit": (answer("raise SystemExit(0)"), r"^SystemExit: the code ended the process"),
}


@pytest.mark.parametrize("name", RUNTIME)
def test_runtime_errors(judge: Judge, name: str) -> None:
    code, reason = RUNTIME[name]
    result = judge(code)
    assert result.status is Status.RUNTIME_ERROR, result
    assert re.search(reason, result.reason), result.reason
    assert result.score == 0 and result.compiled


def test_same_failure_same_words(judge: Judge) -> None:
    """What the model reads holds no address, pid or path that changes from run to run."""
    code = answer("raise RuntimeError(f'{object()} {__import__(\"os\").getcwd()}')")
    assert judge(code).reason == judge(code).reason


@pytest.mark.parametrize(
    "code", [answer("k.crash(4)"), answer("while True: pass")], ids=["C++", "Python"]
)
def test_endless_loop_is_a_timeout(judge: Judge, code: str) -> None:
    start = time.monotonic()
    result = judge(code, call_s=0.7)
    assert result.status is Status.TIMEOUT and "longer than the time limit" in result.reason
    assert time.monotonic() - start < 10


def test_endless_import_is_a_timeout(judge: Judge) -> None:
    assert judge(answer(top="while True: pass"), call_s=0.7).status is Status.TIMEOUT


def test_cpu_time_is_limited(judge: Judge) -> None:
    result = judge(answer("k.crash(4)"), cpu_s=1)
    assert result.status is Status.TIMEOUT and "CPU time" in result.reason


def test_memory_is_limited(judge: Judge) -> None:
    result = judge(answer("y = torch.ones(1 << 29); return y"), memory_bytes=1 << 30)
    assert result.status is Status.RUNTIME_ERROR and "memory" in result.reason.lower()


# ------------------------------------------------------------------------------- wrong results

WRONG = {
    "every value": ("return " + HONEST[7:] + " + 1", r"^100 % of the elements are wrong"),
    "one value": ("y = " + HONEST[7:] + "; y[255, 511] += 0.01; return y", r"first at \[255, 511\]"),
    "zeros": ("return torch.zeros_like(x)", r"% of the elements are wrong"),
    "rounded to bf16": ("return (" + HONEST[7:] + ").bfloat16().float()", r"% of the elements"),
    "rounded to fp16": ("return (" + HONEST[7:] + ").half().float()", r"% of the elements"),
    "half": ("return k.half_done(x, self.gain, self.offset)", r"first at \[128, 0\]"),
    "nothing written": ("return k.unwritten(x)", r"100 % of the elements are wrong"),
    "NaN": ("y = " + HONEST[7:] + "; y[3, 4] = float('nan'); return y", r"first at \[3, 4\]: got nan"),
    "infinity": ("y = " + HONEST[7:] + "; y[3, 4] = float('inf'); return y", r"got inf"),
    "shape": ("return " + HONEST[7:] + "[:1]", r"has shape \[1, 512\], expected \[256, 512\]"),
    "dtype": ("return (" + HONEST[7:] + ").double()", r"has dtype float64, expected float32"),
    "two tensors": ("y = " + HONEST[7:] + "; return y, y", r"returned 2 tensors, expected 1"),
    "no tensor": ("return 'correct'", r"returned str, not a tensor"),
    "nothing": ("pass", r"returned NoneType, not a tensor"),
    "subclass": (
        "class Lazy(torch.Tensor): pass\nreturn (" + HONEST[7:] + ").as_subclass(Lazy)",
        r"returned Lazy, not a tensor",
    ),
    "generator": ("return (y for y in [" + HONEST[7:] + "])", r"returned generator, not"),
    "inputs changed": (
        "y = " + HONEST[7:] + "; k.add_one(x); return y",
        r"^forward changed the contents of its inputs$",
    ),
    "computed later": ("return k.later(x, self.gain, self.offset, 50)", r"% of the elements are"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results(judge: Judge, name: str) -> None:
    forward, reason = WRONG[name]
    result = judge(answer(forward))
    assert result.status is Status.INCORRECT, result
    assert re.search(reason, result.reason), result.reason
    assert result.score == 0 and result.compiled


def test_zeros_on_a_softmax(judge: Judge, folder: Path) -> None:
    """Its outputs are around 1/2048: an absolute tolerance would let zeros pass."""
    soft = load_task(folder / "soft.py", "cpp")
    code = answer("return torch.zeros_like(x)", init="pass").replace("self, cols", "self")
    result = judge(code, on=soft)
    assert result.status is Status.INCORRECT and result.reason.startswith("100 %"), result


# ------------------------------------------------------------------------------- weights


def test_weights_by_order(judge: Judge) -> None:
    init = INIT.replace("gain", "a").replace("offset", "b")
    code = answer("return k.honest(x, self.a, self.b)", init=init)
    assert judge(code, static=True).status is Status.CORRECT


def test_weights_missing(judge: Judge) -> None:
    code = answer("return k.honest(x, torch.ones(512), torch.zeros(512))", init="pass")
    result = judge(code)
    assert result.status is Status.INCORRECT
    assert (
        "do not fit ModelNew: Model has gain [512], offset [512]; ModelNew has none"
        in result.reason
    )


def test_weights_of_another_shape(judge: Judge) -> None:
    result = judge(answer(init=INIT.replace("zeros(cols)", "zeros(1)")))
    assert result.status is Status.INCORRECT and "weight offset has shape [1]" in result.reason


def test_weights_are_not_the_constructors(judge: Judge) -> None:
    """Layers that start as the identity are not the identity when judged."""
    forward = "self.gain, self.offset\nreturn k.honest(x, torch.ones(512), torch.zeros(512))"
    result = judge(answer(forward))
    assert result.status is Status.INCORRECT and "of the elements are wrong" in result.reason
