"""The trusted side of the sandbox: one answer in, one verdict out.

Theory of operation
  1. Static checks (static_checks.py): real parsers, a cheap first filter.
  2. Build (kernel_build.py): on CPUs, limited, cached by content; no GPU is held meanwhile.
  3. Run: a fresh, confined process (sandbox_worker.py, confinement.py) is forked from a zygote that
     has imported torch. It gets raw inputs and weights and gives back raw outputs.
  4. Compare: in a process of its own that holds the task's Model, against float64.
  5. Time: this process's clock, candidate and reference in turn, fresh contents for each call, a
     random part of the timed calls compared as well.
  6. Verdict: made here. What is missing or malformed is a failure; exit codes, printed text and
     flags from inside prove nothing.

Processes                      user code   can reach                        believed
  this one                     none        everything                       -
  zygote, references           the task's  everything                       yes
  candidate                    the answer  its folder, read-only libraries, nothing
                                           its memory files, the GPU

A candidate's fault and a harness's fault never mix: when a process of ours is gone, it is replaced
and the answer judged once more; when that fails too the verdict is HARNESS_ERROR, and no score.

Not covered: a candidate can slow its neighbours down (it shares caches and memory bandwidth), and
it talks to the GPU's driver. Run a service for strangers in a container besides.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import fcntl
import itertools
import logging
import os
import random
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np

import static_checks
from confinement import Limits
from kernel_build import (
    Builder,
    BuildRequest,
    BuildResult,
    ToolchainError,
    cache_root,
    extract_requests,
)
from sandbox_worker import Closed, receive, send

logger = logging.getLogger(__name__)

# Policy. Wall seconds unless said otherwise; what one candidate may use is in confinement.Limits.
START_S = 120.0  # the zygote's import of torch, a reference's inputs and outputs
REFERENCE_CALL_S = 60.0  # one call of the task's own Model
CHECK_SETS = 3  # secret input sets of a task, each used once per answer before timing
POOL_BYTES = {"cpp": 64 << 20, "cuda": 1 << 30}  # input sets for timing, of one task
MIN_POOL, MAX_POOL = 8, 32  # how many they are; no answer is timed on one of them twice
VERIFIED = 4  # one in so many of them has its outputs compared; which, an answer cannot know
REFERENCES = 8  # tasks whose reference process stays alive
MAX_CODE = 256 << 10  # characters of an answer
MAX_BUILD_ROUNDS = 4  # how often an answer may ask for a build we had not foreseen
TIMING_S = {"cpp": 0.15, "cuda": 0.4}  # budget of the timed calls of one candidate
MIN_PAIRS = 5  # timed calls of each side
NARROW = 0.02  # half-width of the interval, relative to the speedup, at which timing stops
WIDE = 0.1  # half-width at which it goes on beyond its budget, up to three times that
LEAST_CALLS, MORE_CALLS = 12, 6  # of forward in all: at least, and at random so many more
RECHECK_S = 0.3  # budget of the calls after timing
SLOW = 20.0  # times slower than the reference: three calls are enough
OUTSIDE_MS, OUTSIDE_SHARE = 0.2, 0.25  # work outside the timed window that is let pass
STOCK_SEED = 42  # KernelBench's


class UserError(Exception):
    """One line for the user: what is wrong and what to do. A command ends with status 2."""


class HarnessFault(Exception):
    """Something of ours failed: a process gone, a reference that does not run."""


class Status(StrEnum):
    """What became of an answer. All but the last are the candidate's own doing."""

    FORMAT_ERROR = "FORMAT_ERROR"  # no code, or no ModelNew in it
    HACK = "HACK"  # against the rules: not its own kernel, a detour round the checks
    COMPILE_ERROR = "COMPILE_ERROR"
    RUNTIME_ERROR = "RUNTIME_ERROR"  # an exception, a signal, no memory
    TIMEOUT = "TIMEOUT"
    INCORRECT = "INCORRECT"
    CORRECT = "CORRECT"
    HARNESS_ERROR = "HARNESS_ERROR"  # ours: never a score of 0, the sample is dropped


@dataclass(frozen=True)
class Task:
    """A PyTorch module to make faster, in KernelBench's format."""

    name: str  # file name without .py
    level: int  # KernelBench's level, 0 for our own tasks
    source: str  # Python source, with the target's sizes filled in
    target: str  # "cuda" (nvcc) or "cpp" (g++ with OpenMP)


def score(correct: bool, speedup: float, correct_weight: float = 0.3) -> float:
    """Sec. 3.2: s = 0.3*[correct] + (T_reference / T_kernel)*[correct]."""
    return correct_weight + speedup if correct else 0.0


@dataclass(frozen=True)
class KernelResult:
    """The verdict on one answer."""

    status: Status
    reason: str = ""  # one deterministic text for the model: no times, pids, paths, addresses
    evidence: tuple[str, ...] = ()  # details for people
    speedup: float = 0.0  # reference_ms / runtime_ms; 0 unless correct
    speedup_ci: tuple[float, float] = (0.0, 0.0)  # 95 % interval of the speedup
    runtime_ms: float = 0.0  # median time of a call of ModelNew, milliseconds
    reference_ms: float = 0.0  # median time of a call of Model, measured in turn with it
    build_s: float = 0.0  # seconds waiting for builds
    total_s: float = 0.0  # seconds from submission to verdict, queueing left out
    rung: int = -1  # of the build ladder: 0 facade, 2 stock headers; -1 nothing was built
    cached: bool = False  # every build came from the cache
    target: str = "cpp"
    rules: str = "strict"  # or "kernelbench"
    timer: str = ""  # how time was measured: "wall" or "events"; "" if it was not
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds by stage
    controls: tuple[str, ...] = ()  # confinement in force while it ran

    @property
    def correct(self) -> bool:
        return self.status is Status.CORRECT

    @property
    def compiled(self) -> bool:
        """It was built and could be started, whatever happened then."""
        return self.status in (
            Status.RUNTIME_ERROR,
            Status.TIMEOUT,
            Status.INCORRECT,
            Status.CORRECT,
        )

    @property
    def score(self) -> float:
        return score(self.correct, self.speedup)

    def to_json(self) -> dict[str, Any]:
        """The object that `check --json` prints."""
        return {
            "status": self.status.value,
            "reason": self.reason,
            "evidence": list(self.evidence),
            "score": self.score,
            "speedup": self.speedup,
            "speedup_ci": list(self.speedup_ci),
            "runtime_ms": self.runtime_ms,
            "reference_ms": self.reference_ms,
            "build_s": self.build_s,
            "total_s": self.total_s,
            "rung": self.rung,
            "cached": self.cached,
            "target": self.target,
            "rules": self.rules,
            "timer": self.timer,
            "stages": dict(self.stages),
            "controls": list(self.controls),
        }


# ------------------------------------------------------------------------------- task files

_SIZES = re.compile(r"\s*#\s*sizes\[(\w+)\]:\s*(.*?)\s*$")


def resolve_sizes(source: str, target: str) -> str:
    """The source with the target's size block applied and all size blocks removed.

    `# sizes[cpp]: ROWS = 512, COLS = 1024` replaces the values of the module constants of those
    names. ValueError if a name is not assigned at the top level."""
    sizes: dict[str, str] = {}
    kept: list[str] = []
    for line in source.splitlines():
        block = _SIZES.match(line)
        if block is None:
            kept.append(line)
        elif block[1] == target:
            for part in block[2].split(","):
                name, _, value = part.partition("=")
                sizes[name.strip()] = value.strip()
    for index, line in enumerate(kept):
        assigned = re.match(r"(\w+)\s*=\s*[^=]", line)
        if assigned and assigned[1] in sizes:
            kept[index] = f"{assigned[1]} = {sizes.pop(assigned[1])}"
    if sizes:
        raise ValueError(f"the size block names {', '.join(sizes)}, which the file does not assign")
    return "\n".join(kept) + "\n"


def load_task(path: str | Path, target: str, name: str | None = None, level: int = 0) -> Task:
    """A task file in KernelBench's format. UserError if it cannot be one."""
    path = Path(path)
    try:
        source = resolve_sizes(path.read_text(encoding="utf-8"), target)
        tree = ast.parse(source)
    except OSError as error:
        raise UserError(f"cannot read the task {path}: {error.strerror}") from None
    except SyntaxError as error:
        raise UserError(f"task {path}, line {error.lineno}: {error.msg}; mend the file") from None
    except ValueError as error:
        raise UserError(f"task {path}: {error}") from None
    defined = {
        node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    } | {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    missing = [need for need in ("Model", "get_inputs") if need not in defined]
    if missing:
        raise UserError(
            f"task {path} does not define {' and '.join(missing)}; a task needs class Model, "
            "get_inputs() and get_init_inputs()"
        )
    return Task(name or path.stem, level, source, target)


# ------------------------------------------------------------------------------- processes


class _Quiet:
    """Many may be busy at once, or one may measure. Measuring waits until nobody is busy, so that
    a batch is built first and timed afterwards."""

    def __init__(self, lock_file: Path) -> None:
        self._condition = threading.Condition()
        self._busy = 0
        self._measuring = False
        self._lock_file = lock_file

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        with self._condition:
            while self._measuring:
                self._condition.wait()
            self._busy += 1
        try:
            yield
        finally:
            with self._condition:
                self._busy -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        with self._condition:
            while self._measuring or self._busy:
                self._condition.wait()
            self._measuring = True
        try:
            with open(self._lock_file, "a") as file:  # other programs measure on this machine too
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        finally:
            with self._condition:
                self._measuring = False
                self._condition.notify_all()


class _Process:
    """One forked process: its socket, and a handle that cannot be mistaken for another's pid."""

    def __init__(self, zygote: _Zygote, pid: int, pidfd: int, sock: socket.socket) -> None:
        self.zygote, self.pid, self.pidfd, self.sock = zygote, pid, pidfd, sock

    def hear(self, timeout: float, fds: list[int] | None = None) -> dict[str, Any]:
        self.sock.settimeout(max(timeout, 1e-3))
        return receive(self.sock, fds)

    def kill(self) -> int | None:
        """End it; its wait status. A candidate has no children (seccomp), so this is all of it;
        where there is no seccomp its session is killed as well. The zygote reaps it only when
        asked for the status, so the pid is still its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)  # type: ignore[attr-defined]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.sock.close()
        select.select([self.pidfd], [], [], 5.0)
        os.close(self.pidfd)
        return self.zygote.status_of(self.pid)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """It is stopped meanwhile, all its threads: it can neither disturb what is being timed nor
        write into what is being compared."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, number)  # type: ignore[attr-defined]

    def ended_by_itself(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0.5)[0])


class _Zygote:
    """The process that has imported torch, seen from here."""

    def __init__(self, shim: str | None, scratch: str) -> None:
        ours, theirs = socket.socketpair()
        threads = str(len(os.sched_getaffinity(0)))
        keep = ("PATH", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "TMPDIR",
                "KEVIN_CACHE_DIR", "PYTHONPATH", "TORCH_CUDA_ARCH_LIST")
        environment = {name: os.environ[name] for name in keep if name in os.environ}
        environment |= {
            "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
            # Idle threads sleep: the other side is being timed meanwhile.
            "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0",
            "HOME": "/nonexistent", "PYTHONHASHSEED": "0", "CUDA_CACHE_DISABLE": "1",
            "CUDA_MODULE_LOADING": "LAZY",
        }  # fmt: skip
        worker = Path(__file__).resolve().parent / "sandbox_worker.py"
        self.process = subprocess.Popen(
            [sys.executable, "-B", str(worker), str(theirs.fileno()), shim or "", scratch],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Text of a candidate is nobody's input; a person who looks for a fault may want it.
            stderr=None if os.environ.get("KEVIN_SANDBOX_DEBUG") else subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self.sock = ours
        self.lock = threading.Lock()
        self.sock.settimeout(START_S)
        try:
            self.about = receive(self.sock)
        except (Closed, TimeoutError):
            self.close()
            raise UserError(
                "torch cannot be imported in a fresh process; try: "
                f"{sys.executable} -c 'import torch'"
            ) from None

    def fork(self, kind: str, fds: Sequence[int] = ()) -> _Process:
        ours, theirs = socket.socketpair()
        try:
            with self.lock:
                self.sock.settimeout(30.0)
                send(self.sock, {"op": "fork", "kind": kind}, [theirs.fileno(), *fds])
                received: list[int] = []
                pid = receive(self.sock, received)["pid"]
        except (Closed, TimeoutError) as error:
            ours.close()
            raise HarnessFault(f"the zygote is gone: {error}") from None
        finally:
            theirs.close()
        return _Process(self, pid, received[0], ours)

    def status_of(self, pid: int) -> int | None:
        try:
            with self.lock:
                self.sock.settimeout(10.0)
                send(self.sock, {"op": "wait", "pid": pid})
                return receive(self.sock)["status"]
        except (Closed, TimeoutError):
            return None

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.sock.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


def _scratch_folder() -> tuple[str, int]:
    """A new folder in memory for the candidates' own folders, and a descriptor that holds a lock
    on it. Folders that nobody holds any more, because their sandbox and its zygote were killed
    together, are removed."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    how = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    for old in base.glob("kernel-sandbox.*"):
        with contextlib.suppress(OSError):
            fd = os.open(old, how)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)
            finally:
                os.close(fd)
    while True:
        folder = tempfile.mkdtemp(prefix="kernel-sandbox.", dir=base)
        with contextlib.suppress(OSError):  # another one swept it away before it was held
            fd = os.open(folder, how)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.isdir(folder):
                return folder, fd
            os.close(fd)


def _memory_file(size: int) -> int:
    """Shared memory of a fixed size that nobody can resize."""
    fd = os.memfd_create("tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        raise HarnessFault(f"no shared memory for {size} bytes: {error.strerror}") from None
    return fd


@dataclass(frozen=True)
class Call:
    """Times of one call of one side, in milliseconds, by this process's clock but for `device`."""

    load: float  # inputs into place
    wall: float  # "go" to "done"
    device: float  # between two events on the GPU, 0 on a CPU; of a candidate: a claim
    copy: float | None = None  # outputs out of it; None: not asked for


@dataclass(frozen=True)
class _InputSet:
    """Inputs of one call, in a sealed memory file."""

    number: int
    code: list[Any]  # the arguments as JSON, tensors by number
    places: list[dict[str, Any]]  # where the tensors lie
    fd: int


class _Reference:
    """A task's reference process: its inputs, weights and expected outputs live there."""

    def __init__(
        self, zygote: _Zygote, task: Task, rules: str, device: int, secret: bool = True
    ) -> None:
        """`secret` False: inputs and weights follow from the task's text alone."""
        self.zygote = zygote
        self.lock = threading.Lock()  # one conversation at a time
        self.users = 0  # verdicts that need it now
        self.closed = False
        self.retired = False  # to be closed when the last user is gone
        open_seed = zlib.crc32(task.source.encode()) >> 1
        self.seed = secrets.randbits(31) if secret else open_seed
        if rules == "kernelbench":
            self.seed = STOCK_SEED
        self.process = zygote.fork("reference")
        self.sets: dict[int, _InputSet] = {}
        self.weights_fd = self.outputs_fd = -1
        start = {"source": task.source, "target": task.target, "rules": rules,
                 "seed": self.seed, "device": device}  # fmt: skip
        try:
            fds: list[int] = []
            self.about = self.ask(start, START_S, new=fds)
            self.weights_fd = fds[0]
            self.outputs_fd = _memory_file(self.about["output_bytes"])
            self.ask({"op": "outputs"}, START_S, [self.outputs_fd])
            for index in range(CHECK_SETS):
                self.draw(index, verify=True)
            size = os.fstat(self.sets[0].fd).st_size
            count = min(MAX_POOL, max(MIN_POOL, POOL_BYTES[task.target] // size))
            self.pool = range(CHECK_SETS, CHECK_SETS + count)
            self.verified = frozenset(
                secrets.SystemRandom().sample(self.pool, max(2, count // VERIFIED))
            )
        except BaseException:
            self.close()
            raise

    def ask(
        self,
        message: Mapping[str, Any],
        timeout: float = REFERENCE_CALL_S,
        fds: Sequence[int] = (),
        new: list[int] | None = None,
    ) -> dict[str, Any]:
        try:
            send(self.process.sock, message, fds)
            reply = self.process.hear(timeout, new)
        except TimeoutError:
            raise HarnessFault("the reference took too long") from None
        except Closed:
            raise HarnessFault("the reference process is gone") from None
        if reply.get("event") == "error":
            raise HarnessFault(f"the reference failed: {reply['text']}")
        return reply

    def draw(self, index: int, *, verify: bool) -> _InputSet:
        """The input set of this number, made if it is not there yet."""
        if index not in self.sets:
            fds: list[int] = []
            reply = self.ask({"op": "draw", "set": index, "verify": verify}, START_S, new=fds)
            self.sets[index] = _InputSet(index, reply["code"], reply["places"], fds[0])
        return self.sets[index]

    def timed_order(self, chance: random.Random) -> list[int]:
        """The sets for timing in random order, two verified ones among the first."""
        order = list(self.pool)
        while True:
            chance.shuffle(order)
            if len(self.verified.intersection(order[:MIN_PAIRS])) >= 2:
                return order

    def call(self, index: int, *, copy: bool) -> Call:
        """Load, go, and copy if asked to; timed."""
        clock = time.perf_counter
        start = clock()
        self.ask({"op": "load", "set": index})
        loaded = clock()
        done = self.ask({"op": "go"})
        middle = clock()
        if copy:
            self.ask({"op": "copy"})
        end = clock()
        ms = (loaded - start) * 1e3, (middle - loaded) * 1e3, (end - middle) * 1e3
        return Call(ms[0], ms[1], float(done["device_ms"]), ms[2] if copy else None)

    def compare(self, index: int, outputs_fd: int) -> list[str]:
        return self.ask({"op": "compare", "set": index}, fds=[outputs_fd])["problems"]

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.process.kill()
        for fd in (self.weights_fd, self.outputs_fd, *(one.fd for one in self.sets.values())):
            if fd >= 0:
                os.close(fd)
        self.weights_fd = self.outputs_fd = -1
        self.sets.clear()


class _Verdict(Exception):
    """The candidate's process has settled its own case."""

    def __init__(self, status: Status, reason: str, *evidence: str) -> None:
        super().__init__(reason)
        self.status, self.reason, self.evidence = status, reason, evidence


class _Missing(Exception):
    """The answer asks for a build that is not there yet."""

    def __init__(self, request: BuildRequest) -> None:
        super().__init__()
        self.request = request


class _Candidate:
    """One answer's process, seen from here. Every word of it is checked."""

    def __init__(self, box: Sandbox, reference: _Reference, code: str, builds: Mapping) -> None:
        self.limits = box.limits
        self.deadline = time.monotonic() + box.limits.run_s
        self.expected = [
            {"dtype": place["dtype"], "shape": place["shape"]}
            for place in reference.about["outputs"]
        ]
        self.folder = tempfile.mkdtemp(prefix="candidate-", dir=box.scratch)
        self.outputs_fd = -1
        self.process: _Process | None = None
        self.controls: tuple[str, ...] = ()
        self.calls = 0  # of forward
        self.last_set = -1  # number of the input set of the last call
        start = {
            "code": code, "builds": builds, "folder": self.folder, "readable": box.readable(builds),
            "limits": dataclasses.asdict(box.limits), "target": box.target, "rules": box.rules,
            "device": box.device, "seed": STOCK_SEED,
            **{k: reference.about[k] for k in ("init", "weights", "outputs", "keeps_inputs")},
        }  # fmt: skip
        try:
            self.outputs_fd = _memory_file(reference.about["output_bytes"])
            fds = [reference.weights_fd, self.outputs_fd]
            # From the zygote of its reference: if that is gone, both are.
            self.process = reference.zygote.fork("candidate", fds)
            try:
                self.tell(start)
                controls = self.hear("confined", START_S)["controls"]
            except _Verdict as verdict:  # nothing of the answer has run yet
                raise HarnessFault(f"a candidate did not start: {verdict.reason}") from None
            self.controls = tuple(str(name)[:40] for name in controls[:10])
            self.hear("ready")
        except BaseException:
            self.close()
            raise

    def hear(self, event: str, timeout: float | None = None) -> dict[str, Any]:
        """The next message, which must be `event`; everything else is a verdict."""
        assert self.process is not None
        left = self.deadline - time.monotonic()
        timeout = timeout or min(left, self.limits.call_s)
        try:
            if left <= 0:
                raise TimeoutError
            message = self.process.hear(timeout)
        except TimeoutError:
            raise _Verdict(
                Status.TIMEOUT, "the code was stopped: it took longer than the time limit"
            ) from None
        except Closed:
            raise self._ended() from None
        kind = message.get("event")
        if kind == event:
            return message
        text = str(message.get("text", ""))[:1500]
        if kind == "missing":
            try:
                raise _Missing(BuildRequest.from_dict(message["request"]))
            except (TypeError, ValueError, KeyError):
                raise _Verdict(
                    Status.RUNTIME_ERROR, "load_inline was called with unusable arguments"
                ) from None
        status = {
            "error": Status.RUNTIME_ERROR, "weights": Status.INCORRECT,
            "output": Status.INCORRECT, "format": Status.FORMAT_ERROR,
        }.get(str(kind))  # fmt: skip
        if status is None:
            raise _Verdict(Status.RUNTIME_ERROR, "the process sent no usable record of the run")
        raise _Verdict(status, text or "the code failed without a message")

    def _ended(self) -> Exception:
        """Why the other end of the socket closed."""
        assert self.process is not None
        if not self.process.zygote.alive():
            return HarnessFault("the zygote is gone")
        process, self.process = self.process, None
        by_itself = process.ended_by_itself()
        status = process.kill()
        if not by_itself:
            return _Verdict(Status.RUNTIME_ERROR, "the process sent no usable record of the run")
        if status is not None and os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            if name == "SIGXCPU":
                return _Verdict(Status.TIMEOUT, "the code was stopped: CPU time limit")
            meaning = {
                "SIGSEGV": "invalid memory access", "SIGBUS": "invalid memory access",
                "SIGFPE": "integer division by zero", "SIGABRT": "abort() was called",
                "SIGILL": "illegal instruction", "SIGXFSZ": "file size limit",
                "SIGKILL": "out of memory",
            }.get(name, "signal")  # fmt: skip
            return _Verdict(Status.RUNTIME_ERROR, f"the process was killed by {name} ({meaning})")
        return _Verdict(Status.RUNTIME_ERROR, "the process ended before the run was complete")

    def tell(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        assert self.process is not None
        self.process.sock.settimeout(self.limits.call_s)
        try:
            send(self.process.sock, message, fds)
        except Closed:
            raise self._ended() from None

    def call(self, inputs: _InputSet, *, copy: bool, reuse: bool, poison: bool) -> Call:
        """Load, go, and copy if asked to; timed. After a copy the outputs lie in shared memory."""
        clock = time.perf_counter
        load = {"op": "load", "code": inputs.code, "places": inputs.places,
                "reuse": reuse, "poison": poison}  # fmt: skip
        self.calls += 1
        self.last_set = inputs.number
        start = clock()
        self.tell(load, [inputs.fd])
        self.hear("loaded")
        loaded = clock()
        self.tell({"op": "go"})
        done = self.hear("done")
        middle = clock()
        copied: dict[str, Any] = {}
        if copy:
            self.tell({"op": "copy", "inputs": poison})
            copied = self.hear("copied")
        end = clock()
        if copy:
            self._check_outputs(copied.get("outputs"))
        if copied.get("changed"):
            raise _Verdict(Status.INCORRECT, "forward changed the contents of its inputs")
        claim = done.get("device_ms")
        claim = float(claim) if isinstance(claim, int | float) and 0 <= claim < 1e9 else 0.0
        ms = (loaded - start) * 1e3, (middle - loaded) * 1e3, (end - middle) * 1e3
        return Call(ms[0], ms[1], claim, ms[2] if copy else None)

    def held(self) -> contextlib.AbstractContextManager[None]:
        return self.process.held() if self.process is not None else contextlib.nullcontext()

    def _check_outputs(self, outputs: Any) -> None:
        if outputs == self.expected:
            return
        if not isinstance(outputs, list) or len(outputs) != len(self.expected):
            count = len(outputs) if isinstance(outputs, list) else 0
            raise _Verdict(
                Status.INCORRECT, f"forward returned {count} tensors, expected {len(self.expected)}"
            )
        for index, (got, want) in enumerate(zip(outputs, self.expected, strict=True)):
            for what in ("shape", "dtype"):
                found = got.get(what) if isinstance(got, dict) else None
                if found != want[what]:
                    label = f"output {index} has" if len(outputs) > 1 else "the output has"
                    raise _Verdict(
                        Status.INCORRECT,
                        f"{label} {what} {str(found)[:80]}, expected {want[what]}",
                    )

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None
        if self.outputs_fd >= 0:
            os.close(self.outputs_fd)
            self.outputs_fd = -1
        shutil.rmtree(self.folder, ignore_errors=True)


# ------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Timing:
    """Paired times of the two sides."""

    runtime_ms: float  # candidate, median
    reference_ms: float  # reference, median
    speedup: float  # reference_ms / runtime_ms
    interval: tuple[float, float]  # 95 %, by bootstrap over the pairs
    pairs: int


def summarise(
    candidate: Sequence[Call], reference: Sequence[Call], overhead_ms: float = 0.0
) -> Timing:
    """Medians over pairs of calls, their ratio and its bootstrap interval.

    Without a GPU the wall clock counts, less what an empty message takes. On a GPU the events
    count, as long as this process's clock agrees: wall time beyond the events' that the reference
    does not have is work that the events did not see, and is added. On both, so is time that a
    candidate takes, and the reference does not, to load its inputs or to copy its outputs: work
    done before forward was called, or after it had returned. Call by call, so that work hidden in
    some calls only does not hide behind a median (and for the reference's own slow loads as well,
    so that a busy machine falls on both sides); copies are not made in every call, and which ones a
    candidate cannot know, so their median counts for all."""
    on_gpu = any(call.device > 0 for call in reference)
    ours = np.array([c.device if on_gpu else c.wall - overhead_ms for c in candidate])
    theirs = np.array([c.device if on_gpu else c.wall - overhead_ms for c in reference])
    ours, theirs = np.maximum(ours, 1e-3), np.maximum(theirs, 1e-3)
    least = max(OUTSIDE_MS, OUTSIDE_SHARE * float(np.median(ours)))
    hidden, noise = [], []
    for seen in (lambda c: c.load, lambda c: c.wall - c.device)[: 2 if on_gpu else 1]:
        usual = [seen(call) for call in reference]
        hidden.append(_excess([seen(call) for call in candidate], usual))
        noise.append(_excess(usual, usual))
    copies = [
        (c.copy, r.copy)
        for c, r in zip(candidate, reference, strict=True)
        if c.copy is not None and r.copy is not None
    ]
    if copies:
        hidden.append(np.median(_excess(*zip(*copies, strict=True)), keepdims=True))
    for excess in hidden:
        ours = ours + np.where(excess > least, excess, 0.0)
    for excess in noise:
        theirs = theirs + np.where(excess > least, excess, 0.0)
    if on_gpu:  # small or not, a call is not shorter than what the events have missed of it
        ours = np.maximum(ours, _missed(candidate) - _missed(reference))
    draws = np.random.default_rng(0).integers(0, len(ours), (200, len(ours)))
    ratios = np.median(theirs[draws], axis=1) / np.median(ours[draws], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    runtime, against = float(np.median(ours)), float(np.median(theirs))
    return Timing(runtime, against, against / runtime, (float(low), float(high)), len(ours))


def _missed(calls: Sequence[Call]) -> float:
    """Median time between "go" and "done" that the events did not see, in milliseconds."""
    return float(np.median([call.wall - call.device for call in calls]))


def _excess(candidate_ms: Sequence[float], reference_ms: Sequence[float]) -> np.ndarray:
    """What a candidate takes beyond the reference's median and a quarter, call by call."""
    return np.asarray(candidate_ms) - float(np.median(reference_ms)) * (1 + OUTSIDE_SHARE)


# ------------------------------------------------------------------------------- the sandbox


class Sandbox:
    """Judges answers. Thread-safe; a context manager. Submitting returns a future, so that builds
    start as each response ends; `busy()` keeps timing away while something else needs the cores."""

    def __init__(
        self,
        target: str = "cpp",
        *,
        rules: str = "strict",
        jobs: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        fixed_speedup: float | None = None,
        reuse_verdicts: bool = False,
        limits: Limits | None = None,
        gpus: Sequence[int] | None = None,
        static: bool = True,
        purity: Literal["strict", "library"] = "strict",
    ) -> None:
        """`target`: "cpp" or "cuda". `rules`: "strict", or "kernelbench" to judge as its evaluator
        does. `jobs`: builds at a time. `fixed_speedup`: not timed, every correct answer gets this
        (exact repeats). `reuse_verdicts`: an answer seen before for the task is not judged again.
        `static=False` leaves the static checks out (to test the other layers). UserError if the
        machine lacks a compiler, torch or the GPU."""
        if target not in ("cpp", "cuda") or rules not in ("strict", "kernelbench"):
            raise UserError(f"no target {target!r} with rules {rules!r}; see --help")
        self.target, self.rules, self.static, self.purity = target, rules, static, purity
        self.fixed_speedup, self.reuse_verdicts = fixed_speedup, reuse_verdicts
        self.limits = limits or Limits()
        self.device = (list(gpus) or [0])[0] if gpus is not None else 0
        self.cache_dir = cache_dir
        self.builder = Builder(target, cache_dir, jobs, timeout_s=self.limits.build_s)
        root = cache_root(cache_dir)
        try:
            self.builder.prepare()
            root.mkdir(parents=True, exist_ok=True)
            self.scratch, self._scratch_lock = _scratch_folder()
        except ToolchainError as error:
            self.builder.close()
            raise UserError(str(error)) from None
        except OSError as error:
            where = error.filename or root
            raise UserError(
                f"cannot write to {where}: {error.strerror}; make room, or set KEVIN_CACHE_DIR "
                "(builds) and TMPDIR to folders that can be written"
            ) from None
        self.quiet = _Quiet(root / f"measuring-{target}.lock")
        self._starting = threading.Semaphore(4 if target == "cpp" else 8)
        self._references: OrderedDict[Task, _Reference] = OrderedDict()
        self._lock = threading.RLock()
        self._task_locks: dict[Task, threading.Lock] = {}
        self._zygote: _Zygote | None = None
        self._verdicts: dict[tuple[str, str, str | None, str], Future[KernelResult]] = {}
        self._pool = ThreadPoolExecutor(2 * self.builder.jobs + 4, thread_name_prefix="judge")
        self.zygote()

    # -- entrances

    def submit(
        self, task: Task, code: str | None, format_error: str = ""
    ) -> Future[KernelResult]:
        """A verdict to come. Never raises for anything that a model can write. `code` None: the
        response held no code, for the reason `format_error`."""
        key = (task.name, task.source, code, format_error)
        with self._lock:
            if self.reuse_verdicts and key in self._verdicts:
                return self._verdicts[key]
            future = self._pool.submit(self._judge, task, code, format_error)
            if self.reuse_verdicts:
                self._verdicts[key] = future
        return future

    def evaluate(self, task: Task, code: str | None, format_error: str = "") -> KernelResult:
        return self.submit(task, code, format_error).result()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """While this is held nothing is timed (on a CPU target, where generation and timing share
        the cores; on a GPU too, where they share the GPU)."""
        with self.quiet.busy():
            yield

    def using_cores(self) -> contextlib.AbstractContextManager[None]:
        """`busy` where kernels are timed on the cores; on a GPU builds go on meanwhile."""
        return self.busy() if self.target == "cpp" else contextlib.nullcontext()

    def close(self) -> None:
        """Ends every process and removes every file of this sandbox. Verdicts that are not there
        yet are given up: a stock build would keep the caller waiting for a minute."""
        self.builder.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._drop_processes()
        self.builder.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self._scratch_lock >= 0:
            os.close(self._scratch_lock)
            self._scratch_lock = -1

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def audit(self, task: Task) -> list[str]:
        """Lazy answers that would pass on this task, and faithful ones that would not."""
        with self._reference(task) as reference, reference.lock:
            return reference.ask({"op": "audit", "sets": CHECK_SETS}, START_S)["findings"]

    # -- processes

    def zygote(self) -> _Zygote:
        with self._lock:
            if self._zygote is not None and not self._zygote.alive():
                logger.warning("the zygote ended; starting another")
                self._drop_processes()
            if self._zygote is None:
                self._zygote = _Zygote(self.builder.shim_path, self.scratch)
                if self.target == "cuda" and not self._zygote.about["cuda"]:
                    raise UserError(
                        "this torch was built without CUDA; install another, or use --target cpp"
                    )
            return self._zygote

    def _drop_processes(self) -> None:
        for reference in list(self._references.values()):
            self._retire(reference)
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _retire(self, reference: _Reference) -> None:
        """Nobody else gets this reference; it is closed when nobody uses it any more."""
        with self._lock:
            for task in [t for t, one in self._references.items() if one is reference]:
                del self._references[task]
            reference.retired = True
            if reference.users == 0:
                reference.close()

    def readable(self, builds: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """What a candidate's process may read: libraries, Python, its own builds."""
        import importlib.util

        spec = importlib.util.find_spec("torch")
        places = [sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr", "/lib", "/lib64", "/bin",
                  "/etc/ld.so.cache", "/etc/ld.so.conf", "/proc/self", "/proc/cpuinfo",
                  "/proc/meminfo", "/sys/devices/system", "/dev/null", "/dev/urandom",
                  "/dev/zero"]  # fmt: skip
        places += [str(Path(built["path"]).parent) for built in builds.values()]
        if spec is not None and spec.origin:
            places.append(str(Path(spec.origin).parent.parent))
        if self.target == "cuda":
            places += ["/dev", "/sys", "/usr/local", "/opt", "/etc", "/run/nvidia-persistenced"]
        return places

    @contextlib.contextmanager
    def _reference(self, task: Task) -> Iterator[_Reference]:
        """The task's reference process, started if need be; the least recently used goes."""
        with self._lock:
            task_lock = self._task_locks.setdefault(task, threading.Lock())
        with task_lock:  # two candidates of a new task do not start two
            with self._lock:
                zygote = self.zygote()  # a dead one's references are retired here
                found = self._references.get(task)
                if found is not None:
                    found.users += 1
                    self._references.move_to_end(task)
            if found is None:
                with self.busy():
                    # A reason quotes wrong values and feeds the next prompt: runs that repeat
                    # exactly (fixed_speedup) need the same values each time.
                    secret = self.fixed_speedup is None
                    found = _Reference(zygote, task, self.rules, self.device, secret)
                with self._lock:
                    found.users += 1
                    self._references[task] = found
        try:
            yield found
        except HarnessFault:
            self._retire(found)
            raise
        finally:
            with self._lock:
                found.users -= 1
                if found.retired and found.users == 0:
                    found.close()
                idle = [one for one in self._references.values() if one.users == 0]
                for old in idle[: max(0, len(self._references) - REFERENCES)]:
                    self._retire(old)

    # -- one verdict

    def _judge(self, task: Task, code: str | None, format_error: str) -> KernelResult:
        for attempt in (1, 2):
            try:
                return _Judging(self, task).judge(code, format_error)
            except HarnessFault as fault:
                logger.warning("%s: %s%s", task.name, fault, "; once more" if attempt == 1 else "")
                reason = str(fault)
            except Exception as error:  # noqa: BLE001 - the boundary: our bug is not the model's score
                logger.exception("while judging an answer for %s", task.name)
                reason = f"{type(error).__name__}: {error}"
        return KernelResult(Status.HARNESS_ERROR, reason, target=self.target, rules=self.rules)


class _Judging:
    """The steps of one verdict, with the seconds that each took."""

    def __init__(self, box: Sandbox, task: Task) -> None:
        self.box, self.task = box, task
        self.stages: dict[str, float] = {}
        self.builds: list[BuildResult] = []
        self.controls: tuple[str, ...] = ()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.monotonic() - start

    def result(self, status: Status, reason: str = "", **more: Any) -> KernelResult:
        return KernelResult(
            status, reason, target=self.box.target, rules=self.box.rules,
            build_s=self.stages.get("build", 0.0),
            total_s=sum(s for name, s in self.stages.items() if name != "queue"),
            rung=max((build.rung for build in self.builds), default=-1),
            cached=bool(self.builds) and all(build.cached for build in self.builds),
            stages=dict(self.stages), controls=self.controls, **more,
        )  # fmt: skip

    def judge(self, code: str | None, format_error: str) -> KernelResult:
        """Format, static checks, build, run, compare, time."""
        if code is None:
            return self.result(Status.FORMAT_ERROR, format_error or "no code")
        code = code.encode("utf-8", "replace").decode()  # lone surrogates cannot travel
        if len(code) > MAX_CODE:
            return self.result(
                Status.FORMAT_ERROR, f"the code is longer than {MAX_CODE} characters"
            )
        if self.box.static and self.box.rules == "strict":
            with self.stage("static"), self.box.using_cores():
                found = static_checks.check(code, self.box.target, self.box.purity)
            for finding in found:
                if finding.fatal:
                    status = Status.FORMAT_ERROR if finding.rule == "format" else Status.HACK
                    where = f"line {finding.line}: {finding.evidence}" if finding.line else ""
                    return self.result(
                        status, finding.message, evidence=(finding.rule, where[:300])
                    )
        try:
            return self._build_and_run(code)
        except _Verdict as verdict:
            return self.result(verdict.status, verdict.reason, evidence=verdict.evidence)

    def _build_and_run(self, code: str) -> KernelResult:
        ready: dict[str, Any] = {}
        for request in extract_requests(code) or []:
            self._build(request, ready)
        for _ in range(MAX_BUILD_ROUNDS):
            try:
                return self._run(code, ready)
            except _Missing as missing:
                self._check_native(missing.request)
                self._build(missing.request, ready)
        raise _Verdict(Status.RUNTIME_ERROR, "load_inline gets other arguments at every run")

    def _check_native(self, request: BuildRequest) -> None:
        """Sources that only appeared at run time go through the same checks."""
        if not self.box.static or self.box.rules != "strict":
            return
        sources = [*request.cpp_sources, *request.cuda_sources]
        names = [name for name, _ in request.functions or ()]
        for finding in static_checks.check_native(
            sources, names, self.box.target, self.box.purity
        ):
            if finding.fatal:
                raise _Verdict(Status.HACK, finding.message, finding.rule, finding.evidence[:300])

    def _build(self, request: BuildRequest, ready: dict[str, Any]) -> None:
        with self.stage("build"), self.box.using_cores():
            built = self.box.builder.submit(request).result()
        self.builds.append(built)
        if built.harness_error:
            raise HarnessFault(built.harness_error)
        if not built.ok:
            late = "the compiler was stopped: it took longer than the time limit"
            raise _Verdict(Status.COMPILE_ERROR, built.error or late)
        ready[request.key()] = {"ok": True, "path": built.path, "kind": built.kind}

    def _run(self, code: str, ready: Mapping[str, Any]) -> KernelResult:
        with contextlib.ExitStack() as stack:
            with self.stage("reference"):
                reference = stack.enter_context(self.box._reference(self.task))
            with self.stage("queue"):
                stack.enter_context(self.box._starting)
            with self.stage("start"), self.box.busy():
                candidate = _Candidate(self.box, reference, code, ready)
            stack.callback(candidate.close)
            self.controls = candidate.controls
            fixed = self.box.fixed_speedup
            try:
                # On a CPU an answer is checked and timed in one turn; on a GPU several are checked
                # at a time.
                one_turn = self.box.target == "cpp" and fixed is None
                with self._turn(candidate, reference, alone=one_turn):
                    self._check(candidate, reference)
                    if one_turn:
                        timing = self._measure(candidate, reference)
                if fixed is not None:
                    return self.result(Status.CORRECT, speedup=fixed, speedup_ci=(fixed, fixed))
                if not one_turn:
                    with self._turn(candidate, reference, alone=True):
                        timing = self._measure(candidate, reference)
            except _Verdict as verdict:
                self._settle_blame(verdict, reference)
                raise
        return self.result(
            Status.CORRECT,
            speedup=timing.speedup,
            speedup_ci=timing.interval,
            runtime_ms=timing.runtime_ms,
            reference_ms=timing.reference_ms,
            timer="events" if self.box.target == "cuda" else "wall",
            evidence=(f"{timing.pairs} timed pairs",),
        )

    @contextlib.contextmanager
    def _turn(
        self, candidate: _Candidate, reference: _Reference, *, alone: bool
    ) -> Iterator[None]:
        """Its turn with the reference; alone: nothing else of this machine's sandboxes runs."""
        with contextlib.ExitStack() as stack:
            with self.stage("queue"):
                stack.enter_context(self.box.quiet.measuring() if alone else self.box.busy())
                stack.enter_context(reference.lock)
            candidate.deadline = time.monotonic() + self.box.limits.run_s  # queueing is no fault
            yield

    def _measure(self, candidate: _Candidate, reference: _Reference) -> Timing:
        with self.stage("time"):
            timing = self._time(candidate, reference)
        with self.stage("recheck"):
            self._recheck(candidate, reference)
        return timing

    def _settle_blame(self, verdict: _Verdict, reference: _Reference) -> None:
        """A candidate died on the GPU: if the reference does not run there either, the GPU is at
        fault. HarnessFault then."""
        if self.box.target == "cuda" and verdict.status is Status.RUNTIME_ERROR:
            with reference.lock:
                reference.call(0, copy=True)

    def _check(self, candidate: _Candidate, reference: _Reference) -> None:
        """One call on each check set, in random order, in memory full of garbage."""
        order = list(range(CHECK_SETS))
        if self.box.fixed_speedup is None:
            secrets.SystemRandom().shuffle(order)
        with self.stage("check"):
            for count, index in enumerate(order):
                inputs = reference.draw(index, verify=True)
                candidate.call(inputs, copy=True, reuse=count == 1, poison=True)
                self._compare(candidate, reference, index, "")

    def _recheck(self, candidate: _Candidate, reference: _Reference) -> None:
        """More calls after the timed ones, so that nobody can tell by counting which call is the
        last that anyone looks at."""
        chance = secrets.SystemRandom()
        goal = LEAST_CALLS + chance.randrange(MORE_CALLS)
        known = [*range(CHECK_SETS), *reference.verified]
        order = chance.sample(known, len(known))
        if order[0] == candidate.last_set:  # an old output must not be right by chance
            order.append(order.pop(0))
        start = time.monotonic()
        last = False
        for index in itertools.cycle(order):
            if last:
                break
            last = candidate.calls + 1 >= goal or time.monotonic() - start > RECHECK_S
            inputs = reference.draw(index, verify=True)
            look = last or chance.random() < 0.3
            reuse = chance.random() < 0.5
            candidate.call(inputs, copy=look, reuse=reuse, poison=False)
            if look:
                self._compare(candidate, reference, index, " (in a later call)")

    def _compare(
        self, candidate: _Candidate, reference: _Reference, index: int, when: str
    ) -> None:
        with candidate.held():
            problems = reference.compare(index, candidate.outputs_fd)
        if problems:
            raise _Verdict(Status.INCORRECT, "; ".join(problems) + when)

    def _time(self, candidate: _Candidate, reference: _Reference) -> Timing:
        """Pairs of calls in alternating order, each on contents that this process has not seen,
        until the interval is narrow, the budget spent or the contents used up."""
        overhead = self._overhead(reference)
        chance = secrets.SystemRandom()
        budget = TIMING_S[self.box.target]
        ours: list[Call] = []
        theirs: list[Call] = []
        candidate.call(reference.sets[0], copy=False, reuse=False, poison=False)  # warm-up
        with candidate.held():
            reference.call(0, copy=True)
        start = time.monotonic()
        for count, index in enumerate(reference.timed_order(chance), 1):
            verify = index in reference.verified
            inputs = reference.draw(index, verify=verify)
            for side in (0, 1) if count % 2 else (1, 0):
                if side:
                    with candidate.held():
                        theirs.append(reference.call(index, copy=verify))
                    continue
                reuse = chance.random() < 0.5
                ours.append(candidate.call(inputs, copy=verify, reuse=reuse, poison=False))
                if verify:
                    self._compare(candidate, reference, index, " (in a timed call)")
            spent = time.monotonic() - start
            if count >= 3:
                timing = summarise(ours, theirs, overhead)
                width = (timing.interval[1] - timing.interval[0]) / 2
                slow = timing.runtime_ms > SLOW * timing.reference_ms or spent > 4 * budget
                narrow = width < NARROW * timing.speedup
                enough = spent > budget and width < WIDE * timing.speedup
                if slow or count >= MIN_PAIRS and (narrow or enough or spent > 3 * budget):
                    break
        return timing

    def _overhead(self, reference: _Reference) -> float:
        """Milliseconds of a message there and back, measured with the reference."""
        if self.box.target == "cuda":
            return 0.0
        times = []
        for _ in range(7):
            start = time.perf_counter()
            reference.ask({"op": "ping"})
            times.append((time.perf_counter() - start) * 1e3)
        return sorted(times)[3]


def evaluate(task: Task, code: str | None, **options: Any) -> KernelResult:
    """One verdict by a sandbox of its own; `options` are Sandbox's."""
    with Sandbox(task.target, **options) as box:
        return box.evaluate(task, code)


if __name__ == "__main__":
    import sandbox_commands

    sys.exit(sandbox_commands.main())
