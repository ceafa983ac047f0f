"""Models that count: frequencies and Zipf's law, Markov chains, smoothed n-grams."""
