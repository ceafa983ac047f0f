"""How the site and the notebooks are made from `docs/`: pages in, executed pages out."""
