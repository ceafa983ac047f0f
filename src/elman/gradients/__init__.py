"""Gradients through time: what is carried, what is kept, and the equations behind both."""
