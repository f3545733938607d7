"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.choices import ChoiceDelta
from gateway.logprobs import completion_logprobs, echoed_logprobs, joined_logprobs, prompt_logprobs
from gateway.openai_api import CompletionRequest
from gateway.rendering import Answer, ChunkFrame, Json, text_to_json, usage_fields

KIND = "text_completion"
_PLAIN_END = ',"logprobs":null,"finish_reason":null}]'


class CompletionRendering:
    """Writes `text_completion` objects, whole or in chunks."""

    def __init__(self, request: CompletionRequest, answer: Answer) -> None:
        self._request = request
        self._answer = answer
        self._frame = ChunkFrame(answer, request, KIND)

    def opening(self, index: int) -> str:
        """The repeated prompt, and its token ids, if asked for."""
        if not (self._request.echo or self._request.return_token_ids):
            return ""
        prompt = self._answer.prompts[index // self._request.n]
        choice: Json = {"index": index, "text": prompt.text, "logprobs": None, "finish_reason": None}
        if self._request.echo and self._request.logprobs is not None:
            choice["logprobs"] = self._echoed_logprobs(index)
        if self._request.return_token_ids:
            choice["prompt_token_ids"] = prompt.token_ids
        return self._frame.chunk(choice)

    def event(self, delta: ChoiceDelta) -> str:
        if delta.tokens or delta.finish_reason is not None:
            return self._frame.chunk(self._choice(delta, delta.text, self._logprobs(delta)))
        frame = self._frame
        return f'{frame.choice_head}{delta.index},"text":{text_to_json(delta.text)}{_PLAIN_END}{frame.tail}'

    def usage_event(self) -> str:
        return self._frame.usage_event()

    def body(self, choices: Sequence[ChoiceDelta]) -> Json:
        answer = self._answer
        return {
            **answer.head(KIND),
            "choices": [self._whole_choice(delta) for delta in choices],
            "usage": usage_fields(answer.generation.usage),
        }

    def _whole_choice(self, delta: ChoiceDelta) -> Json:
        prompt_index = delta.index // self._request.n
        prompt = self._answer.prompts[prompt_index]
        logprobs = self._logprobs(delta)
        if logprobs is not None and self._request.echo:
            logprobs = joined_logprobs(self._echoed_logprobs(delta.index), logprobs)
        choice = self._choice(delta, prompt.text + delta.text, logprobs)
        if self._request.return_token_ids:
            choice["prompt_token_ids"] = prompt.token_ids
        if self._request.prompt_logprobs is not None:
            known = self._answer.generation.prompt_logprobs[prompt_index]
            choice["prompt_logprobs"] = prompt_logprobs(known, self._answer.model.tokenizer)
        return choice

    def _choice(self, delta: ChoiceDelta, text: str, logprobs: Json | None) -> Json:
        choice: Json = {"index": delta.index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
        return choice

    def _logprobs(self, delta: ChoiceDelta) -> Json | None:
        if self._request.logprobs is None:
            return None
        base_offset = len(self._answer.prompts[delta.index // self._request.n].text)
        return completion_logprobs(delta.tokens, self._answer.model.tokenizer, base_offset=base_offset)

    def _echoed_logprobs(self, index: int) -> Json:
        prompt_index = index // self._request.n
        return echoed_logprobs(
            self._answer.prompts[prompt_index].token_ids,
            self._answer.generation.prompt_logprobs[prompt_index],
            self._answer.model.tokenizer,
        )
