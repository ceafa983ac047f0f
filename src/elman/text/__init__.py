"""Text: where it comes from, how it is cleaned and cut into tokens, ids and windows."""
