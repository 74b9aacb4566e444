"""Networks of the bank that transformers does not have: mixer, tables, one-dimensional convolutions."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, scaled_dot_product_attention

from covmerge_lab.bank.data import BINS, COLUMN_NAMES, COLUMNS


class Feed(nn.Module):
    """Norm, two linear layers, added to what came in."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with what the layer adds."""
        return x + self.down(gelu(self.up(self.norm(x))))


class Attend(nn.Module):
    """Norm, self-attention, added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with what the layer adds."""
        z = self.norm(x)
        q, k, v = (
            layer(z).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mixer(nn.Module):
    """An MLP-Mixer over sixteen patches of a picture `(n, 3, 16, 16)`."""

    def __init__(self, width: int = 112, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.ModuleList(Feed(16, 48) for _ in range(depth))
        self.channels = nn.ModuleList(Feed(width, 3 * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return features `(n, width)`."""
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        for place, channel in zip(self.places, self.channels, strict=True):
            x = channel(place(x.transpose(1, 2)).transpose(1, 2))
        return self.norm(x).mean(dim=1)


class Cells(nn.Module):
    """The values of a table's rows `(n, columns, 2)` as vectors: of the column, and of the bin."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.column = nn.Embedding(COLUMN_NAMES, width)
        self.bin = nn.Embedding(BINS + 1, width)

    def forward(self, rows: Tensor) -> Tensor:
        """Return `(n, columns, width)`."""
        return self.column(rows[..., 0]) + self.bin(rows[..., 1])


class TableTransformer(nn.Module):
    """A transformer over the columns of a row."""

    def __init__(self, width: int = 80, depth: int = 4) -> None:
        super().__init__()
        self.cells = Cells(width)
        self.attends = nn.ModuleList(Attend(width, 4) for _ in range(depth))
        self.feeds = nn.ModuleList(Feed(width, 3 * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def every(self, rows: Tensor) -> Tensor:
        """Return features of every column `(n, columns, width)`."""
        x = self.cells(rows)
        for attend, feed in zip(self.attends, self.feeds, strict=True):
            x = feed(attend(x))
        return self.norm(x)

    def forward(self, rows: Tensor) -> Tensor:
        """Return features `(n, width)`."""
        return self.every(rows).mean(dim=1)


class TableMLP(nn.Module):
    """A residual MLP over a row, whose columns lie in a fixed order, short rows filled up."""

    def __init__(self, width: int = 24, inner: int = 160, depth: int = 3) -> None:
        super().__init__()
        self.cells = Cells(width)
        self.into = nn.Linear(COLUMNS * width, inner)
        self.feeds = nn.ModuleList(Feed(inner, 2 * inner) for _ in range(depth))
        self.norm = nn.LayerNorm(inner)

    def forward(self, rows: Tensor) -> Tensor:
        """Return features `(n, inner)`."""
        cells = self.cells(rows)
        x = self.into(pad(cells, (0, 0, 0, COLUMNS - cells.shape[1])).flatten(1))
        for feed in self.feeds:
            x = feed(x)
        return self.norm(x)


class TableMixer(nn.Module):
    """An MLP-Mixer over the columns of a row, short rows filled up."""

    def __init__(self, width: int = 72, depth: int = 4) -> None:
        super().__init__()
        self.cells = Cells(width)
        self.places = nn.ModuleList(Feed(COLUMNS, 48) for _ in range(depth))
        self.channels = nn.ModuleList(Feed(width, 3 * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, rows: Tensor) -> Tensor:
        """Return features `(n, width)`."""
        cells = self.cells(rows)
        x = pad(cells, (0, 0, 0, COLUMNS - cells.shape[1]))
        for place, channel in zip(self.places, self.channels, strict=True):
            x = channel(place(x.transpose(1, 2)).transpose(1, 2))
        return self.norm(x).mean(dim=1)


class SoundNet(nn.Module):
    """One-dimensional convolutions over a sound `(n, samples)`, each of half as many places."""

    def __init__(self, widths: tuple[int, ...] = (32, 48, 64, 96, 128)) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, widths[0], 20, 8)
        pairs = pairwise(widths)
        self.convolutions = nn.ModuleList(nn.Conv1d(a, b, 5, 2, 2) for a, b in pairs)
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for width in widths)
        self.last = nn.Linear(2 * widths[-1], 128)

    def forward(self, sounds: Tensor) -> Tensor:
        """Return features `(n, 128)`."""
        x = gelu(self.norms[0](self.first(sounds[:, None])))
        for convolution, norm in zip(self.convolutions, list(self.norms)[1:], strict=True):
            x = gelu(norm(convolution(x)))
        return gelu(self.last(torch.cat((x.mean(dim=2), x.amax(dim=2)), dim=1)))
