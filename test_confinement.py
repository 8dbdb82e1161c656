"""A candidate's process reaches nothing outside its own folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_sandbox import Sandbox, Status
from test_sandbox_worker import HERE, LIMITS, answer, box, judged

__all__ = ["box"]  # a fixture

REACHES = {
    "fork": "os.fork()",
    "a shell": "import subprocess; subprocess.run(['/bin/true'])",
    "exec": "os.execv('/bin/true', ['true'])",
    "the network": "import socket; socket.create_connection(('127.0.0.1', 9), 1)",
    "a local socket": "import socket; socket.socket(socket.AF_UNIX).bind('\\0name')",
    "writing in /tmp": "open('/tmp/kernel-sandbox-was-here', 'w').write('x')",
    "writing in the project": f"open({str(HERE / 'was-here')!r}, 'w').write('x')",
    "reading the project": f"open({str(HERE / 'kernel_sandbox.py')!r}).read()",
    "reading the home folder": f"os.listdir({str(Path.home())!r})",
    "reading passwords": "open('/etc/passwd').read()",
    "the parent's environment": "open(f'/proc/{os.getppid()}/environ').read()",
    "the parent's memory": "open(f'/proc/{os.getppid()}/mem', 'rb')",
    "other processes": "os.listdir('/proc/1')",
    "killing the parent": "os.kill(os.getppid(), 9)",
    "killing its group": "os.killpg(0, 9)",
    "leaving its session": "os.setsid()",
    "shared memory": "open('/dev/shm/left-behind', 'w')",
    "a big file": "open('big', 'wb').write(bytes(1 << 22))",
    "raising a limit": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))",
    "many files": "a = [open('/dev/null') for _ in range(200)]",
    "mounting": "import ctypes; "
    "assert ctypes.CDLL(None).mount(b'x', b'.', b'tmpfs', 0, 0) == 0, 'refused'",
}


@pytest.mark.parametrize("what", REACHES)
def test_out_of_reach(box: Sandbox, what: str) -> None:
    result = judged(box, answer(f"{REACHES[what]}\nreturn torch.softmax(x, -1)"))
    assert result.status is Status.RUNTIME_ERROR, what
    refusals = ("PermissionError", "OSError", "refused", "SIGXFSZ", "not permitted", "ValueError")
    assert any(word in result.reason for word in refusals), result.reason
    assert not Path("/tmp/kernel-sandbox-was-here").exists()
    assert not (HERE / "was-here").exists()


def test_own_folder_and_threads_are_allowed(box: Sandbox) -> None:
    code = answer("""
        import threading
        open('notes', 'w').write('fine')
        assert open('notes').read() == 'fine'
        result = []
        worker = threading.Thread(target=lambda: result.append(torch.softmax(x, -1)))
        worker.start()
        worker.join()
        return result[0]
    """)
    assert judged(box, code).status is Status.CORRECT


def test_environment_holds_no_secret(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = answer("raise RuntimeError(' '.join(sorted(os.environ)))")
    with Sandbox("cpp", static=False, limits=LIMITS, fixed_speedup=1.0) as fresh:
        reason = judged(fresh, code).reason
    assert "OMP_NUM_THREADS" in reason and "HF_TOKEN" not in reason


