"""Benchmark numbers of a policy, with error bars: the paper's evaluation (arXiv:2507.11948).

Protocol (Sec. 5.1): P tasks x G parallel trajectories x K turns of refinement. A trajectory is
worth what its best kernel so far is worth, so each metric of a trajectory after k turns is a
running maximum over its turns, and 0 where nothing was correct:

    correct   1 if any kernel of turns <= k is correct
    speedup   reference time / run time of the fastest correct kernel (the paper's "performance")
    fast_p    1 if some correct kernel has speedup >= p; fast_1 counts "as fast as eager" too
    score     0.3 + speedup of the best correct kernel: Sec. 3.2's training score, best turn

over m of the n = G trajectories of a task: avg@m = mean, best@m = expected maximum of m
trajectories drawn without replacement; then the mean over tasks, where unsolved tasks count 0.

Cells that say HARNESS_ERROR are our fault, not the model's: they are left out, never scored 0. A
trajectory keeps its other turns; one without a judged turn yet is left out of the means; both are
counted.

Intervals are 95 % bootstrap intervals, two-level: tasks are drawn with replacement, and within each
drawn task its trajectories. A before/after difference draws the same tasks on both sides, because a
hard task is hard for both. The paper gives single numbers; two models whose intervals overlap may
well be equal.

Dimension suffixes: _P tasks, _G trajectories of a task, _K turns, _B bootstrap draws.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import kernel_sandbox
import rollout
from kernel_sandbox import Status, Task, UserError
from run_folder import append_lines, write_whole

CORRECT_WEIGHT = 0.3  # Sec. 3.2; kernel_sandbox.score has the same default (a test compares them)
DRAWS = 2000  # bootstrap resamples behind each interval
CONFIDENCE = 0.95  # of every interval shown
CHUNK_CELLS = 4_000_000  # bootstrap values held in memory at a time (32 MB)
SAMPLES_AT_ONCE = 64  # trajectories that run side by side; what a kill loses is this many at most
EVALUATION_STEP = 1_000_000  # "step" of the seeds: never a training step's

Array = np.ndarray


# ------------------------------------------------------------------------------------------------
# What was measured
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """The verdicts of one policy on a set of tasks: all that the metrics need."""

    tasks: tuple[str, ...]  # names, P of them
    correct: Array  # bool [P, G, K]
    speedup: Array  # float [P, G, K], reference time / run time; 0 where not correct
    harness: Array  # bool [P, G, K], the harness failed there: says nothing of the model
    meta: Mapping[str, Any] = field(default_factory=dict)  # model, split, target, settings ...
    status: Array | None = None  # str [P, G, K], Status names; None where only the arrays are known

    def __post_init__(self) -> None:
        shapes = {np.shape(self.correct), np.shape(self.speedup), np.shape(self.harness)}
        if len(shapes) != 1 or len(self.correct.shape) != 3 or len(self.tasks) != len(self.correct):
            raise ValueError(f"arrays must be [tasks, trajectories, turns] alike, got {shapes}")
        if not np.all(np.isfinite(self.speedup)) or np.any(self.speedup < 0):
            raise ValueError("speedups must be finite and not negative")

    @property
    def trajectories(self) -> int:
        return self.correct.shape[1]

    @property
    def turns(self) -> int:
        return self.correct.shape[2]


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % bootstrap interval; nan where nothing was judged."""

    value: float  # the estimate from all data
    low: float  # lower end
    high: float  # upper end

    def __str__(self) -> str:
        return f"{digits(self.value)} [{digits(self.low)}, {digits(self.high)}]"

    def signed(self) -> str:
        return f"{digits(self.value, '+')} [{digits(self.low, '+')}, {digits(self.high, '+')}]"


def digits(value: float, sign: str = "") -> str:
    """Four characters or so for any size, so that columns stay narrow: 0.31, 12.3, 123."""
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:{sign}.{decimals}f}"


# ------------------------------------------------------------------------------------------------
# Metrics: pure functions
# ------------------------------------------------------------------------------------------------


def score_values(correct: Array, speedup: Array) -> Array:
    """Sec. 3.2: s = 0.3 * [correct] + speedup * [correct], elementwise."""
    return np.where(correct, CORRECT_WEIGHT + speedup, 0.0)


def correct_values(correct: Array, speedup: Array) -> Array:
    """1 where the kernel is correct, else 0."""
    return np.asarray(correct, dtype=float)


def speedup_values(correct: Array, speedup: Array) -> Array:
    """Speedup of a correct kernel, 0 of any other."""
    return np.where(correct, speedup, 0.0)


def fast_values(p: float) -> Callable[[Array, Array], Array]:
    """fast_p of one kernel (KernelBench, Sec. 3.3): 1 where correct and speedup >= p."""
    return lambda correct, speedup: (correct & (np.asarray(speedup) >= p)).astype(float)


METRICS: dict[str, Callable[[Array, Array], Array]] = {
    "correct": correct_values,
    "speedup": speedup_values,
    "fast_1": fast_values(1.0),
    "fast_1.5": fast_values(1.5),
    "score": score_values,
}


def is_share(metric: str) -> bool:
    """Metrics between 0 and 1; speedup and score have no upper end."""
    return metric not in ("speedup", "score")


def best_so_far(values_PGK: Array, harness_PGK: Array) -> Array:
    """Sec. 5.1: value of a trajectory after k turns = max over its judged turns <= k.

    Returns float [P, G, K]; nan where no turn up to k was judged (harness errors only).
    """
    judged = np.where(harness_PGK, -np.inf, values_PGK)
    best = np.maximum.accumulate(judged, axis=-1)
    return np.where(np.isneginf(best), np.nan, best)


@lru_cache(maxsize=256)
def best_at_m_weights(trajectories: int, m: int) -> Array:
    """Weights [n, i] of the i-th smallest (from 0) of n values in the expected max of m of them.

    Of the C(n, m) subsets, C(i, m-1) have it as their maximum. Where fewer than m values are there,
    all n are taken (max), as nothing better can be said. Row 0 is zero.
    """
    weights = np.zeros((trajectories + 1, trajectories))
    for n in range(1, trajectories + 1):
        size = min(m, n)
        weights[n, :n] = [math.comb(i, size - 1) / math.comb(n, size) for i in range(n)]
    return weights


def best_at_m(values_G: Array, m: int) -> Array:
    """best@m: E[max of m of the n trajectories without replacement], over the last axis.

    sum_i x_(i) * C(i-1, m-1) / C(n, m) for sorted x_(1) <= ... <= x_(n): the unbiased estimator of
    Chen et al. 2021 (pass@k = 1 - C(n-c, k)/C(n, k)) for real values. nan = dropped trajectory.
    """
    if not 1 <= m <= values_G.shape[-1]:
        raise ValueError(f"best@{m} needs between 1 and {values_G.shape[-1]} trajectories")
    ordered = np.sort(values_G, axis=-1)  # nan goes last
    n = np.sum(~np.isnan(ordered), axis=-1)
    weights = best_at_m_weights(values_G.shape[-1], m)[n]
    return np.where(n > 0, np.sum(np.nan_to_num(ordered) * weights, axis=-1), np.nan)


def avg_at_m(values_G: Array) -> Array:
    """avg@m: mean over trajectories (the last axis); its expectation is the same for every m."""
    n = np.sum(~np.isnan(values_G), axis=-1)
    return np.where(n > 0, np.nansum(values_G, axis=-1) / np.maximum(n, 1), np.nan)


def mean_over_tasks(values_P: Array) -> Array:
    """Mean over tasks (the last axis); tasks without any judged trajectory are left out."""
    return avg_at_m(values_P)  # the same mean that leaves out nan, over another axis


# ------------------------------------------------------------------------------------------------
# Bootstrap
# ------------------------------------------------------------------------------------------------


def bootstrap(
    values_PG: Array,
    estimate: Callable[[Array], Array],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    side: int = 0,
) -> Array:
    """Two-level bootstrap of the mean over tasks of estimate(trajectories): [B] resampled values.

    Each draw takes P tasks with replacement and, of each, G trajectories with replacement. The task
    draws depend on (seed, P) alone: two sides with one seed resample the same tasks, so that the
    difference of their draws is a paired one; `side` keeps their trajectory draws independent.
    """
    tasks, trajectories = values_PG.shape
    task_draws_BP = np.random.default_rng([seed, 0]).integers(tasks, size=(draws, tasks))
    rng = np.random.default_rng([seed, 1 + side])
    step = max(1, CHUNK_CELLS // (tasks * trajectories))
    parts = []
    for start in range(0, draws, step):
        chosen_BP1 = task_draws_BP[start : start + step, :, None]
        inner = rng.integers(trajectories, size=(*chosen_BP1.shape[:2], trajectories))
        parts.append(mean_over_tasks(estimate(values_PG[chosen_BP1, inner])))
    return np.concatenate(parts)


def interval_of(
    value: float, draws_B: Array, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> Interval:
    """Percentiles of the draws, shifted so that their mean lies on the estimate, cut to `bounds`.

    The shift matters for best@m: a resample of trajectories repeats some and so misses the best one
    too often (best@16 of 16: the plain percentile interval held the truth in 38 % of simulated
    100-task benchmarks, the shifted one in 94 %). For means it changes nothing.
    """
    draws_B = draws_B[~np.isnan(draws_B)]
    if math.isnan(value) or not len(draws_B):
        return Interval(math.nan, math.nan, math.nan)
    tail = 100 * (1 - CONFIDENCE) / 2
    ends = np.percentile(draws_B, [tail, 100 - tail]) + (value - np.mean(draws_B))
    low, high = np.clip(ends, *bounds)
    return Interval(float(value), float(low), float(high))


def estimate_interval(
    values_PG: Array, m: int | None, *, share: bool = False, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """avg@m (m None) or best@m over trajectories, mean over tasks, with its interval."""
    estimate = estimator(m)
    value = float(mean_over_tasks(estimate(values_PG)))
    bounds = (0.0, 1.0 if share else math.inf)
    return interval_of(value, bootstrap(values_PG, estimate, draws=draws, seed=seed), bounds)


def estimator(m: int | None) -> Callable[[Array], Array]:
    """avg@m for None, else best@m: [..., G] -> [...]."""
    return avg_at_m if m is None else lambda values_G: best_at_m(values_G, m)


# ------------------------------------------------------------------------------------------------
# Summaries of an evaluation
# ------------------------------------------------------------------------------------------------


def trajectory_values(evaluation: Evaluation, metric: str) -> Array:
    """Metric of each trajectory after k turns, float [P, G, K] (nan = nothing judged yet)."""
    values = METRICS[metric](evaluation.correct, evaluation.speedup)
    return best_so_far(values, evaluation.harness)


def metrics_by_turn(evaluation: Evaluation, **options: Any) -> dict[str, dict[str, list[Interval]]]:
    """{metric: {"avg": [...], "best": [...]}}, one interval after each number of turns 1..K."""
    out: dict[str, dict[str, list[Interval]]] = {}
    for metric in METRICS:
        values = trajectory_values(evaluation, metric)
        share = is_share(metric)
        out[metric] = {
            kind: [
                estimate_interval(values[:, :, k], m, share=share, **options)
                for k in range(evaluation.turns)
            ]
            for kind, m in (("avg", None), ("best", evaluation.trajectories))
        }
    return out


def best_by_m(evaluation: Evaluation, metric: str, **options: Any) -> list[Interval]:
    """best@m after all turns for m = 1..G (the curve over parallel trajectories, Fig. 6)."""
    values = trajectory_values(evaluation, metric)[:, :, -1]
    share = is_share(metric)
    every_m = range(1, evaluation.trajectories + 1)
    return [estimate_interval(values, m, share=share, **options) for m in every_m]


def fast_p_curve(
    evaluation: Evaluation, thresholds: Sequence[float], m: int | None, **options: Any
) -> list[Interval]:
    """fast_p after all turns at each threshold p (avg@m for m None, else best@m)."""
    out = []
    for p in thresholds:
        values = fast_values(p)(evaluation.correct, evaluation.speedup)
        best = best_so_far(values, evaluation.harness)[:, :, -1]
        out.append(estimate_interval(best, m, share=True, **options))
    return out


def scores_at_turn(evaluation: Evaluation) -> list[float]:
    """Mean score of the kernel written at turn k itself (not best so far), over judged cells."""
    scores = np.where(
        evaluation.harness, np.nan, score_values(evaluation.correct, evaluation.speedup)
    )
    return [float(mean_over_tasks(avg_at_m(scores[:, :, k]))) for k in range(evaluation.turns)]


def status_shares(evaluation: Evaluation) -> dict[str, list[float]]:
    """Share of each verdict at turn k among all cells of that turn, harness errors among them."""
    if evaluation.status is None:
        return {}
    names = sorted(set(evaluation.status.ravel().tolist()))
    return {name: np.mean(evaluation.status == name, axis=(0, 1)).tolist() for name in names}


def counts(evaluation: Evaluation) -> dict[str, int]:
    """How much was measured, and what was left out of the means."""
    unjudged = evaluation.harness.all(axis=2)
    return {
        "tasks": len(evaluation.tasks),
        "trajectories": evaluation.trajectories,
        "turns": evaluation.turns,
        "kernels": int(evaluation.correct.size),
        "harness_errors": int(evaluation.harness.sum()),
        "dropped_trajectories": int(unjudged.sum()),
        "dropped_tasks": int(np.all(unjudged, axis=1).sum()),
    }


@dataclass(frozen=True)
class Comparison:
    """Two models on the same tasks: mean score of the best of K turns (avg@m), and its change."""

    before: Interval  # mean score of the best turn
    after: Interval  # the same of the second model
    ratio: float  # after / before; inf where before is 0, nan where both are
    difference: Interval  # after - before, paired over tasks
    turns: int  # K, turns compared
    label: str  # the split, e.g. "held-out"

    @property
    def improved(self) -> bool:
        """The difference is above zero by more than its interval."""
        return self.difference.low > 0

    def __str__(self) -> str:
        return (
            f"{self.label} best-of-{self.turns}-turns score: {self.before.value:.2f} -> "
            f"{self.after.value:.2f} (x{self.ratio:.2f}, difference {self.difference.value:+.2f}, "
            f"95 % interval {self.difference.low:+.2f} .. {self.difference.high:+.2f})"
        )


def difference_interval(
    before_PG: Array, after_PG: Array, m: int | None, *, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Paired difference after - before: both sides are resampled over the same tasks.

    A task without a judged trajectory on either side is left out on both.
    """
    both = ~(np.isnan(before_PG).all(axis=1) | np.isnan(after_PG).all(axis=1))
    if not both.any():
        return Interval(math.nan, math.nan, math.nan)
    before_PG, after_PG = before_PG[both], after_PG[both]
    estimate = estimator(m)
    value = float(mean_over_tasks(estimate(after_PG)) - mean_over_tasks(estimate(before_PG)))
    draws_B = bootstrap(after_PG, estimate, draws=draws, seed=seed, side=1)
    draws_B = draws_B - bootstrap(before_PG, estimate, draws=draws, seed=seed)
    return interval_of(value, draws_B)


def aligned(before: Evaluation, after: Evaluation) -> tuple[list[int], list[int], int]:
    """Indices of the common tasks on each side, and the number of turns both have."""
    common = [name for name in before.tasks if name in after.tasks]
    if not common:
        raise UserError("the two evaluations have no task in common: give both the same --tasks")
    left = [before.tasks.index(name) for name in common]
    right = [after.tasks.index(name) for name in common]
    return left, right, min(before.turns, after.turns)


def compare(before: Evaluation, after: Evaluation, **options: Any) -> Comparison:
    """Mean score of the best turn before and after, over the tasks and turns both have."""
    left, right, turns = aligned(before, after)
    before_PG = trajectory_values(before, "score")[left, :, turns - 1]
    after_PG = trajectory_values(after, "score")[right, :, turns - 1]
    first = estimate_interval(before_PG, None, **options)
    second = estimate_interval(after_PG, None, **options)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(np.divide(second.value, first.value))
    difference = difference_interval(before_PG, after_PG, None, **options)
    return Comparison(first, second, ratio, difference, turns, split_label(after))


def split_label(evaluation: Evaluation) -> str:
    split = str(evaluation.meta.get("split", "all-task"))
    return {"heldout": "held-out", "train": "training", "all": "all-task"}.get(split, split)


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
                        append_lines(path, rows[task.name])
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
        write_whole(settings_path, json.dumps(settings, indent=1) + "\n")
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
    write_whole(path, "".join(json.dumps(row) + "\n" for mine in rows.values() for row in mine))
    return rows
