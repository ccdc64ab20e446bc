"""Networks that the tests train on nodes and here: of digits, of a language, and a recurrent one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class DigitsNetwork(nn.Module):
    """Two convolutions over pictures of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Dropout(0.25), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]

    @staticmethod
    def batch(rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        digits = torch.randint(0, 10, (rows,))
        pictures = torch.randn(rows, 1, 8, 8) + (digits / 5 - 1).reshape(-1, 1, 1, 1)
        return pictures, digits


class LanguageModel(nn.Module):
    """A decoder of two layers whose output has the weights of its embedding."""

    WORDS, WIDTH, LENGTH = 23, 16, 12

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(self.WORDS, self.WIDTH)
        self.places = nn.Parameter(torch.randn(self.LENGTH, self.WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            self.WIDTH, 4, 32, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(self.WIDTH, self.WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.words(x) + self.places[: x.shape[1]]
        return self.out(self.layers(hidden, mask=mask, is_causal=True)).flatten(0, 1)  # type: ignore[no-any-return]

    @classmethod
    def batch(cls, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.arange(cls.LENGTH + 1) * torch.randint(1, 5, (rows, 1)) % cls.WORDS
        return text[:, :-1], text[:, 1:].flatten()


class Recurrent(nn.Module):
    """Two layers of LSTM over packed sequences, and a GRU over what they give, padded."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, num_layers=2, batch_first=True, dropout=0.2, bidirectional=True)
        self.gru = nn.GRU(16, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = range(x.shape[1], x.shape[1] - len(x), -1)
        packed = pack_padded_sequence(x, list(lengths), batch_first=True)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        _, last = self.gru(hidden)
        return self.head(last[-1])  # type: ignore[no-any-return]

    @staticmethod
    def batch(rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, 7, 3)
        return x, x.sum((1, 2)).abs().long() % 4


NETWORKS = [DigitsNetwork, LanguageModel, Recurrent]


def with_dropout(network: nn.Module, share: float) -> nn.Module:
    """A network that drops this share wherever it drops something."""
    for each in network.modules():
        if isinstance(each, nn.Dropout):
            each.p = share
        elif isinstance(each, (nn.MultiheadAttention, nn.LSTM)):
            each.dropout = share
    return network
