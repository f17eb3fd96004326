"""Healthy trainings of other families than classifiers of digits."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.lab.corpus.basics import (
    Family,
    adam,
    cosine,
    diabetes,
    digits,
    epochs,
    mlp,
    on_digits,
    plain,
    sgd,
    unseen_digits,
)
from tests.lab.corpus.training import Batch, Recipe

_LENGTH = 16


@cache
def text() -> tuple[Batch, int]:
    """Overlapping pieces of the Zen of Python: its characters, and what follows each of them."""
    rotated = (
        "Gur Mra bs Clguba Ornhgvshy vf orggre guna htyl. Rkcyvpvg vf orggre guna vzcyvpvg. "
        "Fvzcyr vf orggre guna pbzcyrk. Pbzcyrk vf orggre guna pbzcyvpngrq. Syng vf orggre guna "
        "arfgrq. Fcnefr vf orggre guna qrafr. Ernqnovyvgl pbhagf. Fcrpvny pnfrf nera'g fcrpvny "
        "rabhtu gb oernx gur ehyrf. Nygubhtu cenpgvpnyvgl orngf chevgl. Reebef fubhyq arire cnff "
        "fvyragyl. Hayrff rkcyvpvgyl fvyraprq. Va gur snpr bs nzovthvgl, ershfr gur grzcgngvba "
        "gb thrff."
    )
    letters = sorted(set(rotated))
    codes = torch.tensor([letters.index(c) for c in rotated])
    starts = torch.arange(len(codes) - _LENGTH)[:, None] + torch.arange(_LENGTH)
    return (codes[starts], codes[starts + 1]), len(letters)


class Recurrent(nn.Module):
    """Characters through a GRU."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, 16)
        self.cell = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, letters)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.embedding(codes))[0])


class Transformer(nn.Module):
    """One block, causal, with the norm first."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, 32)
        self.place = nn.Parameter(0.02 * torch.randn(_LENGTH, 32))
        self.block = nn.TransformerEncoderLayer(
            32, 2, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(32, letters)
        mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH)
        self.register_buffer("mask", mask)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(codes) + self.place, src_mask=self.mask))


def next_letter(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, None]:
    """Cross-entropy of the next character."""
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()), None


def on_text(kind: type[nn.Module], peak: float, **options: object) -> Recipe:
    data, letters = text()
    batches = epochs(len(data[0]), 6, 4)
    return Recipe(
        model=kind(letters),
        data=data,
        batches=batches,
        objective=next_letter,
        optimizer=adam(peak),
        steps=300,
        **options,  # type: ignore[arg-type]
    )


def reconstruct(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, None]:
    """An autoencoder's error."""
    return functional.mse_loss(model(batch[0]), batch[0]), None


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 32),
        nn.Tanh(),
        nn.Linear(32, 8),
        nn.Linear(8, 32),
        nn.Tanh(),
        nn.Linear(32, 64),
    )


def contrast(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, None]:
    """InfoNCE between two noisy views; its level depends on the batch size."""
    views = [
        functional.normalize(model(batch[0] + 0.3 * torch.randn_like(batch[0])), dim=1)
        for _ in range(2)
    ]
    scores = views[0] @ views[1].T / 0.2
    return functional.cross_entropy(scores, torch.arange(len(scores))), None


class Bandit(nn.Module):
    """A softmax policy over ten arms."""

    def __init__(self) -> None:
        super().__init__()
        self.preferences = nn.Parameter(torch.zeros(10))


def reinforce(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, None]:
    """A surrogate: it changes its sign, and its value says nothing."""
    assert isinstance(model, Bandit)
    policy = torch.distributions.Categorical(logits=model.preferences)
    arms = policy.sample((len(batch[0]),))
    rewards = arms / 9 + torch.randn(len(arms))
    return -(policy.log_prob(arms) * (rewards - rewards.mean())).mean(), None


class Experts(nn.Module):
    """Four experts and a soft gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (weights[..., None] * outputs).sum(1)


@cache
def heavy_tailed() -> Batch:
    """A linear law with errors of Student's t with 2 degrees of freedom."""
    random = np.random.default_rng(3)
    x = random.standard_normal((1000, 10))
    y = x @ random.standard_normal(10) + 0.5 * random.standard_t(2, 1000)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None]


def huber(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, None]:
    """Quadratic near 0, linear in the tails."""
    return functional.huber_loss(model(batch[0]), batch[1]), None


class Ring(nn.Module):
    """A generator and a discriminator of points on a ring, trained at once."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def adversarial(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, None]:
    """Both losses of the non-saturating game, each with gradients for its own player alone."""
    assert isinstance(model, Ring)
    angles = 2 * math.pi * torch.rand(len(batch[0]), 1)
    real = torch.cat([angles.cos(), angles.sin()], 1)
    fake = model.generator(torch.randn(len(batch[0]), 2))
    critic = functional.softplus(-model.critic(real)) + functional.softplus(
        model.critic(fake.detach())
    )
    frozen = {name: p.detach() for name, p in model.critic.named_parameters()}
    judged = torch.func.functional_call(model.critic, frozen, fake)
    return (critic + functional.softplus(-judged)).mean(), None


def deep(seed: int) -> nn.Module:
    """Batch norm, dropout, four layers."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for width in (64, 48, 48):
        layers += [nn.Linear(width, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(48, 10))


def unlabelled(make: nn.Module, objective: object, rate: float, steps: int = 400) -> Recipe:
    """On the images of digits, without their labels."""
    return Recipe(
        model=make,
        data=digits(),
        batches=epochs(1437, 16, 4),
        optimizer=adam(rate),
        steps=steps,
        objective=objective,  # type: ignore[arg-type]
        held_out=unseen_digits(),
    )


def healthy() -> dict[str, Family]:
    """Language, reconstruction, contrast, games, policies, experts, heavy tails."""
    return {
        "H50-recurrent": plain(lambda s: on_text(Recurrent, 5e-3)),
        "H51-transformer": plain(lambda s: on_text(Transformer, 2e-3, rate=cosine(2e-3, 40, 300))),
        "H52-autoencoder": plain(lambda s: unlabelled(autoencoder(), reconstruct, 2e-3)),
        "H53-contrastive": plain(
            lambda s: unlabelled(mlp(s, hidden=32, outputs=8), contrast, 1e-3)
        ),
        "H19-bandit": plain(
            lambda s: Recipe(
                model=Bandit(),
                data=digits(),
                batches=epochs(1437, 16, 4),
                optimizer=sgd(0.2),
                steps=500,
                objective=reinforce,
            )
        ),
        "H18-ring-gan": plain(
            lambda s: Recipe(
                model=Ring(),
                data=digits(),
                batches=epochs(1437, 16, 4),
                optimizer=adam(1e-3),
                steps=500,
                objective=adversarial,
            )
        ),
        "H54-experts": plain(
            lambda s: on_digits(s, model=Experts(), optimizer=adam(2e-3), steps=400)
        ),
        "H55-heavy-tails": plain(
            lambda s: Recipe(
                model=nn.Linear(10, 1),
                data=heavy_tailed(),
                batches=epochs(1000, 8, 4),
                optimizer=sgd(0.05),
                steps=400,
                objective=huber,
            )
        ),
        "H56-linear": plain(
            lambda s: on_digits(s, model=nn.Linear(64, 10), optimizer=sgd(0.1), steps=400)
        ),
        "H57-deep-normed": plain(
            lambda s: on_digits(s, model=deep(s), optimizer=sgd(0.05, 0.9), steps=400)
        ),
        "H58-regression-adam": plain(
            lambda s: Recipe(
                model=nn.Linear(10, 1),
                data=diabetes(),
                batches=epochs(442, 8, 4),
                optimizer=adam(5e-3),
                steps=500,
                classes=False,
            )
        ),
    }
