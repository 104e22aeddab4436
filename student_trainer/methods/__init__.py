"""The training methods, one file each. Each file lists what one step does, in order."""
