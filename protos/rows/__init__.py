"""The codec of rows, one for the wire, the caches and the disk, and its compression."""
