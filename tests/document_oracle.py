"""Slow and plain: documents and pieces by one loop over the tokens."""

from collections.abc import Sequence


def offsets_of(tokens: Sequence[int], kind: str, token_id: int, file_ends: Sequence[int] = ()) -> list[int]:
    """file_ends: positions where documents end, too."""
    offsets = [0]
    for position, token in enumerate(tokens):
        cut = position + 1 if kind == "end" else position
        if position in file_ends and position != offsets[-1]:
            offsets.append(position)
        if token == token_id and cut not in (0, offsets[-1]):
            offsets.append(cut)
    if offsets[-1] != len(tokens):
        offsets.append(len(tokens))
    return offsets


def pieces_of(offsets: Sequence[int], start: int, length: int) -> list[tuple[int, int, int]]:
    """(start, length, document end) of each piece of one window, token by token."""
    document_of = [
        document for document in range(len(offsets) - 1) for _ in range(offsets[document], offsets[document + 1])
    ]
    pieces: list[list[int]] = []
    for position in range(start, start + length):
        end = offsets[document_of[position] + 1]
        if pieces and pieces[-1][2] == end:
            pieces[-1][1] += 1
        else:
            pieces.append([position, 1, end])
    return [(first, count, end) for first, count, end in pieces]
