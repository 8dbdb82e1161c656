"""What a training run leaves on disk, so that a kill at any moment loses at most the steps since
the last checkpoint and never leaves half a file where a whole one was.

    config.json         resolved settings, git commit, library versions; written once
    metrics.jsonl       one line a step
    rollouts.jsonl      one line a turn
    checkpoints/        step_00005/ (Hugging Face folder + optimizer.pt + state.json), `latest`

Order of a save: everything into `step_N.part`, each file fsynced, the folder renamed, then `latest`
replaced. A reader follows `latest` only. On resume both logs are cut back to the checkpoint's step,
also when a kill left half a line at the end.

First part: what a line of the two logs says. Second part: how they and the checkpoints get on disk.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_sandbox import Status, UserError
from rollout import Episode

VERSIONS = ("torch", "transformers", "accelerate", "tokenizers", "numpy", "vllm")


# ------------------------------------------------------------------------------------------------
# Lines
# ------------------------------------------------------------------------------------------------


def is_okay(response: str) -> bool:
    """Sec. 6.1 (definition in the blog): the thought opens with exactly "Okay,"."""
    return response.removeprefix("<think>").lstrip().startswith("Okay,")


def number_or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def rollout_records(
    step: int,
    episodes: Sequence[Episode],
    scores_PGK: Tensor,
    returns_PGK: Tensor,
    advantages_PGK: Tensor,
) -> list[dict[str, Any]]:
    """The lines of rollouts.jsonl: each turn's text, ids, verdict, score, return and advantage."""
    cells = zip(
        scores_PGK.flatten().tolist(),
        returns_PGK.flatten().tolist(),
        advantages_PGK.flatten().tolist(),
        strict=True,
    )
    records = []
    for episode in episodes:
        for number, turn in enumerate(episode.turns):
            score_, return_, advantage = map(number_or_none, next(cells))
            records.append(
                {
                    "step": step,
                    "task": episode.task.name,
                    "trajectory": episode.trajectory,
                    "turn": number,
                    "prompt": turn.prompt,
                    "response": turn.response,
                    "summary": turn.summary,
                    "feedback": turn.feedback,
                    "truncated": turn.truncated,
                    "verdict": turn.result.to_json(),
                    "score": score_,
                    "return": return_,
                    "advantage": advantage,
                    "prompt_ids": list(turn.prompt_ids),
                    "token_ids": list(turn.token_ids),
                    "logprobs": list(turn.logprobs),
                }
            )
    return records


# What each key of metrics.jsonl means. Means and shares are over all samples (turns) of the step
# unless said otherwise; a sample whose harness failed is in none of them.
METRIC_KEYS = {
    "step": "counted from 1",
    "score": "mean score of a turn",
    "score_best": "mean over trajectories of the score of the best turn",
    "score_by_turn": "mean score of turn 1, 2, ...",
    "correct": "share of kernels that were correct",
    "compiled": "share of kernels that compiled",
    "speedup": "mean speedup over the reference, wrong kernels counting 0",
    "not_okay": 'share of responses that do not open with exactly "Okay,"',
    "truncated": "share of responses cut at the length limit",
    "advantage_abs": "mean |advantage| of the samples in the loss",
    "samples": "samples in the loss",
    "tokens": "response tokens generated",
    "prompt_tokens": "prompt tokens, summed over turns",
    "loss": "mean over the step's gradient steps",
    "grad_norm": "before clipping, mean over the step's gradient steps",
    "ratio": "mean importance ratio over the tokens of the last gradient step",
    "clipped": "share of tokens stopped by the clip in the last gradient step",
    "entropy": "nats a token, of the sampling distribution, before the update",
    "engine_gap": "mean |trainer log-prob - engine log-prob| of the sampled tokens, nats",
    "learning_rate": "of the last gradient step",
    "updates": "gradient steps taken since the start of the run",
    "skipped_updates": "gradient steps of this step left out because they were not finite",
    "harness_errors": "samples the harness failed to judge",
    "statuses": "number of verdicts of each kind",
    "seconds": "wall time of the step",
    "seconds_generate": "of which generating",
    "seconds_sandbox": "of which waiting for the sandbox after generation",
    "seconds_train": "of which log-probs, gradient steps and weight sync",
}


def mean(values: Sequence[float]) -> float:
    """Mean, 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def rollout_metrics(episodes: Sequence[Episode], scores_PGK: Tensor) -> dict[str, Any]:
    """The keys of METRIC_KEYS that a rollout settles."""
    every = [turn for episode in episodes for turn in episode.turns]
    judged = [turn for turn in every if turn.result.status != Status.HARNESS_ERROR]
    by_turn = scores_PGK.nanmean(dim=(0, 1)).nan_to_num(0.0).tolist()
    best = scores_PGK.nan_to_num(-math.inf).amax(dim=2).flatten().tolist()
    statuses: dict[str, int] = {status.value: 0 for status in Status}
    for turn in every:
        statuses[turn.result.status.value] += 1
    return {
        "score": mean([s for s in scores_PGK.flatten().tolist() if not math.isnan(s)]),
        "score_best": mean([s for s in best if math.isfinite(s)]),
        "score_by_turn": by_turn,
        "correct": mean([float(turn.result.correct) for turn in judged]),
        "compiled": mean([float(turn.result.compiled) for turn in judged]),
        "speedup": mean([t.result.speedup if t.result.correct else 0.0 for t in judged]),
        "not_okay": mean([float(not is_okay(turn.response)) for turn in judged]),
        "truncated": mean([float(turn.truncated) for turn in judged]),
        "tokens": sum(len(turn.token_ids) for turn in every),
        "prompt_tokens": sum(len(turn.prompt_ids) for turn in every),
        "harness_errors": statuses[Status.HARNESS_ERROR.value],
        "statuses": {name: count for name, count in statuses.items() if count},
    }


def step_line(row: Mapping[str, Any], steps: int) -> str:
    """One readable line a step."""
    parts = [
        f"step {row['step']}/{steps}",
        f"score {row['score']:.3f} (best turn {row['score_best']:.3f})",
        f"correct {row['correct']:.0%}",
        f"compiled {row['compiled']:.0%}",
        f"speedup {row['speedup']:.2f}",
        f"not okay {row['not_okay']:.0%}",
        f"cut {row['truncated']:.0%}",
        f"grad {row['grad_norm']:.3g}",
        f"entropy {row['entropy']:.3f}",
        f"gap {row['engine_gap']:.1e}",
        f"{row['tokens']} tokens",
        f"{row['seconds']:.1f} s (generate {row['seconds_generate']:.1f}, sandbox"
        f" {row['seconds_sandbox']:.1f}, train {row['seconds_train']:.1f})",
    ]
    if row["harness_errors"]:
        parts.append(f"HARNESS ERRORS {row['harness_errors']}")
    if row["skipped_updates"]:
        parts.append(f"SKIPPED UPDATES {row['skipped_updates']}")
    return " | ".join(parts)


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------


def provenance() -> dict[str, Any]:
    """Git commit (with "+" where files differ from it; "" outside a checkout) and versions."""
    versions = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "git_commit": git_commit(),
        "versions": versions,
        "torch_threads": torch.get_num_threads(),
    }


def git_commit() -> str:
    """Commit of the checkout this file stands in, or "" where there is none."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def write_whole(path: Path, text: str) -> None:
    """The file holds its old text or the new one, never half of it; on disk when this returns."""
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames within `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends JSON lines with one write; on disk when this returns. NaN is not JSON: raises."""
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    with open(path, "a", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def cut_log(path: Path, last_step: int) -> None:
    """Drops lines of steps after `last_step` and a line that a kill cut off."""
    if not path.exists():
        return
    part = path.with_name(path.name + ".part")
    with open(path, encoding="ascii") as old, open(part, "w", encoding="ascii") as new:
        for line in old:
            try:
                step = json.loads(line)["step"]
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
            if step <= last_step and line.endswith("\n"):
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(part, path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole JSON lines of a log."""
    with open(path, encoding="ascii") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def save_checkpoint(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
    save_model: Callable[[Path], None],
    keep: int,
) -> Path:
    """Writes checkpoints/step_N, points `latest` at it, then removes all but the last `keep`.

    `save_model(folder)` writes the Hugging Face part. A full disk raises OSError and leaves the
    earlier checkpoint, and `latest`, as they were.
    """
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    final = checkpoints / f"step_{step:05d}"
    part = final.with_name(final.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        save_model(part)
        torch.save(dict(optimizer_state), part / "optimizer.pt")
        (part / "state.json").write_text(json.dumps(dict(state), indent=1) + "\n")
        for file in part.rglob("*"):
            if file.is_file():
                with open(file, "rb+") as handle:
                    os.fsync(handle.fileno())
        sync_folder(part)
    except (OSError, RuntimeError, ValueError, _safetensor_error()) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise _disk_error(error, final) from error
    if final.exists():  # of an earlier life of this run, after a kill between rename and `latest`
        shutil.rmtree(final)
    os.replace(part, final)
    sync_folder(checkpoints)
    write_whole(checkpoints / "latest", final.name + "\n")
    stale = sorted(checkpoints.glob("step_?????"))[:-keep] + list(checkpoints.glob("step_*.part"))
    for old in stale:
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    return final


def _safetensor_error() -> type[Exception]:
    from safetensors import SafetensorError

    return SafetensorError


def _disk_error(error: Exception, path: Path) -> OSError:
    """OSError again, for what torch and safetensors make of a full disk."""
    if isinstance(error, OSError):
        return error
    lines = str(error).splitlines() or [type(error).__name__]
    full = shutil.disk_usage(path.parent).free < 1 << 20
    return OSError(errno.ENOSPC if full else errno.EIO, lines[0], str(path))


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The folder that `latest` names, or None before the first save."""
    pointer = run_dir / "checkpoints" / "latest"
    if not pointer.exists():
        return None
    folder = pointer.parent / pointer.read_text().strip()
    if not (folder / "state.json").exists():
        raise UserError(f"{pointer} names {folder.name}, which is missing or not whole")
    return folder


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint."""
    return json.loads((checkpoint / "state.json").read_text())
