"""Workload-balanced data-parallel training for TorchRec: the library that all models share.

A checkout imports it as `commons`. An installation imports it as `workload_balancer`.
"""

import sys

PROJECT = "recsys-workload-balancer"
NAME = __name__  # for messages that name a module

for _other in {"commons", "workload_balancer"} - {NAME}:
    if getattr(sys.modules.get(_other), "PROJECT", None) == PROJECT:  # not another project's commons
        raise ImportError(
            f"this process has imported the library as {_other}, and now imports it as {NAME}: its classes "
            f"would exist twice. Import it by one name, {_other}"
        )
