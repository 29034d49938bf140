"""Train the bundled table look-up model from nothing: python training/train.py --out FOLDER

FOLDER/model is the exported model (refreshed at every checkpoint), FOLDER/checkpoint.pt resumes
an interrupted run, FOLDER/log.txt says how it goes. The length is a wall time, and every schedule
is a share of it, so the same command suits two CPU cores and a GPU.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizer as table_tokenizer
import torch
import torch.distributed as dist
import torch.nn.functional as F
from batches import STAGES, Batch, batches
from model import PROBED_LAYER, Probe, export, new_backbone, start_near_lookup
from tables import Role
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast, Qwen3Model

ROLE_WEIGHTS = torch.tensor([0.0, 0.3, 1.0, 1.0, 1.0, 3.0])  # by tables.Role
PROBE_WEIGHT = 0.5
PROBE_WEIGHT_IN_DECAY = 0.15
MATRIX_RATE, OTHER_RATE = 0.008, 2e-3
RATE_AFTER_INIT = 0.4  # of these, so that what an exported model knows is kept
MATRIX_WEIGHT_DECAY = 0.05
WARM_UP_STEPS = 40
PROBE_ALONE_STEPS = 60  # after --init, the new probe learns to read before it may teach
DECAY_SHARE, FINAL_RATE = 0.4, 0.03
ADVANCE_AT = 0.9  # smoothed accuracy on the tokens of values
STEPS_PER_STAGE = 60  # at the least
CHECKPOINT_SECONDS = 180
LOG_STEPS = 50


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration: nearly the closest orthogonal matrices (Muon)."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix; matrices of one shape are handled together."""

    def __init__(self, matrices: Iterable[nn.Parameter], rate: float, momentum: float = 0.95):
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        groups = [{"params": group} for group in by_shape.values()]
        super().__init__(groups, {"lr": rate, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters = group["params"]
            gradients = torch.stack([p.grad for p in parameters])
            state = self.state[parameters[0]]
            if not state:
                state["momentum"] = torch.zeros_like(gradients)
            state["momentum"].lerp_(gradients, 1 - group["momentum"])
            updates = orthogonalised(gradients.lerp(state["momentum"], group["momentum"]))
            rows, columns = parameters[0].shape
            scale = 0.2 * group["lr"] * max(rows, columns) ** 0.5
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.mul_(1 - group["lr"] * MATRIX_WEIGHT_DECAY).sub_(update, alpha=scale)


class BatchStream(IterableDataset):
    """`batches` for the worker processes of a DataLoader."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stage: Tensor, tokens: int, seed: int):
        self.tokenizer, self.stage, self.tokens, self.seed = tokenizer, stage, tokens, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        seed = self.seed + (worker.id if worker else 0)
        return batches(self.tokenizer, self.stage, self.tokens, seed, seed)


class Run:
    """One training process: the only one on a GPU, one of several replicas on a CPU."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.options = rank, options
        self.device = torch.device(options.device)
        self.replicas = 1 if self.device.type == "cuda" else options.workers
        self.out = Path(options.out)
        torch.manual_seed(options.seed)
        if options.init:
            self.tokenizer = table_tokenizer.load(Path(options.init))
        else:
            self.tokenizer = table_tokenizer.build()
        self.backbone = new_backbone(self.tokenizer, self.device)
        if options.init:
            trained = Qwen3Model.from_pretrained(options.init, dtype=torch.float32)
            self.backbone.load_state_dict(trained.state_dict())
        else:
            start_near_lookup(self.backbone, self.tokenizer)
        self.backbone.to(self.device)
        self.probe = Probe().to(self.device)
        self.modules = nn.ModuleDict({"backbone": self.backbone, "probe": self.probe})
        named = list(self.modules.named_parameters())
        matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in named if p.ndim != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, MATRIX_RATE),
            torch.optim.AdamW(others, OTHER_RATE, betas=(0.9, 0.98), weight_decay=0, fused=True),
        ]
        self.role_weights = ROLE_WEIGHTS.to(self.device)
        self.stage = torch.full((), len(STAGES) - 1 if options.init else 0).share_memory_()
        self.seconds, self.tokens, self.steps, self.stage_start = 0.0, 0, 0, 0
        self.accuracy = 0.0
        self.resume()

    @property
    def share(self) -> float:
        """How much of the run is over."""
        return self.seconds / (60 * self.options.minutes)

    @property
    def decaying(self) -> bool:
        return self.share > 1 - DECAY_SHARE

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)
            with open(self.out / "log.txt", "a") as log:
                log.write(text + "\n")

    def save(self) -> None:
        state = {
            "modules": self.modules.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": (int(self.stage), self.seconds, self.tokens, self.steps, self.accuracy),
        }
        torch.save(state, self.checkpoint.with_suffix(".new"))
        self.checkpoint.with_suffix(".new").replace(self.checkpoint)
        export(self.backbone, self.tokenizer, self.out / "model")

    def resume(self) -> None:
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, map_location=self.device)
        self.modules.load_state_dict(state["modules"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        stage, self.seconds, self.tokens, self.steps, self.accuracy = state["progress"]
        self.stage.fill_(stage)
        self.stage_start = self.steps
        self.say(f"resumed at step {self.steps}, {self.seconds / 60:.1f} min")

    def stream(self) -> Iterator[Batch]:
        seed = 1_000_003 * self.options.seed + 1009 * self.steps
        size = self.options.batch_tokens
        if self.device.type == "cuda":  # the workers only draw batches
            data = BatchStream(self.tokenizer, self.stage, size, seed)
            return iter(DataLoader(data, None, num_workers=self.options.workers))
        size //= self.replicas
        return batches(self.tokenizer, self.stage, size, seed, seed + 1 + self.rank)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """-> the loss, the accuracy on the tokens of values, the losses of the probe."""
        with torch.autocast(self.device.type, torch.bfloat16):
            output = self.backbone(batch.tokens, use_cache=False, output_hidden_states=True)
            roles = batch.roles[:, 1:]
            weights = self.role_weights[roles]
            predicted = weights > 0
            embeddings = self.backbone.embed_tokens.weight
            logits = F.linear(output.last_hidden_state[:, :-1][predicted], embeddings).float()
            residual = output.hidden_states[PROBED_LAYER].flatten(0, 1)[batch.fact_at]
            if self.options.init and self.steps < PROBE_ALONE_STEPS:
                residual = residual.detach()
            probe_losses = self.probe(residual, batch.facts, embeddings)
        targets, weights = batch.tokens[:, 1:][predicted], weights[predicted]
        losses = F.cross_entropy(logits, targets, reduction="none")
        is_value = roles[predicted] == Role.VALUE
        accuracy = (logits.detach().argmax(-1) == targets)[is_value].float().mean()
        probe_weight = PROBE_WEIGHT_IN_DECAY if self.decaying else PROBE_WEIGHT
        loss = (losses * weights).sum() / weights.sum() + probe_weight * probe_losses.mean()
        return loss, accuracy, probe_losses.detach()

    def average(self, numbers: Tensor) -> Tensor:
        """Average the gradients, and `numbers`, over the replicas."""
        if self.replicas == 1:
            return numbers
        tensors = [*(p.grad for p in self.modules.parameters()), numbers]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        parts = (flat / self.replicas).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
        return numbers

    def set_rates(self) -> None:
        rate = min(1.0, (self.steps + 1) / WARM_UP_STEPS)
        if self.options.init:
            rate *= RATE_AFTER_INIT
        if self.decaying:
            rate *= max(FINAL_RATE, (1 - self.share) / DECAY_SHARE)
        for optimizer, full in zip(self.optimizers, (MATRIX_RATE, OTHER_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * rate

    def advance(self) -> None:
        """Go on to larger tables once these are learnt, or when time asks for it."""
        following = int(self.stage) + 1
        if following == len(STAGES):
            return
        learnt = self.accuracy > ADVANCE_AT and self.steps - self.stage_start > STEPS_PER_STAGE
        if learnt or self.share > STAGES[following].latest_start:
            self.say(
                f"stage {following} at step {self.steps}, {self.seconds / 60:.1f} min, "
                f"value accuracy {self.accuracy:.3f}"
            )
            self.stage += 1
            self.stage_start = self.steps
            self.accuracy *= 0.9

    def step(self, batch: Batch, seconds: float) -> list[float]:
        """One update; -> the loss and the losses of the probe, averaged over the replicas."""
        self.set_rates()
        loss, accuracy, probe_losses = self.loss(batch)
        self.modules.zero_grad()
        loss.backward()
        progress = accuracy.new_tensor([seconds, batch.tokens.numel()])
        averages = self.average(
            torch.cat((progress, accuracy[None], loss.detach()[None], probe_losses))
        )
        nn.utils.clip_grad_norm_(self.modules.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.seconds, tokens, accuracy_now, *losses = averages.tolist()
        self.steps += 1
        self.tokens += round(tokens * self.replicas)
        self.accuracy += 0.02 * (accuracy_now - self.accuracy)
        return losses

    def train(self) -> None:
        count = sum(p.numel() for p in self.backbone.parameters())
        self.say(f"{count} parameters, {self.options}")
        stream = self.stream()
        start = time.monotonic() - self.seconds
        saved = self.seconds
        while self.share < 1:
            batch = next(stream).to(self.device)
            loss, *probe_losses = self.step(batch, time.monotonic() - start)
            self.advance()
            if self.steps % LOG_STEPS == 0:
                self.say(
                    f"step {self.steps} stage {int(self.stage)} {self.seconds / 60:.1f} min "
                    f"{self.tokens / 1e6:.2f} M tokens, {self.tokens / self.seconds:.0f}/s, "
                    f"loss {loss:.3f}, value accuracy {self.accuracy:.3f}, "
                    f"probe {' '.join(f'{x:.2f}' for x in probe_losses)}"
                )
            if self.rank == 0 and (self.seconds - saved > CHECKPOINT_SECONDS or self.share >= 1):
                self.save()
                saved = self.seconds
        self.say(f"done: {self.steps} steps, {self.tokens / 1e6:.1f} M tokens")


def train_replica(rank: int, options: argparse.Namespace, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.workers
    )
    Run(rank, options).train()


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every process has one thread
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="folder of the checkpoint, model and log")
    parser.add_argument("--minutes", type=float, default=80, help="wall time of the whole run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(),
        help="on a CPU: replicas of one thread each; on a GPU: processes that draw batches",
    )  # fmt: skip
    parser.add_argument("--batch-tokens", type=int, help="tokens a step (CPU 6144, GPU 65536)")
    parser.add_argument("--init", help="exported folder to continue from, at the last stage")
    options = parser.parse_args()
    options.batch_tokens = options.batch_tokens or (6144 if options.device == "cpu" else 65536)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    if options.device == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options, f"{folder}/meeting")
            torch.multiprocessing.spawn(train_replica, arguments, nprocs=options.workers)
    else:
        torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every shape of a batch
        Run(0, options).train()


if __name__ == "__main__":
    main()
