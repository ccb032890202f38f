"""Makes the README's pictures of masks: the shipped model reads Python's own documentation.

python docs/make_images.py                     # docs/images/masks-*.png; pydoc's topics differ a little by version
"""

from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import torch

from csa2_compiled import load_demo_model
from csa2_compiled.mask_report import report_text
from csa2_compiled.masks.visualize import draw_map, draw_scores, draw_text
from csa2_compiled.run_report import Text

IMAGES = Path(__file__).parent / "images"
NUM_BYTES = 512
DPI = 110


def main() -> None:
    """Write masks-map.png, masks-text.png and masks-scores.png."""
    torch.set_num_threads(1)
    text = Text("pydoc topics", "".join(topics.values()).encode()[:NUM_BYTES], truncated=True)
    model = load_demo_model()
    report = report_text(model, text, "the shipped demo model", range(len(model.layers)), range(NUM_BYTES))
    by_role = replace(report, layers=tuple(report.layers[i] for i in (0, 1, 5)))
    pictures = {"map": draw_map(by_role), "text": draw_text(report), "scores": draw_scores(report)}
    for name, figure in pictures.items():
        path = IMAGES / f"masks-{name}.png"
        figure.savefig(path, dpi=DPI)
        print(f"written to {path}, {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
