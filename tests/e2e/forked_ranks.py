"""Runs two ranks of a program in forks of one interpreter, and then imports the library by its other name.

python forked_ranks.py PORT CHECKOUT

The program is `program.py` beside this file, and uses the installed library. CHECKOUT has it as commons.
"""

import os
import runpy
import sys

import program
from workload_balancer.partition import karmarkar_karp, lower_bound


def main() -> None:
    _, port, checkout = sys.argv
    karmarkar_karp([2, 1], 2), lower_bound([2, 1], 2)  # compiles what both ranks call
    for rank in range(2):
        if os.fork() == 0:  # the fork ends as an interpreter does
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
            }
            runpy.run_path(program.__file__, run_name="__main__")
            return
    print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)])
    import commons

    print(commons.__doc__)
    del sys.modules["commons"]
    sys.path.insert(0, checkout)
    try:
        import commons
    except ImportError as error:
        print(f"ImportError: {error}")


if __name__ == "__main__":
    main()
