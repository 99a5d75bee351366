"""One product, cut over ranks in every way."""
