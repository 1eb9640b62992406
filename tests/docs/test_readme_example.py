"""The README's example logs the loss of the step over all ranks."""

import contextlib
import io
import sys

import torch.distributed as dist

from tests.docs.pages import Block, blocks
from tests.docs.python_blocks import run_page


def test_the_readme_logs_the_mean_loss_of_all_ranks(pools):
    example = [block for block in blocks("python") if block.page == "README.md"]
    (first, loss), (second, _) = pools(2).run(_logged_and_expected, example)
    assert first.startswith(f"loss {loss:.4f} ")
    assert second == ""


def _logged_and_expected(example: list[Block]) -> tuple[str, float]:
    """Returns what this rank prints, and the mean over all samples of what the prelude's model computes."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        problem = run_page("readme", example)
    assert not problem, problem
    page = sys.modules["docs_page"]
    squares = (page.output.detach() - 1).square().sum()  # labels are 1
    dist.all_reduce(squares)
    return printed.getvalue(), float(squares) / page.global_loss_tokens
