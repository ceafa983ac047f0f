"""How well a model predicts: nats, perplexity, bits per character, beside what counting does."""
