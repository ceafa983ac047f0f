"""N-gram models: what counting can do, measured in the same units as the networks.

counts.py     how often each k-gram occurs, in sorted arrays
smoothing.py  from counts to probabilities: Laplace, Kneser–Ney
backoff.py    the table of probabilities and how to read it
arpa.py       the file format that other toolkits read
model.py      NgramModel, which is all of it together
"""

from elman.counting.ngram.model import NgramModel

__all__ = ["NgramModel"]
