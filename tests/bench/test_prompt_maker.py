"""On both families of tokenizers: counts are exact, and nothing is shared but what is meant to be."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tests.fakes.tiny_tokenizer import byte_level, sentencepiece
from weir.bench.corpus import Corpus
from weir.bench.prompt_maker import Prompt, PromptKind, PromptMaker
from weir.bench.token_codec import LocalCodec
from weir.text.tokenizer import Tokenizer

CORPUS = Corpus.load(None)
TOKENIZERS = {
    "byte-level": Tokenizer(byte_level([" the", " of", " and", " is", "ing", " value", " to", " a"])),
    "sentencepiece with BOS": Tokenizer(
        sentencepiece(["\u2581the", "\u2581of", "ing"]), {"bos_token": "<s>", "add_bos_token": True}
    ),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


def maker(tokenizer: Tokenizer, kind: PromptKind, *, salt: str = "a", adds: bool = True) -> PromptMaker:
    return PromptMaker(LocalCodec(tokenizer), CORPUS, salt=salt, kind=kind, add_special_tokens=adds)


def ids_of(prompt: Prompt, tokenizer: Tokenizer, *, adds: bool = True) -> tuple[int, ...]:
    if isinstance(prompt.content, str):
        return tokenizer.encode(prompt.content, add_special_tokens=adds)
    return prompt.content


@pytest.mark.parametrize("kind", PromptKind)
@pytest.mark.parametrize("num_tokens", [2, 3, 17, 64, 500])
async def test_a_prompt_has_exactly_as_many_tokens(tokenizer: Tokenizer, kind: PromptKind, num_tokens: int) -> None:
    prompts = maker(tokenizer, kind)
    for _ in range(5):
        prompt = await prompts.make(num_tokens)
        assert prompt.num_tokens == num_tokens
        assert len(ids_of(prompt, tokenizer)) == num_tokens


async def test_the_text_of_a_chat_is_counted_without_special_tokens(tokenizer: Tokenizer) -> None:
    prompt = await maker(tokenizer, PromptKind.TEXT, adds=False).make(40)
    assert len(ids_of(prompt, tokenizer, adds=False)) == 40


@pytest.mark.parametrize("kind", PromptKind)
async def test_a_shared_prefix_is_shared_to_the_token_and_no_further(tokenizer: Tokenizer, kind: PromptKind) -> None:
    prompts = maker(tokenizer, kind)
    await prompts.share_prefix(48)
    first, second, third = [ids_of(await prompts.make(16), tokenizer) for _ in range(3)]
    assert [len(ids) for ids in (first, second, third)] == [64, 64, 64]
    assert first[:48] == second[:48] == third[:48]
    assert len({first[48], second[48], third[48]}) == 3
    await prompts.share_prefix(48)
    assert ids_of(await prompts.make(16), tokenizer)[:48] != first[:48]


@pytest.mark.parametrize(
    "merges",
    [
        [("Ġ", "Ġ")],  # a prefix that ends in a blank never stays what it is
        [("Ġ", "t"), ("e", "Ġt")],  # one that ends in an e does so only before some texts
    ],
)
async def test_a_prefix_never_grows_together_with_what_follows(merges: list[tuple[str, str]]) -> None:
    vocab = byte_level([]).get_vocab()
    vocab |= {"".join(pair): len(vocab) + index for index, pair in enumerate(merges)}
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    for salt in range(40):
        prompts = maker(tokenizer, PromptKind.TEXT, salt=str(salt))
        await prompts.share_prefix(20)
        made = [ids_of(await prompts.make(20), tokenizer) for _ in range(10)]
        assert len({ids[:20] for ids in made}) == 1


async def test_no_first_token_comes_twice_while_there_are_others() -> None:
    words = CORPUS.draw(random.Random(0), 4000).split()
    tokenizer = Tokenizer(byte_level([f" {word}" for word in words]))
    prompts = maker(tokenizer, PromptKind.TOKENS)
    firsts = [ids_of(await prompts.make(4), tokenizer)[0] for _ in range(40)]
    assert len(set(firsts)) == 40


async def test_first_tokens_may_come_again_once_they_are_used_up(tokenizer: Tokenizer) -> None:
    """A run is longer than the vocabulary: prompts still differ, by their next words."""
    prompts = maker(tokenizer, PromptKind.TOKENS)
    made = [ids_of(await prompts.make(64), tokenizer) for _ in range(300)]
    assert len({ids[:48] for ids in made}) == 300


@pytest.mark.parametrize("kind", PromptKind)
async def test_the_same_salt_gives_the_same_prompts_and_another_shares_no_block(
    tokenizer: Tokenizer, kind: PromptKind
) -> None:
    async def make(salt: str) -> list[tuple[int, ...]]:
        prompts = maker(tokenizer, kind, salt=salt)
        return [ids_of(await prompts.make(32), tokenizer) for _ in range(20)]

    first, again, other = await make("a"), await make("a"), await make("b")
    assert first == again
    assert not {ids[:16] for ids in first} & {ids[:16] for ids in other}


async def test_token_ids_decode_to_real_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    prompt = await maker(tokenizer, PromptKind.TOKENS).make(400)
    assert isinstance(prompt.content, tuple)
    last_words = tokenizer.decode(prompt.content).split(" ")[-6:-1]
    assert " ".join(last_words) in " ".join(CORPUS.draw(random.Random(0), 10**6).split())
