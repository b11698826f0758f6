"""Conversations as a run writes them: ids, and a mask of what to learn beside them."""

from collections.abc import Mapping, Sequence

from dali_pipes.text.chat import ChatEncoder, ChatTemplate, Learn, parse_conversation
from dali_pipes.text.documents import Document
from dali_pipes.text.encoder import Encoded
from dali_pipes.text.tokenizer import LoadedTokenizer


class ConversationEncoder:
    """An `Encoder` of whole records; what ends a conversation is the template's. One with nothing to learn is dropped.

    template: None for records of two strings, prompt and completion, which `eos_id` then ends.
    Raises what `ChatEncoder` and `parse_conversation` raise.
    """

    record_key = None
    has_mask = True

    def __init__(
        self,
        tokenizer: LoadedTokenizer,
        template: ChatTemplate | None,
        learn: Learn,
        eos_id: int | None,
        learn_thoughts: bool = True,
    ) -> None:
        self._encoder = ChatEncoder(tokenizer.library, template, learn, eos_id=eos_id, learn_thoughts=learn_thoughts)
        self.largest_id = tokenizer.largest_id
        self.settings: Mapping[str, str | int | None] = {
            **({} if learn_thoughts else {"learn_thoughts": False}),
            "tokenizer": tokenizer.sha256,
            "eos_id": None if template else eos_id,
            "learn": learn,
            "chat_template": template.sha256 if template else None,
            # Some templates write the date into the system message.
            "date": f"{template.now:%Y-%m-%d}" if template and "strftime_now" in template.variables else None,
        }

    def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
        """Ids and mask of each conversation, None for one in which nothing is learned."""
        conversations = [parse_conversation(document.content, document.place) for document in documents]
        return [None if encoded is None else Encoded(*encoded) for encoded in self._encoder.encode_batch(conversations)]
