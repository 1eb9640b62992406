"""Names that `hstu.modules` does not export: the one place where tests know its files."""

from hstu.modules import attention_tiles, triton_compiler
from hstu.modules.attention_backend import running_backend
from hstu.modules.triton_attention import triton_hstu_attention
from hstu.modules.triton_tiles import TileShape
from hstu.modules.triton_work import TritonWork
