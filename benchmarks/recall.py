"""Can the selection find what the window cannot see? Key-value pairs far outside of it, asked for at the end.

    python benchmarks/recall.py                     # about 6 minutes on one core
    python benchmarks/recall.py --device cuda
    python benchmarks/recall.py --show benchmarks/results/cpu-recall.json

A sequence is PAIRS pairs of a key and a value, a gap of filler, and QUERIES of those keys, each to be answered by its
value. Windows hold 4 tokens; from an answer, those of both layers together reach back 6, and the nearest pair is 24
fillers away, so a model that attends to the window alone can only guess.
All variants have the same parameters, drawn alike, the same batches and the same optimizer. They differ in what the
layers with compressed KV attend to: nothing ("window only"), or the positions that the indexers choose, as they were
drawn or distilled. The two that select attend to all positions for the first part of the steps, the dense warm-up, so
that what is left to learn after it is the selection. Accuracy is on sequences that no model was trained on, with the
gap trained on and with a longer one. Prints a table and writes benchmarks/results/<device>-recall.json.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from timing import make_table, number, provenance, read_result, require_device, results_path, write_result
from torch import Tensor
from torch.nn.functional import cross_entropy

from csa2_compiled import CSA2Config, CSA2ForCausalLM, DistillationLosses, enable_distillation
from csa2_compiled.model import RunBlock
from csa2_compiled.quality import reader

KEYS, VALUES, FILLERS = 32, 16, 16  # the vocabulary, in this order
PAIRS, QUERIES = 8, 8
GAP, LONG_GAP = 24, 32  # fillers; trained with the first
MODEL = CSA2Config(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=32,
    sliding_window=4,
    compress_ratios=(0, 2),
    kv_source_layer_ids=(1,),
    index_source_layer_ids=(1,),
    index_n_heads=4,
    index_head_dim=32,
    index_topk=4,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=1024,
    vocab_size=KEYS + VALUES + FILLERS,
    intermediate_size=128,
    initializer_range=0.1,
)
WINDOW, DRAWN, DISTILLED = VARIANTS = ("window only", "indexer as drawn", "indexer distilled")


@dataclass(frozen=True)
class Setup:
    """How all variants are trained: the learning rate grows over 50 steps, and falls to 0 over the last third.

    dense_steps: of the warm-up, in which the variants that select attend to all positions.
    """

    steps: int = 550
    dense_steps: int = 350
    batch_size: int = 64
    lr: float = 4e-3
    seed: int = 0

    def learning_rate(self, step: int) -> float:
        return self.lr * min(1.0, (step + 1) / 50, 3 * (self.steps - step) / self.steps)


@dataclass
class Row:
    """One trained variant. accuracy: share of right answers on fresh sequences, by gap; dense: at GAP, when it attends
    to all positions instead."""

    variant: str
    parameters: int
    accuracy: dict[str, float]
    dense: float | None
    loss: float
    seconds: float


def make_batch(batch_size: int, gap: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens int64 [B, S], which of them are answers, bool [S]); an answer follows its key."""

    def shuffled(high: int, count: int) -> Tensor:
        return torch.rand(batch_size, high, generator=generator).argsort(1)[:, :count]

    keys, asked = shuffled(KEYS, PAIRS), shuffled(PAIRS, QUERIES)
    values = KEYS + torch.randint(VALUES, (batch_size, PAIRS), generator=generator)
    filler = KEYS + VALUES + torch.randint(FILLERS, (batch_size, gap), generator=generator)
    pairs = torch.stack([keys, values], -1)
    questions = torch.stack([keys.gather(1, asked), values.gather(1, asked)], -1)
    tokens = torch.cat([pairs.flatten(1), filler, questions.flatten(1)], 1)
    is_answer = torch.zeros(tokens.shape[1], dtype=torch.bool)
    is_answer[2 * PAIRS + gap + 1 :: 2] = True
    return tokens, is_answer


def answer(model: CSA2ForCausalLM, batch: tuple[Tensor, Tensor], run_block: RunBlock | None) -> tuple[Tensor, Tensor]:
    """Logits float32 [B, QUERIES, vocab] of the answers, and the answers, int64 [B, QUERIES]."""
    device = model.embed.weight.device
    tokens, is_answer = (tensor.to(device) for tensor in batch)
    logits = model(tokens, run_block=run_block)
    return logits[:, :-1][:, is_answer[1:]].float(), tokens[:, is_answer]


def train_variant(variant: str, setup: Setup, device: torch.device, console: Console) -> Row:
    """Train from the seed, printing every 50th step, and measure."""
    torch.manual_seed(setup.seed)
    model = CSA2ForCausalLM(MODEL, dtype=torch.float32).to(device)
    enable_distillation(model, variant == DISTILLED)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(setup.seed)
    begin, loss = time.perf_counter(), torch.zeros(())
    for step in range(setup.steps):
        attends = reader("window" if variant == WINDOW else "dense" if step < setup.dense_steps else "sparse")
        losses = DistillationLosses("dense", inner=attends) if variant == DISTILLED else None
        batch = make_batch(setup.batch_size, GAP, generator)
        logits, answers = answer(model, batch, attends if losses is None else losses.run_block)
        loss = cross_entropy(logits.flatten(0, 1), answers.flatten())
        (loss if losses is None else loss + losses.total()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = setup.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            right = (logits.argmax(-1) == answers).float().mean().item()
            more = "" if losses is None else f", distillation {losses.total().item():.3f}"
            console.print(f"{variant}, step {step + 1}: loss {loss.item():.3f}, right {right:.3f}{more}")
    seconds = round(time.perf_counter() - begin, 1)
    own = reader("window" if variant == WINDOW else "sparse")
    accuracies = {str(gap): accuracy(model, own, gap, setup.seed) for gap in (GAP, LONG_GAP)}
    dense = None if variant == WINDOW else accuracy(model, reader("dense"), GAP, setup.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Row(variant, parameters, accuracies, dense, loss.item(), seconds)


@torch.no_grad()
def accuracy(model: CSA2ForCausalLM, run_block: RunBlock, gap: int, seed: int, batches: int = 16) -> float:
    """Share of right answers to QUERIES questions of each of 64 x batches fresh sequences."""
    generator = torch.Generator().manual_seed(1_000_003 + seed)
    right = 0.0
    for _ in range(batches):
        logits, answers = answer(model, make_batch(64, gap, generator), run_block)
        right += (logits.argmax(-1) == answers).float().mean().item() / batches
    return right


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(help="Of each variant.")] = Setup.steps,
    dense_steps: Annotated[int, typer.Option(help="First steps that attend to all positions.")] = Setup.dense_steps,
    batch_size: Annotated[int, typer.Option(help="Sequences a step.")] = Setup.batch_size,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = Setup.lr,
    seed: Annotated[int, typer.Option(help="Of weights and sequences.")] = 0,
    variants: Annotated[str, typer.Option(help="Which to train, with commas between.")] = ",".join(VARIANTS),
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    show: Annotated[Path | None, typer.Option(help="Print the table of a file instead.")] = None,
) -> None:
    """Train the variants, print the table and write it."""
    console = Console(highlight=False, width=120)
    if show is not None:
        console.print(table_of(read_result(show, Row.__dataclass_fields__)))
        return
    chosen = variants.split(",")
    unknown = [name for name in chosen if name not in VARIANTS]
    if unknown:
        named, allowed = ", ".join(map(repr, unknown)), ", ".join(VARIANTS)
        raise typer.BadParameter(f"{named} is no variant; allowed are {allowed}", param_hint="--variants")
    place, setup = require_device(device), Setup(steps, dense_steps, batch_size, lr, seed)
    report: dict[str, Any] = {
        **provenance(place),
        "setup": asdict(setup),
        "task": {"pairs": PAIRS, "queries": QUERIES, "gap": GAP, "keys": KEYS, "values": VALUES},
        "model": MODEL.to_dict(),
        "chance": 1 / VALUES,
        "rows": [asdict(train_variant(variant, setup, place, console)) for variant in chosen],
    }
    console.print(table_of(report))
    path = results_path(place, "recall") if output is None else output
    write_result(path, report)


def table_of(report: dict[str, Any]) -> Table:
    """The report's rows."""
    gaps = list(report["rows"][0]["accuracy"])
    headings = ("variant", *(f"gap {gap}" for gap in gaps), "dense", "loss", "seconds")
    table = make_table(f"Right answers; chance is {report['chance']:.4f}", headings, left=("variant",))
    for row in report["rows"]:
        accuracies = (f"{row['accuracy'][gap]:.3f}" for gap in gaps)
        others = number(row["dense"], ".3f"), f"{row['loss']:.3f}", f"{row['seconds']:.0f}"
        table.add_row(row["variant"], *accuracies, *others)
    return table


if __name__ == "__main__":
    typer.run(main)
