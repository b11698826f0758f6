"""Conversations to token ids and loss masks, with the chat template of a model."""

from dali_pipes.text.chat.chat_encoder import ChatEncoder, TurnsToLearn
from dali_pipes.text.chat.conversation import Conversation, parse_conversation, template_settings
from dali_pipes.text.chat.conversation_encoder import ConversationEncoder
from dali_pipes.text.chat.template import ChatTemplate, load_template

__all__ = [
    "ChatEncoder",
    "ChatTemplate",
    "Conversation",
    "ConversationEncoder",
    "TurnsToLearn",
    "load_template",
    "parse_conversation",
    "template_settings",
]
