"""Numbers of the machine: the size of a warp, and where the address spaces lie.

Shared and local addresses are small; generic addresses of those spaces lie in windows of their own.
"""

WARP = 32
WARPGROUP = 128
SHARED_BASE = 1024                    # the first KiB of a block's shared memory is the system's (sm_90 and up)
SHARED_WINDOW, LOCAL_WINDOW = 0x7E00 << 32, 0x7D00 << 32
FIRST_BUFFER = 0x7F00 << 32
