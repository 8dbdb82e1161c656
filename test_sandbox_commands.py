"""The command line of the sandbox: exit statuses, one-line errors, resuming."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernel_sandbox
import sandbox_commands
from test_sandbox_worker import HERE, KERNEL, RIGHT, SOFTMAX


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "softmax.py").write_text(SOFTMAX)
    (tmp_path / "kernels").mkdir()
    head = "# task: softmax\n# target: cpp\n"
    (tmp_path / "kernels/good.py").write_text("# label: honest\n" + head + KERNEL)
    (tmp_path / "kernels/bad.py").write_text("# label: attack\n" + head + RIGHT)
    return tmp_path


def test_check(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = str(files / "kernels/good.py")
    code = sandbox_commands.main(
        ["check", str(files / "softmax.py"), kernel, "--target", "cpp", "--json"]
    )
    result = json.loads(capsys.readouterr().out)
    assert code == 0 and result["status"] == "CORRECT"
    assert set(result) >= {
        "status", "reason", "evidence", "score", "speedup", "runtime_ms", "reference_ms",
        "build_s", "total_s", "rung", "cached", "target",
    }  # fmt: skip
    (files / "broken.py").write_text(SOFTMAX.replace("torch.softmax(x, dim=-1)", "x.nosuch()"))
    arguments = ["check", str(files / "broken.py"), kernel, "--target", "cpp", "--explain"]
    code, text = sandbox_commands.main(arguments), capsys.readouterr().out
    assert code == 3 and "HARNESS_ERROR" in text
    assert "  meaning: Something of ours failed" in text and f"check {files}/broken.py" in text
    for arguments in (
        ["check", str(files / "none.py"), kernel],
        ["check", str(files / "softmax.py"), "none.py"],
        ["batch", "none.jsonl", "--out", str(files / "out")],
        ["confusion", str(files / "none")],
    ):
        assert sandbox_commands.main([*arguments, "--target", "cpp"]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: ")


def test_no_compiler_is_one_line(files: Path) -> None:
    script = HERE / "kernel_sandbox.py"
    task, kernel = files / "softmax.py", files / "kernels/good.py"
    command = [sys.executable, str(script), "check", str(task), str(kernel), "--target", "cpp"]
    environment = {**os.environ, "PATH": str(files), "CXX": "none"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no C++ compiler") and done.stderr.count("\n") == 1


def test_batch_goes_on_after_a_kill(files: Path) -> None:
    task = str(files / "softmax.py")
    kernels = []
    for number in range(6):
        path = files / f"kernel{number}.py"
        path.write_text(RIGHT + f"# {number}\n")
        kernels.append(str(path))
    pairs = files / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"task": task, "kernel": k}) + "\n" for k in kernels))
    out = files / "out.jsonl"
    first = {"task": task, "kernel": kernels[2], "status": "HACK", "mark": "kept"}
    out.write_text(json.dumps(first) + "\n" + '{"task": "torn by a ki')
    for _ in range(2):  # the second time there is nothing to do
        assert sandbox_commands.main(
            ["batch", str(pairs), "--out", str(out), "--target", "cpp"]
        ) == 0  # fmt: skip
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert lines[0] == first
        assert sorted(line["kernel"] for line in lines) == kernels
        assert all(line["status"] == "HACK" for line in lines)


def test_confusion(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["confusion", str(files / "kernels"), "--tasks", str(files), "--target", "cpp"]
    assert sandbox_commands.main(arguments) == 0
    assert "attack             0         1" in capsys.readouterr().out
    swapped = (files / "kernels/bad.py").read_text().replace("attack", "honest")
    (files / "kernels/bad.py").write_text(swapped)
    assert sandbox_commands.main(arguments) == 1
    assert "honest, refused" in capsys.readouterr().out


def test_audit(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flawed = SOFTMAX.replace("torch.softmax(x, dim=-1)", "torch.relu(x).sum(dim=-1) * 0")
    (files / "flawed.py").write_text(flawed)
    sound, bad = str(files / "softmax.py"), str(files / "flawed.py")
    assert sandbox_commands.main(["audit", sound, "--target", "cpp"]) == 0
    capsys.readouterr()
    assert sandbox_commands.main(["audit", bad, "--target", "cpp", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert "accepted: zeros" in findings and "accepted: input 0 of other inputs" in findings


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert sandbox_commands.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["targets"]["cpp"] is True
    assert {line["name"] for line in report["lines"]} >= {"torch", "confinement", "GPU"}


def test_import_is_light() -> None:
    code = "import sys, kernel_sandbox; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE, check=False).returncode == 0
    assert kernel_sandbox.CHECK_SETS >= 3



def test_doctor_names_what_a_target_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    code = sandbox_commands.main(["doctor", "--target", "cuda"])
    text = capsys.readouterr().out
    works = sandbox_commands.usable(sandbox_commands.symptoms())["cuda"]
    assert code == (0 if works else 2)
    assert ("target cuda does not work here" in text) == (not works)
