"""Queries a server of the demo model with OpenAI's own client."""

from typing import Any

import openai


def connect(port: int, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, **options)


def complete(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(**{"model": "keepsight-demo", "messages": messages, "temperature": 0} | options)


def answer(client: openai.OpenAI, messages: Any, **options: Any) -> str:
    content = complete(client, messages, **options).choices[0].message.content
    assert isinstance(content, str)
    return content
