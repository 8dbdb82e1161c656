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

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from kernel_sandbox import UserError

CORRECT_WEIGHT = 0.3  # Sec. 3.2; kernel_sandbox.score has the same default (a test compares them)
DRAWS = 2000  # bootstrap resamples behind each interval
CONFIDENCE = 0.95  # of every interval shown
CHUNK_CELLS = 4_000_000  # bootstrap values held in memory at a time (32 MB)

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
