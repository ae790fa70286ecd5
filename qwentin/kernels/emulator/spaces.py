"""Numbers of the machine: its warps, and where its address spaces lie. Shared and local addresses are small; generic ones of those spaces lie in windows."""

WARP = 32
WARPGROUP = 128
SHARED_BASE = 1024                    # the first KiB of a block's shared memory is the system's (sm_90 and up)
SHARED_WINDOW, LOCAL_WINDOW = 0x7E00 << 32, 0x7D00 << 32
FIRST_BUFFER = 0x7F00 << 32
