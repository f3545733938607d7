"""LLM: the offline API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from tests.fakes.model_runner import VOCAB_SIZE, FakeModelRunner, expected_output, make_request
from weir.core.errors import ConfigError, HopFailedError, InvalidRequestError, ModelLoadError
from weir.core.request import FinishReason, SamplingParams
from weir.engine.batch import Batch
from weir.engine.config import EngineConfig
from weir.engine.llm import LLM

PROMPTS = [list(range(3, 3 + length)) for length in (1, 9, 20)]


def make_llm(model_dir: Path | str = "fake", **settings: object) -> LLM:
    defaults: dict[str, object] = {"device": "cpu", "block_size": 4, "num_blocks": 32}
    return LLM(model_dir, load_runner=FakeModelRunner, **(defaults | settings))


def write_tokenizer(model_dir: Path) -> None:
    """Token id n is written `<n>`."""
    vocab = {f"<{token_id}>": token_id for token_id in range(VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<0>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.save(str(model_dir / "tokenizer.json"))
    (model_dir / "tokenizer_config.json").write_text(json.dumps({}))


def test_ids_in_ids_out_in_order() -> None:
    llm = make_llm()
    sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=9, ignore_eos=True, logprobs=1)
    found = llm.generate(PROMPTS, sampling)
    for prompt, generation in zip(PROMPTS, found, strict=True):
        request = make_request("s", prompt, temperature=0.7, seed=3, max_tokens=9)
        assert (generation.token_ids, generation.finish_reason) == expected_output(request)
        assert generation.prompt_token_ids == tuple(prompt)
        assert len(generation.logprobs) == 9
        assert generation.text == ""
    llm.check_integrity()


def test_result_does_not_depend_on_neighbours_or_earlier_calls() -> None:
    llm = make_llm(num_blocks=12)
    sampling = [SamplingParams(seed=index, max_tokens=12, prompt_logprobs=0) for index in range(3)]
    together = llm.generate(PROMPTS, sampling)
    for prompt, params, generation in zip(PROMPTS, sampling, together, strict=True):
        (alone,) = llm.generate([prompt], params)
        assert alone.token_ids == generation.token_ids
        assert len(alone.prompt_logprobs) == len(prompt) - 1
    llm.check_integrity()


def test_text_in_text_out(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    llm = make_llm(tmp_path)
    (generation,) = llm.generate(["<5> <6> <7>"], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert generation.prompt_token_ids == (5, 6, 7)
    assert generation.text.split() == [] or generation.text == llm.tokenizer.decode(generation.token_ids)
    assert generation.text.count("<") == 3


def test_text_without_a_tokenizer_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        make_llm(tmp_path).generate(["hello"])


def test_defaults_are_those_of_sampling_params() -> None:
    (generation,) = make_llm().generate([[1, 2, 3]])
    assert len(generation.token_ids) <= 16
    assert generation.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_bad_prompt_stops_the_call_and_leaves_nothing() -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate([[1, 2], []])
    with pytest.raises(InvalidRequestError, match="list of prompts"):
        llm.generate("hello")
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 sampling"):
        llm.generate([[1], [2]], [SamplingParams()])
    llm.check_integrity()
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_failing_model_is_an_error_and_not_a_short_answer() -> None:
    class BrokenRunner(FakeModelRunner):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            self.before_execute = self.refuse

        def refuse(self, batch: Batch) -> None:
            raise RuntimeError("device lost")

    llm = LLM("fake", load_runner=BrokenRunner, device="cpu", block_size=4, num_blocks=32)
    with pytest.raises(HopFailedError):
        llm.generate([[1, 2, 3], [4]])


def test_settings_are_those_of_the_engine() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        make_llm(block_size=0)
    with pytest.raises(TypeError, match="blok_size"):
        make_llm(blok_size=4)


def test_package_gives_it_lazily() -> None:
    import weir

    assert weir.LLM is LLM
