"""Jobs on a distill server: the client, the values it returns, and the download of artifacts."""
