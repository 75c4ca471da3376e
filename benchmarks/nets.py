"""Small nets as users bring them, and the tasks that any_net.py trains them on."""

import os
import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from baffle import Dataset, Source
from baffle.core.arrays import I64
from baffle.data.sources import load

VALIDATION = 5
"""Every fifth training sample is for choosing rates. It is not trained on then."""

LENGTH, VOCABULARY, KINDS = 12, 24, 4
"""Of the made-up sentences: tokens of a sentence, different tokens, and kinds of tokens."""


class Fire(nn.Module):
    """A block of SqueezeNet: few channels, from which convolutions of two sizes make many."""

    def __init__(self, channels: int, few: int, many: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, few, 1)
        self.narrow = nn.Conv2d(few, many, 1)
        self.wide = nn.Conv2d(few, many, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.squeeze(x))
        return torch.relu(torch.cat([self.narrow(x), self.wide(x)], 1))


def squeezenet(classes: int) -> nn.Module:
    """Two Fire blocks without normalisation."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Fire(8, 4, 8), nn.MaxPool2d(2), Fire(16, 4, 8)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes)),
    )


def three_fires(classes: int) -> nn.Module:
    """The same with one block more."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Fire(8, 4, 8), nn.MaxPool2d(2), Fire(16, 4, 8), Fire(16, 4, 8)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes)),
    )


def six_layers(classes: int) -> nn.Module:
    """Four convolutions and two linear layers, without normalisation."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes)),
    )


def plain(depth: int, classes: int, width: int = 32) -> nn.Module:
    """Linear layers with ReLU between them."""
    inner = [layer for _ in range(depth - 2) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), *inner, nn.Linear(width, classes))


def mlp(classes: int) -> nn.Module:
    """Two linear layers, for images of 32 × 32."""
    return nn.Sequential(nn.Flatten(), nn.Linear(1024, 32), nn.ReLU(), nn.Linear(32, classes))


def four_layers(classes: int) -> nn.Module:
    return plain(4, classes)


def eight_layers(classes: int) -> nn.Module:
    return plain(8, classes)


class Attending(nn.Module):
    """A layer of a transformer, its norms first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        output: Tensor = x + self.narrow(torch.relu(self.wide(self.after(x))))
        return output


class Transformer(nn.Module):
    """One layer of attention over embedded tokens and their places."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.inner, self.last = Attending(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.inner(self.tokens(x) + self.places.weight).mean(1))
        return output


class Seeing(nn.Module):
    """Two layers of attention over an image of 32 × 32 as eight tokens of four rows each."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Linear(128, width), nn.Embedding(8, width)
        self.inner, self.last = nn.Sequential(Attending(width), Attending(width)), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens(x.reshape(-1, 8, 128))
        output: Tensor = self.last(self.inner(tokens + self.places.weight).mean(1))
        return output


def seeing(classes: int) -> nn.Module:
    return Seeing(classes)


def transformer(classes: int) -> nn.Module:
    return Transformer(classes)


class Recurrent(nn.Module):
    """An LSTM over the rows of an image of 8 × 8."""

    def __init__(self, classes: int, width: int = 24) -> None:
        super().__init__()
        self.inner, self.last = nn.LSTM(8, width, batch_first=True), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.inner(x.reshape(-1, 8, 8))[0][:, -1])
        return output


class Tied(nn.Module):
    """An MLP whose two inner layers have the same weights."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x.flatten(1)))
        output: Tensor = self.last(torch.relu(self.inner(torch.relu(self.inner(x)))))
        return output


WORDS, QUESTION, KINDS_OF_QUESTIONS = 2000, 16, 6
"""Of the TREC questions: the most frequent words are known, and so many of a question are read."""


class Asking(nn.Module):
    """One layer of attention over the words of a question; padding is no word."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(QUESTION, width)
        self.inner, self.last = (
            nn.TransformerEncoderLayer(width, 2, 64, 0.0, batch_first=True),
            nn.Linear(width, classes),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        read = self.inner(self.words(x) + self.places.weight, src_key_padding_mask=~mask)
        output: Tensor = self.last((read * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return output


def bert(classes: int) -> nn.Module:
    """Hugging Face's BERT, small, at random initial weights: pip install transformers."""
    transformers = import_module("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=QUESTION, num_labels=classes, **sizes)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def questions(part: str) -> tuple[I64, I64]:
    """The words of the TREC questions as numbers, 0 for padding and 1 for words that are not known, and their kinds."""
    folder = Path(os.environ["BAFFLE_DATA"]) / "text"

    def read(name: str) -> list[tuple[int, list[str]]]:
        lines = (folder / f"trec.{name}").read_text().splitlines()
        return [(int(kind), re.findall(r"\w+|\?", words.lower())) for kind, words in (li.split(" ", 1) for li in lines)]

    counts = Counter(word for _, words in read("train") for word in words)
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common(WORDS - 2), 2)}
    found = read(part)
    x = np.zeros((len(found), QUESTION), np.int64)
    for row, (_, words) in zip(x, found, strict=True):
        known = [numbers.get(word, 1) for word in words[:QUESTION]]
        row[: len(known)] = known
    return x, np.array([kind for kind, _ in found])


def sentences(count: int, seed: int) -> tuple[I64, I64]:
    """Random tokens, each of one of four kinds. The label is the kind that occurs most often, where the first half of a
    sentence counts twice; in a tie, the first such kind."""
    random = np.random.default_rng(seed)
    x = random.integers(0, VOCABULARY, (count, LENGTH))
    votes = np.where(np.arange(LENGTH) < LENGTH // 2, 2, 1)
    counts = np.stack([((x % KINDS == kind) * votes).sum(1) for kind in range(KINDS)], 1)
    return x, counts.argmax(1)


def _of_sentences() -> Source:
    train, test = (Dataset(*sentences(count, seed), lambda x: x) for count, seed in ((4000, 0), (1000, 1)))
    return Source(train, test, classes=KINDS)


def _held_out(source: Source) -> Source:
    """The same task, tested on a part of the training samples."""
    train = source.train
    chosen = np.arange(len(train)) % VALIDATION == 0
    kept, held = (Dataset(train.samples[own], train.labels[own], train.prepare) for own in (~chosen, chosen))
    return Source(kept, held, classes=source.classes)


def images() -> Source:
    return load("digits", None, 0)


def images_held_out() -> Source:
    return _held_out(images())


def tokens() -> Source:
    return _of_sentences()


def tokens_held_out() -> Source:
    return _held_out(tokens())
