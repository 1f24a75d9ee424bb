"""nanoGPT's documented run on a CPU (characters of Shakespeare, 2000 steps) as whole processes: ours, and the same
written out in torch after nanoGPT's own train.py and model.py (github.com/karpathy/nanoGPT).
"""

import math
import re
import sys
import tempfile
from pathlib import Path

import numpy as np

from jaxformer.benchmarks.suite import Suite, process
from jaxformer.errors import ConfigError

LAYERS, HEADS, WIDTH, LENGTH, ROWS, STEPS = 4, 4, 128, 64, 12, 2000


def contestants(options) -> Suite:
    """Whole processes, from text to held-out loss, which each prints; ours finds neither tokens nor programs made."""
    if options.text is None:
        raise ConfigError("--suite=shakespeare needs --text=FILE, the text to train on")
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ConfigError("--suite=shakespeare needs torch: pip install 'jaxformer[peers]'") from None

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            flags = [f"--config.data.files={options.text}", f"--config.data.cache_dir={folder}/cache"]
            flags += [f"--config.workdir={folder}/run", "--config.compilation_cache=False"]
            said = process("-m", "jaxformer", "pretrain", "gpt_shakespeare_char", *flags)
        print("jaxformer: held out", re.findall(r"held out: loss ([\d.]+)", said)[-1])

    def peer() -> None:
        said = process("-m", "jaxformer.benchmarks.shakespeare", str(options.text))
        print("torch: held out", said.strip())

    return Suite({"nanoGPT's run in torch": peer, "jaxformer": ours}, "tokens", STEPS * ROWS * LENGTH, whole=True)


def torch_run(path: Path) -> float:
    """nanoGPT's run; the held-out loss that it reports last, nats per character."""
    import torch
    from torch import nn
    from torch.nn import functional as F  # noqa: N812 (torch's own name)

    torch.manual_seed(1337)
    text = path.read_text()
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    ids = np.array([number[character] for character in text], np.uint16)
    split = int(0.9 * len(ids))
    train, held_out = ids[:split], ids[split:]

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1, self.norm_2 = Norm(), Norm()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x):
            rows, length, _ = x.shape
            parts = self.qkv(self.norm_1(x)).split(WIDTH, 2)
            q, k, v = (part.view(rows, length, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).contiguous().view(rows, length, WIDTH))
            return x + self.down(F.gelu(self.up(self.norm_2(x))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(len(characters), WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = Norm(), nn.Linear(WIDTH, len(characters), bias=False)
            self.tokens.weight = self.head.weight
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, inputs, targets):
            x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def batch(data):
        starts = torch.randint(len(data) - LENGTH, (ROWS,))
        rows = np.stack([data[i : i + LENGTH + 1].astype(np.int64) for i in starts])
        return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])

    @torch.no_grad()
    def estimate(data):
        return float(np.mean([model(*batch(data)).item() for _ in range(20)]))

    model = GPT()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    found = math.nan
    for step in range(STEPS + 1):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 100) / (STEPS - 100)))
        rate = 1e-3 * (step + 1) / 101 if step < 100 else 1e-4 + cosine * 9e-4
        for group in optimizer.param_groups:
            group["lr"] = rate
        if step % 250 == 0:
            _, found = estimate(train), estimate(held_out)
        loss = model(*batch(train))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # for its log
    return found


if __name__ == "__main__":
    print(f"{torch_run(Path(sys.argv[1])):.4f}")
