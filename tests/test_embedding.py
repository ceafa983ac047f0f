"""Embeddings are torch's, and so is their gradient, by whichever kernel."""

import pytest
import torch
from torch import nn

from elman.language_model import LanguageModel
from elman.language_model.embedding import Embedding
from elman.training import Optimisation, Reading, Settings, Training

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def gradient(layer: nn.Embedding, ids: torch.Tensor, pull: torch.Tensor) -> torch.Tensor:
    layer.weight.grad = None
    layer(ids).backward(pull)
    assert layer.weight.grad is not None
    return layer.weight.grad


def test_a_models_embeddings_are_torchs():
    model = LanguageModel(7, embedding_size=5, hidden_size=4)
    assert isinstance(model.embedding, nn.Embedding)
    ids = torch.tensor([[3, 3, 6], [0, 3, 1]])
    plain = nn.Embedding(7, 5)
    plain.load_state_dict(model.embedding.state_dict())
    pull = torch.randn(2, 3, 5)
    assert torch.equal(model.embedding(ids), plain(ids))
    assert torch.equal(gradient(model.embedding, ids, pull), gradient(plain, ids, pull))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("tokens", "width", "shape"),
    [(2, 1, (1, 1)), (65, 64, (64, 32)), (256, 100, (90, 91)), (9, 33, (7,))],
)
def test_on_a_gpu_the_gradient_of_few_tokens_is_theirs(tokens, width, shape):
    torch.manual_seed(1)
    layer = Embedding(tokens, width, device="cuda")
    ids = torch.randint(tokens, shape, device="cuda").movedim(0, -1)  # not as they lie in memory
    pull = torch.randn(width, *ids.shape, device="cuda").movedim(0, -1)
    exact = torch.zeros(tokens, width, dtype=torch.float64, device="cuda")
    exact.index_add_(0, ids.reshape(-1), pull.reshape(-1, width).double())
    assert type(layer(ids).grad_fn).__name__ == "_RowsBackward"
    found = gradient(layer, ids, pull)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, gradient(layer, ids, pull)), "twice the same bits"


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu_gradients_of_gradients_and_many_tokens_are_torchs():
    layer, ids = Embedding(11, 4, device="cuda"), torch.randint(11, (5, 3), device="cuda")
    (first,) = torch.autograd.grad(layer(ids).pow(3).sum(), layer.weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), layer.weight)
    counted = torch.bincount(ids.reshape(-1), minlength=11)[:, None]
    torch.testing.assert_close(second, 6 * layer.weight.detach() * counted)
    many = Embedding(1000, 4, device="cuda")
    assert type(many(ids).grad_fn).__name__ == "EmbeddingBackward0"
    with torch.no_grad():
        assert layer(ids).grad_fn is None


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu_a_training_with_embeddings_goes_as_on_a_cpu():
    def losses(device):
        torch.manual_seed(3)
        model = LanguageModel(11, embedding_size=12, hidden_size=16, cell="lstm", tied=False)
        ids = torch.randint(11, (600,), generator=torch.Generator().manual_seed(1))
        rule = Optimisation(optimizer="adamw", learning_rate=0.01)
        made = Training(
            model.to(device),
            ids,
            None,
            Settings(epochs=2, reading=Reading(6, 11), optimisation=rule),
        )
        return torch.tensor([r.nats for r in made.records() if r.kind == "update"])

    torch.testing.assert_close(losses("cuda"), losses("cpu"), rtol=2e-2, atol=2e-3)  # TF32
