"""Tests of the sandbox: real compiled kernels, real processes, every status for its own reason.

One C++ source holds honest and dishonest functions, so that it is compiled once; each test is a
ModelNew around it. Where a cheat would fall to the static checks already, they are switched off:
each layer must hold by itself."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
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
from confinement import Limits
from kernel_sandbox import (
    Call,
    KernelResult,
    Sandbox,
    Status,
    Task,
    UserError,
    load_task,
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
static int deeper(int n) {
  volatile char frame[65536];
  frame[n % 65536] = 1;
  return deeper(n + 1) + frame[0];
}
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

RIGHT = "k.honest(x, self.gain, self.offset)"
HONEST = "return " + RIGHT
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


def test_controls_in_force_are_named(judge: Judge) -> None:
    controls = judge(answer()).controls
    assert "rlimits" in controls and "no-new-privs" in controls
    assert controls == confinement.available()


# ------------------------------------------------------------------------------- format, compiler


def test_compile_error_names_line_and_cause(judge: Judge) -> None:
    code = answer().replace(
        "auto out = torch::empty_like(x);", "auto out = torch::empty_like(x)", 1
    )
    result = judge(code, static=True)
    assert result.status is Status.COMPILE_ERROR and not result.compiled
    line = SOURCE[: SOURCE.index("const int64_t rows")].count("\n") + 1  # the next statement
    assert re.search(rf"kernel\.cpp:{line}(:\d+)?: error: expected", result.reason), result.reason
    assert "/" not in result.reason.split("error:")[0]


# ------------------------------------------------------------------------------- failures

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


@pytest.mark.parametrize(
    "code", [answer("k.crash(4)"), answer("while True: pass")], ids=["C++", "Python"]
)
def test_endless_loop_is_a_timeout(judge: Judge, code: str) -> None:
    start = time.monotonic()
    result = judge(code, call_s=0.7)
    assert result.status is Status.TIMEOUT and "longer than the time limit" in result.reason
    assert time.monotonic() - start < 10


def test_cpu_time_is_limited(judge: Judge) -> None:
    result = judge(answer("k.crash(4)"), cpu_s=1)
    assert result.status is Status.TIMEOUT and "CPU time" in result.reason


# ------------------------------------------------------------------------------- wrong results

WRONG = {
    "every value": (HONEST + " + 1", r"^100 % of the elements are wrong"),
    "one value": ("y = " + RIGHT + "; y[255, 511] += 0.01; return y", r"first at \[255, 511\]"),
    "zeros": ("return torch.zeros_like(x)", r"% of the elements are wrong"),
    "rounded to bf16": ("return (" + RIGHT + ").bfloat16().float()", r"% of the elements"),
    "rounded to fp16": ("return (" + RIGHT + ").half().float()", r"% of the elements"),
    "half": ("return k.half_done(x, self.gain, self.offset)", r"first at \[128, 0\]"),
    "nothing written": ("return k.unwritten(x)", r"100 % of the elements are wrong"),
    "NaN": ("y = " + RIGHT + "; y[3, 4] = float('nan'); return y", r"first at \[3, 4\]: got nan"),
    "infinity": ("y = " + RIGHT + "; y[3, 4] = float('inf'); return y", r"got inf"),
    "shape": (HONEST + "[:1]", r"has shape \[1, 512\], expected \[256, 512\]"),
    "dtype": ("return (" + RIGHT + ").double()", r"has dtype float64, expected float32"),
    "two tensors": ("y = " + RIGHT + "; return y, y", r"returned 2 tensors, expected 1"),
    "no tensor": ("return 'correct'", r"returned str, not a tensor"),
    "nothing": ("pass", r"returned NoneType, not a tensor"),
    "subclass": (
        "class Lazy(torch.Tensor): pass\nreturn (" + RIGHT + ").as_subclass(Lazy)",
        r"returned Lazy, not a tensor",
    ),
    "generator": ("return (y for y in [" + RIGHT + "])", r"returned generator, not"),
    "inputs changed": (
        "y = " + RIGHT + "; k.add_one(x); return y",
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


# ------------------------------------------------------------------------------- cheats in time


@pytest.mark.parametrize("key", ["x.data_ptr()", "tuple(x.shape)", "float(x[0, 0])", "id(x)"])
def test_caches_are_caught(judge: Judge, key: str) -> None:
    forward = f"""
        kept = self.__dict__.setdefault("kept", {{}})
        if {key} not in kept:
            kept[{key}] = k.honest(x, self.gain, self.offset)
        return kept[{key}]
    """
    result = judge(answer(forward), timed=True)
    # By contents it is never the same twice, so that such a cache is merely of no use.
    if key == "float(x[0, 0])":
        assert result.status is Status.CORRECT
    else:
        assert result.status is Status.INCORRECT, result


def test_work_outside_the_timed_window_is_charged(judge: Judge) -> None:
    """Here `detach`, called when the outputs are copied, does the work: 30 ms of sleep for each
    call, after "done". Without the charge its speedup would be in the hundreds."""
    forward = """
        import time
        if not hasattr(torch.Tensor, "original"):
            torch.Tensor.original = torch.Tensor.detach
            def slow(tensor):
                time.sleep(0.03)
                return torch.Tensor.original(tensor)
            torch.Tensor.detach = slow
        return k.honest(x, self.gain, self.offset)
    """
    result = judge(answer(forward), timed=True)
    assert result.status is Status.CORRECT and result.runtime_ms > 25, result


# ------------------------------------------------------------------------------- forged records


@pytest.mark.parametrize(
    "data",
    ["b'\\xff' * 64", "b'\\x04\\0\\0\\0nope'", "b'\\x02\\0\\0\\0[]'", "b'\\0\\0\\0\\x7f'"],
    ids=["long", "no JSON", "no object", "huge"],
)
def test_junk_on_the_socket(judge: Judge, data: str) -> None:
    forward = f"""
        import os, stat, time
        for fd in range(3, 64):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, {data})
            except OSError:
                pass
        time.sleep(0.2)
    """
    result = judge(answer(forward))
    assert result.status is Status.RUNTIME_ERROR
    assert result.reason == "the process sent no usable record of the run"


# ------------------------------------------------------------------------------- confinement

# What must be refused: an expression that raises when it is.
ATTEMPTS = {
    "write the cache": "open(CACHE + '/canary', 'w')",
    "delete": "os.unlink(TASK)",
    "rename": "os.rename(TASK, TASK + '2')",
    "read the task": "open(TASK).read()",
    "read the parent's environment": "open(f'/proc/{PARENT}/environ', 'rb').read()",
    "signal to the parent": "os.kill(PARENT, 0)",
    "signal to the zygote": "os.kill(os.getppid(), 0)",
    "signal to its group": "os.kill(0, 0)",
    "signal to everybody": "os.kill(-1, 0)",
    "local socket": "__import__('socket').socketpair()",
    "shared memory": "os.memfd_create('x')",
    "higher limits": "__import__('resource').setrlimit(0, (-1, -1))",
    "another priority": "os.setpriority(0, 0, 1)",
    "chroot": "os.chroot('/')",
    "namespace": "ctypes_call(272, 0x10000000)",
    "tracing": "ctypes_call(101, 16, PARENT, 0, 0)",
    "reading a process": "ctypes_call(310, PARENT, 0, 0, 0, 0, 0)",
    "io_uring": "ctypes_call(425, 1, 0)",
}
CALL = """
import ctypes, os

def ctypes_call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""


@pytest.mark.parametrize("name", ATTEMPTS)
def test_confinement(judge: Judge, box: Sandbox, folder: Path, name: str) -> None:
    """Tried at import. "REFUSED" shows that it ran as far as the attempt."""
    places = {
        "TASK": str(folder / "gain.py"),
        "CACHE": str(kernel_sandbox.cache_root(box.cache_dir)),
        "PARENT": os.getpid(),
    }
    constants = "\n".join(f"{key} = {value!r}" for key, value in places.items())
    attempt = f"""
try:
    {ATTEMPTS[name]}
except (OSError, ValueError):
    raise RuntimeError("REFUSED")
raise RuntimeError("SUCCEEDED")
"""
    result = judge(answer(top=CALL + constants + attempt))
    assert result.status is Status.RUNTIME_ERROR and "REFUSED" in result.reason, result
    assert (folder / "gain.py").read_text() == TASK


def test_environment_is_not_handed_on(judge: Judge) -> None:
    """The zygote gets a short list of variables, so that no key of the caller's reaches it."""
    result = judge(answer(top="import os; raise RuntimeError(','.join(sorted(os.environ)))"))
    names = set(result.reason.split(": ")[1].split(" (")[0].split(","))
    assert "OMP_NUM_THREADS" in names
    assert names <= {
        "PATH", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "KEVIN_CACHE_DIR", "PYTHONPATH", "HOME",
        "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "LC_CTYPE",
        "KMP_BLOCKTIME", "PYTHONHASHSEED", "CUDA_CACHE_DISABLE", "CUDA_MODULE_LOADING",
        "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST",
        "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", "KINETO_LOG_LEVEL",
    }, names  # fmt: skip


# ------------------------------------------------------------------------------- our own faults


def _processes(box: Sandbox) -> list[int]:
    """The zygote and what it has forked."""
    zygote = box.zygote().process.pid
    children = Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()
    return [zygote, *map(int, children)]


def test_candidates_leave_nothing(judge: Judge, box: Sandbox) -> None:
    judge(answer())
    before = _processes(box)
    for forward in ("k.crash(0)", "import os; os._exit(0)", HONEST, "raise ValueError"):
        judge(answer(forward))
    assert _processes(box) == before
    assert [name for name in os.listdir(box.scratch) if name.startswith("candidate-")] == []


def test_zygote_killed_in_the_middle(judge: Judge, box: Sandbox) -> None:
    """The answer is judged once more, and is not blamed."""
    judge(answer())
    zygote = box.zygote()
    timer = threading.Timer(0.6, lambda: os.kill(zygote.process.pid, signal.SIGKILL))
    timer.start()
    slow = "import time; time.sleep(0.4)\n" + HONEST
    assert judge(answer(slow)).status is Status.CORRECT
    timer.join()
    assert box.zygote() is not zygote


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return torch", "raise ValueError('broken task')\n        return torch"),
        ("return [torch.randn(ROWS, COLS)]", "raise ValueError('broken task')"),
        ("self.gain = nn", "raise ValueError('broken task')\n        self.gain = nn"),
    ],
    ids=["forward", "get_inputs", "constructor"],
)
def test_a_broken_task_is_a_harness_error(judge: Judge, task: Task, old: str, new: str) -> None:
    broken = dataclasses.replace(task, source=task.source.replace(old, new))
    result = judge(answer(), on=broken)
    assert result.status is Status.HARNESS_ERROR and "broken task" in result.reason, result
    assert result.score == 0 and not result.compiled


def test_unwritable_cache_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        Sandbox("cpp", cache_dir=tmp_path / "file" / "cache")


def test_folders_of_killed_sandboxes_are_removed() -> None:
    """Sandbox and zygote killed together leave a folder, which nobody locks any more."""
    code = "import kernel_sandbox, os\nprint(kernel_sandbox._scratch_folder()[0])\nos._exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True
    )
    stale = Path(done.stdout.strip())
    assert stale.is_dir()
    mine, lock = kernel_sandbox._scratch_folder()
    assert not stale.exists()
    other, other_lock = kernel_sandbox._scratch_folder()
    assert Path(mine).is_dir()  # it is held
    for fd in (lock, other_lock):
        os.close(fd)
    for folder in (mine, other):
        shutil.rmtree(folder)


def test_events_cannot_claim_less_than_the_clock_saw() -> None:
    """A forged event of 1 us hides 0.15 ms of work, less than what is let pass outside: it is paid
    as 0.15 ms. An honest kernel of 0.15 ms gets exactly that."""
    reference = [Call(1.0, 0.55, 0.5, None)] * 5  # 0.05 ms of launches and messages
    forged = summarise([Call(1.0, 0.201, 0.001, None)] * 5, reference)
    assert forged.runtime_ms == pytest.approx(0.15) and forged.speedup == pytest.approx(0.5 / 0.15)
    honest = summarise([Call(1.0, 0.2, 0.15, None)] * 5, reference)
    assert honest.runtime_ms == pytest.approx(0.15)


def test_confinement_with_a_gpu(tmp_path: Path) -> None:
    """The GPU's devices may be opened for writing; disks, the kernel's settings and shared memory
    may not, although root owns them."""
    code = f"""
import os, confinement
controls = confinement.enter(confinement.Limits(), writable=[{str(tmp_path)!r}],
                             readable=["/usr", "/lib", "/sys"], gpu=True)
assert any(name.startswith("landlock") for name in controls), controls
assert "seccomp" in controls
for path in ("/dev/null", "/proc/self/comm", {str(tmp_path / "new")!r}):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
for path in ("/dev/shm/new", "/dev/new", "/dev/loop0", "/dev/kvm", "/dev/mem", "/dev/fuse",
             "/proc/sys/kernel/hostname", "/sys/kernel/mm/transparent_hugepage/enabled"):
    try:
        os.open(path, os.O_WRONLY | (os.O_CREAT if path.endswith("new") else 0))
        print("opened", path)
    except (PermissionError, FileNotFoundError):
        pass
"""
    if "no-landlock" in confinement.available():
        pytest.skip("this kernel has no Landlock")
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done


def test_candidate_stands_still_while_others_work(
    judge: Judge, box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that spins, or writes into the outputs after "copied", gets nothing done while the
    reference is timed or compares."""
    judge(answer())  # so that the reference is there
    known = set(_processes(box))
    states: list[str] = []

    def watched(name: str) -> None:
        original = getattr(kernel_sandbox._Reference, name)

        def wrapper(*arguments: Any, **options: Any) -> Any:
            (pid,) = set(_processes(box)) - known
            deadline = time.monotonic() + 0.5
            state = ""
            while state != "T" and time.monotonic() < deadline:
                state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            states.append(state)
            return original(*arguments, **options)

        monkeypatch.setattr(kernel_sandbox._Reference, name, wrapper)

    watched("call")
    watched("compare")
    assert judge(answer(), timed=True).status is Status.CORRECT
    assert len(states) >= 3 + 3 and set(states) == {"T"}
