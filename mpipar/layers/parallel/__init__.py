"""Every way to cut a layer over ranks, a class each: the barriers are lines in these files."""
