"""The training loop: batches from a `TokenLoader`, AdamW, warm-up and cosine, validation by source, exact resume.

A step is: take a batch, forward and backward, clip, update. `Trainer.state` contains everything that a checkpoint needs
for an exact resume: parameters, optimizer, position in the data, random state, and history.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from gpt import GPT, ModelShape, parameter_groups
from model_flops import flops_per_token
from output_loss import IGNORED_LABEL
from training_report import History

from dali_pipes import LoaderConfig, SourceLoss, TokenLoader
from dali_pipes.errors import StateError

_GRADIENT_NORM_LIMIT = 1.0
_WEIGHT_DECAY = 0.1
_LAST_RATE = 0.1  # share of the peak learning rate that is left at the last step
_LOSSES_AT_ONCE = 10  # on a GPU: reading a loss waits for the step, so it is done for this many together


@dataclass(frozen=True)
class Plan:
    """What a run does and when; the data is described by its `LoaderConfig`."""

    steps: int
    learning_rate: float
    beta2: float
    val_every: int
    val_batches: int


def learning_rate(plan: Plan, step: int) -> float:
    """Rate of the update after `step` earlier ones: rises over 5 % of the steps, then half a cosine down to a tenth."""
    warm_up = max(1, plan.steps // 20)
    if step < warm_up:
        return plan.learning_rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, plan.steps - warm_up)
    return plan.learning_rate * (_LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * progress)) / 2)


class Trainer:
    """A model in training and the loader that feeds it. A context manager: leaving it closes the loaders.

    Runs on `loader.device`; on a GPU under bfloat16 autocast. `history` is complete after `run` has returned.
    """

    def __init__(self, plan: Plan, config: LoaderConfig, shape: ModelShape, *, compiled: bool | None) -> None:
        self.plan, self.shape = plan, shape
        self.step = 0
        self.history = History()
        # By this object: what was done before a resume, perhaps on another device, is not in them.
        self.tokens_done, self.flops_done = 0, 0
        self.train_s = 0.0
        self._pending: list[torch.Tensor] = []
        self._stack = contextlib.ExitStack()
        self.loader = self._stack.enter_context(TokenLoader(config, repeat=True, split="train"))
        self._source_loss = None if config.mixture is None else SourceLoss(self.loader)
        self._validation: dict[str, TokenLoader] = {}
        """By source; without a mixture, one with the name ""."""
        if config.validation_fraction > 0 and config.mixture is not None:
            self._validation = self.loader.validation_loaders(outputs=("input_ids", "labels"))
        elif config.validation_fraction > 0:
            validation = config.replace(split="validation", shuffle=False, drop_last=False, repeat=False)
            self._validation = {"": TokenLoader(validation)}
        for loader in self._validation.values():
            self._stack.enter_context(loader)
        self.device = self.loader.device
        torch.manual_seed(config.seed)
        self.model = GPT(shape).to(self.device)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        on_gpu = self.device.type == "cuda"
        self._loss: Callable[..., tuple[torch.Tensor, torch.Tensor]] = self.model
        if on_gpu if compiled is None else compiled:
            self._loss = torch.compile(self.model)
        self._optimizer = torch.optim.AdamW(
            parameter_groups(self.model, _WEIGHT_DECAY), lr=plan.learning_rate, betas=(0.9, plan.beta2), fused=True
        )
        self._losses_at_once = _LOSSES_AT_ONCE if on_gpu else 1

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def run(self, last_step: int, after_step: Callable[[], bool]) -> None:
        """Train until `last_step` steps are done, or until `after_step`, called after each of them, returns False."""
        if self.step == 0 and not self.history.validation:
            self._measure()
        batches = iter(self.loader)
        go_on = True
        while go_on and self.step < last_step:
            start, waited_s = time.perf_counter(), self.loader.stats().data_wait_s
            batch = next(batches)
            # The loader's own clock, so that table, chart and rating speak of the same seconds.
            self.history.data_wait_s.append(self.loader.stats().data_wait_s - waited_s)
            self._train_step(batch)
            if len(self._pending) >= self._losses_at_once:
                self._read_losses()
            self._note_time(batch, time.perf_counter() - start)
            if self.step % self.plan.val_every == 0 or self.step == self.plan.steps:
                self._measure()
            go_on = after_step()
        self._read_losses()

    def _note_time(self, batch: dict[str, torch.Tensor], seconds: float) -> None:
        tokens = batch["input_ids"].numel()
        flops = tokens * flops_per_token(self.shape, batch["input_ids"].shape[1])
        self.train_s += seconds
        self.tokens_done += tokens
        self.flops_done += flops
        self.history.step_s.append(seconds)
        self.history.step_flops.append(flops)

    def _train_step(self, batch: dict[str, torch.Tensor]) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.plan, self.step)
        self.model.train()
        with self._autocast():
            loss, losses = self._loss(batch["input_ids"], batch["labels"])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _GRADIENT_NORM_LIMIT)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._source_loss is not None:
            self._source_loss.add(batch, losses)
        self.step += 1
        self._pending.append(loss.detach())

    def _measure(self) -> None:
        """Note the validation loss, and for a mixture both losses of each source."""
        validation = self._validate()
        if self.step:
            self.history.loader.append((self.step, self.loader.stats().metrics()))
        if self._source_loss is not None:
            training = self._source_loss.means()
            self._source_loss.reset()
            if training or validation:
                self.history.by_source.append((self.step, training, validation))

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        """Mean loss of each source over the first `val_batches` batches of its validation split, always the same ones.

        The mean over the labels of all sources goes into the history.
        """
        self.model.eval()
        means, total, count = {}, 0.0, 0
        for name, loader in self._validation.items():
            of_source, labels = torch.zeros((), dtype=torch.float64, device=self.device), 0
            for batch in itertools.islice(loader, self.plan.val_batches):
                with self._autocast():
                    _, losses = self.model(batch["input_ids"], batch["labels"])
                of_source += losses.sum(dtype=torch.float64)
                labels += int((batch["labels"] != IGNORED_LABEL).sum())
            means[name] = of_source.item() / labels
            total, count = total + of_source.item(), count + labels
        if means:
            self.history.validation.append((self.step, total / count))
        return means

    def state(self) -> dict[str, Any]:
        """All that a later run needs to go on exactly from here, as plain values and tensors."""
        self._read_losses()
        on_gpu = self.device.type == "cuda"
        return {
            "step": self.step,
            "shape": asdict(self.shape),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device) if on_gpu else None,
            "history": self.history.to_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`. Raises `StateError` where the model, the corpus or the data order is another one."""
        differences = [
            f"{name}: saved {state['shape'].get(name)!r}, now {value!r}"
            for name, value in asdict(self.shape).items()
            if state["shape"].get(name) != value
        ]
        if differences:
            raise StateError("the checkpoint belongs to a different model:\n  " + "\n  ".join(differences))
        self.loader.load_state_dict(state["loader"])
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"], self.device)
        self.step = state["step"]
        self.history = History(**state["history"])

    def sample(self, prompt: list[int], count: int, seed: int) -> list[int]:
        """`count` ids that the model generates after `prompt`."""
        self.model.eval()
        generator = torch.Generator(self.device).manual_seed(seed)
        with self._autocast():
            ids = self.model.generate(torch.tensor(prompt, device=self.device), count, generator=generator)
        return [int(token) for token in ids[len(prompt) :]]

    def _read_losses(self) -> None:
        if self._pending:
            self.history.losses.extend(torch.stack(self._pending).tolist())
            self._pending.clear()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")
