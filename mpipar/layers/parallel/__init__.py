"""Every way to cut a layer over ranks, a file each: the barriers are lines in these files."""
