"""An answer that a JSON Schema prescribes, with OpenAI's Responses API."""

import json
import os

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Mira", "Tom"]}, "city": {"enum": ["Oslo", "Rome"]}},
    "required": ["name", "city"],
    "additionalProperties": False,
}


def main() -> None:
    url = os.environ.get("MOONPOOL_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("MOONPOOL_API_KEY", "none"))
    response = client.responses.create(
        model=client.models.list().data[0].id,
        input="Mira lives in Oslo. Tom lives in Rome. Where does Mira live?",
        max_output_tokens=64,
        temperature=0,
        text={"format": {"type": "json_schema", "name": "home", "schema": SCHEMA}},
    )
    for item in response.output:
        if item.type == "reasoning":
            print("reasoning:", "".join(part.text for part in item.content))
    print("answer:", json.loads(response.output_text))


if __name__ == "__main__":
    main()
