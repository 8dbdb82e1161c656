"""Benchmark of a policy: runs it, prints tables, writes numbers, figures and a page.

    python evaluate.py --model RUN_OR_PATH_OR_HF_ID [--config FILE] [--baseline OTHER] [--out DIR]

`--model` is a run folder of train.py (its newest checkpoint, its settings), a model folder, a
Hugging Face id, or "warmstart". Settings come from the command line, else --config, else the run's
config.json, else the paper's (train_config.Config). The folder DIR then holds

    table.txt       what was printed
    results.json    every metric with its interval, counts, settings, versions (evaluate.results)
    turns.jsonl     each turn: prompt, response, code, verdict; written task by task
    figures/        PNG and SVG
    report.html     all of it on one page (report.py)
    baseline/       turns.jsonl of the model compared with

The same command again continues where an interrupted one stopped. metrics.py says what each number
means.
"""

from __future__ import annotations

import os

# Before torch starts its threads: idle ones sleep. Threads that spin wait for the compilers that
# share the cores, and a step takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

import kernel_sandbox
import rollout
import run_folder
import train_config
from kernel_sandbox import Status, Task, UserError
from metrics import (
    METRICS,
    Evaluation,
    Interval,
    aligned,
    avg_at_m,
    best_at_m,
    best_by_m,
    compare,
    counts,
    difference_interval,
    estimate_interval,
    fast_p_curve,
    is_share,
    metrics_by_turn,
    scores_at_turn,
    split_label,
    status_shares,
    trajectory_values,
)

SAMPLES_AT_ONCE = 64  # trajectories that run side by side; what a kill loses is this many at most
EVALUATION_STEP = 1_000_000  # "step" of the seeds: never a training step's


# ------------------------------------------------------------------------------------------------
# Running a policy
# ------------------------------------------------------------------------------------------------


def evaluate_policy(
    policy: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    sandbox: kernel_sandbox.Sandbox,
    *,
    trajectories: int,
    turns: int,
    seed: int,
    temperature: float,
    max_new_tokens: int,
    prompt_budget: int,
    progress: bool = True,
    folder: str | Path | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Roll out `trajectories` x `turns` on each task and judge every kernel.

    A few tasks run at a time (SAMPLES_AT_ONCE trajectories). With `folder`, each task's turns are
    appended to folder/turns.jsonl as it ends; a later call with the same settings reads finished
    tasks back and runs the others only. Raises UserError where the folder holds other settings.
    """
    if not tasks:
        raise UserError("no tasks to evaluate: check --tasks and --split")
    meta = dict(meta or {})
    settings = {
        "model": str(meta.get("model", "policy")),
        "trajectories": trajectories,
        "turns": turns,
        "seed": seed,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "prompt_budget": prompt_budget,
        "tasks": {task.name: hashlib.sha256(task.source.encode()).hexdigest() for task in tasks},
    }
    path = None if folder is None else Path(folder) / "turns.jsonl"
    rows = {} if path is None else resume(path, settings)
    size = max(1, SAMPLES_AT_ONCE // trajectories)
    with tqdm(total=len(tasks), desc="evaluate", unit="task", disable=not progress) as bar:
        for start in range(0, len(tasks), size):
            chunk = tasks[start : start + size]
            missing = [task for task in chunk if task.name not in rows]
            if missing:
                episodes = rollout.rollout(
                    policy,
                    tokenizer,
                    missing,
                    sandbox,
                    trajectories=trajectories,
                    turns=turns,
                    seed=seed,
                    step=EVALUATION_STEP + start,  # engines with one seed a call: another one
                    temperature=temperature,
                    max_new_tokens=max_new_tokens,
                    prompt_budget=prompt_budget,
                )
                for task in missing:
                    mine = [episode for episode in episodes if episode.task.name == task.name]
                    rows[task.name] = [row for episode in mine for row in turn_rows(episode)]
                    if path is not None:
                        run_folder.append_lines(path, rows[task.name])
            bar.update(len(chunk))
    ordered = [row for task in tasks for row in rows[task.name]]
    return evaluation_of(ordered, {**meta, **settings, "tasks": len(tasks)})


def turn_rows(episode: rollout.Episode) -> list[dict[str, Any]]:
    """One JSON object a turn: the text on both sides and the verdict."""
    return [
        {
            "task": episode.task.name,
            "level": episode.task.level,
            "trajectory": episode.trajectory,
            "turn": number,
            "prompt": turn.prompt,
            "response": turn.response,
            "code": turn.code,
            "summary": turn.summary,
            "feedback": turn.feedback,
            "truncated": turn.truncated,
            "tokens": len(turn.token_ids),
            "result": turn.result.to_json(),
        }
        for number, turn in enumerate(episode.turns)
    ]


def evaluation_of(rows: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> Evaluation:
    """Arrays from turn rows; every task must have the same full grid of trajectories and turns."""
    names = tuple(dict.fromkeys(row["task"] for row in rows))
    place = {name: i for i, name in enumerate(names)}
    shape = (
        len(names),
        1 + max(row["trajectory"] for row in rows),
        1 + max(row["turn"] for row in rows),
    )
    status = np.full(shape, "", dtype="U16")
    speedup = np.zeros(shape)
    for row in rows:
        cell = place[row["task"]], row["trajectory"], row["turn"]
        status[cell] = row["result"]["status"]
        speedup[cell] = row["result"]["speedup"]
    if np.any(status == ""):
        raise UserError("the recorded evaluation lacks turns: run it again to fill them in")
    correct = status == Status.CORRECT.value
    harness = status == Status.HARNESS_ERROR.value
    return Evaluation(names, correct, np.where(correct, speedup, 0.0), harness, dict(meta), status)


def resume(path: Path, settings: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows of the tasks that are complete in turns.jsonl; the file keeps only those.

    The settings of the first call lie beside it; UserError where they differ from this call's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    settings_path = path.parent / "settings.json"
    if settings_path.exists():
        earlier = json.loads(settings_path.read_text())
        changed = [key for key in settings if earlier.get(key) != settings[key]]
        if changed:
            raise UserError(
                f"{path.parent} holds an evaluation with other settings ({', '.join(changed)}):"
                " choose another --out, or delete that folder"
            )
    else:
        run_folder.write_whole(settings_path, json.dumps(settings, indent=1) + "\n")
    if not path.exists():
        return {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="ascii").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the line that a kill cut off
            continue
        rows.setdefault(row["task"], []).append(row)
    cells = settings["trajectories"] * settings["turns"]
    rows = {name: mine for name, mine in rows.items() if len(mine) == cells}
    run_folder.write_whole(
        path, "".join(json.dumps(row) + "\n" for mine in rows.values() for row in mine)
    )
    return rows


# ------------------------------------------------------------------------------------------------
# Text
# ------------------------------------------------------------------------------------------------


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns: first one flush left, the others flush right, two spaces between."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def table(evaluation: Evaluation, **options: Any) -> str:
    """avg@m and best@m after each number of turns, with 95 % intervals; at most 100 columns."""
    by_turn = metrics_by_turn(evaluation, **options)
    names = list(METRICS)
    blocks = [heading(evaluation)]
    for kind in ("avg", "best"):
        title = f"{kind}@{evaluation.trajectories} after each number of turns, best so far"
        rows = [["", *names]]
        for k in range(evaluation.turns):
            rows.append([str(k + 1), *(str(by_turn[name][kind][k]) for name in names)])
        blocks.append(title + "\n" + align(rows))
    blocks.append(turn_table(evaluation))
    return "\n\n".join(blocks)


def heading(evaluation: Evaluation) -> str:
    """Which model, on what, and how much was left out."""
    n = counts(evaluation)
    model = evaluation.meta.get("model", "policy")
    text = (
        f"{model}: {n['tasks']} {split_label(evaluation)} tasks x {n['trajectories']} trajectories"
        f" x {n['turns']} turns"
    )
    if n["harness_errors"]:
        text += (
            f"\n{n['harness_errors']} of {n['kernels']} kernels not judged (harness errors, left"
            f" out); dropped: {n['dropped_trajectories']} trajectories, {n['dropped_tasks']} tasks"
        )
    return text


def turn_table(evaluation: Evaluation) -> str:
    """What each turn by itself gave: mean score and the shares of verdicts."""
    shares = status_shares(evaluation)
    rows = [["this turn alone", *(str(k + 1) for k in range(evaluation.turns))]]
    rows.append(["mean score", *(f"{value:.2f}" for value in scores_at_turn(evaluation))])
    for name, values in shares.items():
        rows.append([name, *(f"{100 * value:.0f} %" for value in values)])
    return align(rows)


def compare_table(before: Evaluation, after: Evaluation, **options: Any) -> str:
    """Every metric of both models after all turns, the paired change, and the one-line summary."""
    left, right, turns = aligned(before, after)
    rows = [[f"after {turns} turns", "before", "after", "difference"]]
    m = min(before.trajectories, after.trajectories)
    for kind, size in (("avg", None), ("best", m)):
        for metric in METRICS:
            first = trajectory_values(before, metric)[left, :, turns - 1]
            second = trajectory_values(after, metric)[right, :, turns - 1]
            share = is_share(metric)
            rows.append(
                [
                    f"{metric} {kind}@{m}",
                    str(estimate_interval(first, size, share=share, **options)),
                    str(estimate_interval(second, size, share=share, **options)),
                    difference_interval(first, second, size, **options).signed(),
                ]
            )
    return align(rows) + "\n\n" + str(compare(before, after, **options))


# ------------------------------------------------------------------------------------------------
# results.json
# ------------------------------------------------------------------------------------------------

FAST_P = (0.0, 0.5, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)  # thresholds of the fast_p curve


def results(
    evaluation: Evaluation, before: Evaluation | None = None, **options: Any
) -> dict[str, Any]:
    """Everything results.json holds and the report shows; [value, low, high] for intervals.

    With `before`, its results lie under "baseline" and the change under "comparison".
    """
    by_turn = metrics_by_turn(evaluation, **options)
    trajectories = evaluation.trajectories
    curves = {
        kind: fast_p_curve(evaluation, FAST_P, m, **options)
        for kind, m in (("avg", None), ("best", trajectories))
    }
    out: dict[str, Any] = {
        "meta": {**evaluation.meta, "split_label": split_label(evaluation)},
        "counts": counts(evaluation),
        "by_turn": {
            metric: {kind: [triple(x) for x in row] for kind, row in kinds.items()}
            for metric, kinds in by_turn.items()
        },
        "best_by_m": {
            metric: [triple(x) for x in best_by_m(evaluation, metric, **options)]
            for metric in ("correct", "speedup", "score")
        },
        "fast_p": {"p": list(FAST_P)}
        | {kind: [triple(x) for x in curve] for kind, curve in curves.items()},
        "score_at_turn": [known(value) for value in scores_at_turn(evaluation)],
        "status_at_turn": status_shares(evaluation),
        "per_task": task_rows(evaluation),
    }
    if before is not None:
        change = compare(before, evaluation, **options)
        out["baseline"] = results(before, **options)
        out["comparison"] = {
            "text": str(change),
            "before": triple(change.before),
            "after": triple(change.after),
            "ratio": known(change.ratio),
            "difference": triple(change.difference),
            "turns": change.turns,
        }
    return out


def task_rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Per task, after all turns: avg@m of correctness, speedup and score, best@m of speedup."""
    last = {
        metric: trajectory_values(evaluation, metric)[:, :, -1]
        for metric in ("correct", "speedup", "score")
    }
    best = best_at_m(last["speedup"], evaluation.trajectories)
    return [
        {"task": name, "best": known(best[i])}
        | {metric: known(avg_at_m(values[i])) for metric, values in last.items()}
        for i, name in enumerate(evaluation.tasks)
    ]


def known(value: Any) -> float | None:
    """A JSON number: nan and inf do not exist there."""
    return float(value) if math.isfinite(value) else None


def triple(interval: Interval) -> list[float | None]:
    return [known(interval.value), known(interval.low), known(interval.high)]


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Settings of one benchmark run; what is left out is the run's, the config's or the paper's."""

    model: str  # run folder of train.py, model folder, Hugging Face id, or "warmstart"
    baseline: str | None = None  # a second model, compared with on the same tasks
    config: Path | None = None  # TOML file of train.py whose settings are used
    tasks: str | None = None  # "tasks" folder, kernelbench:DIR, kernelbench:hf or one .py file
    split: Literal["heldout", "train", "all"] = "heldout"  # which of the tasks
    target: Literal["cuda", "cpp"] | None = None  # kernels by nvcc, or by g++ with OpenMP
    trajectories: int | None = None  # per task; paper: 16 (Sec. 5.1)
    turns: int | None = None  # per trajectory; paper: 8 (Sec. 5.1)
    temperature: float | None = None  # of sampling; paper: 0.9 (Sec. 3.3)
    max_new_tokens: int | None = None  # tokens of a response
    prompt_budget: int | None = None  # tokens of a prompt
    seed: int | None = None  # of sampling and of the bootstrap
    search: Literal["none"] = "none"  # trajectories are independent of each other
    out: Path | None = None  # folder of the results; default: results/MODEL-SPLIT-GxK-sSEED


PAPER_TRAJECTORIES = 16  # Sec. 5.1; train.py's own default is no evaluation at all


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 2 for what the user can put right, 3 if the harness judged nothing."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return benchmark(parse_options(words), "python evaluate.py " + shlex.join(words))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        print(f"error: {error.strerror or error}{place}; finished tasks are kept", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command again runs the other tasks only", file=sys.stderr)
        return 130


def parse_options(words: Sequence[str]) -> Options:
    """Options from the command line; its errors as one line instead of tyro's boxes."""
    import tyro

    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard), contextlib.redirect_stdout(heard):
            return tyro.cli(Options, args=list(words), prog="evaluate.py", description=__doc__)
    except SystemExit as stop:
        if stop.code in (0, None):
            print(heard.getvalue(), end="")
            raise
        text = re.sub(r"\x1b\[[0-9;]*m|[\u2500-\u257f]|-{3,}", "", heard.getvalue())
        lines = [line.strip() for line in text.splitlines() if "full helptext" not in line]
        said = " ".join(line for line in lines[1:] if line and "--help" not in line)
        raise UserError(f"{said}; see python evaluate.py --help") from None


def settings_of(options: Options) -> train_config.Config:
    """Config of the evaluation: --config, else the run's, else the defaults; options over it."""
    given = dataclasses.asdict(options)
    fields = {field.name for field in dataclasses.fields(train_config.Config)} - {"model"}
    words = {
        name: str(value)
        for name, value in given.items()
        if name in fields - {"trajectories", "turns"} and value is not None
    }
    for name in ("trajectories", "turns"):  # in a Config these two are those of training
        if given[name] is not None:
            words[f"eval_{name}"] = str(given[name])
    path = Path(options.model) / "config.json"
    if options.config is not None or not is_run(Path(options.model)):
        config = train_config.load_config(options.config, words)
    else:
        table = json.loads(path.read_text(encoding="utf-8"))["config"]
        config = train_config.config_of(table, words, f"{path}: ")
    if options.trajectories is not None and options.trajectories < 1:
        raise UserError(f"--trajectories must be 1 or more, not {options.trajectories}")
    if not config.eval_trajectories:
        config = dataclasses.replace(config, eval_trajectories=PAPER_TRAJECTORIES)
    return config


def is_run(folder: Path) -> bool:
    """A run folder of train.py: its config.json holds the run's settings, not a model's."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return False
    return isinstance(content, dict) and isinstance(content.get("config"), dict)


def model_source(name: str, target: str) -> str | Path:
    """Where the weights are: newest checkpoint of a run, folder, Hugging Face id; UserError."""
    if name == "warmstart":
        import warmstart

        return warmstart.ensure_model(target)
    folder = Path(name)
    if is_run(folder):
        checkpoint = run_folder.latest_checkpoint(folder)
        if checkpoint is None:
            raise UserError(f"run {name} has no checkpoint yet: let it train, or name a model")
        return checkpoint
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise UserError(f"{name} is neither a run folder nor a model folder: no config.json")
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"no model {name}: give a run folder, a model folder or a Hugging Face id")
    return name


def load_policy(name: str, config: train_config.Config) -> tuple[Any, Any]:
    """A policy that generates text, and its tokenizer; UserError where there is no such model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = model_source(name, config.target)
    gpu = torch.cuda.is_available()
    # Sampling only: no fp32 copy of the weights is needed where the products are bf16 anyway.
    dtype = torch.bfloat16 if gpu and config.precision == "bf16" else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=config.attention
        )
    except (OSError, ValueError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"cannot load model {name}: {lines[0]}") from None
    if tokenizer.chat_template is None:
        raise UserError(f"the tokenizer of {name} has no chat template: take an instruct model")
    model.to("cuda" if gpu else "cpu")  # type: ignore[arg-type]
    model.eval()
    return rollout.TransformersPolicy(model, tokenizer), tokenizer


def benchmark(options: Options, command: str) -> int:
    """Evaluate the model (and the baseline), print the tables, write the folder; exit status."""
    import report  # matplotlib takes a second to import, which train.py need not wait for

    config = settings_of(options)
    for name in filter(None, (options.model, options.baseline)):
        if name != "warmstart":  # which would be made now; the others cost nothing to look for
            model_source(name, config.target)
    tasks = rollout.load_tasks(config.tasks, config.target, split=options.split)
    size = f"{config.eval_trajectories}x{config.eval_turns}"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", options.model).strip("-.")
    out = options.out or Path("results") / f"{name}-{options.split}-{size}-s{config.seed}"
    out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    sandbox = kernel_sandbox.Sandbox(
        config.target,
        rules=config.rules,
        jobs=config.sandbox_jobs or None,
        fixed_speedup=config.fixed_speedup or None,
        reuse_verdicts=config.reuse_verdicts,
    )
    with sandbox:
        before = None
        if options.baseline is not None:
            before = run_model(options.baseline, config, options, tasks, sandbox, out / "baseline")
        after = run_model(options.model, config, options, tasks, sandbox, out)
    about = {"command": command, "seconds": time.time() - started, **run_folder.provenance()}
    after = dataclasses.replace(after, meta={**after.meta, **about})
    text = table(after, seed=config.seed)
    if before is not None:
        text = f"{table(before, seed=config.seed)}\n\n{text}\n\n"
        text += compare_table(before, after, seed=config.seed)
    found = results(after, before, seed=config.seed)
    run_folder.write_whole(out / "table.txt", text + "\n")
    run_folder.write_whole(
        out / "results.json", json.dumps(found, indent=1, allow_nan=False) + "\n"
    )
    report.write(out, found, found.get("baseline"))
    print(f"\n{text}\n\n{out / 'report.html'}", flush=True)
    return 3 if after.harness.all() else 0


def run_model(
    name: str,
    config: train_config.Config,
    options: Options,
    tasks: Sequence[Task],
    sandbox: kernel_sandbox.Sandbox,
    folder: Path,
) -> Evaluation:
    """Load one model, evaluate it into `folder`, let go of it."""
    policy, tokenizer = load_policy(name, config)
    try:
        return evaluate_policy(
            policy,
            tokenizer,
            tasks,
            sandbox,
            trajectories=config.eval_trajectories,
            turns=config.eval_turns,
            seed=config.seed,
            temperature=config.temperature,
            max_new_tokens=train_config.limit_at_step(config, config.steps),
            prompt_budget=config.prompt_budget,
            folder=folder,
            meta={
                "model": name,
                "split": options.split,
                "target": config.target,
                "rules": config.rules,
                "search": options.search,
            },
        )
    finally:
        policy.close()


if __name__ == "__main__":
    sys.exit(main())
