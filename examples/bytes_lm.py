"""Train a small transformer on the source code of Python's standard library, on any number of ranks.

    $ shoal run -n 2 examples/bytes_lm.py
    ...
    [0] validation perplexity 3.621 after 1500 steps on 2 ranks (unigram 23.1, bigram 10.9)
    [0] perplexity over time: out/bytes_lm.png
    [0] ──────────────────── sample 2 ────────────────────
    [0] def __init__(self):
    [0]         self.index = name
    [0]         self._instance(exc, coding)
    [0]
    [0]     def __init__(self, name, text):
    [0]         if len(cls):
    [0]             self._color_format_arg_convert(context)
    [0]
    ...

It takes 8 minutes of CPU time, about half of that on two free cores. On a single process it does the same,
with the same perplexity up to the growth of rounding errors:

    $ python examples/bytes_lm.py

Each step takes `--batch` windows of text, distributed over the ranks. The seed and the step number determine
the windows; nothing else is random. So an interrupted run can be resumed:

    $ shoal run -n 2 examples/bytes_lm.py --resume

The result is bitwise the same on the same number of ranks, and equal up to rounding on any other number. A
checkpoint replaces the previous one atomically: a killed run loses only the steps since the last checkpoint.

The picture compares the network with two models without training: the perplexity when each byte is predicted
from the frequencies of bytes (unigram) or of pairs of bytes (bigram) in the validation text itself.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sysconfig
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from torch import nn
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention

import shoal


def setting(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Settings:
    """The settings that determine the trained network, up to rounding; they must be equal when resuming."""

    steps: int = setting(1500, "steps of the optimizer")
    batch: int = setting(16, "windows in a step, on all ranks together")
    context: int = setting(128, "bytes in a window")
    width: int = setting(192, "width of the network")
    layers: int = setting(3, "number of layers of the network")
    heads: int = setting(6, "attention heads of each layer")
    lr: float = setting(3e-3, "largest learning rate")
    seed: int = setting(0, "seed of the initial network and the order of the text")


# -- the text -------------------------------------------------------------------------------------

#: maximum number of bytes; CPython 3.11 has 10 MB
TEXT_BYTES = 16_000_000
#: folders with tests, third-party packages, and tables instead of code
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


def read_library() -> tuple[bytes, bytes]:
    """Return the sources for training and for validation: 1 file in 20, chosen by a hash of its name."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    left = TEXT_BYTES
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - LEFT_OUT)  # os.walk continues with these
        for path in sorted(Path(folder, file) for file in files if file.endswith(".py")):
            name = path.relative_to(root).as_posix()
            source = path.read_bytes()[:left]
            left -= len(source)
            parts[hashlib.sha256(name.encode()).digest()[0] % 20 == 0].append(source)
    return b"".join(parts[False]), b"".join(parts[True])


@dataclass(frozen=True)
class Text:
    """Texts as tensors [n] of uint8, and a digest of both."""

    train: torch.Tensor
    validation: torch.Tensor
    digest: str

    @classmethod
    def of(cls, train: bytes, validation: bytes) -> Text:
        digest = hashlib.sha256(train + validation).hexdigest()
        return cls(
            *(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, validation)), digest
        )


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes [n, context] from each of the ``starts`` [n], and the same shifted by one."""
    both = text[starts[:, None] + torch.arange(context + 1)].long()
    return both[:, :-1], both[:, 1:]


def entropies(text: torch.Tensor) -> tuple[float, float]:
    """Return the entropy of a byte, and that of a byte given the previous one, in nats."""
    pairs = torch.bincount(text[:-1].long() * 256 + text[1:].long(), minlength=65536).double()

    def entropy(counts: torch.Tensor) -> float:
        shares = counts[counts > 0] / counts.sum()
        return -(shares * shares.log()).sum().item()

    first = entropy(pairs.view(256, 256).sum(dim=1))
    return first, entropy(pairs) - first


# -- the network ----------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal attention and a two-layer MLP, both with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """``x`` [batch, length, width]; ``turn`` are cosines and sines [length, width / heads / 2]."""
        split = self.attention_in(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(rotate(query, *turn), rotate(key, *turn), value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp_out(relu(self.mlp_in(self.mlp_norm(x))).square())


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021, "RoFormer"): products depend on relative positions only."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Network(nn.Module):
    """Maps bytes [batch, length] to the logits [batch, length, 256] of the next bytes."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.context = settings.context
        self.embedding = nn.Embedding(256, settings.width)
        self.blocks = nn.ModuleList(Block(settings.width, settings.heads) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width, bias=False)
        self.head = nn.Linear(settings.width, 256, bias=False)
        self.head.weight = self.embedding.weight
        generator = torch.Generator().manual_seed(settings.seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Residual outputs are initialized smaller the more layers there are.
                adds = name.endswith(("attention_out.weight", "mlp_out.weight"))
                std = 0.02 / math.sqrt(2 * settings.layers if adds else 1)
                nn.init.normal_(parameter, std=std, generator=generator)
        half = torch.arange(settings.width // settings.heads // 2)
        angles = torch.outer(torch.arange(settings.context), 10_000.0 ** (-half / len(half)))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x, (self.cos[:length], self.sin[:length]))
        return self.head(self.norm(x))


@torch.no_grad()
def write(
    network: Network, prompt: bytes, *, length: int, temperature: float, top_k: int, seed: int
) -> bytes:
    """Continue ``prompt`` by ``length`` bytes, each sampled from the ``top_k`` likeliest."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        logits = network(torch.tensor([text[-network.context :]]))[0, -1]
        values, candidates = logits.topk(min(top_k, 256))
        choice = torch.multinomial((values / temperature).softmax(dim=0), 1, generator=generator)
        text.append(int(candidates[choice]))
    return bytes(text)


# -- training -------------------------------------------------------------------------------------


@dataclass
class History:
    """Mean cross entropy in nats: of each step's batch, and of the validation text after some steps."""

    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)


class Training:
    """A network, its optimizer and their progress; equal on all ranks of ``group``."""

    def __init__(self, group: shoal.ProcessGroup, text: Text, settings: Settings) -> None:
        self.group, self.text, self.settings = group, text, settings
        self.history = History()
        self.network = Network(settings)
        # The network's buffers are constant tables.
        self.model = shoal.DistributedDataParallel(self.network, group=group, broadcast_buffers=False)
        matrices = [parameter for parameter in self.network.parameters() if parameter.dim() == 2]
        vectors = [parameter for parameter in self.network.parameters() if parameter.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=settings.lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        warmup = max(1, settings.steps // 20)

        def share(step: int) -> float:
            """Return the share of the maximum learning rate: linear warm-up, cosine decay to 5 %."""
            down = min(1, max(0, step - warmup) / max(1, settings.steps - warmup))
            return min((step + 1) / warmup, 0.525 + 0.475 * math.cos(math.pi * down))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, share)

    @property
    def done(self) -> int:
        return len(self.history.train)

    def step(self, accumulate: int = 1) -> None:
        """Make a step; each rank computes its part of the batch in ``accumulate`` pieces."""
        group, settings = self.group, self.settings
        last_start = len(self.text.train) - settings.context - 1
        starts = numpy.random.default_rng((settings.seed, self.done)).integers(
            last_start, size=settings.batch
        )
        mine = torch.as_tensor(starts)[group.rank :: group.size]
        pieces = mine.chunk(accumulate)
        loss_sum = torch.zeros((), dtype=torch.float64)
        self.optimizer.zero_grad()
        for number, piece in enumerate(pieces, start=1):
            inputs, targets = windows(self.text.train, piece, settings.context)
            with nullcontext() if number == len(pieces) else self.model.no_sync():
                logits = self.model(inputs)
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            # DDP averages gradients over ranks. With this factor the average is the gradient of the mean loss
            # over the whole batch, even if the ranks' parts differ in size.
            (loss * group.size / (settings.batch * settings.context)).backward()
            loss_sum += loss.detach()
        total = group.all_reduce(loss_sum)
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.history.train.append(total.wait().item() / (settings.batch * settings.context))

    @torch.no_grad()
    def validate(self, count: int = 256) -> float:
        """Return the mean cross entropy of ``count`` windows, evenly spaced over the validation text."""
        group, context = self.group, self.settings.context
        starts = torch.linspace(0, len(self.text.validation) - context - 1, count).long()
        loss_sum = torch.zeros((), dtype=torch.float64)
        for piece in starts[group.rank :: group.size].split(16):
            inputs, targets = windows(self.text.validation, piece, context)
            loss_sum += cross_entropy(self.network(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = group.all_reduce(loss_sum).wait().item() / (count * context)
        self.history.validation.append((self.done, loss))
        return loss

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically: the previous one stays if this process is killed meanwhile."""
        state = {
            "settings": asdict(self.settings),
            "text": self.text.digest,
            "history": asdict(self.history),
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        with open(unfinished, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)

    def resume(self, path: Path) -> None:
        """Resume from the checkpoint at ``path`` on rank 0; the other ranks need no file.

        Raises:
            SystemExit: on every rank, if there is no checkpoint or it is of another run.
        """
        state = None
        if self.group.rank == 0 and path.exists():
            state = torch.load(path, weights_only=True)
        state = self.group.broadcast_object(state).wait()
        if state is None:
            raise SystemExit(f"there is no checkpoint {path} to resume from")
        for name, value in asdict(self.settings).items():
            if state["settings"][name] != value:
                raise SystemExit(
                    f"{path} is of a run with --{name} {state['settings'][name]}, this is {value}"
                )
        if state["text"] != self.text.digest:
            raise SystemExit(f"{path} is of a run with another text; has Python been updated?")
        self.history = History(**state["history"])
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


def train(
    training: Training, checkpoint: Path, *, accumulate: int, checkpoint_every: int, progress: Progress
) -> None:
    """Make the remaining steps, with about 20 validations."""
    settings = training.settings
    validate_every = max(1, settings.steps // 20)
    first, begin = training.done, time.perf_counter()
    task = progress.add_task("training", total=settings.steps, completed=first, news="")
    while training.done < settings.steps:
        training.step(accumulate)
        done, finished = training.done, training.done == settings.steps
        speed = (done - first) * settings.batch * settings.context / (time.perf_counter() - begin)
        news = f"loss {training.history.train[-1]:.3f}  {speed:,.0f} bytes/s"
        progress.update(task, completed=done, news=news)
        if finished or done % validate_every == 0:
            perplexity = math.exp(training.validate())
            progress.console.print(
                f"step {done:>{len(str(settings.steps))}}  {news}  validation perplexity {perplexity:.2f}"
            )
        if training.group.rank == 0 and (finished or done % checkpoint_every == 0):
            training.save(checkpoint)


def draw(history: History, references: dict[str, float], path: Path) -> None:
    """Plot perplexity over time, with the ``references``, which are entropies in nats."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = range(1, len(history.train) + 1)
    axes.plot(
        steps, [math.exp(loss) for loss in history.train], color="tab:blue", alpha=0.4, label="training"
    )
    at, losses = zip(*history.validation, strict=True)
    axes.plot(at, [math.exp(loss) for loss in losses], marker="o", color="tab:green", label="validation")
    for (name, entropy), line in zip(references.items(), ("-.", ":"), strict=True):
        axes.axhline(
            math.exp(entropy), linestyle=line, color="grey", label=f"{name}: {math.exp(entropy):.1f}"
        )
    axes.set(xlabel="step", ylabel="perplexity of a byte", yscale="log")
    axes.set_yticks(ticks := [2, 3, 4, 6, 10, 20, 50, 100, 200], [str(tick) for tick in ticks], minor=False)
    axes.set_yticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def positive(kind: type) -> Callable[[str], Any]:
    """Return a parser of positive numbers of type ``kind`` for argparse."""

    def number(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not positive")
        return value

    return number


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small transformer on the source code of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for option in fields(Settings):
        kind = int if option.name == "seed" else positive(type(option.default))
        parser.add_argument(
            f"--{option.name}", type=kind, default=option.default, help=option.metadata["help"]
        )
    parser.add_argument(
        "--accumulate", type=positive(int), default=1, help="number of pieces of a rank's part of the batch"
    )
    parser.add_argument("--checkpoint-every", type=positive(int), default=200, help="steps per checkpoint")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in --out")
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory of checkpoint and picture")
    parser.add_argument("--prompt", default="def ", help="beginning of the samples")
    parser.add_argument("--temperature", type=positive(float), default=0.7, help="temperature of the samples")
    parser.add_argument(
        "--top-k", type=positive(int), default=40, help="number of likeliest bytes to sample from"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    settings = Settings(**{option.name: getattr(options, option.name) for option in fields(Settings)})
    checkpoint = options.out / "bytes_lm.pt"
    with shoal.init() as group:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // group.size))
        if settings.batch < group.size:
            raise SystemExit(f"--batch {settings.batch} is less than a window for each of {group.size} ranks")
        first = group.rank == 0
        # All ranks use rank 0's text, because Python versions may differ between machines.
        text = Text.of(*group.broadcast_object(read_library() if first else None).wait())
        training = Training(group, text, settings)
        if options.resume:
            training.resume(checkpoint)
        console = Console(quiet=not first, highlight=False, markup=False, soft_wrap=True)
        columns = (
            "step {task.completed}/{task.total}",
            BarColumn(),
            "{task.fields[news]}",
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, disable=not (first and console.is_terminal)) as progress:
            train(
                training,
                checkpoint,
                accumulate=options.accumulate,
                checkpoint_every=options.checkpoint_every,
                progress=progress,
            )
        if first:
            finish(training, options, console)


def finish(training: Training, options: argparse.Namespace, console: Console) -> None:
    """Print the perplexity, plot its history, and print samples."""
    ranks = training.group.size
    step, loss = training.history.validation[-1]
    unigram, bigram = entropies(training.text.validation)
    console.print(
        f"validation perplexity {math.exp(loss):.3f} after {step} steps on {ranks} rank{'s' * (ranks > 1)} "
        f"(unigram {math.exp(unigram):.1f}, bigram {math.exp(bigram):.1f})",
    )
    if find_spec("matplotlib") is None:
        console.print("no picture: matplotlib is not installed")
    else:
        picture = options.out / "bytes_lm.png"
        draw(training.history, {"unigram": unigram, "bigram": bigram}, picture)
        console.print(f"perplexity over time: {picture}")
    for seed in range(2):
        sample = write(
            training.network,
            options.prompt.encode() or b"\n",
            length=400,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=seed,
        ).decode(errors="replace")
        shown = "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in sample)
        console.rule(f"sample {seed + 1}")
        console.print(shown)


if __name__ == "__main__":
    main()
