"""Chooses tokens from logits. Every choice is a pure function of the row's logits, its sequence and the random numbers
of (seed, choice index, position): no generator runs, and no neighbour matters.

Order of work on a row: logit bias; repetition penalty (prompt and output); frequency and presence penalty (output
alone), each rounded to float32; masks (allowed tokens, bad words, stop tokens before `min_tokens`); `kernels.sample`.
The device's work is launched without waiting for it; `collect` waits and makes Python of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.cpu.plan import Plan
from kernels.host_copy import HostCopy, to_device
from kernels.sample import Draw, Drawn
from kernels.sample import sample as draw_tokens
from weir.core.request import SamplingParams, TokenLogprobs
from weir.engine.logprobs import measure_logprobs, read_logprobs

LARGEST_SCORE = 1e30
"""Beyond what any model gives and within float32: where a tiny repetition penalty ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One token to choose.

    Attributes:
        logits_row: which row of the logits; several choices may share one.
        token_ids: prompt and output so far, as far as they are known.
        position: the new token's.
        output_counts: how often each token occurs in the output.
        stop_token_ids: tokens that would end the sequence; masked before `min_tokens`.
    """

    logits_row: int
    params: SamplingParams
    choice_index: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    position: int
    output_counts: Mapping[int, int] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def needs_processing(self) -> bool:
        """Whether anything changes the logits before the choice."""
        params = self.params
        return bool(
            params.logit_bias
            or params.repetition_penalty != 1
            or params.frequency_penalty
            or params.presence_penalty
            or params.allowed_token_ids is not None
            or params.bad_words_token_ids
            or self.masks_stop_tokens
        )

    @property
    def masks_stop_tokens(self) -> bool:
        return self.position - self.num_prompt_tokens < self.params.min_tokens and bool(self.stop_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTokens:
    """The tokens of a launch.

    Attributes:
        token_ids: [num_rows] int64 on the device of the logits, for a next step to gather from; -1 where a row's logits
            are not finite.
        values: the same and what was measured of the rows that want log-probabilities, on their way to the host.
        num_top: how many likely tokens each row wants beside its own, None for no log-probabilities.
    """

    token_ids: torch.Tensor
    values: HostCopy
    num_top: tuple[int | None, ...]
    vocab_size: int

    def collect(self) -> tuple[SampledToken, ...]:
        """Wait for the tokens.

        Raises:
            FloatingPointError: a row's logits are not finite, so that no token could be chosen honestly.
        """
        values = self.values.wait()
        token_ids: list[int] = values[: len(self.num_top)].long().tolist()
        if -1 in token_ids:
            raise FloatingPointError("the model's logits are not finite")
        wanted = [count for count in self.num_top if count is not None]
        logprobs: Iterator[TokenLogprobs] = iter(())
        if wanted:
            measured = values[len(self.num_top) :].view(len(wanted), -1)
            logprobs = iter(read_logprobs(measured, wanted, self.vocab_size))
        return tuple(
            SampledToken(token_id=token_id, logprobs=None if count is None else next(logprobs))
            for token_id, count in zip(token_ids, self.num_top, strict=True)
        )


@torch.inference_mode()
def launch_sampling(logits: torch.Tensor, rows: Sequence[SamplingRow], plan: Plan | None = None) -> PendingTokens:
    """Begin to choose one token for each of `rows`; nothing here waits for a GPU.

    Args:
        logits: [num_logits, vocab_size] float32; not changed.
        plan: the one the logits come from, where CPU kernels compute them: it draws, too.
    """
    num_top = tuple(row.params.logprobs for row in rows)
    wanted = [index for index, count in enumerate(num_top) if count is not None]
    drawn = _draw(logits, rows, plan, wants_normalizers=bool(wanted))
    values = drawn.token_ids
    if wanted:
        places = _staged(wanted, logits.device)
        measured = measure_logprobs(
            _select(logits, [rows[index].logits_row for index in wanted]),
            drawn.token_ids[places],
            [num_top[index] or 0 for index in wanted],
            None if drawn.log_normalizers is None else drawn.log_normalizers[places],
        )
        values = torch.cat((drawn.token_ids.double(), measured.flatten()))
    return PendingTokens(
        token_ids=drawn.token_ids, values=HostCopy(values), num_top=num_top, vocab_size=logits.shape[1]
    )


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], plan: Plan | None = None) -> tuple[SampledToken, ...]:
    """Launch and collect. Raises FloatingPointError where a row's logits are not finite."""
    return launch_sampling(logits, rows, plan).collect()


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow], plan: Plan | None, *, wants_normalizers: bool) -> Drawn:
    """Draw from the logits as they are for the rows that want it so, and from processed copies for the others."""
    plain = [index for index, row in enumerate(rows) if not row.needs_processing]
    changed = [index for index, row in enumerate(rows) if row.needs_processing]
    parts: list[Drawn] = []
    if plain:
        draws = [_draw_of(rows[index], rows[index].logits_row) for index in plain]
        parts.append(draw_tokens(logits, draws, plan, logits=logits if wants_normalizers else None))
    if changed:
        own = logits[_staged([rows[index].logits_row for index in changed], logits.device)]
        scores = _process(own.clone() if wants_normalizers else own, [rows[index] for index in changed])
        draws = [_draw_of(rows[index], place) for place, index in enumerate(changed)]
        parts.append(draw_tokens(scores, draws, plan, logits=own if wants_normalizers else None))
    if len(parts) == 1:
        return parts[0]
    order = _staged(np.argsort(plain + changed), logits.device)

    token_ids = torch.cat([logits.new_empty(0, dtype=torch.int64), *(part.token_ids for part in parts)])
    normalizers = [part.log_normalizers for part in parts if part.log_normalizers is not None]
    return Drawn(token_ids=token_ids[order], log_normalizers=torch.cat(normalizers)[order] if normalizers else None)


def _draw_of(row: SamplingRow, scores_row: int) -> Draw:
    params = row.params
    return Draw(
        row=scores_row,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        choice_index=row.choice_index,
        position=row.position,
    )


def _staged(indices: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    return to_device(torch.from_numpy(np.asarray(indices, dtype=np.int64)), device)


def _select(logits: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
    if list(wanted) == list(range(len(logits))):
        return logits
    return logits[_staged(wanted, logits.device)]


def _process(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Apply bias, penalties and masks; `scores` [num_rows, vocab_size] float32 is changed in place."""
    _add_bias(scores, rows)
    _apply_repetition_penalty(scores, rows)
    _apply_output_penalties(scores, rows)
    _mask(scores, rows)
    return scores


class _Entries:
    """Coordinates in a matrix of scores with one value each, gathered row by row."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._token_ids: list[int] = []
        self._values: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def extend(self, row: int, token_ids: Collection[int], values: Iterable[float] = ()) -> None:
        """Add those of one row, with no values at all or one each."""
        self._rows.extend([row] * len(token_ids))
        self._token_ids.extend(token_ids)
        self._values.extend(values)

    def places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        rows, token_ids = to_device(torch.tensor([self._rows, self._token_ids]), device)
        return rows, token_ids

    def change(self, scores: torch.Tensor, to: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """Replace each score, as a float64, by what `to` makes of it and its value."""
        if self:
            places = self.places(scores.device)
            values = to_device(torch.tensor(self._values, dtype=torch.float64), scores.device)
            scores[places] = to(scores[places].double(), values).float()


def _add_bias(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = _Entries()
    for place, row in enumerate(rows):
        if row.params.logit_bias:
            token_ids, biases = zip(*row.params.logit_bias, strict=True)
            entries.extend(place, token_ids, biases)
    entries.change(scores, torch.add)


def _apply_repetition_penalty(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = _Entries()
    for place, row in enumerate(rows):
        if row.params.repetition_penalty != 1:
            seen = set(row.token_ids)
            entries.extend(place, seen, [row.params.repetition_penalty] * len(seen))
    entries.change(scores, _penalised)


def _penalised(scores: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    return torch.where(scores > 0, scores / penalties, scores * penalties).clamp(-LARGEST_SCORE, LARGEST_SCORE)


def _apply_output_penalties(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = _Entries()
    for place, row in enumerate(rows):
        params = row.params
        if params.frequency_penalty or params.presence_penalty:
            addends = [
                -params.frequency_penalty * count - params.presence_penalty for count in row.output_counts.values()
            ]
            entries.extend(place, row.output_counts, addends)
    entries.change(scores, torch.add)


def _mask(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Set what may not be chosen to minus infinity.

    Where bad words and stop tokens would leave nothing of the allowed tokens, the allowed tokens win.
    """
    kept, banned = _Entries(), _Entries()
    restricted: list[int] = []
    for place, row in enumerate(rows):
        unwanted, allowed = _banned_tokens(row), row.params.allowed_token_ids
        if allowed is not None:
            restricted.append(place)
            kept.extend(place, [token_id for token_id in allowed if token_id not in unwanted] or allowed)
        elif len(unwanted) < scores.shape[1]:
            banned.extend(place, unwanted)
    if restricted:
        places = kept.places(scores.device)
        values = scores[places]
        scores.index_fill_(0, _staged(restricted, scores.device), -torch.inf)
        scores[places] = values
    if banned:
        scores.index_put_(banned.places(scores.device), scores.new_full((), -torch.inf))


def _banned_tokens(row: SamplingRow) -> set[int]:
    banned = set(row.stop_token_ids) if row.masks_stop_tokens else set()
    output = row.token_ids[row.num_prompt_tokens :] if row.params.bad_words_token_ids else ()
    for *head, last in row.params.bad_words_token_ids:
        if not head or list(output[-len(head) :]) == head:
            banned.add(last)
    return banned
