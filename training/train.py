"""The whole recipe of the bundled model: `python -m training.train`.

Renders clips, trains, publishes the model directory at every evaluation, and prints the accuracy per codec and kind of
question at the end: of the bundled weights 99.7 % on videos and images of its renderer, 98 % for lists of two or three
items, 97 % on videos of another renderer. It takes an hour on two CPU cores. It can be stopped at any time; the same
command goes on from the last checkpoint.

What makes it learn at this size: Xavier initialisation, and an auxiliary head that names colour, shape and motion from
the vision tower's features. The tower learns by the head first, from single temporal patches: more clips per processor
second, and shapes are learned in fewer steps than from whole clips. Then the conversations begin. Matrices learn by
Muon, faster than by AdamW. Without the head the loss stands still for more than a thousand steps.
"""

import argparse
import copy
import json
import math
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from training import evaluate, forward
from training import model as demo_model
from training.data import Item, Sample, Writer, make_item, moment, varied
from training.pool import Pool

PARTS = ("model", "average", "head", "muon", "adamw")  # of a checkpoint: attributes of a trainer


@dataclass
class Settings:
    """The recipe's numbers."""

    steps: int = 13_000
    patches: int = 1800  # of a batch of conversations, about 18 clips
    patches_alone: int = 1000  # of a batch while the tower learns alone, about 45 temporal patches
    lr: float = 1.5e-3
    muon: float = 10  # learning rate of Muon over that of AdamW
    warmup: int = 100
    decay: float = 0.2  # the last share of the steps, over which the learning rate falls to zero
    aux: float = 0.5  # weight of the auxiliary loss
    ema: float = 0.998  # the published weights are a running average
    alone: int = 7000  # steps of the vision tower alone
    pool: int = 20_480  # rendered items
    pool_start: int = 1024  # items to wait for before the first step
    every: int = 500  # steps between evaluations and checkpoints
    held_out: int = 192  # items of an evaluation
    seed: int = 0


class Trainer:
    """Model, running average, optimiser and step count; `work` holds the checkpoint and the rendered items."""

    def __init__(self, settings: Settings, work: Path, device: str) -> None:
        self.settings, self.work, self.device = settings, work, device
        work.mkdir(parents=True, exist_ok=True)
        self.model = demo_model.make_model(settings.seed).to(device)
        self.average = copy.deepcopy(self.model).eval()
        self.head = forward.AttributeHead(self.model.config.vision_config.out_hidden_size).to(device)
        self.muon, self.adamw = self._optimisers()
        self.step = 0
        self.writer = Writer(PreTrainedTokenizerFast.from_pretrained(demo_model.WEIGHTS))

    def _optimisers(self) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
        """Muon for the matrices of the blocks; AdamW for vectors, embeddings and what is first or last."""
        parameters = [*self.model.named_parameters(), *self.head.named_parameters()]
        hidden = {name: p for name, p in parameters if p.ndim == 2 and (".blocks." in name or ".layers." in name)}
        others = [p for name, p in parameters if name not in hidden]
        return torch.optim.Muon(hidden.values(), weight_decay=0.0), torch.optim.AdamW(others, betas=(0.9, 0.98))

    def learning_rate(self) -> float:
        """Linear warm-up, a plateau, a linear fall to zero."""
        s = self.settings
        left = (s.steps - self.step) / max(1.0, s.steps * s.decay)
        return s.lr * min(1.0, (self.step + 1) / s.warmup, max(left, 0.0))

    def samples(self, pool: Pool, rng: np.random.Generator) -> list[Sample]:
        """Conversations, or single items while the tower learns alone, until the batch holds enough patches."""
        chosen: list[Sample] = []
        patches, alone = 0, self.step < self.settings.alone
        while patches < (self.settings.patches_alone if alone else self.settings.patches):
            count = 1 if alone else int(rng.choice(4, p=[0.04, 0.40, 0.33, 0.23]))
            items = tuple(varied(pool.draw(rng), rng) for _ in range(count))
            if alone:
                chosen.append(Sample((moment(items[0], rng),), ""))
            else:
                chosen.append(self.writer.sample(items, rng))
            patches += sum(math.prod(item.grid) for item in chosen[-1].items)
        return chosen

    def train_step(self, samples: list[Sample]) -> tuple[float, float]:
        """One optimiser step; returns the losses of the answers and of the auxiliary head."""
        for optimiser, factor in ((self.muon, self.settings.muon), (self.adamw, 1.0)):
            optimiser.param_groups[0]["lr"] = self.learning_rate() * factor
        items = [item for sample in samples for item in sample.items]
        if self.step < self.settings.alone:
            features, answers = forward.vision_features(self.model.model.visual, items), torch.zeros(())
        else:
            outputs = forward.run(self.model, self.writer.batch(samples))
            features, answers = outputs.features, F.cross_entropy(outputs.logits, outputs.targets)
        attributes = self.head.loss(features, items)
        self.muon.zero_grad()
        self.adamw.zero_grad()
        (answers + self.settings.aux * attributes).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step()
        self.adamw.step()
        self.step += 1
        with torch.no_grad():
            keep = min(self.settings.ema, self.step / (self.step + 10))
            for slow, fast in zip(self.average.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, 1 - keep)
        return answers.item(), attributes.item()

    def save(self) -> None:
        """Write the checkpoint, in one step."""
        state = {name: getattr(self, name).state_dict() for name in PARTS}
        partial = self.work / "checkpoint.part"
        torch.save({**state, "step": self.step}, partial)
        os.replace(partial, self.work / "checkpoint.pt")

    def resume(self) -> bool:
        """Go on from the checkpoint, if there is one."""
        path = self.work / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, map_location=self.device, weights_only=True)
        for name in PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.step = state["step"]
        return True

    def judge(self, items: list[Item], out: Path, note: dict) -> dict[str, float]:
        """Evaluate the average, publish it, log a line, keep a checkpoint."""
        share = evaluate.quick(self.average, self.writer, items) if self.step > self.settings.alone else {}
        score = sum(share.values()) / max(1, len(share))
        demo_model.publish(out, self.average.state_dict())
        self.save()
        with open(self.work / "log.jsonl", "a") as log:
            log.write(json.dumps({"step": self.step, "score": score, **note, **share}) + "\n")
        return share


def train(trainer: Trainer, out: Path, workers: int) -> None:
    """Train to the last step, publishing into `out` on the way."""
    settings = trainer.settings
    pool = Pool(trainer.work / "pool", settings.pool, workers)
    try:
        tests = [make_item(evaluate.FRESH_SEEDS + number) for number in range(settings.held_out)]  # in no pool
        bar = tqdm(total=settings.steps, initial=trainer.step, unit="step")
        mean = np.zeros(2)
        while trainer.step < settings.steps:
            pool.wait_for(settings.pool_start)
            rng = np.random.default_rng([settings.seed, trainer.step])
            mean += (np.array(trainer.train_step(trainer.samples(pool, rng))) - mean) * 0.05
            bar.update()
            bar.set_postfix(answers=f"{mean[0]:.4f}", attributes=f"{mean[1]:.3f}", pool=len(pool.items))
            if trainer.step % settings.every == 0 or trainer.step == settings.steps:
                share = trainer.judge(tests, out, {"answers": mean[0], "attributes": mean[1]})
                bar.write(f"step {trainer.step}: " + ", ".join(f"{k} {100 * v:.1f}" for k, v in share.items()))
    finally:
        pool.close()


def main() -> None:
    """Read the command line, train, print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=demo_model.WEIGHTS, help="model directory to write")
    parser.add_argument("--work", type=Path, default=Path("runs/demo"), help="checkpoint, log and rendered clips")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="number of torch threads")
    parser.add_argument("--workers", type=int, default=1, help="processes that render clips")
    parser.add_argument("--count", type=int, default=30, help="fresh seeds per row of the final table")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the rendering processes are stopped too
    torch.set_num_threads(arguments.threads)
    settings = Settings(**{name: getattr(arguments, name) for name in asdict(Settings())})
    trainer = Trainer(settings, arguments.work, arguments.device)
    if trainer.resume():
        print(f"resuming at step {trainer.step}")
    train(trainer, arguments.out, arguments.workers)
    print(evaluate.table(evaluate.measure(arguments.out, arguments.count)))


if __name__ == "__main__":
    main()
