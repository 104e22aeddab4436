"""Code that all programs share.

This is the contract between the programs: messages, the codec of rows, errors, transport and access
control. It is also the common part of the services: options, logging, metrics pages, an HTTP
server, and the processes of vLLM.
"""

import os

# gRPC restarts its poller in every forked child. Python may have closed the poller's descriptor
# there: the child then prints a line of gRPC's log and aborts before it runs its command. Without
# the restart, a forked child of a process with connections cannot use gRPC, and `require_unforked`
# in rpc/channel.py refuses calls there. gRPC reads the variable once, when it is imported, so
# `clients` imports this package first.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
