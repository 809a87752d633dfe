"""A comparison that misbehaves on demand, so that the worker process around it can be put to the test."""

import mmap
import os
import signal
import sys
import time

kept = []


def same(true, answer):
    command, _, argument = answer.partition(":")
    if command == "hang":
        # Python sees no signal here: what a huge power of an integer does.
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGPROF})
        while True:
            pass
    elif command == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif command == "sleep":
        time.sleep(3600)
    elif command == "die":
        os._exit(7)
    elif command == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif command == "memory":
        bytearray(1 << 34)
    elif command == "leak":
        try:
            kept.append(mmap.mmap(-1, 160 << 20))
        except OSError:
            raise MemoryError from None
    elif command == "raise":
        raise ValueError("cannot compare")
    elif command == "recurse":
        return same(true, answer)
    elif command == "print":
        print('{"right": true}', flush=True)
        sys.stderr.write("noise\n")
    elif command == "write":
        with open(argument, "w") as file:
            file.write("x")
    elif command == "environment":
        return true == os.environ.get(argument, "absent")
    return true == answer
