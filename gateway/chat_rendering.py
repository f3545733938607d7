"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.choices import ChoiceDelta
from gateway.logprobs import chat_logprobs, prompt_logprobs
from gateway.openai_api import ChatCompletionRequest
from gateway.rendering import Answer, ChunkFrame, Json, text_to_json, usage_fields

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"
_PLAIN_END = '},"logprobs":null,"finish_reason":null}]'


class ChatRendering:
    """Writes `chat.completion` objects, whole or in chunks."""

    def __init__(self, request: ChatCompletionRequest, answer: Answer) -> None:
        self._request = request
        self._answer = answer
        self._prompt = answer.prompts[0]
        self._frame = ChunkFrame(answer, request, CHUNK_KIND)

    def opening(self, index: int) -> str:
        """The role, the repeated message if asked for, and once the prompt's token ids if asked for."""
        choice: Json = {
            "index": index,
            "delta": {"role": "assistant", "content": self._prompt.text},
            "logprobs": None,
            "finish_reason": None,
        }
        with_ids = self._request.return_token_ids and index == 0
        return self._frame.chunk(choice, {"prompt_token_ids": self._prompt.token_ids} if with_ids else None)

    def event(self, delta: ChoiceDelta) -> str:
        if delta.tokens or delta.finish_reason is not None:
            choice: Json = {"index": delta.index, "delta": {"content": delta.text} if delta.text else {}}
            return self._frame.chunk({**choice, **self._ending(delta)})
        frame = self._frame
        text = text_to_json(delta.text)
        return f'{frame.choice_head}{delta.index},"delta":{{"content":{text}{_PLAIN_END}{frame.tail}'

    def usage_event(self) -> str:
        return self._frame.usage_event()

    def body(self, choices: Sequence[ChoiceDelta]) -> Json:
        answer = self._answer
        body: Json = {
            **answer.head(KIND),
            "choices": [self._whole_choice(delta) for delta in choices],
            "usage": usage_fields(answer.generation.usage),
        }
        if self._request.return_token_ids:
            body["prompt_token_ids"] = self._prompt.token_ids
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(answer.generation.prompt_logprobs[0], answer.model.tokenizer)
        return body

    def _whole_choice(self, delta: ChoiceDelta) -> Json:
        message = {"role": "assistant", "content": self._prompt.text + delta.text, "refusal": None}
        return {"index": delta.index, "message": message, **self._ending(delta)}

    def _ending(self, delta: ChoiceDelta) -> Json:
        """What follows the text in a choice, whole or in a chunk."""
        ending: Json = {"logprobs": None, "finish_reason": delta.finish_reason}
        if self._request.logprobs:
            ending["logprobs"] = chat_logprobs(delta.tokens, self._answer.model.tokenizer)
        if delta.finish_reason is not None:
            ending["stop_reason"] = delta.stop_reason
        if self._request.return_token_ids:
            ending["token_ids"] = [token.token_id for token in delta.tokens]
        return ending
