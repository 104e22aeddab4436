"""Jobs on this machine without a server: run directories, their events, `run` and `preview`."""
