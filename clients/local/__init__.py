"""Jobs on this machine without a server: `run`, `preview`, run directories and their events."""
