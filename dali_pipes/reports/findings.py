"""What can be wrong with a corpus that opened: its ids, their type, its files, its documents."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus
from dali_pipes.corpus.file_names import some
from dali_pipes.documents import Documents, find_documents
from dali_pipes.errors import CorpusError, CorpusFormatError
from dali_pipes.reports.document_lengths import LengthReport
from dali_pipes.reports.id_scan import SAMPLE_IDS, Expected, Faults, IdScan
from dali_pipes.reports.problem import Problem, Problems, problem_at

Int64Array = npt.NDArray[np.int64]

LARGEST_VOCABULARY = 1 << 22
"""No published tokenizer comes near; ids beyond are rather those of another type."""
FORMULA_NOTE = "the ids come from a formula and are not read: a sample of them was looked at"
_MASK_PART = 1 << 22
_FEWEST_IDS = 64  # that tell something about their type


def tokens_in_files(corpus: Corpus) -> Int64Array:
    """Ids in each of `corpus.files`: int64 (F,)."""
    starts, files = corpus.extents
    counts = np.zeros(len(corpus.files), np.int64)
    np.add.at(counts, files, np.diff(starts))
    return counts


def documents_of(corpus: Corpus, start_id: int | None, problems: Problems, notes: list[str]) -> Documents | None:
    """The documents, None if nothing tells where they end or they cannot be read; a warning goes to `notes`. Blocks."""
    if corpus.num_documents is None and (corpus.is_synthetic or (corpus.eos_id is None and start_id is None)):
        return None
    try:
        documents = find_documents(corpus, start_id=start_id)
    except CorpusError as error:
        problems.add(Problem("unreadable", f"documents cannot be found: {error}"))
        return None
    if documents.warning is not None:
        notes.append(documents.warning)
    return documents


def expected_ids(corpus: Corpus, documents: Documents | None, start_id: int | None) -> Expected | None:
    """Where both an index and an id are known: the places in which the index says that the id is."""
    if documents is None or documents.source != "index":
        return None
    begins, ends = documents.offsets[:-1], documents.offsets[1:]
    has_tokens = begins < ends
    if corpus.eos_id is not None:
        return Expected(ends[has_tokens] - 1, corpus.eos_id)
    return None if start_id is None else Expected(begins[has_tokens], start_id)


def add_id_problems(
    problems: Problems, corpus: Corpus, scan: IdScan, vocab_size: int | None, documents: Documents | None
) -> None:
    """Ids out of range, documents of an index that lack the id they end or begin with, what cannot be read."""
    expected = "0 <= id" if vocab_size is None else f"0 <= id < vocab_size = {vocab_size}"
    for fault in scan.out_of_range.first:
        what = f"is {fault.value}, expected {expected}"
        problem = problem_at(corpus, "id_range", fault.position, what)
        problems.add(_not_read(corpus, "id_range", *fault) if fault.reason else problem)
    for fault in scan.unexpected.first:
        assert documents is not None
        document = int(np.searchsorted(documents.offsets, fault.position, side="right")) - 1
        what = f"is {fault.value}, not the id that document {document} of the index should have there"
        problems.add(problem_at(corpus, "document_end", fault.position, what, document))
    for fault in scan.unreadable.first:
        problems.add(_not_read(corpus, "unreadable", *fault))
    for kind, faults in (
        ("id_range", scan.out_of_range),
        ("document_end", scan.unexpected),
        ("unreadable", scan.unreadable),
    ):
        problems.count_more(kind, _not_listed(faults))


def add_type_problems(problems: Problems, corpus: Corpus, scan: IdScan) -> None:
    """Ids that look as if they were of another type than the one that they are read as."""
    place, name = corpus.files[0], corpus.dtype.name
    if scan.largest is not None and scan.largest >= LARGEST_VOCABULARY:
        assert scan.largest_position is not None
        what = f"is {scan.largest}, read as {name}; no vocabulary is so large: do the ids have another type?"
        problems.add(problem_at(corpus, "dtype", scan.largest_position, what))
    try:
        ids = corpus.tokens(0, min(corpus.num_tokens, SAMPLE_IDS) // 2 * 2)
    except CorpusError:
        return  # what cannot be read is another problem
    if len(ids) >= _FEWEST_IDS and not ids[1::2].any() and np.count_nonzero(ids) > len(ids) // 4:
        message = f"{place}: every second id is 0, read as {name}: are the ids of a type twice as wide?"
        problems.add(Problem("dtype", message, place, 0, 0))


def add_file_problems(problems: Problems, corpus: Corpus) -> None:
    """Files without a token, and ids that an index leaves out."""
    counts = tokens_in_files(corpus).tolist()
    for path, count, stored_type in zip(corpus.files, counts, corpus.file_types, strict=True):
        if not count:
            problems.add(Problem("empty_file", f"{path}: holds no token; was it copied or made in full?", path))
        if corpus.format == "megatron":
            stored = path.stat().st_size // stored_type.itemsize
            if stored > count:
                message = (
                    f"{path}: the index leaves {stored - count} of its {stored} ids out: its lengths do not reach from "
                    f"one pointer to the next, so they are damaged unless it was made to skip ids"
                )
                problems.add(Problem("index", message, path))


def add_zero_problems(problems: Problems, corpus: Corpus) -> None:
    """Files whose last ids are all 0, as many as opening them looks at or more. Blocks: reads all of these."""
    starts, files = corpus.extents
    for number in corpus.ending_in_zeros:
        (extent,) = np.flatnonzero(files == number).tolist()  # such files have one run of ids
        begin, end = starts[extent : extent + 2].tolist()
        try:
            first = _zeros_from(corpus, begin, end)
        except CorpusError:
            continue  # what cannot be read is another problem
        what = f"is the first of {end - first} ids that are all 0, up to the end of the file: was it filled to its end?"
        problems.add(problem_at(corpus, "zeros", first, what))


def _zeros_from(corpus: Corpus, begin: int, end: int) -> int:
    """Position from which on all ids are 0, of those from `begin` to before `end`; `end` where the last one is not."""
    while end > begin:
        start = max(begin, end - SAMPLE_IDS)
        others = np.flatnonzero(corpus.tokens(start, end - start))
        if len(others):
            return start + int(others[-1]) + 1
        end = start
    return end


def add_mask_problems(problems: Problems, corpus: Corpus) -> None:
    """Entries of the loss mask that are neither 0 nor 1, the first of each stretch. Blocks: reads all of it."""
    if corpus.loss_mask is None:
        return
    part = np.empty(min(_MASK_PART, corpus.num_tokens), np.uint8)
    for start in range(0, corpus.num_tokens, len(part)):
        count = min(len(part), corpus.num_tokens - start)
        try:
            corpus.loss_mask.read_pieces(np.array([start]), np.array([count]), np.array([0]), part[:count])
        except CorpusFormatError as error:
            problems.add(Problem("loss_mask", str(error), Path(str(error).partition(": ")[0])))


def add_document_problems(
    problems: Problems, notes: list[str], corpus: Corpus, documents: Documents, lengths: LengthReport | None
) -> None:
    """Documents of an index that do not tile the files, a corpus that ends within a document, empty documents."""
    if documents.source == "index":
        _add_index_problems(problems, corpus, documents)
    elif documents.source.startswith("end"):
        _add_tail_problems(problems, notes, corpus, documents)
    else:
        _add_head_problem(problems, notes, corpus, documents)
    if lengths is not None and lengths.has_many_empty:
        share = f"{lengths.empty} of {lengths.documents} documents are empty ({lengths.empty / lengths.documents:.1%})"
        problems.add(Problem("empty_documents", f"{share}; did the texts come through?"))


def _add_index_problems(problems: Problems, corpus: Corpus, documents: Documents) -> None:
    """Offsets must rise from 0 to the end of the corpus, and each file's end must be one of them."""
    offsets = documents.offsets
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    for document in falls.tolist():
        begin, end = offsets[document : document + 2].tolist()
        message = f"document {document} ends at corpus position {end}, before its start, {begin}"
        problems.add(Problem("index", message, position=begin, document=document))
    if len(falls):
        return
    for what, found, wanted in (("begins", offsets[0], 0), ("ends", offsets[-1], corpus.num_tokens)):
        if found != wanted:
            message = f"the index {what} at corpus position {found}, the corpus at {wanted}"
            problems.add(Problem("index", message, position=int(found)))
    counts = tokens_in_files(corpus)
    ends = np.cumsum(counts)
    at = np.minimum(np.searchsorted(offsets, ends), len(offsets) - 1)
    for number in np.flatnonzero(offsets[at] != ends).tolist():
        path, document = corpus.files[number], int(at[number]) - 1
        message = f"{path}: document {document} does not end with the file, at corpus position {ends[number]}"
        problems.add(Problem("index", message, path, int(counts[number]), int(ends[number]), document))


def _add_tail_problems(problems: Problems, notes: list[str], corpus: Corpus, documents: Documents) -> None:
    """Where an id ends documents, the last token of the corpus is that id; of other files it usually is, too."""
    counts = tokens_in_files(corpus)
    numbers = np.flatnonzero(counts)
    lasts = np.empty((len(numbers), 1), corpus.dtype)
    try:
        corpus.read_rows(np.cumsum(counts)[numbers] - 1, lasts)
    except CorpusError:
        return
    unended = numbers[lasts[:, 0] != corpus.eos_id].tolist()
    if unended and unended[-1] == numbers[-1]:
        begin, end = documents.offsets[-2:].tolist()
        what = (
            f"begins the last document, whose {end - begin} tokens do not end with id {corpus.eos_id}: is it cut off?"
        )
        problems.add(problem_at(corpus, "no_end_id", begin, what, documents.num_documents - 1))
        unended.pop()
    _note_run_on(notes, corpus, unended, f"do not end with id {corpus.eos_id}")


def _note_run_on(notes: list[str], corpus: Corpus, numbers: list[int], what: str) -> None:
    """numbers: of files whose last document goes on in the next file, or first one began in the file before."""
    if numbers:
        names = some([str(corpus.files[number]) for number in numbers])
        notes.append(
            f"{len(numbers)} of {len(corpus.files)} files {what}{names}, so a document goes on from one file into the "
            "next; set documents_end_at_files = true if documents end with their files"
        )


def _add_head_problem(problems: Problems, notes: list[str], corpus: Corpus, documents: Documents) -> None:
    token_id = int(documents.source.rpartition(" ")[2])
    first = int(corpus.tokens(0, 1)[0])
    if first != token_id:
        what = f"is {first}, but every document should begin with id {token_id}"
        problems.add(problem_at(corpus, "no_start_id", 0, what, 0))
    counts = tokens_in_files(corpus)
    numbers = np.flatnonzero(counts)[1:]
    firsts = np.empty((len(numbers), 1), corpus.dtype)
    try:
        corpus.read_rows((np.cumsum(counts) - counts)[numbers], firsts)
    except CorpusError:
        return
    _note_run_on(notes, corpus, numbers[firsts[:, 0] != token_id].tolist(), f"do not begin with id {token_id}")


def _not_read(corpus: Corpus, kind: str, position: int, count: int, reason: str) -> Problem:
    place = corpus.locate(position)
    message = f"{reason} ({count} ids from corpus position {position} on were not looked at)"
    return Problem(kind, message, place.file, place.offset, position)


def _not_listed(faults: Faults) -> int:
    return faults.count - len(faults.first)
