"""What a candidate can say, do and break: real processes, cheats that got past the parsers.

Most answers here are plain Python with the static checks switched off (`static=False`): the layers
below must hold when a cheat has got past the parsers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import sandbox_worker
from kernel_sandbox import (
    Call,
    KernelResult,
    Limits,
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
LIMITS = Limits(run_s=12.0, call_s=2.0, memory_bytes=512 << 20, open_files=64)

SOFTMAX = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)

def get_inputs():
    return [torch.randn(64, 256)]

def get_init_inputs():
    return []
"""
LINEAR = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, size, table):
        super().__init__()
        self.fc = nn.Linear(size, 48)
        self.norm = nn.BatchNorm1d(48)
        self.register_buffer("table", table)

    def forward(self, x):
        y = self.norm(self.fc(x)) + self.table
        return y, (y > 0).sum(dim=1)

def get_inputs():
    return [torch.randn(32, 64)]

def get_init_inputs():
    return [64, torch.arange(48.0)]
"""
TASK = Task("softmax", 0, SOFTMAX, "cpp")
TWO = Task("linear", 0, LINEAR, "cpp")


def answer(forward: str, *, before: str = "", top: str = "") -> str:
    """An answer whose ModelNew has this forward(self, x)."""
    return (
        "import os, sys, time, torch\n" + textwrap.dedent(top) + "\nclass ModelNew(torch.nn.Module)"
        ":\n    def __init__(self):\n        super().__init__()\n"
        + textwrap.indent(textwrap.dedent(before), " " * 8)
        + "\n    def forward(self, x):\n"
        + textwrap.indent(textwrap.dedent(forward), " " * 8)
        + "\n"
    )


RIGHT = answer("return torch.softmax(x, -1)")

KERNEL = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = """
#include <torch/extension.h>
#include <cmath>
torch::Tensor run(torch::Tensor x) {
    auto out = torch::empty_like(x);
    const float* in = x.data_ptr<float>();
    float* to = out.data_ptr<float>();
    const int64_t rows = x.size(0), cols = x.size(1);
    #pragma omp parallel for
    for (int64_t r = 0; r < rows; ++r) {
        float top = -INFINITY, sum = 0;
        for (int64_t c = 0; c < cols; ++c) top = std::max(top, in[r * cols + c]);
        for (int64_t c = 0; c < cols; ++c) {
            to[r * cols + c] = std::exp(in[r * cols + c] - top);
            sum += to[r * cols + c];
        }
        for (int64_t c = 0; c < cols; ++c) to[r * cols + c] /= sum;
    }
    return out;
}
"""
kernels = load_inline(name="kernels", cpp_sources=source, functions=["run"],
                      extra_cflags=["-O3", "-fopenmp"], extra_ldflags=["-fopenmp"])


class ModelNew(nn.Module):
    def forward(self, x):
        return kernels.run(x.contiguous())
'''


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox("cpp", static=False, limits=LIMITS, fixed_speedup=1.0) as made:
        yield made


@pytest.fixture(scope="module")
def timed() -> Iterator[Sandbox]:
    with Sandbox("cpp", static=False, limits=LIMITS) as made:
        yield made


def judged(box: Sandbox, code: str | None, task: Task = TASK) -> KernelResult:
    result = box.evaluate(task, code)
    print(result.status.value, result.reason)
    return result


# ------------------------------------------------------------------------------- pure functions


def test_score_by_hand() -> None:
    assert score(True, 2.5) == 0.3 + 2.5
    assert score(False, 2.5) == 0.0
    assert KernelResult(Status.CORRECT, speedup=1.2).score == pytest.approx(1.5)
    assert KernelResult(Status.INCORRECT, speedup=1.2).score == 0.0
    assert KernelResult(Status.INCORRECT).compiled
    assert not KernelResult(Status.COMPILE_ERROR).compiled


def test_sizes() -> None:
    source = "import torch\nROWS = 8192\nCOLS = 2 * 3\n# sizes[cpp]: ROWS = 16, COLS=4\nX = ROWS\n"
    assert resolve_sizes(source, "cpp") == "import torch\nROWS = 16\nCOLS = 4\nX = ROWS\n"
    assert resolve_sizes(source, "cuda") == "import torch\nROWS = 8192\nCOLS = 2 * 3\nX = ROWS\n"
    with pytest.raises(ValueError, match="DEPTH"):
        resolve_sizes("ROWS = 1\n# sizes[cpp]: DEPTH = 3\n", "cpp")


def test_task_files_that_are_none(tmp_path: Path) -> None:
    for text, says in (
        ("def broken(:\n", "line 1"),
        ("class Other: pass\n", "Model and get_inputs"),
        ("# sizes[cpp]: N = 3\nclass Model: pass\ndef get_inputs(): pass\n", "N"),
    ):
        path = tmp_path / "task.py"
        path.write_text(text)
        with pytest.raises(UserError, match=says):
            load_task(path, "cpp")
    with pytest.raises(UserError, match="cannot read"):
        load_task(tmp_path / "none.py", "cpp")


def calls(walls: list[float], load: float = 1.0, copy: float = 1.0) -> list[Call]:
    return [Call(load, wall, 0.0, copy) for wall in walls]


def test_timing_by_hand() -> None:
    timing = summarise(calls([1.1, 2.1, 9.1]), calls([4.1, 6.1, 5.1]), overhead_ms=0.1)
    assert timing.runtime_ms == pytest.approx(2.0)
    assert timing.reference_ms == pytest.approx(5.0)
    assert timing.speedup == pytest.approx(2.5)
    assert timing.interval[0] <= 2.5 <= timing.interval[1]


def test_work_outside_the_window_is_charged() -> None:
    reference = calls([5.0] * 5)
    assert summarise(calls([1.0] * 5), reference).runtime_ms == pytest.approx(1.0)
    assert summarise(calls([1.0] * 5, load=1.2), reference).runtime_ms == pytest.approx(1.0)
    early = summarise(calls([1.0] * 5, load=7.25), reference)  # a quarter of slack: 7.25 - 1.25
    assert early.runtime_ms == pytest.approx(7.0)
    late = summarise(calls([1.0] * 5, copy=5.25), reference)
    assert late.runtime_ms == pytest.approx(5.0)


def test_events_that_miss_work_are_not_believed() -> None:
    reference = [Call(1.0, 5.2, 5.0, 1.0)] * 5
    honest = summarise([Call(1.0, 2.2, 2.0, 1.0)] * 5, reference)
    assert (honest.runtime_ms, honest.speedup) == (pytest.approx(2.0), pytest.approx(2.5))
    cheat = summarise([Call(1.0, 5.2, 0.01, 1.0)] * 5, reference)
    assert cheat.runtime_ms > 4.5


# ------------------------------------------------------------------------------- tolerance


def verdict(found: torch.Tensor, wide: torch.Tensor, single: torch.Tensor) -> str:
    own = float((single.double() - wide).abs().max())
    return sandbox_worker._difference(found, wide, own)


def test_honest_rounding_passes() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 4096), torch.randn(4096, 48) / 64
    wide, single = x.double() @ y.double(), x @ y
    plain = torch.zeros(64, 48)
    for k in range(4096):  # one term after the other, all in fp32
        plain += x[:, k, None] * y[k]
    assert verdict(plain, wide, single) == ""
    rows = torch.randn(32, 8192).softmax(-1)
    total = torch.cumsum(rows, -1)
    assert verdict(total, rows.double().cumsum(-1), total) == ""
    z = torch.randn(64, 512)
    quick = torch.pow(torch.tensor(2.0), z * 1.44269504) * (1 + 1e-6)  # like a fast exp
    assert verdict(quick, z.double().exp(), z.exp()) == ""


@pytest.mark.parametrize("kind", ["softmax", "matmul", "layer norm", "sum"])
def test_lazy_results_fail(kind: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 512)
    y = torch.randn(512, 64) / 16
    compute = {
        "softmax": lambda x, y: x.softmax(-1),
        "matmul": lambda x, y: x @ y,
        "layer norm": lambda x, y: torch.nn.functional.layer_norm(x, (512,)),
        "sum": lambda x, y: x.sum(-1),
    }[kind]
    wide, single = compute(x.double(), y.double()), compute(x, y)
    one = single.clone()
    one.view(-1)[7] += 1e-3 * single.square().mean().sqrt()
    other = compute(torch.randn(64, 512), y)
    nan = single.clone()
    nan.view(-1)[3] = float("nan")
    lazy = {
        "zeros": torch.zeros_like(single),
        "constant": single.mean().expand_as(single).contiguous(),
        "bf16": single.bfloat16().float(),
        "fp16": single.half().float(),
        "bf16 inside": compute(x.bfloat16(), y.bfloat16()).float(),
        "one element": one,
        "other inputs": other,
        "NaN": nan,
    }
    for name, found in lazy.items():
        assert verdict(found, wide, single), name
    assert verdict(single, wide, single) == ""


def test_special_values_must_agree() -> None:
    wide = torch.tensor([1.0, float("inf"), float("nan"), -float("inf")], dtype=torch.float64)
    assert sandbox_worker._difference(wide.float(), wide, 0.0) == ""
    for place, value in ((1, 3e38), (2, 0.0), (3, float("inf")), (0, float("inf"))):
        wrong = wide.float()
        wrong[place] = value
        assert sandbox_worker._difference(wrong, wide, 0.0)
    whole = torch.tensor([1, 2, 3])
    assert sandbox_worker._difference(whole, whole, 0.0) == ""
    assert sandbox_worker._difference(whole + torch.tensor([0, 0, 1]), whole, 0.0)


# ------------------------------------------------------------------------------- verdicts


def test_honest_kernel(tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text(SOFTMAX.replace("64, 256", "512, 512"))
    task = load_task(path, "cpp")
    with Sandbox("cpp") as box:
        result = judged(box, KERNEL, task)
        assert result.status is Status.CORRECT, result
        assert result.speedup > 0.05 and result.runtime_ms > 0 and result.reference_ms > 0
        assert result.speedup == pytest.approx(result.reference_ms / result.runtime_ms)
        assert result.speedup_ci[0] <= result.speedup <= result.speedup_ci[1]
        assert result.rung == 0 and result.timer == "wall"
        again = judged(box, KERNEL, task)
        assert again.cached and again.total_s < 3.0
        # No part of a cached verdict is an import of torch or a build.
        assert again.stages["start"] < 1.0 and again.stages["build"] < 0.5
        assert {"build", "start", "check", "time"} <= set(again.stages)
        wrong = KERNEL.replace("/= sum", "/= sum + 1e-3f")
        assert judged(box, wrong, task).status is Status.INCORRECT
        broken = KERNEL.replace("float top =", "flaot top =")
        result = judged(box, broken, task)
        assert result.status is Status.COMPILE_ERROR and "flaot" in result.reason
        assert judged(box, RIGHT, task).status is Status.HACK
        assert judged(box, "class ModelNew(:", task).status is Status.FORMAT_ERROR


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        (None, Status.FORMAT_ERROR, "no code"),
        ("x = 1\n", Status.FORMAT_ERROR, "ModelNew"),
        ("x = 1\n" * 50_000, Status.FORMAT_ERROR, "longer than"),
        ("raise ValueError('told you')\n", Status.RUNTIME_ERROR, "ValueError: told you (line 1"),
        ("\ud800", Status.RUNTIME_ERROR, ""),
        ("a\0b", Status.RUNTIME_ERROR, ""),
        (answer("return x.nosuch()"), Status.RUNTIME_ERROR, "nosuch"),
        (answer("sys.exit(0)"), Status.RUNTIME_ERROR, "SystemExit"),
        (answer("os._exit(0)"), Status.RUNTIME_ERROR, "before the run was complete"),
        (answer("import ctypes; ctypes.string_at(0)"), Status.RUNTIME_ERROR, "SIGSEGV"),
        (answer("os.abort()"), Status.RUNTIME_ERROR, "SIGABRT"),
        (answer("return x"), Status.INCORRECT, "wrong"),
        (answer("return torch.zeros_like(x)"), Status.INCORRECT, "wrong"),
        (answer("return torch.full_like(x, 1 / 256)"), Status.INCORRECT, "wrong"),
        (answer("return torch.empty_like(x)"), Status.INCORRECT, "wrong"),
        (answer("return torch.softmax(x, -1).bfloat16().float()"), Status.INCORRECT, "wrong"),
        (answer("return torch.softmax(x, -1) * float('nan')"), Status.INCORRECT, "wrong"),
        (answer("return torch.softmax(x, -1)[:, :255]"), Status.INCORRECT, "shape [64, 255]"),
        (answer("return torch.softmax(x, -1)[None]"), Status.INCORRECT, "shape [1, 64, 256]"),
        (answer("return torch.softmax(x, -1).double()"), Status.INCORRECT, "dtype float64"),
        (answer("y = torch.softmax(x, -1); return y, y"), Status.INCORRECT, "2 tensors"),
        (answer("return 'CORRECT'"), Status.INCORRECT, "not a tensor"),
        (answer("return x.copy_(torch.softmax(x, -1))"), Status.INCORRECT, "its inputs"),
        (answer("y = torch.softmax(x, -1); x.zero_(); return y"), Status.INCORRECT, "its inputs"),
        (answer("print('x' * 30_000_000); return torch.softmax(x, -1)"), Status.CORRECT, ""),
        (answer("y = torch.softmax(x, -1); y[9, 9] += 1e-4; return y"), Status.INCORRECT, "[9, 9]"),
        (RIGHT, Status.CORRECT, ""),
    ],
)
def test_statuses(box: Sandbox, code: str | None, status: Status, says: str) -> None:
    result = judged(box, code)
    assert result.status is status, result
    assert says in result.reason
    assert (result.score > 0) == (status is Status.CORRECT)


def test_the_text_of_a_failure_repeats(box: Sandbox) -> None:
    code = answer("raise RuntimeError(f'{object()} at {os.getcwd()}/file and {__file__!r}')",
                  top="__file__ = os.path.abspath('answer')")  # fmt: skip
    one, two = judged(box, code), judged(box, code)
    assert one.reason == two.reason
    assert "/dev/shm" not in one.reason and "candidate-" not in one.reason


def test_unfinished_rows_show(box: Sandbox) -> None:
    """Stale memory: the first half is computed, the rest is whatever the allocator gives."""
    code = answer("""
        full = torch.softmax(x, -1)
        del full                              # the right values lie in freed memory now
        y = torch.empty_like(x)
        y[:32] = torch.softmax(x[:32], -1)
        return y
    """)
    assert judged(box, code).status is Status.INCORRECT


def test_every_output_counts(box: Sandbox) -> None:
    good = """
        class ModelNew(torch.nn.Module):
            def __init__(self, size, table):
                super().__init__()
                self.fc = torch.nn.Linear(size, 48)
                self.norm = torch.nn.BatchNorm1d(48)
                self.register_buffer("table", table)
            def forward(self, x):
                y = self.norm(self.fc(x)) + self.table
                return y, (y > 0).sum(dim=1)
    """
    code = "import torch\n" + textwrap.dedent(good)
    assert judged(box, code, TWO).status is Status.CORRECT
    second = code.replace("(y > 0)", "(y > 0.5)")
    assert "output 1" in judged(box, second, TWO).reason
    renamed = code.replace("self.fc", "self.linear").replace("self.norm", "self.batch")
    assert judged(box, renamed, TWO).status is Status.CORRECT  # by order
    wrong = code.replace("48)", "47)").replace("+ self.table", "")
    result = judged(box, wrong, TWO)
    assert result.status is Status.INCORRECT and "weight" in result.reason
    without = code.replace("self.fc(x)", "x[:, :48]")
    assert judged(box, without, TWO).status is Status.INCORRECT
    dropped = code.replace('self.register_buffer("table", table)', "self.table = table")
    result = judged(box, dropped, TWO)
    assert result.status is Status.INCORRECT and "do not fit" in result.reason


# ------------------------------------------------------------------------------- time and memory


def test_endless_loop_is_stopped(box: Sandbox) -> None:
    start = time.monotonic()
    result = judged(box, answer("while True: pass"))
    assert result.status is Status.TIMEOUT and time.monotonic() - start < 8
    sleeper = answer("return torch.softmax(x, -1)", top="time.sleep(60)")
    assert judged(box, sleeper).status is Status.TIMEOUT
    stubborn = answer("time.sleep(60)", top="import signal\nfor n in range(1, 32):\n    try: "
                      "signal.signal(n, signal.SIG_IGN)\n    except OSError: pass")  # fmt: skip
    assert judged(box, stubborn).status is Status.TIMEOUT


def test_memory_is_limited(box: Sandbox) -> None:
    result = judged(box, answer("return torch.ones(1 << 31, dtype=torch.float64)"))
    assert result.status is Status.RUNTIME_ERROR and "out of memory" in result.reason
    result = judged(box, answer("a = []\nwhile True: a.append(bytearray(1 << 24))"))
    assert result.status is Status.RUNTIME_ERROR and "out of memory" in result.reason
    assert judged(box, RIGHT).correct


# ------------------------------------------------------------------------------- forged records

FRAMES = """
import json, stat, struct
def shout(*messages):
    texts = [json.dumps(message).encode() for message in messages]
    data = b''.join(struct.pack('<I', len(text)) + text for text in texts)
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, data)
        except OSError:
            pass
LIES = [{'event': 'done', 'device_ms': 0.001},
        {'event': 'copied', 'outputs': [{'dtype': 'float32', 'shape': [64, 256]}]}]
"""


@pytest.mark.parametrize(
    "forward",
    [
        "shout(*LIES)\nos._exit(0)",
        "shout(*LIES, {'event': 'loaded'}, *LIES, {'event': 'loaded'}, *LIES)\ntime.sleep(30)",
        "shout({'event': 'verdict', 'status': 'CORRECT', 'speedup': 9})\nos._exit(0)",
        "shout({'event': 'compared', 'problems': []})\nreturn torch.softmax(x, -1)",
        "shout({'event': 'done', 'device_ms': []}, {'event': 'copied'})\nos._exit(0)",
        "shout({'event': 'missing', 'request': {'name': []}})\nos._exit(0)",
        "shout({'event': 'ready'}, [1, 2], 'x', 5)\nreturn torch.softmax(x, -1)",
        "shout({'event': 'error', 'text': 'y' * 3_000_000})\nos._exit(0)",
        'print(\'{"status": "CORRECT", "speedup": 50}\')\nos._exit(0)',
        "[os.write(fd, b'\\xff' * 4096) for fd in range(3, 9)]\nos._exit(0)",
        "[os.close(fd) for fd in range(3, 64)]\nos._exit(0)",
    ],
)
def test_forged_records(box: Sandbox, forward: str) -> None:
    result = judged(box, answer(forward, top=FRAMES))
    assert result.status in (Status.RUNTIME_ERROR, Status.INCORRECT), result
    assert result.score == 0 and len(result.reason) < 2000
    assert judged(box, RIGHT).correct  # nobody else suffers


def test_no_inputs_before_their_call(box: Sandbox) -> None:
    """At import, and after a call, no memory file holds inputs of a later one: an answer cannot
    work ahead."""
    look = """
        def files():
            found = set()
            for fd in os.listdir('/proc/self/fd'):
                try:
                    if 'memfd:' in os.readlink('/proc/self/fd/' + fd):
                        found.add(os.fstat(int(fd)).st_ino)
                except OSError:
                    pass
            return len(found)
        counts = [files()]
    """
    code = answer("""
        counts.append(files())
        if len(counts) > 3:
            raise ValueError(counts)
        return torch.softmax(x, -1)
    """, top=look)  # fmt: skip
    # The weights and the place for outputs; then, in each call, that call's inputs besides.
    assert "[2, 3, 3, 3]" in judged(box, code).reason


# ------------------------------------------------------------------------------- timing


def test_remembering_does_not_pay(timed: Sandbox) -> None:
    """Slow on contents it has not seen, fast on those it has: the former is what is measured."""
    code = answer("""
        key = float(x[0, 0])
        if key not in self.seen:
            time.sleep(0.02)
            self.seen[key] = torch.softmax(x, -1)
        return self.seen[key]
    """, before="self.seen = {}")  # fmt: skip
    result = judged(timed, code)
    assert result.correct and result.runtime_ms > 18


@pytest.mark.parametrize("patched", ["poison", "_flatten"])
def test_work_outside_forward_is_found(timed: Sandbox, patched: str) -> None:
    """An answer that has got hold of the worker works while its inputs are loaded, or while its
    outputs are copied."""
    code = answer("return torch.softmax(x, -1)", top=f"""
        import sandbox_worker
        real = sandbox_worker.{patched}
        def slow(*arguments):
            time.sleep(0.02)
            return real(*arguments)
        sandbox_worker.{patched} = slow
    """)  # fmt: skip
    result = judged(timed, code)
    assert result.runtime_ms > 15 or not result.correct, result


def test_early_done_does_not_pay(timed: Sandbox) -> None:
    """The clock stops at "done"; an answer that says so itself and computes afterwards."""
    code = answer("""
        shout({'event': 'done', 'device_ms': 0.0})
        time.sleep(0.02)
        sandbox_worker.send = lambda sock, message: None if message['event'] == 'done' else real(
            sock, message)
        return torch.softmax(x, -1)
    """, top=FRAMES + "import sandbox_worker\nreal = sandbox_worker.send\n")  # fmt: skip
    result = judged(timed, code)
    assert result.runtime_ms > 15 or not result.correct, result


def test_stale_after_some_calls(timed: Sandbox) -> None:
    code = answer("""
        self.calls += 1
        if self.calls < 9:
            self.kept = torch.softmax(x, -1)
        return self.kept
    """, before="self.calls = 0")  # fmt: skip
    for _ in range(3):
        result = judged(timed, code)
        assert result.status is Status.INCORRECT and "call)" in result.reason


def test_a_kernel_against_itself(timed: Sandbox) -> None:
    task = Task("big", 0, SOFTMAX.replace("64, 256", "1024, 1024"), "cpp")
    ratios = [judged(timed, RIGHT, task).speedup for _ in range(5)]
    # Other programs may be running on these cores: loose, but a systematic handicap of one side
    # (page faults, charges for loading) was a factor of two.
    assert 0.6 < float(np.median(ratios)) < 1.6, ratios
    assert any(0.8 < ratio < 1.25 for ratio in ratios), ratios


def test_slow_kernels_cost_few_calls(timed: Sandbox) -> None:
    code = answer("time.sleep(0.2); return torch.softmax(x, -1)")
    start = time.monotonic()
    result = judged(timed, code)
    assert result.correct and result.speedup < 0.5
    assert time.monotonic() - start < 5.0


# ------------------------------------------------------------------------------- the service


def test_many_at_once_keep_their_verdicts(box: Sandbox) -> None:
    codes = []
    for number in range(24):
        codes.append([
            answer(f"raise ValueError('number {number}')"), RIGHT,
            answer("os.kill(os.getpid(), 9)"), answer(f"return x[:{number}]"),
        ][number % 4])  # fmt: skip
    futures = [box.submit(TASK, code) for code in codes]
    for number, future in enumerate(futures):
        result = future.result()
        if number % 4 == 0:
            assert f"number {number} " in result.reason
        elif number % 4 == 1:
            assert result.correct, result
        elif number % 4 == 2:
            assert "SIGKILL" in result.reason
        else:
            assert f"shape [{number}, 256]" in result.reason


def test_lost_processes_are_replaced(box: Sandbox) -> None:
    assert judged(box, RIGHT).correct
    zygote = box.zygote()
    reference = box._references[TASK].process.pid
    os.kill(reference, signal.SIGKILL)
    assert judged(box, RIGHT).correct
    os.kill(zygote.process.pid, signal.SIGKILL)
    zygote.process.wait()
    assert judged(box, RIGHT).correct
    assert box.zygote() is not zygote


def test_a_task_that_fails_is_our_fault(box: Sandbox) -> None:
    broken = Task("broken", 0, SOFTMAX.replace("torch.softmax(x, dim=-1)", "x.nosuch()"), "cpp")
    result = judged(box, RIGHT, broken)
    assert result.status is Status.HARNESS_ERROR and "nosuch" in result.reason
    assert result.score == 0 and not result.compiled


def test_switches() -> None:
    code = answer("raise ValueError(str(time.time_ns()))")
    with Sandbox("cpp", static=False, fixed_speedup=1.5, reuse_verdicts=True) as box:
        assert judged(box, RIGHT).speedup == 1.5
        assert judged(box, code).reason == judged(box, code).reason
    with pytest.raises(UserError):
        Sandbox("opencl")


def _left_behind(session: list[int]) -> list[int]:
    return [pid for pid in session if Path(f"/proc/{pid}").exists()
            and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]]  # fmt: skip


def test_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys, threading, time
        sys.path.insert(0, {str(HERE)!r})
        from test_sandbox_worker import RIGHT, TASK, answer
        from kernel_sandbox import Sandbox
        box = Sandbox("cpp", static=False)
        box.evaluate(TASK, RIGHT)
        box.submit(TASK, answer("time.sleep(60)"))
        while not any(reference.users for reference in box._references.values()):
            time.sleep(0.01)
        time.sleep(0.5)
        print(box.scratch, box.zygote().process.pid, flush=True)
        time.sleep(60)
    """)
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    scratch, pid = process.stdout.readline().split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 2  # a reference and a candidate
    assert Path(scratch).exists()
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    pids = [int(pid), *map(int, children)]
    while (_left_behind(pids) or Path(scratch).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _left_behind(pids) == [] and not Path(scratch).exists()


def test_close_leaves_nothing() -> None:
    fds = len(os.listdir("/proc/self/fd"))
    box = Sandbox("cpp", static=False, fixed_speedup=1.0)
    box.evaluate(TASK, RIGHT)
    box.evaluate(TASK, answer("os.abort()"))
    pids = [box.zygote().process.pid, box._references[TASK].process.pid]
    scratch = box.scratch
    assert os.listdir(scratch) == []  # no candidate's folder outlives it
    box.close()
    time.sleep(0.2)
    assert _left_behind(pids) == [] and not Path(scratch).exists()
    assert len(os.listdir("/proc/self/fd")) <= fds


