"""Confinement of one process: what a candidate's code can reach once `enter` has returned.

Called in a forked child before it touches anything of the candidate. Controls, each independent,
each named in the list that `enter` returns (a control that the machine lacks is named with a
leading "no-", so that a verdict says under what it was reached):

  rlimits    CPU seconds, file size, open files, no core dumps; address space where no GPU is used
  no-privs   PR_SET_NO_NEW_PRIVS: nothing it executes gains rights; and root's capabilities go, so
             that root here may do what an ordinary user may
  landlock   the file system: writes only below `writable`, reads only below `readable`
  seccomp    no new process (threads may), no program execution, no signal to another process, no
             tracing, no network, no mounts or namespaces, no io_uring; so one SIGKILL ends it all
  deathsig   it dies with the process that started it

Not covered: CPU and memory bandwidth taken from neighbours, the GPU driver's own interface, side
channels. A machine that runs many people's kernels still belongs in a container of its own.

Standard library and ctypes only; no state. Works as root and as an ordinary user.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 38, 22
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """What one candidate may use. Everything above is the candidate's fault."""

    run_s: float = 30.0  # wall seconds of one run, import to last timed call
    call_s: float = 10.0  # wall seconds of one call of forward
    cpu_s: int = 300  # CPU seconds of one run, all threads
    memory_bytes: int = 12 << 30  # address space beyond what is mapped at the start; not with a GPU
    file_bytes: int = 1 << 20  # size of a file it writes (outputs go through their own memory)
    open_files: int = 256  # descriptors
    output_bytes: int = 4 << 30  # all outputs of one call
    build_s: float = 120.0  # wall seconds of one build


def die_with_parent(parent: int) -> None:
    """SIGKILL this process when the thread that forked it ends; at once if it already has."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def enter(
    limits: Limits,
    *,
    writable: Sequence[str | Path] = (),
    readable: Sequence[str | Path] = (),
    gpu: bool = False,
) -> tuple[str, ...]:
    """Confine the calling process for good; the names of the controls in force."""
    controls = [_rlimits(limits, gpu)]
    if _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    controls.append("no-new-privs")
    controls.append(_drop_capabilities())
    controls.append(_landlock(writable, readable, gpu))
    controls.append(_seccomp(gpu))
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # after the rest: it closes /proc/self to itself
    return tuple(controls)


def available() -> tuple[str, ...]:
    """What `enter` would give here, tried in a child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, ",".join(enter(Limits())).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return tuple(text.split(",")) if text else ("no-confinement",)


def _rlimits(limits: Limits, gpu: bool) -> str:
    pairs = [
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, max(limits.open_files, 1024 if gpu else 0)),  # CUDA's own
        (resource.RLIMIT_CORE, 0),
    ]
    if not gpu:  # CUDA reserves far more address space than it uses
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        pairs.append((resource.RLIMIT_AS, mapped + limits.memory_bytes))
    for which, most in pairs:
        hard = resource.getrlimit(which)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # At the soft limit of CPU time comes SIGXCPU, which says what happened; at the hard one
        # SIGKILL, which does not.
        spare = which == resource.RLIMIT_CPU and (hard == resource.RLIM_INFINITY or value < hard)
        resource.setrlimit(which, (value, value + spare))
    return "rlimits"


_CAPABILITY_VERSION_3, _CAPSET = 0x20080522, 126


def _drop_capabilities() -> str:
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    if platform.machine() != "x86_64" or _libc.syscall(_CAPSET, header, bytes(24)) != 0:
        return "keeps-capabilities"
    return "no-capabilities"


# ------------------------------------------------------------------------------- Landlock

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR


class _RulesetAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("fs", "net", "scoped")]


class _PathAttr(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("fd", ctypes.c_int32)]


def _landlock(writable: Sequence[str | Path], readable: Sequence[str | Path], gpu: bool) -> str:
    abi = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return "no-landlock"
    handled = _READ | _WRITE_FILE | _MAKE_AND_REMOVE
    handled |= (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    attr = _RulesetAttr(handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _libc.syscall(_CREATE_RULESET, ctypes.byref(attr), ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return "no-landlock"
    rules: list[tuple[str | Path, int]] = [(path, _READ) for path in readable]
    rules += [(path, handled & ~_EXECUTE) for path in writable]
    if gpu:
        # The GPU's devices, not the disks and the shared memory beside them (root may open all of
        # them); of /proc what is its own, not the kernel's settings.
        names = ("nvidia", "dxg", "null", "zero", "urandom")
        nodes = [node.path for node in os.scandir("/dev") if node.name.startswith(names)]
        rules += [("/proc", _READ), ("/dev", _READ)]
        rules += [(path, handled & ~_EXECUTE) for path in ("/proc/self", *nodes)]
    for path, access in rules:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            access &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
        rule = _PathAttr(access & handled, fd)
        done = _libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(fd)
        if done != 0:
            return "no-landlock"
    done = _libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return f"landlock-{abi}" if done == 0 else "no-landlock"


# ------------------------------------------------------------------------------- seccomp

_ARCH = 0xC000003E  # AUDIT_ARCH_X86_64
_SECCOMP, _FILTER_FLAG_SPEC_ALLOW = 317, 4
_CLONE_THREAD = 0x00010000
_AF_UNIX = 1
_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_REFUSED = {  # x86-64 numbers
    "socket": 41, "connect": 42, "bind": 49, "listen": 50,
    "accept": 43, "accept4": 288, "socketpair": 53, "fork": 57, "vfork": 58, "execve": 59,
    "execveat": 322, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425,
    "keyctl": 250, "add_key": 248, "request_key": 249, "kexec_load": 246, "init_module": 175,
    "finit_module": 313, "delete_module": 176, "reboot": 169, "swapon": 167, "sethostname": 170,
    "settimeofday": 164, "clock_settime": 227, "setuid": 105, "setgid": 106, "pidfd_open": 434,
    "pidfd_getfd": 438, "pidfd_send_signal": 424, "kcmp": 312, "open_by_handle_at": 304,
    "memfd_create": 319, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "quotactl": 179,
    "personality": 135, "setsid": 112, "setpgid": 109, "tkill": 200, "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297, "prlimit64": 302, "sched_setscheduler": 144, "setpriority": 141,
}
_GETS_ONLY = ("prlimit64",)  # allowed to read: a null pointer for the new limit
_CLONE, _CLONE3, _KILL_NR, _TGKILL = 56, 435, 62, 234


def _seccomp(gpu: bool) -> str:
    if platform.machine() != "x86_64":
        return "no-seccomp"
    program = _filter(os.getpid(), gpu)
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = ctypes.c_char_p(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)))
    # The same speculation rules as outside: a candidate is timed against a process without filter.
    done = _libc.syscall(_SECCOMP, 1, _FILTER_FLAG_SPEC_ALLOW, fprog)
    if done != 0:
        done = _libc.prctl(PR_SET_SECCOMP, 2, fprog, 0, 0)
    return "seccomp" if done == 0 else "no-seccomp"


def _filter(pid: int, gpu: bool) -> bytes:
    """The BPF program: load architecture and number, compare, decide. CUDA's start-up opens and
    listens on a local socket; without connect, and with no other family, that leads nowhere."""
    load, equal, ret, anyset, above = 0x20, 0x15, 0x06, 0x45, 0x35
    nr, arch, arg0, arg2_low, arg2_high = 0, 4, 16, 32, 36
    deny = _ERRNO | _EPERM

    def op(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
        return struct.pack("HBBI", code, true, false, value)

    lines = [
        op(load, arch), op(equal, _ARCH, 1, 0), op(ret, _KILL),
        op(load, nr), op(above, 0x40000000, 0, 1), op(ret, deny),  # no x32 calls
        # clone3 hides its flags behind a pointer; without it the C library uses clone
        op(equal, _CLONE3, 0, 1), op(ret, _ERRNO | _ENOSYS),
        op(equal, _CLONE, 0, 4), op(load, arg0), op(anyset, _CLONE_THREAD, 0, 1),
        op(ret, _ALLOW), op(ret, deny),
    ]
    for number in (_KILL_NR, _TGKILL):  # abort() must still reach this very process
        lines += [op(equal, number, 0, 4), op(load, arg0), op(equal, pid, 0, 1),
                  op(ret, _ALLOW), op(ret, deny)]
    for name, number in _REFUSED.items():
        if gpu and name in ("bind", "listen"):
            continue
        if gpu and name == "socket":
            lines += [op(equal, number, 0, 4), op(load, arg0), op(equal, _AF_UNIX, 0, 1),
                      op(ret, _ALLOW), op(ret, deny)]
        elif name in _GETS_ONLY:
            lines += [op(equal, number, 0, 6), op(load, arg2_low), op(equal, 0, 0, 3),
                      op(load, arg2_high), op(equal, 0, 0, 1), op(ret, _ALLOW), op(ret, deny)]
        else:
            lines += [op(equal, number, 0, 1), op(ret, deny)]
    lines.append(op(ret, _ALLOW))
    return b"".join(lines)
