"""The official client works unchanged: both APIs, both forms, both flavours."""

from __future__ import annotations

import asyncio

import openai
import pytest

from schemas.errors import EngineFailed, Overloaded
from tests.support.edge_peer import MODEL, Answer, edge_setup

pytestmark = pytest.mark.anyio

ASK: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def test_the_async_client_reads_whole_answers_and_streams() -> None:
    """Text, roles, reasons and usage arrive in its own types."""
    async with edge_setup() as s, openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(model=MODEL, messages=ASK)
        stream = await client.chat.completions.create(
            model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = await client.completions.create(model=MODEL, prompt="hi")
        models = [m.id async for m in client.models.list()]

    assert whole.choices[0].message.content == "Hello!" and whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.total_tokens == 8
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert text.choices[0].text == "Hello!"
    assert models == ["tiny", "alias"]


async def test_the_sync_client_reads_whole_answers_and_streams() -> None:
    """From another thread, as its users do."""
    async with edge_setup() as s:

        def work() -> tuple[str | None, str, str]:
            with openai.OpenAI(base_url=f"{s.url}/v1", api_key="none") as client:
                whole = client.chat.completions.create(model=MODEL, messages=ASK)
                stream = client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
                chat_text = "".join(c.choices[0].delta.content or "" for c in stream)
                pieces = client.completions.create(model=MODEL, prompt="hi", stream=True)
                return whole.choices[0].message.content, chat_text, "".join(p.choices[0].text for p in pieces)

        assert await asyncio.to_thread(work) == ("Hello!", "Hello!", "Hello!")


async def test_sixteen_at_once_each_get_their_own_answer() -> None:
    """Nothing is mixed up between them."""
    async with edge_setup(lambda submit: Answer(texts=[[submit.body["messages"][0]["content"], "!"]])) as s:
        async with openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none") as client:

            async def one(i: int) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": f"n{i}"}], stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            answers = await asyncio.gather(*(one(i) for i in range(16)))

    assert answers == [f"n{i}!" for i in range(16)]


async def test_failures_raise_the_clients_own_errors() -> None:
    """A status before the first byte, an API error in mid-stream, never a short answer."""
    async with edge_setup() as s:
        async with openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(model=MODEL, messages=ASK, temperature=3)
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="nope", messages=ASK, stream=True)
            s.peer.answer = lambda _s: Answer(refuse=Overloaded("full"))
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
            s.peer.answer = lambda _s: Answer(fail_at=(2, EngineFailed("boom")))
            stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
            seen = []
            with pytest.raises(openai.APIError, match="boom"):
                async for chunk in stream:
                    seen.append(chunk)

    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    assert all(c.choices[0].finish_reason is None for c in seen)


async def test_leaving_a_stream_early_cancels_the_work() -> None:
    """Closing the client's stream is enough."""
    async with edge_setup(Answer(hold_at=1)) as s:
        async with openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
            async for _ in stream:
                break
            await stream.close()
            await s.until(lambda: s.peer.cancels and s.edge.idle)
