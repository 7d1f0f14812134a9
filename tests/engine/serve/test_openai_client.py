"""The official ``openai`` package against a real server: what it asks for is what the engine gives."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from twostroke.engine.serving_loop import ServingLoop
from twostroke.stages.sampling_params import SamplingParams

PROMPT = "Once upon a time"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
RENDERED = "<system>Be brief.<user>Hello<assistant>"


def expected(loop: ServingLoop, prompt: Any = PROMPT, **fields: Any) -> Any:
    """What the loop gives without a server."""
    return loop.add(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 12, **fields})).result(30)


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "twostroke")
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_completion(client: openai.OpenAI, served: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=12)
    want = expected(served.loop)
    assert answer.choices[0].text == want.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 12)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"


def test_a_streamed_completion_is_the_same(client: openai.OpenAI, served: Any) -> None:
    fields: Any = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    stream = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected(served.loop).text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == len(PROMPT) + 12
    assert {chunk.id for chunk in chunks} == {last.id}


def test_several_prompts_and_several_completions(client: openai.OpenAI, served: Any) -> None:
    prompts = ["one", "two", "three"]
    fields: Any = {"model": "tiny", "prompt": prompts, "n": 2, "seed": 7, "max_tokens": 6}
    answer = client.completions.create(**fields)
    wanted = [expected(served.loop, prompt, temperature=1.0, seed=7, n=2, max_tokens=6) for prompt in prompts]
    texts = [output.text for result in wanted for output in result.outputs]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(6))
    streamed = [""] * 6
    for chunk in client.completions.create(**fields, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_token_ids_are_a_prompt_too(client: openai.OpenAI, served: Any) -> None:
    ids = [5, 6, 7, 8]
    answer = client.completions.create(model="tiny", prompt=ids, temperature=0, max_tokens=12)
    assert answer.choices[0].text == expected(served.loop, ids).text
    many = client.completions.create(model="tiny", prompt=[ids, [9, 10]], temperature=0, max_tokens=12)
    assert [choice.text for choice in many.choices] == [answer.choices[0].text, expected(served.loop, [9, 10]).text]


def test_logprobs_of_a_completion_with_its_prompt(client: openai.OpenAI, served: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=4, logprobs=2, echo=True)
    want = expected(served.loop, max_tokens=4, logprobs=2, prompt_logprobs=2)
    choice = answer.choices[0]
    assert choice.text == PROMPT + want.text
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    chosen = [
        position[token].logprob
        for token, position in zip(want.prompt_token_ids[1:], want.prompt_logprobs[1:], strict=True)
    ]
    chosen += [
        position[token].logprob
        for token, position in zip(want.outputs[0].token_ids, want.outputs[0].logprobs, strict=True)
    ]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(chosen, abs=1e-4)
    offsets, tokens = choice.logprobs.text_offset or [], choice.logprobs.tokens or []
    assert offsets == sorted(offsets)
    for offset, token in zip(offsets, tokens, strict=True):
        assert token.startswith("bytes:") or choice.text[offset] == token


def test_offsets_of_tokens_count_characters(client: openai.OpenAI) -> None:
    text = "aé😀b"
    scored = client.completions.create(model="tiny", prompt=text, echo=True, max_tokens=0, logprobs=0).choices[0]
    assert scored.text == text
    assert scored.logprobs is not None
    assert scored.logprobs.text_offset == [0, 1, 1, 2, 2, 2, 2, 3]


def test_the_prompt_alone_can_be_scored(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)
    choice = answer.choices[0]
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or ()) == len(PROMPT)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_a_chat(client: openai.OpenAI, served: Any) -> None:
    fields: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
    answer = client.chat.completions.create(**fields)
    want = expected(served.loop, RENDERED).text
    assert answer.choices[0].message.content == want
    assert answer.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 6}
    answer = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == 6
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    chunks = list(client.chat.completions.create(**fields, logprobs=True, top_logprobs=3, stream=True))
    streamed = [entry for chunk in chunks for entry in getattr(chunk.choices[0].logprobs, "content", None) or ()]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_stop_strings_tokens_bias_and_extensions(client: openai.OpenAI, served: Any) -> None:
    whole = expected(served.loop, max_tokens=40)
    text = whole.text
    stop = text[5:8]
    fields: Any = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 40}
    cut = client.completions.create(**fields, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    token = whole.outputs[0].token_ids[3]
    stopped = client.completions.create(**fields, extra_body={"stop_token_ids": [token]}).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == token  # pyright: ignore[reportAttributeAccessIssue]
    biased = client.completions.create(**fields, logit_bias={"65": 100}).choices[0]
    assert set(biased.text) == {served.service.token_texts.of(65)[0]}
    allowed = client.completions.create(**fields, extra_body={"allowed_token_ids": [70], "top_k": 3, "min_p": 0.1})
    assert set(allowed.choices[0].text) == {served.service.token_texts.of(70)[0]}


def test_the_same_seed_gives_the_same_text(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 10, "temperature": 1.0}
    texts = [client.chat.completions.create(**fields, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_asynchronous_client_and_many_streams_at_once(served: Any) -> None:
    async def one(client: openai.AsyncOpenAI, index: int) -> str:
        stream = await client.completions.create(
            model="tiny", prompt=f"prompt {index}", temperature=0, max_tokens=12, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> list[str]:
        async with served.openai_async() as client:
            assert (await client.models.list()).data[0].id == "tiny"
            return await asyncio.gather(*(one(client, index) for index in range(12)))

    texts = asyncio.run(everyone())
    assert texts == [expected(served.loop, f"prompt {index}").text for index in range(12)]


def test_errors_of_the_official_client_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="x")
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as strange:
        client.completions.create(model="tiny", prompt="x", extra_body={"temprature": 1})
    assert strange.value.param == "temprature"
    assert "temperature" in str(strange.value)


def test_a_conversation_is_tokenized_as_a_chat_reads_it(http: httpx.Client, client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "hi"},
    ]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert len(tokens) > 20
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens)
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "<system>be brief<user>hi<assistant>"


def test_tokenize_and_back(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len("héllo".encode()) == len(tokens["token_strs"])
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "héllo"}
    chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {"prompt": RENDERED}
