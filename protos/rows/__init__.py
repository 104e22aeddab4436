"""The codec of rows and its compression. The wire, the caches and the disk use the same format."""
