"""Has `rank_server` fork an interpreter, and lives and ends with it.

python -I -S rank_client.py SERVER ARGUMENTS
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    server, *arguments = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + server)
    request = json.dumps([os.getcwd(), arguments, dict(os.environ)]).encode()
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], [1, 2])
    connection.sendall(request)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
    code = int.from_bytes(connection.recv(2), "big", signed=True)
    if code < 0:  # a signal ended the forked process
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
