# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_ext.launch.join --head 10.0.0.1:6379`: wait for a Ray head, and print this node's address seen there.

`ray start --address` gives up on a head that listens but is not registered yet. Exit status: 0, or 1 when the head is
not there in time.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time


def wait_for_head(head: str, timeout_s: float) -> str:
    """Wait until the head has a living node, and say by which of our addresses it is reached.

    Args:
        head: host:port of Ray's head.

    Raises:
        TimeoutError: says what was missing last.
    """
    from ray._raylet import GcsClient

    host, _, port = head.rpartition(":")
    end, reason = time.monotonic() + timeout_s, "it was not asked"
    while time.monotonic() < end:
        try:
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                own = connection.getsockname()[0]
            # What `ray start` itself asks (Ray 2.60); there is no public call that needs no node of our own.
            if GcsClient(address=head).get_all_node_info(timeout=10):
                return own
            reason = "it listens, but no node of it is registered"
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else repr(error)
        time.sleep(0.5)
    raise TimeoutError(f"{socket.gethostname()}: Ray's head at {head} is not there after {timeout_s:g} s: {reason}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--head", required=True, help="host:port of Ray's head")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds (300)")
    arguments = parser.parse_args()
    try:
        print(wait_for_head(arguments.head, arguments.timeout))
    except TimeoutError as error:
        sys.exit(f"verl_ext.launch.join: {error}")


if __name__ == "__main__":
    main()
