"""A chat of several turns with OpenAI's package: streamed, and with the tokens of each prompt that were reused."""

import os

from openai import OpenAI

FACTS = "Mira lives in Oslo. She is a baker and has a cat. Tom lives in Rome and plays the piano."
QUESTIONS = ("Where does Tom live?", "What is Mira?", "Where does Mira live?")


def main() -> None:
    url = os.environ.get("MOONPOOL_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("MOONPOOL_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages = []
    for question in QUESTIONS:
        content = question if messages else f"{FACTS} {question}"
        messages.append({"role": "user", "content": content})
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        print(f"> {question}\n", end="")
        answer = ""
        for chunk in stream:
            for choice in chunk.choices:
                text = choice.delta.content or ""
                answer += text
                print(text, end="", flush=True)
            if chunk.usage:
                cached = chunk.usage.prompt_tokens_details.cached_tokens
                print(f"\n  {cached} of {chunk.usage.prompt_tokens} prompt tokens reused")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
