"""Exact match of an exported model on the shipped tasks, with the whole cache, greedy.

`python -m bench.tiny_model.evaluate kvserve/data/tiny --n 100 --seed 0`
Every turn is sent as a chat client would send it: the model's own answers are the history.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.harness.datasets.task_text import Sample
from bench.harness.datasets.tasks import TASKS, grade, make_samples


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, chats: list[list[dict]], limit: int, rows: int) -> list[str]:
    """One greedy reply per chat, batched over prompts of equal length."""
    prompts = [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)
        for c in chats
    ]
    by_length = defaultdict(list)
    for i, prompt in enumerate(prompts):
        by_length[len(prompt)].append(i)
    replies = [""] * len(chats)
    for length, members in by_length.items():
        for start in range(0, len(members), rows):
            group = members[start : start + rows]
            ids = torch.tensor([prompts[i] for i in group], device=model.device)
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False
            )
            texts = tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
            for i, text in zip(group, texts, strict=True):
                replies[i] = text
    return replies


def run(model: Any, tokenizer: Any, samples: list[Sample], rows: int) -> list[list[str]]:
    limit = TASKS[samples[0].task].max_new_tokens
    chats: list[list[dict]] = [[] for _ in samples]
    outputs: list[list[str]] = [[] for _ in samples]
    for turn in range(len(samples[0].turns)):
        for chat, sample in zip(chats, samples, strict=True):
            chat.append({"role": "user", "content": sample.turns[turn]})
        for chat, seen, text in zip(
            chats, outputs, answer(model, tokenizer, chats, limit, rows), strict=True
        ):
            chat.append({"role": "assistant", "content": text})
            seen.append(text)
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", type=int, default=0, help="wrong outputs to print per task")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model.to(args.device).eval()
    print(f"| task | exact match | correct prefix | n | seed | seconds | ({args.dtype})")
    for task in args.tasks:
        started = time.time()
        samples = make_samples(task, args.n, args.seed)
        outputs = run(model, tokenizer, samples, args.rows)
        grades = [grade(s, o) for s, o in zip(samples, outputs, strict=True)]
        exact = sum(g.exact for g in grades) / len(grades)
        prefix = sum(g.score for g in grades) / len(grades)
        print(
            f"| {task} | {exact:.3f} | {prefix:.3f} | {args.n} | {args.seed} "
            f"| {time.time() - started:.0f} |",
            flush=True,
        )
        wrong = [i for i, g in enumerate(grades) if g.score < 1][: args.show]
        for i in wrong:
            print(f"  want {samples[i].answers}\n  got  {outputs[i]}")


if __name__ == "__main__":
    main()
