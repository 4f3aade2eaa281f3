"""Talk to `vtoken serve` with the openai package; nothing in it is special to vToken but one field.

vtoken serve --policy h2o --eviction-ratio 0.5
python examples/client_openai.py http://127.0.0.1:8000 [API_KEY]
"""

from __future__ import annotations

import sys

import openai


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    key = sys.argv[2] if len(sys.argv) > 2 else "none"
    client = openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Why is the sky blue? Two sentences."}]

    print("--- as the server was started, streamed")
    for chunk in client.chat.completions.create(
        model=model, messages=messages, max_tokens=80, stream=True
    ):
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    # Options of one request: vtoken_enabled, vtoken_policy, and one of vtoken_eviction_ratio and
    # vtoken_kv_budget_tokens. They are extra fields of the body, which openai passes on.
    for title, options in (
        ("this request keeps every token", {"vtoken_enabled": False}),
        ("this request keeps 64 tokens, the first and the newest",
         {"vtoken_policy": "streaming-llm", "vtoken_kv_budget_tokens": 64}),
    ):  # fmt: skip
        print(f"--- {title}")
        try:
            answer = client.chat.completions.create(
                model=model, messages=messages, max_tokens=80, extra_body={"vllm_xargs": options}
            )
            print(answer.choices[0].message.content)
        except openai.BadRequestError as error:
            print(f"refused: {error.body['message']}")


if __name__ == "__main__":
    main()
