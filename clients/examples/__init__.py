"""Scripts to read and to copy from; a test runs each."""
