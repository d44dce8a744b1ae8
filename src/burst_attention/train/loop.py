"""The training loop of one rank: data, steps, checkpoints, and what is said about them."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burst_attention.integrations.batch import shard_batch
from burst_attention.layout import Layout
from burst_attention.ring import Ring
from burst_attention.train import checkpoint
from burst_attention.train.config import CHECKPOINTS, TrainConfig
from burst_attention.train.data import BYTES, Packed, PackedData, load_data, load_tokenizer, sequence_index
from burst_attention.train.export import export, refuse_foreign
from burst_attention.train.flops import peak_flops, step_flops
from burst_attention.train.memory import give_back_blocks_above, peak_memory
from burst_attention.train.model import TrainedModel, make_model, require_transformers
from burst_attention.train.parallel import Ranks, agreed, clip_gradients, make_ring, shard_model
from burst_attention.train.record import Display, Headline, Log, Mirrors, StepRecord, read_log
from burst_attention.train.report import write_report
from burst_attention.train.stopping import Stopper

LOG, EXPORT = "log.jsonl", "model"
SAME_ON_RESUME = ("model", "model_config", "tokens", "seed", "mask", "window", "dtype")
"""Settings that decide what is learnt; a resumed run must have them as they were, and dp times accumulate too."""
MAY_CHANGE = ("steps", "lr", "warmup", "weight_decay", "clip")
"""Settings of the optimiser and its schedule: as they are asked for now, which is said."""


class Trainer:
    """One rank's part of a run."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.config, self.ranks, self.folder = config, ranks, Path(config.out)
        agreed(require_transformers)
        self.memory_before = peak_memory(ranks.device)
        self.data: PackedData
        inner, self.data = agreed(lambda: read_inputs(config))
        self.parameters = sum(p.numel() for p in inner.parameters())
        self.shape = inner.config
        self.ring: Ring = make_ring(ranks, config)
        self.layout = Layout(config.layout, config.tokens, config.cp)
        if ranks.device.type == "cpu":
            give_back_blocks_above(4 * self.layout.local_tokens(ranks.cp) * self.shape.hidden_size)
        self.model = TrainedModel(inner, self.ring, config).to(ranks.device)
        shard_model(self.model, ranks, config)
        self.optimizer = make_optimizer(self.model, config)
        local = config.tokenizer != BYTES and Path(config.tokenizer).is_dir()
        self.tokenizer = Path(config.tokenizer) if local else None
        self.step = 0

    def run(self) -> bool:
        """Train until the last step; False where it was asked to stop before."""
        with Stopper() as stopper, contextlib.ExitStack() as closing:
            self._resume()
            say = _Sayer(self, closing) if self.ranks.is_first else None
            while self.step < self.config.steps:
                record = self._train_step()
                self.step += 1
                if say:
                    say.step(record)
                # The same on every rank, so that all leave by this door.
                for what, value in (("loss", record.loss), ("gradients' norm", record.grad_norm or 0.0)):
                    if not math.isfinite(value):
                        raise ValueError(
                            f"the {what} of step {record.step} is {value}; lower --lr, or look at the data"
                        )
                stopping = stopper.requested()
                if stopping or self._due():
                    path = self._save()
                    if say:
                        say.display.note(f"saved {path}")
                if stopping:
                    return False
        return True

    def _due(self) -> bool:
        every = self.config.save_every
        return self.step == self.config.steps or bool(every and self.step % every == 0)

    def finish(self, compare_rows: list[dict[str, Any]] | None = None) -> None:
        """Write the weights for others to load, and on the first rank the report."""
        export(self.folder / EXPORT, self.model.model, self.tokenizer)
        if self.ranks.is_first:
            settings = asdict(self.config) | {"parameters": self.parameters, "ranks": self.config.ranks}
            print(write_report(self.folder, settings, read_log(self.folder / LOG), compare_rows), flush=True)
            print(f"in {self.folder}: curves.svg, the log, checkpoints, and {EXPORT}/ for others to load", flush=True)

    def sequences(self, step: int, micro_batch: int) -> list[Packed]:
        """What all data-parallel ranks read in a micro-batch, in their order."""
        return [
            self.data.sequence(
                sequence_index(step, micro_batch, replica, accumulate=self.config.accumulate, replicas=self.config.dp)
            )
            for replica in range(self.config.dp)
        ]

    def _train_step(self) -> StepRecord:
        config, started = self.config, time.perf_counter()
        if self.ring.trace is not None:
            self.ring.trace.clear()
        batches = [self.sequences(self.step, micro_batch) for micro_batch in range(config.accumulate)]
        packed = [each for batch in batches for each in batch]
        lengths = [self._documents(each) or (config.tokens,) for each in packed]
        # Every rank knows all sequences, so the number of labels needs no message; a document's last token has none.
        labels = sum(config.tokens - len(each) for each in lengths)
        lr = learning_rate(config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            # FSDP2 sums gradients with the last micro-batch alone.
            self.model.set_requires_gradient_sync(index == len(batches) - 1)  # type: ignore[operator]
            total += self._backward(batch[self.ranks.dp], labels)
        norm = clip_gradients(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = float(self.ranks.sum(total))
        flops = step_flops(self.shape, self.parameters, lengths, config.window if "window" in config.mask else None)
        return StepRecord(
            step=self.step + 1, steps=config.steps, loss=loss, grad_norm=float(norm), lr=lr,
            tokens=config.tokens * len(packed), seconds=time.perf_counter() - started, flops=flops,
            ranks=config.ranks, memory_bytes=peak_memory(self.ranks.device) - self.memory_before,
            hidden=hidden_fraction(self.ring), peak_flops=peak_flops(self.ranks.device, config.dtype),
            documents=sum(len(each.documents) for each in packed),
        )  # fmt: skip

    def _documents(self, packed: Packed) -> tuple[int, ...] | None:
        return packed.documents if "documents" in self.config.mask else None

    def _backward(self, packed: Packed, labels: int) -> Tensor:
        """Add one sequence's gradients; gives this rank's part of the loss."""
        whole = {"input_ids": packed.input_ids[None], "documents": self._documents(packed)}
        batch = shard_batch(whole, self.layout, self.ranks.cp)
        batch = {name: x.to(self.ranks.device) if isinstance(x, Tensor) else x for name, x in batch.items()}
        batch["num_items_in_batch"] = labels
        offload = torch.autograd.graph.save_on_cpu(pin_memory=self.ranks.device.type == "cuda")
        with offload if self.config.offload else contextlib.nullcontext():
            loss = self.model(batch)
        (loss * self.ranks.loss_scale).backward()
        part: Tensor = loss.detach().double().cpu()
        return part

    def _state(self) -> dict[str, Any]:
        return {"settings": asdict(self.config), "data": self.data.fingerprint}

    def _save(self) -> Path:
        return checkpoint.save(
            self.folder / CHECKPOINTS, self.step, self.model, self.optimizer, self._state(), keep=self.config.keep
        )

    def _resume(self) -> None:
        """Go on from the newest checkpoint, if asked; a run that would overwrite another is refused."""
        if wrong := next((place for place in (self.folder, *self.folder.parents) if place.is_file()), None):
            raise ValueError(f"--out {self.folder} cannot be a folder: {wrong} is a file")
        refuse_foreign(self.folder / EXPORT)
        newest = checkpoint.latest(self.folder / CHECKPOINTS)
        if not self.config.resume:
            if newest is not None:
                raise ValueError(f"{self.folder} holds a run already; go on with --resume, or choose another --out")
            return
        if newest is None:
            # Killed before its first checkpoint a run has nothing to go on from, and is resumed by beginning again.
            if self.ranks.is_first:
                print(f"nothing to resume in {self.folder / CHECKPOINTS}: training begins with step 1", flush=True)
            return
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        state = checkpoint.load(newest, self.model, self.optimizer, verify=False)
        # The learning rate is set with every step; what else may change between runs is as it is asked for now.
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        require_same_run(state["settings"], self.config)
        if state["data"] != self.data.fingerprint:
            raise ValueError(f"{newest} was trained on other data, or with another tokenizer; resume with the same")
        self.step = int(state["step"])
        for name in MAY_CHANGE if self.ranks.is_first else ():
            before, now = state["settings"].get(name), getattr(self.config, name)
            if before != now:
                print(f"{name} was {before!r} in the checkpoint and is {now!r} from here on", flush=True)


class _Sayer:
    """What the first rank tells: the display, the log and its mirrors."""

    def __init__(self, trainer: Trainer, closing: contextlib.ExitStack) -> None:
        config = trainer.config
        mesh = " ".join(f"{name}={getattr(config, name)}" for name in ("dp", "cp", "tp"))
        mask = config.mask.replace("window", f"window of {config.window}")
        headline = Headline(config.model, trainer.parameters, config.ranks, mesh, config.tokens, config.layout, mask)
        self.trainer, self.closing, self.resumed_step = trainer, closing, trainer.step
        self.display = closing.enter_context(Display(headline))
        if trainer.step:
            self.display.note(f"resumed after step {trainer.step}")
        self.mirrors = closing.enter_context(
            Mirrors(
                trainer.folder, asdict(config), tensorboard=config.tensorboard, wandb=config.wandb,
                resumed_step=trainer.step,
            )
        )  # fmt: skip

    @cached_property
    def log(self) -> Log:
        """Opened with the first step: a run that is refused before leaves no folder behind."""
        log = self.closing.enter_context(Log(self.trainer.folder / LOG))
        log.truncate(self.resumed_step)
        return log

    def step(self, record: StepRecord) -> None:
        self.log.write(record)
        self.display.step(record)
        self.mirrors.write(record)


def read_inputs(config: TrainConfig) -> tuple[Any, PackedData]:
    """Model and data, as far as a rank makes them alone."""
    # Every rank would tell each try of its own to reach the hub; what it came to is told once.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    tokenizer = load_tokenizer(config.tokenizer)
    model = make_model(config, tokenizer.vocab_size)
    vocab = int(model.config.vocab_size)
    return model, load_data(config.data, tokenizer, config.tokens, config.seed, vocab, text_key=config.text_key)


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; weights of one dimension, norms and biases, do not decay."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, betas=(0.9, 0.95))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear until the peak, then half a cosine down to a tenth of it: a function of the step alone."""
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    progress = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return config.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def require_same_run(before: dict[str, Any], config: TrainConfig) -> None:
    """Refuse to go on with settings that decide what is learnt and were others; ranks may be split otherwise."""
    now = asdict(config)
    for name in SAME_ON_RESUME:
        if before.get(name) != now[name]:
            raise ValueError(f"{name} was {before.get(name)!r} in the checkpoint and is {now[name]!r} now")
    sequences = [settings["dp"] * settings["accumulate"] for settings in (before, now)]
    if sequences[0] != sequences[1]:
        raise ValueError(
            f"a step read {sequences[0]} sequences (dp x accumulate) in the checkpoint and would read {sequences[1]} "
            "now; change --accumulate with --dp"
        )


def hidden_fraction(ring: Ring) -> float | None:
    """Of the time that transfers took in a step on this rank, the part that it did not wait for."""
    events = ring.trace or []
    moving = sum(moved.done - moved.posted for event in events for moved in event.transfers)
    waited = sum(event.wait for event in events if event.transfers)
    return max(0.0, 1 - waited / moving) if moving > 0 else None
