"""Samples packed into rows, and the log-probs of their tokens without keeping the logits.

A row holds whole samples one after another; positions restart with each, so attention stays
within a sample. Only positions that predict a response token reach the head. Nothing here knows
the loss. Suffixes: T tokens of a row, N tokens in the loss, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from kernel_sandbox import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Sample:
    """One turn of one trajectory: what the loss needs."""

    prompt_ids: tuple[int, ...]  # [prompt tokens] context only, never in the loss
    token_ids: tuple[int, ...]  # [n] the ids sampled: thought, code and summary, end token too
    engine_logprobs: tuple[float, ...]  # [n] nats, at the sampling temperature
    advantage: float  # one for all its tokens

    @property
    def length(self) -> int:
        """Tokens of the packed sample; the last one is predicted but never an input."""
        return len(self.prompt_ids) + len(self.token_ids) - 1


@dataclass(frozen=True)
class Row:
    """Whole samples packed into one row of T tokens; N of its positions predict response tokens."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T], restarts at 0 with each sample
    where: Tensor  # [N], positions whose next token is in the loss
    labels: Tensor  # [N], those next tokens
    sizes: tuple[int, ...]  # response tokens of each sample, in order; sums to N

    def to(self, device: torch.device) -> Row:
        return Row(
            self.input_ids.to(device),
            self.position_ids.to(device),
            self.where.to(device),
            self.labels.to(device),
            self.sizes,
        )


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: indices of the samples of each row, at most `budget` tokens a row.

    A sample longer than the budget gets a row of its own. Ties keep the order of the indices.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = next((r for r, free in enumerate(room) if free >= lengths[index]), None)
        if fits is None:
            rows.append([])
            room.append(max(budget, lengths[index]))
            fits = len(rows) - 1
        rows[fits].append(index)
        room[fits] -= lengths[index]
    return rows


def share(rows: Sequence[Sequence[int]], rank: int, world: int) -> list[tuple[list[int], bool]]:
    """This process's rows, the same number for each (collectives run in lockstep).

    Returns (sample indices, real); the missing rows are copies of the first with real = False,
    whose loss weighs 0.
    """
    per_rank = math.ceil(len(rows) / world)
    mine = [(list(row), True) for row in rows[rank::world]]
    return mine + [(list(rows[0]), False)] * (per_rank - len(mine))


def collate(samples: Sequence[Sample]) -> Row:
    """Packs samples into one row. The position before a token predicts it."""
    inputs: list[int] = []
    positions: list[int] = []
    where: list[int] = []
    labels: list[int] = []
    for sample in samples:
        start = len(inputs)
        inputs += (sample.prompt_ids + sample.token_ids)[:-1]
        positions += range(sample.length)
        first = start + len(sample.prompt_ids) - 1
        where += range(first, first + len(sample.token_ids))
        labels += sample.token_ids
    sizes = tuple(len(sample.token_ids) for sample in samples)
    return Row(
        torch.tensor([inputs]),
        torch.tensor([positions]),
        torch.tensor(where),
        torch.tensor(labels),
        sizes,
    )


def my_rows(
    samples: Sequence[Sample], budget: int, accelerator: Accelerator, label: str
) -> Iterable[tuple[list[int], bool]]:
    """This process's rows of all `samples`, see `share`, behind a progress bar on the first one."""
    rows = pack([sample.length for sample in samples], budget)
    mine = share(rows, accelerator.process_index, accelerator.num_processes) if rows else []
    quiet = None if accelerator.is_main_process else True  # None: shown on terminals only
    return tqdm(mine, desc=label, unit="row", leave=False, disable=quiet)


def token_logprobs(
    hidden_ND: Tensor, labels_N: Tensor, head: nn.Module, temperature: float
) -> tuple[Tensor, Tensor]:
    """log pi(label) = z_label / T - logsumexp(z / T) in fp32, and the entropy of softmax(z / T).

    hidden [N, D] -> [N], [N]; the entropy carries no gradient.
    """
    scaled_NV = head(hidden_ND).float() / temperature
    logprobs_N = -functional.cross_entropy(scaled_NV, labels_N, reduction="none")
    with torch.no_grad():
        all_NV = torch.log_softmax(scaled_NV, dim=-1)
        entropy_N = -(all_NV.exp() * all_NV).sum(dim=-1)
    return logprobs_N, entropy_N


class TokenLogprobs(nn.Module):
    """The language model as a function from packed rows to log-probs of the tokens in the loss.

    It is what accelerate wraps: the head runs inside its forward, so that gradients are
    synchronised, and in chunks that are recomputed in the backward pass, so that the [N,
    vocabulary] logits of a row never exist at once.
    """

    def __init__(self, model: Any, temperature: float, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk = chunk
        if getattr(model.config.get_text_config(), "final_logit_softcapping", None):
            raise UserError(
                "models with soft-capped logits are not supported: choose another model"
            )

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, where: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[1, T], [1, T], [N], [N] -> log-probs [N] fp32, entropies [N].

        No attention mask and no cache: only then does transformers read the restarting positions as
        sample borders; with either, samples of a row would silently see each other.
        """
        decoder = self.model.get_decoder()
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        hidden_ND = output.last_hidden_state[0, where]
        head = self.model.get_output_embeddings()
        parts = []
        for start in range(0, len(labels), self.chunk):
            piece = slice(start, start + self.chunk)
            arguments = (hidden_ND[piece], labels[piece], head, self.temperature)
            if torch.is_grad_enabled():
                parts.append(checkpoint(token_logprobs, *arguments, use_reentrant=False))
            else:
                parts.append(token_logprobs(*arguments))
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)


def logprobs_of(
    policy: nn.Module, samples: Sequence[Sample], budget: int, accelerator: Accelerator
) -> tuple[list[Tensor], float]:
    """Log-probs of every sample's response under the present weights, and the mean entropy.

    `budget` is in tokens a row. Returns ([n] fp32 CPU tensors in the order of `samples`, nats a
    token); the same on every process.
    """
    found: list[tuple[int, Tensor, float]] = []
    with torch.no_grad():
        for indices, real in my_rows(samples, budget, accelerator, "log-probs"):
            row = collate([samples[i] for i in indices])
            logprobs, entropies = run_row(policy, row, accelerator)
            if real:
                pieces = zip(indices, logprobs.cpu().split(row.sizes), strict=True)
                sums = [float(part.sum()) for part in entropies.double().cpu().split(row.sizes)]
                found += [(i, p, e) for (i, p), e in zip(pieces, sums, strict=True)]
    if accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        found = gather_object(found)
    found.sort(key=lambda item: item[0])
    tokens = sum(len(sample.token_ids) for sample in samples)
    return [item[1] for item in found], sum(item[2] for item in found) / max(1, tokens)


def run_row(policy: nn.Module, row: Row, accelerator: Accelerator) -> tuple[Tensor, Tensor]:
    """Forward of one packed row on this process's device."""
    row = row.to(accelerator.device)
    return policy(row.input_ids, row.position_ids, row.where, row.labels)
