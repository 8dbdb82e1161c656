"""Settings of a training run: `Config` with the paper's numbers, and where they come from.

A TOML file (a flat table) sets fields, `--field value` words override them. Errors name the field,
what it takes and, for a misspelt one, the nearest there is.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import time
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kernel_sandbox import UserError


@dataclass(frozen=True)
class Config:
    """All settings of a run; the defaults are the paper's, the comments name unit and source."""

    # What is trained on what
    target: Literal["cuda", "cpp"] = "cuda"  # kernels by nvcc, or by g++ with OpenMP
    tasks: str = "tasks"  # folder | kernelbench:DIR | kernelbench:hf | one .py file
    model: str = "Qwen/QwQ-32B"  # Hugging Face id or folder, or "warmstart"; paper: Sec. 3.3
    attention: str = "sdpa"  # attn_implementation of transformers
    precision: Literal["fp32", "bf16"] = "bf16"  # of matrix products; all else is fp32
    seed: int = 0  # of task order, sampling, shuffling
    # A step
    steps: int = 40  # batches; paper: 40 (Sec. 4.4)
    tasks_per_step: int = 8  # P; paper: 8 (Sec. 4.4)
    trajectories: int = 16  # G, per task; paper: 16 (Sec. 4.4)
    turns: int = 4  # K; paper: 4 (Sec. 4.4)
    temperature: float = 0.9  # of sampling, and of every log-prob; paper: 0.9 (Sec. 3.3)
    max_new_tokens: int = 16384  # tokens of a response; paper: 16K (Sec. 4.4)
    max_new_tokens_schedule: str = ""  # "STEP:LIMIT,...", limit from that step on; paper: 30:22528
    prompt_budget: int = 8192  # tokens of a prompt; older turns are left out to fit
    # Credit
    correct_weight: float = 0.3  # score of correctness alone; paper: 0.3 (Sec. 3.2)
    gamma: float = 0.4  # discount per turn; paper: 0.4 (Sec. 4.3)
    return_kind: Literal["sum", "max"] = "sum"  # paper: sum (Sec. 4.3)
    advantage: Literal["group", "group_no_std", "trloo"] = "group"  # paper: group (Sec. 4, step 4)
    advantage_sign: int = 1  # -1: learns to write worse kernels, a check that the signal is real
    # Loss
    clip_low: float = 0.2  # ratio >= 1 - clip_low; paper: 0.2 (Sec. 3.3)
    clip_high: float = 0.28  # ratio <= 1 + clip_high; paper: 0.28 (Sec. 3.3)
    length_norm: Literal["constant", "sample", "token"] = "constant"  # paper: constant (Sec. 6.1)
    length_constant: int = 0  # tokens; 0: max_new_tokens of the first step
    old_logprobs: Literal["trainer", "engine"] = "trainer"  # whose pi_old is in the ratio
    importance_cap: float = 0.0  # token weight min(pi_old / pi_engine, cap); 0: off, the paper
    # Update
    updates_per_step: int = 2  # gradient steps a batch; paper: 2 (Sec. 3.3)
    update_split: Literal["halves", "passes"] = "halves"  # parts of the batch, or all each time
    learning_rate: float = 2e-6  # AdamW; paper: 2e-6 (blog, single-turn list)
    warmup_ratio: float = 0.03  # share of gradient steps with rising rate; paper: 0.03 (blog)
    adam_beta1: float = 0.9  # OpenRLHF's default then
    adam_beta2: float = 0.95  # OpenRLHF's default then
    weight_decay: float = 0.0  # OpenRLHF's default then
    max_grad_norm: float = 0.05  # paper: 0.05 multi-turn (Sec. 6.1), 0.5 single-turn (blog)
    # Memory: none of these changes the loss
    max_tokens_per_microbatch: int = 32768  # in a packed row; a longer sample has its own
    logprob_chunk: int = 2048  # tokens whose logits exist at one time
    gradient_checkpointing: bool = True  # recompute activations in the backward pass
    # Sandbox
    rules: Literal["strict", "kernelbench"] = "strict"  # of judging, see kernel_sandbox.py
    sandbox_jobs: int = 0  # builds at a time; 0: as many as there are cores
    fixed_speedup: float = 0.0  # > 0: every correct kernel counts as this fast (exact repeats)
    reuse_verdicts: bool = False  # the same kernel for the same task is judged once per run
    max_harness_error_rate: float = 0.1  # share of a step's samples; the run stops above it
    max_engine_gap: float = 0.1  # nats, mean |trainer - engine| log-prob; the run stops above it
    # Evaluation before and after, on the held-out split
    eval_trajectories: int = 0  # per task; 0: no evaluation. Paper: 16 (Sec. 5.1)
    eval_turns: int = 8  # paper: 8 (Sec. 5.1)
    eval_tasks: int = 0  # the first so many held-out tasks; 0: all
    # Records
    save_every: int = 5  # steps between checkpoints; the last step is always saved
    keep_checkpoints: int = 2  # the newest so many stay
    trackers: str = ""  # any of tensorboard, wandb, trackio, separated by commas


ALLOWED_RANGE: dict[str, tuple[float, float]] = {  # inclusive
    "steps": (0, math.inf),
    "tasks_per_step": (1, math.inf),
    "trajectories": (1, math.inf),
    "turns": (1, math.inf),
    "temperature": (1e-3, 100),
    "max_new_tokens": (1, math.inf),
    "prompt_budget": (1, math.inf),
    "gamma": (0, 1),
    "correct_weight": (0, math.inf),
    "clip_low": (0, 1),
    "clip_high": (0, math.inf),
    "length_constant": (0, math.inf),
    "importance_cap": (0, math.inf),
    "updates_per_step": (1, math.inf),
    "learning_rate": (0, 10),
    "warmup_ratio": (0, 1),
    "adam_beta1": (0, 0.999999),
    "adam_beta2": (0, 0.999999),
    "weight_decay": (0, math.inf),
    "max_grad_norm": (1e-9, math.inf),
    "max_tokens_per_microbatch": (1, math.inf),
    "logprob_chunk": (1, math.inf),
    "sandbox_jobs": (0, math.inf),
    "fixed_speedup": (0, math.inf),
    "max_harness_error_rate": (0, 1),
    "max_engine_gap": (0, math.inf),
    "eval_trajectories": (0, math.inf),
    "eval_turns": (1, math.inf),
    "eval_tasks": (0, math.inf),
    "save_every": (1, math.inf),
    "keep_checkpoints": (1, math.inf),
}


def load_config(path: str | Path | None, words: Mapping[str, str] | None = None) -> Config:
    """Config from a TOML file (None: the defaults), `--field value` words over it; UserError."""
    table = {} if path is None else read_toml(path)
    return config_of(table, words or {}, f"{path}: ")


def config_of(table: Mapping[str, Any], words: Mapping[str, str], where: str) -> Config:
    """Config from a table of values that `where` names, and words over it; UserError."""
    values = {name: checked(name, value, where) for name, value in table.items()}
    values |= {name: checked(name, parsed(name, word), "--") for name, word in words.items()}
    config = Config(**values)
    check_relations(config)
    return config


def check_relations(config: Config) -> None:
    """What no single field can say; UserError."""
    if config.advantage_sign not in (1, -1):
        raise UserError(f"advantage_sign must be 1 or -1, not {config.advantage_sign}")
    if config.advantage == "trloo" and config.trajectories < 2:
        raise UserError("advantage trloo compares trajectories: it needs trajectories >= 2")
    limit_at_step(config, 1)


def limit_at_step(config: Config, step: int) -> int:
    """Response limit in tokens at a step (counted from 1), after `max_new_tokens_schedule`."""
    # ASSUMPTION A22: "step 30", where the paper raises the limit, counts batches (the ICLR text
    # says 60, which fits gradient steps).
    limit = config.max_new_tokens
    for part in filter(None, config.max_new_tokens_schedule.split(",")):
        start, _, value = part.partition(":")
        if not (start.strip().isdigit() and value.strip().isdigit() and int(value) > 0):
            raise UserError(f'max_new_tokens_schedule must be "STEP:LIMIT,...", not {part!r}')
        if step >= int(start):
            limit = int(value)
    return limit


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def parse_arguments(
    arguments: Sequence[str], description: str
) -> tuple[argparse.Namespace, dict[str, str]]:
    """--config, --run-dir, --resume, and the `--field value` words; UserError."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise UserError(f"{message}; see python train.py --help")

    shape = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="train.py", description=description, formatter_class=shape, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="settings, one of configs/*.toml")
    parser.add_argument("--run-dir", metavar="DIR", help="folder of this run (default: runs/...)")
    parser.add_argument("--resume", metavar="RUN", help="run folder to continue")
    fields = parser.add_argument_group("settings, over those of the file")
    names = [field.name for field in dataclasses.fields(Config)]
    for field in dataclasses.fields(Config):
        spellings = dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"])
        text = f"{field.type} (default: {field.default!r})".replace("%", "%%")
        fields.add_argument(*spellings, dest=field.name, default=None, metavar="VALUE", help=text)
    known, rest = parser.parse_known_args(arguments)
    if rest:
        word = rest[0].split("=")[0]
        if word.startswith("--"):
            raise unknown_field(word[2:], [*names, "config", "run-dir", "resume"], "--")
        raise UserError(f"unexpected argument {rest[0]!r}; see python train.py --help")
    values = {name: getattr(known, name) for name in names}
    return known, {name: value for name, value in values.items() if value is not None}


def open_run(known: argparse.Namespace, words: Mapping[str, str]) -> tuple[Config, Path]:
    """Config and folder of a new run or of the one to resume; nothing is written yet; UserError."""
    if known.resume:
        if known.config or known.run_dir:
            raise UserError(
                "--resume takes config and folder from the run: drop --config, --run-dir"
            )
        path = Path(known.resume) / "config.json"
        if not path.exists():
            raise UserError(f"{known.resume} is not a run folder: it has no config.json")
        table = json.loads(path.read_text())["config"]
        return config_of(table, words, f"{path}: "), Path(known.resume)
    if not known.config:
        raise UserError("which run? Give --config FILE (one of configs/*.toml) or --resume RUN")
    config = load_config(known.config, words)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(known.run_dir or f"runs/{Path(known.config).stem}-{stamp}")
    if (folder / "config.json").exists():
        raise UserError(f"{folder} already holds a run: --resume {folder}, or another --run-dir")
    return config, folder


# ------------------------------------------------------------------------------------------------
# Reading and checking values
# ------------------------------------------------------------------------------------------------


FIELD_TYPES = typing.get_type_hints(Config)
TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def read_toml(path: str | Path) -> dict[str, Any]:
    """The top-level table of a TOML file; UserError where there is none or it cannot be read."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise UserError(f"no config file {path}: give one of configs/*.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def unknown_field(name: str, known: Iterable[str], where: str) -> UserError:
    """The error for a field that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return UserError(f"{where}unknown field {name}; did you mean {near[0]}?")


def parsed(name: str, word: str) -> Any:
    """A command-line word as a value of the field's type; left as text where it is none."""
    kind = FIELD_TYPES.get(name)
    if kind is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    for convert in (int, float) if kind in (int, float) else ():
        try:
            return convert(word)
        except ValueError:
            continue
    return word


def checked(name: str, value: Any, where: str) -> Any:
    """The value, if the field exists and takes it; a whole number passes where a number is due."""
    if name not in FIELD_TYPES:
        raise unknown_field(name, FIELD_TYPES, where)
    kind = FIELD_TYPES[name]
    choices = typing.get_args(kind)
    if choices:
        if value not in choices:
            expected = " or ".join(f'"{choice}"' for choice in choices)
            raise UserError(f"{where}{name} must be {expected}, not {value!r}")
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise UserError(f"{where}{name} must be {TYPE_NAMES[kind]}, not {value!r}")
    low, high = ALLOWED_RANGE.get(name, (-math.inf, math.inf))
    if kind in (int, float) and not low <= value <= high:
        between = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
        raise UserError(f"{where}{name} must be {between}, not {value}")
    return value
