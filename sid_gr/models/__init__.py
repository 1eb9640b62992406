"""The SID-GR model and its retrieval."""

from sid_gr.models.beam_search import beam_search
from sid_gr.models.code_tree import CodeTree
from sid_gr.models.sid_gr import SIDGR, RetrievalOutput, SIDGRConfig

__all__ = ["SIDGR", "CodeTree", "RetrievalOutput", "SIDGRConfig", "beam_search"]
