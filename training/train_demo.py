"""Train the demo checkpoint on a CPU, with two processes.

    python training/train_demo.py --init src/keepsight/demo/checkpoint --out build/demo   # go on from there
    python training/train_demo.py --out build/demo                                        # from scratch

The learning rate stays constant until a cool-down brings it to zero over its last steps; `--steps` says when that
begins at the latest. To cool down now, send SIGUSR1 to the process named in build/train.pid, or write the number of
steps into RUN_DIR/cool_down (also to change a cool-down under way). `--resume` goes on from the last state in RUN_DIR.
Time plays no role: stopping the processes for a while changes nothing.
"""

import argparse
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from conversations import ConversationMaker
from demo_model import (
    NounHead,
    PatchHead,
    SlotHead,
    build_model,
    decode,
    encode_patches,
    load_model,
    save_checkpoint,
    shifted_position_rows,
)
from keepsight.demo.scenes import random_number_scene, random_scene
from lockstep import Lockstep, start_other_process
from packed_conversations import Packer, pixels_of, token_id_of
from patch_labels import label_patches
from save_processor import save_processor
from schedule import Schedule
from teacher_forced import count_right_answers, format_accuracies, held_out_batches

TOWER_PICTURES = 32
# The share of each process's batches that are about several pictures; the rest are about one.
SEVERAL_SHARE = (0.35, 0.8)
CHATS_ABOUT_ONE, CHATS_ABOUT_SEVERAL = 16, 9
NUM_PROCESSES = 2
VOCAB_STEP = 64


@dataclass
class Averages:
    """Running averages for the log."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.values[name] = value if name not in self.values else 0.97 * self.values[name] + 0.03 * value

    def __str__(self) -> str:
        return " ".join(f"{name} {value:.3f}" for name, value in self.values.items())


class Trainer:
    def __init__(self, options: argparse.Namespace, lockstep: Lockstep) -> None:
        self.options = options
        self.lockstep = lockstep
        self.step = 0
        self.averages = Averages()
        self.schedule = Schedule(options.warm_up, options.steps, options.cool_down_steps)
        torch.manual_seed(options.seed)
        self.model, tokenizer = _load_or_build(options)
        self.packer = Packer(tokenizer)
        self.heads = nn.ModuleDict(
            {
                "patch": PatchHead(self.model.config.vision_config.hidden_size),
                "slot": SlotHead(self.model.config.text_config.hidden_size),
                "noun": NounHead(self.model.config.text_config.hidden_size),
            }
        )
        self.optimizer = _optimizer(self.model, self.heads, options)
        self.parameters = [group["params"][0] for group in self.optimizer.param_groups]
        self._requested_cool_down = 0
        if options.resume:
            self._load_state()
        self.random = Random(f"{options.seed} {lockstep.rank} {self.step}")
        self.held_out = held_out_batches(self.packer, lockstep.rank)
        _compile_layers(self.model)

    def run(self) -> None:
        signal.signal(signal.SIGUSR1, self._on_signal)
        while not self.schedule.is_done(self.step):
            self._train_step()
            self.step += 1
            if self.step % self.options.log_every == 0:
                self._log(f"step {self.step} rate {self.schedule.factor(self.step):.2f} {self.averages}")
            if self.step % self.options.save_every == 0:
                self._save_state()
            if self.step % self.options.evaluate_every == 0:
                self._evaluate()
        self._evaluate()
        self._save_state()
        if self.lockstep.rank == 0:
            save_checkpoint(self.model, self.options.out)

    # One step ---------------------------------------------------------------------------------------------

    def _train_step(self) -> None:
        factor = self.schedule.factor(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_rate"] * factor
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._tower_loss() if self.step < self.options.tower_steps else self._chat_loss()
        (loss / self.lockstep.num_processes).backward()  # type: ignore[no-untyped-call]
        decided = self.lockstep.sum_gradients(self.parameters, float(self._wanted_cool_down()))
        self.averages.add("gradient", float(torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)))
        self.optimizer.step()
        if decided:
            self.schedule.finish_in(self.step, round(decided))

    def _tower_loss(self) -> Tensor:
        scenes = [
            random_number_scene(self.random)
            if self.random.random() < 0.25
            else random_scene(self.random, self.random.randint(1, 4))
            for _ in range(TOWER_PICTURES)
        ]
        features = self._encode(pixels_of(scenes))
        loss, accuracies = self.heads["patch"](features, label_patches(scenes))
        self._note_patches(loss, accuracies)
        return loss  # type: ignore[no-any-return]

    def _chat_loss(self) -> Tensor:
        maker = ConversationMaker(self.random)
        is_several = self.random.random() < SEVERAL_SHARE[self.lockstep.rank]
        if is_several:
            chats = [maker.about_several_pictures() for _ in range(CHATS_ABOUT_SEVERAL)]
        else:
            chats = [maker.about_one_picture() for _ in range(CHATS_ABOUT_ONE)]
            chats[0] = maker.without_picture() if self.random.random() < 0.5 else chats[0]
        batch = self.packer.pack(chats)
        assert batch.pixels is not None
        assert batch.patch_labels is not None
        features = self._encode(batch.pixels)
        patch_loss, accuracies = self.heads["patch"](features, batch.patch_labels)
        self._note_patches(patch_loss, accuracies)
        decoded = decode(self.model, batch, features)
        slot_labels = batch.patch_labels.slots[batch.slot_pictures]
        slot_loss, accuracies = self.heads["slot"](decoded.early_slots, slot_labels)
        self.averages.add("slot", slot_loss.item())
        self.averages.add("cell", accuracies[-1])
        noun_loss, accuracies = self.heads["noun"](decoded.late_nouns, decoded.noun_labels)
        for name, accuracy in zip(("noun_count", "noun_colour", "noun_cell"), accuracies, strict=False):
            self.averages.add(name, accuracy)
        loss = F.cross_entropy(decoded.logits, decoded.targets)
        self.averages.add("several" if is_several else "one", loss.item())
        dense_loss = self.options.slot_weight * slot_loss + self.options.noun_weight * noun_loss
        return loss + self.options.patch_weight * patch_loss + dense_loss  # type: ignore[no-any-return]

    def _encode(self, pixels: Tensor) -> Tensor:
        return encode_patches(self.model, pixels, shifted_position_rows(len(pixels)))

    def _note_patches(self, loss: Tensor, accuracies: list[float]) -> None:
        self.averages.add("patch", loss.item())
        for name, accuracy in zip(("colour", "shape", "size", "digit"), accuracies, strict=False):
            self.averages.add(name, accuracy)

    # Measuring --------------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Log how many whole answers are right when each token is predicted from the right ones before it."""
        mine = [count_right_answers(self.model, batch) for batch in self.held_out]
        counts = [each for theirs in self.lockstep.gather(mine) for each in theirs]
        self._log(f"EVALUATION at step {self.step}: {format_accuracies(counts)}")

    def _log(self, text: str) -> None:
        if self.lockstep.rank == 0:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    # State ------------------------------------------------------------------------------------------------

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self._requested_cool_down = self.options.cool_down_steps

    def _wanted_cool_down(self) -> int:
        """The number of steps in which to finish; 0 to change nothing. Only process 0 is listened to."""
        file = self.options.run_dir / "cool_down"
        if self.lockstep.rank == 0 and self.step % 10 == 0 and file.exists():
            self._requested_cool_down = int(file.read_text() or self.options.cool_down_steps)
            file.unlink()
        wanted, self._requested_cool_down = self._requested_cool_down, 0
        return wanted or (self.schedule.cool_down if self.schedule.is_due(self.step) else 0)

    def _save_state(self) -> None:
        if self.lockstep.rank != 0:
            return
        state = {
            "step": self.step,
            "schedule": self.schedule,
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        unfinished = self.options.run_dir / "state.unfinished"
        torch.save(state, unfinished)
        unfinished.replace(self.options.run_dir / "state.pt")

    def _load_state(self) -> None:
        # The file is our own: the schedule in it is an object, which the weights-only reader refuses.
        state: dict[str, Any] = torch.load(self.options.run_dir / "state.pt", weights_only=False)
        self.step, self.schedule = state["step"], state["schedule"]
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])


def _load_or_build(options: argparse.Namespace) -> tuple[Any, Tokenizer]:
    """Weights and vocabulary belong together: both come from `--init`, or both are new."""
    tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
    if options.init is not None:
        return load_model(options.init, torch.float32).train(), tokenizer
    names = ("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<end_of_turn>")
    vocab_size = -(-tokenizer.get_vocab_size() // VOCAB_STEP) * VOCAB_STEP
    return build_model({name: token_id_of(tokenizer, name) for name in names}, vocab_size).train(), tokenizer


def _optimizer(model: Any, heads: nn.ModuleDict, options: argparse.Namespace) -> torch.optim.AdamW:
    groups = []
    for name, parameter in [*model.named_parameters(), *heads.named_parameters(prefix="heads")]:
        is_of_tower = "vision_tower" in name or name.startswith("heads.patch")
        decay = 0.02 if parameter.ndim >= 2 and "embed" not in name else 0.0
        rate = options.tower_rate if is_of_tower else options.rate
        groups.append({"params": [parameter], "base_rate": rate, "weight_decay": decay})
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-9, fused=True)


def _compile_layers(model: Any) -> None:
    """Layer by layer: compiling the whole model takes minutes."""
    # All layers of a kind share one piece of code, and the limit counts per piece.
    torch._dynamo.config.recompile_limit = 64
    for layer in [*model.model.vision_tower.encoder.layers, *model.model.language_model.layers]:
        layer.compile()


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo checkpoint.")
    parser.add_argument("--init", type=Path, help="go on from the weights and the tokenizer of this checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="where the checkpoint is written")
    parser.add_argument("--run-dir", type=Path, default=Path("build/train"))
    parser.add_argument("--resume", action="store_true", help="go on from the last state in RUN_DIR")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--tower-steps", type=int, default=800, help="first teach the vision tower alone")
    parser.add_argument("--cool-down-steps", type=int, default=1200)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--tower-rate", type=float, default=1.2e-3)
    parser.add_argument("--patch-weight", type=float, default=0.15)
    parser.add_argument("--slot-weight", type=float, default=0.15)
    parser.add_argument("--noun-weight", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--evaluate-every", type=int, default=400)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = _parse_options()
    meeting_file = options.run_dir / "meeting"
    other = None
    if options.rank == 0:
        options.run_dir.mkdir(parents=True, exist_ok=True)
        meeting_file.unlink(missing_ok=True)
        if not options.resume:
            save_processor(options.out, copy_from=options.init)
        other = start_other_process()
        Path("build/train.pid").write_text(f"{os.getpid()}\n{other.pid}\n")
    torch.set_num_threads(1)
    Trainer(options, Lockstep(options.rank, NUM_PROCESSES, meeting_file)).run()
    if other is not None:
        other.wait()


if __name__ == "__main__":
    main()
