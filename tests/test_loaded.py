"""A trained run in one's own code, against the plain model."""

import numpy as np
import pytest
import torch

import elman
from elman import generation, runs
from elman.errors import UserError
from elman.scoring import metrics

TEXT = "the naïve cat sat by the sea"
LEVELS = {"char": TEXT, "byte": TEXT, "word": "the naïve cat sat by the sea."}


@pytest.fixture(params=LEVELS)
def trained(request, tiny_run):
    return elman.load(tiny_run(level=request.param))


def plain(trained, ids):
    """log P of what follows each id, (time, vocabulary), in float64 and in one piece."""
    model = trained.run.load_model().double()
    with torch.no_grad():
        logits, _ = model(torch.tensor(np.asarray(ids, np.int64))[None])
    return logits[0].log_softmax(-1).numpy()


def test_it_is_the_run_that_was_trained(trained, tiny_run):
    run = runs.Run.open(trained.run.path)
    assert trained.vocab == run.vocab
    assert trained.config == run.config
    assert not trained.model.training
    for p, q in zip(trained.model.parameters(), run.load_model().parameters(), strict=True):
        assert torch.equal(p, q)
    assert trained.vocab.level in repr(trained)


def test_every_token_after_the_first_has_its_nats(trained):
    ids = trained.encode(TEXT)
    scored = trained.score(TEXT)
    assert scored.tokens == trained.vocab.to_tokens(ids[1:])
    want = -plain(trained, ids)[np.arange(len(ids) - 1), np.asarray(ids)[1:]]
    np.testing.assert_allclose(scored.nats, want, rtol=1e-5, atol=1e-5)
    assert list(scored) == list(zip(scored.tokens, scored.nats.tolist(), strict=True))
    assert len(scored) == len(ids) - 1
    whole = metrics.evaluate(trained.model, ids)
    assert scored.total.tokens == whole.tokens
    assert scored.total.nats == pytest.approx(whole.nats, rel=1e-6)


@pytest.mark.parametrize(
    ("context", "text"), [("the naïve cat", " sat by the sea."), ("the naïve cat ", "sat by")]
)
def test_after_a_context_the_first_token_is_scored_too(trained, context, text):
    """The space between two words is no token of its own, whichever of them brings it."""
    whole, part = trained.score(context + text), trained.score(text, context=context)
    spaced = trained.vocab.level == "word"
    assert len(part) == len(trained.encode(text.strip() if spaced else text))
    assert part.tokens == whole.tokens[-len(part) :]
    assert "<unk>" not in part.tokens
    np.testing.assert_allclose(part.nats, whole.nats[-len(part) :], rtol=1e-6, atol=1e-6)
    with pytest.raises(UserError, match="not of one kind"):
        trained.score(text, context=context.encode())


def test_a_space_at_the_end_of_a_prompt_of_words_is_the_next_words(tiny_run):
    trained = elman.load(tiny_run(level="word"))
    assert trained.next_token("the naïve ") == trained.next_token("the naïve")
    assert trained.generate("the naïve ", 5) == trained.generate("the naïve", 5)


def test_the_next_token_is_what_the_model_says(trained):
    ids = trained.encode(TEXT)
    found = trained.next_token(TEXT)
    assert sorted(found.values(), reverse=True) == list(found.values())
    assert sum(found.values()) == pytest.approx(1, abs=1e-6)
    want = np.exp(plain(trained, ids)[-1])
    got = [found[token] for token in trained.vocab.idx_to_token]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    start = generation.opening(trained.vocab)
    after_nothing = trained.next_token()
    want = np.exp(plain(trained, [start])[-1])
    got = [after_nothing[token] for token in trained.vocab.idx_to_token]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_hidden_states_and_embeddings_are_the_models(trained):
    text = TEXT * 60  # longer than what is read in one piece
    ids = trained.encode(text)
    hs = trained.hidden(text)
    assert hs.shape == (len(ids), trained.model.hidden_size)
    with torch.no_grad():
        want, _ = trained.model.states(torch.tensor(np.asarray(ids, np.int64))[None])
    torch.testing.assert_close(hs, want[:, 0], rtol=1e-5, atol=1e-6)
    assert torch.equal(trained.embeddings, trained.model.embedding.weight)
    assert trained.embeddings.shape == (len(trained.vocab), 8)
    hs.requires_grad_()  # an ordinary tensor, which may be trained on


def test_it_writes_what_the_generator_writes(trained):
    got = trained.generate("the ", 20, temperature=0.7, top_k=9, seed=3)
    want = generation.generate(
        trained.model,
        trained.encode("the" if trained.vocab.level == "word" else "the "),
        20,
        temperature=0.7,
        top_k=9,
        seed=3,
        exclude=generation.unwritten(trained.vocab),
    )
    assert got == trained.vocab.decode(list(want))
    assert got == trained.generate("the ", 20, temperature=0.7, top_k=9, seed=3)
    assert trained.generate(length=5)


def test_a_one_hot_model_has_the_columns_of_its_input_weights(tiny_run):
    trained = elman.load(tiny_run("--embedding-size", "0", "--model", "gru"))
    want = trained.model.recurrence.weight_ih_l0.T
    assert torch.equal(trained.embeddings, want)
    assert trained.embeddings.shape == (len(trained.vocab), 3 * 24)


def test_an_mlp_works_too_and_says_what_it_does_not_have(tiny_run):
    trained = elman.load(tiny_run("--model", "mlp", "--embedding-size", "0"))
    assert trained.hidden(TEXT).shape == (len(TEXT), 24)
    assert len(trained.score(TEXT)) == len(TEXT) - 1
    with pytest.raises(UserError, match="no embeddings"):
        _ = trained.embeddings


def test_it_moves_and_refuses_to_where_nothing_is(trained):
    assert trained.to("cpu") is trained
    assert trained.device == torch.device("cpu")
    with pytest.raises(UserError, match="tpu"):
        trained.to("tpu")
    with pytest.raises(UserError, match="tpu"):
        elman.load(trained.run.path, device="tpu")


def test_nothing_to_score_is_refused(trained):
    for text in ("", "t"):
        with pytest.raises(UserError, match="no token"):
            trained.score(text)
    assert len(trained.score("t", context="the ")) == 1
    with pytest.raises(UserError, match="no tokens"):
        trained.hidden("")


def test_weights_and_folders_that_are_not_there_are_refused(tiny_run, tmp_path):
    assert elman.load(tiny_run(), weights="last").model is not None
    with pytest.raises(UserError, match="unknown weights"):
        elman.load(tiny_run(), weights="worst")
    with pytest.raises(UserError, match="not a run folder"):
        elman.load(tmp_path)
