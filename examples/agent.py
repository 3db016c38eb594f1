"""An agent with Anthropic's package: it calls tools, in a session whose KV is kept while a tool runs."""

import os
import time
import uuid

from anthropic import Anthropic

SYSTEM = "Look up what you are asked about, then answer. Mira lives in Oslo. Tom lives in Rome."
TOOLS = [
    {
        "name": "weather",
        "description": "Returns the weather in a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
]
TOOL_S = 0.5  # running time of a tool
MOST_TURNS = 4


def run_tool(name: str, arguments: dict[str, str]) -> str:
    """Return the result of a tool; a real one would ask a service."""
    time.sleep(TOOL_S)
    return {"Oslo": "Snow, -3 degrees.", "Rome": "Sunny, 18 degrees."}[arguments["city"]]


def main() -> None:
    url = os.environ.get("MOONPOOL_URL", "http://127.0.0.1:8000")
    client = Anthropic(
        base_url=url,
        api_key=os.environ.get("MOONPOOL_API_KEY", "none"),
        default_headers={"x-session-id": uuid.uuid4().hex},
    )
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "How is the weather where Tom lives?"}]
    for turn in range(MOST_TURNS):
        answer = client.messages.create(
            model=model,
            max_tokens=64,
            system=SYSTEM,
            messages=messages,
            tools=TOOLS,
            # The bundled model is no agent: it is made to call the tool once. Others decide themselves.
            tool_choice={"type": "tool", "name": "weather"} if turn == 0 else {"type": "none"},
            extra_body={"temperature": 0, "hints": {"pause_s": TOOL_S}},
        )
        usage = answer.usage
        reused, all_tokens = usage.cache_read_input_tokens, usage.input_tokens + usage.cache_read_input_tokens
        print(f"turn {turn + 1}: {answer.stop_reason}, {reused} of {all_tokens} prompt tokens reused")
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            print("".join(block.text for block in answer.content if block.type == "text"))
            return
        results = []
        for block in answer.content:
            if block.type == "tool_use":
                result = run_tool(block.name, block.input)
                print(f"  {block.name}({block.input}) -> {result}")
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
        messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    main()
