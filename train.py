"""Multi-turn reinforcement learning of a model that writes kernels: the training run of Kevin
(arXiv:2507.11948v1; section and equation numbers below are that paper's).

One step
  1. takes P tasks, a pure function of (seed, step);
  2. rolls out G trajectories of K turns on each: prompt, response, verdict, feedback   (Sec. 4)
  3. scores every turn by its kernel's verdict: 0.3 * [correct] + speedup * [correct]   (Sec. 3.2)
  4. credits a turn with its own and the discounted later scores                        (Sec. 4.3)
  5. compares it with all G*K turns of its task: advantage = (return - mean) / std      (Sec. 3.3)
  6. takes two clipped policy-gradient steps: one turn is one sample, history is prompt (Sec. 3.3)
  7. hands the new weights to the engine, logs, saves.
Held-out tasks are evaluated before and after.

Departures from the paper are marked DEVIATION, choices where it is silent ASSUMPTION, both with
an id that the README lists. A memory setting (micro-batch, packing, chunk, number of processes)
never changes the loss. Settings: train_config.py; rows and log-probs: packing.py; files of a run:
run_folder.py.

    python train.py --config configs/smoke.toml                  two CPU cores, minutes
    python train.py --config configs/smoke.toml --target cuda    one GPU
    python train.py --config configs/mini.toml --run-dir runs/a --learning_rate 1e-6
    python train.py --resume runs/a                              after Ctrl-C, a kill, a full disk
    accelerate launch --num_processes 2 train.py --config ...    data-parallel replicas
Exit status: 0 done, 1 the run stopped itself, 2 user error (one line), 130 interrupted.

Paper map. Suffixes: P tasks of a step, G trajectories of a task, K turns, N tokens in the loss.

  symbol                      here                       shape     where      function
  s_t      score              Sample.score, scores_PGK   [P,G,K]   Sec. 3.2   kernel_sandbox.score
  gamma    discount           config.gamma               -         Sec. 4.3
  R_t      return             returns_PGK                [P,G,K]   Sec. 4.3   discounted_returns
  A        advantage          advantages_PGK             [P,G,K]   Sec. 3.3   advantages
  pi/pi_old importance ratio  ratio_N                    [N]       Sec. 3.3   policy_loss
  eps      clip range         clip_low, clip_high        -         Sec. 3.3   policy_loss
  1/|o_i|  length norm        weights                    [samples] Sec. 6.1   sample_weights
  -        grad-norm clip     config.max_grad_norm       -         Sec. 6.1   update
  -        Not-Okay ratio     metrics "not_okay"         -         Sec. 6.1   run_folder.is_okay
The KL term of GRPO has coefficient 0 in the paper (Sec. 3.3), so there is no reference model here.
"""

from __future__ import annotations

import os

# Before torch starts its threads: idle ones sleep. Threads that spin wait for the compilers that
# share the cores, and a step takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import dataclasses
import datetime
import importlib.util
import json
import math
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import rollout
import run_folder
from kernel_sandbox import Sandbox, Status, Task, UserError, score
from packing import Sample, TokenLogprobs, collate, logprobs_of, my_rows, run_row
from rollout import Episode
from train_config import Config, limit_at_step, open_run, parse_arguments

if TYPE_CHECKING:
    from accelerate import Accelerator


class RunStopped(Exception):
    """The run ended itself because going on would be wrong; one line says why. Exit status 1."""


# ------------------------------------------------------------------------------------------------
# The equations
# ------------------------------------------------------------------------------------------------


def discounted_returns(scores: Tensor, gamma: float, kind: str = "sum") -> Tensor:
    """Sec. 4.3: R_t = sum_{i>=t} gamma^(i-t) s_i, or max_{i>=t} gamma^(i-t) s_i.

    scores [..., K], turns last. An unknown score (NaN) makes its own and all earlier returns NaN.
    Example, gamma 0.4: scores 0, 1.3, 0, 2.3 -> 0.6672, 1.668, 0.92, 2.3.
    """
    returns = scores.clone()
    for t in range(scores.shape[-1] - 2, -1, -1):
        later = gamma * returns[..., t + 1]
        own = scores[..., t]
        returns[..., t] = own + later if kind == "sum" else torch.maximum(own, later)
    return returns


def advantages(returns_PGK: Tensor, kind: str = "group") -> Tensor:
    """Sec. 3.3, Sec. 4 step 4: A = (R - mean) / std over all G*K turn-samples of a task.

    "group_no_std" leaves the division out (Dr. GRPO); "trloo" is R minus the mean of the *other*
    trajectories at the same turn (Dr. Kernel, arXiv:2602.05885). NaN returns (dropped samples) stay
    NaN and enter no mean. A group without spread gives exactly 0.
    """
    known = ~torch.isnan(returns_PGK)
    axes = (1,) if kind == "trloo" else (1, 2)
    count = known.sum(axes, keepdim=True).clamp(min=1)
    zeroed = returns_PGK.nan_to_num(0.0)
    mean = zeroed.sum(axes, keepdim=True) / count
    centred = torch.where(known, returns_PGK - mean, 0.0)
    # ASSUMPTION A12: the std stays (the paper's formula has it; of Dr. GRPO it takes the length
    # part), is the population's, and has no epsilon; without spread there is nothing to learn:
    # exactly 0.
    std = (centred.square().sum(axes, keepdim=True) / count).sqrt()
    if kind == "group":
        result = centred / std
    elif kind == "trloo":
        result = centred * count / (count - 1).clamp(min=1)
    else:
        result = centred
    flat = std <= 1e-9 * (1.0 + mean.abs())
    return torch.where(known, torch.where(flat, 0.0, result), torch.nan)


def policy_loss(
    logprobs_N: Tensor, old_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Sec. 3.3: -min(r A, clip(r, 1 - low, 1 + high) A) per token, r = pi / pi_old; KL weight 0.

    All [N]; the result too. No gradient where the clip is active (r above 1 + high with A > 0, or
    below 1 - low with A < 0).
    """
    ratio_N = torch.exp(logprobs_N - old_N)
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)


def sample_weights(lengths: Sequence[int], kind: str, constant: float) -> list[float]:
    """Sec. 6.1: weight of each token of a sample, for the samples of one optimiser step.

    loss = sum_i weights[i] * sum_t loss_it, with weights 1/(B*constant) (Dr. GRPO, the paper's
    stable run), 1/(B*|o_i|) per sample (GRPO), or 1/sum|o| per token (DAPO). They depend on the
    whole optimiser batch, so how it is cut into micro-batches and over processes cannot matter.
    """
    # ASSUMPTION A21: the loss is the mean over the samples of one optimiser step (1/B).
    if kind == "constant":
        return [1.0 / (len(lengths) * constant)] * len(lengths)
    if kind == "sample":
        return [1.0 / (len(lengths) * length) for length in lengths]
    return [1.0 / sum(lengths)] * len(lengths)


def learning_rate_at(config: Config, update_index: int) -> float:
    """Learning rate of a gradient step (counted from 0): linear warm-up, then constant."""
    # ASSUMPTION A14: the multi-turn run shares the single-turn run's learning rate and warm-up
    # (only those are published), and the optimiser of OpenRLHF's defaults: AdamW, betas 0.9/0.95,
    # decay 0.
    warmup = math.ceil(config.warmup_ratio * config.steps * config.updates_per_step)
    return config.learning_rate * min(1.0, (update_index + 1) / max(1, warmup))


def tasks_of_step(count: int, per_step: int, seed: int, step: int) -> list[int]:
    """Indices of a step's tasks: each epoch is a fresh permutation, no task twice in a step."""
    # ASSUMPTION A19: the paper gives no order. What is left of an epoch below a full batch is
    # dropped.
    per_epoch = count // per_step
    epoch, place = divmod(step - 1, per_epoch)
    order = list(range(count))
    random.Random(f"tasks/{seed}/{epoch}").shuffle(order)
    return order[place * per_step : (place + 1) * per_step]


def split_updates(count: int, config: Config, step: int) -> list[list[int]]:
    """Sample indices of each gradient step of a batch."""
    # ASSUMPTION A10: "2 gradient steps per batch, 1 on-policy and 1 off-policy" (Sec. 3.3) fits two
    # readings. Default "halves": each sample is used once and the second half meets weights one
    # step newer than those that sampled it; half the compute. "passes": the whole batch, twice.
    order = list(range(count))
    random.Random(f"updates/{config.seed}/{step}").shuffle(order)
    if config.update_split == "passes":
        return [order] * config.updates_per_step if order else []
    parts = [order[i :: config.updates_per_step] for i in range(config.updates_per_step)]
    return [part for part in parts if part]


# ------------------------------------------------------------------------------------------------
# One gradient step
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateStats:
    """What one gradient step did; the same on every process."""

    loss: float  # of the optimiser batch, before the step
    grad_norm: float  # before clipping
    ratio: float  # mean importance ratio pi / pi_old over tokens
    clipped: float  # share of tokens at which the clip stopped the gradient
    skipped: bool  # loss or gradient was not finite: the weights were left alone


def backward(
    policy: nn.Module,
    samples: Sequence[Sample],
    old: Sequence[Tensor],
    config: Config,
    accelerator: Accelerator,
) -> tuple[float, float, float]:
    """Gradients of the loss of one optimiser batch, accumulated into the parameters.

    samples and old log-probs ([n] each) are the same on every process; rows are shared out. Returns
    loss, mean ratio and clipped share over the whole batch.
    """
    # ASSUMPTION A11: the constant of the length normalisation is the response limit of the first
    # step, as in Dr. GRPO; it stays when the limit is raised, so that gradients do not jump.
    constant = float(config.length_constant or limit_at_step(config, 1))
    weights = sample_weights([len(s.token_ids) for s in samples], config.length_norm, constant)
    totals = torch.zeros(4, dtype=torch.float64)
    budget = config.max_tokens_per_microbatch
    for indices, real in my_rows(samples, budget, accelerator, "train"):
        row = collate([samples[i] for i in indices])
        sizes = torch.tensor(row.sizes)
        old_N = torch.cat([old[i] for i in indices])
        advantage_N = torch.tensor([samples[i].advantage for i in indices]).repeat_interleave(sizes)
        weight_N = torch.tensor([weights[i] * real for i in indices]).repeat_interleave(sizes)
        engine_N = torch.tensor([x for i in indices for x in samples[i].engine_logprobs])
        if config.importance_cap:
            weight_N = weight_N * torch.exp(old_N - engine_N).clamp(max=config.importance_cap)
        logprobs_N, _ = run_row(policy, row, accelerator)
        device = logprobs_N.device
        old_N, advantage_N, weight_N = (t.to(device) for t in (old_N, advantage_N, weight_N))
        loss_N = policy_loss(logprobs_N, old_N, advantage_N, config.clip_low, config.clip_high)
        loss = (weight_N * loss_N).sum()
        # Replicas average their gradients; the loss is a sum over all of them.
        accelerator.backward(loss * accelerator.num_processes)
        if real:
            ratio_N = torch.exp(logprobs_N.detach() - old_N)
            high = (advantage_N > 0) & (ratio_N > 1 + config.clip_high)
            low = (advantage_N < 0) & (ratio_N < 1 - config.clip_low)
            cut = (high | low).sum()
            parts = (loss.detach(), ratio_N.sum(), cut, torch.tensor(len(ratio_N)))
            totals += torch.stack([part.double().cpu() for part in parts])
    if accelerator.num_processes > 1:
        totals = accelerator.reduce(totals.to(accelerator.device), "sum").cpu()
    loss_sum, ratio_sum, cut_sum, tokens = totals.tolist()
    return loss_sum, ratio_sum / max(1.0, tokens), cut_sum / max(1.0, tokens)


def update(
    policy: nn.Module,
    optimizer: Any,
    samples: Sequence[Sample],
    old: Sequence[Tensor],
    config: Config,
    learning_rate: float,
    accelerator: Accelerator,
) -> UpdateStats:
    """One optimiser step over `samples`. A loss or gradient that is not finite skips the step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)
    loss, ratio, clipped = backward(policy, samples, old, config, accelerator)
    norm = float(accelerator.clip_grad_norm_(policy.parameters(), config.max_grad_norm))
    skipped = not (math.isfinite(loss) and math.isfinite(norm))
    if not skipped:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return UpdateStats(loss, norm, ratio, clipped, skipped)


# ------------------------------------------------------------------------------------------------
# From episodes to samples and records
# ------------------------------------------------------------------------------------------------


def score_grid(episodes: Sequence[Episode], config: Config) -> Tensor:
    """Sec. 3.2 for every turn: float64 [P, G, K]; NaN where the harness failed.

    `episodes` are ordered by task of the step, then trajectory.
    """
    # DEVIATION D05: a failure of our own harness is not a score of 0, as it would be if the paper's
    # rule were applied to the letter. The score is unknown; so are the returns that contain it, and
    # these samples are left out.
    # ASSUMPTION A18: the speedup in the score has no cap.
    values = [
        math.nan
        if turn.result.status == Status.HARNESS_ERROR
        else score(turn.result.correct, turn.result.speedup, config.correct_weight)
        for episode in episodes
        for turn in episode.turns
    ]
    grid = torch.tensor(values, dtype=torch.float64)
    return grid.reshape(-1, config.trajectories, config.turns)


def samples_of(episodes: Sequence[Episode], advantages_PGK: Tensor) -> list[Sample]:
    """The samples in the loss: all turns with a known advantage and at least one token."""
    # ASSUMPTION A13: responses cut at the limit stay in the loss, with their turn's score of 0.
    turns = [turn for episode in episodes for turn in episode.turns]
    return [
        Sample(turn.prompt_ids, turn.token_ids, turn.logprobs, value)
        for turn, value in zip(turns, advantages_PGK.flatten().tolist(), strict=True)
        if turn.token_ids and not math.isnan(value)
    ]


# ------------------------------------------------------------------------------------------------
# The run
# ------------------------------------------------------------------------------------------------


class Stopwatch:
    """The engine, with the seconds spent in `generate` added up; the rest of a rollout is waiting
    for the sandbox (rollout.rollout keeps it from timing kernels while the engine runs)."""

    def __init__(self, engine: rollout.TransformersPolicy) -> None:
        self.engine = engine
        self.seconds = 0.0

    def generate(self, *arguments: Any, **options: Any) -> list[rollout.Generation]:
        started = time.perf_counter()
        try:
            return self.engine.generate(*arguments, **options)
        finally:
            self.seconds += time.perf_counter() - started

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass
class Run:
    """Everything that lives from the first step to the last."""

    config: Config
    folder: Path
    accelerator: Accelerator
    policy: Any  # TokenLogprobs as accelerate prepared it
    model: Any  # the language model inside it; the engine generates with it
    tokenizer: Any
    optimizer: Any
    engine: Stopwatch
    sandbox: Sandbox
    train_tasks: list[Task]
    heldout_tasks: list[Task]
    step: int = 0  # steps whose records are on disk
    updates: int = 0  # gradient steps tried
    saved: int = 0  # step of the newest checkpoint
    weights_moved: bool = False  # since the end of `step`

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process


def train(run: Run) -> None:
    """The training loop: from the step after the checkpoint to the last."""
    config = run.config
    for step in range(run.step + 1, config.steps + 1):
        started = time.perf_counter()
        chosen = tasks_of_step(len(run.train_tasks), config.tasks_per_step, config.seed, step)
        tasks = [run.train_tasks[i] for i in chosen]
        episodes, seconds = roll_out(run, tasks, step)
        scores_PGK = score_grid(episodes, config)
        stop_on_harness_errors(episodes, config)
        returns_PGK = discounted_returns(scores_PGK, config.gamma, config.return_kind)
        advantages_PGK = config.advantage_sign * advantages(returns_PGK, config.advantage)
        samples = samples_of(episodes, advantages_PGK)
        training = time.perf_counter()
        learned = learn(run, samples, step)
        run.engine.sync(run.model.named_parameters())
        seconds["seconds_train"] = time.perf_counter() - training
        seconds["seconds"] = time.perf_counter() - started
        row = {
            "step": step,
            **run_folder.rollout_metrics(episodes, scores_PGK),
            **learned,
            **seconds,
        }
        credit = (scores_PGK, returns_PGK, advantages_PGK)
        record_step(run, row, run_folder.rollout_records(step, episodes, *credit))
        if step % config.save_every == 0 or step == config.steps:
            save(run)


def roll_out(run: Run, tasks: list[Task], step: int) -> tuple[list[Episode], dict[str, float]]:
    """G trajectories of K turns on each task, each process taking every so-many-th task.

    Returns all episodes, ordered by task and trajectory, the same on every process; and the
    seconds.
    """
    # ASSUMPTION A16: a prompt may take 8192 tokens in multi-turn training too (published for the
    # single-turn set-up only).
    # ASSUMPTION A17: no top-p, top-k or min-p beside the temperature.
    config, accelerator = run.config, run.accelerator
    mine = tasks[accelerator.process_index :: accelerator.num_processes]
    started, before = time.perf_counter(), run.engine.seconds
    episodes: list[Episode] = []
    if mine:
        episodes = rollout.rollout(
            run.engine,
            run.tokenizer,
            mine,
            run.sandbox,
            trajectories=config.trajectories,
            turns=config.turns,
            seed=config.seed,
            step=step,
            temperature=config.temperature,
            max_new_tokens=limit_at_step(config, step),
            prompt_budget=config.prompt_budget,
            progress=run.is_main,
        )
    generating = run.engine.seconds - before
    waiting = time.perf_counter() - started - generating
    if accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        episodes = gather_object(episodes)
    place = {task.name: i for i, task in enumerate(tasks)}
    episodes.sort(key=lambda episode: (place[episode.task.name], episode.trajectory))
    return episodes, {"seconds_generate": generating, "seconds_sandbox": waiting}


def stop_on_harness_errors(episodes: Sequence[Episode], config: Config) -> None:
    """RunStopped when our own harness failed on too large a share of a step's samples."""
    results = [turn.result for episode in episodes for turn in episode.turns]
    failed = [result for result in results if result.status == Status.HARNESS_ERROR]
    if len(failed) > config.max_harness_error_rate * len(results):
        reason = " ".join((failed[0].reason or "no reason given").split())[:300]
        raise RunStopped(
            f"the sandbox itself failed on {len(failed)} of {len(results)} samples, more than"
            f" max_harness_error_rate {config.max_harness_error_rate:g} allows; the first: {reason}"
        )


def learn(run: Run, samples: Sequence[Sample], step: int) -> dict[str, Any]:
    """All gradient steps of a batch; returns the metrics of the update.

    RunStopped where trainer and engine disagree about the tokens the engine sampled: it would mean
    that it runs other weights than these.
    """
    # ASSUMPTION A15: pi_old comes from one forward pass of the trainer over the batch before its
    # first gradient step; `old_logprobs = "engine"` takes the engine's.
    # ASSUMPTION A20: weights, gradients, optimiser state and log-probs are fp32; `precision` is
    # that of the matrix products.
    config = run.config
    run.model.train()  # generation leaves it in eval mode, which would turn recomputation off
    trainer, entropy = logprobs_of(
        run.policy, samples, config.max_tokens_per_microbatch, run.accelerator
    )
    engine = [torch.tensor(sample.engine_logprobs) for sample in samples]
    gap = engine_gap(trainer, engine)
    # DEVIATION D06: the paper has no such check. A healthy gap is about 0.01 nats in bf16, that of
    # stale weights 0.2; a gradient from the latter is worth nothing.
    if gap > config.max_engine_gap:
        raise RunStopped(
            f"step {step}: trainer and engine differ by {gap:.3f} nats a token, more than"
            f" max_engine_gap {config.max_engine_gap:g}: the engine does not run these weights"
        )
    old = trainer if config.old_logprobs == "trainer" else engine
    done: list[UpdateStats] = []
    for indices in split_updates(len(samples), config, step):
        rate = learning_rate_at(config, run.updates)
        part = [samples[i] for i in indices]
        run.weights_moved = True
        stats = update(
            run.policy,
            run.optimizer,
            part,
            [old[i] for i in indices],
            config,
            rate,
            run.accelerator,
        )
        run.updates += 1
        done.append(stats)
        if stats.skipped and run.is_main:
            print(
                f"step {step}: loss {stats.loss} or gradient norm {stats.grad_norm} is not finite,"
                " this gradient step is skipped",
                flush=True,
            )
    finite = [stats for stats in done if not stats.skipped]
    last = finite[-1] if finite else UpdateStats(0.0, 0.0, 1.0, 0.0, True)
    mean = run_folder.mean
    return {
        "samples": len(samples),
        "advantage_abs": mean([abs(sample.advantage) for sample in samples]),
        "loss": mean([stats.loss for stats in finite]),
        "grad_norm": mean([stats.grad_norm for stats in finite]),
        "ratio": last.ratio,
        "clipped": last.clipped,
        "entropy": entropy,
        "engine_gap": gap,
        "learning_rate": learning_rate_at(config, max(0, run.updates - 1)),
        "updates": run.updates,
        "skipped_updates": len(done) - len(finite),
    }


def engine_gap(trainer: Sequence[Tensor], engine: Sequence[Tensor]) -> float:
    """Mean over tokens of |trainer log-prob - engine log-prob|, nats; 0 without tokens."""
    pairs = zip(trainer, engine, strict=True)
    total = sum(float((a - b).abs().double().sum()) for a, b in pairs)
    return total / max(1, sum(len(part) for part in trainer))


def record_step(run: Run, row: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Both logs on disk, one line on the terminal, trackers."""
    if run.is_main:
        run_folder.append_lines(run.folder / "rollouts.jsonl", records)
        run_folder.append_lines(run.folder / "metrics.jsonl", [row])
        print(run_folder.step_line(row, run.config.steps), flush=True)
    numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
    run.accelerator.log(numbers, step=row["step"])
    run.step = row["step"]
    run.weights_moved = False


def save(run: Run) -> None:
    """A checkpoint of the end of `run.step`."""

    def save_model(folder: Path) -> None:
        run.model.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)

    if run.is_main:
        state = {"step": run.step, "updates": run.updates}
        optimizer_state = run.optimizer.state_dict()
        keep = run.config.keep_checkpoints
        run_folder.save_checkpoint(run.folder, run.step, state, optimizer_state, save_model, keep)
    run.accelerator.wait_for_everyone()
    run.saved = run.step


def evaluate_heldout(run: Run, moment: str) -> Any:
    """Evaluation of the present weights on the held-out tasks, in the folder eval_`moment`.

    Finished tasks are read back from there, so that a resumed run repeats none. None where there is
    nothing to evaluate, and on all processes but the first.
    """
    config = run.config
    tasks = run.heldout_tasks[: config.eval_tasks or None]
    result = None
    if config.eval_trajectories and tasks and run.is_main:
        import evaluate

        result = evaluate.evaluate_policy(
            run.engine,
            run.tokenizer,
            tasks,
            run.sandbox,
            trajectories=config.eval_trajectories,
            turns=config.eval_turns,
            seed=config.seed,
            temperature=config.temperature,
            max_new_tokens=limit_at_step(config, config.steps),
            prompt_budget=config.prompt_budget,
            progress=True,
            folder=run.folder / f"eval_{moment}",
            meta={"model": moment, "split": "heldout", "target": config.target},
        )
    run.accelerator.wait_for_everyone()
    return result


def finish(run: Run, before: Any, after: Any) -> None:
    """The final table on the terminal and in the run folder."""
    if not run.is_main:
        return
    if before is not None and after is not None:
        import evaluate

        table = evaluate.compare_table(before, after)
        print(f"\n{table}")
        run_folder.write_whole(run.folder / "table.txt", table + "\n")
        results = json.dumps(evaluate.results(after, before), indent=1)
        run_folder.write_whole(run.folder / "results.json", results + "\n")
    print(f"run folder: {run.folder}", flush=True)


# ------------------------------------------------------------------------------------------------
# Setting up
# ------------------------------------------------------------------------------------------------

TRACKER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def tracker_names(config: Config) -> list[str]:
    """The trackers asked for, each checked to be installed; UserError."""
    names = [name.strip() for name in config.trackers.split(",") if name.strip()]
    for name in names:
        if name not in TRACKER_PACKAGES:
            raise UserError(f"unknown tracker {name}: choose from {', '.join(TRACKER_PACKAGES)}")
        if importlib.util.find_spec(TRACKER_PACKAGES[name]) is None:
            raise UserError(
                f"tracker {name} is not installed: pip install {TRACKER_PACKAGES[name]}"
            )
    return names


def make_accelerator(config: Config, folder: Path | None = None) -> Accelerator:
    """One process, or one of the replicas that accelerate or torchrun launched."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DistributedType

    # A process may wait for the slowest kernel of another, and for the evaluation.
    patience = InitProcessGroupKwargs(timeout=datetime.timedelta(hours=6))
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        cpu=not torch.cuda.is_available(),
        log_with=tracker_names(config) or None,
        project_dir=folder,
        kwargs_handlers=[patience],
    )
    replicas = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if accelerator.distributed_type not in replicas:
        raise UserError(
            f"{accelerator.distributed_type.value} is not supported: launch plain replicas"
            " (accelerate launch --multi_gpu) or one process"
        )
    return accelerator


def load_model(config: Config, source: str | Path) -> tuple[Any, Any]:
    """Language model with fp32 weights, and its tokenizer; UserError where there is none."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # of reading and writing weights; our own bars stay
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation=config.attention
        )
    except (OSError, ValueError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"cannot load model {source}: {lines[0]}") from None
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, tokenizer


def model_source(config: Config, accelerator: Accelerator) -> str | Path:
    """Where the weights of step 0 are: the smoke model is made by the first process, once."""
    if config.model != "warmstart":
        return config.model
    import warmstart

    with accelerator.main_process_first():
        return warmstart.ensure_model(config.target, progress=accelerator.is_main_process)


def make_optimizer(config: Config, policy: nn.Module) -> torch.optim.Optimizer:
    """AdamW over everything; the learning rate is set before each step."""
    return torch.optim.AdamW(
        policy.parameters(),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )


def load_task_lists(config: Config) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks; UserError where a step could not be filled."""
    train_tasks = rollout.load_tasks(config.tasks, config.target, split="train")
    heldout: list[Task] = []
    if config.eval_trajectories:
        heldout = rollout.load_tasks(config.tasks, config.target, split="heldout")
    if len(train_tasks) < config.tasks_per_step:
        raise UserError(
            f"tasks_per_step is {config.tasks_per_step}, but {config.tasks} has only"
            f" {len(train_tasks)} training tasks: lower it or add tasks"
        )
    return train_tasks, heldout


def start(config: Config, folder: Path, accelerator: Accelerator) -> int:
    """Sets everything up, from the newest checkpoint if there is one, and runs; exit status."""
    checkpoint = run_folder.latest_checkpoint(folder)
    train_tasks, heldout_tasks = load_task_lists(config)
    sandbox = Sandbox(
        config.target,
        rules=config.rules,
        jobs=config.sandbox_jobs or None,
        fixed_speedup=config.fixed_speedup or None,
        reuse_verdicts=config.reuse_verdicts,
        gpus=[accelerator.local_process_index] if config.target == "cuda" else None,
    )
    with sandbox:
        source = checkpoint or model_source(config, accelerator)
        model, tokenizer = load_model(config, source)
        wrapped = TokenLogprobs(model, config.temperature, config.logprob_chunk)
        policy, optimizer = accelerator.prepare(wrapped, make_optimizer(config, wrapped))
        engine = Stopwatch(rollout.TransformersPolicy(model, tokenizer))
        run = Run(
            config,
            folder,
            accelerator,
            policy,
            model,
            tokenizer,
            optimizer,
            engine,
            sandbox,
            train_tasks,
            heldout_tasks,
        )
        restore(run, checkpoint)
        try:
            return evaluate_and_train(run, resumed=checkpoint is not None)
        finally:
            engine.close()


def restore(run: Run, checkpoint: Path | None) -> None:
    """Optimiser and counters of a checkpoint; both logs cut back to it; weights to the engine."""
    if checkpoint is not None:
        state = run_folder.read_state(checkpoint)
        run.step = run.saved = state["step"]
        run.updates = state["updates"]
        saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        run.optimizer.load_state_dict(saved)
    if run.is_main:
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            run_folder.cut_log(run.folder / name, run.step)
        if run.step:
            print(f"resuming after step {run.step}", flush=True)
    run.accelerator.wait_for_everyone()
    run.engine.sync(run.model.named_parameters())


def evaluate_and_train(run: Run, resumed: bool) -> int:
    """Evaluation, training, evaluation, report. Ctrl-C saves what is whole; exit status."""
    finished = run.folder / "eval_before" / "finished"
    before = None
    try:
        if not resumed or finished.exists():  # after training began, it can only be read back
            before = evaluate_heldout(run, "before")
            if before is not None and not finished.exists():
                run_folder.write_whole(finished, "")
        train(run)
        finish(run, before, evaluate_heldout(run, "after"))
        return 0
    except KeyboardInterrupt:
        alone = run.accelerator.num_processes == 1  # saving is a collective
        if alone and run.step > run.saved and not run.weights_moved:
            save(run)
        if run.is_main:
            print(
                f"\ninterrupted; {run.saved} of {run.config.steps} steps are saved. Continue with:"
                f" python train.py --resume {run.folder}",
                flush=True,
            )
        return 130


def launch(arguments: Sequence[str]) -> int:
    """A run from its command line; exit status."""
    known, words = parse_arguments(arguments, (__doc__ or "").split("Paper map")[0])
    config, folder = open_run(known, words)
    accelerator = make_accelerator(config, folder)
    if accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        folder = broadcast_object_list([folder])[0]
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        described = {"config": dataclasses.asdict(config), **run_folder.provenance()}
        described["processes"] = accelerator.num_processes
        print(json.dumps(described), flush=True)
        if not known.resume:
            run_folder.write_whole(folder / "config.json", json.dumps(described, indent=1) + "\n")
    accelerator.wait_for_everyone()
    if config.trackers:
        accelerator.init_trackers("kevin", config=dataclasses.asdict(config))
    try:
        return start(config, folder, accelerator)
    finally:
        accelerator.end_training()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; every expected failure is one line on stderr."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        return launch(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunStopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        print(
            f"error: {error.strerror or error}{place}. What was saved is whole: continue with"
            " --resume RUN once that is put right",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
