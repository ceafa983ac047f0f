"""Folders that are written over time: who may write there, and what was there before."""
