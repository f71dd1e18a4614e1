"""Train a model by its recipe, in one process, on a CPU or a GPU.

`python -m bench.tiny_model.train --recipe tiny-long --out /tmp/tiny-long`; run it again to resume.
The model is exported to `model/` beside the checkpoint when the budget is spent. Row lengths grow
when every task of a stage is learnt; the learning rate reaches zero with the budget.
"""

import argparse
import json
import logging
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.tiny_model.data import Batch, Documents
from bench.tiny_model.export import export
from bench.tiny_model.model import ModelConfig, TinyLlama
from bench.tiny_model.muon import Muon
from bench.tiny_model.recipes import RECIPES
from bench.tiny_model.structure import init_structure
from bench.tiny_model.tokenizer import build_tokenizer

log = logging.getLogger("tiny_model")


@dataclass
class Progress:
    """What a resumed run continues from; `accuracy` is a moving average per task."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accuracy: dict[str, float] = field(default_factory=dict)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="tiny", choices=list(RECIPES))
    parser.add_argument("--minutes", type=float, default=30.0, help="CPU time of the process")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--muon-lr", type=float, default=0.005)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--decay-share", type=float, default=0.6)
    parser.add_argument("--pass-accuracy", type=float, default=0.95)
    parser.add_argument("--save-every", type=float, default=3.0, help="minutes")
    return parser.parse_args()


def build_model(args: argparse.Namespace, digits: list[int]) -> TinyLlama:
    recipe = RECIPES[args.recipe]
    config = ModelConfig(
        vocab_size=recipe.vocab_size,
        max_positions=recipe.max_positions,
        rope_theta=recipe.rope_theta,
        hidden_size=recipe.size.hidden,
        num_layers=recipe.size.layers,
        num_heads=recipe.size.heads,
        num_kv_heads=recipe.size.kv_heads,
        intermediate_size=3 * recipe.size.hidden,
    )
    model = TinyLlama(config)
    model.init_weights()
    init_structure(model, digits)
    return model.to(args.device)


def build_optimizers(model: TinyLlama, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    hidden = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.model.layers.parameters() if p.ndim == 1]
    rest += [*model.model.embed_tokens.parameters(), *model.model.norm.parameters()]
    optimizers = [
        Muon(hidden, lr=args.muon_lr),
        torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.recipe = RECIPES[args.recipe]
        tokenizer = build_tokenizer(self.recipe)
        self.documents = Documents(tokenizer, self.recipe)
        self.model = build_model(args, [tokenizer.get_vocab()[digit] for digit in "0123456789"])
        self.optimizers = build_optimizers(self.model, args)
        self.progress = Progress()
        self.checkpoint = args.out / "checkpoint.pt"
        self.hard = torch.from_numpy(self.documents.hard)

    def load(self) -> None:
        saved = torch.load(self.checkpoint, map_location=self.args.device)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.progress = Progress(**saved["progress"])
        log.info("resumed at step %d", self.progress.step)

    def save(self) -> None:
        saved = {
            "recipe": self.args.recipe,
            "config": asdict(self.model.config),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        partial = self.checkpoint.with_suffix(".part")
        torch.save(saved, partial)
        partial.replace(self.checkpoint)
        summary = json.dumps(asdict(self.progress), indent=2)
        (self.args.out / "progress.json").write_text(summary + "\n")

    def schedule(self) -> float:
        """Constant after a short warm-up, then linear to zero at the end of the budget."""
        left = 1.0 - self.progress.seconds / (60 * self.args.minutes)
        factor = min(1.0, left / self.args.decay_share, (self.progress.step + 1) / 20)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * max(0.0, factor)
        return factor

    def pick_length(self) -> int:
        """Most batches have the stage's length, the others an earlier or a longer one."""
        stages, stage = self.recipe.stages, self.progress.stage
        draw = torch.rand(2, generator=torch.Generator().manual_seed(self.progress.step)).tolist()
        if stage == len(stages) - 1:
            for length, share in self.recipe.longer.items():
                if draw[0] < share:
                    return length
                draw[0] -= share
        if stage == 0 or draw[0] < 0.6:
            return stages[stage]
        earlier = stages[1:stage] or stages[:1]
        return earlier[int(draw[1] * len(earlier))]

    def train_step(self, batch: Batch) -> tuple[float, Tensor]:
        """Update the weights once; the loss and, per row, the share of right hard tokens."""
        device = self.args.device
        ids, positions, targets, weights = (
            torch.from_numpy(array).to(device)
            for array in (batch.ids, batch.positions, batch.targets, batch.weights)
        )
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = self.model(ids, positions)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        asked = (weights >= 1) & self.hard.to(device)[targets]
        right = (logits.argmax(-1) == targets) & asked
        return loss.item(), (right.sum(-1) / asked.sum(-1)).cpu()

    def advance(self, batch: Batch, shares: Tensor) -> None:
        """Update the accuracies, and end the stage when all are high or it is late."""
        progress = self.progress
        for task, share in zip(batch.tasks, shares.tolist(), strict=True):
            if not math.isnan(share):  # rows without a hard token
                progress.accuracy[task] = 0.97 * progress.accuracy.get(task, 0.0) + 0.03 * share
        if progress.stage == len(self.recipe.stages) - 1:
            return
        learnt = min(progress.accuracy.values()) > self.args.pass_accuracy
        late = progress.seconds > 60 * self.args.minutes * self.recipe.latest[progress.stage]
        if late or (learnt and progress.stage_step > 50):
            log.info("stage %d ends: %s", progress.stage, progress.accuracy)
            progress.stage, progress.stage_step, progress.accuracy = progress.stage + 1, 0, {}

    def run(self) -> None:
        progress, losses = self.progress, 0.0
        started = time.process_time() - progress.seconds
        saved = time.time()
        while progress.seconds < 60 * self.args.minutes:
            factor = self.schedule()
            length = self.pick_length()
            tokens = self.args.tokens_per_step * (1 if progress.stage < 2 else 2)
            batch = self.documents.batch(progress.step, length, tokens)
            loss, shares = self.train_step(batch)
            losses += loss
            progress.step += 1
            progress.stage_step += 1
            progress.tokens += batch.ids.size
            progress.seconds = time.process_time() - started
            if length == self.recipe.stages[progress.stage]:
                self.advance(batch, shares)
            if progress.step % 50 == 0:
                self.report(losses / 50, factor)
                losses = 0.0
            if time.time() - saved > 60 * self.args.save_every:
                self.save()
                saved = time.time()
        self.save()

    def report(self, loss: float, factor: float) -> None:
        p = self.progress
        log.info(
            "step %d  %.1f min  %.2f M tokens  %.0f tok/s  length %d  lr %.2f  loss %.4f | %s",
            p.step,
            p.seconds / 60,
            p.tokens / 1e6,
            p.tokens / p.seconds,
            self.recipe.stages[p.stage],
            factor,
            loss,
            " ".join(f"{task} {accuracy:.3f}" for task, accuracy in sorted(p.accuracy.items())),
        )


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    torch.manual_seed(RECIPES[args.recipe].seed)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    if trainer.checkpoint.exists():
        trainer.load()
    log.info("%.2f M parameters", sum(p.numel() for p in trainer.model.parameters()) / 1e6)
    trainer.run()
    export(trainer.checkpoint, args.out / "model")


if __name__ == "__main__":
    main()
