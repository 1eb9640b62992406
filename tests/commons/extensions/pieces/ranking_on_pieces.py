"""The small ranking model on samples that are cut into pieces."""

from typing import Any

import torch

from tests.commons.pipeline.ranking_pipelines import RankingDense, RankingModel, attended, sharded


class RankingOnPieces(RankingModel):
    def __init__(self) -> None:
        super().__init__()
        dense, self.dense = self.dense, DenseOnPieces()
        self.dense.load_state_dict(dense.state_dict())


class DenseOnPieces(RankingDense):
    """Fetches the keys and values of tokens that its pieces see on other ranks."""

    def attend(self, q, k, v, lengths, batch):
        pieces = batch.pieces
        if pieces is None:
            return super().attend(q, k, v, lengths, batch)
        fetch = pieces.fetch(pieces.all_rows()["last_token"], q.device)
        landed = fetch.start(k[:, None], v[:, None]).land()[:, :, 0]
        keys, values = torch.cat([k, landed[:, 0]]), torch.cat([v, landed[:, 1]])
        seen = dict(
            zip(
                fetch.piece_rows.tolist(),
                torch.from_numpy(fetch.key_tokens).split(fetch.piece_keys),
                strict=True,
            )
        )
        rows, place = [], 0
        for row, length in enumerate(lengths):
            own = torch.arange(place, place + length)
            tokens, first = seen.get(row, own), int(pieces.rows["first_token"][row])
            rows.append(attended(q[own], keys[tokens], values[tokens], first if row in seen else 0))
            place += length
        return torch.cat(rows) + 0 * landed.sum()  # the backward of a fetch is collective, too


def sharded_model_for_pieces(learning_rate: float = 0.01) -> tuple[Any, Any]:
    """Returns the model and its optimizer. Collective over all ranks."""
    return sharded(RankingOnPieces(), learning_rate)
