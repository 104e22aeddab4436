"""Jobs on a distill server: the client, its return values, and the download of artifacts."""
