"""Train a small model on Python's own documentation and standard library, and measure it.

    python benchmarks/train_demo.py --out demo                                   # one GPU, two to four minutes
    python benchmarks/train_demo.py --out smoke --minutes 0.05 --quick           # that it works, and fills the caches
    python benchmarks/train_demo.py --out trial --device cpu --minutes 0.5       # a trial with a tiny model

One process: collects the text of the Python that runs it, trains with `csa2 train`'s own Trainer (bfloat16, indexers
distilled), and measures held-out bits per byte with the sparse attention, with dense attention over all compressed
positions and with the window alone, and how much of the dense attention's own choice the indexers find: as trained,
and with the indexers as they were drawn. --minutes is the time until the training ends, compiling included: where
--steps would take longer, fewer are fixed at the end of the warm-up, from the time that its steps took, so that the
learning rate's cosine ends with them. Many more steps are not better: the text is 8 MB, and a model that had read it 20
times (5148 steps, weight decay 0.1) knew it by heart and needed 3.14 bits a byte for new documentation, not 1.48.

Writes six files to --out: model.safetensors (bfloat16) and config.json, also once a minute while it trains; README.md,
a model card; report.json; log.jsonl; held-out.txt, what it is measured on. --text also writes what it trains on.
Held-out documents are whole files and topics: no training text shares one, and a topic whose lines occur in another
one is never held out.

Where something goes wrong, "problem" of the report says what, and the exit code is 1: blocks that cannot be compiled
run eagerly; a batch whose loss or gradient is not finite is left out, and the fifth one ends the training; any other
error after the first step leaves the model and the report as they were then.
"""

import json
import math
import statistics
import sys
import sysconfig
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from timing import provenance, require_device

from csa2_compiled import CSA2Config, CSA2ForCausalLM, TrainConfig, Trainer, generate, load_model, save_model
from csa2_compiled.model_files import WEIGHTS_NAME, copy_in_dtype
from csa2_compiled.quality import QualityReport, evaluate
from csa2_compiled.train import StepReport, TrainingError
from csa2_compiled.train_log import TrainLog

FORM_FEED = b"\f"
# Tests, generated tables and machine settings are no text to learn from; topics come by themselves.
LEFT_OUT = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__")
)
MODEL = CSA2Config(
    hidden_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    head_dim=64,
    qk_rope_head_dim=32,
    q_lora_rank=128,
    o_groups=4,
    o_lora_rank=64,
    sliding_window=64,
    compress_ratios=(0, 2, 2, 1, 1, 1, 1, 1),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 5),
    index_n_heads=4,
    index_head_dim=64,
    index_topk=64,
    candidate_source_layer_id=3,
    candidate_topk_blocks=32,
    candidate_block_size=8,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=16384,
    intermediate_size=576,
    initializer_range=0.04,
)
SETTINGS = TrainConfig(
    steps=838,  # 3.2 epochs
    batch_size=32,
    seq_len=1024,
    lr=2e-3,
    warmup=100,
    min_lr_ratio=0.05,
    weight_decay=1.0,
    val_fraction=0.0,  # whole documents are held out instead
    val_every=0,
    save_every=0,
    dtype="bfloat16",
    distill=True,
    distill_warmup=1_000_000,
    distill_every=2,  # such a step takes about twice as long
)
PROMPTS = (
    'The "with" statement\n********************\n\nThe "with" statement is used to',
    "Emulating container types\n*************************\n\nThe following methods can be defined to",
    'The "select" statement\n**********************\n\nThe "select" statement is used to',  # there is none
)
_SAVE_SECONDS = 60.0
_UNTIMED_STEPS = 5  # the first ones compile and allocate
_LEAST_STEPS = 2  # one that distills and one that does not
_MOST_SKIPS = 5


@dataclass(frozen=True)
class Text:
    """Documents by kind: "documentation" (topics of pydoc) and "library" (source files)."""

    training: dict[str, list[bytes]]
    held_out: dict[str, list[bytes]]

    def documents(self, topic_repeats: int) -> list[bytes]:
        """What is trained on: each topic several times, each file once."""
        return self.training["documentation"] * topic_repeats + self.training["library"]

    def few_held_out(self) -> "Text":
        """The same with one held-out document of each kind, the one whose length is nearest to 4096 bytes."""
        nearest = {kind: min(docs, key=lambda doc: abs(len(doc) - 4096)) for kind, docs in self.held_out.items()}
        return replace(self, held_out={kind: [doc] for kind, doc in nearest.items()})

    def describe(self) -> dict[str, dict[str, dict[str, int]]]:
        parts = {"training": self.training, "held_out": self.held_out}
        return {
            part: {kind: {"documents": len(docs), "bytes": sum(map(len, docs))} for kind, docs in kinds.items()}
            for part, kinds in parts.items()
        }

    def check(self) -> None:
        """Raises ValueError when a kind has no held-out document, or one that is trained on."""
        trained = {document for documents in self.training.values() for document in documents}
        for kind, documents in self.held_out.items():
            if not documents or not trained.isdisjoint(documents):
                raise ValueError(f"held-out {kind} is {'trained on, in part' if documents else 'empty'}")

    def write_held_out(self, path: Path) -> None:
        """Write the held-out documents of all kinds, between form feeds, as `csa2 evaluate --text` reads them."""
        path.write_bytes(FORM_FEED.join(document for documents in self.held_out.values() for document in documents))

    def write_training(self, folder: Path) -> None:
        """Write a file a kind, documents between form feeds, as `csa2 train --text` reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        for kind, documents in self.training.items():
            (folder / f"{kind}.txt").write_bytes(FORM_FEED.join(documents))


def collect_text() -> Text:
    """The text of the Python that runs this, in the same order everywhere, each document once.

    Held out are every 40th file and, of the topics that share no lines, every third by length: about 50 KB. Raises
    ValueError as `Text.check`.
    """
    topics = _topics()
    unique = [i for i, shared in enumerate(_shared_lines(topics)) if shared < 0.05]
    held_out_topics = set(sorted(unique, key=lambda i: len(topics[i]))[1::3])
    contents = (path.read_bytes().replace(FORM_FEED, b"") for path in _library_files())
    files = list(dict.fromkeys(data for data in contents if data.strip()))
    held_out_files = set(range(20, len(files), 40))
    parts = (("documentation", topics, held_out_topics), ("library", files, held_out_files))
    text = Text(
        {kind: [doc for i, doc in enumerate(docs) if i not in held_out] for kind, docs, held_out in parts},
        {kind: [doc for i, doc in enumerate(docs) if i in held_out] for kind, docs, held_out in parts},
    )
    text.check()
    return text


def _topics() -> list[bytes]:
    from pydoc_data.topics import topics

    return list(dict.fromkeys(topics[name].replace("\f", "").encode() for name in sorted(topics)))


def _shared_lines(topics: Sequence[bytes]) -> list[float]:
    """Of each topic, the share of its longer lines that another topic has too."""
    lines = [{line for line in topic.splitlines() if len(line) >= 40} for topic in topics]
    counts = Counter(line for own in lines for line in own)
    return [sum(counts[line] > 1 for line in own) / len(own) if own else 1.0 for own in lines]


def _library_files() -> Iterator[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if path.is_symlink() or not path.is_file():
            continue
        if not LEFT_OUT.intersection(inside.parts[:-1]) and not inside.name.startswith("_sysconfigdata"):
            yield path


def trial_of(cfg: CSA2Config, settings: TrainConfig) -> tuple[CSA2Config, TrainConfig]:
    """The same in small, for a CPU."""
    small: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "q_lora_rank": 32}
    small |= {"o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 32, "intermediate_size": 96}
    small |= {"index_topk": 16, "candidate_topk_blocks": 8, "sliding_window": 16}
    return replace(cfg, **small), replace(settings, batch_size=2, seq_len=128, warmup=12, dtype="float32")


class Run:
    """One training run against a clock. problems: why it is not what was asked for; skips: batches left out."""

    def __init__(self, trainer: Trainer, out: Path, deadline: float, console: Console) -> None:
        self.trainer, self.out, self.deadline, self.console = trainer, out, deadline, console
        self.losses: list[dict[str, float | None]] = []
        self.num_bytes = 0
        self.times: list[float] = []
        self.skips: list[str] = []
        self.problems: list[str] = []
        self._distillation_loss: float | None = None

    def train(self) -> None:
        """Train until the deadline, a few steps at least. Those there is time for are fixed when the warm-up ends."""
        saved, log = time.monotonic(), TrainLog(self.out / "log.jsonl", 0)
        ends = False
        while not ends:
            begin = time.monotonic()
            report = self._step()
            if report is None and len(self.skips) < _MOST_SKIPS:
                continue
            if report is None:
                self.problems.append(f"the training ended early: {self.skips[-1]}")
                break
            self.times.append(time.monotonic() - begin)
            log.write(report)
            self.num_bytes += report.num_bytes
            if report.step == self.trainer.cfg.warmup:
                self._fix_steps(self.times[_UNTIMED_STEPS:])
            late = time.monotonic() >= self.deadline and report.step >= _LEAST_STEPS
            ends = late or report.step == self.trainer.cfg.steps
            self._note(report, ends)
            if time.monotonic() - saved > _SAVE_SECONDS:
                self.save()
                saved = time.monotonic()

    def save(self) -> None:
        """Write the model as it is now, in bfloat16."""
        save_model(copy_in_dtype(self.trainer.model, torch.bfloat16), self.out)

    def _step(self) -> StepReport | None:
        """The next step; None when its batch was left out, or is to be tried again eagerly."""
        try:
            return self.trainer.step()
        except TrainingError as error:
            if not self.times and len(self.skips) == _MOST_SKIPS - 1:
                raise
            self.skips.append(str(error))
            self.console.print(f"A batch is left out: {error}.")
            self.trainer.skip_batch()
        except Exception as error:
            if self.times or not self.trainer.cfg.compile:
                raise
            traceback.print_exc()
            self.problems.append(f"the blocks run eagerly, as the first compiled step failed: {reason_of(error)}")
            self.console.print(f"PROBLEM: {self.problems[-1]}")
            self.trainer.run_eagerly()
        return None

    def _note(self, report: StepReport, ends: bool) -> None:
        """Keep and print the losses of some steps, with the newest distillation loss."""
        if report.distillation_loss is not None:
            self._distillation_loss = report.distillation_loss
        if ends or report.step == 1 or report.step % (10 if report.step <= 100 else 50) == 0:
            losses = {"loss": report.loss, "distillation_loss": self._distillation_loss}
            self.losses.append({"step": report.step, **losses})
            shown = ", ".join(f"{name} {value:.4f}" for name, value in losses.items() if value is not None)
            rate = f"{report.bytes_per_second:.0f} bytes/s"
            self.console.print(f"Step {report.step}: {shown}, lr {report.lr:.2e}, {rate}")

    def _fix_steps(self, times: Sequence[float]) -> None:
        seconds = statistics.fmean(sorted(times)[: max(1, len(times) - 2)])
        left = self.deadline - time.monotonic()
        possible = self.trainer.steps_done + max(1, math.floor(0.97 * left / seconds))
        steps = min(possible, self.trainer.cfg.steps)
        self.trainer.cfg = replace(self.trainer.cfg, steps=steps)
        self.console.print(f"{seconds * 1e3:.0f} ms a step, {left:.0f} s left: {steps} steps in all.")


def measure(model: CSA2ForCausalLM, text: Text, seq_len: int, batch_size: int) -> dict[str, QualityReport]:
    """The held-out text of each kind."""
    return {kind: evaluate(model, documents, seq_len, batch_size) for kind, documents in text.held_out.items()}


def indexer_tensors(model: CSA2ForCausalLM) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if ".indexer." in name}


def continuations(model: CSA2ForCausalLM, prompts: Sequence[str], count: int) -> list[dict[str, str]]:
    """What the model adds to each prompt: `count` bytes."""

    def continuation(prompt: str) -> str:
        tokens = generate(model, prompt.encode(), count, temperature=0.7, top_p=0.95, seed=0)
        return b"".join(bytes(token.tolist()) for token in tokens).decode(errors="replace")

    return [{"prompt": prompt, "continuation": continuation(prompt)} for prompt in prompts]


def main(
    out: Annotated[Path, typer.Option(help="Directory to write to.")],
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    minutes: Annotated[float, typer.Option(help="Until the training ends.")] = 5.0,
    compile_: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile each kind of block; on CUDA unless said.")
    ] = None,
    distill: Annotated[bool, typer.Option("--distill/--no-distill", help="Train the indexers.")] = True,
    topic_repeats: Annotated[int, typer.Option(help="How often an epoch has each topic.")] = 2,
    steps: Annotated[int, typer.Option(help="Training steps, unless the minutes are over before.")] = SETTINGS.steps,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = SETTINGS.lr,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = SETTINGS.weight_decay,
    seed: Annotated[int, typer.Option(help="Of weights and order.")] = 0,
    text_folder: Annotated[Path | None, typer.Option("--text", help="Also write what is trained on there.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure on two documents; the samples are short.")] = False,
) -> None:
    """Train the model and write it, its card and its report to a directory."""
    begin, console, place = time.monotonic(), Console(highlight=False, markup=False, width=120), require_device(device)
    compiles = place.type == "cuda" if compile_ is None else compile_
    settings = replace(
        SETTINGS, compile=compiles, distill=distill, steps=steps, lr=lr, weight_decay=weight_decay, seed=seed
    )
    cfg, settings = (MODEL, settings) if place.type == "cuda" else trial_of(MODEL, settings)
    quick = quick or place.type != "cuda"
    text = collect_text()
    out.mkdir(parents=True, exist_ok=True)
    text.write_held_out(out / "held-out.txt")
    if text_folder is not None:
        text.write_training(text_folder)
    torch.manual_seed(seed)
    model = CSA2ForCausalLM(cfg, dtype=torch.float32).to(place)
    drawn = indexer_tensors(model) if distill else None
    run = Run(Trainer(model, text.documents(topic_repeats), settings, out), out, begin + 60 * minutes, console)
    console.print(f"{sum(p.numel() for p in model.parameters())} parameters; {text.describe()}")

    facts = {"text": {"python": sys.version.split()[0], "topic_repeats": topic_repeats, **text.describe()}}
    try:
        run.train()
    except Exception as error:
        run.problems.append(reason_of(error))
        if run.times:
            keep(run, facts, begin)
        raise
    report = keep(run, facts, begin)
    measured = text.few_held_out() if quick else text
    try:
        describe(report, out, place, measured, drawn, 60 if quick else 400, console)
    except Exception as error:
        report["problem"] = "; ".join((*run.problems, reason_of(error)))
        _write(out, report)
        raise
    report["seconds_in_all"] = round(time.monotonic() - begin, 1)
    _write(out, report)
    console.print(f"{report['weight_bytes']} bytes of weights; model, card and report are in {out}.")
    if run.problems:
        console.print(f"PROBLEM: {report['problem']}")
        raise typer.Exit(1)


def keep(run: Run, facts: dict[str, Any], begin: float) -> dict[str, Any]:
    """Write the report of a training so far, then its model; returns the report."""
    trainer = run.trainer
    report: dict[str, Any] = {
        "provenance": provenance(trainer.device),
        "problem": "; ".join(run.problems) or None,
        "skipped": run.skips,
        "config": trainer.model.cfg.to_dict(),
        "settings": asdict(trainer.cfg),
        **facts,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "steps": trainer.steps_done,
        "planned_steps": trainer.cfg.steps,
        "epoch": trainer.position.epoch,
        "tokens": run.num_bytes,
        "seconds": round(time.monotonic() - begin, 1),
        "step_seconds": round(statistics.median(run.times), 4),
        "losses": run.losses,
    }
    _write(run.out, report)
    run.save()
    report["weight_bytes"] = (run.out / WEIGHTS_NAME).stat().st_size
    _write(run.out, report)
    return report


def describe(
    report: dict[str, Any],
    out: Path,
    device: torch.device,
    text: Text,
    drawn: dict[str, torch.Tensor] | None,
    sample_bytes: int,
    console: Console,
) -> None:
    """Measure the model that was saved, and write report and card as they grow.

    drawn: the indexers before the training, to be measured beside the trained ones.
    """
    model, seq_len = load_model(out, device).eval(), report["settings"]["seq_len"]
    batch_size = 8 if device.type == "cuda" else 1
    quality = report["quality"] = {"trained": _as_values(measure(model, text, seq_len, batch_size))}
    _write(out, report)
    if drawn is not None:
        undistilled = load_model(out, device).eval()
        undistilled.load_state_dict(drawn, strict=False)
        quality["indexer as drawn"] = _as_values(measure(undistilled, text, seq_len, batch_size))
    _write(out, report)
    (out / "README.md").write_text(model_card(report), encoding="utf-8")
    console.print(quality_table(quality))
    report["samples"] = continuations(model, PROMPTS, sample_bytes)
    (out / "README.md").write_text(model_card(report), encoding="utf-8")
    for sample in report["samples"]:
        console.print(f"{sample['prompt']}[...]{sample['continuation']}\n")


def reason_of(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')[:300]}"


def _as_values(quality: dict[str, QualityReport]) -> dict[str, Any]:
    return {kind: report.to_dict() for kind, report in quality.items()}


def _write(out: Path, report: dict[str, Any]) -> None:
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def quality_rows(quality: dict[str, Any]) -> list[tuple[str, ...]]:
    """(indexer, text, bits per byte sparse, dense, window, recall, random recall), a row a measurement."""
    rows = []
    for indexer, kinds in quality.items():
        for kind, values in kinds.items():
            bits = (f"{values['bits_per_byte'][name]:.4f}" for name in ("sparse", "dense", "window"))
            recalls = ("-" if values[name] is None else f"{values[name]:.3f}" for name in ("recall", "random"))
            rows.append((indexer, kind, *bits, *recalls))
    return rows


HEADERS = ("indexer", "held-out text", "sparse", "dense", "window only", "recall", "random")


def quality_table(quality: dict[str, Any]) -> Table:
    table = Table(*HEADERS, title="Bits per byte, and recall of the dense attention's own best positions")
    for row in quality_rows(quality):
        table.add_row(*row)
    return table


def model_card(report: dict[str, Any]) -> str:
    """The README.md that goes with the weights; with a continuation once the report has one."""
    provenance, text, settings = report["provenance"], report["text"], report["settings"]
    training, config = text["training"], report["config"]
    quality = "\n".join(
        f"| {' | '.join(row)} |" for row in (HEADERS, ("---",) * len(HEADERS), *quality_rows(report["quality"]))
    )
    last = report["losses"][-1]
    distilled = "" if last["distillation_loss"] is None else f"; distillation {last['distillation_loss']:.3f} nats"
    python, rows = text["python"], f"{settings['batch_size']} x {settings['seq_len']}"
    steps = f"{report['steps']} steps of {rows} bytes, {report['tokens'] / 1e6:.1f} million bytes in all"
    sample = report["samples"][-1] if "samples" in report else None
    continuation = (
        ""
        if sample is None
        else f"""**A continuation** (temperature 0.7, top-p 0.95), of a statement that Python does not have:

```text
{sample["prompt"]}{sample["continuation"]}
```

"""
    )
    what = f"""A byte-level language model that shows CSA2 attention at work. {report["parameters"] / 1e6:.1f} million
        parameters in bfloat16 ({report["weight_bytes"] / 1e6:.1f} MB), {config["num_hidden_layers"]} layers in which
        all four roles occur, window {config["sliding_window"]}, {config["index_topk"]} selected positions, compress
        ratios 2 and 1, candidates. It continues text in the manner of Python's documentation. It states nothing
        reliably, and is of no use but this."""
    data = f"""**Data.** Python {python}'s own text: the topics of pydoc ({training["documentation"]["documents"]}
        documents, {training["documentation"]["bytes"]} bytes, each {text["topic_repeats"]} times an epoch) and the
        sources of the standard library without tests and codec tables ({training["library"]["documents"]} files,
        {training["library"]["bytes"]} bytes). Copyright Python Software Foundation and contributors; under the PSF
        License Version 2, which allows copies and derivative works with that notice
        (https://docs.python.org/3/license.html)."""
    every = f"distilled in the dense stage, every {settings['distill_every']} steps"
    trained = f"""**Training.** {steps}, AdamW, peak learning rate {settings["lr"]:g}, weight decay
        {settings["weight_decay"]:g}, {settings["dtype"]}, indexers {every if settings["distill"] else "left as drawn"}.
        Last loss {last["loss"]:.3f} nats a byte{distilled}. {report["seconds"]:.0f} s on {provenance["device"]}, torch
        {provenance["torch"]}, {provenance["date"]}."""
    return f"""# A small CSA2 model of Python's documentation

{_wrap(what)}

```python
from csa2_compiled import generate, load_demo_model

model = load_demo_model()
for token in generate(model, b"The for loop ", 100, temperature=0.7, top_p=0.95):
    print(bytes(token.tolist()).decode(errors="replace"), end="", flush=True)
```

{_wrap(data)}

{_wrap(trained)}

**Measured** on held-out files and topics, bits per byte: the attention as trained ("sparse"), over all visible
compressed positions ("dense"), over none ("window only"). Recall: the share of a selection that is among the positions
to which the layer's own dense attention gives most, and what a random selection would have.

{quality}

{continuation}Made by `python benchmarks/train_demo.py`; the weights are under the MIT licence, like the code.
"""


def _wrap(paragraph: str) -> str:
    """A paragraph in lines of at most 120 characters, whatever its figures are."""
    return textwrap.fill(" ".join(paragraph.split()), 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    typer.run(main)
